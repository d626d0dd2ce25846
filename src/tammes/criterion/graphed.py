"""Criterion as CUDA graphs: a call and its gradients at one launch, where possible."""

import gc
import logging
import traceback
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from tammes._recomputation import checkpointing, recomputing
from tammes.cuda_graphs import Recording

if TYPE_CHECKING:
    from tammes.criterion.criterion import Criterion
    from tammes.criterion.evaluate_terms import Noted

_WARM_UP = 3
"""Calls before recording, so that kernels are compiled and workspaces allocated."""
_log = logging.getLogger("tammes")


class GraphedCriterion:
    """A criterion whose calls replay CUDA graphs; made by :meth:`Criterion.graphed`.

    It is called like the criterion, and shares everything with it: parameters, schedules, states
    and ``terms``. What a graph cannot replay runs as a plain call of the criterion: a batch of
    another shape, weights or settings for one call, evaluation, a second call before the backward
    pass of the first, a call inside an activation checkpoint. After a change of the loss, its
    settings, the device or autocast it records again. Hooks of the criterion run while recording,
    not in replays.

    Args:
        criterion: with its prototypes on a CUDA device.
        features: an example batch, shape ``(N, D)``.
        labels: shape ``(N,)``.

    Attributes:
        criterion: the criterion; its attributes are read and set here too.
        recorded: whether there are graphs to replay.
    """

    criterion: "Criterion"
    _graphs: "_Graphs | None"
    _failed: "_Conditions | None"
    _last: "weakref.ref[_Call] | None"

    def __init__(self, criterion: "Criterion", features: Tensor, labels: Tensor) -> None:
        vars(self).update(criterion=criterion, _graphs=None, _failed=None, _last=None)
        self._record(features, labels, _Conditions.now(criterion, features, labels))

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
        plain = plain or not features.is_cuda or torch.cuda.is_current_stream_capturing()
        if plain or recomputing() or checkpointing():
            return criterion(features, labels, weights=weights, **settings)
        now, graphs = _Conditions.now(criterion, features, labels), self._graphs
        if (graphs is None or now != graphs.conditions) and self._is_stale(now):
            self._record(features, labels, now)
            graphs = self._graphs
        if graphs is None or now != graphs.conditions or self._pending():
            return criterion(features, labels)
        call = _Call()
        vars(self)["_last"] = weakref.ref(call)
        loss: Tensor = _Replay.apply(graphs, call, features, labels, *graphs.parameters)
        # Not by assignment: nn.Module.__setattr__ takes longer than a launch.
        vars(criterion).update(_noted=graphs.noted[0], _noted_total=graphs.noted[1])
        return loss

    def __getattr__(self, name: str) -> Any:
        # While being copied, this object has no criterion yet.
        if name.startswith("__") or "criterion" not in vars(self):
            raise AttributeError(name)
        return getattr(self.criterion, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.criterion, name, value)

    def _is_stale(self, now: "_Conditions") -> bool:
        """Whether to record again: the criterion has changed, but not the shape of the batch."""
        known = self._failed if self._graphs is None else self._graphs.conditions
        changed = known is None or now.of_criterion != known.of_criterion
        return changed and (known is None or now.of_batch == known.of_batch) and not self._pending()

    def _pending(self) -> bool:
        """Whether the last call awaits its backward pass, so that its tensors must stay."""
        last = None if self._last is None else self._last()
        return last is not None and not last.done

    def _record(self, features: Tensor, labels: Tensor, conditions: "_Conditions") -> None:
        """Record the graphs, or log why that is not possible."""
        criterion, graphs = self.criterion, None
        # Free the memory of the old graphs first.
        vars(self)["_graphs"] = None
        kept = [(buffer, buffer._version, buffer.clone()) for buffer in _changing(criterion)]
        noted = criterion._noted, criterion._noted_total
        try:
            graphs = _Graphs(criterion, features, labels, conditions)
        except Exception as error:
            traceback.clear_frames(error.__traceback__)
            gc.collect()
            reason = str(error).strip().split("\n")[0]
            _log.warning("tammes: graphed() runs without CUDA graphs: %s", reason)
        # Conditions are compared by id, so what they are about is kept alive.
        failed = None if graphs else conditions
        vars(self).update(_graphs=graphs, _failed=failed, _alive=_compared(criterion))
        # Undo the steps that schedules and states took while warming up.
        criterion._noted, criterion._noted_total = noted
        with torch.no_grad():
            for buffer, version, value in kept:
                if buffer._version != version:
                    buffer.copy_(value)


def _changing(criterion: "Criterion") -> list[Tensor]:
    """Buffers that a call may change: all but the prototypes, where they are a buffer."""
    frozen = criterion.head.weight
    return [buffer for buffer in criterion.buffers() if buffer is not frozen]


