"""Losses for open-set recognition: known classes stay compact, to leave room for unknown ones."""

from torch import Tensor

from tammes.split import Split, cross_entropy
from tammes.states import LearnedNumber
from tammes.term_decorator import term
from tammes.terms import Setting


@term(reads="target others distance")
def cac(split: Split, *, anchor: Setting = 0.1) -> Tensor:
    r"""CAC (class anchor clustering): features cluster around the anchor of their class.

    .. math::
        \ell = \log\Bigl(1 + \sum_{c\ne y} e^{d_y - d_c}\Bigr) + \lambda\,d_y,\qquad
        d_c = \lVert x - w_c\rVert

    For a :class:`tammes.DistanceHead`, in the paper with fixed anchors, ``anchors=10``. A softmax
    only compares distances with each other; the second term makes that to the target class small,
    so that an example of an unknown class, far from all anchors, can be detected with
    :func:`tammes.metrics.functional.cac_score`. With ``anchor=0`` it is :func:`tammes.softmax`. On
    another head, the first term is the softmax of its scores; the second is unchanged.

    Args:
        split: negative distances of N examples, split by their labels.
        anchor: weight :math:`\lambda` of the distance to the target prototype.

    Returns:
        Loss of each example, shape ``(N,)``.

    Example:
        >>> criterion = tammes.Criterion(tammes.DistanceHead(4, 3, anchors=10.0), tammes.cac())
        >>> loss = criterion(torch.randn(8, 4), torch.randint(3, (8,)))

    References:
        Miller et al., Class Anchor Clustering: A Loss for Distance-Based Open Set Recognition,
        WACV 2021.
    """
    return cross_entropy(split, split.target) + anchor * split.distance


@term(
    reads="target others distance",
    state=lambda term, head: LearnedNumber(0.0, head.weight),
)
def arpl(
    split: Split, *, bound: Setting = 0.1, margin: Setting = 1.0, state: Tensor | None = None
) -> Tensor:
    r"""ARPL: each class stays far from its reciprocal point, within a learned bound.

    .. math::
        \ell = \log\bigl(1 + e^{\Lambda - f_y}\bigr) + \lambda\max(0,\ d_y - R + m),\qquad
        f_c = s\,(d_c - x\cdot w_c),\qquad d_c = \tfrac1D\lVert x - w_c\rVert^2

    For a :class:`tammes.DistanceHead` with ``reciprocal=True``; its scale is the inverse
    temperature. The reciprocal point of a class represents everything outside it. The radius
    :math:`R`, a parameter of the criterion that starts at 0, bounds the distance of the class from
    it, so that unknown examples cannot get large scores; detect them with
    :func:`tammes.metrics.functional.logit_score`. With ``bound=0`` it is :func:`tammes.softmax`.

    Args:
        split: similarities of N examples, split by their labels.
        bound: weight :math:`\lambda` of the bound.
        margin: :math:`m`.
        state: the radius; the criterion supplies it.

    Returns:
        Loss of each example, shape ``(N,)``.

    Example:
        >>> criterion = tammes.Criterion(tammes.DistanceHead(4, 3, reciprocal=True), tammes.arpl())
        >>> loss = criterion(torch.randn(8, 4), torch.randint(3, (8,)))
        >>> criterion.states["arpl"].value
        Parameter containing:
        tensor([0.], requires_grad=True)

    References:
        Chen et al., Adversarial Reciprocal Points Learning for Open Set Recognition, TPAMI 2021,
        without the generated examples.
    """
    if state is None:
        raise ValueError("arpl expects the radius of a criterion, got none")
    beyond = (split.distance - state + margin).relu()
    return cross_entropy(split, split.target) + bound * beyond
