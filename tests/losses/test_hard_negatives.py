"""Losses with a map of the other scores: MV, Curricular, inter-top-k, Circle, SFace, the filter."""

import copy
import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from blocks import cut
from rank_pool import everywhere
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import tammes

ROWS, SIZE, CLASSES = 12, 6, 7
HEADS = {
    "cosine": lambda: tammes.CosineHead(SIZE, CLASSES, scale=8.0),
    "learned scale": lambda: tammes.CosineHead(SIZE, CLASSES, scale="learnable"),
    "sampled": lambda: tammes.ShardedHead(
        tammes.CosineHead, SIZE, CLASSES, scale=8.0, sample_rate=0.99
    ),
}
ALL = [
    tammes.mv_softmax(margin=0.1),
    tammes.curricularface(momentum=0.3),
    tammes.inter_topk(top_k=2),
    tammes.circle(),
    tammes.sface(steepness=8.0),
    tammes.interclass_filter(threshold=0.2),
]


def batch(dtype=torch.double, rows=ROWS):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, SIZE, dtype=dtype, generator=generator)
    return x.requires_grad_(), torch.arange(rows) % CLASSES


def criterion(term, head="cosine", **options):
    torch.manual_seed(0)
    head = HEADS[head]() if isinstance(head, str) else head
    return tammes.Criterion(head, term, **options).double()


# The official forms, as their code has them: on all cosines, entries overwritten under a mask.


def mv_am(cosine, y, s):
    own = cosine.gather(1, y[:, None])
    hard = cosine > own - 0.35
    cosine = torch.where(hard, (0.2 + 1.0) * cosine + 0.2, cosine)
    return F.cross_entropy(s * cosine.scatter(1, y[:, None], own - 0.35), y)


def mv_arc_fixed(cosine, y, s):
    own = cosine.gather(1, y[:, None])
    shifted = own * math.cos(0.3) - (1 - own**2).sqrt() * math.sin(0.3)
    cosine = torch.where(cosine > shifted, cosine + 0.25, cosine)
    return F.cross_entropy(s * cosine.scatter(1, y[:, None], shifted), y)


def curricular(cosine, y, s, t=0.0, momentum=0.3):
    own = cosine.gather(1, y[:, None])
    shifted = own * math.cos(0.4) - (1 - own**2).sqrt() * math.sin(0.4)
    t = momentum * own.detach().mean() + (1 - momentum) * t
    cosine = torch.where(cosine > shifted, cosine * (t + cosine), cosine)
    return F.cross_entropy(s * cosine.scatter(1, y[:, None], shifted), y)


def top2(cosine, y, s):
    sine = (1 - cosine**2).sqrt()
    phi = cosine * math.cos(0.2) - sine * math.sin(0.2)
    nearer = cosine * math.cos(0.06) + sine * math.sin(0.06)
    own = F.one_hot(y, CLASSES).to(cosine)
    places = (cosine - 2 * own).topk(2).indices
    hard = torch.zeros_like(cosine).scatter(1, places, 1.0)
    return F.cross_entropy(s * (own * phi + hard * nearer + (1 - own - hard) * cosine), y)


def circle_class(cosine, y, s):
    positive = F.relu(1 + 0.25 - cosine.detach()) * (cosine - (1 - 0.25))
    negative = F.relu(cosine.detach() + 0.25) * (cosine - 0.25)
    own = F.one_hot(y, CLASSES).bool()
    return F.cross_entropy(s * torch.where(own, positive, negative), y)


def sigmoids(cosine, y, s):
    own = F.one_hot(y, CLASSES).bool()
    theta = cosine.detach().acos()
    pull, push = 1 / (1 + (-80 * (theta - 0.8)).exp()), 1 / (1 + (80 * (theta - 1.23)).exp())
    return (s * torch.where(own, -pull * cosine, push * cosine)).sum(1).mean()


def filtered(cosine, y, s):
    own = F.one_hot(y, CLASSES).bool()
    dirty = (cosine > 0.2) & ~own
    cosine = torch.where(dirty, torch.zeros_like(cosine), cosine)
    phi = torch.where(own, cosine, 0.0).sum(1).acos() + 0.3
    return F.cross_entropy(s * torch.where(own, phi.cos()[:, None], cosine), y)


