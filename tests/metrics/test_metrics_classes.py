"""The streaming classes: any cut into batches gives what the function gives for all at once."""

import copy
import math
import pickle

import pytest
import torch
import torchmetrics
from torch.testing import assert_close

import tammes
from tammes import metrics
from tammes.metrics import functional as F

CLASSES, SIZE, EXAMPLES = 6, 4, 90
COUNTS = [500, 150, 60, 30, 10, 2]


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.double, generator=generator)


LABELS = torch.randint(CLASSES, (EXAMPLES,), generator=torch.Generator().manual_seed(1))
PROTOTYPES = normal(CLASSES, SIZE, seed=3)
FEATURES = 1.5 * PROTOTYPES[LABELS] + normal(EXAMPLES, SIZE)
MEANS = normal(CLASSES, SIZE, seed=4)
COSINE = torch.nn.functional.normalize(FEATURES) @ torch.nn.functional.normalize(PROTOTYPES).T
PREDICTIONS = COSINE.argmax(1)

# A metric, the function it must agree with, and how either is given some of the examples.
STREAMING = {
    "SampleMargin": (
        lambda: metrics.SampleMargin(CLASSES),
        F.sample_margin,
        lambda rows: ((COSINE[rows], LABELS[rows]), {}),
    ),
    "HardMarginLoss": (
        lambda: metrics.HardMarginLoss(0.2, CLASSES),
        lambda *a: F.hard_margin_loss(*a, gamma=0.2),
        lambda rows: ((COSINE[rows], LABELS[rows]), {}),
    ),
    "SoftmaxBias": (
        lambda: metrics.SoftmaxBias(CLASSES, scale=16.0),
        lambda *a: F.softmax_bias(*a, scale=16.0),
        lambda rows: ((COSINE[rows], LABELS[rows]), {}),
    ),
    "Angles": (
        lambda: metrics.Angles(bins=18, margin=1.0),
        lambda *a: F.angles(*a, bins=18, margin=1.0),
        lambda rows: ((COSINE[rows], LABELS[rows]), {}),
    ),
    "GroupAccuracy": (
        lambda: metrics.GroupAccuracy(COUNTS),
        lambda *a: F.group_accuracy(*a, training_counts=COUNTS),
        lambda rows: ((COSINE[rows], LABELS[rows]), {}),
    ),
    "Discriminability": (
        lambda: metrics.Discriminability(CLASSES, SIZE, novel=[1, 2, 5], distinct=True),
        lambda *a: F.discriminability(*a, novel=[1, 2, 5], distinct=True, classes=CLASSES),
        lambda rows: ((FEATURES[rows], LABELS[rows]), {}),
    ),
    "NeuralCollapse": (
        lambda: metrics.NeuralCollapse(CLASSES, SIZE, means=MEANS),
        lambda *a, **kw: F.neural_collapse(*a, **kw, means=MEANS),
        lambda rows: (
            (FEATURES[rows], LABELS[rows]),
            {"prototypes": PROTOTYPES, "predictions": PREDICTIONS[rows]},
        ),
    ),
}


def at_once(build):
    """The metric of one update."""

    def function(*args, **kwargs):
        metric = build()
        metric.update(*args, **kwargs)
        return metric.compute()

    return function


# The functions of these have exact scores or a gallery; tests of their own compare the two.
for recognition, inputs in {
    metrics.Verification: lambda rows: ((COSINE[rows, 0], LABELS[rows] == 0), {}),
    metrics.OpenSet: lambda rows: (
        (COSINE[rows, 1], LABELS[rows] < 3),
        {"correct": LABELS[rows] < 2},
    ),
    metrics.Retrieval: lambda rows: ((FEATURES[rows], LABELS[rows]), {}),
}.items():
    STREAMING[recognition.__name__] = recognition, at_once(recognition), inputs
ALL = slice(None)


