"""State that terms keep from batch to batch, and copies of buffers that a step changes later."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn

from tammes._buffers import ExactBuffers
from tammes._recomputation import check_first_pass

if TYPE_CHECKING:
    from tammes.terms import Batch

_M = TypeVar("_M", bound=nn.Module)
Hook: TypeAlias = Literal["before", "after"]
"""Methods of a state that are called with each batch."""


class State(ExactBuffers):
    """State of a term that is kept from batch to batch, a submodule of the criterion.

    Its buffers change in two hooks, which run in training mode only, without gradient. The term
    receives the result of :meth:`reading`, so a hook may write to a buffer in place. Give a single
    number the shape ``(1,)``: ``torch.compile`` drops writes to float64 scalars on a CPU (torch
    2.13). For a learned parameter, use :class:`LearnedNumber`.

    Attributes:
        sees: fields of the target class, such as ``"target"``, to be given to :meth:`before` in
            ``batch.split``, without gradient, for the examples of all ranks.
        reads_features: whether a hook or :meth:`reading` reads the features of a batch.
    """

    sees: frozenset[str] = frozenset()
    reads_features: bool = True

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        for name, buffer in self.named_buffers(recurse=False):
            given = state_dict.get(prefix + name)
            if isinstance(given, Tensor) and given.ndim == 0 and buffer.shape == (1,):
                # Older state dicts have a scalar.
                state_dict[prefix + name] = given.view(1)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def before(self, batch: "Batch") -> None:
        """Update the state with a batch before the term is evaluated."""

    def after(self, batch: "Batch") -> None:
        """Update the state with a batch after the term was evaluated."""

    def run_hook(self, hook: Hook, batch: "Batch") -> None:
        """Run a hook; the buffers keep their storage even if the hook assigns new tensors.

        CUDA graphs, ``DistributedDataParallel`` and references to a ``state_dict`` depend on it.
        """
        before = dict(self.named_buffers(remove_duplicate=False))
        getattr(self, hook)(batch)
        now = {name: self.get_buffer(name) for name in before}
        rebound = [
            n for n, old in before.items() if now[n] is not old and now[n].shape == old.shape
        ]
        # Copies: two buffers may have been swapped.
        values = {name: now[name].clone() for name in rebound}
        for name in rebound:
            owner, _, leaf = name.rpartition(".")
            setattr(self.get_submodule(owner), leaf, before[name].copy_(values[name]))

    def reading(self, batch: "Batch") -> Any:
        """Copy the value that the term receives as ``state=`` for a batch; the whole by default.

        Override it if the term reads a small part of large buffers, and pass that part through
        :func:`tammes.states.read`; or for ``torch.compile`` with torch 2.11, which cannot trace the
        copy of a whole module.
        """
        return snapshot(self)

    def resize(self, keep: Tensor, new: int) -> None:
        """Resize along with the head: keep the classes in ``keep`` and append ``new`` ones."""


class LearnedNumber(State):
    """A scalar that is learned along with the prototypes, as a parameter of the criterion.

    The term receives the parameter itself, so gradients reach it; it is the same on all ranks.

    Args:
        start: initial value.
        like: tensor whose device, and dtype if wider than float32, the parameter takes.
    """

    reads_features = False

    def __init__(self, start: float, like: Tensor) -> None:
        super().__init__()
        dtype = torch.promote_types(like.dtype, torch.float32)
        # One-dimensional: fully_shard rejects scalar parameters.
        self.value = nn.Parameter(torch.full((1,), start, dtype=dtype, device=like.device))

    def reading(self, batch: "Batch") -> Tensor:
        """Return the parameter as a scalar, in single precision or wider."""
        return self.value.to(torch.promote_types(self.value.dtype, torch.float32)).reshape(())


class States(nn.ModuleDict):
    """States of a criterion's terms, by name."""

    @property
    def read_features(self) -> bool:
        """Whether any state reads features."""
        return any(cast(State, state).reads_features for state in self.values())

    @property
    def sees(self) -> frozenset[str]:
        """Fields of the target class that any state asks for."""
        return frozenset(field for state in self.values() for field in cast(State, state).sees)

    @torch.no_grad()
    def run_hook(self, hook: Hook, batch: "Batch") -> None:
        """Run a hook of all states."""
        for state in self.values():
            assert isinstance(state, State)
            state.run_hook(hook, batch)

    def reading(self, batches: "Mapping[str, Batch]") -> dict[str, Any]:
        """Copy the state that each term receives for its batch."""
        read = {}
        for name, state in self.items():
            assert isinstance(state, State)
            read[name] = state.reading(batches[name])
        return read


class Reading(NamedTuple):
    """Values that one call reads and later calls change.

    Attributes:
        scheduled: scheduled settings.
        class_weights: weight of each class's examples, shape ``(C,)``, or ``None``.
        states: copies of the states, by term.
        scale: copy of an adaptive scale, or ``None``.
    """

    scheduled: dict[str, Tensor]
    class_weights: Tensor | None
    states: dict[str, Any]
    scale: Tensor | float | None = None


def read(value: Tensor) -> Tensor:
    """Copy a buffer, or a value computed from buffers, that the step may change afterwards.

    A plain copy is not enough under ``torch.compile``, which recomputes the value in the backward
    pass from the buffer as it is by then, so that gradients are those of the next state (torch
    2.13). It never recomputes a custom operator.

    Example:
        >>> steps = torch.zeros((), dtype=torch.long)
        >>> now = read(steps)
        >>> steps += 1
        >>> now
        tensor(0)
    """
    # Not is_exporting(), which is true in every compilation by torch 2.11.
    if torch.compiler.is_dynamo_compiling():
        copied: Tensor = torch.ops.tammes.read(value)
        return copied
    return value.clone()


def snapshot(module: _M) -> _M:
    """Copy a module and its buffers as they are now; parameters and the rest are shared.

    Example:
        >>> warm_up = tammes.schedules.WarmUp(0.0, 0.5, steps=10)
        >>> then = snapshot(warm_up)
        >>> warm_up.step()
        >>> warm_up.steps, then.steps
        (tensor(1), tensor(0))
    """
    # Unlike copy.copy, torch.compile can trace this.
    copied = module.__class__.__new__(module.__class__)
    copied.__dict__.update(module.__dict__)
    copied.__dict__["_buffers"] = {
        name: None if buffer is None else read(buffer) for name, buffer in module._buffers.items()
    }
    copied.__dict__["_modules"] = {
        name: None if child is None else snapshot(child) for name, child in module._modules.items()
    }
    return copied


def _read(value: Tensor) -> Tensor:
    check_first_pass("a compiled module")
    return value.clone()


def _fake_read(value: Tensor) -> Tensor:
    return torch.empty_like(value)


if not hasattr(torch.ops.tammes, "read"):
    torch.library.define("tammes::read", "(Tensor value) -> Tensor")
    torch.library.impl("tammes::read", "CompositeExplicitAutograd", _read)
    torch.library.register_fake("tammes::read", _fake_read)
