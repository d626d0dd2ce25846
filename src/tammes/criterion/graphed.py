"""Criterion as CUDA graphs: a call and its gradient without the launches."""

import gc
import logging
import traceback
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from tammes.cuda_graphs import Recording

if TYPE_CHECKING:
    from tammes.criterion.criterion import Criterion
    from tammes.criterion.evaluate_terms import Noted

_WARM_UP = 3
"""Calls before the recording, so that kernels are compiled and workspaces exist."""
_log = logging.getLogger("tammes")


class GraphedCriterion:
    """A criterion whose calls replay CUDA graphs; :meth:`Criterion.graphed` makes it.

    It is called like the criterion, and shares everything with it: parameters, schedules, states
    and ``terms``. What a graph cannot do runs as a plain call of the criterion: a batch of another
    shape, weights or settings for one call, evaluation, a second call before the backward pass of
    the first. After a change of the loss, the device or autocast it records anew.

    Args:
        criterion: with its prototypes on a CUDA device.
        features: a batch as it will be, shape ``(N, D)``.
        labels: shape ``(N,)``.

    Attributes:
        criterion: the criterion.
        recorded: whether there are graphs to replay.
    """

    def __init__(self, criterion: "Criterion", features: Tensor, labels: Tensor) -> None:
        self.criterion = criterion
        self._graphs: _Graphs | None = None
        self._failed: _Conditions | None = None
        self._last: weakref.ref[_Call] | None = None
        self._record(features, labels, _conditions(criterion, features, labels))

    @property
    def recorded(self) -> bool:
        """Whether there are graphs to replay."""
        return self._graphs is not None

    def __call__(
        self, features: Tensor, labels: Tensor, *, weights: Tensor | None = None, **settings: Any
    ) -> Tensor:
        """Loss of a batch, see :meth:`Criterion.forward`."""
        criterion = self.criterion
        plain = weights is not None or settings or not torch.is_grad_enabled()
        if plain or not features.is_cuda or torch.cuda.is_current_stream_capturing():
            return criterion(features, labels, weights=weights, **settings)
        now = _conditions(criterion, features, labels)
        if self._graphs is None or now.of_criterion != self._graphs.conditions.of_criterion:
            if now == self._failed or self._pending():
                return criterion(features, labels)
            self._record(features, labels, now)
        graphs = self._graphs
        if graphs is None or now != graphs.conditions or self._pending():
            return criterion(features, labels)
        call = _Call()
        self._last = weakref.ref(call)
        loss: Tensor = _Replay.apply(graphs, call, features, labels, *graphs.parameters)
        criterion._noted, criterion._noted_total = graphs.noted
        return loss

    def __getattr__(self, name: str) -> Any:
        # Only what this object does not have itself.
        return getattr(self.__dict__["criterion"], name)

    def _pending(self) -> bool:
        """Whether a call may still be differentiated, so that its numbers must stay."""
        last = None if self._last is None else self._last()
        return last is not None and not last.done

    def _record(self, features: Tensor, labels: Tensor, conditions: "_Conditions") -> None:
        """Record both graphs, or tell why that is not possible."""
        self._graphs = None
        kept = {name: buffer.clone() for name, buffer in self.criterion.named_buffers()}
        try:
            self._graphs = _Graphs(self.criterion, features, labels, conditions)
        except Exception as error:
            self._failed = conditions
            traceback.clear_frames(error.__traceback__)
            gc.collect()
            reason = str(error).strip().split("\n")[0]
            _log.warning("tammes: graphed() runs without CUDA graphs: %s", reason)
        # The calls that warmed up have stepped schedules and states.
        with torch.no_grad():
            for name, buffer in self.criterion.named_buffers():
                buffer.copy_(kept[name])


class _Conditions(NamedTuple):
    """What holds for a recording: of the criterion, and of the batch."""

    of_criterion: tuple[Any, ...]
    of_batch: tuple[Any, ...]


def _conditions(criterion: "Criterion", features: Tensor, labels: Tensor) -> _Conditions:
    head = criterion.head
    autocast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
    # Not criterion.parameters(), which takes as long as a replay.
    own = (p for p in head._parameters.values() if p is not None)
    parameters = tuple((p.data_ptr(), p.requires_grad) for p in own)
    return _Conditions(
        (id(criterion.settings), head.implementation, criterion.reduction, autocast, parameters),
        (
            *(features.shape, features.dtype, features.device, features.requires_grad),
            *(labels.shape, labels.dtype, labels.device, criterion.training),
        ),
    )


class _Call:
    """One call: alive as long as it can be differentiated."""

    def __init__(self) -> None:
        self.done = False


class _Graphs:
    """Graphs of a call and of its gradients, with the tensors they read and write."""

    def __init__(
        self, criterion: "Criterion", features: Tensor, labels: Tensor, conditions: _Conditions
    ) -> None:
        if not features.is_cuda:
            raise ValueError(f"it needs features on a CUDA device, got them on {features.device}")
        if criterion._scope() is not None:
            raise ValueError("it needs a batch of one process, got one of a process group")
        self.conditions, device = conditions, features.device
        self.features = features.detach().clone().requires_grad_(features.requires_grad)
        self.labels = labels.clone()
        trained = {n: p for n, p in criterion.named_parameters() if p.requires_grad}
        self.parameters = [*trained.values()]
        # Leaves of their own with the same memory: those of the criterion may be part of a graph
        # that is still alive, on another stream.
        leaves: dict[str, Tensor] = {name: nn.Parameter(p.detach()) for name, p in trained.items()}
        inputs: list[Tensor] = [self.features] if features.requires_grad else []
        inputs += leaves.values()
        if not inputs:
            raise ValueError("it needs features or prototypes that take a gradient")

        def call() -> Tensor:
            arguments = (self.features, self.labels)
            loss: Tensor = torch.func.functional_call(criterion, leaves, arguments)
            return loss

        self.forward = Recording(device)
        self.backward = Recording(device, self.forward.stream)
        self.forward.stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self.forward.stream):
            for _ in range(_WARM_UP):
                torch.autograd.grad(call().sum(), inputs, allow_unused=True)
        torch.cuda.current_stream(device).wait_stream(self.forward.stream)
        with self.forward.record():
            loss = call()
        self.noted: tuple[dict[str, Noted], Tensor | float | None] = (
            criterion._noted,
            criterion._noted_total,
        )
        self.d_loss = torch.ones_like(loss)
        with self.backward.record():
            found = torch.autograd.grad(loss, inputs, self.d_loss, allow_unused=True)
        self.loss = loss.detach()
        self.d_features = found[0] if features.requires_grad else None
        self.d_parameters = found[1:] if features.requires_grad else found


class _Replay(torch.autograd.Function):
    """A call by its graphs: tensors are copied in and out, so that nothing outlives a replay."""

    @staticmethod
    def forward(
        ctx: Any,
        graphs: _Graphs,
        call: _Call,
        features: Tensor,
        labels: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        graphs.features.detach().copy_(features)
        graphs.labels.copy_(labels)
        graphs.forward.replay()
        ctx.graphs, ctx.call = graphs, call
        return graphs.loss.clone()

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.call.done or torch.is_grad_enabled():
            raise RuntimeError(
                "a graphed call expects one backward pass, and none to be differentiated again: "
                "for more, call the criterion itself"
            )
        graphs, ctx.call.done = ctx.graphs, True
        graphs.d_loss.copy_(d_loss)
        graphs.backward.replay()
        found = (graphs.d_features, None, *graphs.d_parameters)
        return None, None, *(None if gradient is None else gradient.clone() for gradient in found)
