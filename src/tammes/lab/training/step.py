"""One training step: from a batch to updated weights and running sums of metrics."""

import gc
import itertools
import math
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from tammes.cuda_graphs import Recording
from tammes.lab.config.schema import Config
from tammes.lab.data.keyed_random import mix_int
from tammes.lab.training.epoch_sums import EpochSums
from tammes.lab.training.loader import Batch
from tammes.lab.training.model import Model, parameter_groups
from tammes.lab.training.sharded_head import clip_global_norm

_WARM_UP = 3
"""Eager steps before a CUDA graph is recorded, so that lazily created state exists."""
_CHUNKED = ("cuda",)
"""Devices on which launching a small operation takes longer than running it."""
_AT_ONCE, _NUMBERS = 50, 1 << 24
"""Largest number of batches that are augmented or measured at once, and of numbers in them."""


def make_optimizer(
    model: Model, config: Config, device: torch.device, *, graphs: bool
) -> torch.optim.Optimizer:
    """Build the optimizer of a configuration, fused on a GPU.

    Set ``graphs`` if its steps are captured in a CUDA graph.
    """
    groups: Any = parameter_groups(model, config)
    fused = device.type == "cuda"
    if config.optimizer == "sgd":
        optimizer = torch.optim.SGD(
            groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, fused=fused
        )
        if fused and config.momentum and config.precision == "fp16":
            # If the gradients of the first step overflow, the step is skipped, and torch's fused
            # kernel (2.11) leaves its new momentum buffers uninitialised.
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return optimizer
    kind = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
    return kind(groups, lr=config.lr, fused=fused, capturable=graphs)


