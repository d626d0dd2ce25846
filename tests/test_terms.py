"""Terms are values: they print, compare, copy and add up."""

import copy
import pickle

import pytest
import torch
from catalogue import TERMS
from torch.testing import assert_close

import tammes

NAMESPACE = {name: getattr(tammes, name) for name in tammes.__all__}


@pytest.mark.parametrize("name", TERMS)
def test_what_a_term_prints_builds_it_again(name):
    built = eval(repr(TERMS[name]), {"inf": float("inf")}, NAMESPACE)
    assert built == TERMS[name]
    assert hash(built) == hash(TERMS[name])


@pytest.mark.parametrize("name", TERMS)
def test_terms_pickle_and_copy(name):
    term = TERMS[name]
    assert pickle.loads(pickle.dumps(term)) == term
    assert copy.deepcopy(term) == term


def test_sums_print_as_they_are_written_and_compare():
    loss = tammes.cosface(margin=0.35) + 0.5 * tammes.sample_margin()
    assert repr(loss) == "cosface(margin=0.35) + 0.5*sample_margin()"
    assert loss == tammes.cosface(margin=0.35) + tammes.sample_margin() * 0.5
    assert loss != tammes.cosface(margin=0.35) + tammes.sample_margin()
    assert pickle.loads(pickle.dumps(loss)) == loss


def test_direct_and_spectral_sums_print_so_that_they_can_be_built_again():
    for loss in (
        tammes.direct_sum(tammes.softmax(), tammes.nca(), eps=0.1),
        tammes.spectral_sum(tammes.softmax(), 0.5 * tammes.proto(), p=0.2, detach=False),
    ):
        assert eval(repr(loss), {}, NAMESPACE) == loss
        assert pickle.loads(pickle.dumps(loss)) == loss


def test_weights_multiply_out():
    a, b, c = tammes.cosface(), tammes.sample_margin(), tammes.zero_centroid()
    loss = 2 * (a + 0.5 * (b + 3 * c))
    assert list(loss.leaves()) == [(2.0, a), (1.0, b), (3.0, c)]
    assert list(sum([a, b, c]).leaves()) == [(1.0, a), (1.0, b), (1.0, c)]


def test_differences_and_quotients_are_sums_too():
    a, b = tammes.cosface(), tammes.sample_margin()
    assert list((a - b / 2).leaves()) == [(1.0, a), (-0.5, b)]
    assert list((-a).leaves()) == [(-1.0, a)]


def test_a_direct_sum_may_be_weighted_and_added_to():
    inner = tammes.direct_sum(tammes.softmax(), 2 * tammes.nca())
    weights = [weight for weight, _ in (0.5 * inner + tammes.zero_centroid()).leaves()]
    assert weights == [0.5, 1.0, 1.0]


def test_settings_are_plain_values_whatever_they_came_as():
    margins = [0.1, 0.2, 0.5]
    expected = tammes.cosface(margin=margins)
    assert tammes.cosface(margin=tuple(margins)) == expected
    assert tammes.cosface(margin=torch.tensor(margins, dtype=torch.double)) == expected
    assert tammes.cosface(margin=torch.tensor(0.5)) == tammes.cosface(margin=0.5)
    assert expected.settings == {"margin": (0.1, 0.2, 0.5)}


def test_a_long_setting_prints_short():
    assert len(repr(tammes.cosface(margin=[0.5] * 100_000))) < 80


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (
            lambda: tammes.cosface(marign=0.1),
            TypeError,
            "cosface has no setting 'marign'; did you mean margin",
        ),
        (lambda: tammes.cosface(margin=float("nan")), ValueError, "margin to be a number"),
        (
            lambda: tammes.cosface(margin="0.3"),
            ValueError,
            "margin to be a number or one per class",
        ),
        (lambda: tammes.arcface(extension=1), ValueError, "extension to be a string"),
        (lambda: float("inf") * tammes.cosface(), ValueError, "a finite weight, got inf"),
        (lambda: tammes.cosface() + 1, TypeError, "unsupported operand"),
        (lambda: tammes.cosface() * tammes.softmax(), TypeError, "unsupported operand"),
        (
            lambda: tammes.arcface(margin=28.6),
            ValueError,
            "expects radians, at most pi .* got 28.6",
        ),
        (lambda: tammes.combined_margin(0), ValueError, "expects m1 above 0, got 0"),
        (lambda: tammes.nca(scale=[1.0, 2.0]), ValueError, "expects one scale for all classes"),
        (lambda: tammes.ldam(), TypeError, "missing a required argument: 'counts'"),
    ],
)
def test_a_wrong_expression_is_refused(build, error, message):
    with pytest.raises(error, match=message):
        build()


@tammes.term(reads="target hardest")
def squared(split, *, margin=0.2):
    return (split.hardest - split.target + margin).relu().square()


def test_a_loss_of_ones_own_works_like_the_others():
    loss = squared(margin=0.5) + 0.1 * tammes.cosface()
    assert pickle.loads(pickle.dumps(loss)) == loss
    values = {}
    for implementation in ("dense", "streamed"):
        torch.manual_seed(0)
        head = tammes.CosineHead(4, 3, implementation=implementation)
        criterion = tammes.Criterion(head, loss)
        criterion(torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])).backward()
        values[implementation] = head.weight.grad
    assert_close(values["dense"], values["streamed"])


def test_a_term_is_called_with_a_split_and_settings_can_be_replaced():
    cosine = torch.tensor([[0.9, 0.2], [0.3, 0.5]])
    split = tammes.split(cosine, torch.tensor([0, 1]), scale=2.0)
    per_class = tammes.cosface(margin=[0.1, 0.4])(split)
    assert_close(per_class[0], tammes.cosface(margin=0.1)(split)[0])
    assert_close(per_class[1], tammes.cosface(margin=0.4)(split)[1])
    assert_close(tammes.cosface()(split, margin=0.4), tammes.cosface(margin=0.4)(split))
