"""Adaptive losses: a margin per example, from its norm or at random; an adaptive scale."""

from typing import NamedTuple

import torch
from torch import Tensor

from tammes._keyed_draws import step_key, uniform
from tammes.losses.angular import check_margins, margin_target, target_similarity
from tammes.similarity import norm
from tammes.split import Split, cross_entropy
from tammes.states import State, read
from tammes.term_decorator import term
from tammes.terms import Batch, Setting


@term(reads="target others", requires="adaptive")
def adacos(split: Split) -> Tensor:
    r"""AdaCos: softmax on cosines, with a scale that adapts to the angles of the batch.

    .. math::
        \ell = \log\bigl(1 + e^{\Lambda - s\cos\theta_y}\bigr),\qquad
        s \leftarrow \frac{\log \frac1N\sum_i e^{\Lambda_i}}{\cos\min(\pi/4,\ \theta_{med})}

    with the median :math:`\theta_{med}` of the angles to the target class and :math:`\Lambda_i` at
    the previous scale; the initial scale is :math:`\sqrt2\log(C-1)`. It is :func:`tammes.normface`
    on a head with such a scale, ``CosineHead(D, C, scale="adaptive")``, which also works with any
    other loss. For the fixed scale of the paper, use ``scale=tammes.heads.adacos_scale(C)``.

    Args:
        split: cosines of N examples, split by their labels.

    Returns:
        Loss of each example, shape ``(N,)``.

    Example:
        >>> head = tammes.CosineHead(4, 11, scale="adaptive")
        >>> criterion = tammes.Criterion(head, tammes.adacos())
        >>> _ = criterion(torch.randn(8, 4), torch.randint(11, (8,)))
        >>> sorted(criterion.state_dict())
        ['head.adaptive_scale', 'head.weight']

    References:
        Zhang et al., AdaCos: Adaptively Scaling Cosine Logits for Effectively Learning Deep Face
        Representations, CVPR 2019, eq. 13-15.
    """
    return cross_entropy(split, split.target)


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
        # With one valid example there is no standard deviation, with none no mean either.
        self.mean.lerp_(torch.where(batch.valid.any(), mean, self.mean), self.momentum)
        self.std.lerp_(torch.where(count > 1, std, self.std), self.momentum)


def _check_adaface(momentum: float, **_: Setting) -> None:
    if not 0 <= momentum <= 1:
        raise ValueError(f"adaface expects momentum between 0 and 1, got {momentum}")


@term(
    reads="gap length norm others",
    requires="angle",
    fixed="momentum",
    state=lambda term, head: NormStatistics(term.settings["momentum"]),
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

    with running mean :math:`\mu` and standard deviation :math:`\sigma` of the norms, which the
    criterion keeps. A short feature (:math:`k=-1`) gets :func:`tammes.arcface`, one of average norm
    :func:`tammes.cosface`. No gradient flows through :math:`k`. Where the angle would leave
    :math:`[0, \pi]`, the cosine is continued monotonically instead of being clipped.

    Args:
        split: cosines of N examples, split by their labels.
        margin: :math:`m`, in radians for one margin and as a cosine for the other.
        concentration: :math:`h`; norms within :math:`1/h` standard deviations of the mean are told
            apart.
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


def _check_magface(
    min_margin: float,
    max_margin: float,
    min_norm: float,
    max_norm: float,
    norm_weight: float,
    extension: str,
) -> None:
    check_margins(m2=min_margin, extension=extension)
    check_margins(m2=max_margin)
    if not 0 < min_norm < max_norm:
        raise ValueError(f"magface expects 0 < min_norm < max_norm, got {min_norm} and {max_norm}")


@term(reads="gap length norm others", requires="angle", check=_check_magface)
def magface(
    split: Split,
    *,
    min_margin: Setting = 0.45,
    max_margin: Setting = 0.8,
    min_norm: Setting = 10.0,
    max_norm: Setting = 110.0,
    norm_weight: Setting = 35.0,
    extension: str = "monotone",
) -> Tensor:
    r"""MagFace: the angular margin grows with the norm of the feature, and long ones are rewarded.

    .. math::
        \ell = \log\bigl(1 + e^{\Lambda - s\,\Phi(\theta_y)}\bigr)
        + \lambda\Bigl(\frac{1}{a} + \frac{a}{u_a^2}\Bigr),\qquad
        \Phi(\theta) = \cos(\theta + m(a)),\qquad
        m(a) = l_m + (u_m - l_m)\frac{a - l_a}{u_a - l_a}

    with :math:`a` the norm of the feature, clipped to :math:`[l_a, u_a]`. Gradients flow through
    it: the second term rewards long features and the margin makes them costly for hard examples, so
    that the norm becomes a measure of quality. With equal margins and :math:`\lambda = 0` it is
    :func:`tammes.arcface`.

    Args:
        split: cosines of N examples, split by their labels.
        min_margin: margin :math:`l_m` of the shortest features, in radians.
        max_margin: margin :math:`u_m` of the longest features.
        min_norm: :math:`l_a`, lower bound of the norm.
        max_norm: :math:`u_a`, upper bound of the norm.
        norm_weight: :math:`\lambda`, weight of the second term.
        extension: continuation of :math:`\Phi` past :math:`\pi`, see :func:`tammes.arcface`;
            ``"linear"`` is that of the authors' code with ``easy_margin=False``.

    Returns:
        Loss of each example, shape ``(N,)``.

    Example:
        >>> criterion = tammes.Criterion(tammes.CosineHead(4, 3), tammes.magface())
        >>> loss = criterion(20 * torch.randn(8, 4), torch.randint(3, (8,)))

    References:
        Meng et al., MagFace: A Universal Representation for Face Recognition and Quality
        Assessment, CVPR 2021.
    """
    size = split.norm.clamp_min(min_norm).clamp_max(max_norm)
    share = (size - min_norm) / (max_norm - min_norm)
    margin = min_margin + (max_margin - min_margin) * share
    loss = cross_entropy(split, target_similarity(split, m2=margin, extension=extension))
    return loss + norm_weight * (1 / size + size / max_norm**2)


class MarginDraws(State):
    """Random numbers for :func:`elasticface`, keyed by a seed, the step and the example.

    They do not depend on how the batch is distributed over ranks, and a resumed run continues with
    the same draws as an uninterrupted one.
    """

    steps: Tensor
    reads_features = False

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))

    def reading(self, batch: Batch) -> Tensor:
        """Draw a number between -1 and 1 for each example; zero in evaluation mode."""
        places = batch.first + batch.valid.cumsum(0)
        if not self.training:
            return torch.zeros_like(places, dtype=torch.float32)
        key = step_key(torch.full_like(self.steps, self.seed), self.steps)
        return uniform(read(key), places)

    def after(self, batch: Batch) -> None:
        """Count the step."""
        self.steps += 1


