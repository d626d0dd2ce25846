"""Losses between the examples of a batch, which do not use the head's prototypes."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from tammes.similarity import directions, working_dtype
from tammes.split import softplus
from tammes.states import State, read
from tammes.term_decorator import term
from tammes.terms import Batch, Setting, Term

if TYPE_CHECKING:
    from tammes.heads.head import Head

Rows = tuple[Tensor, Tensor]
"""Loss of each example, and whether it is an anchor; both of shape ``(N,)``."""


def _pairs(batch: Batch) -> tuple[Tensor, Tensor]:
    """Masks of positive pairs (distinct examples of a class) and negative pairs, ``(N, N)``."""
    both = batch.valid[:, None] & batch.valid[None, :]
    same = batch.labels[:, None] == batch.labels[None, :]
    distinct = ~torch.eye(len(batch.labels), dtype=torch.bool, device=batch.labels.device)
    return both & same & distinct, both & ~same


def _centred(batch: Batch, normalize: bool) -> Tensor:
    """Centre the features, so that expanded squares lose no digits."""
    features = directions(batch.features) if normalize else batch.features
    # Zeroed, since an infinity in an ignored row would make the mean NaN.
    features = torch.where(batch.valid[:, None], features, 0.0)
    return features - features.detach().sum(0) / batch.valid.sum().clamp_min(1)


def _squared_distances(left: Tensor, right: Tensor) -> Tensor:
    square = left.square().sum(1)[:, None] + right.square().sum(1) - 2 * left @ right.T
    return square.clamp_min(0)


def _masked_logsumexp(scores: Tensor, mask: Tensor) -> Tensor:
    """Log-sum-exp over the columns in the mask; very negative if there are none."""
    return scores.masked_fill(~mask, torch.finfo(scores.dtype).min / 4).logsumexp(1)


@term(on="features", reads="")
def nca(batch: Batch, *, scale: float = 1.0, normalize: bool = False) -> Rows:
    r"""Neighbourhood components analysis: a random near neighbour should have the same class.

    .. math::
        \ell_i = -\log\frac{\sum_{j\ne i,\,y_j=y_i} e^{-s\lVert x_i-x_j\rVert^2}}
                          {\sum_{j\ne i} e^{-s\lVert x_i-x_j\rVert^2}}

    The only example of a class is no anchor, but a neighbour of the others.

    Args:
        batch: features and labels of N examples.
        scale: :math:`s`, inverse temperature.
        normalize: scale features to unit length first.

    Returns:
        Loss of each example and whether it is an anchor.

    Example:
        >>> batch = tammes.Batch(torch.tensor([[0.0], [1.0], [2.0]]), torch.tensor([0, 0, 1]),
        ...                      torch.ones(3, dtype=torch.bool))
        >>> tammes.nca()(batch)
        (tensor([0.0486, 0.6931, 0.0000]), tensor([ True,  True, False]))

    References:
        Goldberger et al., Neighbourhood Components Analysis, NeurIPS 2004; Kobayashi,
        Direct-Sum of losses, 2024.
    """
    features = _centred(batch, normalize)
    positive, negative = _pairs(batch)
    scores = -scale * _squared_distances(features, features)
    anchors = positive.any(1)
    near, far = _masked_logsumexp(scores, positive), _masked_logsumexp(scores, negative)
    return torch.where(anchors, softplus(far - near), 0.0), anchors


@term(on="features", reads="")
def proto(batch: Batch, *, scale: float = 1.0, normalize: bool = False) -> Rows:
    r"""Prototype loss within a batch, with each example left out of its own class mean.

    .. math::
        \ell_i = -\log\frac{e^{-s\lVert x_i-\mu_{y_i\setminus i}\rVert^2}}
        {e^{-s\lVert x_i-\mu_{y_i\setminus i}\rVert^2}
         + \sum_{c\ne y_i} e^{-s\lVert x_i-\mu_c\rVert^2}},
        \qquad x_i-\mu_{y\setminus i} = \frac{n_y}{n_y-1}(x_i-\mu_y)

    The sum is over the classes in the batch. The only example of a class is no anchor, but still a
    prototype for the others; a batch of one class has loss zero.

    Args:
        batch: features and labels of N examples.
        scale: :math:`s`, inverse temperature.
        normalize: scale features to unit length first.

    Returns:
        Loss of each example and whether it is an anchor.

    Example:
        >>> batch = tammes.Batch(torch.tensor([[0.0], [1.0], [2.0]]), torch.tensor([0, 0, 1]),
        ...                      torch.ones(3, dtype=torch.bool))
        >>> tammes.proto()(batch)
        (tensor([0.0486, 0.6931, 0.0000]), tensor([ True,  True, False]))

    References:
        Kobayashi, Direct-Sum of losses, 2024, eq. i-iv; Snell et al., Prototypical Networks,
        NeurIPS 2017.
    """
    features = _centred(batch, normalize)
    member = (batch.labels[:, None] == batch.labels) & batch.valid & batch.valid[:, None]
    count = member.sum(1).clamp_min(1).to(features.dtype)
    # Each example carries the mean of its class, with weight 1/n in the sum over classes, so that
    # no shape depends on the number of classes.
    means = (member.to(features.dtype) @ features) / count[:, None]
    scores = -scale * _squared_distances(features, means) - count.log()
    far = _masked_logsumexp(scores, ~member & batch.valid & batch.valid[:, None])
    anchors = member.sum(1) > 1
    stretch = torch.where(anchors, count / (count - 1).clamp_min(1), 0.0)
    near = -scale * (stretch[:, None] * (features - means)).square().sum(1)
    return torch.where(anchors, softplus(far - near), 0.0), anchors


def _hardest_pairs(batch: Batch, normalize: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Distances to the farthest positive and the nearest negative, and which rows are anchors."""
    features = _centred(batch, normalize)
    positive, negative = _pairs(batch)
    with torch.no_grad():
        square = _squared_distances(features, features)
        if not len(square):
            return batch.features.sum(1), batch.features.sum(1), batch.valid
        far = square.masked_fill(~positive, -1.0).argmax(1)
        near = square.masked_fill(~negative, torch.inf).argmin(1)
    anchors = positive.any(1) & negative.any(1)
    # Recompute the selected distances without expanding the square.
    return (
        torch.linalg.vector_norm(features - features[far], dim=1),
        torch.linalg.vector_norm(features - features[near], dim=1),
        anchors,
    )


