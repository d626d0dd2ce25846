"""CAC and ARPL on heads of distances, and how they tell unknown examples."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import tammes
from tammes.lab.config import head_text, parse_head
from tammes.metrics import functional as metrics

SIZE, CLASSES = 6, 5
HEADS = {
    "learned": lambda: tammes.DistanceHead(SIZE, CLASSES),
    "learned scale": lambda: tammes.DistanceHead(SIZE, CLASSES, scale="learnable"),
    "anchors": lambda: tammes.DistanceHead(SIZE, CLASSES, anchors=10.0),
    "reciprocal": lambda: tammes.DistanceHead(SIZE, CLASSES, reciprocal=True, scale=2.0),
}
TOLERANCE = {
    torch.double: {"rtol": 1e-9, "atol": 1e-9},
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
}


def batch(dtype=torch.double, rows=12):
    x = 3 * torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.double)
    return x.to(dtype).requires_grad_(), torch.arange(rows) % CLASSES


def compare(made, loss, expected, x, dtype):
    assert_close(loss, expected, **TOLERANCE[dtype])
    inputs = [x, *made.parameters()]
    found = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
    wanted = torch.autograd.grad(expected, inputs, allow_unused=True, materialize_grads=True)
    for got, want in zip(found, wanted, strict=True):
        assert_close(got, want, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head", ["learned", "learned scale", "anchors"])
def test_cac_is_the_official_form(head, dtype):
    torch.manual_seed(0)
    made = tammes.Criterion(HEADS[head](), tammes.cac(anchor=0.3)).to(dtype)
    x, y = batch(dtype)
    d = torch.stack([(x - w).square().sum(1).sqrt() for w in made.head.weight], 1)
    own = d.gather(1, y[:, None])
    others = torch.stack(
        [row[torch.arange(CLASSES) != label] for row, label in zip(d, y, strict=True)]
    )
    # The official tuplet loss, over the classes that are not the own.
    tuplet = (1 + (made.head.scale * (own - others)).exp().sum(1)).log()
    expected = (tuplet + 0.3 * own[:, 0]).mean()
    compare(made, made(x, y), expected, x, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("radius", [0.0, 5.0])
def test_arpl_is_the_official_form(dtype, radius):
    torch.manual_seed(0)
    made = tammes.Criterion(HEADS["reciprocal"](), tammes.arpl(bound=0.4)).to(dtype)
    with torch.no_grad():
        made.states["arpl"].value += radius
    x, y = batch(dtype)
    points, learned = made.head.weight, made.states["arpl"].value
    squares = x.square().sum(1, keepdim=True) - 2 * x @ points.T + points.square().sum(1)
    logits = (squares / SIZE - x @ points.T) / 0.5
    own = (x - points[y]).square().mean(1)
    hinge = F.margin_ranking_loss(
        learned.expand_as(own), own, torch.ones_like(own), margin=1.0, reduction="none"
    )
    expected = F.cross_entropy(logits, y) + 0.4 * hinge.mean()
    compare(made, made(x, y), expected, x, dtype)
    assert 0 < (hinge > 0).sum() < len(hinge) or radius == 0


@pytest.mark.parametrize(
    ("head", "term"), [("learned", tammes.cac(anchor=0)), ("reciprocal", tammes.arpl(bound=0))]
)
def test_without_the_second_part_it_is_the_softmax(head, term):
    head, (x, y) = HEADS[head]().double(), batch()
    made, plain = (tammes.Criterion(head, t, reduction="none") for t in (term, tammes.softmax()))
    assert_close(made(x, y), plain(x, y), rtol=1e-12, atol=1e-12)


def test_cac_by_hand():
    # An example on the first of two anchors at distance 10: log(1 + e^(0 - 10 sqrt 2)).
    made = tammes.Criterion(tammes.DistanceHead(2, 2, anchors=10.0), tammes.cac()).double()
    loss = made(torch.tensor([[10.0, 0.0]], dtype=torch.double), torch.tensor([0]))
    assert_close(loss.item(), math.log1p(math.exp(-10 * math.sqrt(2))))


def test_distances_keep_their_digits_next_to_a_prototype():
    head = tammes.DistanceHead(3, 2)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[100.0, 0.0, 0.0], [0.0, 0.0, 0.0]]))
    near = torch.tensor([[100.0, 1e-4, 0.0], [100.0, 0.0, 0.0]], requires_grad=True)
    logits = head.logits(near)
    assert_close(logits[:, 0].detach(), torch.tensor([-1e-4, 0.0]), rtol=1e-6, atol=0)
    logits[:, 0].sum().backward()
    assert_close(near.grad, torch.tensor([[0.0, -1.0, 0.0], [0.0, 0.0, 0.0]]))


def test_anchors_are_fixed_saved_and_added_on_axes_of_their_own():
    head = tammes.DistanceHead(4, 2, anchors=3.0)
    assert list(head.parameters()) == []
    assert "weight" in head.state_dict()
    head.add_classes(2)
    assert torch.equal(head.weight, 3 * torch.eye(4))
    with pytest.raises(ValueError, match="an axis for each anchor, got 1 new classes and 0 free"):
        head.add_classes(1)


@pytest.mark.parametrize("name", HEADS)
def test_new_classes_start_at_the_mean_of_their_features(name):
    head, features = HEADS[name](), 7 * torch.randn(1, 4, SIZE)
    head.add_classes(1, features)
    assert_close(head.weight[-1].detach(), features[0].mean(0))


@pytest.mark.parametrize("name", HEADS)
def test_a_head_is_written_as_text(name):
    head = HEADS[name]()
    again = parse_head(head_text(head), tammes.softmax(), SIZE, CLASSES)
    assert (head_text(again), repr(again)) == (head_text(head), repr(head))
    assert type(again.similarity) is type(head.similarity)
    assert isinstance(again.weight, torch.nn.Parameter) == (name != "anchors")


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (tammes.cac(), "distance(scale=1.0)"),
        (tammes.arpl(), "distance(scale=1.0, reciprocal=True)"),
    ],
)
def test_the_default_head_of_the_lab_is_that_of_the_loss(loss, text):
    assert head_text(parse_head("auto", loss, SIZE, CLASSES)) == text


def test_the_score_of_cac_is_its_formula_and_tells_the_unknown():
    d = torch.tensor([[1.0, 12.0, 13.0], [9.0, 9.5, 10.0]], dtype=torch.double)
    rejection = (d * (1 - (-d).softmax(1))).amin(1)
    assert_close(metrics.cac_score(-d), -rejection)
    known, unknown = metrics.cac_score(-d)
    assert known > unknown


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: tammes.DistanceHead(3, 2, implementation="streamed"),
            "DistanceHead expects implementation 'auto' or 'dense'.*got 'streamed'",
        ),
        (
            lambda: tammes.Criterion(
                tammes.DistanceHead(3, 2), tammes.cac(), implementation="fused"
            )(torch.randn(2, 3), torch.tensor([0, 1])),
            "a head of distances expects implementation 'auto' or 'dense'",
        ),
        (lambda: tammes.DistanceHead(3, 4, anchors=10.0), "got 4 classes and 3 axes"),
        (lambda: tammes.DistanceHead(3, 2, anchors=-1.0), "a distance above 0"),
        (lambda: tammes.DistanceHead(3, 2, anchors=1.0, reciprocal=True), "no reciprocal points"),
        (
            lambda: tammes.arpl()(tammes.split(torch.zeros(1, 2), torch.tensor([0]))),
            "arpl expects the radius of a criterion",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_it_cannot_be_sharded():
    with pytest.raises(TypeError, match=r"one of the heads .* got DistanceHead"):
        tammes.ShardedHead(tammes.DistanceHead, 3, 2)


def test_a_new_class_takes_an_anchor_that_no_other_has():
    made = tammes.Criterion(tammes.DistanceHead(6, 5, anchors=10.0), tammes.cac())
    made.remove_classes([1])
    made.add_classes(2)
    anchors = made.head.weight
    assert_close(anchors @ anchors.T, 100 * torch.eye(6))
    with pytest.raises(ValueError, match="an axis for each anchor, got 1 new classes and 0 free"):
        made.add_classes(1)
