"""Memory of terms from batch to batch, and what one call of a criterion reads of it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from tammes.reading import snapshot
from tammes.steady import Steady

if TYPE_CHECKING:
    from tammes.compose import Batch

Hook: TypeAlias = Literal["before", "after"]
"""Methods of a state that take notice of a batch."""


class State(Steady):
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
        :func:`tammes.reading.read`.
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
