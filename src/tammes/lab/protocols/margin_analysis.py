"""Why a margin helps or hurts novel classes: distances on base and novel classes, and (12).

The negative-margin paper explains its margins by the discriminability phi of features, the mean
distance between classes over that within them. From how phi changes on the base classes, and how
often two images of a novel class fall into the same base class, its inequality (12) says for which
of two margins phi is larger on the novel classes. Here both sides are measured, so that one sees
whether it was right. The quantities are those of :mod:`tammes.geometry` and
:func:`tammes.metrics.functional.discriminability`.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from tammes import geometry
from tammes.metrics.functional import (
    DiscriminabilityResult,
    DiscriminabilityValues,
    discriminability,
)
from tammes.similarity import unit


@dataclass(frozen=True)
class Analysed:
    r"""What is measured of one model.

    Attributes:
        base_intra: :math:`D_{intra}` of the base classes.
        base_inter: :math:`D_{inter}` of the base classes.
        base_ratio: :math:`\phi` of the base classes.
        novel_intra: :math:`D_{intra}` of the novel classes.
        novel_inter: :math:`D_{inter}` of the novel classes.
        novel_ratio: :math:`\phi` of the novel classes, as it is.
        psi: :math:`\psi`, novel :math:`D_{inter}` over base :math:`D_{inter}`.
        same_base_class: :math:`P^s`, how likely two images of a novel class fall into the same base
            class.
        predicted_ratio: :math:`\phi` of the novel classes by (11), from :math:`P^s`, :math:`\psi`
            and the base classes.
    """

    base_intra: float
    base_inter: float
    base_ratio: float
    novel_intra: float
    novel_inter: float
    novel_ratio: float
    psi: float
    same_base_class: float
    predicted_ratio: float

    def result(self) -> DiscriminabilityResult:
        """As :func:`tammes.geometry.negative_margin_wins` takes it."""

        def values(*numbers: float) -> DiscriminabilityValues:
            return DiscriminabilityValues(*(torch.tensor(x, dtype=torch.double) for x in numbers))

        return DiscriminabilityResult(
            values(self.base_intra, self.base_inter, self.base_ratio),
            values(self.novel_intra, self.novel_inter, self.novel_ratio),
        )


@torch.no_grad()
def analyse(
    base: tuple[Tensor, Tensor],
    novel: tuple[Tensor, Tensor],
    assigned: Tensor | None = None,
    *,
    distinct: bool = True,
) -> Analysed:
    """Distances on base and novel classes, and how novel classes spread over base classes.

    Args:
        base: features ``(N, D)`` and labels ``(N,)`` of base classes, of images held out of
            training if possible: on those trained on, classes look tighter than they are.
        novel: features and labels of novel classes.
        assigned: base class each novel example is taken for, such as
            ``criterion.logits(features).argmax(1)``; by default that of the nearest mean of unit
            base features.
        distinct: leave out the pair of an example with itself.

    Returns:
        What is measured.

    Example:
        >>> features = torch.tensor([[1.0, 0.1], [1.0, -0.1], [0.1, 1.0], [-0.1, 1.0]])
        >>> labels = torch.tensor([0, 0, 1, 1])
        >>> found = analyse((features, labels), (features, labels))
        >>> found.psi, found.same_base_class
        (1.0, 1.0)
    """
    if assigned is None:
        assigned = nearest_base(*base, novel[0])
    on_base = discriminability(*base, distinct=distinct).base
    on_novel = discriminability(*novel, distinct=distinct).base
    probability = float(geometry.same_class_probability(assigned, novel[1]))
    measured = DiscriminabilityResult(on_base, on_novel)
    return Analysed(
        base_intra=float(on_base.intra),
        base_inter=float(on_base.inter),
        base_ratio=float(on_base.ratio),
        novel_intra=float(on_novel.intra),
        novel_inter=float(on_novel.inter),
        novel_ratio=float(on_novel.ratio),
        psi=float(on_novel.inter / on_base.inter),
        same_base_class=probability,
        predicted_ratio=float(geometry.novel_ratio(probability, measured)),
    )


def nearest_base(features: Tensor, labels: Tensor, novel: Tensor) -> Tensor:
    """Base class whose mean of unit features has the largest cosine with each novel feature.

    Args:
        features: of base classes, shape ``(N, D)``.
        labels: theirs, shape ``(N,)``.
        novel: features of other classes, shape ``(M, D)``.

    Returns:
        Shape ``(M,)``, int64.
    """
    directions = unit(features.double())
    present, places = labels.unique(return_inverse=True)
    means = directions.new_zeros(len(present), features.shape[1]).index_add_(0, places, directions)
    nearest = novel.double() @ unit(means).T
    return present[nearest.argmax(1)]


@dataclass(frozen=True)
class Verdict:
    r"""What (12) says of two margins, and what is so.

    The inequality assumes one :math:`P^s` for both models, and that a novel class is a mixture of
    base classes. Each model has a :math:`P^s` of its own here, so what (12) says is given for
    their mean and for each.

    Attributes:
        first: model trained with margin :math:`m_1`.
        second: model trained with :math:`m_2`.
        predicted: by (12) with the mean of the two :math:`P^s`, the first has the larger
            :math:`\phi` on novel classes.
        predicted_by_each: the same with the :math:`P^s` of the first, and of the second.
        so: the first does have the larger :math:`\phi` on novel classes.
        left: :math:`P^s\Delta`, the left side of (12) with the mean :math:`P^s`.
        right: :math:`t`, its right side.
    """

    first: Analysed
    second: Analysed
    predicted: bool
    predicted_by_each: tuple[bool, bool]
    so: bool
    left: float
    right: float

    @property
    def agrees(self) -> bool:
        """Whether what (12) says is so."""
        return self.predicted == self.so

    @property
    def sentence(self) -> str:
        """The verdict in words."""
        more = "larger" if self.predicted else "not larger"
        actual = f"{self.first.novel_ratio:.4g} against {self.second.novel_ratio:.4g}"
        doubt = ""
        if len(set(self.predicted_by_each)) > 1:
            doubt = "; with the P^s of one model alone it would say both"
        return (
            f"(12) says that phi on the novel classes is {more} with the first margin, and it is "
            f"{'so' if self.agrees else 'not so'}: {actual}{doubt}"
        )

    def as_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {**asdict(self), "agrees": self.agrees, "sentence": self.sentence}


def judge(first: Analysed, second: Analysed) -> Verdict:
    r"""Hold (12) against what is so.

    .. math:: \phi^n(m_2) < \phi^n(m_1) \iff P^s\,\Delta < t

    Args:
        first: measured of the model trained with :math:`m_1`, the smaller margin in the paper.
        second: of that trained with :math:`m_2`.

    References:
        Liu et al., Negative Margin Matters, ECCV 2020, eq. 12.
    """
    one, two = first.result(), second.result()
    shares = first.same_base_class, second.same_base_class
    mean = sum(shares) / 2
    excess = [1 - each.base_intra / each.base_inter for each in (first, second)]
    return Verdict(
        first,
        second,
        predicted=bool(geometry.negative_margin_wins(mean, one, two)),
        predicted_by_each=(
            bool(geometry.negative_margin_wins(shares[0], one, two)),
            bool(geometry.negative_margin_wins(shares[1], one, two)),
        ),
        so=second.novel_ratio < first.novel_ratio,
        left=mean * (first.psi * excess[1] - second.psi * excess[0]),
        right=first.psi - second.psi,
    )
