"""Losses for classes of unequal size."""

from torch import Tensor

from tammes.split import Split, cross_entropy
from tammes.terms import Setting, term


def _check_counts(counts: tuple[float, ...], max_margin: float) -> None:
    if not isinstance(counts, tuple) or len(counts) < 2 or min(counts) <= 0:
        raise ValueError(f"ldam expects a positive count for each class, got {counts!r}")


def _relative_to_rarest(counts: tuple[float, ...], max_margin: float) -> dict[str, Setting]:
    return {"counts": tuple(count / min(counts) for count in counts)}


@term(
    reads="target others",
    in_cosines="max_margin",
    fixed="counts",
    check=_check_counts,
    prepare=_relative_to_rarest,
)
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
