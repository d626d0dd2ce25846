"""Load batches of images to the device."""

from collections.abc import Iterable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tammes.lab.data import Images
from tammes.lab.data.samplers import rank_share
from tammes.lab.training.model import IGNORED

Batch: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Pixels, labels and image indices."""


class _ImageDataset(Dataset[Tensor | ValueError]):
    """Single images for the workers of a ``DataLoader``.

    Errors are returned, not raised: the loader would wrap one of a worker in a long traceback.
    """

    def __init__(self, images: Images) -> None:
        self.images = images

    def __getitem__(self, position: int) -> Tensor | ValueError:
        try:
            return self.images.read(position)
        except ValueError as error:
            return ValueError(str(error))

    def __len__(self) -> int:
        return len(self.images)


class ImageLoader:
    """Loads batches of images, from device memory or, if they do not fit, in worker processes."""

    def __init__(self, images: Images, device: torch.device, *, workers: int = 0) -> None:
        self.images, self.device, self.workers = images, device, workers
        self.labels = images.labels.to(device)
        self.pixels = None if images.pixels is None else images.pixels.to(device)

    def __call__(
        self, batches: Iterable[Tensor], *, rank: int = 0, world_size: int = 1
    ) -> Iterator[Batch]:
        """Yield the batches at the given positions, or one rank's share of each.

        All shares of a batch have the same length: a short one is padded with an image of the
        batch, with an ignored label.
        """
        shares = [_padded_share(whole, rank, world_size) for whole in batches]
        if not shares:
            return
        sizes = [len(share) for share, _ in shares]
        positions = torch.cat([share for share, _ in shares])
        labels = self.images.labels[positions]
        for part, (_, own) in zip(labels.split(sizes), shares, strict=True):
            if own < len(part):
                part[own:] = IGNORED
        # One transfer for all batches, which are then views.
        whole = (positions, labels, self.images.index[positions])
        chosen, own_labels, index = (each.to(self.device).split(sizes) for each in whole)
        yield from zip(self._pixels(positions.split(sizes), chosen), own_labels, index, strict=True)

    def _pixels(self, positions: Iterable[Tensor], on_device: Iterable[Tensor]) -> Iterator[Tensor]:
        if self.pixels is not None:
            for chosen in on_device:
                yield self.pixels[chosen]
            return
        cuda = self.device.type == "cuda"
        loader = DataLoader(
            _ImageDataset(self.images),
            batch_sampler=[batch.tolist() for batch in positions],
            num_workers=self.workers,
            collate_fn=_stack,
            pin_memory=cuda,
        )
        for pixels in loader:
            if isinstance(pixels, ValueError):
                raise pixels
            yield pixels.to(self.device, non_blocking=cuda)

    def in_order(self, size: int, *, rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
        """Yield all images once, in order; each rank gets every ``world_size``-th."""
        yield from self(torch.arange(rank, len(self.images), world_size).split(size))


def _stack(images: list[Tensor | ValueError]) -> Tensor | ValueError:
    """Stack images, or return the error of the first that cannot be read."""
    error = next((image for image in images if isinstance(image, ValueError)), None)
    return error or torch.stack([image for image in images if isinstance(image, Tensor)])


def _padded_share(whole: Tensor, rank: int, world_size: int) -> tuple[Tensor, int]:
    """Return the positions of one rank, padded to the longest share, and their unpadded number."""
    if world_size == 1:
        return whole, len(whole)
    own = rank_share(whole, rank, world_size)
    longest = -(-len(whole) // world_size)
    return torch.cat([own, whole[: longest - len(own)]]), len(own)