def same(found, expected, path=""):
    """Compare results field by field; quantiles of a histogram may be off by its bin."""
    assert type(found) is type(expected), path
    if isinstance(expected, tuple) and not hasattr(expected, "_fields"):
        for place, (one, other) in enumerate(zip(found, expected, strict=True)):
            same(one, other, f"{path}[{place}]")
    elif isinstance(expected, tuple):
        for field in expected._fields:
            same(getattr(found, field), getattr(expected, field), f"{path}.{field}")
    elif isinstance(expected, torch.Tensor):
        within = 4 / 4096 if path.endswith(".quantiles") else 1e-10
        assert_close(found, expected, rtol=1e-10, atol=within, equal_nan=True, msg=path)
    else:
        assert found == expected, path


@pytest.mark.parametrize("sizes", [[90], [1] * 90, [40, 0, 17, 33]])
@pytest.mark.parametrize("name", STREAMING)
def test_batches_add_up_to_the_whole(name, sizes):
    build, function, given = STREAMING[name]
    metric = build()
    start = 0
    for size in sizes:
        args, kwargs = given(slice(start, start + size))
        metric.update(*args, **kwargs)
        start += size
    args, kwargs = given(ALL)
    same(metric.compute(), function(*args, **kwargs))


@pytest.mark.parametrize("name", STREAMING)
def test_reset_forgets(name):
    build, function, given = STREAMING[name]
    metric = build()
    args, kwargs = given(slice(0, 50))
    metric.update(*args, **kwargs)
    metric.compute()
    metric.reset()
    args, kwargs = given(slice(10, None))
    metric.update(*args, **kwargs)
    same(metric.compute(), function(*args, **kwargs))


@pytest.mark.parametrize("name", STREAMING)
def test_calling_it_gives_the_batch_and_keeps_the_whole(name):
    build, function, given = STREAMING[name]
    metric = build()
    for rows in (slice(0, 50), slice(50, None)):
        args, kwargs = given(rows)
        same(metric(*args, **kwargs), function(*args, **kwargs))
    args, kwargs = given(ALL)
    same(metric.compute(), function(*args, **kwargs))


@pytest.mark.parametrize("name", STREAMING)
def test_copies_go_their_own_way(name):
    build, function, given = STREAMING[name]
    metric = build()
    args, kwargs = given(slice(0, 50))
    metric.update(*args, **kwargs)
    twins = [pickle.loads(pickle.dumps(metric)), copy.deepcopy(metric)]
    for twin in twins:
        args, kwargs = given(slice(50, None))
        twin.update(*args, **kwargs)
        args, kwargs = given(ALL)
        same(twin.compute(), function(*args, **kwargs))
    args, kwargs = given(slice(0, 50))
    same(metric.compute(), function(*args, **kwargs))


@pytest.mark.parametrize("name", STREAMING)
def test_a_cast_of_the_model_does_not_round_the_sums(name):
    build, function, given = STREAMING[name]
    metric = build().to(torch.bfloat16)
    for rows in (slice(0, 50), slice(50, None)):
        args, kwargs = given(rows)
        metric.update(*args, **kwargs)
    args, kwargs = given(ALL)
    same(metric.compute(), function(*args, **kwargs))


@pytest.mark.parametrize("name", STREAMING)
def test_inference_mode_and_training_can_take_turns(name):
    build, function, given = STREAMING[name]
    metric = build()
    with torch.inference_mode():
        args, kwargs = given(slice(0, 50))
        metric.update(*args, **kwargs)
        metric.reset()
        metric.update(*args, **kwargs)
    args, kwargs = given(slice(50, None))
    metric.update(*args, **kwargs)
    args, kwargs = given(ALL)
    same(metric.compute(), function(*args, **kwargs))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", STREAMING)
def test_half_precision_input_gives_what_the_function_gives(name, dtype):
    build, function, given = STREAMING[name]
    (values, labels), kwargs = given(ALL)
    metric = build()
    metric.update(values[:50].to(dtype), labels[:50], **batch(kwargs, slice(0, 50)))
    metric.update(values[50:].to(dtype), labels[50:], **batch(kwargs, slice(50, None)))
    same(metric.compute(), function(values.to(dtype), labels, **kwargs))


def batch(kwargs, rows):
    cut = dict(kwargs)
    for name in {"predictions", "correct"} & set(cut):
        cut[name] = cut[name][rows]
    return cut


