"""Batches of images on the device they are needed on."""

from collections.abc import Iterable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tammes.lab.data import Images
from tammes.lab.training.model import IGNORED

Batch: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Pixels, labels, identities."""


class _Reader(Dataset[Tensor | ValueError]):
    """Images one by one, for the processes that read them.

    What is wrong with an image is handed on: raised in another process, it would come back as a
    page of text.
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


class Feed:
    """Images in batches: from memory of the device where they fit, else read as they are needed.

    Args:
        images: what to feed.
        device: where to.
        workers: processes that read.
    """

    def __init__(self, images: Images, device: torch.device, *, workers: int = 0) -> None:
        self.images, self.device, self.workers = images, device, workers
        self.labels, self.index = images.labels.to(device), images.index.to(device)
        self.pixels = None if images.pixels is None else images.pixels.to(device)

    def __call__(self, batches: Iterable[Tensor], *, fill: int | None = None) -> Iterator[Batch]:
        """The batches at some positions.

        Args:
            batches: positions, one tensor for each batch.
            fill: fill shorter batches up to this length with rows that count for nothing, so that
                those of all processes are equally long.
        """
        positions = list(batches)
        if not positions:
            return
        # One copy for all of them; each then is a view.
        together = torch.cat(positions).to(self.device)
        places = together.split([len(some) for some in positions])
        for place, pixels in zip(places, self._pixels(positions, places), strict=True):
            batch = (pixels, self.labels[place], self.index[place])
            yield batch if fill is None or len(place) >= fill else _filled(batch, fill)

    def _pixels(self, positions: list[Tensor], places: Iterable[Tensor]) -> Iterator[Tensor]:
        if self.pixels is not None:
            for place in places:
                yield self.pixels[place]
            return
        cuda = self.device.type == "cuda"
        loader = DataLoader(
            _Reader(self.images),
            batch_sampler=[some.tolist() for some in positions],
            num_workers=self.workers,
            collate_fn=_stacked,
            pin_memory=cuda,
        )
        for pixels in loader:
            if isinstance(pixels, ValueError):
                raise pixels
            yield pixels.to(self.device, non_blocking=cuda)

    def in_order(self, size: int, *, rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
        """All images once, in order: the share of one process, every ``world_size``-th."""
        yield from self(torch.arange(rank, len(self.images), world_size).split(size))


def _stacked(images: list[Tensor | ValueError]) -> Tensor | ValueError:
    """Images as one tensor, or what is wrong with the first that cannot be read."""
    wrong = next((image for image in images if isinstance(image, ValueError)), None)
    return wrong or torch.stack([image for image in images if isinstance(image, Tensor)])


def _filled(batch: Batch, length: int) -> Batch:
    pixels, labels, index = batch
    missing = length - len(labels)
    return (
        torch.cat([pixels, pixels.new_zeros(missing, *pixels.shape[1:])]),
        torch.cat([labels, labels.new_full((missing,), IGNORED)]),
        torch.cat([index, index.new_zeros(missing)]),
    )
