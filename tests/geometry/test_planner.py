"""The plan is what a step really takes: measured here on the CPU, and on an H200 before."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import tammes
from tammes import kernels
from tammes.geometry.planner import plan, size
from tammes.geometry.workload import OPTIMIZERS, Machine, Workload
from tammes.kernels import streamed
from tammes.similarity import InnerProduct

GIB, MIB = 2**30, 2**20


def costs(*args, machine=None, **kwargs):
    return {cost.mode: cost for cost in plan(Workload(*args, **kwargs), machine)}


# --------------------------------------------------------------------- measured on the CPU

STEPS = """
import gc, json, sys, torch, tammes

torch.set_num_threads(1)

def resident(which):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(which))

def criterion(loss, implementation, dtype, classes, size):
    term = eval(loss, vars(tammes))
    make = tammes.LinearHead if loss.startswith("softmax") else tammes.CosineHead
    options = {"bias": False} if make is tammes.LinearHead else {}
    head = make(size, classes, implementation=implementation, **options)
    return tammes.Criterion(head.to(getattr(torch, dtype)), term)

def step(criterion, features):
    criterion(features, torch.arange(len(features)) % criterion.head.num_classes).backward()

found = []
for loss, implementation, classes, size, rows, dtype in json.loads(sys.argv[1]):
    # A small one first loads what is loaded once.
    step(criterion(loss, implementation, dtype, 100, 8), torch.randn(4, 8, requires_grad=True))
    large = criterion(loss, implementation, dtype, classes, size)
    features = torch.randn(rows, size, requires_grad=True)
    gc.collect()
    before = resident("VmRSS")
    with open("/proc/self/clear_refs", "w") as mark:
        mark.write("5")
    step(large, features)
    found.append(resident("VmHWM") - before)
    del large, features
