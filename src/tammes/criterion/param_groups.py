"""Parameter groups of a backbone and a criterion, for an optimizer."""

from typing import Any

from torch import nn


def param_groups(
    criterion: nn.Module,
    backbone: nn.Module | None,
    *,
    lr: float,
    head_lr: float,
    weight_decay: float,
    head_weight_decay: float,
) -> list[dict[str, Any]]:
    """Group parameters: backbone; prototypes; bias and scalars, which have no weight decay.

    Args:
        criterion: parameters that it shares with the backbone count as the criterion's.
        backbone: the network that computes the features.
        lr: learning rate of the backbone.
        head_lr: learning rate of the criterion.
        weight_decay: weight decay of the backbone.
        head_weight_decay: weight decay of the prototypes.
    """
    if backbone is not None and not isinstance(backbone, nn.Module):
        raise TypeError(
            f"param_groups expects backbone to be a module, got {type(backbone).__name__}; give "
            "the network itself, not its parameters"
        )
    mine = [p for p in criterion.parameters() if p.requires_grad]
    known = {id(p) for p in criterion.parameters()}
    others = [] if backbone is None else backbone.parameters()
    theirs = [p for p in others if p.requires_grad and id(p) not in known]
    wanted = (
        (theirs, lr, weight_decay),
        ([p for p in mine if p.ndim > 1], head_lr, head_weight_decay),
        ([p for p in mine if p.ndim <= 1], head_lr, 0.0),
    )
    return [
        {"params": params, "lr": rate, "weight_decay": decay}
        for params, rate, decay in wanted
        if params
    ]
