"""Preprocessing of a trained model: from paths, Pillow images, arrays or tensors to pixels.

Files are decoded by :func:`tammes.lab.data.decode.decode` and pixels are normalised by
:class:`tammes.lab.data.augment.Augment`, as in the evaluation of a run.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tammes.lab.data.array_images import as_pillow, as_uint8, is_array, is_pillow
from tammes.lab.data.augment import Augment
from tammes.lab.data.decode import Shape, decode, reason
from tammes.lab.data.images import DataError
from tammes.lab.data.sources.folder import SUFFIXES, walk_images
from tammes.optional import require


class UnreadableImage(DataError):
    """An image cannot be used; the message is one sentence with its path or position."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name} cannot be read ({why})")
        self.name, self.why = name, why


@dataclass(frozen=True)
class Preprocess:
    """Preprocessing of a model: decodes an image to pixels, and describes the steps after that.

    A file is rotated as EXIF says, its transparent parts become white, and it is resized with
    antialiasing to just cover ``shape`` and centre-cropped. The model itself normalises the pixels.

    Args:
        shape: channels, height and width of the pixels.
        mean: mean of each channel, for values in [0, 1].
        std: standard deviation of each channel.
        crops: centre crops after normalisation: the share of each side, and the resulting size.
        flip: whether embeddings of an image and of its mirror image are averaged.
    """

    shape: Shape
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crops: tuple[tuple[float, tuple[int, int]], ...] = ()
    flip: bool = False

    @classmethod
    def of(
        cls, augment: Augment, *, mean: Iterable[float], std: Iterable[float], flip: bool
    ) -> "Preprocess":
        """Return the preprocessing of a model with this augmentation."""
        crops = tuple(augment.evaluation_crops())
        return cls(augment.shape, tuple(mean), tuple(std), crops, flip)

    def __call__(self, image: Any, name: str = "the image") -> Tensor:
        """Convert one image to pixels, uint8 ``(channels, height, width)``.

        Args:
            image: path, encoded bytes, Pillow image, array ``(height, width[, channels])`` or
                tensor ``([channels, ]height, width)``, uint8 or floating-point in [0, 1].
            name: name of the image in messages.

        Raises:
            UnreadableImage: the image cannot be used.
        """
        try:
            if isinstance(image, Tensor) and tuple(image.shape) == self.shape:
                return as_uint8(image.detach().cpu())
            if isinstance(image, os.PathLike):
                image = os.fspath(image)
            given = image if isinstance(image, str | bytes) else as_pillow(image)
            _, pixels = decode(given, self.shape)
        except Exception as error:
            if isinstance(error, ImportError):
                # A missing package is not the fault of the image.
                for package in ("numpy", "PIL.Image"):
                    require(package, extra="lab")
            raise UnreadableImage(name, reason(error)) from error
        return torch.from_numpy(pixels.copy())

    def __str__(self) -> str:
        channels, height, width = self.shape
        colour = "grey" if channels == 1 else "RGB"
        steps = [
            "rotate as EXIF says",
            f"{colour}, transparent parts white",
            f"resize (bilinear, antialiased) to just cover {height}×{width} and crop the centre",
            f"divide by 255, subtract mean {_numbers(self.mean)}, divide by std "
            f"{_numbers(self.std)}",
        ]
        steps += [
            f"crop the centre, {share:.4g} of each side, resized to {size[0]}×{size[1]}"
            for share, size in self.crops
        ]
        if self.flip:
            steps.append("average the embeddings of the image and of its mirror image")
        return "; ".join(steps)

    def as_dict(self) -> dict[str, Any]:
        """Return the preprocessing as plain values."""
        return {
            "shape": list(self.shape),
            "mean": list(self.mean),
            "std": list(self.std),
            "crops": [[share, list(size)] for share, size in self.crops],
            "flip": self.flip,
            "steps": str(self),
        }


def named_images(images: Any) -> Iterator[tuple[str, Any]]:
    """Yield each image with its name, one at a time, however many there are.

    ``images`` is one image that :class:`Preprocess` takes, a folder (all images in and below it,
    sorted by path), a four-dimensional array or tensor, or any iterable of these.
    """
    for position, image in enumerate(_each(images)):
        yield image if isinstance(image, str) else f"image {position}", image


def _each(images: Any) -> Iterator[Any]:
    if isinstance(images, str | os.PathLike):
        path = Path(images)
        if not path.is_dir():
            yield os.fspath(images)
            return
        inside = walk_images(path)
        first = next(inside, None)
        if first is None:
            raise DataError(f"{path}: there is no image in it ({', '.join(sorted(SUFFIXES))})")
        yield first
        yield from inside
    elif _is_one(images):
        yield images
    else:
        for image in images:
            yield from _each(image)


def _is_one(images: Any) -> bool:
    """Whether an object other than a path is one image."""
    if isinstance(images, Tensor) or is_array(images):
        return bool(images.ndim != 4)
    return isinstance(images, bytes) or is_pillow(images) or not isinstance(images, Iterable)


def _numbers(values: Iterable[float]) -> str:
    return "(" + ", ".join(f"{value:.4g}" for value in values) + ")"
