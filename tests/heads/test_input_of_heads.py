"""Wrong settings of heads and of what reads them end in one sentence."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import tammes
from tammes.heads import drop_subcenters

SUBCENTERS = tammes.CosineHead(4, 3, subcenters=3)
WRONG = {
    "proposal": (
        lambda: tammes.ShardedHead(tammes.CosineHead, 4, 3, sample_rate=0.5, proposal=[]),
        ValueError,
        "ShardedHead expects a proposal of 3 positive numbers, one for each class, got shape (0,)",
    ),
    "anchors": (
        lambda: tammes.DistanceHead(4, 3, anchors="10"),
        TypeError,
        "DistanceHead expects anchors to be a number, got '10'",
    ),
    "temperature": (
        lambda: tammes.CosineHead(4, 3, subcenters=2, pooling="soft", temperature="a"),
        TypeError,
        "CosineHead expects temperature to be a number, got 'a'",
    ),
    "keep": (
        lambda: drop_subcenters(SUBCENTERS, torch.ones(3, 3), keep=1.5),
        TypeError,
        "drop_subcenters expects keep to be a whole number, got 1.5",
    ),
    "several labels": (
        lambda: tammes.diagnose(
            tammes.Criterion(tammes.CosineHead(4, 5), tammes.multi_positive()),
            torch.randn(2, 4),
            torch.tensor([[0, 3], [2, -100]]),
        ),
        ValueError,
        "diagnose expects one label per example, got labels of shape (2, 2)",
    ),
    "scores alone": (
        lambda: tammes.cac()(tammes.split(-torch.rand(2, 3), torch.tensor([0, 1]))),
        ValueError,
        "cac expects a split with distance, got one of scores alone: use a criterion, or give "
        "own={'distance': ...} to tammes.split",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_setting_ends_in_one_sentence(case):
    build, kind, message = WRONG[case]
    with pytest.raises(kind) as error:
        build()
    assert str(error.value) == message


def test_anchors_show_in_the_repr():
    assert repr(tammes.DistanceHead(4, 3, anchors=10.0)) == (
        "DistanceHead(4, 3, scale=1, anchors=10)"
    )


def test_a_learned_number_in_half_precision_is_read_in_single_precision():
    criterion = tammes.Criterion(tammes.CosineHead(4, 3, scale="learnable"), tammes.uniface())
    state = criterion.bfloat16().states["uniface"]
    assert criterion.head.scale.dtype == state.reading(None).dtype == torch.float32


def test_distances_can_be_differentiated_twice_and_are_flat_at_the_prototype():
    torch.manual_seed(0)
    head = tammes.DistanceHead(3, 4).double()
    criterion = tammes.Criterion(head, tammes.cac(), reduction="none")
    features = torch.randn(2, 3, dtype=torch.double, requires_grad=True)
    inputs = features, head.weight
    labels = torch.tensor([1, 3])

    def loss(features, weight):
        return torch.func.functional_call(criterion, {"head.weight": weight}, (features, labels))

    assert gradcheck(loss, inputs)
    assert gradgradcheck(loss, inputs)
    at = head.weight.detach()[:1].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(head.logits(at)[0, 0], at)
    assert not gradient.any()
