"""Warning about prototypes that no optimizer trains, the most common mistake with these losses."""

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

    Scans all live objects, so it is called only once, before a warning.
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

    Changes show in a parameter's version number, and a global hook counts the steps of all
    optimizers. So neither gradient accumulation nor an optimizer that holds the prototypes but
    steps less often than others causes a warning.
    """

    patience = 3
    steps_taken = 0
    """Steps of all optimizers so far; nothing needs checking until it changes."""

    def __init__(self) -> None:
        self.done = False
        self.idle = 0
        self.noticed = -1
        self.seen: tuple[int, int] | None = None
        self.sample: Tensor | None = None

    def notice(self, prototypes: Tensor, features: Tensor, *, used: bool = True) -> None:
        """Compare the prototypes with those of the last call, at the start of a training call.

        ``used`` says whether the loss reads the prototypes at all.
        """
        # Features have not been validated yet and may not be a tensor.
        learned = prototypes.requires_grad and getattr(features, "requires_grad", False)
        if self.done or not (used and learned):
            return
        if not torch.is_grad_enabled() or not len(prototypes):
            # A rank may hold no prototypes of a sharded head.
            return
        if prototypes.is_cuda and torch.cuda.is_current_stream_capturing():
            # During graph capture no step is taken, and synchronising is not allowed.
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
                # An optimizer may bypass the version number, or may not have stepped yet.
                unchanged = self.sample is not None and (prototypes[:1] == self.sample).all()
                if not _held(prototypes) and bool(unchanged):
                    warnings.warn(
                        f"the prototypes did not change in {self.idle} steps of an optimizer: "
                        "does it hold criterion.parameters()? "
                        "criterion.param_groups(backbone, lr=...) has both",
                        stacklevel=5,
                    )
                self.sample = None
