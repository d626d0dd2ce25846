"""Losses that weight each other class by how hard it is for the example."""

import math

import torch
from torch import Tensor

from tammes.angles import angle
from tammes.losses.angular import (
    check_margin_kind,
    check_margins,
    margin_target,
    target_similarity,
)
from tammes.split import Split, cross_entropy, quadratic_above
from tammes.states import State, read
from tammes.term_decorator import term
from tammes.terms import Batch, Setting


def _check_mv(margin: float, emphasis: float, kind: str, adaptive: bool) -> None:
    check_margin_kind("mv_softmax", margin, kind, "am")
    if emphasis < 0:
        raise ValueError(f"mv_softmax expects emphasis of 0 or more, got {emphasis}")


def _mv_numbers(
    split: Split, margin: Setting, emphasis: Setting, kind: str, adaptive: bool
) -> tuple[Setting, ...]:
    return margin_target(split, margin, kind), emphasis, 1 + emphasis * adaptive, 0.0


@term(
    reads="gap length others",
    requires="cosine",
    check=_check_mv,
    map_others=quadratic_above,
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
    r"""MV-Softmax: other classes that violate the margin count more.

    .. math::
        \ell = \log\bigl(1 + e^{\Lambda - s\,T}\bigr),\qquad
        \Lambda = \log\sum_{c\ne y} e^{s\,h(\cos\theta_c)},\qquad
        h(a) = \begin{cases} (1+t)\,a + t & a > T\\ a & \text{else}\end{cases}

    with :math:`T = \cos\theta_y - m` or :math:`\cos(\theta_y + m)`. With ``adaptive=False``,
    :math:`h = a + t` where :math:`a > T`. ``emphasis=0`` is :func:`tammes.cosface` or
    :func:`tammes.arcface`.

    Args:
        split: mapped cosines of N examples, split by their labels.
        margin: :math:`m`, a cosine or, for ``"arc"``, in radians.
        emphasis: :math:`t`, how much more a hard class counts.
        kind: ``"am"`` subtracts the margin from the cosine, ``"arc"`` adds it to the angle.
        adaptive: whether harder classes are raised more, instead of all equally.

    Returns:
        Loss of each example, shape ``(N,)``.

    Example:
        >>> cosine = torch.tensor([[0.9, 0.2, -0.1], [0.3, 0.5, 0.1]])
        >>> reads = ["target", "gap", "length", "rest"]
        >>> rows = tammes.split(cosine, torch.tensor([0, 1]), scale=10.0, reads=reads)
        >>> tammes.mv_softmax()(rows)
        tensor([0.0312, 4.1263])

    References:
        Wang et al., Mis-classified Vector Guided Softmax Loss for Face Recognition, AAAI 2020.
    """
    return cross_entropy(split, margin_target(split, margin, kind))


class MeanTarget(State):
    """Running mean of the cosines to the target class, for :func:`curricularface`."""

    sees = frozenset(("target",))
    mean: Tensor

    def __init__(self, momentum: float) -> None:
        super().__init__()
        self.momentum = momentum
        self.register_buffer("mean", torch.zeros(1))

    def reading(self, batch: Batch) -> Tensor:
        """Copy the mean."""
        return read(self.mean)

    def before(self, batch: Batch) -> None:
        """Update the mean with this batch, before the batch uses it."""
        assert batch.split is not None
        target = batch.split.target.to(self.mean.dtype)
        # A batch that overflowed must not spoil the mean for good.
        counts = batch.valid & target.isfinite()
        count, total = counts.sum(), torch.where(counts, target, 0.0).sum()
        mean = torch.where(count > 0, total / count.clamp_min(1), self.mean)
        self.mean.lerp_(mean, self.momentum)


def _check_curricular(margin: float, momentum: float) -> None:
    check_margins(m2=margin)
    if not 0 <= momentum <= 1:
        raise ValueError(f"curricularface expects momentum between 0 and 1, got {momentum}")


def _curricular_numbers(
    split: Split, margin: Setting, momentum: float, state: Tensor | None = None
) -> tuple[Setting, ...]:
    if state is None:
        raise ValueError("curricularface expects the running mean of a criterion, got none")
    return target_similarity(split, m2=margin), 0.0, state.to(split.gap.dtype), 1.0


@term(
    reads="gap length others",
    requires="cosine",
    fixed="momentum",
    check=_check_curricular,
    state=lambda term, head: MeanTarget(term.settings["momentum"]),
    map_others=quadratic_above,
    row_numbers=_curricular_numbers,
)
def curricularface(
    split: Split,
    *,
    margin: Setting = 0.5,
    momentum: float = 0.01,
    state: Tensor | None = None,
) -> Tensor:
    r"""CurricularFace: hard classes count less early in training, and more later.

    .. math::
        \ell = \log\bigl(1 + e^{\Lambda - s\,T}\bigr),\qquad
        \Lambda = \log\sum_{c\ne y} e^{s\,h(\cos\theta_c)},\qquad
        h(a) = \begin{cases} a\,(t + a) & a > T\\ a & \text{else}\end{cases}

    with :math:`T = \cos(\theta_y + m)`, continued past :math:`\pi` as in :func:`tammes.arcface`,
    and :math:`t` the running mean of :math:`\cos\theta_y`, which starts at 0, is kept by the
    criterion, and is updated with each batch before it is used. If no other class is above
    :math:`T` it is :func:`tammes.arcface`.

    Args:
        split: mapped cosines of N examples, split by their labels.
        margin: :math:`m` in radians.
        momentum: weight of a batch in the running mean.
        state: the running mean; the criterion supplies it.

    Returns:
        Loss of each example, shape ``(N,)``.

    Example:
        >>> criterion = tammes.Criterion(tammes.CosineHead(4, 3), tammes.curricularface())
        >>> _ = criterion(torch.randn(8, 4), torch.randint(3, (8,)))
        >>> sorted(criterion.state_dict())
        ['head.weight', 'states.curricularface.mean']

    References:
        Huang et al., CurricularFace: Adaptive Curriculum Learning Loss for Deep Face Recognition,
        CVPR 2020.
    """
    return cross_entropy(split, target_similarity(split, m2=margin))


def _check_inter_topk(margin: float, top_k: int, penalty: float) -> None:
    check_margins(m2=margin)
    check_margins(m2=penalty)
    if not isinstance(top_k, int) or isinstance(top_k, bool) or top_k < 1:
        raise ValueError(f"inter_topk expects a whole number of 1 or more as top_k, got {top_k!r}")


def _inter_topk_numbers(
    split: Split, margin: Setting, top_k: int, penalty: Setting
) -> tuple[Tensor, Setting, Setting]:
    assert split.cutoff is not None
    if isinstance(penalty, Tensor):
        return split.cutoff, penalty.cos(), penalty.sin()
    return split.cutoff, math.cos(penalty), math.sin(penalty)


def _turned(similarity: Tensor, cutoff: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    square = (1 - similarity) * (1 + similarity)
    # Next to one, a cosine differs from it by rounding only, so the angle is unknown.
    known = square > 4 * torch.finfo(square.dtype).eps
    root = torch.where(known, torch.where(known, square, 1.0).sqrt(), 0.0)
    return torch.where(similarity >= cutoff, similarity * cosine + root * sine, similarity)


@term(
    reads="gap length others",
    requires="cosine",
    fixed="top_k",
    check=_check_inter_topk,
    map_others=_turned,
    row_numbers=_inter_topk_numbers,
    cutoff="top_k",
)
def inter_topk(
    split: Split, *, margin: Setting = 0.2, top_k: int = 5, penalty: Setting = 0.06
) -> Tensor:
    r"""Inter-TopK: the k nearest other classes are moved nearer by an angle.

    .. math::
        \ell = \log\bigl(1 + e^{\Lambda - s\cos(\theta_y + m)}\bigr),\qquad
        \Lambda = \log\sum_{c\ne y} e^{s\cos(\theta_c - m_c)}

    with :math:`m_c = m'` for the k largest of the other cosines and those that equal the k-th, and
    0 for the rest. ``penalty=0`` is :func:`tammes.arcface`.

    Args:
        split: mapped cosines of N examples, split by their labels.
        margin: :math:`m` in radians.
        top_k: k; if it is C - 1 or more, all other classes are penalised.
        penalty: :math:`m'` in radians.

    Returns:
        Loss of each example, shape ``(N,)``.

    Example:
        >>> cosine = torch.tensor([[0.9, 0.2, -0.1], [0.3, 0.5, 0.1]])
        >>> reads = ["target", "gap", "length", "rest"]
        >>> rows = tammes.split(cosine, torch.tensor([0, 1]), scale=10.0, reads=reads)
        >>> tammes.inter_topk(top_k=1)(rows)
        tensor([0.0048, 0.9499])

    References:
        Zhao et al., Multi-Query Multi-Head Attention Pooling and Inter-TopK Penalty for Speaker
        Verification, ICASSP 2022.
    """
    return cross_entropy(split, target_similarity(split, m2=margin))


def _circled(similarity: Tensor, margin: Tensor) -> Tensor:
    return (similarity.detach() + margin).relu() * (similarity - margin)


@term(
    reads="target others",
    requires="cosine",
    map_others=_circled,
    row_numbers=lambda split, margin: (margin,),
)
def circle(split: Split, *, margin: Setting = 0.25) -> Tensor:
    r"""Circle loss on classes: each similarity is weighted by how far it is from its optimum.

    .. math::
        \ell = \log\bigl(1 + e^{\Lambda - s\,[1 + m - a_y]_+(a_y - 1 + m)}\bigr),\qquad
        \Lambda = \log\sum_{c\ne y} e^{s\,[a_c + m]_+(a_c - m)}

    No gradient flows through the weights in brackets. The scale is the paper's :math:`\gamma`, 64
    to 256.

    Args:
        split: mapped cosines of N examples, split by their labels.
        margin: :math:`m`: the target cosine should exceed :math:`1 - m`, all others stay below m.

    Returns:
        Loss of each example, shape ``(N,)``.

    Example:
        >>> cosine = torch.tensor([[0.9, 0.2, -0.1], [0.3, 0.5, 0.1]])
        >>> reads = ["target", "gap", "length", "rest"]
        >>> rows = tammes.split(cosine, torch.tensor([0, 1]), scale=10.0, reads=reads)
        >>> tammes.circle()(rows)
        tensor([0.6001, 2.5984])

    References:
        Sun et al., Circle Loss: A Unified Perspective of Pair Similarity Optimization, CVPR 2020.
    """
    weight = (1 + margin - split.target.detach()).relu()
    return cross_entropy(split, weight * (split.target - 1 + margin))


def _sface_numbers(
    split: Split, own_angle: Setting, other_angle: Setting, steepness: Setting
) -> tuple[Setting, Setting]:
    return other_angle, steepness


def _sface_weighted(similarity: Tensor, other_angle: Tensor, steepness: Tensor) -> Tensor:
    theta = similarity.detach().clamp(-1, 1).acos()
    return (steepness * (other_angle - theta)).sigmoid() * similarity


@term(
    reads="target gap mean",
    requires="cosine",
    map_others=_sface_weighted,
    row_numbers=_sface_numbers,
)
def sface(
    split: Split,
    *,
    own_angle: Setting = 0.8,
    other_angle: Setting = 1.23,
    steepness: Setting = 80.0,
) -> Tensor:
    r"""SFace: pull and push vanish once an angle is good enough, so that noise is not fitted.

    .. math::
        \ell = -s\,\sigma(k(\theta_y - \alpha))\cos\theta_y
        + \sum_{c\ne y} s\,\sigma(k(\beta - \theta_c))\cos\theta_c

    with the sigmoid :math:`\sigma`. No gradient flows through the weights, so only the gradient is
    meaningful, not the value, which may be negative.

    Args:
        split: weighted cosines of N examples, split by their labels.
        own_angle: :math:`\alpha` in radians: below it, the target prototype no longer pulls.
        other_angle: :math:`\beta` in radians: beyond it, another prototype no longer pushes.
        steepness: :math:`k`.

    Returns:
        Loss of each example, shape ``(N,)``.

    Example:
        >>> cosine = torch.tensor([[0.9, 0.4, -0.1], [0.3, 0.5, 0.1]])
        >>> reads = ["target", "gap", "length", "rest"]
        >>> rows = tammes.split(cosine, torch.tensor([0, 1]), scale=10.0, reads=reads)
        >>> tammes.sface()(rows)
        tensor([ 3.9861, -4.8418])

    References:
        Zhong et al., SFace: Sigmoid-Constrained Hypersphere Loss for Robust Face Recognition, IEEE
        Transactions on Image Processing 2021.
    """
    theta = angle(split.gap, split.opposite).detach()
    pull = (steepness * (theta - own_angle)).sigmoid()
    return split.mean * split.rivals - split.scale * pull * split.target


def _filter_numbers(split: Split, threshold: Setting, **_: Setting) -> tuple[Setting, ...]:
    return threshold, 0.0, 0.0, 0.0


@term(
    reads="gap length others",
    requires="cosine",
    check=check_margins,
    map_others=quadratic_above,
    row_numbers=_filter_numbers,
)
def interclass_filter(
    split: Split,
    *,
    threshold: Setting = 0.4,
    m1: Setting = 1.0,
    m2: Setting = 0.5,
    m3: Setting = 0.0,
    extension: str = "monotone",
    gradient: str = "exact",
) -> Tensor:
    r"""Combined margins, ignoring classes so near that they are likely to be label noise.

    .. math::
        \ell = \log\bigl(1 + e^{\Lambda - s(\Phi(\theta_y) - m_3)}\bigr),\qquad
        \Lambda = \log\sum_{c\ne y} e^{s\,h(\cos\theta_c)},\qquad
        h(a) = \begin{cases} 0 & a > \tau\\ a & \text{else}\end{cases}

    A class that is nearer than the threshold is probably the same identity under another label, and
    does not push. ``threshold=1`` is :func:`tammes.combined_margin`.

    Args:
        split: filtered cosines of N examples, split by their labels.
        threshold: :math:`\tau`; the default is ours, the original code has none.
        m1: factor of the angle.
        m2: radians added to the angle.
        m3: cosine subtracted.
        extension: continuation past :math:`\pi`, see :func:`tammes.arcface`.
        gradient: gradient of the target class, see :func:`tammes.arcface`; the original code has
            ``"detached"``.

    Returns:
        Loss of each example, shape ``(N,)``.

    Example:
        >>> cosine = torch.tensor([[0.3, 0.9, -0.1]])
        >>> reads = ["target", "gap", "length", "others", "rest"]
        >>> rows = tammes.split(cosine, torch.tensor([0]), scale=10.0, reads=reads)
        >>> tammes.interclass_filter()(rows), tammes.arcface()(rows)
        (tensor([2.3538]), tensor([10.9407]))

    References:
        An et al., Killing Two Birds with One Stone: Efficient and Robust Training of Face
        Recognition CNNs by Partial FC, CVPR 2022 (code of InsightFace).
    """
    target = target_similarity(split, m1=m1, m2=m2, m3=m3, extension=extension, gradient=gradient)
    return cross_entropy(split, target)
