"""Why a margin helps: what is measured, what (12) says of two models, and what is so."""

import math

import pytest
import torch
from made_features import made

from tammes import geometry
from tammes.lab.fewshot import margin_analysis
from tammes.metrics.functional import discriminability


def pair(seed, spread):
    """Base and novel features of a made-up model."""
    base = made(classes=10, each=20, spread=spread, seed=seed)
    novel = made(classes=6, each=20, spread=1.3 * spread, seed=seed + 1)
    return base, novel


def test_the_analysis_is_made_of_the_measures_of_the_library():
    base, novel = pair(0, 1.0)
    found = margin_analysis.analyse(base, novel)
    on_base = discriminability(*base, distinct=True).base
    on_novel = discriminability(*novel, distinct=True).base
    assert found.base_ratio == pytest.approx(float(on_base.inter / on_base.intra))
    assert found.novel_ratio == pytest.approx(float(on_novel.inter / on_novel.intra))
    assert found.psi == pytest.approx(found.novel_inter / found.base_inter)
    excess = 1 - found.base_intra / found.base_inter
    expected = found.psi / (1 - found.same_base_class * excess)
    assert found.predicted_ratio == pytest.approx(expected)
    assert 0 < found.same_base_class < 1


def test_images_are_taken_for_the_class_the_head_says_or_the_nearest_mean():
    base, novel = pair(0, 1.0)
    nearest = margin_analysis.nearest_base(*base, novel[0])
    unit = torch.nn.functional.normalize(base[0], dim=1)
    means = torch.stack([unit[base[1] == c].mean(0) for c in range(10)])
    cosines = torch.nn.functional.cosine_similarity(novel[0][:, None], means[None], dim=2)
    assert nearest.equal(cosines.argmax(1))
    everywhere = torch.zeros(len(novel[1]), dtype=torch.long)
    assert margin_analysis.analyse(base, novel, everywhere).same_base_class == 1
    expected = geometry.same_class_probability(nearest, novel[1])
    assert margin_analysis.analyse(base, novel).same_base_class == pytest.approx(float(expected))


def test_the_verdict_is_the_inequality_against_what_is_so():
    outcomes = set()
    for seed in range(0, 60, 2):
        first = margin_analysis.analyse(*pair(seed, 1.0))
        second = margin_analysis.analyse(*pair(seed + 100, 1.1))
        found = margin_analysis.check_inequality(first, second)
        assert found.predicted == (found.left < found.right)
        assert found.so == (first.novel_ratio > second.novel_ratio)
        assert found.agrees == (found.predicted == found.so)
        assert ("is right" in found.sentence) == found.agrees
        outcomes.add(found.predicted)
        # With one P for both, (12) is (11) for each of the two.
        mean = (first.same_base_class + second.same_base_class) / 2
        ratios = [geometry.novel_ratio(mean, each.result()) for each in (first, second)]
        assert found.predicted == (ratios[1] < ratios[0])
    assert outcomes == {True, False}


def test_inequality_is_right_for_novel_mixtures_of_base_classes():
    outcomes = set()
    for seed in range(12):
        models = []
        for spread in (0.6 + 0.1 * (seed % 8), 1.0):
            features, labels = made(classes=6, each=40, spread=spread, seed=seed)
            # Every novel class is all base classes together, turned: distances stay as they are.
            turned = torch.cat([features.roll(3 * k, 1) for k in range(3)])
            novel = turned, torch.arange(3).repeat_interleave(len(labels))
            models.append(margin_analysis.analyse((features, labels), novel, labels.repeat(3)))
        for model in models:
            assert model.same_base_class == pytest.approx(39 / 239)
            assert model.predicted_ratio == pytest.approx(model.novel_ratio, rel=1e-9)
        verdict = margin_analysis.check_inequality(*models)
        assert verdict.agrees
        outcomes.add(verdict.so)
    assert outcomes == {True, False}


def distances(psi, excess, share):
    """A model by what (12) is made of; distances between base classes are 2."""
    return margin_analysis.MarginAnalysis(
        base_intra=2 * (1 - excess),
        base_inter=2.0,
        novel_intra=1.0,
        novel_inter=2 * psi,
        same_base_class=share,
    )


def test_the_sides_of_the_inequality_are_those_by_hand():
    # Delta = 0.75 * 0.8 - 0.5 * 0.2 = 0.5 and t = 0.25: what is predicted changes at P = 0.5.
    found = margin_analysis.check_inequality(distances(0.75, 0.2, 0.1), distances(0.5, 0.8, 0.7))
    assert found.left == pytest.approx(0.4 * 0.5)
    assert found.right == pytest.approx(0.25)
    assert found.predicted
    assert found.predicted_by_each == (True, False)
    assert "the P^s of the two models give opposite predictions" in found.sentence
    found = margin_analysis.check_inequality(distances(0.75, 0.2, 0.9), distances(0.5, 0.8, 0.2))
    assert found.left == pytest.approx(0.55 * 0.5)
    assert not found.predicted
    assert found.predicted_by_each == (False, True)


def test_nothing_is_said_where_novel_classes_alone_have_collapsed():
    model = distances(0.75, 0.2, 0.1)
    fallen = margin_analysis.MarginAnalysis(
        base_intra=1.0, base_inter=2.0, novel_intra=0.0, novel_inter=0.0, same_base_class=1.0
    )
    with pytest.raises(ValueError, match=r"^\(12\) expects .* of 1.5 and nan, psi of 0.75 and 0$"):
        margin_analysis.check_inequality(model, fallen)


LABELS = torch.arange(4).repeat(6)
COLLAPSED = {
    "one point": torch.eye(8)[torch.zeros_like(LABELS)],
    "nothing": torch.zeros(24, 8),
    "a point for each class": torch.eye(8)[LABELS],
}


@pytest.mark.filterwarnings("ignore:discriminability")
@pytest.mark.parametrize("name", COLLAPSED)
def test_a_collapsed_model_is_measured_all_the_same(name):
    model = COLLAPSED[name], LABELS
    found = margin_analysis.analyse(model, model)
    assert found.base_intra == found.novel_intra == 0
    if name == "a point for each class":
        assert found.base_inter == found.novel_inter == found.psi == found.same_base_class == 1
        assert found.base_ratio == found.novel_ratio == found.predicted_ratio == math.inf
        assert not margin_analysis.check_inequality(found, found).predicted
    else:
        ratios = (found.base_ratio, found.novel_ratio, found.psi, found.predicted_ratio)
        assert found.base_inter == found.novel_inter == 0
        assert all(map(math.isnan, ratios))
        with pytest.raises(ValueError, match=r"\(12\) expects two models whose classes are apart"):
            margin_analysis.check_inequality(margin_analysis.analyse(*pair(0, 1.0)), found)


@pytest.mark.parametrize(
    ("base", "novel", "message"),
    [
        ((24, 8), (24, 7), "analyse expects base and novel features of one size, got 8 and 7"),
        ((0, 8), (24, 8), r"analyse expects base features of shape \(N, D\), .* got \(0, 8\)"),
        ((24, 8), (24,), r"analyse expects novel features of shape \(N, D\), .* got \(24,\)"),
    ],
)
def test_base_and_novel_features_that_cannot_be_analysed_are_refused(base, novel, message):
    models = [(torch.ones(shape), LABELS[: shape[0]]) for shape in (base, novel)]
    with pytest.raises(ValueError, match=f"^{message}$"):
        margin_analysis.analyse(*models)
