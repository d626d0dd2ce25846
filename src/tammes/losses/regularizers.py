"""Regularizers: terms on the split and terms on the prototypes."""

import torch
from torch import Tensor

from tammes.distributed.sharded_rows import ALL_ROWS_LOCAL, ShardedRows
from tammes.similarity import norm, unit
from tammes.split import Split
from tammes.term_decorator import term


def _check_kind(kind: str) -> None:
    if kind not in ("symmetric", "q_u", "u_q"):
        raise ValueError(f"logit_divergence expects kind 'symmetric', 'q_u' or 'u_q', got {kind!r}")


@term(reads="others expected mean", check=_check_kind)
def logit_divergence(split: Split, *, kind: str = "symmetric") -> Tensor:
    r"""Divergence of the softmax over the other classes from the uniform distribution.

    With :math:`q` the softmax over the classes :math:`c \ne y`, :math:`u` uniform on them,
    :math:`\bar f` the mean and :math:`E_q f` the expectation of their scores:

    .. math::
        D(q\|u) = E_q f - \Lambda + \log(C-1),\quad
        D(u\|q) = \Lambda - \bar f - \log(C-1),\quad
        \tilde D = \tfrac12\bigl(D(q\|u) + D(u\|q)\bigr) = \tfrac12\bigl(E_q f - \bar f\bigr)

    Added to the softmax with weight 0.3, it keeps the bias implied by the softmax large, and with
    it the margin. Zero for two classes.

    Args:
        split: similarities of N examples, split by their labels.
        kind: ``"symmetric"``, ``"q_u"`` or ``"u_q"``.

    Returns:
        Divergence of each example, shape ``(N,)``.

    Example:
        >>> logits = torch.tensor([[2.0, 0.5, -1.0], [2.0, 0.5, 0.5]])
        >>> tammes.logit_divergence()(tammes.split(logits, torch.tensor([0, 0])))
        tensor([0.2382, 0.0000])

    References:
        Kobayashi, Large Margin in Softmax Cross-Entropy Loss, BMVC 2019, eq. 8-11.
    """
    if kind == "symmetric":
        return (split.expected - split.mean) / 2
    log_count = torch.as_tensor(split.rivals, dtype=split.mean.dtype).log()
    if kind == "q_u":
        return split.expected - split.others + log_count
    return split.others - split.mean - log_count


@term(reads="target hardest", cosines=True)
def sample_margin(split: Split) -> Tensor:
    r"""Negative sample margin: cosine to the nearest wrong class minus that to the target class.

    .. math:: R_{sm} = \max_{c\ne y}\cos\theta_c - \cos\theta_y

    It uses cosines with any head, even next to a softmax on raw features, whose inner products
    could grow without limit. Zhou et al. add it to another loss with weight 0.5; alone
    it is hard to train. :func:`tammes.lm_softmax` is its smooth upper bound.

    Args:
        split: cosines of N examples, split by their labels.

    Returns:
        Negative margin of each example, shape ``(N,)``.

    Example:
        >>> cosine = torch.tensor([[0.9, 0.2, -0.1], [0.3, 0.5, 0.1]])
        >>> tammes.sample_margin()(tammes.split(cosine, torch.tensor([0, 1])))
        tensor([-0.7000, -0.2000])

    References:
        Zhou et al., Learning Towards the Largest Margins, ICLR 2022.
    """
    return split.hardest - split.target


@term(on="prototypes", reads="")
def zero_centroid(
    prototypes: Tensor, *, normalize: bool = True, shards: ShardedRows = ALL_ROWS_LOCAL
) -> Tensor:
    r"""Squared norm of the mean prototype.

    .. math:: R_W = \Bigl\lVert \frac1C\sum_j \hat w_j \Bigr\rVert^2

    Zero at the simplex, at most one. With imbalanced classes the optimum of the margin losses is
    the simplex only if this is kept at zero. Note that the gradient of one prototype decreases
    with the number of classes: released code sums instead of averaging, which is the weight
    :math:`C^2` here.

    Args:
        prototypes: shape ``(C, D)``.
        normalize: use the directions only.
        shards: access to the prototypes of other ranks; the criterion supplies it.

    Returns:
        The penalty, a scalar.

    Example:
        >>> tammes.zero_centroid()(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        tensor(0.5000)

    References:
        Zhou et al., Learning Towards the Largest Margins, ICLR 2022, zero-centroid regularisation.
    """
    rows = unit(prototypes) if normalize else prototypes
    return (shards.all_reduce(rows.sum(0)) / shards.count(rows)).square().sum()


