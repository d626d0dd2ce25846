"""Losses for classes of unequal size."""

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tammes._setting_values import normalize_setting
from tammes.split import Split, cross_entropy
from tammes.term_decorator import term
from tammes.terms import Setting


def _check_counts(caller: str, counts: tuple[float, ...]) -> None:
    if not isinstance(counts, tuple) or len(counts) < 2 or min(counts) <= 0:
        raise ValueError(f"{caller} expects a positive count for each class, got {counts!r}")


def _check_ldam(counts: tuple[float, ...], max_margin: float) -> None:
    _check_counts("ldam", counts)


def _relative_to_rarest(counts: tuple[float, ...], max_margin: float) -> dict[str, Setting]:
    return {"counts": tuple(count / min(counts) for count in counts)}


@term(
    reads="target others",
    in_cosines="max_margin",
    fixed="counts",
    check=_check_ldam,
    prepare=_relative_to_rarest,
)
def ldam(split: Split, counts: Setting, *, max_margin: Setting = 0.5) -> Tensor:
    r"""LDAM: a cosine margin that is larger for rarer classes.

    .. math::
        \ell = \log\bigl(1 + e^{\Lambda - s(\cos\theta_y - \Delta_y)}\bigr),\qquad
        \Delta_j = m_{\max}\,\Bigl(\frac{\min_i n_i}{n_j}\Bigr)^{1/4}

    That is :func:`tammes.cosface` with a margin per class. The paper combines it with deferred
    re-weighting, :class:`tammes.schedules.DeferredReweighting`.

    Args:
        split: cosines of N examples, split by their labels.
        counts: number of training examples of each class, C of them.
        max_margin: margin :math:`m_{\max}` of the rarest class.

    Returns:
        Loss of each example, shape ``(N,)``.

    Example:
        >>> cosine = torch.tensor([[0.9, 0.2], [0.9, 0.2]])
        >>> term = tammes.ldam(counts=[1000, 10])
        >>> term(tammes.split(cosine, torch.tensor([0, 1]), scale=10.0))
        tensor([4.4224e-03, 1.2000e+01])

    References:
        Cao et al., Learning Imbalanced Datasets with Label-Distribution-Aware Margin Loss,
        NeurIPS 2019, eq. 13.
    """
    return cross_entropy(split, split.target, max_margin * counts**-0.25)


def _check_adjustment(
    caller: str, counts: tuple[float, ...], tau: float, gamma: float = 0.0
) -> None:
    _check_counts(caller, counts)
    if not (math.isfinite(tau) and math.isfinite(gamma)):
        raise ValueError(f"{caller} expects finite settings, got tau={tau}, gamma={gamma}")


def _log_priors(counts: Tensor, tau: float) -> tuple[Tensor, None]:
    return tau * (counts / counts.sum()).log(), None


@term(
    reads="target others",
    fixed="counts tau",
    check=functools.partial(_check_adjustment, "logit_adjustment"),
    adjust=_log_priors,
)
def logit_adjustment(split: Split, counts: Setting, *, tau: float = 1.0) -> Tensor:
    r"""Logit adjustment: training lowers the scores of rare classes, which learn to compensate.

    .. math::
        \ell = -\log\frac{e^{f_y + \tau\log\pi_y}}{\sum_c e^{f_c + \tau\log\pi_c}},\qquad
        \pi_c = \frac{n_c}{\sum_j n_j}

    The scores then estimate those of balanced classes: predict with plain ``criterion.logits``.
    With ``tau=0`` or equal counts it is :func:`tammes.softmax`; ``tau=1`` is
    :func:`tammes.balanced_softmax`. :func:`tammes.adjust_logits` is the counterpart for a model
    trained without it.

    Args:
        split: adjusted scores of N examples, split by their labels.
        counts: number of training examples of each class, C of them.
        tau: :math:`\tau`, strength of the adjustment.

    Returns:
        Loss of each example, shape ``(N,)``.

    Example:
        >>> criterion = tammes.Criterion(
        ...     tammes.LinearHead(8, 3), tammes.logit_adjustment([500, 50, 5]))
        >>> loss = criterion(torch.randn(4, 8), torch.tensor([0, 1, 2, 0]))

    References:
        Menon et al., Long-Tail Learning via Logit Adjustment, ICLR 2021.
    """
    return cross_entropy(split, split.target)


def _scaled_log_priors(counts: Tensor, gamma: float, tau: float) -> tuple[Tensor, Tensor]:
    return _log_priors(counts, tau)[0], (counts / counts.max()) ** gamma


