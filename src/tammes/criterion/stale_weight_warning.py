"""Warning for prototypes that no optimizer trains, the commonest mistake with such losses."""

import gc
import warnings

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

_listening = False


def _count_step(*_: object) -> None:
    UpdateWatch.steps_taken += 1


def _held(prototypes: Tensor) -> bool:
    """Whether any optimizer holds the prototypes, including one that has not stepped yet.

    It goes through all live objects, so it is called once, before a warning.
    """
    return any(
        parameter is prototypes
        for one in gc.get_objects()
        if issubclass(type(one), Optimizer)
        for group in one.param_groups
        for parameter in group["params"]
    )


class UpdateWatch:
    """Warns once when optimizers keep stepping and the prototypes never change.

    A parameter counts its changes in a version number, and torch tells of every optimizer's step.
    So accumulating gradients over many calls, without a step, is not mistaken for neglect. Nor is
    an optimizer that holds the prototypes and steps more seldom than others.
    """

    patience = 3
    steps_taken = 0
    """Steps of all optimizers; there is nothing to notice before the next one."""

    def __init__(self) -> None:
        self.done = False
        self.idle = 0
        self.noticed = -1
        self.seen: tuple[int, int] | None = None
        self.sample: Tensor | None = None

    def notice(self, prototypes: Tensor, features: Tensor, *, used: bool = True) -> None:
        """Compare the prototypes with the last call, at the start of a call in training mode.

        Only prototypes that the loss reads are ``used``.
        """
        # Nobody has looked yet whether features are a tensor.
        learned = prototypes.requires_grad and getattr(features, "requires_grad", False)
        if self.done or not (used and learned):
            return
        if not torch.is_grad_enabled() or not len(prototypes):
            # Of a sharded head's prototypes this rank may have none.
            return
        if prototypes.is_cuda and torch.cuda.is_current_stream_capturing():
            # A step that is being recorded is not taken, and must not be waited for.
            return
        global _listening
        if not _listening:
            register_optimizer_step_post_hook(_count_step)
            _listening = True
        self.noticed = self.steps_taken
        now = (prototypes._version, self.steps_taken)
        if self.seen is None:
            self.seen, self.sample = now, prototypes.detach()[:1].clone()
        elif now[0] != self.seen[0]:
            self.done, self.sample = True, None
        elif now[1] != self.seen[1]:
            self.seen = now
            self.idle += 1
            if self.idle >= self.patience:
                self.done = True
                # An optimizer may have written past the version number, or its turn is to come.
                unchanged = self.sample is not None and (prototypes[:1] == self.sample).all()
                if not _held(prototypes) and bool(unchanged):
                    warnings.warn(
                        f"the prototypes did not change in {self.idle} steps of an optimizer: "
                        "does it hold criterion.parameters()? "
                        "criterion.param_groups(backbone, lr=...) has both",
                        stacklevel=5,
                    )
                self.sample = None