@pytest.mark.parametrize("name", ["SampleMargin", "HardMarginLoss", "GroupAccuracy"])
def test_an_absent_class_is_nan_with_a_warning(name):
    build, _, given = STREAMING[name]
    metric = build()
    args, _ = given(LABELS != 3)
    metric.update(*args)
    with pytest.warns(UserWarning, match="1 of 6 classes have no example"):
        result = metric.compute()
    assert not any(math.isnan(value) for value in F.scalars(result).values())
    assert int(result.counts[3]) == 0


@pytest.mark.parametrize("name", ["SampleMargin", "SoftmaxBias", "Angles", "GroupAccuracy"])
def test_a_split_says_the_same_as_its_matrix(name):
    build, _, given = STREAMING[name]
    metric, other = build(), build()
    (cosine, labels), _ = given(ALL)
    metric.update(tammes.split(cosine, labels, scale=16.0))
    other.update(cosine, labels)
    same(metric.compute(), other.compute())


def test_margins_beyond_the_limits_keep_exact_ends():
    metric = metrics.SampleMargin(2, quantiles=[0.0, 0.5, 1.0])
    metric.update(torch.tensor([[50.0, 0.0], [1.0, 0.0], [0.0, -70.0]]), torch.tensor([0, 0, 1]))
    result = metric.compute()
    assert float(result.minimum) == -70
    low, middle, high = result.quantiles.tolist()
    assert -70 <= low < -2
    assert abs(middle - 1) <= 4 / 4096
    assert 2 < high <= 50


def test_a_finer_histogram_gives_a_finer_quantile():
    metric = metrics.SampleMargin(CLASSES, quantiles=[0.3, 0.6], bins=400_000)
    metric.update(COSINE, LABELS)
    exact = F.sample_margin(COSINE, LABELS, quantiles=[0.3, 0.6]).quantiles
    assert_close(metric.compute().quantiles, exact, rtol=0, atol=1e-5)


def test_class_margin_and_norms_measure_the_last_prototypes():
    for build, function in [
        (metrics.ClassMargin, F.class_margin),
        (metrics.PrototypeNorms, F.prototype_norms),
    ]:
        metric = build()
        metric.update(normal(9, 3, seed=8))
        metric.update(PROTOTYPES)
        same(metric.compute(), function(PROTOTYPES))
        same(metric(2 * PROTOTYPES[:4]), function(2 * PROTOTYPES[:4]))
        same(metric.compute(), function(2 * PROTOTYPES[:4]))


@pytest.mark.parametrize("build", [metrics.ClassMargin, metrics.PrototypeNorms])
def test_prototypes_must_come_before_their_measure(build):
    metric = build()
    metric.update(PROTOTYPES)
    metric.reset()
    with (
        pytest.warns(UserWarning, match="before the ``update`` method"),
        pytest.raises(ValueError, match="expects an update before compute"),
    ):
        metric.compute()


def test_nc4_needs_means_and_says_so():
    metric = metrics.NeuralCollapse(CLASSES, SIZE)
    with pytest.raises(ValueError, match="class means for NC4, got none"):
        metric.update(FEATURES, LABELS, predictions=PREDICTIONS)


def test_a_first_pass_gives_the_means_for_nc4():
    first = metrics.NeuralCollapse(CLASSES, SIZE)
    first.update(FEATURES, LABELS)
    second = metrics.NeuralCollapse(CLASSES, SIZE, means=first.class_means())
    second.update(FEATURES, LABELS, predictions=PREDICTIONS)
    expected = F.neural_collapse(FEATURES, LABELS, predictions=PREDICTIONS)
    assert 0 < expected.nc4 < 1
    assert_close(second.compute().nc4, expected.nc4)


def test_neural_collapse_forgets_prototypes_on_reset():
    metric = metrics.NeuralCollapse(CLASSES, SIZE)
    metric.update(FEATURES, LABELS, prototypes=PROTOTYPES)
    metric.reset()
    metric.update(FEATURES, LABELS)
    assert metric.compute().nc3 is None


