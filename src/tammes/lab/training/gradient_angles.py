"""Angle between the gradients of the classification and the metric part of a loss."""

import math

import torch
from torch import Tensor

import tammes
from tammes.criterion.hyperparameters import named_schedules
from tammes.distributed.process_group import RankGroup
from tammes.lab.data.samplers import BatchSampler
from tammes.lab.training.loader import ImageLoader
from tammes.lab.training.model import IGNORED, Model
from tammes.terms import Loss, Sum

_SMALL = 1e-6
"""Norm relative to the largest below which a gradient has no reliable direction in fp32."""


class GradientAngles:
    r"""Cosine between the gradients of the classification part and of the metric part of a loss.

    .. math:: \frac{|\langle g_i, h_i\rangle|}{\|g_i\|\,\|h_i\|},\qquad
              g_i = \frac{\partial\ell_{cls}}{\partial x_i},\quad
              h_i = \frac{\partial\ell_{met}}{\partial x_i}

    for every example of one fixed batch: the first training batch, without augmentation, with the
    network in evaluation mode. On a linear head the cosine is zero up to rounding in a direct sum,
    clearly positive in a plain sum, and in between in a spectral sum. Measuring changes no weight,
    no statistics and no random state.

    Raises:
        ValueError: the loss does not have both parts.
    """

    def __init__(self, model: Model, loader: ImageLoader, sampler: BatchSampler) -> None:
        self.model = model
        self.parts = [
            _criterion_of(model.criterion, part) for part in split_loss(model.criterion.loss)
        ]
        first = sampler.draw(0)(0)
        (self.batch,) = loader([first], rank=sampler.rank, world_size=sampler.world_size)

    def __call__(self) -> dict[str, float]:
        """Measure the batch; the model is left in evaluation mode.

        Returns:
            ``gradients`` of a line of ``metrics.jsonl``: ``cosine``, the mean over the examples;
            ``largest``; and ``examples``, the number of examples with two non-zero gradients.
        """
        pixels, labels, index = self.batch
        self.model.eval()
        with torch.no_grad():
            features = self.model.features(pixels, index, 0).float()
        values = cosines(*(_gradient(part, features, labels) for part in self.parts))
        largest = values.max() if len(values) else values.new_zeros(())
        local = torch.stack([values.sum(), values.new_tensor(float(len(values))), largest])
        totals, counts, maxima = RankGroup().all_gather(local).T.tolist()
        count = math.fsum(counts)
        if not count:
            return {"examples": 0.0}
        return {"cosine": math.fsum(totals) / count, "largest": max(maxima), "examples": count}


def split_loss(loss: Loss) -> tuple[Loss, Loss]:
    """Split a loss into its classification terms and its metric terms, with their weights.

    Regularisers of the prototypes are in neither: the features get no gradient from them.

    Example:
        >>> split_loss(tammes.direct_sum(tammes.softmax(), 0.5 * tammes.nca()))[1].parts[0][0]
        0.5

    Raises:
        ValueError: there are no terms of one kind.
    """
    parts = []
    for on, kind in (("split", "classification"), ("features", "metric")):
        own = tuple((weight, term) for weight, term in loss.leaves() if term.definition.on == on)
        if not own:
            raise ValueError(
                "watch: gradients expects a loss with a classification part and a metric part, "
                f"such as direct_sum(softmax(), nca()), got no {kind} part in {loss!r}"
            )
        parts.append(Sum(own))
    return parts[0], parts[1]


def _criterion_of(criterion: tammes.Criterion, part: Loss) -> tammes.Criterion:
    """Build a criterion for part of a loss that shares head, states and schedules."""
    result = tammes.Criterion(
        criterion.head, part, ignore_index=IGNORED, validate=None, group=True, even=True
    )
    for name in result.states:
        result.states[name] = criterion.states[name]
    schedules = named_schedules(criterion.schedules)
    own = {k: s for k, s in schedules.items() if k == "class_weights" or result.settings.places(k)}
    result.schedule(by_hand=None, **own)
    # In training mode, calls would step the schedules.
    return result.eval()


def _gradient(criterion: tammes.Criterion, features: Tensor, labels: Tensor) -> Tensor:
    with torch.enable_grad():
        leaf = features.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(criterion(leaf, labels), leaf)
    return gradient


def cosines(one: Tensor, two: Tensor) -> Tensor:
    """Compute the absolute cosine between rows of two tensors of shape ``(N, D)``.

    The result has shape ``(M,)``, for the M rows in which neither tensor is (nearly) zero.

    Example:
        >>> cosines(torch.tensor([[3.0, 4.0], [1.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
        tensor([0.6000], dtype=torch.float64)
    """
    # Below this, subnormal components lose precision.
    lowest = torch.finfo(one.dtype).tiny / torch.finfo(one.dtype).eps
    sizes = [each.double().norm(dim=1) for each in (one, two)]
    nonzero = torch.ones_like(sizes[0], dtype=torch.bool)
    for size in sizes:
        largest = size.max() if len(size) else size.sum()
        nonzero &= size > torch.clamp(_SMALL * largest, min=lowest)
    products = (one.double() * two.double()).sum(dim=1).abs()
    return (products / (sizes[0] * sizes[1]))[nonzero]
