"""When a negative margin helps novel classes: the estimate, the prediction and the criterion."""

import math

import pytest
import torch

from tammes import geometry
from tammes.metrics.functional import (
    DiscriminabilityResult,
    DiscriminabilityValues,
    discriminability,
)
from tammes.similarity import unit


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.double)


def mixed(shares, copies=4, size=6):
    """Features of base classes, each class as often as its share, and their labels."""
    labels = torch.arange(len(shares)).repeat_interleave(copies * torch.tensor(shares))
    return unit(draw(len(shares), size)[labels] + 0.4 * draw(len(labels), size, seed=1)), labels


@pytest.mark.parametrize("shares", [(1, 1, 1), (3, 1, 2)])
def test_a_mixture_of_base_classes_has_the_distance_the_theory_says(shares):
    features, labels = mixed(shares)
    probability = sum(share**2 for share in shares) / sum(shares) ** 2
    base = discriminability(features, labels, weighting="pair").base
    # Two examples of the novel class are any two of these.
    intra = float(torch.cdist(features, features).square().mean() / 2)
    predicted = probability * base.intra + (1 - probability) * base.inter
    assert intra == pytest.approx(float(predicted), rel=1e-12)


def test_the_novel_ratio_is_exact_for_mixtures():
    one, labels = mixed((1, 1, 1))
    two = one.roll(1, 1)
    novel = discriminability(torch.cat([one, two]), torch.arange(2).repeat_interleave(len(one)))
    base = discriminability(one, labels).base
    measured = DiscriminabilityResult(base, novel.base)
    # The second class is the first turned: a mixture with the same distances.
    assert geometry.novel_ratio(1 / 3, measured) == pytest.approx(
        float(novel.base.ratio), rel=1e-12
    )


def test_same_class_probability_counts_pairs_of_different_examples():
    assigned, labels = torch.arange(60).pow(2) % 5, torch.arange(60) % 4
    labels[0] = 17
    shares = []
    for c in range(4):
        group = assigned[labels == c]
        equal = (group[:, None] == group[None]).double()
        count = len(group)
        shares.append((equal.sum() - count) / (count * (count - 1)))
    found = geometry.same_class_probability(assigned, labels)
    assert found == pytest.approx(float(torch.stack(shares).mean()), rel=1e-12)


def test_same_class_probability_is_unbiased():
    share = torch.tensor([0.5, 0.3, 0.2])
    generator = torch.Generator().manual_seed(0)
    # 20000 novel classes of three examples each.
    assigned = torch.multinomial(share, 60000, replacement=True, generator=generator)
    found = geometry.same_class_probability(assigned, torch.arange(20000).repeat(3))
    assert found == pytest.approx(0.38, abs=0.01)


def measured(intra, inter, novel):
    """What the criterion reads, of which the ratios are no part."""
    values = [torch.tensor(v, dtype=torch.double) for v in (intra, inter, novel, math.nan)]
    intra, inter, novel, nan = values
    return DiscriminabilityResult(
        DiscriminabilityValues(intra, inter, nan), DiscriminabilityValues(nan, novel, nan)
    )


def test_criterion_12_holds_whatever_the_sign_of_its_divisor():
    draws = torch.rand(2000, 7, generator=torch.Generator().manual_seed(0)).double().tolist()
    signs = set()
    for probability, intra1, intra2, novel1, novel2, base1, base2 in draws:
        one, two = measured(intra1, base1, novel1), measured(intra2, base2, novel2)
        ratio1, ratio2 = (geometry.novel_ratio(probability, each) for each in (one, two))
        assert ratio1 == pytest.approx(
            novel1 / (probability * intra1 + (1 - probability) * base1), rel=1e-9
        )
        assert geometry.negative_margin_wins(probability, one, two) == (ratio2 < ratio1)
        psi1, psi2 = novel1 / base1, novel2 / base2
        signs.add(psi1 * (1 - intra2 / base2) > psi2 * (1 - intra1 / base1))
    assert signs == {True, False}


def test_collapsed_classes_give_what_is_infinite_or_not_a_number():
    # Base classes in one point each and novel ones apart: (11) is psi / (1 - P).
    assert geometry.novel_ratio(0.5, measured(0.0, 1.0, 0.8)) == pytest.approx(1.6)
    assert geometry.novel_ratio(1.0, measured(0.0, 1.0, 0.8)) == math.inf
    fallen = measured(0.0, 0.0, 0.0)
    assert math.isnan(geometry.novel_ratio(0.5, fallen))
    whole = measured(0.3, 1.0, 0.8)
    assert geometry.negative_margin_wins(0.5, whole, fallen) is False
    assert geometry.negative_margin_wins(0.5, fallen, whole) is False


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: geometry.novel_ratio(
                0.5, discriminability(torch.eye(3)[[0, 1, 2, 0]], torch.arange(4) % 2)
            ),
            "novel classes to be measured",
        ),
        (
            lambda: geometry.same_class_probability(torch.arange(3), torch.arange(3)),
            "a class with two examples, got none",
        ),
        (
            lambda: geometry.same_class_probability(torch.arange(3), torch.arange(2)),
            r"got \(3,\) and \(2,\)",
        ),
    ],
)
def test_measures_that_do_not_exist_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