def _check_elasticface(margin: float, std: float, kind: str, seed: int) -> None:
    if kind not in ("arc", "cos"):
        raise ValueError(f"elasticface expects kind 'arc' or 'cos', got {kind!r}")
    if std < 0:
        raise ValueError(f"elasticface expects std of 0 or more, got {std}")
    if not isinstance(seed, int):
        raise ValueError(f"elasticface expects a whole number as seed, got {seed!r}")
    check_margins(m2=margin if kind == "arc" else 0.0)


@term(
    reads="gap length others",
    requires="angle",
    fixed="seed",
    state=lambda term, head: MarginDraws(term.settings["seed"]),
    check=_check_elasticface,
)
def elasticface(
    split: Split,
    *,
    margin: Setting = 0.5,
    std: Setting = 0.0125,
    kind: str = "arc",
    seed: int = 0,
    state: Tensor | None = None,
) -> Tensor:
    r"""ElasticFace: a random margin, drawn for each example of each batch.

    .. math::
        \ell = \log\bigl(1 + e^{\Lambda - s\,t}\bigr),\qquad
        t = \cos(\theta_y + E)\ \text{or}\ \cos\theta_y - E,\qquad
        E \sim \mathcal{N}(m, \sigma^2)

    So classes need not all be separated by the same margin. With ``std=0``, and in evaluation mode,
    it is :func:`tammes.arcface` or :func:`tammes.cosface`. The variant that sorts the drawn margins
    by the cosines of the batch (ElasticFace+) is not implemented.

    Args:
        split: cosines of N examples, split by their labels.
        margin: mean :math:`m`, in radians or, for ``"cos"``, a cosine: 0.35 in the paper.
        std: standard deviation :math:`\sigma`.
        kind: ``"arc"`` adds to the angle, ``"cos"`` subtracts from the cosine.
        seed: seed of the draws, which depend on it, the step and the position in the batch.
        state: the draws; the criterion supplies them.

    Returns:
        Loss of each example, shape ``(N,)``.

    Example:
        >>> criterion = tammes.Criterion(tammes.CosineHead(4, 3), tammes.elasticface())
        >>> _ = criterion(torch.randn(8, 4), torch.randint(3, (8,)))
        >>> criterion.states["elasticface"].steps
        tensor([1])

    References:
        Boutros et al., ElasticFace: Elastic Margin Loss for Deep Face Recognition, CVPR Workshops
        2022.
    """
    drawn = margin
    if state is not None:
        normal = 2**0.5 * state.to(split.gap.dtype).erfinv()
        drawn = margin + std * normal
    return cross_entropy(split, margin_target(split, drawn, kind))