print(json.dumps(found))
"""

CASES = [
    ("cosface()", "dense", 25_000, 16, 128, "float32"),
    ("cosface()", "dense", 25_000, 128, 32, "float32"),
    ("cosface()", "dense", 25_000, 128, 48, "bfloat16"),
    ("arcface()", "dense", 10_000, 64, 256, "float32"),
    ("softmax(smoothing=0.1)", "dense", 25_000, 16, 128, "float32"),
    ("logit_divergence()", "dense", 25_000, 16, 128, "float32"),
    ("cosface() + sample_margin()", "dense", 25_000, 16, 128, "float32"),
    ("bce()", "dense", 25_000, 16, 128, "float32"),
    ("cosface()", "streamed", 50_000, 16, 1024, "float32"),
    ("cosface()", "streamed", 50_000, 128, 64, "float32"),
    ("cosface()", "streamed", 50_000, 128, 48, "bfloat16"),
    ("softmax()", "streamed", 50_000, 128, 64, "float32"),
    ("logit_divergence()", "streamed", 25_000, 64, 256, "float32"),
]


@pytest.fixture(scope="module")
def measured():
    """Bytes that one step takes at most above what was there before it, for every case."""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("the system does not let a process reset its high-water mark")
    # Large pieces come from the system and go back to it at once, so that they can be counted.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    answer = subprocess.run(
        [sys.executable, "-c", STEPS, json.dumps(CASES)],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    return dict(zip(CASES, json.loads(answer.stdout), strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case)))
def test_a_step_on_the_cpu_takes_what_was_planned(case, measured):
    loss, mode, classes, dim, rows, dtype = case
    term = eval(loss, vars(tammes))
    reads = frozenset(field for _, leaf in term.leaves() for field in leaf.definition.reads)
    linear = {"similarity": InnerProduct()} if loss.startswith("softmax") else {}
    cost = costs(classes, dim, rows, reads=reads, dtype=dtype, device="cpu", **linear)[mode]
    # Weights and features are there before the step.
    assert cost.gradient + cost.scores == pytest.approx(measured[case], rel=0.25)


# --------------------------------------------------------------------- measured on an H200

H200 = [
    # mode, classes, dim, rows, autocast, MiB above what was there, ms of a step. cosface, float32
    # prototypes; torch 2.11.0+cu130, torch.cuda.max_memory_allocated, median of 5 steps.
    ("dense", 85_742, 512, 512, None, 844.1, 6.72),
    ("dense", 1_000_000, 512, 512, None, 9785.4, 57.89),
    ("dense", 125_000, 512, 4096, None, 8085.9, 46.12),
    ("dense", 1_000_000, 128, 64, None, 1481.2, 8.07),
    ("dense", 10_000, 512, 256, None, 60.3, 4.07),
    ("streamed", 85_742, 512, 512, None, 843.1, 6.80),
    ("streamed", 1_000_000, 512, 512, None, 3914.0, 66.36),
    ("streamed", 125_000, 512, 4096, None, 2214.9, 41.47),
    ("streamed", 1_000_000, 128, 64, None, 1473.0, 9.22),
    ("streamed", 10_000, 512, 256, None, 98.8, 6.27),
    ("streamed", 85_742, 512, 512, "bfloat16", 843.1, 5.61),
    ("streamed", 1_000_000, 512, 512, "bfloat16", 3914.0, 44.45),
    ("streamed", 125_000, 512, 4096, "bfloat16", 2594.1, 15.56),
    ("streamed", 1_000_000, 128, 512, "bfloat16", 2450.0, 20.77),
]


@pytest.mark.parametrize(("mode", "classes", "dim", "rows", "autocast", "mib", "ms"), H200)
def test_a_step_on_an_h200_took_what_is_planned(mode, classes, dim, rows, autocast, mib, ms):
    cost = costs(classes, dim, rows, autocast=autocast)[mode]
    assert (cost.gradient + cost.scores) / MIB == pytest.approx(mib, rel=0.03)
    assert cost.seconds * 1e3 == pytest.approx(ms, rel=0.3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("mode", ["dense", "streamed"])
@pytest.mark.parametrize("loss", ["cosface()", "softmax(smoothing=0.1)", "logit_divergence()"])
def test_a_step_on_cuda_takes_what_was_planned(mode, loss):
    classes, dim, rows = 100_000, 256, 256
    make = tammes.LinearHead if loss.startswith("softmax") else tammes.CosineHead
    options = {"bias": False} if make is tammes.LinearHead else {}
    head = make(dim, classes, implementation=mode, **options)
    term = eval(loss, vars(tammes))
    criterion = tammes.Criterion(head, term).cuda()
    features = torch.randn(rows, dim, device="cuda", requires_grad=True)
    labels = torch.arange(rows, device="cuda")
    for _ in range(2):
        head.weight.grad = features.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        criterion(features, labels).backward()
    found = torch.cuda.max_memory_allocated() - before
    linear = {"similarity": InnerProduct()} if options else {}
    cost = costs(classes, dim, rows, reads=term.definition.reads, **linear)[mode]
    assert cost.gradient + cost.scores == pytest.approx(found, rel=0.25)


# ------------------------------------------------------------------------------ the formulas


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_keeps_as_many_copies_as_planned(name):
    makers = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "adagrad": torch.optim.Adagrad,
        "rmsprop": torch.optim.RMSprop,
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
    }
    weight = torch.nn.Parameter(torch.randn(30, 7))
    optimizer = makers[name]([weight])
    weight.square().sum().backward()
    optimizer.step()
    values = optimizer.state[weight].values()
    kept = sum(v.numel() * v.itemsize for v in values if isinstance(v, torch.Tensor) and v.ndim)
    assert costs(30, 7, 8, optimizer=name)["dense"].optimizer == kept


def test_weights_gradient_and_momentum_are_three_times_the_weights():
    dense = costs(1000, 64, 32)["dense"]
    assert dense.weights == 1000 * 64 * 4
    assert dense.weights == dense.gradient == dense.optimizer


def test_the_total_is_the_sum_and_says_whether_it_fits():
    cost = costs(100_000, 512, 512)["dense"]
    total = cost.weights + cost.gradient + cost.optimizer + cost.scores + cost.features
    assert cost.total == total
    assert cost.fits
    assert not costs(100_000, 512, 512, machine=replace(Machine(), memory=total - 1))["dense"].fits
    assert costs(100_000, 512, 512, machine=replace(Machine(), memory=total))["dense"].fits


def test_the_streamed_plan_follows_the_blocks_of_the_kernel(monkeypatch):
    before = costs(100_000, 64, 4096, device="cpu")["streamed"].scores
    monkeypatch.setitem(streamed._SCORES, "cpu", streamed._SCORES["cpu"] * 4)
    after = costs(100_000, 64, 4096, device="cpu")["streamed"].scores
    # Of 4096 rows, 335 and 1342 fit into a block: 13 blocks of 316 become 4 of 1024.
    assert after - before == (1024 - 316) * 100_000 * 4
    monkeypatch.setitem(streamed._SCORES, "cuda", 2**20)
    assert costs(100_000, 64, 4096)["streamed"].scores < after


def test_the_plan_knows_what_a_head_chooses_by_itself(monkeypatch):
    assert Workload(1000, 8, 100).automatic() == "dense"
    assert Workload(1_000_000, 8, 100).automatic() == "streamed"
    monkeypatch.setattr(kernels, "_SMALL", 10)
    assert Workload(1000, 8, 100).automatic() == "streamed"


def test_a_loss_that_reads_every_score_is_dense_only():
    work = Workload(1_000_000, 8, 100, reads=frozenset({"target", "rest"}))
    assert work.automatic() == "dense"
    assert [cost.mode for cost in plan(work)] == ["dense"]


def test_what_this_version_lacks_is_marked_as_planned():
    every = costs(1000, 64, 32)
    assert [mode for mode, cost in every.items() if cost.available] == ["dense", "streamed"]
    assert list(every) == ["dense", "streamed", "fused", "sharded", "sampled"]


@pytest.mark.parametrize("gpus", [1, 4, 8])
def test_shards_share_the_weights_and_the_products(gpus):
    every = costs(800_000, 64, 4096, gpus=gpus)
    whole, shard = every["streamed"], every["sharded"]
    assert shard.weights * gpus == whole.weights
    assert shard.optimizer * gpus == whole.optimizer
    # Few examples against all classes, or all examples against few: as many products.
    assert shard.products == pytest.approx(whole.products)


def test_shards_gather_features_where_replicas_average_gradients():
    every = costs(1_000_000, 512, 4096, gpus=8)
    own = 2 * 512 * 512 * 4
    assert every["sharded"].features == own + 2 * 4096 * 512 * 4
    assert every["streamed"].features == own + 1_000_000 * 512 * 4
    machine = Machine()
    assert every["sharded"].exchange == pytest.approx(2 * 4096 * 512 * 4 * 7 / 8 / machine.link)
    assert every["dense"].exchange == pytest.approx(2 * 2.048e9 * 7 / 8 / machine.link)
    alone = costs(1_000_000, 512, 4096)
    assert alone["dense"].exchange == alone["sharded"].exchange == 0
    assert alone["streamed"].features == 2 * 4096 * 512 * 4


def test_sampling_looks_at_its_share_but_never_misses_a_class_of_the_batch():
    rare = costs(1_000_000, 512, 4096, gpus=8, sample_rate=0.1)["sampled"]
    assert rare.gradient == 12_500 * 512 * 4
    assert rare.weights == 125_000 * 512 * 4
    # 4096 examples of 1000 classes leave few classes out.
    full = costs(1000, 512, 4096, sample_rate=0.1)["sampled"]
    assert 975 < full.gradient / (512 * 4) < 990
    assert costs(1000, 512, 4096, sample_rate=1.0)["sampled"].gradient == 1000 * 512 * 4


def test_time_is_three_products_and_four_where_scores_are_made_twice():
    every = costs(100_000, 512, 1000, machine=replace(Machine(), flops=1e12))
    assert every["dense"].products == pytest.approx(6 * 1000 * 100_000 * 512 / 1e12)
    assert every["fused"].products == pytest.approx(8 * 1000 * 100_000 * 512 / 1e12)
    for cost in every.values():
        assert cost.seconds == pytest.approx(cost.products + cost.traffic + cost.exchange)


def test_no_step_is_faster_than_the_calls_that_start_it():
    assert costs(10, 4, 2)["dense"].seconds == Machine().launch


def test_each_way_takes_less_memory_than_the_one_before_at_a_million_classes():
    totals = [cost.total for cost in plan(Workload(1_000_000, 512, 4096, gpus=8))]
    assert totals == sorted(totals, reverse=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"classes": 1}, "classes to be a whole number from 2, got 1"),
        ({"dim": 0}, "dim to be a whole number from 1, got 0"),
        ({"batch": 1.5}, "batch to be a whole number from 1, got 1.5"),
        ({"gpus": 0}, "gpus to be a whole number from 1, got 0"),
        ({"dtype": "int8"}, "dtype to be one of float32, .*, got int8"),
        ({"autocast": "float32"}, "autocast to be one of bfloat16, float16, got float32"),
        ({"optimizer": "lion"}, "optimizer to be one of sgd, .*, got lion"),
        ({"device": "tpu"}, "device to be one of cuda, cpu, got tpu"),
        ({"sample_rate": 0.0}, "sample_rate above 0 and up to 1, got 0"),
    ],
)
def test_a_workload_that_cannot_be_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Workload(**{"classes": 10, "dim": 4, "batch": 8, **change})


def test_sizes_are_written_for_people():
    assert [size(n) for n in (512, 3 * MIB, 1.5 * GIB)] == ["0.50 KiB", "3.00 MiB", "1.50 GiB"]
