"""Labels of shape (N, P): each positive against all classes that are not positives."""

import math

import pytest
import torch
import torch.nn.functional as F
from rank_pool import everywhere
from torch.testing import assert_close

import tammes
from tammes.lab.config import parse_loss
from tammes.losses import proxies

CLASSES = 9
LABELS = torch.tensor(
    [[0, 3, 8], [5, -100, -100], [2, -100, 7], [-100] * 3, [1, 2, 3], [8, 0, -100]]
)
WEIGHTS = torch.tensor([1.0, 2.0, 0.5, 3.0, 1.0, 0.0])
TOLERANCE = {
    torch.double: {"rtol": 1e-9, "atol": 1e-9},
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
}


def features(dtype=torch.double):
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(1), dtype=torch.double)
    return x.to(dtype).requires_grad_()


FORMS = ["each", "pairs", "apart"]


def plain(x, labels, weight, scale, margin, kind, form="each"):
    """Losses of the rows that have a label, one positive after the other."""
    cosine = F.normalize(x) @ F.normalize(weight).T
    rows = []
    for row, own in zip(cosine, labels.tolist(), strict=True):
        own = [c for c in own if c >= 0]
        if not own:
            continue
        negatives = torch.stack([row[c] for c in range(len(weight)) if c not in own])
        positives = [
            (row[p].acos() + margin).cos() if kind == "arc" else row[p] - margin for p in own
        ]
        if form == "each":
            terms = [(1 + (scale * (negatives - p)).exp().sum()).log() for p in positives]
            rows.append(torch.stack(terms).mean())
        elif form == "pairs":
            pairs = [(scale * (n - p)).exp() for p in positives for n in negatives]
            rows.append((1 + torch.stack(pairs).sum()).log())
        else:
            pulled = torch.stack([(-scale * p).exp() for p in positives]).sum()
            rows.append((1 + pulled).log() + (1 + (scale * negatives).exp().sum()).log())
    return torch.stack(rows)


def criterion(dtype=torch.double, kind="arc", form="each", head=tammes.CosineHead, **options):
    torch.manual_seed(0)
    term = tammes.multi_positive(scale=8.0, margin=0.2, kind=kind, form=form)
    return tammes.Criterion(head(5, CLASSES), term, **options).to(dtype)


@pytest.mark.parametrize("form", FORMS)
def test_a_label_that_is_given_twice_counts_once(form):
    made, x = criterion(form=form, reduction="none"), features()
    twice = torch.cat([LABELS, LABELS[:, :2]], 1)
    loss, expected = made(x, twice), made(x, LABELS)
    assert_close(loss, expected)
    inputs = [x, made.head.weight]
    found, wanted = (torch.autograd.grad(value.sum(), inputs) for value in (loss, expected))
    assert_close(found, wanted)


@pytest.mark.parametrize("most", [1 << 24, 13, 1], ids=["at once", "blocks", "one by one"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("kind", "form"), [("cos", "each"), *(("arc", form) for form in FORMS)])
def test_values_and_gradients_are_those_of_the_formula(kind, form, dtype, most, monkeypatch):
    monkeypatch.setattr(proxies, "_SCORES", most)
    made, x = criterion(dtype, kind, form), features(dtype)
    rows = plain(x, LABELS, made.head.weight, 8.0, 0.2, kind, form)
    weights = WEIGHTS.to(dtype)
    kept = weights[[0, 1, 2, 4, 5]]
    loss, expected = made(x, LABELS, weights=weights), rows @ kept / kept.sum()
    assert_close(loss, expected, **TOLERANCE[dtype])
    inputs = [x, made.head.weight]
    found, wanted = (torch.autograd.grad(value, inputs) for value in (loss, expected))
    assert_close(found, wanted, **TOLERANCE[dtype])
    assert not found[0][3].any()


@pytest.mark.parametrize("form", ["each", "pairs"])
@pytest.mark.parametrize(
    ("kind", "term"), [("arc", tammes.arcface(margin=0.2)), ("cos", tammes.cosface(margin=0.2))]
)
def test_with_one_positive_it_is_the_margin_softmax(kind, term, form):
    made, x = criterion(kind=kind, form=form, reduction="none"), features()
    head = tammes.CosineHead(5, CLASSES, scale=8.0).double()
    head.load_state_dict(made.head.state_dict())
    one = tammes.Criterion(head, term, reduction="none")
    labels = torch.tensor([0, 3, 8, -100, 1, 5])
    expected = one(x, labels)
    padded = torch.stack([torch.full_like(labels, -100), labels], 1)
    for same in (labels, labels[:, None], padded):
        assert_close(made(x, same), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_the_order_of_positives_and_padding_do_not_matter(form):
    made, x = criterion(form=form, reduction="none"), features()
    wide = torch.cat([torch.full((6, 1), -100), LABELS.flip(1)], 1)
    assert_close(made(x, wide), made(x, LABELS), rtol=1e-13, atol=1e-13)


def test_one_value_by_hand():
    # Two positives on the axes, a negative opposite to the first; scale 1 and no margin.
    made = tammes.Criterion(tammes.CosineHead(2, 3), tammes.multi_positive(scale=1.0, margin=0.0))
    made = made.double()
    with torch.no_grad():
        made.head.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]))
    loss = made(torch.tensor([[4.0, 0.0]], dtype=torch.double), torch.tensor([[0, 1]]))
    assert_close(loss.item(), (math.log1p(math.exp(-2)) + math.log1p(math.exp(-1))) / 2)


