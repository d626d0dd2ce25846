"""A project that uses the public API and is checked by ``mypy --strict`` (pyproject.toml)."""

from typing import assert_type

import torch
from torch import Tensor, nn

import tammes
from tammes.metrics import functional as measure
from tammes.schedules import WarmUp

FEATURES, LABELS = torch.randn(6, 8), torch.tensor([0, 1, 2, 0, 1, 2])


@tammes.term(reads="target hardest")
def squared_hinge(split: tammes.Split, *, margin: float = 0.2) -> Tensor:
    """Square of what is missing to the margin."""
    return (split.hardest - split.target + margin).relu().square()


def train(backbone: nn.Module, criterion: tammes.Criterion) -> Tensor:
    """Take one step; returns the loss."""
    groups = criterion.param_groups(backbone, lr=0.1, head_lr=1.0)
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    loss = criterion(backbone(FEATURES), LABELS)
    loss.backward()  # type: ignore[no-untyped-call]  # torch's own
    optimizer.step()
    return loss.detach()


def use() -> None:
    """Use criteria, terms, heads, measures and a gallery."""
    criterion = tammes.CosFace(embedding_size=8, num_classes=3, margin=0.35, scale=16.0)
    assert_type(criterion(FEATURES, LABELS, margin=0.2), Tensor)
    assert_type(criterion.logits(FEATURES), Tensor)
    assert_type(criterion.terms, dict[str, Tensor])
    assert_type(criterion.schedule(margin=WarmUp(0.0, 0.35, steps=10)), tammes.CosFace)
    assert_type(squared_hinge(margin=0.3), tammes.Term)
    assert_type(tammes.arcface(margin=[0.1, 0.2, 0.3]), tammes.Term)
    loss: tammes.Loss = squared_hinge() + 0.5 * tammes.zero_centroid()
    assert_type(squared_hinge() + tammes.nca(), tammes.Sum)
    head: tammes.Head = tammes.CosineHead(8, 3, scale=4.0)
    train(nn.Linear(8, 8), tammes.Criterion(head, loss, reduction="sum"))
    assert_type(tammes.split(FEATURES, LABELS), tammes.Split)
    assert_type(float(measure.class_margin(head.prototypes.detach()).angle), float)
    assert_type(tammes.geometry.largest_class_margin(10, 32).degrees, float)
    gallery = tammes.Gallery()
    gallery.enrol(FEATURES, LABELS)
    assert_type(len(gallery), int)
    print(tammes.diagnose(criterion, FEATURES, LABELS))