OFFICIAL = {
    "mv_am": (tammes.mv_softmax(), mv_am),
    "mv_arc_fixed": (
        tammes.mv_softmax(margin=0.3, emphasis=0.25, kind="arc", adaptive=False),
        mv_arc_fixed,
    ),
    "curricular": (tammes.curricularface(margin=0.4, momentum=0.3), curricular),
    "inter_topk": (tammes.inter_topk(top_k=2), top2),
    "circle": (tammes.circle(), circle_class),
    "sface": (tammes.sface(), sigmoids),
    "filter": (tammes.interclass_filter(threshold=0.2, m2=0.3), filtered),
}


@pytest.mark.parametrize("dtype", [torch.double, torch.float32])
@pytest.mark.parametrize("implementation", ["dense", "streamed", "thin"])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", OFFICIAL)
def test_values_and_gradients_are_those_of_the_official_form(
    monkeypatch, name, head, implementation, dtype
):
    term, official = OFFICIAL[name]
    if implementation == "thin":
        cut(monkeypatch, 3, 2, thin=True)
    way = "dense" if implementation == "dense" else "streamed"
    made = criterion(term, head, implementation=way).to(dtype)
    x, y = batch(dtype)
    cosine = F.normalize(x) @ F.normalize(made.head.weight).T
    expected = official(cosine, y, made.head.scale)
    loss = made(x, y)
    close = {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.double else {"rtol": 1e-5, "atol": 1e-5}
    assert_close(loss, expected, **close)
    inputs = [x, *made.parameters()]
    for got, want in zip(
        torch.autograd.grad(loss, inputs), torch.autograd.grad(expected, inputs), strict=True
    ):
        assert_close(got.to_dense() if got.is_sparse else got, want, **close)


def test_the_limits_are_the_plain_losses():
    x, y = batch()
    rivals = CLASSES - 1
    for term, plain in (
        (tammes.mv_softmax(emphasis=0.0), tammes.cosface()),
        (tammes.mv_softmax(margin=0.4, emphasis=0.0, kind="arc"), tammes.arcface(margin=0.4)),
        (tammes.inter_topk(penalty=0.0), tammes.arcface(margin=0.2)),
        (tammes.interclass_filter(threshold=1.0), tammes.combined_margin(1.0, 0.5, 0.0)),
        (tammes.inter_topk(top_k=rivals), tammes.inter_topk(top_k=rivals + 9)),
    ):
        one, other = criterion(term, reduction="none"), criterion(plain, reduction="none")
        assert_close(one(x, y), other(x, y), rtol=1e-12, atol=1e-12)
    # An example that is far nearer to its own class than to any other has no hard class.
    head = tammes.SimplexHead(SIZE, CLASSES, scale=8.0)
    near = head.weight[y].double() + 0.01 * x.detach()
    hard, plain = criterion(tammes.curricularface(), head), criterion(tammes.arcface(), head)
    assert_close(hard(near, y), plain(near, y), rtol=1e-12, atol=1e-12)


def test_all_other_classes_are_penalised_where_there_are_no_more():
    x, y = batch()
    made = criterion(tammes.inter_topk(margin=0.0, top_k=CLASSES - 1, penalty=0.1))
    cosine = F.normalize(x) @ F.normalize(made.head.weight).T
    own = F.one_hot(y, CLASSES).bool()
    nearer = torch.where(own, cosine, (cosine.acos() - 0.1).cos())
    assert_close(made(x, y), F.cross_entropy(8.0 * nearer, y), rtol=1e-9, atol=1e-9)


def test_the_k_th_class_is_found_however_scores_are_rounded():
    # Of two equal classes at the edge, both are penalised.
    cosine = torch.tensor([[0.5, 0.3, 0.3, 0.1]], dtype=torch.double)
    rows = tammes.split(cosine, torch.tensor([0]), scale=4.0, reads=["gap", "length", "rest"])
    nearer = torch.tensor([0.3, 0.3, 0.1], dtype=torch.double)
    nearer[:2] = torch.cos(nearer[:2].acos() - 0.1)
    want = F.softplus((4 * nearer).logsumexp(0) - 4 * 0.5)
    found = tammes.inter_topk(margin=0.0, top_k=1, penalty=0.1)(rows)
    assert_close(found[0], want)


def test_curricularface_updates_its_mean_before_it_is_used():
    made = criterion(tammes.curricularface(margin=0.4, momentum=0.3))
    t = 0.0
    for step in range(3):
        x, y = batch()
        x = x.detach() + step
        y = torch.where(torch.arange(ROWS) == 2, -100, y)
        kept = y >= 0
        cosine = F.normalize(x[kept]) @ F.normalize(made.head.weight).T
        assert_close(made(x, y), curricular(cosine, y[kept], 8.0, t), rtol=1e-6, atol=1e-6)
        t = 0.7 * t + 0.3 * cosine.gather(1, y[kept, None]).mean().item()
        assert made.states["curricularface"].mean.item() == pytest.approx(t, rel=1e-6)
    made.eval()
    made(x, y)
    made(x, torch.full_like(y, -100))
    assert made.states["curricularface"].mean.item() == pytest.approx(t, rel=1e-6)


def test_a_resumed_curricularface_goes_on_with_its_mean():
    made = criterion(tammes.curricularface())
    x, y = batch()
    made(x, y)
    again = criterion(tammes.curricularface())
    again.load_state_dict(copy.deepcopy(made.state_dict()))
    assert torch.equal(again(x, y), made(x, y))
    assert torch.equal(again.states["curricularface"].mean, made.states["curricularface"].mean)


def two_steps(group, sharded, loss):
    """Losses, gradients and states of a rank that has some of the examples."""
    x, y = batch(rows=13)
    classes = slice(None)
    if sharded:
        head = tammes.ShardedHead(tammes.CosineHead, SIZE, CLASSES, scale=8.0, group=group)
        made, classes = criterion(loss, head), slice(head.start, head.stop)
        head.load_state_dict(criterion(loss).head.state_dict())
    else:
        made = criterion(loss, group=group)
    mine = slice(0, 5) if made.global_batch.group.rank == 0 else slice(5, 13)
    found = []
    for _ in range(2):
        features = x.detach()[mine].clone().requires_grad_()
        value = made(features, y[mine])
        made.zero_grad()
        value.backward()
        found.append((value.item(), features.grad, made.head.weight.grad.clone()))
    return found, mine, classes, made.state_dict()


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("loss", ALL, ids=lambda loss: loss.name)
def test_two_ranks_are_one_process(sharded, loss):
    made = criterion(loss)
    expected = []
    for _ in range(2):
        x, y = batch(rows=13)
        value = made(x, y)
        made.zero_grad()
        value.backward()
        expected.append((value.item(), x.grad, made.head.weight.grad.clone()))
    everybody = everywhere(2, two_steps, sharded, loss)
    for found, mine, classes, state in everybody:
        for step, (value, d_features, d_weight) in enumerate(found):
            assert value == pytest.approx(expected[step][0], rel=1e-9)
            # Gradients of the ranks are averaged.
            assert_close(d_features / 2, expected[step][1][mine], rtol=1e-7, atol=1e-9)
            if sharded:
                assert_close(d_weight, expected[step][2][classes], rtol=1e-7, atol=1e-9)
        for name, value in made.state_dict().items():
            if name.startswith("states"):
                assert torch.equal(state[name], value)
    if not sharded:
        for step in range(2):
            mean = sum(found[step][2] for found, *_ in everybody) / 2
            assert_close(mean, expected[step][2], rtol=1e-7, atol=1e-9)


def own_loss():
    """The loss of a user's own that the documentation writes."""
    page = (Path(__file__).parents[2] / "docs" / "losses.md").read_text()
    block = next(
        code for code in re.findall(r"```python\n(.*?)```", page, re.S) if "map_others" in code
    )
    names = {"__name__": __name__}
    exec(block, names)
    return names


def own_loss_on_a_rank(group):
    return two_steps(group, True, own_loss()["relaxed"]())


@pytest.mark.parametrize("implementation", ["dense", "streamed"])
def test_the_loss_of_a_users_own_is_right(implementation):
    names = own_loss()
    made = criterion(names["relaxed"](), implementation=implementation)
    x, y = batch()
    cosine = F.normalize(x) @ F.normalize(made.head.weight).T
    own = cosine.gather(1, y[:, None])
    hard = torch.where(cosine > own - 0.2, own - 0.2 + 0.5 * (cosine - own + 0.2), cosine)
    expected = F.cross_entropy(8 * hard.scatter(1, y[:, None], own - 0.2), y)
    loss = made(x, y)
    assert_close(loss, expected, rtol=1e-9, atol=1e-9)
    inputs = [x, made.head.weight]
    for got, want in zip(
        torch.autograd.grad(loss, inputs), torch.autograd.grad(expected, inputs), strict=True
    ):
        assert_close(got, want, rtol=1e-9, atol=1e-9)


def test_the_loss_of_a_users_own_is_right_on_ranks():
    made = criterion(own_loss()["relaxed"]())
    x, y = batch(rows=13)
    made(x, y).backward()
    for found, mine, classes, _ in everywhere(2, own_loss_on_a_rank):
        assert_close(found[0][1] / 2, x.grad[mine], rtol=1e-7, atol=1e-9)
        assert_close(found[0][2], made.head.weight.grad[classes], rtol=1e-7, atol=1e-9)


def test_a_map_may_be_without_numbers_and_its_numbers_may_take_a_gradient():
    @tammes.term(reads="target softplus", map_others=torch.square)
    def squares(split):
        return split.softplus - split.target

    @tammes.term(
        reads="target mean",
        map_others=lambda a, margin: a * margin,
        row_numbers=lambda split, margin: (margin,),
    )
    def product(split, *, margin=0.5):
        return split.mean

    x, y = batch()
    margin = torch.rand(ROWS, dtype=torch.double, requires_grad=True)
    for way in ("dense", "streamed"):
        made = criterion(squares() + product(), implementation=way)
        cosine = F.normalize(x) @ F.normalize(made.head.weight).T
        other = (~F.one_hot(y, CLASSES).bool()).double()
        soft = (F.softplus(8 * cosine**2) * other).sum(1) - cosine.gather(1, y[:, None])[:, 0]
        mean = (8 * cosine * margin[:, None] * other).sum(1) / (CLASSES - 1)
        loss, expected = made(x, y, margin=margin), (soft + mean).mean()
        assert_close(loss, expected)
        for got, want in zip(
            torch.autograd.grad(loss, [x, margin]),
            torch.autograd.grad(expected, [x, margin]),
            strict=True,
        ):
            assert_close(got, want)


def test_what_a_map_cannot_serve_is_refused():
    def wrong(split, *, k=3):
        return split.target

    for options, message in (
        ({"reads": "target hardest", "map_others": torch.square}, "without hardest and rest"),
        ({"reads": "others rest", "map_others": torch.square}, "without hardest and rest"),
        ({"row_numbers": lambda split, k: ()}, "wrong expects map_others beside row_numbers"),
        ({"map_others": torch.square, "cutoff": "k", "reads": "others"}, "cutoff k among fixed"),
    ):
        with pytest.raises(ValueError, match=message):
            tammes.term(**options)(wrong)
    with pytest.raises(ValueError, match="mv_softmax expects a split with rest"):
        tammes.mv_softmax()(tammes.split(torch.eye(3), torch.arange(3)))
    with pytest.raises(ValueError, match="mv_softmax expects a head with unit features"):
        tammes.Criterion(tammes.LinearHead(4, 3), tammes.mv_softmax())
    rows = tammes.split(torch.eye(3), torch.arange(3), reads=["gap", "length", "rest"])
    with pytest.raises(ValueError, match="expects the running mean of a criterion"):
        tammes.curricularface()(rows)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: tammes.mv_softmax(kind="x"), "mv_softmax expects kind 'am' or 'arc', got 'x'"),
        (lambda: tammes.mv_softmax(emphasis=-0.1), "emphasis of 0 or more, got -0.1"),
        (lambda: tammes.curricularface(momentum=2.0), "momentum between 0 and 1, got 2"),
        (lambda: tammes.inter_topk(top_k=0), "whole number of 1 or more as top_k, got 0"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_a_batch_that_overflowed_does_not_stay_in_the_running_mean():
    head = tammes.CosineHead(SIZE, CLASSES)
    criterion = tammes.Criterion(head, tammes.curricularface(momentum=0.5), validate=None)
    features, labels = torch.randn(ROWS, SIZE), torch.arange(ROWS) % CLASSES
    broken = features.clone()
    broken[0, 0] = torch.inf
    criterion(broken, labels)
    assert criterion(features, labels).isfinite()
    assert criterion.states["curricularface"].mean != 0


class Curious(tammes.states.State):
    sees = frozenset(("hardest", "target"))


@tammes.term(reads="target", state=lambda term, head: Curious())
def curious(split, *, state=None):
    return -split.target


@tammes.term(reads="others target", map_others=lambda similarity: similarity.abs().sqrt())
def rooted(split):
    return split.others - split.scale * split.target


@pytest.mark.parametrize("implementation", ["dense", "streamed"])
def test_the_own_class_needs_no_slope_of_the_map(implementation):
    head = tammes.CosineHead(SIZE, CLASSES, scale=4.0, implementation=implementation).double()
    features = torch.randn(ROWS, SIZE, dtype=torch.double, requires_grad=True)
    tammes.Criterion(head, rooted())(features, torch.arange(ROWS) % CLASSES).backward()
    assert features.grad.isfinite().all()
    assert head.weight.grad.isfinite().all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: tammes.Criterion(tammes.CosineHead(4, 3), curious()),
            "curious expects its state to see numbers of the own class, .* got hardest",
        ),
        (lambda: tammes.inter_topk(top_k=[1, 2, 3]), "inter_topk expects one top_k for all"),
        (lambda: tammes.inter_topk(top_k=True), "inter_topk expects a whole number"),
        (lambda: tammes.mv_softmax(margin=20), "at most 2 either way, got 20"),
        (lambda: tammes.multi_positive(margin=28.6, kind="cos"), "at most 2 either way, got 28.6"),
    ],
)
def test_what_cannot_be_meant_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


