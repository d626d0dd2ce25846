"""One-vs-rest losses: a binary decision for every class, with a learned threshold."""

import math
from typing import TYPE_CHECKING

from torch import Tensor

from tammes.split import Split, softplus
from tammes.states import LearnedNumber
from tammes.term_decorator import term
from tammes.terms import Setting, Term

if TYPE_CHECKING:
    from tammes.heads.head import Head


@term(
    reads="target softplus",
    in_cosines="margin",
    state=lambda term, head: LearnedNumber(math.log(10 * head.num_classes), head.weight),
    adjust=lambda state, **_: (-state, None),
)
def uniface(split: Split, *, margin: Setting = 0.4, negative_weight: Setting = 1.0) -> Tensor:
    r"""UniFace (unified cross entropy): one learned threshold for all examples and all classes.

    .. math::
        \ell = \log\bigl(1 + e^{-(s(\cos\theta_y - m) - b)}\bigr)
        + \lambda\sum_{c\ne y}\log\bigl(1 + e^{s\cos\theta_c - b}\bigr)

    The threshold :math:`b` is a parameter of the criterion that starts at :math:`\log(10\,C)`. A
    softmax only asks that the target class wins; here the target cosines of all examples must be
    above one similarity :math:`b/s`, and all others below it, as verification with a single
    threshold requires. With :math:`b = 0` and without margin it is :func:`tammes.bce`.

    Args:
        split: cosines of N examples minus the threshold, split by their labels.
        margin: cosine :math:`m` by which the target class must exceed the threshold.
        negative_weight: weight :math:`\lambda` of the other classes.

    Returns:
        Loss of each example, shape ``(N,)``.

    Example:
        >>> criterion = tammes.Criterion(tammes.CosineHead(4, 3), tammes.uniface())
        >>> sorted(criterion.state_dict())
        ['head.weight', 'states.uniface.value']
        >>> criterion.states["uniface"].value
        Parameter containing:
        tensor([3.4012], requires_grad=True)

    References:
        Zhou et al., UniFace: Unified Cross-Entropy Loss for Deep Face Recognition, ICCV 2023.
    """
    if split.softplus is None:
        raise ValueError("uniface expects a split with rest, got one without: add it to reads")
    own = softplus(-split.scale * (split.target - margin))
    return own + negative_weight * split.softplus


def _check_sphereface2(margin: float, balance: float, power: float) -> None:
    if not 0 < balance < 1:
        raise ValueError(f"sphereface2 expects balance between 0 and 1, got {balance}")
    if power <= 0:
        raise ValueError(f"sphereface2 expects a power above 0, got {power}")


def _balanced_offset(term: Term, head: "Head") -> LearnedNumber:
    """Offset at which both terms have equal gradients while all cosines are 0, as at the start."""
    margin, balance, power = (_typical(term.settings[k]) for k in ("margin", "balance", "power"))
    scale, learned = head.scale, head.log_scale
    if isinstance(scale, Tensor):
        # On the meta device it has no value; the offset will come from a checkpoint.
        exact = scale if learned is None else learned.detach().double().exp()
        scale = 1.0 if exact.is_meta else exact.item()
    ratio = balance / ((1 - balance) * (head.num_classes - 1))
    away = scale * (2 * 0.5**power - 1 + margin)
    # The positive root of a quadratic equation in exp(offset), without cancellation.
    step = min(2 * scale * margin, 600.0)
    root = math.sqrt((1 - ratio) ** 2 + 4 * ratio * math.exp(-step))
    if ratio < 1:
        start = math.log(2 * ratio / (1 - ratio + root))
    else:
        start = math.log((ratio - 1 + root) / 2) + step
    # Three digits are enough, and do not depend on the precision of the scale.
    return LearnedNumber(round(start - away, 3), head.weight)


def _typical(setting: Setting) -> float:
    """A setting as a number; the mean of per-class values."""
    if isinstance(setting, tuple):
        return sum(setting) / len(setting)
    return float(setting)


def _sharpened(similarity: Tensor, power: Tensor | float) -> Tensor:
    """Sharpen similarities with a power, keeping the gradient of the plain ones."""
    bent = 2 * ((similarity.detach() + 1) / 2).clamp_min(0) ** power - 1
    return similarity + (bent - similarity.detach())


def _sharpened_others(similarity: Tensor, power: Tensor, offset: Tensor) -> Tensor:
    return _sharpened(similarity, power) + offset


def _sphereface2_numbers(
    split: Split, margin: Setting, balance: Setting, power: Setting, state: Tensor | None = None
) -> tuple[Setting, Tensor]:
    if state is None:
        raise ValueError("sphereface2 expects its state from a criterion, got none")
    return power, margin + state.to(split.target.dtype) / split.scale


@term(
    reads="target softplus",
    requires="cosine",
    in_cosines="margin",
    check=_check_sphereface2,
    state=_balanced_offset,
    map_others=_sharpened_others,
    row_numbers=_sphereface2_numbers,
)
def sphereface2(
    split: Split,
    *,
    margin: Setting = 0.4,
    balance: Setting = 0.7,
    power: Setting = 3.0,
    state: Tensor | None = None,
) -> Tensor:
    r"""SphereFace2 (type C): a binary classifier for every class, on sharpened cosines.

    .. math::
        \ell = \frac{1}{s}\Bigl[\lambda\log\bigl(1 + e^{-s(g(\cos\theta_y) - m) - b}\bigr)
        + (1 - \lambda)\sum_{c\ne y}\log\bigl(1 + e^{s(g(\cos\theta_c) + m) + b}\bigr)\Bigr],
        \qquad g(z) = 2\Bigl(\frac{z+1}{2}\Bigr)^t - 1

    The offset :math:`b` is a parameter of the criterion, initialised so that both terms have equal
    gradients. Classes do not compete with each other, so wrong labels do less harm, and one
    threshold serves all pairs. The gradient is that of the plain cosines, as in the official code.
    The paper uses :math:`s` from 30 to 40 and multiplies the loss by 50.

    Args:
        split: sharpened cosines of N examples, split by their labels.
        margin: cosine :math:`m` by which the target class must exceed the threshold, and the
            others stay below it.
        balance: :math:`\lambda`, weight of the target class.
        power: :math:`t`; 1 leaves the cosines unchanged.
        state: the offset; the criterion supplies it.

    Returns:
        Loss of each example, shape ``(N,)``.

    Example:
        >>> criterion = tammes.Criterion(tammes.CosineHead(4, 3), 50.0 * tammes.sphereface2())
        >>> sorted(criterion.state_dict())
        ['head.weight', 'states.sphereface2.value']

    References:
        Wen et al., SphereFace2: Binary Classification is All You Need for Deep Face Recognition,
        ICLR 2022.
    """
    if split.softplus is None or state is None:
        raise ValueError("sphereface2 expects a split and a state from a criterion, got none")
    own = softplus(-split.scale * (_sharpened(split.target, power) - margin) - state)
    return (balance * own + (1 - balance) * split.softplus) / split.scale
