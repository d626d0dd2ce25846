"""Softmax cross entropy and related losses on scores, without an angle."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tammes.split import Split, cross_entropy, softplus
from tammes.term_decorator import term
from tammes.terms import Setting


def _check_smoothing(smoothing: float, **_: Setting) -> None:
    if not 0 <= smoothing <= 1:
        raise ValueError(f"softmax expects smoothing between 0 and 1, got {smoothing}")


@term(reads="target others mean", unless_zero={"mean": "smoothing"}, check=_check_smoothing)
def softmax(split: Split, *, smoothing: float = 0.0, margin: Setting = 0.0) -> Tensor:
    r"""Softmax cross entropy, with optional label smoothing and additive margin.

    .. math::
        \ell = -(1-\varepsilon)\log p_y - \frac{\varepsilon}{C}\sum_c \log p_c
             = \log\bigl(1 + e^{\Lambda - t}\bigr)
               + \varepsilon\,\frac{C-1}{C}\,\bigl(t - \bar f\bigr),
        \qquad t = s\,(a_y - m)

    with :math:`\Lambda` the log-sum-exp and :math:`\bar f` the mean of the other classes' scores.
    On a :class:`tammes.CosineHead` it is :func:`tammes.normface`, with a margin
    :func:`tammes.cosface`. ``margin=1`` is the modified loss (15) of Kobayashi 2019, and a
    negative margin on ``LinearHead(..., scale=5.0)`` the loss of Liu et al. 2020.

    Args:
        split: similarities of N examples, split by their labels.
        smoothing: fraction :math:`\varepsilon` of the label distributed over all C classes.
        margin: similarity :math:`m` by which the target class must win; any sign.

    Returns:
        Loss of each example, shape ``(N,)``.

    Example:
        >>> logits, labels = torch.tensor([[2.0, 0.5, -1.0]]), torch.tensor([0])
        >>> tammes.softmax()(tammes.split(logits, labels))
        tensor([0.2413])
        >>> torch.nn.functional.cross_entropy(logits, labels)
        tensor(0.2413)

    References:
        Kobayashi, Large Margin in Softmax Cross-Entropy Loss, BMVC 2019, eq. 2, 3, 13, 15.
        Liu et al., Negative Margin Matters, ECCV 2020, eq. 7.
    """
    loss = cross_entropy(split, split.target, margin)
    if isinstance(smoothing, Tensor) or smoothing:
        target = split.scale * (split.target - margin)
        loss = loss + smoothing * split.rivals / (split.rivals + 1) * (target - split.mean)
    return loss


@term(reads="target hardest")
def hard_bias(split: Split, *, margin: Setting = 1.0) -> Tensor:
    r"""Softplus of the hardest class only: the softmax with its bias replaced by a constant.

    .. math:: \ell = \log\bigl(1 + e^{\max_{c\ne y} f_c - f_y + m}\bigr)

    The softmax has :math:`\hat\rho = \Lambda - \max_{c\ne y} f_c` in place of :math:`m`, so
    ``softmax(margin=m)`` is the larger of the two. Kobayashi uses it to show that deep networks do
    not train well with the constant.

    Args:
        split: similarities of N examples, split by their labels.
        margin: score :math:`m` by which the target class must win.

    Returns:
        Loss of each example, shape ``(N,)``.

    Example:
        >>> logits = torch.tensor([[2.0, 0.5, -1.0]])
        >>> tammes.hard_bias()(tammes.split(logits, torch.tensor([0])))
        tensor([0.4741])

    References:
        Kobayashi, Large Margin in Softmax Cross-Entropy Loss, BMVC 2019, eq. 1 and Section 3.
    """
    return softplus(split.scale * (split.hardest - split.target) + margin)


@term(reads="target hardest")
def crammer_singer(split: Split, *, margin: Setting = 1.0) -> Tensor:
    r"""Multi-class hinge of Crammer and Singer: only the hardest class counts.

    .. math:: \ell = \max\bigl(0,\ \max_{c\ne y} f_c - f_y + m\bigr)

    The piecewise linear relative of :func:`tammes.hard_bias`, and below it everywhere.

    Args:
        split: similarities of N examples, split by their labels.
        margin: score :math:`m` by which the target class must win.

    Returns:
        Loss of each example, shape ``(N,)``.

    Example:
        >>> logits = torch.tensor([[2.0, 0.5, -1.0], [0.0, 0.5, -1.0]])
        >>> tammes.crammer_singer()(tammes.split(logits, torch.tensor([0, 0])))
        tensor([0.0000, 1.5000])

    References:
        Crammer and Singer, On the Algorithmic Implementation of Multiclass Kernel-based Vector
        Machines, JMLR 2001; Kobayashi 2019, eq. 1.
    """
    return (split.scale * (split.hardest - split.target) + margin).relu()


def _check_focal(gamma: float, **_: Setting) -> None:
    if gamma < 0:
        raise ValueError(f"focal expects gamma of 0 or more, got {gamma}")


@term(reads="target others", check=_check_focal)
def focal(split: Split, *, gamma: Setting = 2.0, margin: Setting = 0.0) -> Tensor:
    r"""Focal loss: cross entropy that decreases for well classified examples.

    .. math:: \ell = (1 - p_y)^\gamma\,(-\log p_y)

    The non-target mass :math:`1 - p_y` is computed as the sigmoid of :math:`\Lambda - f_y`, which
    does not cancel. ``gamma=0`` is :func:`tammes.softmax`.

    Args:
        split: similarities of N examples, split by their labels.
        gamma: exponent of the non-target mass.
        margin: similarity by which the target class must win.

    Returns:
        Loss of each example, shape ``(N,)``.

    Example:
        >>> logits = torch.tensor([[2.0, 0.5, -1.0]])
        >>> tammes.focal(gamma=2.0)(tammes.split(logits, torch.tensor([0])))
        tensor([0.0111])

    References:
        Lin et al., Focal Loss for Dense Object Detection, ICCV 2017, eq. 4.
    """
    excess = split.others - split.scale * (split.target - margin)
    return torch.exp(gamma * F.logsigmoid(excess)) * softplus(excess)


def _hinge_threshold(split: Split, *, margin: Setting) -> tuple[Tensor]:
    return (split.target - margin / split.scale,)


def _over(similarity: Tensor, threshold: Tensor) -> Tensor:
    return (similarity - threshold).relu()


@term(reads="target mean", map_others=_over, row_numbers=_hinge_threshold)
def hinge(split: Split, *, margin: Setting = 1.0) -> Tensor:
    r"""Dense multi-class hinge: every class within the margin counts.

    .. math:: \ell = \frac{1}{C-1}\sum_{c\ne y}\max(0,\ f_c - f_y + m)

    It is :math:`C/(C-1)` times ``torch.nn.functional.multi_margin_loss``, which divides by C.

    Args:
        split: excesses :math:`\max(0, f_c - f_y + m)` of N examples, split by their labels.
        margin: score :math:`m` by which the target class must win over each other class.

    Returns:
        Loss of each example, shape ``(N,)``.

    Example:
        >>> logits = torch.tensor([[1.0, 0.5, -1.0]])
        >>> tammes.hinge()(tammes.split(logits, torch.tensor([0]), reads=["target", "rest"]))
        tensor([0.2500])

    References:
        Kobayashi, Large Margin in Softmax Cross-Entropy Loss, BMVC 2019, eq. 14.
    """
    return split.mean


@term(reads="target softplus")
def bce(split: Split, *, average: bool = False) -> Tensor:
    r"""Binary cross entropy of every class against its absence.

    .. math:: \ell = \log(1 + e^{-f_y}) + \sum_{c\ne y}\log(1 + e^{f_c})

    Args:
        split: similarities of N examples, split by their labels, with ``rest`` or ``softplus``.
        average: divide by the number of classes.

    Returns:
        Loss of each example, shape ``(N,)``.

    Example:
        >>> logits = torch.tensor([[1.0, 0.0, -1.0]])
        >>> tammes.bce()(tammes.split(logits, torch.tensor([0]), reads=["target", "rest"]))
        tensor([1.3197])

    References:
        Named as a classification loss in Kobayashi, Direct-Sum of losses, 2024.
    """
    if split.softplus is None:
        raise ValueError("bce expects a split with rest, got one without: add it to reads")
    loss = softplus(-split.scale * split.target) + split.softplus
    return loss / (split.rivals + 1) if average else loss


@term(reads="target others")
def large_margin_gaussian(
    split: Split, *, margin: Setting = 0.3, likelihood: Setting = 0.1
) -> Tensor:
    r"""LGM: the target Gaussian must win with its squared distance enlarged.

    .. math::
        \ell = \log\bigl(1 + e^{\Lambda - (1+\alpha) f_y}\bigr) - \lambda f_y,
        \qquad f_c = -\tfrac12\lVert x-\mu_c\rVert^2

    For a :class:`tammes.GaussianHead`. The margin is the multiplicative one of
    ``gm_softmax(alpha1=1+α, alpha2=1+α)``; the second term, a likelihood, keeps features near
    their prototypes.

    Args:
        split: negative half squared distances of N examples, split by their labels.
        margin: :math:`\alpha`, relative increase of the squared distance to the target prototype.
        likelihood: weight :math:`\lambda` of the likelihood.

    Returns:
        Loss of each example, shape ``(N,)``.

    Example:
        >>> scores = -torch.tensor([[1.0, 4.0, 9.0]]) / 2
        >>> tammes.large_margin_gaussian()(tammes.split(scores, torch.tensor([0])))
        tensor([0.2973])

    References:
        Wan et al., Rethinking Feature Distribution for Loss Functions in Image Classification,
        CVPR 2018, eq. 14 and 15.
    """
    score = split.scale * split.target
    return softplus(split.others - (1 + margin) * score) - likelihood * score