@term(on="features", reads="")
def triplet(batch: Batch, *, margin: float = 0.3, normalize: bool = False) -> Rows:
    r"""Triplet loss with the hardest positive and the hardest negative of the batch.

    .. math::
        \ell_i = \max\bigl(0,\ \max_{y_j=y_i}\lVert x_i-x_j\rVert
                 - \min_{y_j\ne y_i}\lVert x_i-x_j\rVert + m\bigr)

    Args:
        batch: features and labels of N examples.
        margin: distance :math:`m` by which the positive must be nearer than the negative.
        normalize: scale features to unit length first.

    Returns:
        Loss of each example, and whether it is an anchor: its class has another example in the
        batch, and there are other classes.

    Example:
        >>> batch = tammes.Batch(torch.tensor([[0.0], [1.0], [3.0]]), torch.tensor([0, 0, 1]),
        ...                      torch.ones(3, dtype=torch.bool))
        >>> tammes.triplet(margin=1.5)(batch)
        (tensor([0.0000, 0.5000, 0.0000]), tensor([ True,  True, False]))

    References:
        Hermans et al., In Defense of the Triplet Loss for Person Re-Identification, 2017, eq. 5.
    """
    far, near, anchors = _hardest_pairs(batch, normalize)
    return torch.where(anchors, far - near + margin, 0.0).relu(), anchors


@term(on="features", reads="")
def contrastive(batch: Batch, *, margin: float = 1.0, normalize: bool = False) -> Rows:
    r"""Contrastive loss on the hardest positive and the hardest negative of the batch.

    .. math::
        \ell_i = \tfrac12\max_{y_j=y_i}\lVert x_i-x_j\rVert^2
                 + \tfrac12\max\bigl(0,\ m - \min_{y_j\ne y_i}\lVert x_i-x_j\rVert\bigr)^2

    Args:
        batch: features and labels of N examples.
        margin: distance :math:`m` to keep from other classes.
        normalize: scale features to unit length first.

    Returns:
        Loss of each example, and whether it is an anchor: its class has another example in the
        batch, and there are other classes.

    Example:
        >>> batch = tammes.Batch(torch.tensor([[0.0], [1.0], [3.0]]), torch.tensor([0, 0, 1]),
        ...                      torch.ones(3, dtype=torch.bool))
        >>> tammes.contrastive(margin=2.5)(batch)
        (tensor([0.5000, 0.6250, 0.0000]), tensor([ True,  True, False]))

    References:
        Hadsell et al., Dimensionality Reduction by Learning an Invariant Mapping, CVPR 2006, eq. 4.
    """
    far, near, anchors = _hardest_pairs(batch, normalize)
    loss = (far.square() + (margin - near).relu().square()) / 2
    return torch.where(anchors, loss, 0.0), anchors


