"""One training step: from a batch to updated weights and running sums of metrics."""

import gc
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from tammes.cuda_graphs import Recording
from tammes.lab.config.schema import Config
from tammes.lab.data.keyed_random import mix_int
from tammes.lab.training.epoch_sums import EpochSums
from tammes.lab.training.model import Model, parameter_groups
from tammes.lab.training.sharded_head import clip_global_norm

_WARM_UP = 3
"""Eager steps before a CUDA graph is recorded, so that lazily created state exists."""


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
        self.fabric, self.module, self.model, self.optimizer = fabric, module, model, optimizer
        self.config, self.graphs, self.report = config, graphs, report
        device = fabric.device
        self.sums, self.count = EpochSums(model), 0
        self.row = torch.empty(0)
        self.epoch = torch.zeros((), dtype=torch.long, device=device)
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

    def __call__(self, batch: tuple[Tensor, Tensor, Tensor], *, epoch: int, step: int) -> None:
        """Train on a batch on the device; ``step`` is the new :attr:`count`."""
        # Dropout is keyed by seed, step and rank, so a resumed run needs no generator state.
        key = 0
        for number in (self.config.seed, step, self.fabric.global_rank):
            key = mix_int(key + number)
        _seed(key, self.fabric.device)
        self.epoch.fill_(epoch)
        self.count = step
        if not self.graphs:
            self._step(*batch)
        elif self.recording is not None and batch[0].shape == self.inputs[0].shape:
            for static, tensor in zip(self.inputs, batch, strict=True):
                static.copy_(tensor)
            self.recording.replay()
        else:
            self._warm_up_or_record(batch)
        # The next replay writes its row to the same memory.
        self.sums.add(step, self.row if self.recording is None else self.row.clone())

    def set_rate(self, rate: float) -> None:
        """Set the learning rate of the backbone; other groups keep their ratio to it."""
        for group, ratio in zip(self.optimizer.param_groups, self.ratios, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate * ratio)
            else:
                group["lr"] = rate * ratio

    def _step(self, pixels: Tensor, labels: Tensor, index: Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with self.fabric.autocast():
            loss, sums = self.module(pixels, labels, index, self.epoch)
        self.fabric.backward(loss)
        head = self.model.criterion.head
        if self.config.clip and head.is_sharded:
            clip_global_norm(self.model, head, self.config.clip)
        elif self.config.clip:
            self.fabric.strategy.clip_gradients_norm(
                self.model, self.optimizer, max_norm=self.config.clip, error_if_nonfinite=False
            )
        self.fabric.strategy.optimizer_step(self.optimizer)
        values = torch.stack([loss.detach(), *self.model.criterion.terms.values()])
        self.row = torch.cat([sums, values.float()])

    def _warm_up_or_record(self, batch: tuple[Tensor, Tensor, Tensor]) -> None:
        """Run the first steps eagerly on a side stream, then record one."""
        if self.recording is not None:
            self._step_on_side_stream(batch)
        elif self.eager < _WARM_UP:
            self.eager += 1
            self.thread.submit(self._step_on_side_stream, batch).result()
        else:
            self._record(batch)

    def _step_on_side_stream(self, batch: tuple[Tensor, Tensor, Tensor]) -> None:
        side = torch.cuda.Stream(self.fabric.device)
        side.wait_stream(torch.cuda.current_stream(self.fabric.device))
        with torch.cuda.stream(side):
            self._step(*batch)
        torch.cuda.current_stream(self.fabric.device).wait_stream(side)

    def _record(self, batch: tuple[Tensor, Tensor, Tensor]) -> None:
        """Record a step and replay it; if recording fails, run this and later steps eagerly."""
        self.inputs = [tensor.clone() for tensor in batch]
        recording = Recording(self.fabric.device)
        # Recording runs nothing; existing gradients would be accumulated into.
        self.optimizer.zero_grad(set_to_none=True)
        try:
            self.thread.submit(self._capture, recording).result()
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
            self._step(*batch)
            return
        self.recording = recording
        recording.replay()

    def _capture(self, recording: Recording) -> None:
        with recording.record():
            self._step(*self.inputs)


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
