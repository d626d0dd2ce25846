"""One step of training: from a batch to new weights, and what was seen on the way."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from tammes.cuda_graphs import Recording
from tammes.lab.config.schema import Config
from tammes.lab.data.keyed_random import mix_int
from tammes.lab.training.model import SEEN, Model, parameter_groups
from tammes.lab.training.sharded_head import clip_together, is_spread

_WARM = 3
"""Steps before a CUDA graph is recorded, so that whatever is made once is made."""


def make_optimizer(
    model: Model, config: Config, device: torch.device, *, graphs: bool
) -> torch.optim.Optimizer:
    """The optimizer of a configuration; on a GPU one kernel for all parameters.

    Args:
        model: on the device.
        config: of the run.
        device: of the model.
        graphs: whether a CUDA graph is to hold its steps.
    """
    groups: Any = parameter_groups(model, config)
    fused = device.type == "cuda"
    if config.optimizer == "sgd":
        optimizer = torch.optim.SGD(
            groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, fused=fused
        )
        if fused and config.momentum and config.precision == "fp16":
            # Where gradients of the first step overflow, the step is skipped, and torch's fused
            # kernel (2.11) leaves momentum buffers that it has allocated but not written.
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return optimizer
    kind = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
    return kind(groups, lr=config.lr, fused=fused, capturable=graphs)


class Step:
    """Call it with a batch; it trains, and keeps sums of what it saw.

    Nothing in it waits for a GPU. A loss that is not finite is noted where it happens, and found
    when somebody asks.

    Args:
        fabric: precision, device and processes.
        module: the model as Fabric has set it up.
        model: the same without its wrapping.
        optimizer: as Fabric has set it up.
        config: of the run.
        graphs: record the step as a CUDA graph. Where that fails, whatever the reason, training
            goes on without.
        report: is told of that.
    """

    def __init__(
        self,
        fabric: Any,
        module: nn.Module,
        model: Model,
        optimizer: Any,
        config: Config,
        *,
        graphs: bool,
        report: Callable[[str], None],
    ) -> None:
        self.fabric, self.module, self.model, self.optimizer = fabric, module, model, optimizer
        self.config, self.graphs, self.report = config, graphs, report
        self.terms = [*model.criterion.settings.named]
        device = fabric.device
        self.seen = SEEN if model.measures else SEEN[:2]
        count = len(self.seen) + len(self.terms)
        self.sums = torch.zeros(count, dtype=torch.double, device=device)
        self.epoch = torch.zeros((), dtype=torch.long, device=device)
        self.count = torch.zeros((), dtype=torch.long, device=device)
        self.fault = torch.full((), -1, dtype=torch.long, device=device)
        self.fault_terms = torch.zeros(len(self.terms), device=device)
        self.ratios = [group["lr"] / config.lr for group in optimizer.param_groups]
        self.recording: Recording | None = None
        # A routine that fails while it is recorded may be broken for the thread that called it
        # (cuSOLVER is); this one has nothing else to do.
        self.thread = ThreadPoolExecutor(1)
        self.inputs: list[Tensor] = []
        self.eager = 0
        if graphs:
            for group in optimizer.param_groups:
                # A graph reads the rate from where it was recorded.
                group["lr"] = torch.tensor(float(group["lr"]), device=device)

    def __call__(self, batch: tuple[Tensor, Tensor, Tensor], *, epoch: int, step: int) -> None:
        """Train on a batch.

        Args:
            batch: pixels, labels and identities, on the device.
            epoch: counted from 0.
            step: counted from 0 over the whole training.
        """
        # Dropout depends on the step alone, so a run that goes on needs no state of a generator.
        torch.manual_seed(_key(self.config.seed, step, self.fabric.global_rank))
        self.epoch.fill_(epoch)
        self.count.fill_(step)
        if not self.graphs:
            self._work(*batch)
        elif self.recording is not None and batch[0].shape == self.inputs[0].shape:
            self._replay(batch)
        else:
            self._record_or_work(batch)

    def set_rate(self, rate: float) -> None:
        """Set the learning rate: that of the backbone; the others keep their ratio to it."""
        for group, ratio in zip(self.optimizer.param_groups, self.ratios, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate * ratio)
            else:
                group["lr"] = rate * ratio

    def _work(self, pixels: Tensor, labels: Tensor, index: Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss, seen = self.module(pixels, labels, index, self.epoch)
        self.fabric.backward(loss)
        if self.config.clip and is_spread(self.model.criterion.head):
            clip_together(self.model, self.model.criterion.head, self.config.clip)
        elif self.config.clip:
            self.fabric.clip_gradients(
                self.module, self.optimizer, max_norm=self.config.clip, error_if_nonfinite=False
            )
        self.optimizer.step()
        self._note(loss.detach(), seen)

    def _note(self, loss: Tensor, seen: Tensor) -> None:
        terms = [value.to(self.fault_terms) for value in self.model.criterion.terms.values()]
        values = torch.stack(terms)
        self.sums += torch.cat([seen.double(), values.double() * seen[0]])
        first = ~torch.isfinite(loss) & (self.fault < 0)
        self.fault.copy_(torch.where(first, self.count, self.fault))
        self.fault_terms.copy_(torch.where(first, values, self.fault_terms))

    def _record_or_work(self, batch: tuple[Tensor, Tensor, Tensor]) -> None:
        """The first steps as they are, on a stream of their own; then record one."""
        if self.recording is not None:
            self._work_aside(batch)
        elif self.eager < _WARM:
            self.eager += 1
            self.thread.submit(self._work_aside, batch).result()
        else:
            self._record(batch)

    def _work_aside(self, batch: tuple[Tensor, Tensor, Tensor]) -> None:
        side = torch.cuda.Stream(self.fabric.device)
        side.wait_stream(torch.cuda.current_stream(self.fabric.device))
        with torch.cuda.stream(side):
            self._work(*batch)
        torch.cuda.current_stream(self.fabric.device).wait_stream(side)

    def _record(self, batch: tuple[Tensor, Tensor, Tensor]) -> None:
        """Record a step and do it; or, where that fails, do it and go on without."""
        self.inputs = [tensor.clone() for tensor in batch]
        recording = Recording(self.fabric.device)
        # Recording runs nothing; gradients must not be there, or it would add to them.
        self.optimizer.zero_grad(set_to_none=True)
        try:
            self.thread.submit(self._work_recorded, recording).result()
        except Exception as error:
            if self.config.graphs == "on":
                raise ValueError(f"graphs cannot record this step: {_reason(error)}") from error
            self.graphs = False
            self.report(f"no CUDA graph can hold this step, going on without: {_reason(error)}")
            self._work(*batch)
            return
        self.recording = recording
        recording.replay()

    def _work_recorded(self, recording: Recording) -> None:
        with recording.record():
            self._work(*self.inputs)

    def _replay(self, batch: tuple[Tensor, Tensor, Tensor]) -> None:
        assert self.recording is not None
        for place, tensor in zip(self.inputs, batch, strict=True):
            place.copy_(tensor)
        self.recording.replay()

    def means(self) -> tuple[dict[str, float], dict[str, float]]:
        """Means since the epoch began, of what was measured and of the terms; waits for the GPU."""
        count, *sums = self.sums.tolist()
        means = [value / max(count, 1.0) for value in sums]
        measured = dict(zip(self.seen[1:], means, strict=False))
        return measured, dict(zip(self.terms, means[len(measured) :], strict=True))

    def fault_found(self) -> tuple[int, list[str]] | None:
        """Step and terms of the first loss that was not finite, or none; waits for the GPU."""
        step = int(self.fault)
        if step < 0:
            return None
        values = zip(self.terms, self.fault_terms.tolist(), strict=True)
        return step, [name for name, value in values if not math.isfinite(value)]


def _reason(error: BaseException) -> str:
    """What went wrong first; an error while recording causes another when recording ends."""
    while error.__context__ is not None:
        error = error.__context__
    return str(error).strip().split("\n")[0]


def _key(*numbers: int) -> int:
    """One number that stands for several."""
    word = 0
    for number in numbers:
        word = mix_int(word + number)
    return word
