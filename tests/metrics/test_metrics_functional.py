"""Each measure against a plain float64 computation that shares no code with it."""

import math
import warnings

import numpy as np
import pytest
import scipy.linalg
import scipy.spatial.distance as distance
import scipy.special
import torch
from sklearn.metrics import accuracy_score, balanced_accuracy_score, recall_score
from sklearn.neighbors import NearestCentroid
from torch.testing import assert_close

import tammes
from tammes.metrics import functional as F
from tammes.metrics.functional import collapse

CLASSES, SIZE, EXAMPLES = 7, 5, 160
HALVES = [torch.float16, torch.bfloat16]


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.double, generator=generator)


@pytest.fixture
def labels():
    return torch.randint(CLASSES, (EXAMPLES,), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def features(labels):
    """Classes that overlap, of unequal sizes, off the origin."""
    return normal(CLASSES, SIZE, seed=2)[labels] * 2 + normal(EXAMPLES, SIZE) + 0.5


@pytest.fixture
def prototypes():
    return normal(CLASSES, SIZE, seed=3)


@pytest.fixture
def cosine(features, prototypes):
    return torch.nn.functional.normalize(features) @ torch.nn.functional.normalize(prototypes).T


def plain_margins(similarity, labels):
    rows = zip(similarity.double().numpy(), labels.tolist(), strict=True)
    return np.array([row[y] - np.delete(row, y).max() for row, y in rows])


def test_margins_are_the_own_similarity_less_the_best_other(cosine, labels):
    assert_close(F.margins(cosine, labels).numpy(), plain_margins(cosine, labels))


def test_margins_of_a_split_are_those_of_its_matrix(cosine, labels):
    split = tammes.split(cosine, labels, scale=30.0)
    assert_close(F.margins(split), F.margins(cosine, labels))


def test_margin_at_the_simplex_is_k_over_k_minus_1():
    points = tammes.geometry.simplex(CLASSES, CLASSES, dtype=torch.double)
    result = F.sample_margin(points @ points.T, torch.arange(CLASSES))
    assert_close(result.class_minimum, torch.full((CLASSES,), 7 / 6, dtype=torch.double))


def test_sample_margin_is_the_plain_mean_minimum_and_quantile(cosine, labels):
    levels = [0.0, 0.013, 0.5, 0.77, 1.0]
    result = F.sample_margin(cosine, labels, quantiles=levels)
    plain = plain_margins(cosine, labels)
    assert_close(float(result.mean), plain.mean())
    assert_close(float(result.minimum), plain.min())
    assert_close(result.quantiles.numpy(), np.quantile(plain, levels, method="inverted_cdf"))
    for c in range(CLASSES):
        own = plain[labels.numpy() == c]
        assert_close(float(result.class_mean[c]), own.mean())
        assert_close(float(result.class_minimum[c]), own.min())
        assert int(result.counts[c]) == len(own)


def test_a_quantile_at_a_whole_rank_is_not_pushed_to_the_next_by_rounding():
    # 0.07 * 100 is 7.000000000000001 in floating point.
    assert 0.07 * 100 > 7
    similarity = torch.stack([torch.arange(100.0), torch.zeros(100)], 1)
    with pytest.warns(UserWarning, match="1 of 2 classes"):
        result = F.sample_margin(similarity, torch.zeros(100).long(), quantiles=[0.07])
    assert float(result.quantiles) == 6


def test_hard_margin_loss_counts_what_is_below_gamma(cosine, labels):
    gamma = np.linspace(-0.2, 0.4, CLASSES)
    result = F.hard_margin_loss(cosine, labels, gamma=gamma.tolist())
    missed = plain_margins(cosine, labels) < gamma[labels.numpy()]
    shares = np.array([missed[labels.numpy() == c].mean() for c in range(CLASSES)])
    assert_close(result.class_mean.numpy(), shares)
    assert_close(float(result.balanced), shares.mean())
    assert_close(float(result.mean), missed.mean())


def test_hard_margin_loss_at_zero_is_the_error(cosine, labels):
    error = 1 - accuracy_score(labels, cosine.argmax(1))
    assert_close(float(F.hard_margin_loss(cosine, labels, gamma=0.0).mean), error)


def test_a_margin_that_equals_gamma_is_no_loss():
    similarity = torch.tensor([[0.75, 0.25]])
    with pytest.warns(UserWarning, match="1 of 2 classes have no example"):
        result = F.hard_margin_loss(similarity, torch.tensor([0]), gamma=0.5)
    assert float(result.mean) == 0


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_softmax_bias_is_the_log_sum_exp_of_the_others_above_their_maximum(cosine, labels, scale):
    result = F.softmax_bias(cosine, labels, scale=scale)
    others = [np.delete(r, y) for r, y in zip(scale * cosine.numpy(), labels.tolist(), strict=True)]
    plain = np.array([scipy.special.logsumexp(row - row.max()) for row in others])
    assert_close(float(result.mean), plain.mean())
    assert_close(float(result.minimum), plain.min())
    assert_close(float(result.maximum), plain.max())
    assert 0 <= result.minimum <= result.maximum <= result.bound == math.log(CLASSES - 1)


def test_softmax_bias_reaches_its_bounds():
    logits = torch.tensor([[0.0, 3.0, 3.0, 3.0], [0.0, 900.0, 0.0, 0.0]])
    result = F.softmax_bias(logits, torch.tensor([0, 0]))
    assert_close(result.maximum, result.bound)
    assert float(result.minimum) == 0


def test_softmax_bias_of_two_classes_is_zero(cosine, labels):
    result = F.softmax_bias(cosine[:, :2], labels % 2, scale=64.0)
    assert float(result.mean) == float(result.maximum) == float(result.bound) == 0


def test_angles_are_the_arc_cosines_in_degrees(cosine, labels):
    result = F.angles(cosine, labels, bins=36, margin=1.5)
    own = np.degrees(np.arccos(cosine.numpy()[np.arange(EXAMPLES), labels.numpy()]))
    rest = [np.delete(r, y).max() for r, y in zip(cosine.numpy(), labels.tolist(), strict=True)]
    hardest = np.degrees(np.arccos(rest))
    edges = np.linspace(0, 180, 37)
    assert_close(result.edges.numpy(), edges)
    assert result.own.tolist() == np.histogram(own, edges)[0].tolist()
    assert result.hardest.tolist() == np.histogram(hardest, edges)[0].tolist()
    assert_close(float(result.own_mean), own.mean())
    assert_close(float(result.hardest_mean), hardest.mean())
    share = (own > 180 - math.degrees(1.5)).mean()
    assert 0 < share < 1
    assert_close(float(result.beyond), share)


@pytest.mark.parametrize("normalize_features", [True, False])
def test_angles_read_the_split_of_a_cosine_head(features, labels, cosine, normalize_features):
    head = tammes.CosineHead(SIZE, CLASSES, normalize_features=normalize_features).double()
    split = head.split(features, labels)
    directions = torch.nn.functional.normalize(features) @ head.prototypes.detach().T
    assert_close(F.angles(split).own_mean, F.angles(directions, labels).own_mean)
    assert_close(F.angles(split).hardest_mean, F.angles(directions, labels).hardest_mean)


@pytest.mark.parametrize("head", [tammes.LinearHead, tammes.GaussianHead])
def test_angles_refuse_a_similarity_that_is_no_cosine(head, features, labels):
    split = head(SIZE, CLASSES).double().split(features, labels)
    with pytest.raises(ValueError, match="angles expects cosines or the split of a cosine head"):
        F.angles(split)


def test_angles_keep_their_digits_where_the_cosine_has_none():
    # At 1e-4 radians a cosine in float32 is 1.
    split = tammes.split(torch.tensor([[1.0, 0.0]]), torch.tensor([0]))
    split = split._replace(gap=torch.tensor([0.5e-8]))
    assert_close(float(F.angles(split).own_mean), math.degrees(1e-4), rtol=1e-6, atol=0)


def test_prototype_norms_are_numpys(prototypes):
    result = F.prototype_norms(prototypes)
    norms = np.linalg.norm(prototypes.numpy(), axis=1)
    assert_close(float(result.ratio), norms.max() / norms.min())
    assert_close(float(result.mean), norms.mean())


@pytest.mark.parametrize(
    ("rows", "ratio"), [([[0.0, 0.0], [1.0, 0.0]], math.inf), ([[0.0, 0.0]] * 2, 1.0)]
)
def test_prototype_norms_of_zero_prototypes_are_defined(rows, ratio):
    assert float(F.prototype_norms(torch.tensor(rows)).ratio) == ratio


def plain_distances(features, labels, *, distinct, weighting):
    """Mean over pairs of examples, by making them all."""
    features = features / np.linalg.norm(features, axis=1, keepdims=True)
    squares = distance.cdist(features, features, "sqeuclidean") / 2
    same = labels[:, None] == labels[None]
    allowed = ~np.eye(len(labels), dtype=bool) if distinct else np.ones_like(same)
    if weighting == "pair":
        return squares[same & allowed].mean(), squares[~same].mean()
    present = np.unique(labels)
    blocks = {(a, b): np.ix_(labels == a, labels == b) for a in present for b in present}
    intra = [
        squares[blocks[a, a]][allowed[blocks[a, a]]].mean()
        for a in present
        if allowed[blocks[a, a]].any()
    ]
    inter = [squares[blocks[a, b]].mean() for a in present for b in present if a != b]
    return np.mean(intra), np.mean(inter)


@pytest.mark.parametrize("weighting", ["class", "pair"])
@pytest.mark.parametrize("distinct", [False, True])
def test_discriminability_is_the_mean_over_all_pairs(features, labels, distinct, weighting):
    labels[0] = CLASSES  # a class of one example
    result = F.discriminability(
        features, labels, novel=[1, 4], distinct=distinct, weighting=weighting
    )
    novel = np.isin(labels.numpy(), [1, 4])
    for values, rows in [(result.base, ~novel), (result.novel, novel)]:
        intra, inter = plain_distances(
            features.numpy()[rows], labels.numpy()[rows], distinct=distinct, weighting=weighting
        )
        assert_close(float(values.intra), intra)
        assert_close(float(values.inter), inter)
        assert_close(float(values.ratio), inter / intra)


def test_discriminability_of_a_mixture_of_base_classes_obeys_equation_10(features, labels):
    # A novel class drawn from r base classes alike: P = 1/r.
    base = F.discriminability(features, labels).base
    pieces = torch.nn.functional.normalize(features)
    mixture = torch.stack([pieces[labels == c].mean(0) for c in range(CLASSES)]).mean(0)
    intra_of_mixture = 1 - mixture.square().sum()
    expected = base.intra / CLASSES + (1 - 1 / CLASSES) * base.inter
    assert_close(intra_of_mixture, expected)


def test_discriminability_without_normalising_has_the_raw_distances(features, labels):
    result = F.discriminability(features, labels, normalize=False).base
    variance = [features[labels == c].numpy().var(0).sum() for c in range(CLASSES)]
    assert_close(float(result.intra), np.mean(variance))


def plain_collapse(features, labels, prototypes):
    means = np.stack([features[labels == c].mean(0) for c in range(CLASSES)])
    centre = features.mean(0)
    residual = features - means[labels]
    within = residual.T @ residual / len(features)
    centred = means - centre
    between = centred.T @ centred / CLASSES
    nc1 = np.trace(within @ scipy.linalg.pinvh(between)) / CLASSES
    scaled = [m / np.linalg.norm(m) for m in (prototypes, centred)]
    nc3 = np.linalg.norm(scaled[0] - scaled[1]) ** 2
    return nc1, plain_simplex(centred), plain_simplex(prototypes), nc3


def plain_simplex(vectors):
    norms = np.linalg.norm(vectors, axis=1)
    cosines = 1 - distance.pdist(vectors, "cosine")
    return (
        norms.std() / norms.mean(),
        cosines.std(),
        np.abs(cosines + 1 / (len(vectors) - 1)).mean(),
    )


def test_neural_collapse_is_the_plain_computation(features, labels, prototypes):
    result = F.neural_collapse(features, labels, prototypes=prototypes)
    nc1, nc2, nc2_prototypes, nc3 = plain_collapse(
        features.numpy(), labels.numpy(), prototypes.numpy()
    )
    assert_close(float(result.nc1), nc1)
    assert_close(torch.stack(result.nc2).numpy(), np.array(nc2))
    assert_close(torch.stack(result.nc2_prototypes).numpy(), np.array(nc2_prototypes))
    assert_close(float(result.nc3), nc3)
    assert result.nc4 is None


def test_neural_collapse_works_with_more_dimensions_than_classes(labels):
    # The between-class covariance has rank C - 1 of 40: only its pseudo-inverse exists.
    features = normal(CLASSES, 40, seed=5)[labels] + 0.1 * normal(EXAMPLES, 40, seed=6)
    nc1 = plain_collapse(features.numpy(), labels.numpy(), normal(CLASSES, 40).numpy())[0]
    assert_close(float(F.neural_collapse(features, labels).nc1), nc1, rtol=1e-6, atol=0)


def test_nc4_is_the_disagreement_with_scikit_learns_nearest_centroid(features, labels, cosine):
    predictions = cosine.argmax(1)
    nearest = NearestCentroid().fit(features, labels).predict(features)
    result = F.neural_collapse(features, labels, predictions=predictions)
    disagreement = (nearest != predictions.numpy()).mean()
    assert 0 < disagreement < 1
    assert_close(float(result.nc4), disagreement)


def test_nc4_compares_with_the_means_it_is_given(features, labels):
    means = normal(CLASSES, SIZE, seed=9)
    nearest = distance.cdist(features, means).argmin(1)
    predictions = torch.from_numpy(nearest)
    assert float(F.neural_collapse(features, labels, predictions=predictions, means=means).nc4) == 0


def test_nearest_mean_never_answers_a_class_without_a_mean():
    means = torch.tensor([[math.nan, math.nan], [9.0, 9.0], [-9.0, 9.0]])
    assert F.nearest_mean(torch.zeros(3, 2), means).tolist() == [1, 1, 1]


def test_pairs_taken_a_block_at_a_time_are_all_pairs(monkeypatch, features, prototypes):
    deviation, nearest = F.simplex_deviation(prototypes), F.nearest_mean(features, prototypes)
    # Two rows of the seven at once, so that the last block is short.
    monkeypatch.setattr(collapse, "_BLOCK", 2 * CLASSES)
    assert_close(F.simplex_deviation(prototypes), deviation)
    assert torch.equal(F.nearest_mean(features, prototypes), nearest)


def test_full_collapse_measures_zero_everywhere():
    points = tammes.geometry.simplex(CLASSES, SIZE + 4, dtype=torch.double)
    labels = torch.arange(CLASSES).repeat(3)
    result = F.neural_collapse(
        5 * points[labels] + 1, labels, prototypes=points, predictions=labels
    )
    values = F.scalars(result)
    assert len(values) == 9
    assert max(values.values()) < 1e-7


def test_neural_collapse_keeps_small_variability_far_from_the_origin(labels):
    # 1e-5 about means of size 1, at a distance of 30: what collapse looks like, and what the
    # difference of second moments would get wrong in the third digit.
    features = normal(CLASSES, SIZE, seed=5)[labels] + 1e-5 * normal(EXAMPLES, SIZE, seed=6) + 30
    nc1 = plain_collapse(features.numpy(), labels.numpy(), normal(CLASSES, SIZE).numpy())[0]
    assert_close(float(F.neural_collapse(features, labels).nc1), nc1, rtol=1e-8, atol=0)


def test_group_accuracy_is_scikit_learns_recall_by_group(cosine, labels):
    counts = [500, 101, 100, 50, 20, 19, 1]
    result = F.group_accuracy(cosine, labels, training_counts=counts)
    answers = cosine.argmax(1)
    recall = recall_score(labels, answers, average=None)
    assert_close(result.class_accuracy.numpy(), recall)
    assert_close(float(result.many), recall[:2].mean())
    assert_close(float(result.medium), recall[2:5].mean())
    assert_close(float(result.few), recall[5:].mean())
    assert_close(float(result.overall), accuracy_score(labels, answers))
    assert_close(float(result.balanced), balanced_accuracy_score(labels, answers))


def test_a_tie_is_a_wrong_answer():
    logits = torch.tensor([[1.0, 1.0], [0.0, 1.0]])
    counts = [200, 200]
    with pytest.warns(UserWarning, match="no example of the classes with medium, few"):
        result = F.group_accuracy(logits, torch.tensor([0, 1]), training_counts=counts)
    assert result.class_accuracy.tolist() == [0, 1]
    assert not F.confidence(logits, torch.tensor([0, 1])).right[0]


def test_confidence_is_the_largest_softmax_probability(cosine, labels):
    probability, right = F.confidence(cosine, labels, scale=10.0)
    softmax = scipy.special.softmax(10 * cosine.numpy(), axis=1)
    assert_close(probability.numpy(), softmax.max(1))
    assert right.tolist() == (softmax.argmax(1) == labels.numpy()).tolist()


@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_similarities_lose_nothing_more(cosine, labels, dtype):
    half = cosine.to(dtype)
    measures = [
        F.sample_margin,
        F.angles,
        lambda *a: F.softmax_bias(*a, scale=8.0),
        lambda *a: F.hard_margin_loss(*a, gamma=0.123),
        lambda *a: F.group_accuracy(*a, training_counts=[500, 200, 50, 30, 20, 19, 1]),
    ]
    for measure in measures:
        found, exact = F.scalars(measure(half, labels)), F.scalars(measure(half.double(), labels))
        assert found == pytest.approx(exact, rel=2e-6, abs=2e-6)


@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_features_and_prototypes_lose_nothing(features, labels, prototypes, dtype):
    features, prototypes = features.to(dtype), prototypes.to(dtype)
    measures = [
        lambda x, w: F.discriminability(x, labels),
        lambda x, w: F.neural_collapse(x, labels, prototypes=w),
        lambda x, w: F.prototype_norms(w),
        lambda x, w: F.class_margin(w),
    ]
    for measure in measures:
        found = F.scalars(measure(features, prototypes))
        exact = F.scalars(measure(features.double(), prototypes.double()))
        assert found == pytest.approx(exact, rel=1e-12, abs=1e-12)


def test_autocast_does_not_reach_into_the_measures(features, labels, prototypes):
    plain = F.neural_collapse(features, labels, prototypes=prototypes), F.class_margin(prototypes)
    with torch.autocast("cpu", torch.bfloat16):
        inside = (
            F.neural_collapse(features.float(), labels, prototypes=prototypes.float()),
            F.class_margin(prototypes.float()),
        )
    for found, exact in zip(inside, plain, strict=True):
        assert F.scalars(found) == pytest.approx(F.scalars(exact), rel=1e-5, abs=1e-6)


def measures_of_examples():
    return {
        "sample_margin": F.sample_margin,
        "hard_margin_loss": lambda *a: F.hard_margin_loss(*a, gamma=0.1),
        "group_accuracy": lambda *a: F.group_accuracy(
            *a, training_counts=[500, 50, 30, 5, 1, 1, 1]
        ),
    }


@pytest.mark.parametrize("name", measures_of_examples())
def test_an_absent_class_is_nan_with_a_warning_and_changes_nothing_else(cosine, labels, name):
    measure = measures_of_examples()[name]
    keep = labels != 2
    with pytest.warns(UserWarning, match="1 of 7 classes have no example; their entries are NaN"):
        result = measure(cosine[keep], labels[keep])
    assert not any(math.isnan(value) for value in F.scalars(result).values())
    for field, full in measure(cosine, labels)._asdict().items():
        if full.shape == (CLASSES,) and field.startswith("class_"):
            found = getattr(result, field)
            assert found.isnan().tolist() == [c == 2 for c in range(CLASSES)]
            assert_close(found[[0, 1, 3, 4, 5, 6]], full[[0, 1, 3, 4, 5, 6]])


def test_a_class_of_one_example_is_that_example():
    similarity = torch.tensor([[0.9, 0.1], [0.6, 0.2], [0.5, 0.8]])
    result = F.sample_margin(similarity, torch.tensor([0, 0, 1]))
    assert_close(result.class_mean, torch.tensor([0.6, 0.3], dtype=torch.double))
    assert_close(result.class_minimum, torch.tensor([0.4, 0.3], dtype=torch.double))


@pytest.mark.parametrize(
    "measure",
    [
        F.sample_margin,
        F.softmax_bias,
        F.angles,
        lambda *a: F.hard_margin_loss(*a, gamma=0.0),
        lambda *a: F.group_accuracy(*a, training_counts=[200, 50, 3]),
    ],
)
def test_no_example_at_all_is_nan_with_a_warning(measure):
    with pytest.warns(UserWarning, match="no example"):
        result = measure(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long))
    values = F.scalars(result)
    values.pop("bound", None)
    assert all(math.isnan(value) for value in values.values())


