"""Batches of images on the device they are needed on."""

from collections.abc import Iterable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tammes.lab.data import Images
from tammes.lab.data.samplers import share
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

    def __call__(
        self, batches: Iterable[Tensor], *, rank: int = 0, world_size: int = 1
    ) -> Iterator[Batch]:
        """The batches at some positions, or the share of each that one process has.

        Args:
            batches: positions, one tensor for each batch.
            rank: which process this is.
            world_size: how many there are. Their shares are equally long: where one is short, an
                image of the batch is in it that counts for nothing.
        """
        shares = [_filled_share(whole, rank, world_size) for whole in batches]
        if not shares:
            return
        positions = [share for share, _ in shares]
        # One copy for all of them; each then is a view.
        together = torch.cat(positions).to(self.device)
        places = together.split([len(some) for some in positions])
        sources = zip(shares, places, self._pixels(positions, places), strict=True)
        for (_, own), place, pixels in sources:
            labels = self.labels[place]
            labels[own:] = IGNORED
            yield pixels, labels, self.index[place]

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


def _filled_share(whole: Tensor, rank: int, world_size: int) -> tuple[Tensor, int]:
    """Positions of one process, as many as any has, and how many of them are its own."""
    own = share(whole, rank, world_size)
    longest = -(-len(whole) // world_size)
    return torch.cat([own, whole[: longest - len(own)]]), len(own)
