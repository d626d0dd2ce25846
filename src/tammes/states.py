"""Memory of terms from batch to batch, and reads of buffers that a step changes afterwards."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from tammes._buffers import ExactBuffers
from tammes._recomputation import check_first_pass

if TYPE_CHECKING:
    from tammes.terms import Batch

_M = TypeVar("_M", bound=nn.Module)
Hook: TypeAlias = Literal["before", "after"]
"""Methods of a state that take notice of a batch."""


class State(ExactBuffers):
    """What a term remembers from batch to batch; registered in the criterion that holds it.

    Its buffers change in two hooks, which run in training mode only, without gradient. The term
    is given what :meth:`reading` returns, so a hook may write to a buffer in place.
    """

    def before(self, batch: "Batch") -> None:
        """Take notice of a batch before the term sees it."""

    def after(self, batch: "Batch") -> None:
        """Take notice of a batch after the term has seen it."""

    def notice(self, hook: Hook, batch: "Batch") -> None:
        """Run a hook; the storage of the buffers stays, also where the hook binds new tensors.

        A CUDA graph that is replayed, ``DistributedDataParallel`` and whoever holds a
        ``state_dict`` know them by it.
        """
        held = dict(self.named_buffers(remove_duplicate=False))
        getattr(self, hook)(batch)
        now = {name: self.get_buffer(name) for name in held}
        bound = [n for n, old in held.items() if now[n] is not old and now[n].shape == old.shape]
        # Copies: two buffers may have changed places.
        values = {name: now[name].clone() for name in bound}
        for name in bound:
            owner, _, leaf = name.rpartition(".")
            setattr(self.get_submodule(owner), leaf, held[name].copy_(values[name]))

    def reading(self, batch: "Batch") -> Any:
        """Copy what the term is to be given as ``state=`` for a batch: by default all of it.

        Override it where the term reads a small part of large buffers, and pass that part through
        :func:`tammes.states.read`.
        """
        return snapshot(self)

    def resize(self, keep: Tensor, new: int) -> None:
        """Follow the head: keep the classes in ``keep`` and append ``new`` ones."""


class States(nn.ModuleDict):
    """States of a criterion's terms, by name."""

    @torch.no_grad()
    def notice(self, hook: Hook, batch: "Batch") -> None:
        """Run a hook of all states."""
        for state in self.values():
            assert isinstance(state, State)
            state.notice(hook, batch)

    def reading(self, batches: "Mapping[str, Batch]") -> dict[str, Any]:
        """Copy what each term is given for the batch that it sees."""
        read = {}
        for name, state in self.items():
            assert isinstance(state, State)
            read[name] = state.reading(batches[name])
        return read


class Reading(NamedTuple):
    """Values of one call that later calls change.

    Attributes:
        scheduled: settings that follow a schedule.
        class_weights: weight of each class's examples, shape ``(C,)``, or none.
        states: what each stateful term is given.
    """

    scheduled: dict[str, Tensor]
    class_weights: Tensor | None
    states: dict[str, Any]


def read(value: Tensor) -> Tensor:
    """Copy a buffer, or a value computed from buffers, that the step may change afterwards.

    A plain copy is not enough under ``torch.compile``: it computes the value again in the backward
    pass, from the buffer as it is by then, and gradients are those of the next state (torch 2.13).
    It never does so with an operator it does not know.

    Example:
        >>> steps = torch.zeros((), dtype=torch.long)
        >>> now = read(steps)
        >>> steps += 1
        >>> now
        tensor(0)
    """
    if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
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
