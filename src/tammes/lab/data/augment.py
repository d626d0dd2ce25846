"""Augmentation on the device, reproducible for each example from seed, epoch and index.

Operations are written as ``"pad_crop(4) + flip() + jitter(0.4, 0.4, 0.4)"`` and applied in this
order. They work on pixels (0 to 255) minus the mean colour: missing pixels, beyond a border or in
an erased rectangle, are then 0, before and after normalisation.

Consecutive crops and flips are merged into one lookup, consecutive rotations and resized crops into
one resampling.
"""

import math
from collections.abc import Iterator, Sequence
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
"""Random numbers reserved for each operation."""


@dataclass(frozen=True)
class _Step:
    """An operation, the size of its input, and the columns of its random bits."""

    operation: Operation
    size: Size
    bits: slice


class Augment(nn.Module):
    """Normalises pixels, and augments them in training mode.

    The augmentation of an example is a function of seed, epoch and index, the same in any batch and
    on any device. It uses no generator and no synchronisation, so a CUDA graph can record it.

    Args:
        calls: operations in order, as text such as ``"pad_crop(4) + flip()"`` or parsed.
        mean: mean of each channel, for values in [0, 1].
        std: standard deviation of each channel; 0 for a constant channel, which stays 0.
        shape: channels, height and width of the pixels.
        seed: seed of the run.

    Attributes:
        output_shape: channels, height and width of the output.

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
        """Normalise uint8 pixels, and augment them in training mode, to ``(N, *output_shape)``.

        ``index`` is the index of each example in its data set, int64; ``epoch`` is an integer, or a
        scalar int64 tensor on the same device.
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
            images = self._eval_transform(pixels)
        # A product after a subtraction cannot become a fused multiply-add: all devices round alike.
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

    def _eval_transform(self, pixels: Tensor) -> Tensor:
        """Apply the deterministic part: centre crops to the size used in training."""
        images = self._centred(pixels)
        for step, crop in self._evaluation_crops():
            images = _resample(images, [step], None, reach=1 / crop.zoom)
        return images

    def _evaluation_crops(self) -> Iterator[tuple[_Step, ResizedCrop]]:
        for step in (step for stage in self.stages for step in stage):
            operation = step.operation
            if isinstance(operation, ResizedCrop) and operation.acts_in_evaluation(step.size):
                yield step, operation

    def evaluation_crops(self) -> list[tuple[float, Size]]:
        """Return the centre crops of evaluation mode: share of each side, and resulting size."""
        return [
            (1 / crop.zoom, _size_after(crop, step.size)) for step, crop in self._evaluation_crops()
        ]

    def _centred(self, images: Tensor) -> Tensor:
        return images.float() - self.mean if images.dtype == torch.uint8 else images

    def _look_up(self, images: Tensor, stage: list[_Step], bits: Tensor) -> Tensor:
        """Crop and flip with one lookup of rows and columns."""
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
        source = rows.clamp(min=0) * width + columns.clamp(min=0)
        moved = images.flatten(2).gather(2, source.flatten(2).expand(-1, channels, -1))
        moved = self._centred(moved.reshape(images.shape))
        if fill == "reflect":
            return moved
        colour = 0.0 if fill == "mean" else -self.mean
        return torch.where((rows >= 0) & (columns >= 0), moved, colour)


def _joins(operation: Operation, stage: list[_Step]) -> bool:
    """Whether an operation is merged into the stage before it.

    A lookup has at most one crop, since it has a single fill.
    """
    before = [step.operation for step in stage]
    resampling = (Rotate, ResizedCrop)
    if isinstance(operation, resampling):
        return isinstance(before[0], resampling)
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
    """Rotate and resize: map the output coordinates back to the input and sample there.

    The operations are inverted from last to first; evaluation passes no random bits. ``reach`` is
    the largest visible share of a side. Interpolation is bilinear, with 0 beyond the border.
    """
    height, width = _size_after(stage[-1].operation, stage[-1].size)
    # When images shrink, each output pixel is the mean of several samples.
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
    # len() would make the batch size a constant of an exported program.
    shape = (images.shape[0], height * finer, width * finer)
    grid = torch.stack([x.expand(shape), y.expand(shape)], 3)
    sampled = F.grid_sample(images, grid, padding_mode="border", align_corners=False)
    inside = (grid.abs() <= 1).all(3)[:, None]
    sampled = torch.where(inside, sampled, 0.0)
    return F.avg_pool2d(sampled, finer) if finer > 1 else sampled
