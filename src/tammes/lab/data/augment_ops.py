"""Augmentation operations, each driven by its own random bits.

There are three kinds, named by their method: ``move`` gives the source row and column of each
pixel, ``warp`` maps output coordinates to input coordinates, and ``paint`` changes values, which
are pixels (0 to 255) minus the mean colour.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from tammes.lab.config.typecheck import at_least, between, check_fields
from tammes.lab.data import keyed_random

Share = Annotated[float, between(0, 1)]
Size = tuple[int, int]

_LUMA = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in a grey value."""


@dataclass(frozen=True)
class PadCrop:
    """Shift an image by up to ``pad`` pixels each way: pad it, crop a window of its own size.

    Args:
        pad: pixels added on each side.
        fill: ``mean`` colour, ``zero`` for black, or ``reflect``.
    """

    pad: Annotated[int, at_least(0)] = 4
    fill: Literal["mean", "zero", "reflect"] = "mean"
    draws: ClassVar[int] = 2

    def __post_init__(self) -> None:
        check_fields(self, "pad_crop")

    def move(self, rows: Tensor, columns: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the source row and column of each pixel; -1 for none."""
        top, left = keyed_random.below(bits, 2 * self.pad + 1).unbind(1)
        return self._shift(rows, top), self._shift(columns, left)

    def _shift(self, places: Tensor, start: Tensor) -> Tensor:
        size = places.shape[1]
        source = torch.arange(size, device=places.device) + (start - self.pad)[:, None]
        if self.fill == "reflect":
            return places.gather(1, (size - 1) - ((size - 1) - source.abs()).abs())
        inside = (source >= 0) & (source < size)
        return torch.where(inside, places.gather(1, source.clamp(0, size - 1)), -1)

    def check(self, size: Size) -> None:
        """Reject padding that is too large to reflect the image."""
        if self.fill == "reflect" and self.pad >= min(size):
            raise ValueError(
                f"pad_crop expects pad to be below the side of the image with fill='reflect', "
                f"got {self.pad} for {size[0]} x {size[1]} pixels"
            )


@dataclass(frozen=True)
class Flip:
    """Mirror images horizontally.

    Args:
        p: probability of mirroring an image.
    """

    p: Share = 0.5
    draws: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_fields(self, "flip")

    def move(self, rows: Tensor, columns: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the source row and column of each pixel."""
        return rows, torch.where(_bernoulli(bits, self.p), columns.flip(1), columns)


@dataclass(frozen=True)
class Rotate:
    """Rotate about the centre; uncovered corners have the mean colour.

    Args:
        degrees: largest angle either way, anticlockwise if positive.
        to: if given, angles are between ``degrees`` and this.
    """

    degrees: float
    to: float | None = None
    draws: ClassVar[int] = 1

    def __post_init__(self) -> None:
        _check_between("rotate", "degrees", self._bounds(), -360, 360)

    def _bounds(self) -> tuple[float, float]:
        if self.to is None:
            return -abs(self.degrees), abs(self.degrees)
        return self.degrees, self.to

    def warp(self, x: Tensor, y: Tensor, size: Size, bits: Tensor | None) -> tuple[Tensor, Tensor]:
        """Map output coordinates to input coordinates, both in [-1, 1]."""
        if bits is None:
            return x, y
        angle = _between(bits[:, 0], *self._bounds()) * (math.pi / 180)
        cosine, sine = angle.cos()[:, None, None], angle.sin()[:, None, None]
        tall = size[0] / size[1]
        return cosine * x - tall * sine * y, sine / tall * x + cosine * y


@dataclass(frozen=True)
class ResizedCrop:
    """Crop a part of random area and shape, and resize it.

    The area is uniform between ``low`` and ``high``, whatever the shape; the aspect ratio is
    log-uniform among those that fit. Evaluation crops the centre, ``1/zoom`` of each side.

    Args:
        low: smallest share of the area.
        high: largest share of the area.
        size: side of the result; that of the image by default.
        ratio: largest ratio of the sides of the crop.
        zoom: enlargement in evaluation, before the centre crop.
    """

    low: float = 0.08
    high: float = 1.0
    size: Annotated[int, at_least(1)] | None = None
    ratio: Annotated[float, at_least(1)] = 4 / 3
    zoom: Annotated[float, at_least(1)] = 1.0
    draws: ClassVar[int] = 4

    def __post_init__(self) -> None:
        check_fields(self, "resized_crop")
        _check_area("resized_crop", self.low, self.high)

    def acts_in_evaluation(self, size: Size) -> bool:
        """Whether an image of this size changes in evaluation."""
        return self.zoom != 1 or (self.size is not None and size != (self.size, self.size))

    def warp(self, x: Tensor, y: Tensor, size: Size, bits: Tensor | None) -> tuple[Tensor, Tensor]:
        """Map output coordinates to input coordinates; the centre crop without random bits."""
        if bits is None:
            return x / self.zoom, y / self.zoom
        high, wide = _box(bits, self.low, self.high, self.ratio, size)
        x_start = (1 - wide) * _between(bits[:, 2], -1.0, 1.0)
        y_start = (1 - high) * _between(bits[:, 3], -1.0, 1.0)
        wide, high, x_start, y_start = (
            value[:, None, None] for value in (wide, high, x_start, y_start)
        )
        return wide * x + x_start, high * y + y_start


@dataclass(frozen=True)
class Jitter:
    """Change brightness, contrast, saturation and hue, in this order.

    The first three are multiplied by a factor uniform in ``[1 - x, 1 + x]``, or between two given
    ones. After each change, values are clamped to [0, 255]. Saturation and hue need three channels.

    Args:
        brightness: change of all values.
        contrast: change of the distance to the mean grey.
        saturation: change of the distance to grey.
        hue: largest shift around the colour circle, up to 0.5 (half of it).
    """

    brightness: float | tuple[float, float] = 0.0
    contrast: float | tuple[float, float] = 0.0
    saturation: float | tuple[float, float] = 0.0
    hue: float | tuple[float, float] = 0.0
    draws: ClassVar[int] = 4

    def __post_init__(self) -> None:
        for name in ("brightness", "contrast", "saturation", "hue"):
            value = getattr(self, name)
            if isinstance(value, (int, float)) and not 0 <= value < math.inf:
                raise ValueError(f"jitter expects {name} to be at least 0, got {value!r}")
            low, high = (-0.5, 0.5) if name == "hue" else (0.0, 1e3)
            _check_between("jitter", name, self._bounds(name), low, high)

    def _bounds(self, name: str) -> tuple[float, ...]:
        """Return the range of the factor, or of the hue shift."""
        value = getattr(self, name)
        if not isinstance(value, (int, float)):
            return tuple(value)
        return (-value, value) if name == "hue" else (1 - min(value, 1), 1 + value)

    def paint(self, images: Tensor, bits: Tensor, mean: Tensor) -> Tensor:
        """Return images with changed colours."""
        changes: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
            "brightness": lambda values, factor: factor * values,
            "contrast": _contrast,
        }
        if images.shape[1] == 3:
            changes |= {"saturation": _saturation, "hue": _shift_hue}
        identity = {"hue": (0, 0)}
        active = [
            (number, name, change)
            for number, (name, change) in enumerate(changes.items())
            if self._bounds(name) != identity.get(name, (1, 1))
        ]
        if not active:
            return images
        values = images + mean
        for number, name, change in active:
            by = _between(bits[:, number], *self._bounds(name))[:, None, None, None]
            values = change(values, by).clamp(0, 255)
        return values - mean