def test_neural_collapse_leaves_absent_classes_out_with_a_warning(features, labels, prototypes):
    kept = labels < CLASSES - 1
    plain = F.neural_collapse(features[kept], labels[kept], prototypes=prototypes[:-1])
    with pytest.warns(UserWarning, match="1 of 7 classes have no example: excluded"):
        found = F.neural_collapse(features[kept], labels[kept], prototypes=prototypes)
    assert F.scalars(found) == pytest.approx(F.scalars(plain))


def test_neural_collapse_of_one_example_a_class_has_no_variability(prototypes):
    result = F.neural_collapse(normal(CLASSES, SIZE), torch.arange(CLASSES))
    assert float(result.nc1) < 1e-12


def test_neural_collapse_of_one_class_is_nan_with_a_warning(features, prototypes):
    one = torch.zeros(EXAMPLES, dtype=torch.long)
    with pytest.warns(UserWarning, match="1 classes have examples, 2 are needed"):
        result = F.neural_collapse(features, one, prototypes=prototypes)
    assert all(math.isnan(value) for value in F.scalars(result).values())


def test_discriminability_of_one_class_has_no_inter_with_a_warning(features):
    with pytest.warns(UserWarning, match="undefined"):
        result = F.discriminability(features, torch.zeros(EXAMPLES, dtype=torch.long)).base
    assert [math.isnan(float(value)) for value in result] == [False, True, True]


