"""Do the two parts of a loss pull against each other: the angle between their gradients."""

import math

import torch
from torch import Tensor

import tammes
from tammes.criterion.hyperparameters import named_schedules
from tammes.distributed.process_group import RankGroup
from tammes.lab.data.samplers import BatchSampler
from tammes.lab.training.loader import Feed
from tammes.lab.training.model import IGNORED, Model
from tammes.terms import Loss, Sum

_SMALL = 1e-6
"""Share of the largest gradient below which one has no direction to speak of in fp32."""


class Gradients:
    r"""Cosine between the gradients of the classification part and of the metric part of a loss.

    .. math:: \frac{|\langle g_i, h_i\rangle|}{\|g_i\|\,\|h_i\|},\qquad
              g_i = \frac{\partial\ell_{cls}}{\partial x_i},\quad
              h_i = \frac{\partial\ell_{met}}{\partial x_i}

    for every example of one batch, always the same: the first of the training, without
    augmentation, the network in evaluation mode. On a linear head it is rounding in a direct sum,
    something in a plain one, and in between in a spectral sum. Looking changes nothing: no weight,
    no statistics, no random number.

    Args:
        model: that is trained, on its device.
        feed: of the training images.
        sampler: which draws the batch; every process has its share of it.

    Raises:
        ValueError: the loss has not both parts.
    """

    def __init__(self, model: Model, feed: Feed, sampler: BatchSampler) -> None:
        self.model = model
        self.parts = [_alone(model.criterion, part) for part in two_parts(model.criterion.loss)]
        first = sampler.draw(0)(0)
        (self.batch,) = feed([first], rank=sampler.rank, world_size=sampler.world_size)

    def __call__(self) -> dict[str, float]:
        """What a line of ``metrics.jsonl`` says; the model is left in evaluation mode.

        Returns:
            ``cosine``, the mean over the examples; ``largest``; and ``examples``, how many have
            both gradients: all but those that a part is content with.
        """
        pixels, labels, index = self.batch
        self.model.eval()
        with torch.no_grad():
            features = self.model.features(pixels, index, 0).float()
        found = cosines(*(_gradient(part, features, labels) for part in self.parts))
        largest = found.max() if len(found) else found.new_zeros(())
        told = torch.stack([found.sum(), found.new_tensor(float(len(found))), largest])
        # Of every process.
        totals, counts, ends = RankGroup().all_gather(told).T.tolist()
        count = math.fsum(counts)
        if not count:
            return {"examples": 0.0}
        return {"cosine": math.fsum(totals) / count, "largest": max(ends), "examples": count}


def make_watch(text: str, model: Model, feed: Feed, sampler: BatchSampler) -> Gradients | None:
    """What ``watch`` of a configuration asks for; None where it asks for nothing.

    Args:
        text: ``gradients``, or nothing.
        model: that is trained.
        feed: of the training images.
        sampler: of the batches.
    """
    if text not in ("", "gradients"):
        raise ValueError(f"watch is expected to be gradients or nothing, got {text!r}")
    return Gradients(model, feed, sampler) if text else None


def two_parts(loss: Loss) -> tuple[Loss, Loss]:
    """The terms of a loss that classify, and those that compare features; weights are kept.

    Regularisers of the prototypes are in neither: they have no gradient for features.

    Args:
        loss: of a criterion.

    Example:
        >>> two_parts(tammes.direct_sum(tammes.softmax(), 0.5 * tammes.nca()))[1].parts[0][0]
        0.5

    Raises:
        ValueError: it has not both.
    """
    parts = []
    for on, called in (("split", "classification"), ("features", "metric")):
        own = tuple((weight, term) for weight, term in loss.leaves() if term.definition.on == on)
        if not own:
            raise ValueError(
                "watch: gradients expects a loss with a classification part and a metric part, "
                f"such as direct_sum(softmax(), nca()), got no {called} part in {loss!r}"
            )
        parts.append(Sum(own))
    return parts[0], parts[1]


def _alone(criterion: tammes.Criterion, part: Loss) -> tammes.Criterion:
    """A part of a loss with the head, the memory and the schedules of the whole."""
    alone = tammes.Criterion(
        criterion.head, part, ignore_index=IGNORED, validate=None, group=True, even=True
    )
    for name in alone.states:
        alone.states[name] = criterion.states[name]
    for key, schedule in named_schedules(criterion.schedules).items():
        if key == "class_weights" or alone.settings.places(key):
            alone.schedule(**{key: schedule})
    # In training it would step the schedules.
    return alone.eval()


def _gradient(criterion: tammes.Criterion, features: Tensor, labels: Tensor) -> Tensor:
    with torch.enable_grad():
        leaf = features.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(criterion(leaf, labels), leaf)
    return gradient


def cosines(one: Tensor, two: Tensor) -> Tensor:
    """Absolute cosine between the rows of two tensors, where both have a direction.

    Args:
        one: shape ``(N, D)``.
        two: likewise.

    Returns:
        Shape ``(M,)``, of the M rows in which neither is zero, or next to it.

    Example:
        >>> cosines(torch.tensor([[3.0, 4.0], [1.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
        tensor([0.6000], dtype=torch.float64)
    """
    # A float32 below this has lost digits.
    lowest = torch.finfo(one.dtype).tiny / torch.finfo(one.dtype).eps
    sizes = [each.double().norm(dim=1) for each in (one, two)]
    there = torch.ones_like(sizes[0], dtype=torch.bool)
    for size in sizes:
        largest = size.max() if len(size) else size.sum()
        there &= size > torch.clamp(_SMALL * largest, min=lowest)
    products = (one.double() * two.double()).sum(dim=1).abs()
    return (products / (sizes[0] * sizes[1]))[there]
