"""UniFace and SphereFace2 with their learned numbers: terms that own a parameter."""

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from rank_pool import everywhere
from torch.testing import assert_close

import tammes
from tammes import checkpoint
from tammes.lab.config import parse_loss
from tammes.states import LearnedNumber

HEADS = {
    "cosine": lambda: tammes.CosineHead(6, 5, scale=8.0),
    "learned scale": lambda: tammes.CosineHead(6, 5, scale="learnable"),
    "linear": lambda: tammes.LinearHead(6, 5),
    "sampled": lambda: tammes.ShardedHead(tammes.LinearHead, 6, 5, sample_rate=0.99),
}


def batch(dtype=torch.double, rows=12):
    x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(1), dtype=torch.double)
    return x.to(dtype).requires_grad_(), torch.arange(rows) % 5


def official(f, y, threshold, margin, weight):
    """UniFace's head.py: a sigmoid of the own score with margin, and of all others."""
    own = F.one_hot(y, f.shape[1]).bool()
    positive = torch.log1p(torch.exp(-(f[own] - margin - threshold)))
    negative = torch.log1p(torch.exp(f - threshold)).masked_fill(own, 0.0)
    return (positive + weight * negative.sum(1)).mean()


@pytest.mark.parametrize("dtype", [torch.double, torch.float32])
@pytest.mark.parametrize("implementation", ["dense", "streamed"])
@pytest.mark.parametrize("head", HEADS)
def test_values_and_gradients_are_those_of_the_official_form(head, implementation, dtype):
    torch.manual_seed(0)
    term = tammes.uniface(margin=0.3, negative_weight=0.7)
    made = tammes.Criterion(HEADS[head](), term, implementation=implementation).to(dtype)
    x, y = batch(dtype)
    threshold = made.states["uniface"].value
    assert_close(threshold.detach(), torch.tensor([math.log(50)], dtype=dtype))
    # A sharded head's logits have no gradient.
    sampled = head == "sampled"
    scores = F.linear(x, made.head.weight, made.head.bias) if sampled else made.logits(x)
    expected = official(scores, y, threshold, 0.3 * made.head.scale, 0.7)
    loss = made(x, y)
    close = {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.double else {"rtol": 1e-5, "atol": 1e-5}
    assert_close(loss, expected, **close)
    inputs = [x, *made.parameters()]
    for got, want in zip(
        torch.autograd.grad(loss, inputs), torch.autograd.grad(expected, inputs), strict=True
    ):
        assert_close(got.to_dense() if got.is_sparse else got, want, **close)


def test_without_margin_and_threshold_it_is_binary_cross_entropy():
    head, (x, y) = tammes.CosineHead(6, 5, scale=8.0).double(), batch()
    made = tammes.Criterion(head, tammes.uniface(margin=0.0), reduction="none")
    with torch.no_grad():
        made.states["uniface"].value.zero_()
    plain = tammes.Criterion(head, tammes.bce(), reduction="none")
    assert_close(made(x, y), plain(x, y), rtol=1e-12, atol=1e-12)


def test_one_value_by_hand():
    # Own score 2 less a margin of 1, another score of 0, threshold 1: twice log(1 + e^0), log(1 +
    # e^-1).
    s = tammes.split(torch.tensor([[2.0, 0.0, 1.0]]), torch.tensor([0]), reads=("target", "rest"))
    value = tammes.uniface(margin=1.0)(s, state=torch.tensor(1.0))
    assert_close(value, torch.tensor([2 * math.log(2) + math.log1p(math.exp(-1))]))


# ----------------------------------------------------------------------------- SphereFace2


def official_sphereface2(cosine, y, offset, scale, margin, balance, power):
    """OpenSphere's sphereface2.py without its factor: weighted binary cross entropies."""
    own = F.one_hot(y, cosine.shape[1]).double().to(cosine)
    with torch.no_grad():
        change = 2 * ((cosine + 1) / 2) ** power - 1 - margin * (2 * own - 1) - cosine
    logits = scale * (cosine + change) + offset
    entropies = F.binary_cross_entropy_with_logits(logits, own, reduction="none")
    weights = balance * own + (1 - balance) * (1 - own)
    return (weights * entropies / scale).sum(1).mean()


@pytest.mark.parametrize("dtype", [torch.double, torch.float32])
@pytest.mark.parametrize("implementation", ["dense", "streamed"])
@pytest.mark.parametrize("scale", [8.0, "learnable"])
def test_sphereface2_is_the_official_form(scale, implementation, dtype):
    torch.manual_seed(0)
    term = tammes.sphereface2(margin=0.3, balance=0.6, power=2.5)
    head = tammes.CosineHead(6, 5, scale=scale)
    made = tammes.Criterion(head, term, implementation=implementation).to(dtype)
    x, y = batch(dtype)
    offset = made.states["sphereface2"].value
    cosine = F.normalize(x) @ F.normalize(head.weight).T
    loss = made(x, y)
    expected = official_sphereface2(cosine, y, offset, head.scale, 0.3, 0.6, 2.5)
    close = {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.double else {"rtol": 1e-5, "atol": 1e-5}
    assert_close(loss, expected, **close)
    inputs = [x, *made.parameters()]
    for got, want in zip(
        torch.autograd.grad(loss, inputs), torch.autograd.grad(expected, inputs), strict=True
    ):
        assert_close(got, want, **close)


def test_sphereface2_of_power_one_and_no_margin_is_a_weighted_binary_cross_entropy():
    head, (x, y) = tammes.CosineHead(6, 5, scale=8.0).double(), batch()
    term = 16 * tammes.sphereface2(margin=0.0, balance=0.5, power=1.0)
    made = tammes.Criterion(head, term, reduction="none")
    with torch.no_grad():
        made.states["sphereface2"].value.zero_()
    plain = tammes.Criterion(head, tammes.bce(), reduction="none")
    assert_close(made(x, y), plain(x, y), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("classes", "scale", "margin", "balance"),
    [(5, 8.0, 0.4, 0.7), (2, 64.0, 0.4, 0.7), (1000, 40.0, 0.4, 0.7), (3, 30.0, -0.2, 0.9)],
)
def test_both_parts_of_sphereface2_pull_alike_where_all_cosines_are_zero(
    classes, scale, margin, balance
):
    head = tammes.CosineHead(4, classes, scale=scale).double()
    term = tammes.sphereface2(margin=margin, balance=balance)
    offset = tammes.Criterion(head, term).states["sphereface2"].value.item()
    g = 2 * 0.5**3 - 1
    own = balance * torch.sigmoid(torch.tensor(-scale * (g - margin) - offset).double())
    rest = (1 - balance) * torch.sigmoid(torch.tensor(scale * (g + margin) + offset).double())
    # The offset has three digits behind the point.
    assert_close(own, (classes - 1) * rest, rtol=2e-3, atol=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"balance": 1.0}, "balance between 0 and 1, got 1"), ({"power": 0}, "power above 0, got 0")],
)
def test_sphereface2_refuses_what_cannot_be(settings, message):
    with pytest.raises(ValueError, match=f"sphereface2 expects a? ?{message}"):
        tammes.sphereface2(**settings)


