r"""Theorems on margin losses: lower bounds of their risk, and when a negative margin is better.

The theorems are those of Zhou et al., Learning Towards the Largest Margins, ICLR 2022, and of Liu
et al., Negative Margin Matters, ECCV 2020, with corrected signs and conditions (docs/geometry.md
lists the differences from the papers).
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tammes.metrics.functional import DiscriminabilityResult

Parameter = float | Sequence[float] | Tensor
"""A number, or one per example."""


def smallest_alpha1(count: int) -> float:
    r"""Smallest factor of the target's cosine for which the simplex is always the optimum.

    .. math:: \alpha_1 \ge \frac{k-2}{2(k-1)}

    Below it, at a small scale, the risk of balanced classes is lower if they collapse to one point.
    One half is enough for any number of classes.

    Args:
        count: number :math:`k` of classes, at least 2.

    Example:
        >>> smallest_alpha1(6)
        0.4
    """
    _check_count("smallest_alpha1", count)
    return (count - 2) / (2 * (count - 1))


def risk_lower_bound(
    count: int,
    scale: float,
    alpha1: Parameter = 1.0,
    beta1: Parameter = 0.0,
    alpha2: Parameter = 1.0,
    beta2: Parameter = 0.0,
    *,
    zero_centroid: bool = False,
) -> float:
    r"""Lower bound of the mean of :func:`tammes.gm_softmax` for unit features and prototypes.

    .. math:: B = \log\Bigl[e^{s(\alpha_2+\beta_2-\alpha_1-\beta_1)}
              + (k-1)\,e^{-s\left(\frac{1}{k-1}+\alpha_1+\beta_1\right)}\Bigr]

    Reached only at the simplex with every feature at its prototype, so for :math:`k \le d+1`;
    with more classes it is still a lower bound. It holds for balanced classes (Theorem 5) if
    :math:`\alpha_1 \ge` :func:`smallest_alpha1` and :math:`\alpha_2 \le \alpha_1`. Where the
    prototypes sum to zero (Theorem 8) it holds for any balance, parameters may differ between
    examples, and :math:`\alpha_1 > -\frac{1}{k-1}` is enough; then the mean of B is returned.

    Args:
        count: number :math:`k` of classes, at least 2.
        scale: inverse temperature :math:`s`, above 0.
        alpha1: factor of the target's cosine in the numerator.
        beta1: constant added to it.
        alpha2: factor of the target's cosine in the denominator.
        beta2: constant added to it; minus infinity excludes the target.
        zero_centroid: whether the prototypes are known to sum to zero.

    Returns:
        Lower bound of the mean loss.

    Example:
        >>> round(risk_lower_bound(10, 20.0), 12) == round(normface_lower_bound(10, 20.0), 12)
        True

    References:
        Zhou et al. 2022, Theorems 5 and 8, with the signs corrected.
    """
    _check_count("risk_lower_bound", count)
    if not scale > 0:
        raise ValueError(f"risk_lower_bound expects a scale above 0, got {scale}")
    values = [torch.as_tensor(v, dtype=torch.double) for v in (alpha1, beta1, alpha2, beta2)]
    a1, b1, a2, b2 = torch.broadcast_tensors(*values)
    if a1.ndim and not zero_centroid:
        raise ValueError(
            "risk_lower_bound expects one parameter for all examples unless zero_centroid=True, "
            f"got {tuple(a1.shape)}: with unequal examples the bound needs prototypes of sum zero"
        )
    excluded = b2 == -math.inf
    if not bool((excluded | (a2 <= a1)).all()):
        raise ValueError("risk_lower_bound expects alpha2 <= alpha1: otherwise it is no bound")
    least = -1 / (count - 1) if zero_centroid else smallest_alpha1(count)
    if not bool((a1 > least).all() if zero_centroid else (a1 >= least).all()):
        raise ValueError(
            f"risk_lower_bound expects alpha1 {'above' if zero_centroid else 'of at least'} "
            f"{least:.4g} for {count} classes, got {float(a1.min()):.4g}"
        )
    own = scale * (torch.where(excluded, -math.inf, a2 + b2) - a1 - b1)
    rest = math.log(count - 1) - scale * (1 / (count - 1) + a1 + b1)
    return float(torch.logaddexp(own, rest).mean())


def normface_lower_bound(count: int, scale: float) -> float:
    r"""Lower bound of the mean of :func:`tammes.normface`, and of SphereFace on unit features.

    .. math:: \log\bigl(1 + (k-1)\,e^{-sk/(k-1)}\bigr)

    Example:
        >>> round(normface_lower_bound(10, 4.0), 4)
        0.1005
    """
    return risk_lower_bound(count, scale)


def cosface_lower_bound(count: int, scale: float, margin: float) -> float:
    r"""Lower bound of the mean of :func:`tammes.cosface`.

    .. math:: \log\bigl(1 + (k-1)\,e^{-s\left(\frac{k}{k-1}-m\right)}\bigr)

    Example:
        >>> round(cosface_lower_bound(10, 4.0, margin=0.35), 4)
        0.3567
    """
    return risk_lower_bound(count, scale, 1.0, -margin, 1.0, -margin)


def combined_margin_lower_bound(
    count: int, scale: float, m2: float = 0.0, m3: float = 0.0
) -> float:
    r"""Lower bound of the mean of :func:`tammes.combined_margin`, whatever its :math:`m_1 \ge 1`.

    The bound of GM-Softmax with :math:`\alpha = \cos m_2,\ \beta = -m_3`, which is below this loss
    and equal to it if the feature is at its prototype. ``m2=0.5`` is ArcFace. Needs
    :math:`0 \le m_2` and :math:`\cos m_2 \ge` :func:`smallest_alpha1`.

    Example:
        >>> round(combined_margin_lower_bound(10, 4.0, m2=0.5), 4)
        0.1591
    """
    if m2 < 0:
        raise ValueError(f"combined_margin_lower_bound expects m2 of 0 or more, got {m2}")
    return risk_lower_bound(count, scale, math.cos(m2), -m3, math.cos(m2), -m3)


def lm_softmax_lower_bound(count: int, scale: float) -> float:
    r"""Lower bound of the mean of :func:`tammes.lm_softmax`.

    .. math:: -\frac{k}{k-1} + \frac{\log(k-1)}{s}

    Example:
        >>> round(lm_softmax_lower_bound(10, 4.0), 4)
        -0.5618
    """
    return risk_lower_bound(count, scale, beta2=-math.inf) / scale


def sample_margin_lower_bound(count: int) -> float:
    r"""Lower bound of the mean of :func:`tammes.sample_margin`, for balanced classes (Theorem 7).

    .. math:: -\frac{k}{k-1}

    So :math:`\frac{k}{k-1}` is the largest sample margin that all examples can have
    (Proposition 3).

    Example:
        >>> sample_margin_lower_bound(5)
        -1.25
    """
    _check_count("sample_margin_lower_bound", count)
    return -count / (count - 1)


def same_class_probability(assigned: Tensor, labels: Tensor) -> float:
    r"""Probability that two examples of a novel class are assigned to the same base class.

    .. math:: P^s = \frac1C\sum_c\sum_b \frac{n_{cb}(n_{cb}-1)}{n_c(n_c-1)}

    with :math:`n_{cb}` examples of the novel class :math:`c` assigned to the base class :math:`b`:
    the unbiased estimate of :math:`\sum_b \pi_{cb}^2` from pairs of different examples.

    Args:
        assigned: base class each example is nearest to, such as
            ``criterion.logits(features).argmax(1)``, shape ``(N,)``.
        labels: novel class of each example, shape ``(N,)``; classes with one example are excluded.

    Returns:
        The probability.

    Example:
        >>> assigned, labels = torch.tensor([4, 4, 7, 1, 1]), torch.tensor([0, 0, 0, 1, 1])
        >>> round(same_class_probability(assigned, labels), 4)
        0.6667

    References:
        Liu et al., Negative Margin Matters, ECCV 2020, eq. 10.
    """
    if assigned.ndim != 1 or labels.shape != assigned.shape:
        raise ValueError(
            "same_class_probability expects assigned and labels of shape (N,), "
            f"got {tuple(assigned.shape)} and {tuple(labels.shape)}"
        )
    cells, size = torch.stack([labels, assigned], 1).unique(dim=0, return_counts=True)
    _, owner, parts = cells[:, 0].unique(return_inverse=True, return_counts=True)
    size = size.double()
    count = size.new_zeros(len(parts)).index_add_(0, owner, size)
    pairs = size.new_zeros(len(parts)).index_add_(0, owner, size * (size - 1))
    several = count > 1
    if not bool(several.any()):
        raise ValueError("same_class_probability expects a class with two examples, got none")
    return float((pairs[several] / (count * (count - 1))[several]).mean())


def novel_ratio(probability: float, measured: "DiscriminabilityResult") -> float:
    r"""Discriminability of novel classes predicted from the base classes.

    .. math:: \phi^n = \frac{\psi}{1 - P^s(1 - 1/\phi^b)},\qquad
              \psi = \frac{D_{inter}^n}{D_{inter}^b}

    Exact if every novel class is a mixture of base classes. Of the novel classes only their mutual
    distance is used.

    Args:
        probability: :math:`P^s`, see :func:`same_class_probability`.
        measured: base and novel classes, by :func:`tammes.metrics.functional.discriminability`.

    Returns:
        The predicted ratio of the distances between and within novel classes; infinite or NaN
        if classes have collapsed.

    Example:
        >>> from tammes.metrics.functional import discriminability
        >>> features, labels = torch.eye(6)[[0, 1, 2, 3, 0, 2, 4, 5]], torch.arange(4).repeat(2)
        >>> measured = discriminability(features, labels, novel=[2, 3])
        >>> round(novel_ratio(0.5, measured), 4)
        1.6

    References:
        Liu et al., Negative Margin Matters, ECCV 2020, eq. 11.
    """
    psi, excess = _psi_and_slack(measured)
    return float(psi / (1 - probability * excess))


def negative_margin_wins(
    probability: float, negative: "DiscriminabilityResult", other: "DiscriminabilityResult"
) -> bool:
    r"""Whether novel classes are separated better after training with the first margin.

    .. math:: \phi^n(m_2) < \phi^n(m_1) \iff P^s\,\Delta < t,\qquad t = \psi_1 - \psi_2,\quad
              \Delta = \psi_1\bigl(1-\tfrac{1}{\phi^b_2}\bigr)
                     - \psi_2\bigl(1-\tfrac{1}{\phi^b_1}\bigr)

    with :math:`\psi` of :func:`novel_ratio`. The paper divides both sides by :math:`\Delta`,
    which is correct only if it is positive.

    Args:
        probability: :math:`P^s`, see :func:`same_class_probability`.
        negative: base and novel classes after training with :math:`m_1`, measured by
            :func:`tammes.metrics.functional.discriminability`.
        other: the same after training with :math:`m_2`.

    Returns:
        Whether :math:`m_1` is better for the novel classes; False if base classes have collapsed
        into one, since neither side is defined.

    Example:
        >>> from tammes.metrics.functional import discriminability
        >>> labels = torch.arange(4).repeat(2)
        >>> wide = discriminability(torch.eye(6)[[0, 1, 2, 3, 0, 2, 4, 5]], labels, novel=[2, 3])
        >>> tight = discriminability(torch.eye(6)[[0, 1, 2, 3, 0, 1, 3, 2]], labels, novel=[2, 3])
        >>> negative_margin_wins(0.5, wide, tight)
        True

    References:
        Liu et al., Negative Margin Matters, ECCV 2020, eq. 12.
    """
    left, right = margin_sides(probability, negative, other)
    return left < right


def margin_sides(
    probability: float, negative: "DiscriminabilityResult", other: "DiscriminabilityResult"
) -> tuple[float, float]:
    r"""Sides :math:`P^s\,\Delta` and :math:`t` of :func:`negative_margin_wins`."""
    (psi1, excess1), (psi2, excess2) = _psi_and_slack(negative), _psi_and_slack(other)
    return float(probability * (psi1 * excess2 - psi2 * excess1)), float(psi1 - psi2)


def _psi_and_slack(measured: "DiscriminabilityResult") -> tuple[Tensor, Tensor]:
    r"""Ratio :math:`\psi` of the inter-class distances, and :math:`1 - 1/\phi^b`.

    Tensors, since they may divide by zero.
    """
    if measured.novel is None:
        raise ValueError("novel_ratio expects novel classes to be measured, got base ones only")
    numbers = (measured.base.intra, measured.base.inter, measured.novel.inter)
    intra, base, novel = torch.tensor([float(each) for each in numbers], dtype=torch.double)
    return novel / base, 1 - intra / base


def _check_count(name: str, count: int) -> None:
    if count < 2:
        raise ValueError(f"{name} expects at least 2 classes, got {count}")