def test_neural_collapse_keeps_prototypes_when_it_is_called_without():
    metric = metrics.NeuralCollapse(CLASSES, SIZE)
    metric.update(FEATURES[:50], LABELS[:50], prototypes=PROTOTYPES)
    metric(FEATURES[50:], LABELS[50:])
    same(metric.compute(), F.neural_collapse(FEATURES, LABELS, prototypes=PROTOTYPES))


def test_bad_predictions_leave_the_state_as_it_was():
    metric = metrics.NeuralCollapse(CLASSES, SIZE, means=MEANS)
    metric.update(FEATURES, LABELS, predictions=PREDICTIONS)
    with pytest.raises(ValueError, match=r"a class for each of the 90 examples, got .* \(90, 6\)"):
        metric.update(FEATURES, LABELS, predictions=COSINE)
    expected = F.neural_collapse(FEATURES, LABELS, predictions=PREDICTIONS, means=MEANS)
    same(metric.compute(), expected)


def test_calibration_is_torchmetrics_on_the_softmax():
    metric = metrics.Calibration(scale=12.0)
    for rows in (slice(0, 50), slice(50, None)):
        metric.update(COSINE[rows], LABELS[rows])
    other = torchmetrics.classification.MulticlassCalibrationError(CLASSES)
    other.update((12 * COSINE).softmax(1).float(), LABELS)
    assert other.compute() > 0.01
    assert_close(metric.compute(), other.compute())


def test_calibration_is_the_plain_expected_error():
    metric = metrics.Calibration(bins=5)
    metric.update(3 * COSINE, LABELS)
    probability = (3 * COSINE).softmax(1).amax(1).numpy()
    right = (PREDICTIONS == LABELS).numpy()
    error = 0.0
    for low in range(5):
        inside = (probability > low / 5) & (probability <= (low + 1) / 5)
        if inside.any():
            error += inside.mean() * abs(right[inside].mean() - probability[inside].mean())
    assert_close(float(metric.compute()), error, rtol=1e-5, atol=1e-6)


def test_calibration_does_not_take_cosines_for_probabilities():
    similarity = torch.tensor([[0.9, 0.1], [0.8, 0.2]])
    metric = metrics.Calibration()
    metric.update(similarity, torch.tensor([0, 0]))
    expected = 1 - similarity.softmax(1)[:, 0].mean()
    assert_close(metric.compute(), expected)


def test_they_live_in_a_metric_collection():
    collection = torchmetrics.MetricCollection(
        [metrics.SampleMargin(CLASSES), metrics.GroupAccuracy(COUNTS), metrics.Angles()]
    )
    collection.update(COSINE, LABELS)
    result = collection.compute()
    same(result["Angles"], F.angles(COSINE, LABELS))
    same(result["GroupAccuracy"], F.group_accuracy(COSINE, LABELS, training_counts=COUNTS))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: metrics.SampleMargin(1), "at least 2 classes, got num_classes=1"),
        (lambda: metrics.SampleMargin(3, limits=(1.0, 1.0)), "limits .* got"),
        (lambda: metrics.SampleMargin(9).update(COSINE, LABELS), "expects 9 classes, got 6"),
        (lambda: metrics.HardMarginLoss([0.1], 6), "gamma to be a number or 6 numbers"),
        (lambda: metrics.GroupAccuracy([5, -1]), "none negative"),
        (lambda: metrics.GroupAccuracy([5, 1], many=1, few=2), "few <= many"),
        (
            lambda: metrics.Discriminability(6, 9).update(FEATURES, LABELS),
            r"features of shape \(N, 9\), got \(90, 4\)",
        ),
        (
            lambda: metrics.NeuralCollapse(6, 9).update(FEATURES, LABELS),
            r"features of shape \(N, 9\), got \(90, 4\)",
        ),
        (
            lambda: metrics.NeuralCollapse(6, 4, means=torch.zeros(4, 6)),
            r"means of shape \(6, 4\), got \(4, 6\)",
        ),
        (lambda: metrics.Discriminability(6, 4, weighting="x"), "weighting 'class' or 'pair'"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_every_public_name_is_there():
    for name in metrics.__all__:
        assert getattr(metrics, name) is not None
    assert dir(metrics) == sorted(metrics.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        metrics.Nothing  # noqa: B018