def test_where_every_class_is_a_positive_there_is_nothing_to_learn():
    made, x = criterion(), features()
    loss = made(x, torch.arange(CLASSES).expand(6, CLASSES))
    loss.backward()
    assert loss == 0
    assert not x.grad.any()


def test_a_compiled_criterion_gives_the_same():
    made, x = criterion(), features()
    assert_close(torch.compile(made, backend="aot_eager")(x, LABELS), made(x, LABELS))


def on_ranks(group, sharded, form):
    rank = torch.distributed.get_rank(group)
    made = criterion(form=form, group=None if sharded else group)
    if sharded:
        head = tammes.ShardedHead(tammes.CosineHead, 5, CLASSES, group=group)
        head.load_state_dict(made.head.state_dict())
        made = tammes.Criterion(head.double(), made.loss)
    mine = [slice(0, 1), slice(1, 5), slice(5, 6)][rank]
    part = features().detach()[mine].requires_grad_()
    loss = made(part, LABELS[mine], weights=WEIGHTS.double()[mine])
    loss.backward()
    # What a wrapper that averages makes of it.
    return loss.detach(), part.grad / 3, made.head.weight.grad


@pytest.mark.parametrize(("sharded", "form"), [(False, "each"), (True, "each"), (True, "apart")])
def test_on_several_ranks_it_is_the_same(sharded, form):
    made, x = criterion(form=form), features()
    loss = made(x, LABELS, weights=WEIGHTS.double())
    loss.backward()
    losses, gradients, weights = zip(*everywhere(3, on_ranks, sharded, form), strict=True)
    assert_close(losses, (loss.detach(),) * 3)
    assert_close(torch.cat(gradients), x.grad, rtol=1e-10, atol=1e-12)
    whole = torch.cat(weights) if sharded else sum(weights) / 3
    assert_close(whole, made.head.weight.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_a_label_that_nobody_has_shows_where_values_are_not_checked(form):
    made, x = criterion(form=form, validate=None, reduction="none"), features()
    labels = LABELS.clone()
    labels[1, 2] = CLASSES
    assert made(x, labels).isnan().tolist() == [False, True, False, False, False, False]


def test_it_is_written_as_text():
    assert parse_loss("multi_positive(kind='cos')") == tammes.multi_positive(kind="cos")
    assert parse_loss("mlcd(scale=32)") == tammes.multi_positive(scale=32, margin=0.0, form="apart")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: tammes.CosFace(5, CLASSES)(x, LABELS), r"labels of shape \(6,\), got \(6, 3\)"),
        (
            lambda x: tammes.Criterion(
                tammes.CosineHead(5, CLASSES), tammes.multi_positive() + tammes.cosface()
            )(x, LABELS),
            r"labels of shape \(6,\), got \(6, 3\)",
        ),
        (lambda x: criterion()(x, LABELS[:2]), r"labels of shape \(6,\) or \(6, P\), got \(2, 3\)"),
        (lambda x: criterion()(x, LABELS + 100), "classes? from 0 to 8|0 to 8"),
        (
            lambda x: criterion(class_weights=[1.0] * CLASSES)(x, LABELS),
            "one label per example where it has class_weights",
        ),
        (lambda x: tammes.multi_positive(kind="sine"), "kind 'arc' or 'cos', got 'sine'"),
        (lambda x: tammes.multi_positive(form="sum"), "'each', 'pairs' or 'apart', got 'sum'"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call(features())


@pytest.mark.parametrize("name", ["multi_positive", "proxy_anchor"])
def test_a_masked_class_is_as_if_it_were_not_there(name):
    torch.manual_seed(0)
    head = tammes.LinearHead(4, 5).double()
    with torch.no_grad():
        head.bias[4] = -torch.inf
    fewer = tammes.LinearHead(4, 4).double()
    with torch.no_grad():
        fewer.weight.copy_(head.weight[:4])
    features = torch.randn(6, 4, dtype=torch.double)
    labels = torch.tensor([0, 1, 2, 3, 0, 1])
    term = getattr(tammes, name)()
    loss = tammes.Criterion(head, term)(features, labels)
    assert_close(loss, tammes.Criterion(fewer, term)(features, labels))
    loss.backward()
    assert not head.weight.grad[4].any()


def test_scheduled_class_weights_are_refused_with_several_positives():
    criterion = tammes.Criterion(tammes.CosineHead(4, 5), tammes.multi_positive())
    criterion.schedule(
        class_weights=tammes.schedules.DeferredReweighting([1, 2, 3, 4, 5], start=0, beta=0.5)
    )
    with pytest.raises(ValueError, match="one label per example where it has class_weights"):
        criterion(torch.randn(3, 4), torch.tensor([[0, 1, 2]] * 3))
