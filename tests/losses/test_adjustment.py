"""Offset and gain of the scores of every class: logit adjustment, balanced softmax, VS."""

import pickle

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import tammes
from tammes.heads.class_sampling import sample
from tammes.lab.config import parse_loss

COUNTS = [500, 50, 5, 7, 120]
N = torch.tensor(COUNTS, dtype=torch.double)
HEADS = {
    "linear": lambda: tammes.LinearHead(6, 5),
    "linear, learned scale": lambda: tammes.LinearHead(6, 5, scale="learnable"),
    "cosine": lambda: tammes.CosineHead(6, 5, scale=8.0),
    "cosine, learned scale": lambda: tammes.CosineHead(6, 5, scale="learnable"),
    "raw features": lambda: tammes.CosineHead(6, 5, scale=2.0, normalize_features=False),
    "sampled": lambda: tammes.ShardedHead(tammes.LinearHead, 6, 5, sample_rate=0.99),
}


def batch(rows=12):
    x = torch.randn(rows, 6, dtype=torch.double, requires_grad=True)
    return x, torch.arange(rows) % 5


def criterion(term, head="linear", **options):
    head = HEADS[head]() if isinstance(head, str) else head
    return tammes.Criterion(head, term, **options).double()


@pytest.mark.parametrize("dtype", [torch.double, torch.float32])
@pytest.mark.parametrize("implementation", ["dense", "streamed"])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(
    ("term", "gamma", "tau"),
    [
        (tammes.balanced_softmax(COUNTS), 0.0, 1.0),
        (tammes.logit_adjustment(COUNTS, tau=1.5), 0.0, 1.5),
        (tammes.vs_softmax(COUNTS), 0.3, 1.0),
        (tammes.vs_softmax(COUNTS, gamma=-0.2, tau=0.0), -0.2, 0.0),
    ],
)
def test_values_and_gradients_are_those_of_the_official_form(
    term, gamma, tau, head, implementation, dtype
):
    made = criterion(term + 0.5 * tammes.softmax(), head, implementation=implementation).to(dtype)
    x, y = batch()
    x = x.detach().to(dtype).requires_grad_()
    # A sharded head's logits have no gradient.
    logits = F.linear(x, *made.parameters()) if head == "sampled" else made.logits(x)
    n = N.to(dtype)
    # Balanced softmax adds log n_c; VS divides by (n_max / n_c)^gamma.
    official = logits / (n.max() / n) ** gamma + tau * n.log()
    expected = F.cross_entropy(official, y) + 0.5 * F.cross_entropy(logits, y)
    loss = made(x, y)
    close = {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.double else {"rtol": 1e-5, "atol": 1e-5}
    assert_close(loss, expected, **close)
    inputs = [x, *made.parameters()]
    for got, want in zip(
        torch.autograd.grad(loss, inputs), torch.autograd.grad(expected, inputs), strict=True
    ):
        assert_close(got.to_dense() if got.is_sparse else got, want, **close)


def test_a_sample_of_the_classes_is_adjusted_by_its_own_counts():
    head = tammes.ShardedHead(tammes.LinearHead, 6, 40, sample_rate=0.4)
    counts = [1 + c * c for c in range(40)]
    x, y = batch()
    made = criterion(tammes.vs_softmax(counts, gamma=0.5), head)
    index = sample(y, 40, 0.4, head.sampler.key).index
    assert len(index) == 16
    n = torch.tensor(counts, dtype=torch.double)
    logits = F.linear(x, head.weight, head.bias) * (n / n.max()) ** 0.5 + n.log()
    assert_close(made(x, y), F.cross_entropy(logits[:, index], torch.searchsorted(index, y)))


@pytest.mark.parametrize("term", [tammes.logit_adjustment, tammes.vs_softmax])
@pytest.mark.parametrize("head", ["linear", "cosine"])
def test_equal_counts_and_zero_strength_are_the_softmax(term, head):
    x, y = batch()
    plain = criterion(tammes.softmax(), head, reduction="none")
    still = {key: 0.0 for key in term.definition.defaults}
    for same in (term([7] * 5), term(COUNTS, **still)):
        made = criterion(same, plain.head, reduction="none")
        assert_close(made(x, y), plain(x, y), rtol=1e-12, atol=1e-12)


def test_vs_without_factors_is_logit_adjustment():
    x, y = batch()
    one = criterion(tammes.vs_softmax(COUNTS, gamma=0.0, tau=0.7), reduction="none")
    other = criterion(tammes.logit_adjustment(COUNTS, tau=0.7), one.head, reduction="none")
    assert_close(one(x, y), other(x, y), rtol=1e-12, atol=1e-12)


def test_logits_are_free_of_the_adjustment_and_adjusted_on_request():
    made = criterion(tammes.logit_adjustment(COUNTS))
    x, y = batch()
    assert torch.equal(made.logits(x), made.head.logits(x))
    seen = tammes.adjust_logits(made.logits(x), COUNTS, tau=-1.0)
    assert_close(made(x, y), F.cross_entropy(seen, y), rtol=1e-12, atol=1e-12)
    after = tammes.adjust_logits(made.logits(x), COUNTS, tau=2.0)
    assert_close(after, made.logits(x) - 2 * (N / N.sum()).log())


@pytest.mark.parametrize("which", [0, 2])
def test_a_masked_class_is_not_there_even_if_it_is_the_largest(which):
    made = criterion(tammes.vs_softmax(COUNTS) + tammes.logit_adjustment(COUNTS))
    with torch.no_grad():
        made.head.bias[which] = -torch.inf
    x, y = batch()
    keep = torch.tensor([c for c in range(5) if c != which])
    y = keep[torch.arange(12) % 4]
    logits, n = made.logits(x)[:, keep], N[keep]
    offset = (n / N.sum()).log()
    place = torch.searchsorted(keep, y)
    expected = F.cross_entropy(logits * (n / n.max()) ** 0.3 + offset, place)
    assert_close(made(x, y), expected + F.cross_entropy(logits + offset, place))


def test_a_split_in_memory_is_adjusted_where_it_has_the_scores():
    made = criterion(tammes.vs_softmax(COUNTS), reduction="none")
    x, y = batch()
    found = tammes.split(made.logits(x), y, reads=("target", "others", "rest"))
    assert_close(made.settings.named["vs_softmax"][1](found), made(x, y))
    with pytest.raises(ValueError, match="vs_softmax expects a split with rest"):
        tammes.vs_softmax(COUNTS)(tammes.split(made.logits(x), y))


def test_classes_are_added_with_their_counts():
    made = criterion(tammes.logit_adjustment(COUNTS))
    made.add_classes(1, counts=[9])
    assert made.loss.settings["counts"] == (*COUNTS, 9)
    x, y = batch()
    n = torch.tensor([*COUNTS, 9], dtype=torch.double)
    assert_close(made(x, y), F.cross_entropy(made.logits(x) + n.log(), y))


def test_it_pickles_saves_and_is_written_as_text():
    made = criterion(tammes.vs_softmax(COUNTS))
    x, y = batch()
    copy = pickle.loads(pickle.dumps(made))
    assert torch.equal(copy(x, y), made(x, y))
    assert made.state_dict().keys() == {"head.weight", "head.bias"}
    assert parse_loss(repr(made.loss)) == made.loss
    assert parse_loss("vs_softmax(gamma=0.3)", counts=COUNTS) == made.loss
    assert parse_loss("balanced_softmax", counts=COUNTS) == tammes.balanced_softmax(COUNTS)


def test_an_adjustment_of_your_own_reads_more_than_two_numbers():
    x, y = batch()
    made = criterion(raised(levels=[0.0, 1.0, 2.0, 3.0, 4.0]), reduction="none")
    scores = made.logits(x) + torch.arange(5, dtype=torch.double)
    own = F.one_hot(y, 5).bool()
    expected = scores.masked_fill(own, -torch.inf).amax(1) - scores[own]
    assert_close(made(x, y), expected)


def _levels(levels):
    return levels, None


@tammes.term(reads="target hardest", fixed="levels", adjust=_levels)
def raised(split, levels):
    return split.scale * (split.hardest - split.target)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tammes.logit_adjustment([5, 0]), "logit_adjustment expects a positive count for"),
        (lambda: tammes.vs_softmax(COUNTS, gamma=float("inf")), "vs_softmax expects finite"),
        (lambda: criterion(tammes.vs_softmax(COUNTS), tammes.GaussianHead(6, 5)), "product of"),
        (lambda: criterion(tammes.logit_adjustment([1, 2])), "one counts for each of 5 classes"),
        (lambda: tammes.adjust_logits(torch.zeros(2, 3), [1, 2]), "logits of 2 classes"),
        (
            lambda: tammes.term(reads="gap", adjust=_levels)(lambda split, *, levels=0: split.gap),
            "expects reads without",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call()
