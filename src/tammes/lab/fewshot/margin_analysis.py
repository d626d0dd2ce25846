"""Effect of a margin on novel classes: distances on base and novel classes, and eq. (12).

The negative-margin paper explains its margins by the discriminability phi of features: the mean
distance between classes over the mean distance within them. Inequality (12) predicts which of two
margins gives the larger phi on novel classes, from phi on the base classes and the probability that
two images of a novel class fall into the same base class. Both sides are measured here, so that the
prediction can be tested. The quantities are those of :mod:`tammes.geometry` and
:func:`tammes.metrics.functional.discriminability`.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tammes import geometry
from tammes.geometry.theory import margin_sides
from tammes.metrics.functional import (
    DiscriminabilityResult,
    DiscriminabilityValues,
    discriminability,
)
from tammes.similarity import unit


@dataclass(frozen=True, kw_only=True)
class MarginAnalysis:
    r"""Measurements of one model; derived ratios are infinite or NaN for collapsed classes.

    Attributes:
        base_intra: :math:`D_{intra}` of the base classes.
        base_inter: :math:`D_{inter}` of the base classes.
        novel_intra: :math:`D_{intra}` of the novel classes.
        novel_inter: :math:`D_{inter}` of the novel classes.
        same_base_class: :math:`P^s`, probability that two images of a novel class are assigned to
            the same base class.
    """

    base_intra: float
    base_inter: float
    novel_intra: float
    novel_inter: float
    same_base_class: float

    @property
    def base_ratio(self) -> float:
        r""":math:`\phi` of the base classes."""
        return float(self.result().base.ratio)

    @property
    def novel_ratio(self) -> float:
        r"""Measured :math:`\phi` of the novel classes."""
        return float(_values(self.novel_intra, self.novel_inter).ratio)

    @property
    def psi(self) -> float:
        r""":math:`\psi`, novel :math:`D_{inter}` over base :math:`D_{inter}`."""
        return float(_values(self.base_inter, self.novel_inter).ratio)

    @property
    def predicted_ratio(self) -> float:
        r""":math:`\phi` of the novel classes by (11), from the base classes, P^s and psi."""
        return geometry.novel_ratio(self.same_base_class, self.result())

    def measures(self) -> dict[str, float]:
        """Return the measurements by the quantity names of recipes."""
        return {
            "d_intra_base": self.base_intra,
            "d_inter_base": self.base_inter,
            "phi_base": self.base_ratio,
            "d_intra_novel": self.novel_intra,
            "d_inter_novel": self.novel_inter,
            "phi_novel": self.novel_ratio,
            "p_same": self.same_base_class,
        }

    def result(self) -> DiscriminabilityResult:
        """Return the distances as :func:`tammes.geometry.negative_margin_wins` takes them."""
        return DiscriminabilityResult(
            _values(self.base_intra, self.base_inter), _values(self.novel_intra, self.novel_inter)
        )


def _values(intra: float, inter: float) -> DiscriminabilityValues:
    """Combine two distances with their ratio, computed on tensors so that zeros give inf or NaN."""
    first, second = torch.tensor([intra, inter], dtype=torch.double)
    return DiscriminabilityValues(first, second, second / first)


@torch.no_grad()
def analyse(
    base: tuple[Tensor, Tensor],
    novel: tuple[Tensor, Tensor],
    assigned: Tensor | None = None,
) -> MarginAnalysis:
    """Measure distances on base and novel classes, and :math:`P^s`.

    Pairs of an example with itself are not counted.

    Args:
        base: features ``(N, D)`` and labels ``(N,)`` of base classes, preferably of images held out
            of training: training images make classes look tighter than they are.
        novel: features and labels of novel classes.
        assigned: base class predicted for each novel example, such as
            ``criterion.logits(features).argmax(1)``; by default the class with the nearest mean of
            unit base features.

    Example:
        >>> features = torch.tensor([[1.0, 0.1], [1.0, -0.1], [0.1, 1.0], [-0.1, 1.0]])
        >>> labels = torch.tensor([0, 0, 1, 1])
        >>> found = analyse((features, labels), (features, labels))
        >>> found.psi, found.same_base_class
        (1.0, 1.0)
    """
    for name, (features, _) in (("base", base), ("novel", novel)):
        if features.ndim != 2 or not len(features):
            raise ValueError(
                f"analyse expects {name} features of shape (N, D), one or more, "
                f"got {tuple(features.shape)}"
            )
    if base[0].shape[1] != novel[0].shape[1]:
        raise ValueError(
            "analyse expects base and novel features of one size, "
            f"got {base[0].shape[1]} and {novel[0].shape[1]}"
        )
    if assigned is None:
        assigned = nearest_base(*base, novel[0])
    on_base = discriminability(*base, distinct=True).base
    on_novel = discriminability(*novel, distinct=True).base
    return MarginAnalysis(
        base_intra=float(on_base.intra),
        base_inter=float(on_base.inter),
        novel_intra=float(on_novel.intra),
        novel_inter=float(on_novel.inter),
        same_base_class=geometry.same_class_probability(assigned, novel[1]),
    )


def nearest_base(features: Tensor, labels: Tensor, novel: Tensor) -> Tensor:
    """Return the base class whose mean unit feature has the largest cosine with each novel feature.

    For features and labels of base classes, and M novel features, the result has shape ``(M,)``.
    """
    directions = unit(features.double())
    present, places = labels.unique(return_inverse=True)
    means = directions.new_zeros(len(present), features.shape[1]).index_add_(0, places, directions)
    nearest = novel.double() @ unit(means).T
    return present[nearest.argmax(1)]


@dataclass(frozen=True)
class InequalityCheck:
    r"""Prediction of (12) for two margins, compared with the measurement.

    The inequality assumes one :math:`P^s` for both models, and that a novel class is a mixture of
    base classes. Here each model has its own :math:`P^s`, so the prediction is given for their
    mean and for each.

    Attributes:
        first: model trained with margin :math:`m_1`.
        second: model trained with :math:`m_2`.
        predicted: whether (12) with the mean of the two :math:`P^s` predicts a larger :math:`\phi`
            on novel classes for the first model.
        predicted_by_each: the same with the :math:`P^s` of the first and of the second model.
        so: whether the first model has the larger measured :math:`\phi` on novel classes.
        left: :math:`P^s\Delta`, the left side of (12) with the mean :math:`P^s`.
        right: :math:`t`, its right side.
    """

    first: MarginAnalysis
    second: MarginAnalysis
    predicted: bool
    predicted_by_each: tuple[bool, bool]
    so: bool
    left: float
    right: float

    @property
    def agrees(self) -> bool:
        """Whether the prediction of (12) is right."""
        return self.predicted == self.so

    @property
    def sentence(self) -> str:
        """The comparison in words."""
        more = "larger" if self.predicted else "not larger"
        actual = f"{self.first.novel_ratio:.4g} against {self.second.novel_ratio:.4g}"
        doubt = ""
        if len(set(self.predicted_by_each)) > 1:
            doubt = "; the P^s of the two models give opposite predictions"
        return (
            f"(12) predicts that phi on the novel classes is {more} with the first margin, and is "
            f"{'right' if self.agrees else 'wrong'}: {actual}{doubt}"
        )


def check_inequality(first: MarginAnalysis, second: MarginAnalysis) -> InequalityCheck:
    r"""Compare the prediction of (12) with the measurements.

    .. math:: \phi^n(m_2) < \phi^n(m_1) \iff P^s\,\Delta < t

    Args:
        first: measurements of the model trained with :math:`m_1`, the smaller margin in the paper.
        second: measurements of the model trained with :math:`m_2`.

    Raises:
        ValueError: classes of a model have collapsed, so that phi is not defined.

    References:
        Liu et al., Negative Margin Matters, ECCV 2020, eq. 12.
    """
    one, two = first.result(), second.result()
    shares = first.same_base_class, second.same_base_class
    left, right = margin_sides(sum(shares) / 2, one, two)
    if not all(map(math.isfinite, (left, right))) or math.isnan(
        first.novel_ratio + second.novel_ratio
    ):
        raise ValueError(
            "(12) expects two models whose classes are apart, got phi on novel classes of "
            f"{first.novel_ratio:.4g} and {second.novel_ratio:.4g}, "
            f"psi of {first.psi:.4g} and {second.psi:.4g}"
        )
    return InequalityCheck(
        first,
        second,
        predicted=left < right,
        predicted_by_each=(
            geometry.negative_margin_wins(shares[0], one, two),
            geometry.negative_margin_wins(shares[1], one, two),
        ),
        so=second.novel_ratio < first.novel_ratio,
        left=left,
        right=right,
    )