@dataclass(frozen=True)
class Erase:
    """Fill a rectangle of random area, shape and position.

    Args:
        p: probability of erasing a rectangle of an image.
        low: smallest share of the area.
        high: largest share of the area.
        ratio: largest ratio of the sides of the rectangle.
        fill: ``mean`` colour or ``zero`` for black.
    """

    p: Share = 0.5
    low: float = 0.02
    high: float = 0.4
    ratio: Annotated[float, at_least(1)] = 10 / 3
    fill: Literal["mean", "zero"] = "mean"
    draws: ClassVar[int] = 5

    def __post_init__(self) -> None:
        check_fields(self, "erase")
        _check_area("erase", self.low, self.high)

    def paint(self, images: Tensor, bits: Tensor, mean: Tensor) -> Tensor:
        """Return images with a filled rectangle."""
        size = (images.shape[2], images.shape[3])
        sides = _box(bits, self.low, self.high, self.ratio, size)
        erased = _bernoulli(bits[:, 4:], self.p)[:, :, None, None]
        for axis, (pixels, share) in enumerate(zip(size, sides, strict=True), 2):
            length = (share * pixels).round().long().clamp(1, pixels)
            start = keyed_random.below(bits[:, axis], pixels - length + 1)
            places = torch.arange(pixels, device=images.device) - start[:, None]
            within = (places >= 0) & (places < length[:, None])
            erased = erased & within[:, None, :, None].transpose(axis, 2)
        return torch.where(erased, 0.0 if self.fill == "mean" else -mean, images)