class _Conditions(NamedTuple):
    """State of the criterion and of the batch for which a recording is valid.

    Objects are compared by id, so they must be kept alive, see :func:`_compared`.
    """

    of_criterion: tuple[Any, ...]
    of_batch: tuple[Any, ...]

    @classmethod
    def now(cls, criterion: "Criterion", features: Tensor, labels: Tensor) -> "_Conditions":
        """Conditions of a call."""
        settings, tensors, schedules = _compared(criterion)
        autocast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
        head = criterion.head
        return cls(
            (
                *(id(settings), autocast, *map(id, schedules)),
                # A scale that is learned or adaptive is one of the tensors.
                *(head.implementation, head._scale),
                *(criterion.reduction, criterion.ignore_index, criterion.validate),
                criterion._step_by_hand,
                *[(id(t), t.data_ptr(), t.requires_grad) for t in tensors],
            ),
            (
                *(features.shape, features.dtype, features.device, features.requires_grad),
                *(labels.shape, labels.dtype, labels.device, criterion.training),
            ),
        )


def _compared(criterion: "Criterion") -> tuple[Any, list[Tensor], tuple[nn.Module, ...]]:
    """Settings, tensors and schedules that a recording depends on."""
    # Not criterion.parameters(), which takes as long as a replay; attributes of modules are slow.
    modules = cast(dict[str, nn.Module], criterion._modules)
    head, states, schedules = modules["head"], modules["states"], modules["schedules"]
    found = [*head._parameters.values(), *head._buffers.values()]
    tensors = [tensor for tensor in found if tensor is not None]
    if states._modules:
        tensors += [*states.buffers(), *states.parameters()]
    return criterion.settings, tensors, (*schedules.modules(),) if schedules._modules else ()


class _Call:
    """Handle of one call: alive as long as its autograd graph is."""

    def __init__(self) -> None:
        self.done = False


class _Graphs:
    """Graphs of a call and of its gradients, with the tensors they read and write.

    The gradients of a mean or a sum are in the graph of the call, whether or not a backward pass
    follows, which multiplies them by that of the loss. In float16 that factor may keep them from
    underflowing, as a ``GradScaler`` has it do, so they have a graph of their own, like those of
    ``reduction="none"``.
    """

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
        # Separate leaves that share memory: the criterion's own may be part of a live graph on
        # another stream.
        leaves: dict[str, Tensor] = {name: nn.Parameter(p.detach()) for name, p in trained.items()}
        inputs: list[Tensor] = [self.features] if features.requires_grad else []
        inputs += leaves.values()
        if not inputs:
            raise ValueError("it needs features or prototypes that take a gradient")

        def call() -> Tensor:
            arguments = (self.features, self.labels)
            loss: Tensor = torch.func.functional_call(criterion, leaves, arguments)
            return loss

        dtypes = [tensor.dtype for tensor in inputs]
        if torch.is_autocast_enabled("cuda"):
            dtypes.append(torch.get_autocast_dtype("cuda"))
        at_once = criterion.reduction != "none" and torch.float16 not in dtypes
        self.forward = Recording(device)
        self.forward.stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self.forward.stream):
            for _ in range(_WARM_UP):
                torch.autograd.grad(call().sum(), inputs, allow_unused=True)
        torch.cuda.current_stream(device).wait_stream(self.forward.stream)
        with self.forward.record():
            loss = call()
            if at_once:
                found = torch.autograd.grad(loss, inputs, allow_unused=True)
        self.noted: tuple[dict[str, Noted], Tensor | float | None] = (
            criterion._noted,
            criterion._noted_total,
        )
        self.backward: Recording | None = None
        if not at_once:
            self.d_loss = torch.ones_like(loss)
            self.backward = Recording(device, self.forward.stream)
            with self.backward.record():
                found = torch.autograd.grad(loss, inputs, self.d_loss, allow_unused=True)
        self.loss = loss.detach()
        self.d_features = found[0] if features.requires_grad else None
        self.d_parameters = found[1:] if features.requires_grad else found


class _Replay(torch.autograd.Function):
    """A replayed call: tensors are copied in and out, since the next replay overwrites them."""

    @staticmethod
    def forward(
        ctx: Any,
        graphs: _Graphs,
        call: _Call,
        features: Tensor,
        labels: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        graphs.features.copy_(features)
        graphs.labels.copy_(labels)
        graphs.forward.replay()
        ctx.graphs, ctx.call = graphs, call
        ctx.save_for_backward(*parameters)
        return graphs.loss.clone()

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.call.done or torch.is_grad_enabled():
            raise RuntimeError(
                "a graphed call expects one backward pass, and none to be differentiated again: "
                "for more, call the criterion itself"
            )
        # Reading them raises an error if a parameter has been changed since.
        _ = ctx.saved_tensors
        graphs, ctx.call.done = ctx.graphs, True
        found = (graphs.d_features, None, *graphs.d_parameters)
        if graphs.backward is None:
            return None, None, *(None if each is None else each * d_loss for each in found)
        graphs.d_loss.copy_(d_loss)
        graphs.backward.replay()
        return None, None, *(None if each is None else each.clone() for each in found)