def test_discriminability_of_single_examples_has_no_distinct_pairs(features):
    with pytest.warns(UserWarning, match="of which 0 have two or more"):
        result = F.discriminability(features, torch.arange(EXAMPLES), distinct=True).base
    assert [math.isnan(float(value)) for value in result] == [True, False, True]


def test_discriminability_of_points_is_infinite():
    points = torch.eye(3).repeat(2, 1)
    assert float(F.discriminability(points, torch.arange(3).repeat(2)).base.ratio) == math.inf


@pytest.mark.parametrize("weighting", ["class", "pair"])
@pytest.mark.parametrize("distinct", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
def test_discriminability_of_points_anywhere_is_infinite(normalize, distinct, weighting):
    options = {"normalize": normalize, "distinct": distinct, "weighting": weighting}
    labels = torch.arange(CLASSES).repeat(331)
    for seed in range(5):
        points = normal(CLASSES, SIZE, seed=seed)
        for dtype in (torch.double, torch.float):
            base = F.discriminability(points[labels].to(dtype), labels, **options).base
            assert base.intra == 0
            assert base.ratio == math.inf
        # A width that float64 can tell is measured.
        wide = points[labels] + 1e-5 * normal(len(labels), SIZE, seed=seed)
        values = F.discriminability(wide, labels, **options).base
        plain = torch.nn.functional.normalize(wide) if normalize else wide
        means = torch.stack([plain[labels == c].mean(0) for c in range(CLASSES)])
        expected = (plain - means[labels]).square().sum(1).mean()
        assert_close(values.intra, expected * (331 / 330 if distinct else 1), rtol=1e-3, atol=0)
    with pytest.warns(UserWarning, match="undefined"):
        one = F.discriminability(points[:1].expand(len(labels), SIZE), labels, **options).base
    assert one.ratio.isnan()


def test_examples_labelled_minus_100_count_for_nothing(cosine, features, labels):
    ignored = labels.clone()
    ignored[::3] = -100
    kept = ignored >= 0
    for measure in (F.sample_margin, F.angles, F.softmax_bias):
        found, plain = measure(cosine, ignored), measure(cosine[kept], labels[kept])
        assert F.scalars(found) == F.scalars(plain)
    for measure in (F.discriminability, F.neural_collapse):
        found, plain = measure(features, ignored), measure(features[kept], labels[kept])
        assert F.scalars(found) == pytest.approx(F.scalars(plain), rel=1e-12)


def test_a_class_masked_with_minus_infinity_is_not_there(cosine, labels):
    kept = labels != 4
    masked = cosine[kept].clone()
    masked[:, 4] = -math.inf
    without = cosine[kept][:, [0, 1, 2, 3, 5, 6]]
    shifted = labels[kept] - (labels[kept] > 4).long()
    assert_close(F.margins(masked, labels[kept]), F.margins(without, shifted))
    found = F.softmax_bias(masked, labels[kept], scale=9.0)
    assert_close(found.mean, F.softmax_bias(without, shifted, scale=9.0).mean)
    assert found.maximum <= found.bound


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: F.margins(torch.zeros(2, 3)), ValueError, "labels with similarity, got none"),
        (
            lambda: F.margins(torch.zeros(2, 3), torch.tensor([0, 3])),
            ValueError,
            r"labels from 0 to 2 or -100, got 0 to 3",
        ),
        (
            lambda: F.margins(torch.zeros(2, 3), torch.tensor([0.0, 1.0])),
            TypeError,
            "labels of an integer type, got torch.float32",
        ),
        (
            lambda: F.margins(torch.zeros(2, 1), torch.tensor([0, 0])),
            ValueError,
            r"similarity of shape \(N, C\) with 2 classes or more, got \(2, 1\)",
        ),
        (
            lambda: F.margins([1.0], torch.tensor([0])),
            TypeError,
            "a Split or similarity to be a tensor, got list",
        ),
        (
            lambda: F.margins(torch.full((1, 2), math.nan), torch.tensor([0])),
            ValueError,
            "got NaN or infinity in the split's 'target'",
        ),
        (
            lambda: F.sample_margin(torch.zeros(1, 2), torch.tensor([0]), quantiles=[1.5]),
            ValueError,
            r"quantiles between 0 and 1, got \[1.5\]",
        ),
        (
            lambda: F.hard_margin_loss(torch.zeros(1, 2), torch.tensor([0]), gamma=[0.1] * 3),
            ValueError,
            "gamma to be a number or 2 numbers",
        ),
        (lambda: F.class_margin(torch.zeros(1, 3)), ValueError, "2 prototypes or more, got 1"),
        (
            lambda: F.class_margin(torch.zeros(3)),
            ValueError,
            r"shape \(C, D\) or \(C, K, D\), got \(3,\)",
        ),
        (
            lambda: F.class_margin(torch.tensor([[1.0, 0.0], [math.nan, 1.0], [0.0, 1.0]])),
            ValueError,
            "finite prototypes, got NaN",
        ),
        (
            lambda: F.discriminability(torch.zeros(2, 2), torch.tensor([0, 1]), novel=[5]),
            ValueError,
            "novel classes from 0 to 1, got 5 to 5",
        ),
        (
            lambda: F.discriminability(torch.eye(2), torch.tensor([0, 1]), weighting="all"),
            ValueError,
            "weighting 'class' or 'pair', got 'all'",
        ),
        (
            lambda: F.neural_collapse(torch.full((2, 2), math.inf), torch.tensor([0, 1])),
            ValueError,
            "finite features",
        ),
        (
            lambda: F.neural_collapse(torch.eye(2), torch.tensor([0, 1]), prototypes=torch.eye(3)),
            ValueError,
            r"prototypes of shape \(3, 2\), got \(3, 3\)",
        ),
        (
            lambda: F.group_accuracy(torch.eye(2), torch.tensor([0, 1]), training_counts=[1, 2, 3]),
            ValueError,
            "expects 3 classes, got 2",
        ),
        (
            lambda: F.discriminability(torch.zeros(4), torch.zeros(4, dtype=torch.long)),
            ValueError,
            r"features of shape \(N, D\), got \(4,\)",
        ),
        (
            lambda: F.discriminability(torch.eye(2).long(), torch.tensor([0, 1])),
            TypeError,
            "features of a floating type, got torch.int64",
        ),
        (
            lambda: F.angles(torch.eye(2), torch.tensor([0, 1]), bins=0),
            ValueError,
            "bins of 1 or more, got 0",
        ),
    ],
)
def test_bad_input_is_refused_in_one_sentence(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_split_without_the_field_is_refused(cosine, labels):
    split = tammes.split(cosine, labels, reads=("target", "others"))
    with pytest.raises(ValueError, match="'hardest'; a field that was not requested"):
        F.margins(split)


def test_measures_leave_their_input_alone(cosine, features, labels, prototypes):
    tensors = (cosine, features, labels, prototypes)
    before = [tensor.clone() for tensor in tensors]
    F.sample_margin(cosine, labels)
    F.angles(cosine, labels)
    F.discriminability(features, labels)
    F.neural_collapse(features, labels, prototypes=prototypes)
    F.class_margin(prototypes)
    for old, new in zip(before, tensors, strict=True):
        assert torch.equal(old, new)


def test_measures_build_no_graph(cosine, labels):
    cosine.requires_grad_()
    assert not F.sample_margin(cosine, labels).mean.requires_grad
    assert not F.angles(cosine, labels).own_mean.requires_grad


def test_full_data_gives_no_warning(cosine, labels):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        F.sample_margin(cosine, labels)
