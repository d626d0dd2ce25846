"""Augmentation on the device: each example its own, found again by seed, epoch and index.

Operations are written as ``"pad_crop(4) + flip() + jitter(0.4, 0.4, 0.4)"`` and done in this order.
Images are worked on as differences from the mean colour, in steps of a pixel's 256 values: what is
not there, beyond a border or where a rectangle was erased, is then 0, and exactly 0 if normalised.

Crops and flips in a row are one lookup, rotations and resized crops in a row one resampling.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tammes.lab.config import Call, build, parse_calls
from tammes.lab.data import keyed_random
from tammes.lab.data.augment_ops import (
    OPERATIONS,
    Erase,
    Flip,
    Jitter,
    Operation,
    PadCrop,
    ResizedCrop,
    Rotate,
    Size,
)

_DRAWS = 8
"""Random numbers set aside for each operation."""


@dataclass(frozen=True)
class _Step:
    """An operation, the size of what it is given, and the columns of its random bits."""

    operation: Operation
    size: Size
    bits: slice


class Augment(nn.Module):
    """From pixels to normalised images: augmented while training, as they are otherwise.

    What happens to an example is a function of seed, epoch and its index, the same in any batch
    and on any device. There is no generator and no synchronisation; a CUDA graph can hold it.

    Args:
        calls: operations in order, as text such as ``"pad_crop(4) + flip()"`` or as calls.
        mean: of each channel, for values in [0, 1].
        std: likewise; a channel that never changes has 0 and stays at 0.
        shape: channels, height and width of the pixels.
        seed: of the run.

    Attributes:
        output_shape: channels, height and width of the images it makes.

    Example:
        >>> augment = Augment("pad_crop(1)", mean=[0.5], std=[0.5], shape=(1, 2, 2), seed=0)
        >>> pixels, index = torch.full((3, 1, 2, 2), 255, dtype=torch.uint8), torch.arange(3)
        >>> augment.eval()(pixels, index, epoch=1).unique()
        tensor([1.])
        >>> augment.train()(pixels, index, epoch=1).unique()
        tensor([0., 1.])
    """

    mean: Tensor
    factor: Tensor
    draws: Tensor

    def __init__(
        self,
        calls: str | Sequence[Call],
        *,
        mean: Sequence[float],
        std: Sequence[float],
        shape: Sequence[int],
        seed: int,
    ) -> None:
        super().__init__()
        calls = parse_calls(calls, what="augmentation") if isinstance(calls, str) else calls
        operations = [build(call, OPERATIONS, what="augmentation") for call in calls]
        channels, height, width = shape
        for name, values in (("mean", mean), ("std", std)):
            if len(values) != channels or not all(0 <= value < math.inf for value in values):
                raise ValueError(
                    f"Augment expects {name} to be a number for each of {channels} channels, "
                    f"got {list(values)}"
                )
        self.shape, self.seed = (channels, height, width), keyed_random.mix_int(seed)
        self.stages: list[list[_Step]] = []
        numbers: list[int] = []
        size = (height, width)
        for number, operation in enumerate(operations):
            if isinstance(operation, PadCrop):
                operation.check(size)
            bits = slice(len(numbers), len(numbers) + operation.draws)
            numbers += range(_DRAWS * number, _DRAWS * number + operation.draws)
            if not (self.stages and _joins(operation, self.stages[-1])):
                self.stages.append([])
            self.stages[-1].append(_Step(operation, size, bits))
            size = _size_after(operation, size)
        self.output_shape = (channels, *size)
        scale = [1 / value if value > 0 else 1.0 for value in std]
        for name, exact in (
            ("mean", 255 * torch.tensor(mean, dtype=torch.float64)),
            ("factor", torch.tensor(scale, dtype=torch.float64) / 255),
        ):
            self.register_buffer(name, exact.float().reshape(1, -1, 1, 1), persistent=False)
        self.register_buffer("draws", torch.tensor(numbers, dtype=torch.int64), persistent=False)

    def forward(self, pixels: Tensor, index: Tensor, epoch: int | Tensor) -> Tensor:
        """Images for a network.

        Args:
            pixels: uint8, shape ``(N, C, H, W)``.
            index: identity of each example, int64, shape ``(N,)``.
            epoch: a number, or an int64 tensor without dimensions on the same device.

        Returns:
            Images, float32, shape ``(N, *output_shape)``.
        """
        if pixels.dtype != torch.uint8 or tuple(pixels.shape[1:]) != self.shape:
            raise ValueError(
                f"Augment expects uint8 pixels of shape (N, {', '.join(map(str, self.shape))}), "
                f"got {pixels.dtype} of shape {tuple(pixels.shape)}"
            )
        if index.shape != pixels.shape[:1] or index.dtype != torch.int64:
            raise ValueError(
                f"Augment expects an int64 index of shape ({len(pixels)},), "
                f"got {index.dtype} of shape {tuple(index.shape)}"
            )
        if self.training and self.stages:
            images = self._augmented(pixels, index, epoch)
        else:
            images = self._settled(pixels)
        # A difference and then a product cannot be contracted, so every device rounds alike.
        return images * self.factor

    def _augmented(self, pixels: Tensor, index: Tensor, epoch: int | Tensor) -> Tensor:
        images = pixels
        bits = keyed_random.bits(keyed_random.keys(self.seed, epoch, index), self.draws)
        for stage in self.stages:
            first = stage[0].operation
            if isinstance(first, (PadCrop, Flip)):
                images = self._look_up(images, stage, bits)
                continue
            images = self._centred(images)
            if isinstance(first, (Jitter, Erase)):
                images = first.paint(images, bits[:, stage[0].bits], self.mean)
            else:
                images = _resample(images, stage, bits)
        return self._centred(images)

    def _settled(self, pixels: Tensor) -> Tensor:
        """What happens at test too: the centre in the size that training has."""
        images = self._centred(pixels)
        for step in (step for stage in self.stages for step in stage):
            operation = step.operation
            if isinstance(operation, ResizedCrop) and operation.acts_at_test(step.size):
                images = _resample(images, [step], None, reach=1 / operation.zoom)
        return images

    def _centred(self, images: Tensor) -> Tensor:
        return images.float() - self.mean if images.dtype == torch.uint8 else images

    def _look_up(self, images: Tensor, stage: list[_Step], bits: Tensor) -> Tensor:
        """Crop and flip: rows and columns of the result, looked up at once."""
        count, channels, height, width = images.shape
        rows, columns = (
            torch.arange(size, device=images.device).expand(count, -1) for size in (height, width)
        )
        fill = "reflect"
        for step in stage:
            assert isinstance(step.operation, (PadCrop, Flip))
            rows, columns = step.operation.move(rows, columns, bits[:, step.bits])
            fill = step.operation.fill if isinstance(step.operation, PadCrop) else fill
        rows, columns = rows[:, None, :, None], columns[:, None, None, :]
        place = rows.clamp(min=0) * width + columns.clamp(min=0)
        found = images.flatten(2).gather(2, place.flatten(2).expand(-1, channels, -1))
        found = self._centred(found.reshape(images.shape))
        if fill == "reflect":
            return found
        colour = 0.0 if fill == "mean" else -self.mean
        return torch.where((rows >= 0) & (columns >= 0), found, colour)


def _joins(operation: Operation, stage: list[_Step]) -> bool:
    """Whether an operation is done together with those before it.

    A lookup has one crop at most, since it has one fill.
    """
    before = [step.operation for step in stage]
    together = (Rotate, ResizedCrop)
    if isinstance(operation, together):
        return isinstance(before[0], together)
    if isinstance(operation, PadCrop):
        return all(isinstance(other, Flip) for other in before)
    return isinstance(operation, Flip) and isinstance(before[0], (PadCrop, Flip))


def _size_after(operation: Operation, size: Size) -> Size:
    if isinstance(operation, ResizedCrop) and operation.size is not None:
        return operation.size, operation.size
    return size


def _resample(
    images: Tensor, stage: list[_Step], bits: Tensor | None, *, reach: float = 1.0
) -> Tensor:
    """Rotate and resize: places of the result, followed back to the images they come from.

    Args:
        images: shape ``(N, C, H, W)``.
        stage: what to undo, last first.
        bits: random bits of all operations, or None for what is done at test.
        reach: largest share of a side of the images that is seen.

    Returns:
        Images, bilinear between pixels, 0 beyond the border.
    """
    height, width = _size_after(stage[-1].operation, stage[-1].size)
    # Where images get smaller, each pixel of the result is the mean of several places.
    shrinks = max(images.shape[2] / height, images.shape[3] / width) * reach
    finer = max(1, round(shrinks))
    y, x = (
        (torch.arange(size * finer, device=images.device) * 2 + 1) / (size * finer) - 1
        for size in (height, width)
    )
    x, y = x[None, None, :], y[None, :, None]
    for step in reversed(stage):
        assert isinstance(step.operation, (Rotate, ResizedCrop))
        own = None if bits is None else bits[:, step.bits]
        x, y = step.operation.warp(x, y, step.size, own)
    shape = (len(images), height * finer, width * finer)
    grid = torch.stack([x.expand(shape), y.expand(shape)], 3)
    found = F.grid_sample(images, grid, padding_mode="border", align_corners=False)
    inside = (grid.abs() <= 1).all(3)[:, None]
    found = torch.where(inside, found, 0.0)
    return F.avg_pool2d(found, finer) if finer > 1 else found