@term(on="prototypes", reads="")
def subcenter_spread(prototypes: Tensor, *, shards: ShardedRows = ALL_ROWS_LOCAL) -> Tensor:
    r"""Distance between the prototypes of a class, on a head with several per class.

    .. math:: R = \frac{1}{CK(K-1)}\sum_c\sum_{t<u}\lVert\hat w_{ct} - \hat w_{cu}\rVert

    The regulariser of SoftTriple, with weight 0.2 there: a sum of distances that are not squared
    merges the centres that a class does not need. Zero with one prototype per class.

    Args:
        prototypes: grouped by class, shape ``(C K, D)``.
        shards: number K of prototypes per class, and access to those of other ranks; the criterion
            supplies it.

    Returns:
        The penalty, a scalar.

    Example:
        >>> head = tammes.CosineHead(4, 3, subcenters=2, pooling="soft", scale=20.0)
        >>> loss = tammes.cosface(margin=0.01) + 0.2 * tammes.subcenter_spread()
        >>> criterion = tammes.Criterion(head, loss)

    References:
        Qian et al., SoftTriple Loss: Deep Metric Learning Without Triplet Sampling, ICCV 2019,
        Section 3.3. https://arxiv.org/abs/1909.05235
    """
    centers, count = shards.by_class(unit(prototypes)), shards.centers
    first, second = torch.triu_indices(count, count, 1, device=prototypes.device)
    apart = norm(centers[:, first] - centers[:, second]).sum()
    return shards.all_reduce(apart) / (shards.count(prototypes) * max(count - 1, 1))


@term(on="prototypes", reads="")
def super_symmetry(prototypes: Tensor, *, shards: ShardedRows = ALL_ROWS_LOCAL) -> Tensor:
    r"""Squared distance of the prototypes' Gram matrix from that of a scaled simplex.

    .. math::
        R = \Bigl\lVert W W^\top - \frac{vC}{C-1}\Bigl(I - \frac1C 11^\top\Bigr)\Bigr\rVert_F^2,
        \qquad v = \frac1C\sum_c\lVert w_c\rVert^2

    It can reach zero only for :math:`C \le D + 1`; then the other classes' scores of an example at
    its prototype are all equal.

    Args:
        prototypes: shape ``(C, D)``.
        shards: access to the prototypes of other ranks; the criterion supplies it.

    Returns:
        The penalty, a scalar.

    Example:
        >>> tammes.super_symmetry()(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
        tensor(0.)
        >>> tammes.super_symmetry()(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        tensor(2.)

    References:
        Kobayashi, Large Margin in Softmax Cross-Entropy Loss, BMVC 2019, Section 3 (the property;
        the penalty is ours).
    """
    count, size = shards.count(prototypes), prototypes.shape[1]
    ratio = count / (count - 1)
    if count <= size + 1:
        prototypes = shards.all_gather(prototypes)
        power = prototypes.square().sum() / count
        gram = prototypes @ prototypes.T
        simplex = ratio * (gram.new_ones(count).diag() - 1 / count)
        return (gram - power * simplex).square().sum()
    # Expanded, so that with many classes only a D x D matrix is needed. The difference cannot be
    # near zero here, so nothing cancels.
    gram = shards.all_reduce(prototypes.T @ prototypes)
    power = gram.trace() / count
    centre = shards.all_reduce(prototypes.sum(0))
    overlap = ratio * (count * power - centre.square().sum() / count)
    return gram.square().sum() - 2 * power * overlap + power**2 * ratio * count