class CentersOfBatch(NamedTuple):
    """Centre of each example's class, shape ``(N, D)``; what :func:`center` reads."""

    centers: Tensor

    def of(self, labels: Tensor) -> Tensor:
        """Return the centres of the batch."""
        return self.centers


class Centers(State):
    """One centre per class that follows its features; the state of :func:`center`."""

    centers: Tensor

    def __init__(self, like: Tensor, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.register_buffer("centers", torch.zeros_like(like))

    def of(self, labels: Tensor) -> Tensor:
        """Return the centre of each label's class."""
        return self.centers[labels]

    def reading(self, batch: Batch) -> CentersOfBatch:
        """Copy the centres of the classes in the batch."""
        return CentersOfBatch(read(self.of(batch.labels)))

    def after(self, batch: Batch) -> None:
        """Move the centres of the classes in the batch, as in eq. 4 of the paper."""
        labels, weight = batch.labels, batch.valid.to(self.centers.dtype)
        features = batch.features.to(self.centers.dtype)
        pull = torch.where(batch.valid[:, None], features - self.centers[labels], 0.0)
        count = weight.new_zeros(len(self.centers)).index_add(0, labels, weight)
        self.centers.index_add_(0, labels, self.rate * pull / (1 + count[labels])[:, None])

    def resize(self, keep: Tensor, new: int) -> None:
        """Keep the centres of the remaining classes; new ones start at zero."""
        fresh = self.centers.new_zeros(new, self.centers.shape[1])
        self.centers = torch.cat([self.centers[keep.to(self.centers.device)], fresh])


def _center_state(term: Term, head: "Head") -> Centers:
    # One centre for every class, even if this rank holds only some prototypes.
    shape = (head.num_classes, head.embedding_size)
    like = head.weight.detach().new_empty(shape, dtype=working_dtype(head.weight))
    return Centers(like, rate=term.settings["rate"])


def _check_center(rate: Setting) -> None:
    if not 0 < rate <= 1:
        raise ValueError(f"center expects rate above 0 and up to 1, got {rate}")


@term(on="features", reads="", fixed="rate", state=_center_state, check=_check_center)
def center(
    batch: Batch, *, rate: float = 0.5, state: Centers | CentersOfBatch | None = None
) -> Rows:
    r"""Center loss: features are attracted to a running centre of their class.

    .. math::
        \ell_i = \tfrac12\lVert x_i - c_{y_i}\rVert^2,\qquad
        c_j \leftarrow c_j + \alpha\,\frac{\sum_{y_i=j}(x_i - c_j)}{1 + n_j}

    The criterion keeps the centres, in its ``state_dict``, and moves them in training mode.

    Args:
        batch: features and labels of N examples.
        rate: :math:`\alpha`, how fast the centres follow.
        state: the centres; the criterion supplies them.

    Returns:
        Loss of each example, and whether it is an anchor: all valid ones are.

    Example:
        >>> criterion = tammes.Criterion(
        ...     tammes.LinearHead(2, 3), tammes.softmax() + 0.01 * tammes.center())
        >>> _ = criterion(torch.ones(4, 2), torch.zeros(4, dtype=torch.long))
        >>> criterion.states["center"].centers[0]
        tensor([0.4000, 0.4000])

    References:
        Wen et al., A Discriminative Feature Learning Approach for Deep Face Recognition,
        ECCV 2016, eq. 2-4.
    """
    if state is None:
        raise ValueError("center expects the centres of a criterion, got none")
    centers = state.of(batch.labels).to(batch.features.dtype)
    loss = (batch.features - centers).square().sum(1) / 2
    return torch.where(batch.valid, loss, 0.0), batch.valid
