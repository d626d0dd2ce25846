"""Mistakes of whoever writes a loss are answered by a sentence when it is built."""

import pytest
import torch
from blocks import cut
from catalogue import SPLIT_TERMS
from messages import pattern
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import softplus
from torch.testing import assert_close

import tammes
from tammes._term_trial import try_term
from tammes.states import LearnedNumber


def bent(similarity, strength):
    return similarity + 0.2 * torch.tanh(strength * similarity)


def strength(split, k):
    return (k,)


def value(split, *, k=3.0):
    return softplus(split.others - split.scale * split.target)


def own(function=value, reads="target others", **options):
    options = {"requires": "cosine", "map_others": bent, "row_numbers": strength, **options}
    return tammes.term(reads=reads, **options)(function)()


MISTAKES = {
    "a misspelt field": (
        lambda: own(reads="target othres"),
        "value has no 'othres' for reads; did you mean others?",
    ),
    "a misspelt property of the head": (
        lambda: own(requires="cosines"),
        "value has no 'cosines' for requires; did you mean cosine?",
    ),
    "a setting that is not there": (
        lambda: own(fixed="margin"),
        "value has no 'margin' for fixed; there are k",
    ),
    "a field that is not declared": (
        lambda: own(lambda split, *, k=3.0: split.others - split.mean),
        "<lambda> reads mean of the split, got reads='target others' without: undeclared "
        "fields are not computed",
    ),
    "scores that is not declared": (
        lambda: own(lambda split, *, k=3.0: split.rest.sum(1)),
        "<lambda> reads rest ... got reads='target others' without",
    ),
    "a mean instead of rows": (
        lambda: own(lambda split, *, k=3.0: value(split).mean()),
        "<lambda> expects ... the loss of each example, shape (N,), got a tensor of shape () "
        "... N = 4",
    ),
    "no return": (
        lambda: own(lambda split, *, k=3.0: None),
        "<lambda> expects ... shape (N,), got NoneType for N = 4",
    ),
    "double precision": (
        lambda: own(lambda split, *, k=3.0: value(split).double()),
        "<lambda> expects ... the dtype of its split, got torch.float64 for torch.float32",
    ),
    "a split changed in place": (
        lambda: own(lambda split, *, k=3.0: split.others.sub_(split.target)),
        "<lambda> changes others of the split in place: make a new tensor",
    ),
    "an if": (
        lambda: own(lambda split, *, k=3.0: split.others if split.target > 0 else split.target),
        "<lambda> makes one number of a tensor, which has one for each example: torch.where "
        "chooses between two values",
    ),
    "numbers of the row alone": (
        lambda: own(row_numbers=lambda split, k: split.target),
        "row_numbers of value expects a tuple ... got a tensor of shape (4,)",
    ),
    "numbers of the row as a column": (
        lambda: own(row_numbers=lambda split, k: (split.target[:, None],)),
        "row_numbers of value expects ... shape (N,), got a tensor of shape (4, 1) for N = 4",
    ),
    "a cutoff that is not declared": (
        lambda: own(row_numbers=lambda split, k: (split.cutoff,)),
        "row_numbers of value ... got NoneType ... term(cutoff=)",
    ),
    "numbers of other settings": (
        lambda: own(row_numbers=lambda split, margin: (margin,)),
        "row_numbers of value is called ... row_numbers(split, k), got one of (split, margin)",
    ),
    "numbers of a field that is not declared": (
        lambda: own(row_numbers=lambda split, k: (split.gap,)),
        "row_numbers of value reads gap ... got reads='target others' without",
    ),
    "numbers of the other classes": (
        lambda: own(row_numbers=lambda split, k: (split.hardest,)),
        "row_numbers of value is given the own class alone ... got a function that reads hardest",
    ),
    "a map of fewer numbers": (
        lambda: own(map_others=lambda a: 2 * a),
        "map_others of value is called with similarities ... 2 arguments in all, got one of (a)",
    ),
    "a map without numbers": (
        lambda: own(row_numbers=None),
        "map_others of value ... 1 arguments in all, got one of (similarity, strength)",
    ),
    "a map that sums up": (
        lambda: own(map_others=lambda a, k: a.mean(1, keepdim=True)),
        "map_others of value expects one number for each ... got a tensor of shape (4, 1) "
        "... (4, 6)",
    ),
    "a map of several classes": (
        lambda: own(map_others=lambda a, k: a - a.mean(1, keepdim=True)),
        "map_others of value expects a function of each similarity and numbers of its row, got one "
        "that mixes classes: it is given a block of them at a time",
    ),
    "a map of several examples": (
        lambda: own(map_others=lambda a, k: a - a.mean(0, keepdim=True)),
        "map_others of value expects ... got one that mixes examples",
    ),
    "a map in double precision": (
        lambda: own(map_others=lambda a, k: 2 * a.double()),
        "map_others of value expects the dtype ... got torch.float64 for torch.float32",
    ),
    "a map with an if": (
        lambda: own(map_others=lambda a, k: 2 * a if a > 0 else a),
        "map_others of value makes one number of a tensor ... torch.where chooses between two "
        "values",
    ),
    "a map with a number": (
        lambda: own(map_others=lambda a, k: a * float(k)),
        "map_others of value makes one number of a tensor ... two values",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_of_the_author_is_answered_by_a_sentence(mistake):
    build, message = MISTAKES[mistake]
    with pytest.raises((ValueError, TypeError), match=pattern(message)):
        build()


def pushed(similarity, cutoff, push):
    return torch.where(similarity >= cutoff, similarity + push, similarity)


@tammes.term(
    reads="gap length others",
    requires="cosine",
    map_others=pushed,
    row_numbers=lambda split, top_k, push, state: (split.cutoff, push + state),
    cutoff="top_k",
    fixed="top_k",
    state=lambda term, head: LearnedNumber(0.1, head.weight),
)
def hardest_pushed(split, *, top_k=3, push=0.1, state=None):
    return softplus(split.others - split.scale * (1 - split.gap))


@tammes.term(
    reads="target softplus",
    requires="cosine",
    map_others=lambda a, centre, width: a * torch.sigmoid((a - centre) / width),
    row_numbers=lambda split, margin, width: (split.target.detach() - margin, width),
)
def gated(split, *, margin=0.2, width=0.1):
    return softplus(-split.scale * split.target) + split.softplus / split.rivals


@tammes.term(reads="target others", requires="cosine", map_others=lambda a: a.detach().tanh())
def unpushed(split, *, margin=0.1):
    return softplus(split.others - split.scale * (split.target - margin))


@pytest.mark.parametrize(
    "loss",
    [
        own(),
        hardest_pushed(),
        gated(margin=[0.1, 0.2, 0.3, 0.4, 0.5]),
        pytest.param(unpushed(), id="a map that is detached"),
    ],
)
def test_a_loss_of_ones_own_streams(loss, monkeypatch):
    cut(monkeypatch, 2, 2)
    found = []
    for implementation in ("dense", "streamed"):
        torch.manual_seed(0)
        head = tammes.CosineHead(4, 5, scale=8.0, implementation=implementation).double()
        features = torch.randn(6, 4, dtype=torch.double, requires_grad=True)
        value = tammes.Criterion(head, loss).double()(features, torch.arange(6) % 5)
        value.backward()
        found.append((value, features.grad, head.weight.grad))
    assert_close(found[0], found[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", SPLIT_TERMS)
def test_the_losses_of_the_library_pass_the_trial(name):
    try_term(SPLIT_TERMS[name])


def test_a_function_that_fails_on_other_numbers_is_left_to_its_call():
    def far(split, *, k=3.0):
        raise LookupError("not here")

    term = own(far)
    with pytest.raises(LookupError, match="not here"):
        tammes.Criterion(tammes.CosineHead(4, 3), term)(torch.randn(2, 4), torch.tensor([0, 1]))


def with_a_constant(split, *, k=3.0):
    return value(split) + torch.tensor([0.5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_constants_of_the_default_dtype_are_right(dtype):
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        assert own(with_a_constant).name == "with_a_constant"
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    "context",
    [lambda: torch.device("meta"), torch.inference_mode, FakeTensorMode],
    ids=["meta", "inference", "fake tensors"],
)
def test_a_right_loss_is_built_wherever_tensors_have_no_values(context):
    with context():
        assert own(with_a_constant).name == "with_a_constant"


def test_a_loss_is_tried_once():
    calls = []

    @tammes.term(reads="target")
    def counted(split, *, margin=0.0):
        calls.append(split)
        return -split.target

    for margin in (0.1, 0.2):
        counted(margin=margin)
    assert len(calls) == 1


@tammes.term(reads="target others scale labels classes")
def noisy(split, *, margin=0.1):
    return split.others - split.target + margin * torch.rand(len(split.target))


def test_a_trial_leaves_random_numbers_and_default_devices_alone():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)

    @tammes.term(reads="target")
    def stochastic(split):
        return split.target * torch.rand(len(split.target))

    with torch.device("meta"):
        stochastic()
    assert torch.rand(1, device="cpu") == expected


def test_fields_that_are_always_there_may_be_declared():
    assert noisy().name == "noisy"


def test_a_loss_first_built_in_inference_mode_is_tried():
    @tammes.term(reads="target")
    def undeclared(split):
        return split.hardest - split.target

    with torch.inference_mode(), pytest.raises(ValueError, match="reads hardest"):
        undeclared()
