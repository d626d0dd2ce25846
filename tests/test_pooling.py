"""Several prototypes per class: pooled similarities against their formulas, on every path."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import tammes
from tammes.kernels import tiling
from tammes.kernels.dispatch import choose_kernel

CLASSES, SIZE = 7, 6
LABELS = torch.tensor([0, 6, 3, 3, 1])
POOLINGS = [{"subcenters": 3}, {"subcenters": 4, "pooling": "soft", "temperature": 0.2}]
PATHS = ["dense", "streamed"]


def cosines(x, w):
    return torch.einsum("nd,ckd->nck", F.normalize(x), F.normalize(w, dim=-1))


def pooled(x, w, pooling="max", temperature=0.1, **_):
    """Similarities as the papers have them, shape (N, C)."""
    each = cosines(x, w)
    if pooling == "max":
        return each.max(-1).values
    return ((each / temperature).softmax(-1) * each).sum(-1)


def arcface(x, w, y, scale, margin=0.5, **options):
    similarity = pooled(x, w, **options)
    own = similarity.gather(1, y[:, None]).acos() + margin
    return F.cross_entropy(scale * similarity.scatter(1, y[:, None], own.cos()), y)


def head_of(options, dtype=torch.double, **more):
    return tammes.CosineHead(SIZE, CLASSES, **{"scale": 16.0} | options | more).to(dtype)


@pytest.mark.parametrize("options", POOLINGS)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("scale", [16.0, "learnable"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_arcface_on_pooled_cosines_is_its_formula(options, path, scale, reduction):
    for dtype, tolerance in ((torch.double, 1e-9), (torch.float, 1e-5)):
        head = head_of(options, dtype, scale=scale, implementation=path)
        criterion = tammes.Criterion(head, tammes.arcface(margin=0.5), reduction=reduction)
        features = torch.randn(5, SIZE, dtype=dtype, requires_grad=True)
        loss = criterion(features, LABELS).mean()
        loss.backward()
        x, w = (t.detach().double().requires_grad_() for t in (features, head.weight))
        factor = torch.as_tensor(head.scale).detach().double().requires_grad_()
        plain = arcface(x, w, LABELS, factor, **options)
        plain.backward()
        assert_close(loss.double(), plain, rtol=tolerance, atol=tolerance)
        for got, want in ((features.grad, x.grad), (head.weight.grad, w.grad)):
            assert_close(got.double(), want, rtol=0, atol=tolerance)
        if scale == "learnable":
            want = (factor.grad * factor.detach()).view(1)
            assert_close(head.log_scale.grad.double(), want, rtol=0, atol=tolerance)


@pytest.mark.parametrize("options", POOLINGS)
def test_logits_and_every_number_of_a_split_are_those_of_pooled_similarities(options):
    head, features = head_of(options), torch.randn(5, SIZE, dtype=torch.double)
    similarity = pooled(features, head.weight, **options)
    assert_close(head.logits(features), 16 * similarity)
    expected = tammes.split(similarity, LABELS, scale=16.0)
    for path in PATHS:
        head.implementation = path
        got = head.split(features, LABELS)
        for field in ("target", "others", "hardest", "expected", "mean", "gap", "opposite"):
            assert_close(getattr(got, field), getattr(expected, field), msg=field)


@pytest.mark.parametrize("pooling", ["max", "soft"])
def test_one_centre_is_the_plain_head(pooling):
    torch.manual_seed(0)
    head = tammes.CosineHead(SIZE, CLASSES, subcenters=1, pooling=pooling)
    torch.manual_seed(0)
    plain = tammes.CosineHead(SIZE, CLASSES)
    assert torch.equal(head.weight, plain.weight)
    assert head.similarity == plain.similarity


@pytest.mark.parametrize("options", POOLINGS)
@pytest.mark.parametrize("path", PATHS)
def test_equal_centres_are_one_centre(options, path):
    plain = tammes.CosineHead(SIZE, CLASSES, scale=16.0, implementation=path).double()
    head = head_of(options, implementation=path)
    with torch.no_grad():
        head.weight.copy_(plain.weight[:, None])
    features = torch.randn(5, SIZE, dtype=torch.double)
    losses = [tammes.Criterion(h, tammes.cosface())(features, LABELS) for h in (head, plain)]
    assert_close(*losses)
    for loss in losses:
        loss.backward()
    assert_close(head.weight.grad.sum(1), plain.weight.grad)


def test_a_small_temperature_is_the_largest():
    largest = head_of({"subcenters": 3})
    soft = head_of({"subcenters": 3, "pooling": "soft", "temperature": 1e-4})
    soft.load_state_dict(largest.state_dict())
    features = torch.randn(20, SIZE, dtype=torch.double)
    assert_close(soft.logits(features), largest.logits(features), rtol=0, atol=1e-3)


@pytest.mark.parametrize("options", POOLINGS)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("side", ["gap", "opposite"])
def test_angles_keep_their_digits_at_0_and_at_pi(options, path, side):
    # One minus a cosine in single precision is zero here.
    head = head_of(options, torch.float, implementation=path)
    own = torch.randn(5, 1, SIZE).expand(-1, head.similarity.centers, -1)
    with torch.no_grad():
        head.weight[:5] = own
    aside = torch.randn(5, SIZE) * 1e-5
    features = (own[:, 0] if side == "gap" else -own[:, 0]) + aside
    split = head.split(features, torch.arange(5))
    exact = head_of(options).double()
    exact.load_state_dict(head.state_dict())
    want = exact.split(features.double(), torch.arange(5))
    assert (getattr(want, side) < 1e-8).all()
    assert_close(getattr(split, side).double(), getattr(want, side), rtol=1e-1, atol=0)


@pytest.mark.parametrize("options", POOLINGS)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("scale", [16.0, 1e4])
def test_loss_and_gradients_are_finite_wherever_a_feature_is(options, path, scale):
    head = head_of(options, torch.float, scale=scale, implementation=path)
    with torch.no_grad():
        head.weight[1] = 0.0
        head.weight[2, 0] = 0.0
    features = torch.stack(
        [
            torch.zeros(SIZE),
            head.weight[0, 1].detach(),
            -head.weight[0, 1].detach(),
            torch.full((SIZE,), 1e30),
            torch.full((SIZE,), 1e-30),
        ]
    ).requires_grad_()
    for label in (0, 1, 2):
        labels = torch.full((5,), label)
        loss = tammes.Criterion(head, tammes.arcface())(features, labels)
        gradients = torch.autograd.grad(loss, [features, head.weight])
        assert all(value.isfinite().all() for value in (loss, *gradients))


@pytest.mark.parametrize("options", POOLINGS)
@pytest.mark.parametrize("classes_at_once", [1, 3])
def test_blocks_of_classes_and_rows_change_nothing(options, classes_at_once, monkeypatch):
    head, labels = head_of(options, scale="learnable"), torch.randint(CLASSES, (40,))
    features = torch.randn(40, SIZE, dtype=torch.double, requires_grad=True)

    def run(path, reduction):
        head.implementation = path
        criterion = tammes.Criterion(
            head, tammes.arcface() + tammes.sample_margin() + tammes.hinge(), reduction=reduction
        )
        loss = criterion(features, labels).mean()
        inputs = [features, head.weight, head.log_scale]
        return loss, *torch.autograd.grad(loss, inputs)

    expected, cut = run("dense", "mean"), tiling.cut
    monkeypatch.setattr(
        tiling, "cut", lambda total, most: cut(total, classes_at_once if total == CLASSES else 7)
    )
    for reduction in ("mean", "none"):
        assert_close(run("streamed", reduction), expected)


def test_streaming_never_holds_the_products_with_all_centres(monkeypatch):
    monkeypatch.setitem(tiling.SCORES, "cpu", 1 << 12)
    monkeypatch.setitem(tiling.KEYS, "cpu", 1)
    head = tammes.CosineHead(4, 500, subcenters=3, implementation="streamed")
    sizes = []
    plain_pool = type(head.similarity).pool

    def pool(self, products, *args, **options):
        sizes.append(products.numel())
        return plain_pool(self, products, *args, **options)

    monkeypatch.setattr(type(head.similarity), "pool", pool)
    features = torch.randn(64, 4, requires_grad=True)
    tammes.Criterion(head, tammes.cosface())(features, torch.arange(64)).backward()
    assert max(sizes) <= 64 * 64 * 3
    assert sum(sizes) >= 2 * 64 * 500 * 3


def test_of_equally_near_centres_the_first_has_the_whole_gradient():
    for path in PATHS:
        head = head_of({"subcenters": 3}, implementation=path)
        with torch.no_grad():
            # Products with them are exact, so that they are equal to the last bit.
            head.weight.copy_(torch.eye(CLASSES, SIZE)[:, None] + torch.eye(SIZE)[-1])
        features = torch.randn(5, SIZE, dtype=torch.double)
        tammes.Criterion(head, tammes.cosface())(features, LABELS).backward()
        assert (head.weight.grad[:, 1:] == 0).all()
        assert (head.weight.grad[:, 0] != 0).any()


@pytest.mark.parametrize("options", POOLINGS)
def test_a_pooled_head_is_copied_pickled_and_loaded(options):
    head, features = head_of(options), torch.randn(5, SIZE, dtype=torch.double)
    for other in (copy.deepcopy(head), pickle.loads(pickle.dumps(head))):
        assert repr(other) == repr(head)
        assert_close(other.logits(features), head.logits(features), rtol=0, atol=0)
    fresh = head_of(options)
    fresh.load_state_dict(head.state_dict())
    assert_close(fresh.logits(features), head.logits(features), rtol=0, atol=0)


def test_a_pooled_head_shows_its_options():
    assert repr(tammes.CosineHead(4, 3, subcenters=2)) == "CosineHead(4, 3, scale=64, subcenters=2)"
    soft = tammes.CosineHead(4, 3, subcenters=2, pooling="soft")
    shown = "CosineHead(4, 3, scale=64, subcenters=2, pooling='soft', temperature=0.1)"
    assert repr(soft) == shown


def test_a_compiled_criterion_is_the_same():
    head, features = head_of(POOLINGS[1]), torch.randn(5, SIZE, dtype=torch.double)
    criterion = tammes.Criterion(head, tammes.arcface())
    compiled = torch.compile(criterion, backend="eager", fullgraph=True)
    assert_close(compiled(features, LABELS), criterion(features, LABELS))


def test_the_closed_form_of_one_prototype_per_class_is_not_chosen():
    head = head_of({"subcenters": 3}, torch.float)
    problem, reads = head.problem(torch.randn(5, SIZE)), frozenset(("target", "others"))
    assert choose_kernel("dense", problem, reads) == "reference"


def test_a_gain_of_each_class_is_one_of_the_largest_but_not_of_an_average():
    counts = [50, 40, 30, 20, 10, 5, 4]
    features, loss = torch.randn(5, SIZE, dtype=torch.double), tammes.vs_softmax(counts=counts)
    head = head_of({"subcenters": 3})
    n = torch.tensor(counts, dtype=torch.double)
    scores = 16 * pooled(features, head.weight) / (n[0] / n) ** 0.3 + (n / n.sum()).log()
    for path in PATHS:
        criterion = tammes.Criterion(head, loss, implementation=path)
        assert_close(criterion(features, LABELS), F.cross_entropy(scores, LABELS))
    with pytest.raises(ValueError, match="vs_softmax expects a head whose similarity is a product"):
        tammes.Criterion(head_of(POOLINGS[1]), loss)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"subcenters": 0}, ValueError, "CosineHead expects subcenters from 1 to 255, got 0"),
        ({"subcenters": 2.0}, TypeError, "expects subcenters to be a whole number, got 2.0"),
        ({"subcenters": True}, TypeError, "expects subcenters to be a whole number, got True"),
        ({"pooling": "mean"}, ValueError, "CosineHead expects pooling 'max' or 'soft', got 'mean'"),
        ({"temperature": 0}, ValueError, "CosineHead expects temperature above 0, got 0"),
    ],
)
def test_a_pooled_head_says_what_is_wrong(options, error, message):
    with pytest.raises(error, match=message):
        tammes.CosineHead(4, 3, **options)