class Step:
    """Trains on one batch per call, and accumulates sums of the metrics.

    A step does not synchronise with the GPU. With ``graphs`` it is recorded as a CUDA graph; if
    that fails, the reason is reported and training continues without one, unless the configuration
    insists on graphs.

    ``module`` is ``model``, compiled or wrapped for several processes.

    Attributes:
        sums: sums of the metrics over the epoch; a non-finite loss is found when they are read.
        count: number of the current step, from 0 over the whole training.
    """

    def __init__(
        self,
        *,
        fabric: Any,
        module: nn.Module,
        model: Model,
        optimizer: torch.optim.Optimizer,
        config: Config,
        graphs: bool,
        report: Callable[[str], None],
    ) -> None:
        self.module, self.model, self.optimizer = module, model, optimizer
        self.config, self.graphs, self.report = config, graphs, report
        device = fabric.device
        # Looked up or built once: a small network's steps are bound by Python.
        self.device, self.rank, self.autocast = device, fabric.global_rank, fabric.autocast()
        self.scaler = getattr(fabric.strategy.precision, "scaler", None)
        self.head, size = model.criterion.head, model.criterion.head.embedding_size
        self.head_shape = self.head.weight.numel() // size, size
        self.sums, self.count = EpochSums(model.criterion), 0
        self.recorded_row: Tensor | None = None
        self.epoch, self.filled = torch.zeros((), dtype=torch.long, device=device), 0
        self.ratios = [group["lr"] / config.lr for group in optimizer.param_groups]
        self.recording: Recording | None = None
        # A library that fails during recording may stay broken in the calling thread (cuSOLVER
        # does), so recording has its own thread.
        self.thread = ThreadPoolExecutor(1)
        self.inputs: list[Tensor] = []
        self.eager = 0
        if graphs:
            for group in optimizer.param_groups:
                # A graph reads the rate from the tensor it was recorded with.
                group["lr"] = torch.tensor(float(group["lr"]), device=device)

    def __call__(self, batch: Batch, *, epoch: int, step: int) -> None:
        """Train on a batch on the device; ``step`` is the new :attr:`count`."""
        # Dropout is keyed by seed, step and rank, so a resumed run needs no generator state.
        key = 0
        for number in (self.config.seed, step, self.rank):
            key = mix_int(key + number)
        _seed(key, self.device)
        if epoch != self.filled:
            self.epoch.fill_(epoch)
            self.filled = epoch
        self.count = step
        if not self.graphs:
            row = self._step(*batch)
        elif self.recording is not None and batch[0].shape == self.inputs[0].shape:
            for static, tensor in zip(self.inputs, batch, strict=True):
                static.copy_(tensor)
            row = self._replay(self.recording)
        else:
            row = self._warm_up_or_record(batch)
        if row is not None:
            self.sums.add(step, row)

    @property
    def chunked(self) -> bool:
        """Whether batches are augmented and measured many at once, which saves launches.

        A CUDA graph and a compiled model save more. Which batches are together depends on where a
        run was interrupted, and rounding on that, so deterministic runs do without.
        """
        if self.graphs or self.device.type not in _CHUNKED:
            return False
        return not (self.config.compile or self.config.deterministic)

    def augmented(self, batches: Iterator[Batch], epoch: int) -> Iterator[Batch]:
        """Yield batches with augmented images if steps are :attr:`chunked`, else as they are."""
        for first in batches:
            if not self.chunked:
                yield first
                continue
            # Before it is resized, an image may be larger than the network's.
            augment = self.model.augment
            each = max(math.prod(augment.shape), math.prod(augment.output_shape))
            at_once = _at_once(len(first[0]) * each)
            chunk = [first, *itertools.islice(batches, at_once - 1)]
            pixels, labels, index = zip(*chunk, strict=True)
            images = self.model.images(torch.cat(pixels), torch.cat(index), epoch)
            sizes = [len(own) for own in pixels]
            yield from zip(images.split(sizes), labels, index, strict=True)

    def _measured_at_once(self, rows: int) -> int:
        """Return how many batches of so many rows are measured at once."""
        if not self.chunked or self.config.shard:
            return 1
        prototypes, size = self.head_shape
        return _at_once(prototypes * size + rows * (prototypes + size))

    def set_rate(self, rate: float) -> None:
        """Set the learning rate of the backbone; other groups keep their ratio to it."""
        for group, ratio in zip(self.optimizer.param_groups, self.ratios, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate * ratio)
            else:
                group["lr"] = rate * ratio

    def _step(self, pixels: Tensor, labels: Tensor, index: Tensor) -> Tensor | None:
        """Train on a batch; return its row of the sums, unless it is measured later."""
        row = None
        self.optimizer.zero_grad(set_to_none=True)
        at_once = self._measured_at_once(len(labels))
        with self.autocast:
            loss, measured = self.module(pixels, labels, index, self.epoch, measure=at_once == 1)
        values = [loss.detach(), *self.model.criterion.terms.values()]
        if at_once == 1:
            row = torch.cat([measured, torch.stack(values).float()])
        else:
            self.sums.defer(self.count, values, measured, labels, at_once=at_once)
        # On a GPU, backward would otherwise run in another thread, which makes an eager step of a
        # small network up to 1.5 times as long.
        with torch.autograd.set_multithreading_enabled(False):
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if self.config.clip:
            self._clip(self.config.clip)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return row

    def _clip(self, max_norm: float) -> None:
        """Clip the gradient norm; unlike Fabric's, for fused optimizers in float16 too."""
        if self.head.is_sharded:
            clip_global_norm(self.model, self.head, max_norm)
            return
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        groups = self.optimizer.param_groups
        parameters = [parameter for group in groups for parameter in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def _warm_up_or_record(self, batch: Batch) -> Tensor | None:
        """Run the first steps eagerly on a side stream, then record one."""
        if self.recording is not None:
            return self._step_on_side_stream(batch)
        if self.eager < _WARM_UP:
            self.eager += 1
            return self.thread.submit(self._step_on_side_stream, batch).result()
        return self._record(batch)

    def _step_on_side_stream(self, batch: Batch) -> Tensor | None:
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            row = self._step(*batch)
        torch.cuda.current_stream(self.device).wait_stream(side)
        return row

    def _record(self, batch: Batch) -> Tensor | None:
        """Record a step and replay it; if recording fails, run this and later steps eagerly."""
        self.inputs = [tensor.clone() for tensor in batch]
        recording = Recording(self.device)
        # Recording runs nothing; existing gradients would be accumulated into.
        self.optimizer.zero_grad(set_to_none=True)
        try:
            self.recorded_row = self.thread.submit(self._capture, recording).result()
        except Exception as error:
            if self.config.graphs == "on":
                raise ValueError(f"graphs cannot record this step: {_reason(error)}") from error
            self.graphs = False
            # The frames of the failed recording keep its autograd graph alive.
            traceback.clear_frames(error.__traceback__)
            gc.collect()
            self.report(
                f"a CUDA graph cannot record this step, continuing without: {_reason(error)}"
            )
            return self._step(*batch)
        self.recording = recording
        return self._replay(recording)

    def _capture(self, recording: Recording) -> Tensor | None:
        with recording.record():
            return self._step(*self.inputs)

    def _replay(self, recording: Recording) -> Tensor:
        recording.replay()
        assert self.recorded_row is not None
        # The next replay writes to the same memory.
        return self.recorded_row.clone()


def _at_once(numbers: int) -> int:
    """Return how many batches to process at once, given the numbers in memory for each."""
    return max(1, min(_AT_ONCE, _NUMBERS // numbers))


def _seed(key: int, device: torch.device) -> None:
    """Seed the generators that a step draws from.

    ``torch.manual_seed`` seeds those of every backend, which takes longer than most operations.
    """
    if device.type not in ("cpu", "cuda"):
        torch.manual_seed(key)
        return
    torch.default_generator.manual_seed(key)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(key)


def _reason(error: BaseException) -> str:
    """Return the message of the original error; ending a failed recording raises another."""
    while error.__context__ is not None:
        error = error.__context__
    return str(error).strip().split("\n")[0]
