"""Losses that weigh the other classes one by one, by how hard each is for the example."""

import torch
from torch import Tensor

from tammes.losses.angular import check_margins, target_similarity
from tammes.split import Split, cross_entropy
from tammes.terms import Setting, term


def _margin_target(split: Split, margin: Setting, kind: str) -> Tensor:
    """Similarity to the own class with an angular or a cosine margin, shape ``(N,)``."""
    return target_similarity(split, **({"m2": margin} if kind == "arc" else {"m3": margin}))


def _check_kind(caller: str, margin: float, kind: str, kinds: tuple[str, ...]) -> None:
    if kind not in kinds:
        raise ValueError(f"{caller} expects kind {' or '.join(map(repr, kinds))}, got {kind!r}")
    check_margins(m2=margin if kind == "arc" else 0.0)


def _check_mv(margin: float, emphasis: float, kind: str, adaptive: bool) -> None:
    _check_kind("mv_softmax", margin, kind, ("am", "arc"))
    if emphasis < 0:
        raise ValueError(f"mv_softmax expects emphasis of 0 or more, got {emphasis}")


def _mv_numbers(
    split: Split, margin: Setting, emphasis: Setting, kind: str, adaptive: bool
) -> tuple[Tensor | float, ...]:
    return _margin_target(split, margin, kind), 1 + emphasis * adaptive, emphasis


def _raised(similarity: Tensor, threshold: Tensor, factor: Tensor, more: Tensor) -> Tensor:
    return torch.where(similarity > threshold, factor * similarity + more, similarity)


@term(
    reads="gap length others",
    requires="cosine",
    fixed="adaptive kind",
    check=_check_mv,
    map_others=_raised,
    row_numbers=_mv_numbers,
)
def mv_softmax(
    split: Split,
    *,
    margin: Setting = 0.35,
    emphasis: Setting = 0.2,
    kind: str = "am",
    adaptive: bool = True,
) -> Tensor:
    r"""MV-Softmax: classes that the margin does not keep away count for more.

    .. math::
        \ell = \log\bigl(1 + e^{\Lambda - s\,T}\bigr),\qquad
        \Lambda = \log\sum_{c\ne y} e^{s\,h(\cos\theta_c)},\qquad
        h(a) = \begin{cases} (1+t)\,a + t & a > T\\ a & \text{else}\end{cases}

    with :math:`T = \cos\theta_y - m` or :math:`\cos(\theta_y + m)`; not ``adaptive``,
    :math:`h = a + t` where :math:`a > T`. ``emphasis=0`` is :func:`tammes.cosface` or
    :func:`tammes.arcface`.

    Args:
        split: mapped cosines of N examples, split by their labels.
        margin: :math:`m`, a cosine or, for ``"arc"``, in radians.
        emphasis: :math:`t`, by how much more a hard class counts.
        kind: ``"am"`` subtracts the margin from the cosine, ``"arc"`` adds it to the angle.
        adaptive: whether harder classes are raised by more, instead of all alike.

    Returns:
        Loss of each example, shape ``(N,)``.

    Example:
        >>> cosine = torch.tensor([[0.9, 0.2, -0.1], [0.3, 0.5, 0.1]])
        >>> rows = tammes.split(cosine, torch.tensor([0, 1]), scale=10.0, reads=["gap", "rest"])
        >>> tammes.mv_softmax()(rows)
        tensor([0.0312, 4.2014])

    References:
        Wang et al., Mis-classified Vector Guided Softmax Loss for Face Recognition, AAAI 2020.
    """
    return cross_entropy(split, _margin_target(split, margin, kind))