# ------------------------------------------------------------------- a parameter of a term


def _offset(term, head):
    return LearnedNumber(0.5, head.weight)


@tammes.term(reads="target others", state=_offset)
def margin_learned(split, *, weight=1.0, state=None):
    return F.softplus(split.others - split.scale * (split.target - state)) + weight * state**2


LOSSES = {
    "threshold": tammes.uniface(),
    "offset": tammes.sphereface2(),
    "margin": margin_learned() + 0.5 * tammes.uniface(),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_it_is_in_a_group_without_decay_and_is_trained(loss):
    made = tammes.Criterion(tammes.CosineHead(6, 5, scale=8.0), LOSSES[loss]).double()
    learned = [*made.states.parameters()]
    groups = made.param_groups(lr=0.1, weight_decay=0.5)
    assert [p for g in groups if g["weight_decay"] == 0 for p in g["params"]] == learned
    optimizer = torch.optim.SGD(groups)
    before = [p.detach().clone() for p in learned]
    made(*batch()).backward()
    optimizer.step()
    assert all((a != b).all() for a, b in zip(before, learned, strict=True))


@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_learns_for_itself(how):
    made = tammes.Criterion(tammes.CosineHead(6, 5, scale=8.0), tammes.uniface()).double()
    other, (x, y) = how(made), batch()
    assert torch.equal(other(x, y), made(x, y))
    other(x, y).backward()
    assert made.states["uniface"].value.grad is None
    with torch.no_grad():
        other.states["uniface"].value += 1
    assert not torch.equal(other(x, y), made(x, y))


@pytest.mark.parametrize("implementation", ["dense", "streamed"])
def test_added_classes_leave_it_alone(implementation):
    head = tammes.CosineHead(6, 5, scale=8.0, implementation=implementation)
    made = tammes.Criterion(head, tammes.uniface()).double()
    threshold = made.states["uniface"].value
    made.add_classes(2)
    assert made.states["uniface"].value is threshold
    x, y = batch()
    assert_close(made(x, y), official(made.logits(x), y, threshold, 0.4 * 8, 1.0))


def test_it_starts_on_the_device_of_the_head_in_single_precision():
    head = tammes.CosineHead(6, 5, scale=8.0).to("meta", torch.bfloat16)
    value = tammes.Criterion(head, tammes.uniface()).states["uniface"].value
    assert (value.device.type, value.dtype, value.shape) == ("meta", torch.float32, (1,))


def save_and_load(group, folder, loss):
    """Train on all ranks, save, go on in a fresh criterion."""

    def make(seed):
        torch.manual_seed(seed)
        head = tammes.ShardedHead(tammes.CosineHead, 6, 5, group=group, scale=8.0)
        made = tammes.Criterion(head, LOSSES[loss]).double()
        return made, torch.optim.SGD(made.param_groups(lr=0.1), momentum=0.9)

    x, y = batch()
    rank, size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    x, y = x[rank::size], y[rank::size]

    def step(made, optimizer):
        optimizer.zero_grad()
        value = made(x, y)
        value.backward()
        optimizer.step()
        return value.item(), [p.item() for p in made.states.parameters()]

    made, optimizer = make(0)
    step(made, optimizer)
    checkpoint.save(folder, made, optimizer)
    again, resumed = make(1)
    checkpoint.load(folder, again, resumed)
    expected = step(made, optimizer)
    assert (got := step(again, resumed)) == expected, (got, expected)
    return expected


@pytest.mark.parametrize("loss", LOSSES)
def test_sharded_ranks_learn_the_same_as_one_process_and_resume(tmp_path, loss):
    (alone,) = everywhere(1, save_and_load, str(tmp_path / "one"), loss)
    several = everywhere(3, save_and_load, str(tmp_path / "several"), loss)
    for found in several:
        assert_close(found, alone, rtol=1e-10, atol=1e-12)
    # All ranks hold the same bits.
    assert all(found == several[0] for found in several)


def test_it_is_written_as_text():
    assert parse_loss("uniface(margin=0.3)") == tammes.uniface(margin=0.3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: tammes.uniface()(s), "uniface expects its state from a criterion, got none"),
        (
            lambda s: tammes.uniface()(s._replace(rest=None), state=torch.tensor(1.0)),
            "uniface expects a split with rest",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(call, message):
    s = tammes.split(torch.zeros(1, 3), torch.tensor([0]), reads=("target", "rest"))
    with pytest.raises(ValueError, match=message):
        call(s)


@pytest.mark.parametrize("term", [tammes.uniface(), tammes.sphereface2()], ids=lambda t: t.name)
@pytest.mark.parametrize("reentrant", [True, False])
def test_it_has_its_gradient_under_activation_checkpointing(term, reentrant):
    made, (x, y) = tammes.Criterion(tammes.CosineHead(6, 5, scale=8.0), term).double(), batch()
    made(x, y).backward()
    value = made.states[term.name].value
    expected, value.grad = value.grad, None
    checkpointed = torch.utils.checkpoint.checkpoint(
        lambda features: made(features, y), x, use_reentrant=reentrant
    )
    checkpointed.backward()
    assert_close(value.grad, expected)