Operation = PadCrop | Flip | Rotate | ResizedCrop | Jitter | Erase
OPERATIONS: dict[str, Callable[..., Operation]] = {
    "pad_crop": PadCrop,
    "flip": Flip,
    "rotate": Rotate,
    "resized_crop": ResizedCrop,
    "jitter": Jitter,
    "erase": Erase,
}
"""Operations by name."""


def _bernoulli(bits: Tensor, share: float) -> Tensor:
    """Draw true with probability ``share``; never at 0, always at 1."""
    return bits < round(share * 2**keyed_random.BITS)


def _between(bits: Tensor, low: float, high: float) -> Tensor:
    """Draw uniform numbers in ``[low, high)``."""
    return low + (high - low) * keyed_random.uniform(bits)


def _box(bits: Tensor, low: float, high: float, ratio: float, size: Size) -> tuple[Tensor, Tensor]:
    """Draw height and width of boxes that fit, as shares of the sides, each ``(N,)``."""
    area, wide = _between(bits[:, 0], low, high), size[1] / size[0]
    # Aspect ratios (width over height) at which neither side exceeds that of the image.
    least, most = area * wide, wide / area
    first = torch.minimum(least.clamp(min=1 / ratio), most)
    last = torch.maximum(most.clamp(max=ratio), least)
    shape = first * (last / first) ** keyed_random.uniform(bits[:, 1])
    return (area / shape * wide).sqrt().clamp(max=1), (area * shape / wide).sqrt().clamp(max=1)


def _grey(values: Tensor) -> Tensor:
    """Convert to grey, shape ``(N, 1, H, W)``."""
    if values.shape[1] != 3:
        return values.mean(1, keepdim=True)
    red, green, blue = values.split(1, 1)
    return _LUMA[0] * red + _LUMA[1] * green + _LUMA[2] * blue


def _contrast(values: Tensor, factor: Tensor) -> Tensor:
    middle = _grey(values).mean((1, 2, 3), keepdim=True)
    return middle + factor * (values - middle)


def _saturation(values: Tensor, factor: Tensor) -> Tensor:
    grey = _grey(values)
    return grey + factor * (values - grey)


def _shift_hue(values: Tensor, shift: Tensor) -> Tensor:
    """Shift the hue of RGB values by a share of the colour circle; value and chroma stay."""
    red, green, blue = values.unbind(1)
    value = values.amax(1)
    chroma = value - values.amin(1)
    # Grey has no hue; any value leaves it unchanged.
    part = chroma.clamp(min=torch.finfo(values.dtype).tiny)
    hue = torch.where(
        value == red,
        (green - blue) / part,
        torch.where(value == green, 2 + (blue - red) / part, 4 + (red - green) / part),
    )
    hue = hue + 6 * shift[:, 0]
    sectors = [(offset + hue).remainder(6) for offset in (5.0, 3.0, 1.0)]
    shifted = [value - chroma * torch.minimum(k, 4 - k).clamp(0, 1) for k in sectors]
    return torch.stack(shifted, 1)


def _check_between(who: str, what: str, bounds: Sequence[float], low: float, high: float) -> None:
    """Reject anything but two ordered numbers within limits."""
    numbers = all(isinstance(bound, (int, float)) for bound in bounds)
    if not numbers or len(bounds) != 2 or not low <= bounds[0] <= bounds[1] <= high:
        raise ValueError(
            f"{who} expects {what} to be two numbers in order, from {low} to {high}, "
            f"got {tuple(bounds)}"
        )


def _check_area(who: str, low: float, high: float) -> None:
    if not 0 < low <= high <= 1:
        raise ValueError(f"{who} expects 0 < low <= high <= 1, got low={low!r} and high={high!r}")
