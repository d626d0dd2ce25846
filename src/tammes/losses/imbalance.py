"""Losses for classes of unequal size."""

from collections.abc import Sequence

from torch import Tensor

from tammes._setting_values import normalize_setting
from tammes.split import Split, cross_entropy
from tammes.terms import Setting, term


def _check_counts(caller: str, counts: tuple[float, ...]) -> None:
    if not isinstance(counts, tuple) or len(counts) < 2 or min(counts) <= 0:
        raise ValueError(f"{caller} expects a positive count for each class, got {counts!r}")


def _check_ldam(counts: tuple[float, ...], max_margin: float) -> None:
    _check_counts("ldam", counts)


def _relative_to_rarest(counts: tuple[float, ...], max_margin: float) -> dict[str, Setting]:
    return {"counts": tuple(count / min(counts) for count in counts)}


@term(reads="target others", fixed="counts", check=_check_ldam, prepare=_relative_to_rarest)
def ldam(split: Split, counts: Setting, *, max_margin: Setting = 0.5) -> Tensor:
    r"""LDAM: a cosine margin that is larger for rarer classes.

    .. math::
        \ell = \log\bigl(1 + e^{\Lambda - s(\cos\theta_y - \Delta_y)}\bigr),\qquad
        \Delta_j = m_{\max}\,\Bigl(\frac{\min_i n_i}{n_j}\Bigr)^{1/4}

    That is :func:`tammes.cosface` with a margin per class. Deferred re-weighting, its companion,
    is :class:`tammes.schedules.DeferredReweighting`.

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


def margins_from_counts(
    counts: Sequence[float] | Tensor,
    *,
    smallest: float = 0.05,
    largest: float = 0.5,
    power: float = 0.25,
) -> tuple[float, ...]:
    r"""Margins per class from their numbers of examples, larger for rarer classes.

    .. math:: m_c = m_{\min} + (m_{\max} - m_{\min})
              \frac{u_c - \min u}{\max u - \min u},\qquad u_c = n_c^{-p}

    For any loss whose margin may differ between classes. Where all counts are equal, so are the
    margins: the mean of the two.

    Args:
        counts: number of training examples of each class, C of them.
        smallest: margin of the commonest class.
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
    counts = normalize_setting("margins_from_counts", "counts", counts, ())
    _check_counts("margins_from_counts", counts)
    sizes = [count**-power for count in counts]
    low, high = min(sizes), max(sizes)
    if low == high:
        return ((smallest + largest) / 2,) * len(sizes)
    return tuple(smallest + (largest - smallest) * (u - low) / (high - low) for u in sizes)
