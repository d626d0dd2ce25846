"""On two ranks every metric gives what one process gives for all examples."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rank_pool import everywhere
from torch.testing import assert_close

from tammes import metrics
from tammes.metrics import functional as F

CLASSES, SIZE, EXAMPLES = 6, 4, 80
COUNTS = [500, 150, 60, 30, 10, 2]
# The first rank has more examples, and all of class 5: no rank may take its part for the whole.
CUT = 50


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.double, generator=generator)


def data():
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(CLASSES, (EXAMPLES,), generator=generator)
    labels[CUT:] %= CLASSES - 1
    prototypes = normal(CLASSES, SIZE, seed=3)
    features = 1.5 * prototypes[labels] + normal(EXAMPLES, SIZE)
    unit = torch.nn.functional.normalize
    return features, labels, prototypes, unit(features) @ unit(prototypes).T


def measure(rows, shard):
    """All metrics of some examples and some prototypes."""
    features, labels, prototypes, cosine = data()
    means = normal(CLASSES, SIZE, seed=4)
    build = {
        "SampleMargin": metrics.SampleMargin(CLASSES),
        "HardMarginLoss": metrics.HardMarginLoss(0.2, CLASSES),
        "SoftmaxBias": metrics.SoftmaxBias(CLASSES, scale=16.0),
        "Angles": metrics.Angles(bins=18, margin=1.0),
        "GroupAccuracy": metrics.GroupAccuracy(COUNTS),
        "Calibration": metrics.Calibration(scale=16.0),
    }
    for metric in build.values():
        metric.update(cosine[rows], labels[rows])
    build["Discriminability"] = metrics.Discriminability(CLASSES, SIZE, novel=[1, 2, 5])
    build["Discriminability"].update(features[rows], labels[rows])
    build["NeuralCollapse"] = metrics.NeuralCollapse(CLASSES, SIZE, means=means)
    build["NeuralCollapse"].update(
        features[rows], labels[rows], prototypes=prototypes, predictions=cosine[rows].argmax(1)
    )
    build["ClassMargin"] = metrics.ClassMargin()
    build["ClassMargin"].update(prototypes)
    build["ClassMarginSharded"] = metrics.ClassMargin(sharded=True)
    build["ClassMarginSharded"].update(prototypes[shard])
    build["PrototypeNorms"] = metrics.PrototypeNorms()
    build["PrototypeNorms"].update(prototypes[shard])
    found = {name: flat(metric.compute()) for name, metric in build.items()}
    found["class_means"] = {"value": build["NeuralCollapse"].class_means()}
    # After compute each rank goes on from its own part.
    again = {"own": build["GroupAccuracy"].counts, "held": build["NeuralCollapse"].counts}
    return found, again


def flat(result, prefix=""):
    """A result as plain names and tensors."""
    if isinstance(result, torch.Tensor):
        return {prefix + "value": result}
    values = {}
    for name, value in result._asdict().items():
        if hasattr(value, "_asdict"):
            values |= flat(value, f"{prefix}{name}.")
        elif value is not None:
            values[prefix + name] = torch.as_tensor(value)
    return values


def work(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    rows = slice(0, CUT) if rank == 0 else slice(CUT, None)
    shard = slice(0, 4) if rank == 0 else slice(4, None)
    torch.save(measure(rows, shard), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(work, args=(str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]


@pytest.fixture(scope="module")
def alone():
    return measure(slice(None), slice(None))[0]


@pytest.mark.slow
def test_two_ranks_agree_with_one_process(ranks, alone):
    assert len(alone) == 12
    for rank in (0, 1):
        found = ranks[rank][0]
        assert found.keys() == alone.keys()
        for name, expected in alone.items():
            assert found[name].keys() == expected.keys()
            for field, value in expected.items():
                assert_close(
                    found[name][field], value, rtol=1e-9, atol=1e-9, msg=f"{rank} {name}.{field}"
                )


@pytest.mark.slow
def test_each_rank_goes_on_from_its_own_part(ranks):
    labels = data()[1]
    for rank, rows in ((0, slice(0, CUT)), (1, slice(CUT, None))):
        own = torch.bincount(labels[rows], minlength=CLASSES)
        for counts in ranks[rank][1].values():
            assert torch.equal(counts, own)


def measure_on_some(group, rows):
    """Neural collapse where only one rank is given examples, and then with other prototypes."""
    features, labels, prototypes, _ = data()
    metric = metrics.NeuralCollapse(CLASSES, SIZE, process_group=group)
    found = []
    for factor in rows:
        if dist.get_rank(group) == 1:
            metric.update(features, labels, prototypes=factor * prototypes)
        with warnings.catch_warnings():
            # torchmetrics says that a metric has had no update.
            warnings.simplefilter("ignore")
            found.append(flat(metric.compute()))
        metric.reset()
    return found


def test_a_rank_without_examples_has_all_signs_of_collapse_too():
    features, labels, prototypes, _ = data()
    factors = [torch.ones(CLASSES, 1), torch.arange(1.0, CLASSES + 1)[:, None]]
    expected = [
        flat(F.neural_collapse(features, labels, prototypes=factor * prototypes))
        for factor in factors
    ]
    assert "nc3" in expected[0]
    for found in everywhere(3, measure_on_some, factors):
        assert_close(found, expected)


def recognise(group, parts):
    """Recognition where each rank has its part of the examples, and one has none."""
    features, labels, _, cosine = data()
    rows = torch.tensor(parts[dist.get_rank(group)] if group else parts, dtype=torch.long)
    build = {
        "Verification": metrics.Verification(process_group=group),
        "OpenSet": metrics.OpenSet(process_group=group),
        "Retrieval": metrics.Retrieval(process_group=group),
        "Identification": metrics.Identification(process_group=group),
    }
    if len(rows):
        build["Verification"].update(cosine[rows, 0], labels[rows] == 0)
        build["OpenSet"].update(cosine[rows, 1], labels[rows] < 3, labels[rows] < 2)
        names = [f"name {label}" for label in labels[rows].tolist()]
        build["Retrieval"].update(features[rows], names)
        build["Identification"].update(features[rows], labels[rows], query=rows % 2 == 0)
    with warnings.catch_warnings():
        # torchmetrics says that a metric has had no update.
        warnings.simplefilter("ignore")
        found = {name: metric.compute() for name, metric in build.items()}
    values = {name: F.scalars(result) for name, result in found.items()}
    values["curves"] = {"cmc": found["Retrieval"].cmc, "roc": found["Verification"].roc.tar}
    return values


def test_recognition_on_three_ranks_agrees_with_one_process():
    order = torch.arange(EXAMPLES).tolist()
    expected = recognise(None, order)
    assert {name: len(values) for name, values in expected.items()} == {
        "Verification": 5,
        "OpenSet": 7,
        "Retrieval": 9,
        "Identification": 3,
        "curves": 2,
    }
    for found in everywhere(3, recognise, [order[:CUT], [], order[CUT:]]):
        for name, values in expected.items():
            assert_close(found[name], values, rtol=1e-12, atol=1e-12, msg=name)


def test_one_process_agrees_with_the_functions(alone):
    # What the ranks are held against is itself held against the functional core.
    features, labels, prototypes, cosine = data()
    assert_close(alone["ClassMargin"]["angle"], F.class_margin(prototypes).angle)
    assert_close(alone["SampleMargin"]["mean"], F.sample_margin(cosine, labels).mean)
    result = F.neural_collapse(features, labels, prototypes=prototypes)
    assert_close(alone["NeuralCollapse"]["nc1"], result.nc1)
    assert_close(alone["NeuralCollapse"]["nc3"], result.nc3)
