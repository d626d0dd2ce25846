"""A backbone and a criterion as one Lightning module, and a callback that logs margins."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tammes.criterion.criterion import Criterion
from tammes.metrics.functional import class_margin
from tammes.optional import require

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule
else:
    _lightning = require("lightning.pytorch", extra="lightning")
    Callback, LightningModule = _lightning.Callback, _lightning.LightningModule

__all__ = ["MarginCallback", "MarginModule"]


class MarginModule(LightningModule):
    """A backbone and a criterion that Lightning's ``Trainer`` trains and saves together.

    A batch is ``(inputs, labels)``. Training logs ``train_loss``; validation and testing log loss
    and accuracy as ``val_loss``, ``val_accuracy``, ``test_loss`` and ``test_accuracy``; prediction
    returns logits. A checkpoint loads with
    ``MarginModule.load_from_checkpoint(path, backbone=..., criterion=...)``.

    Args:
        backbone: module that maps inputs to features of shape ``(N, D)``.
        criterion: head and loss.
        lr: learning rate of the backbone.
        head_lr: learning rate of the criterion, ``lr`` by default; ten times ``lr`` is usual.
        weight_decay: weight decay of backbone and prototypes; bias and scale have none.
        optimizer: builds the optimizer from parameter groups.
        lr_scheduler: builds a scheduler from the optimizer; it steps once per epoch.

    Example:
        >>> from tammes.integrations.lightning import MarginModule
        >>> module = MarginModule(torch.nn.Linear(8, 4), tammes.CosFace(4, 3), head_lr=0.01)
        >>> [group["lr"] for group in module.configure_optimizers().param_groups]
        [0.001, 0.01]
    """

    def __init__(
        self,
        backbone: nn.Module,
        criterion: Criterion,
        *,
        lr: float = 1e-3,
        head_lr: float | None = None,
        weight_decay: float = 0.0,
        optimizer: Callable[[list[dict[str, Any]]], Optimizer] = torch.optim.AdamW,
        lr_scheduler: Callable[[Optimizer], Any] | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(criterion, Criterion):
            raise TypeError(
                "MarginModule expects a criterion, such as tammes.CosFace(...), "
                f"got {type(criterion).__name__}"
            )
        if criterion.reduction == "none":
            raise ValueError(
                "MarginModule expects a criterion with reduction 'mean' or 'sum', got 'none'"
            )
        self.backbone = backbone
        self.criterion = criterion
        self.rates = {"lr": lr, "head_lr": head_lr, "weight_decay": weight_decay}
        self.make_optimizer = optimizer
        self.make_scheduler = lr_scheduler

    def forward(self, inputs: Any) -> Tensor:
        """Return the features of a batch, shape ``(N, D)``."""
        return self.backbone(inputs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        inputs, labels = batch
        loss = self.criterion(self(inputs), labels)
        self.log("train_loss", loss.detach(), batch_size=len(labels))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log loss and accuracy."""
        self._evaluate("val", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Log loss and accuracy."""
        self._evaluate("test", batch)

    def _evaluate(self, stage: str, batch: Any) -> None:
        inputs, labels = batch
        features = self(inputs)
        predicted = self.criterion.logits(features).argmax(1)
        found = {
            f"{stage}_loss": self.criterion(features, labels),
            f"{stage}_accuracy": (predicted == labels).float().mean(),
        }
        self.log_dict(found, batch_size=len(labels), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return logits without margin; a batch may be inputs, or inputs and labels."""
        inputs = batch[0] if isinstance(batch, tuple | list) else batch
        return self.criterion.logits(self(inputs))

    def configure_optimizers(self) -> Any:
        """Build the optimizer for backbone and criterion."""
        rates: Any = self.rates
        optimizer = self.make_optimizer(self.criterion.param_groups(self.backbone, **rates))
        if self.make_scheduler is None:
            return optimizer
        return [optimizer], [self.make_scheduler(optimizer)]


class MarginCallback(Callback):
    """Log terms, class margin and scale of a module that has a ``criterion``.

    Each term is logged as ``terms/NAME``; ``class_margin``, in degrees, and a learned ``scale``
    once per epoch.

    Args:
        step_schedules: advance the criterion's schedules once per optimizer step. For
            ``accumulate_grad_batches``, with which they would advance with every batch: attach them
            with ``criterion.schedule(by_hand=True, ...)``.

    Example:
        >>> from tammes.integrations.lightning import MarginCallback
        >>> callback = MarginCallback()  # Trainer(callbacks=[callback])
    """

    def __init__(self, *, step_schedules: bool = False) -> None:
        self.step_schedules = step_schedules
        self._steps = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start counting at the step of the checkpoint."""
        self._steps = trainer.global_step

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the terms of a batch."""
        found = {f"terms/{name}": value for name, value in pl_module.criterion.terms.items()}
        pl_module.log_dict(found, batch_size=1)
        if self.step_schedules and trainer.global_step > self._steps:
            self._steps = trainer.global_step
            pl_module.criterion.step()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Log class margin and scale."""
        head = pl_module.criterion.head
        found = {}
        if not head.is_sharded:
            # A sharded head has only the prototypes of this rank.
            found["class_margin"] = class_margin(head.prototypes.detach().float()).angle
        if isinstance(head.scale, Tensor):
            found["scale"] = head.scale.detach()
        pl_module.log_dict({name: value.float() for name, value in found.items()})
