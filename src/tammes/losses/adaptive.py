"""Margins that adapt to the quality of an example, estimated by the norm of its feature."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from tammes.losses.angular import target_similarity
from tammes.similarity import norm
from tammes.split import Split, cross_entropy
from tammes.states import State, read
from tammes.terms import Batch, Setting, Term, term

if TYPE_CHECKING:
    from tammes.heads.head import Head


class NormReading(NamedTuple):
    """Mean and standard deviation of feature norms, as one call reads them."""

    mean: Tensor
    std: Tensor


class NormStatistics(State):
    """Running mean and standard deviation of feature norms, for :func:`adaface`."""

    mean: Tensor
    std: Tensor

    def __init__(self, momentum: float) -> None:
        super().__init__()
        self.momentum = momentum
        self.register_buffer("mean", torch.tensor([20.0]))
        self.register_buffer("std", torch.tensor([100.0]))

    def reading(self, batch: Batch) -> "NormReading":
        """Copy the averages."""
        return NormReading(read(self.mean), read(self.std))

    def before(self, batch: Batch) -> None:
        """Update the running averages with this batch."""
        norms = norm(batch.features.to(self.mean.dtype)).clamp(1e-3, 100.0)
        count = batch.valid.sum().clamp_min(1)
        mean = torch.where(batch.valid, norms, 0.0).sum() / count
        variance = torch.where(batch.valid, (norms - mean).square(), 0.0).sum()
        std = (variance / (count - 1).clamp_min(1)).sqrt()
        # One valid example has no standard deviation, and without any there is no mean.
        self.mean.lerp_(torch.where(batch.valid.any(), mean, self.mean), self.momentum)
        self.std.lerp_(torch.where(count > 1, std, self.std), self.momentum)


def _adaface_state(term: Term, head: "Head") -> NormStatistics:
    return NormStatistics(term.settings["momentum"])


def _check_adaface(momentum: float, **_: Setting) -> None:
    if not 0 <= momentum <= 1:
        raise ValueError(f"adaface expects momentum between 0 and 1, got {momentum}")


@term(
    reads="gap length norm others",
    requires="angle",
    fixed="momentum",
    state=_adaface_state,
    check=_check_adaface,
)
def adaface(
    split: Split,
    *,
    margin: Setting = 0.4,
    concentration: float = 0.333,
    momentum: float = 0.01,
    state: NormReading | None = None,
) -> Tensor:
    r"""AdaFace: the feature norm, as a measure of quality, interpolates between two margins.

    .. math::
        \ell = \log\bigl(1 + e^{\Lambda - s(\Phi(\theta_y) - m(1+k))}\bigr),\qquad
        \Phi(\theta) = \cos(\theta - m\,k),\qquad
        k = \operatorname{clip}_{[-1,1]}\Bigl(h\,\frac{\lVert x\rVert - \mu}{\sigma}\Bigr)

    with running mean :math:`\mu` and deviation :math:`\sigma` of the norms, which the criterion
    keeps. A short feature (:math:`k=-1`) gets :func:`tammes.arcface`, one of average norm
    :func:`tammes.cosface`. No gradient flows through :math:`k`. Where the angle would leave
    :math:`[0, \pi]` the cosine is continued monotonically instead of being clipped.

    Args:
        split: cosines of N examples, split by their labels.
        margin: :math:`m` of both margins, radians or cosine.
        concentration: :math:`h`, inverse of the number of deviations that span the range.
        momentum: weight of a batch in the running averages.
        state: the running averages; the criterion supplies them.

    Returns:
        Loss of each example, shape ``(N,)``.

    Example:
        >>> criterion = tammes.Criterion(tammes.CosineHead(4, 3), tammes.adaface())
        >>> _ = criterion(torch.randn(8, 4), torch.randint(3, (8,)))
        >>> sorted(criterion.state_dict())
        ['head.weight', 'states.adaface.mean', 'states.adaface.std']

    References:
        Kim et al., AdaFace: Quality Adaptive Margin for Face Recognition, CVPR 2022, eq. 11-16.
    """
    if state is None:
        raise ValueError("adaface expects the running averages of a criterion, got none")
    norms = split.norm.detach().clamp(1e-3, 100.0)
    quality = ((norms - state.mean) / (state.std + 1e-3) * concentration).clamp(-1, 1)
    similarity = target_similarity(split, m2=-margin * quality, m3=margin * (1 + quality))
    return cross_entropy(split, similarity)
