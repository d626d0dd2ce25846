"""Resize the per-class values of a criterion when its head gains or loses classes."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from tammes.states import State
from tammes.terms import Loss, Term

if TYPE_CHECKING:
    from tammes.criterion.criterion import Criterion


def check_resizable(criterion: "Criterion", num_classes: int) -> None:
    """Reject a number of classes that a term cannot handle, before anything changes."""
    for _, term in criterion.loss.leaves():
        if term.within is not None:
            rows = num_classes * criterion.head.similarity.centers
            term.within.check(criterion.head.embedding_size, rows)
    if "class_weights" in criterion.schedules:
        raise ValueError(
            "Criterion expects no schedule of class_weights when classes change, got one: "
            "it has a weight for each; take it out of criterion.schedules first"
        )


def check_followed(criterion: "Criterion") -> None:
    """Reject a head whose classes changed without the criterion's values for each of them."""
    classes, now = criterion.settings.num_classes, criterion.head.num_classes
    if classes == now:
        return
    owned = criterion.settings.per_class()
    if criterion.class_weights is not None or "class_weights" in criterion.schedules:
        owned.add("class_weights")
    for name, state in criterion.states.items():
        if type(cast(State, state)).resize is not State.resize:
            owned.add(name)
    if owned:
        raise ValueError(
            f"{type(criterion).__name__} expects a head of {classes} classes, since it has "
            f"{', '.join(sorted(owned))} for each, got {now}; criterion.add_classes and "
            "criterion.remove_classes change both"
        )


def check_new_values(criterion: "Criterion", n: int, values: Mapping[str, Sequence[float]]) -> None:
    """Require n new values for every setting with one value per class."""
    wanted = criterion.settings.per_class()
    if criterion.class_weights is not None:
        wanted.add("class_weights")
    got = {key: len(some) for key, some in values.items()}
    if got != dict.fromkeys(wanted, n):
        raise ValueError(
            f"add_classes expects {n} new values of each of {sorted(wanted)}, got {got}"
        )


def follow(
    criterion: "Criterion", keep: Tensor, new: int, values: Mapping[str, Sequence[float]]
) -> tuple[Loss, Tensor | None]:
    """Resize states, class weights and per-class settings, after the head has been resized.

    Args:
        criterion: its states are resized in place.
        keep: indices of the classes that stay.
        new: number of classes appended after them.
        values: per-class values of the new classes, by setting.

    Returns:
        The loss with its per-class settings resized, and the class weights.
    """
    weights = criterion.class_weights
    if weights is not None:
        fresh = weights.new_tensor(values.get("class_weights", ()))
        weights = torch.cat([weights[keep.to(weights.device)], fresh])
    for state in criterion.states.values():
        assert isinstance(state, State)
        state.resize(keep, new)
    kept = keep.tolist()

    def changed(term: Term) -> Term:
        per_class = {
            key: (*(value[i] for i in kept), *values.get(key, ()))
            for key, value in term.values
            if isinstance(value, tuple)
        }
        return term.altered(**per_class) if per_class else term

    return criterion.loss.map(changed), weights