@term(
    reads="target others",
    requires="product",
    fixed="counts gamma tau",
    check=functools.partial(_check_adjustment, "vs_softmax"),
    adjust=_scaled_log_priors,
)
def vs_softmax(split: Split, counts: Setting, *, gamma: float = 0.3, tau: float = 1.0) -> Tensor:
    r"""VS loss (vector scaling): scores of rare classes are shrunk and lowered in training.

    .. math::
        \ell = -\log\frac{e^{g_y}}{\sum_c e^{g_c}},\qquad
        g_c = \Bigl(\frac{n_c}{\max_j n_j}\Bigr)^{\gamma} f_c + \tau\log\frac{n_c}{\sum_j n_j}

    ``gamma=0`` is :func:`tammes.logit_adjustment`, ``tau=0`` the CDT loss. Predict with plain
    ``criterion.logits``.

    Args:
        split: adjusted scores of N examples, split by their labels.
        counts: number of training examples of each class, C of them.
        gamma: :math:`\gamma`, exponent of the factors.
        tau: :math:`\tau`, strength of the offset.

    Returns:
        Loss of each example, shape ``(N,)``.

    Example:
        >>> criterion = tammes.Criterion(
        ...     tammes.LinearHead(8, 3), tammes.vs_softmax([500, 50, 5]))
        >>> loss = criterion(torch.randn(4, 8), torch.tensor([0, 1, 2, 0]))

    References:
        Kini et al., Label-Imbalanced and Group-Sensitive Classification under Overparameterization,
        NeurIPS 2021; Ye et al., Identifying and Compensating for Feature Deviation in
        Imbalanced Deep Learning, 2020 (CDT).
    """
    return cross_entropy(split, split.target)


def adjust_logits(logits: Tensor, counts: Sequence[float] | Tensor, *, tau: float = 1.0) -> Tensor:
    r"""Adjust logits after training: raise those of classes that are rare in the training set.

    .. math:: f_c - \tau\log\frac{n_c}{\sum_j n_j}

    For a model trained with a plain softmax; one trained with :func:`tammes.logit_adjustment` needs
    no adjustment. A negative ``tau`` gives the scores that :func:`tammes.logit_adjustment` sees in
    training.

    Args:
        logits: shape ``(..., C)``.
        counts: number of training examples of each class, C of them.
        tau: :math:`\tau`, strength of the adjustment.

    Returns:
        Adjusted logits, shape ``(..., C)``.

    Example:
        >>> tammes.adjust_logits(torch.tensor([[2.0, 1.5]]), [90, 10]).argmax(1)
        tensor([1])

    References:
        Menon et al., Long-Tail Learning via Logit Adjustment, ICLR 2021.
    """
    numbers = normalize_setting("adjust_logits", "counts", counts, ())
    _check_adjustment("adjust_logits", numbers, tau)
    if logits.shape[-1:] != (len(numbers),):
        raise ValueError(
            f"adjust_logits expects logits of {len(numbers)} classes, as many as counts, "
            f"got shape {tuple(logits.shape)}"
        )
    offset, _ = _log_priors(torch.tensor(numbers, dtype=torch.double), tau)
    return logits - offset.to(logits)


def margins_from_counts(
    counts: Sequence[float] | Tensor,
    *,
    smallest: float = 0.05,
    largest: float = 0.5,
    power: float = 0.25,
) -> tuple[float, ...]:
    r"""Margin of each class from its number of examples, larger for rarer classes.

    .. math:: m_c = m_{\min} + (m_{\max} - m_{\min})
              \frac{u_c - \min u}{\max u - \min u},\qquad u_c = n_c^{-p}

    For any loss whose margin may differ between classes. If all counts are equal, every margin is
    the mean of ``smallest`` and ``largest``.

    Args:
        counts: number of training examples of each class, C of them.
        smallest: margin of the most common class.
        largest: margin of the rarest class.
        power: :math:`p`; the larger, the more the rarest differ from the rest.

    Returns:
        The margin of each class.

    Example:
        >>> margins = tammes.margins_from_counts([10_000, 625, 16])
        >>> [round(margin, 4) for margin in margins]
        [0.05, 0.1625, 0.5]
        >>> criterion = tammes.ArcFace(8, 3, margin=margins)

    References:
        Ha et al., Google Landmark Recognition 2020 Competition Third Place Solution, 2020, with
        sub-centre ArcFace.
    """
    numbers = normalize_setting("margins_from_counts", "counts", counts, ())
    _check_counts("margins_from_counts", numbers)
    sizes = [count**-power for count in numbers]
    low, high = min(sizes), max(sizes)
    if low == high:
        return ((smallest + largest) / 2,) * len(sizes)
    return tuple(smallest + (largest - smallest) * (u - low) / (high - low) for u in sizes)