class _Largest(TorchDispatchMode):
    """Number of elements of the largest tensor that an operation makes."""

    most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple | list) else (made,):
            if isinstance(each, torch.Tensor):
                self.most = max(self.most, each.numel())
        return made


def test_finding_the_cutoff_makes_nothing_larger_than_a_block_of_scores():
    head = tammes.CosineHead(4, 200, implementation="streamed")
    criterion = tammes.Criterion(head, tammes.inter_topk(top_k=3))
    features, labels = torch.randn(50, 4, requires_grad=True), torch.arange(50)
    with _Largest() as largest:
        criterion(features, labels).backward()
    assert largest.most <= 50 * 200


@pytest.mark.parametrize("dtype", [torch.double, torch.float])
@pytest.mark.parametrize("other_angle", [0.05, math.pi - 0.05])
def test_sface_has_its_gradient_where_an_angle_is_0_or_pi(dtype, other_angle):
    # The cosines of the ends as rounding leaves them, beyond one too, and within a small angle.
    eps, near = torch.finfo(dtype).eps, math.cos(0.01)
    ends = torch.tensor([1.0, 1 + eps, near, -near, -1.0, -1 - eps], dtype=dtype)
    cosine = ends.expand(6, -1).clone().requires_grad_()
    rows = tammes.split(cosine, torch.arange(6), scale=8.0, reads=["target", "gap", "rest"])
    loss = tammes.sface(own_angle=other_angle, other_angle=other_angle, steepness=8.0)(rows)
    (found,) = torch.autograd.grad(loss.sum(), cosine)
    theta = torch.tensor([0, 0, 0.01, math.pi - 0.01, math.pi, math.pi], dtype=torch.double)
    pull = (8.0 * (theta - other_angle)).sigmoid()
    expected = 8.0 * torch.where(torch.eye(6).bool(), -pull, (1 - pull).expand(6, -1))
    # A cosine in single precision says an angle at the ends to a few hundredths of a degree.
    assert_close(found.double(), expected, rtol=0, atol=1e-6 if dtype == torch.double else 0.02)


@pytest.mark.parametrize("implementation", ["dense", "streamed"])
def test_sface_is_finite_where_features_are_at_other_prototypes(implementation):
    x = F.normalize(torch.randn(64, SIZE, generator=torch.Generator().manual_seed(2)))
    assert (F.linear(x, x).diagonal() > 1).any()
    head = tammes.CosineHead(SIZE, 128, implementation=implementation)
    head.weight.data = torch.cat([x, -x])
    found = tammes.Criterion(head, tammes.sface(other_angle=0.001))
    x = x.clone().requires_grad_()
    found(x, torch.arange(64).roll(1)).backward()
    assert x.grad.isfinite().all()
    assert head.weight.grad.isfinite().all()
    assert x.grad.abs().max() > 0
