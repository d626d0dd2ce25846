"""The plan is what a step really takes: measured here on the CPU, and on an H200 before."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import tammes
from tammes.advise import kernel_costs
from tammes.advise.memory_plan import plan, size
from tammes.advise.workload import DTYPES, OPTIMIZERS, UNFUSED, Machine, Workload
from tammes.heads.class_sampling import sample_size
from tammes.kernels import dispatch, tiling
from tammes.kernels.tiling import WIDEST, fused_blocks, longest
from tammes.pooling import Pooled
from tammes.similarity import Cosine, InnerProduct
from tammes.split import FREE_MAP, MAPPED, REDUCED, SUMMED

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

def criterion(loss, implementation, dtype, classes, size, centers=1):
    term = eval(loss, vars(tammes))
    make = tammes.LinearHead if loss.startswith("softmax") else tammes.CosineHead
    options = {"bias": False} if make is tammes.LinearHead else {"subcenters": centers}
    if implementation in ("sharded", "sampled"):
        rate = {} if implementation == "sharded" else {"sample_rate": 0.1}
        head = tammes.ShardedHead(make, size, classes, **rate, **options)
    else:
        head = make(size, classes, implementation=implementation, **options)
    return tammes.Criterion(head.to(getattr(torch, dtype)), term)

def step(criterion, features):
    criterion(features, torch.arange(len(features)) % criterion.head.num_classes).backward()

found = []
for loss, implementation, classes, size, rows, dtype, *centers in json.loads(sys.argv[1]):
    # A small one first loads what is loaded once.
    small = criterion(loss, implementation, dtype, 100, 8, *centers)
    step(small, torch.randn(4, 8, requires_grad=True))
    large = criterion(loss, implementation, dtype, classes, size, *centers)
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
    ("bce()", "streamed", 25_000, 64, 256, "float32"),
    ("hinge()", "streamed", 25_000, 64, 256, "float32"),
    ("mv_softmax()", "streamed", 25_000, 64, 256, "float32"),
    ("mv_softmax()", "dense", 25_000, 16, 128, "float32"),
    # So many classes that only few rows of scores would fit.
    ("cosface()", "streamed", 1_200_000, 8, 64, "float32"),
    # On one rank a sharded head is a plain one, which streams only what is large.
    ("cosface()", "sharded", 100_000, 128, 64, "float32"),
    ("cosface()", "sampled", 100_000, 128, 64, "float32"),
    # Three prototypes of a class.
    ("cosface()", "dense", 10_000, 16, 128, "float32", 3),
    ("cosface()", "dense", 10_000, 128, 32, "float32", 3),
    ("cosface()", "streamed", 20_000, 16, 1024, "float32", 3),
    ("cosface()", "streamed", 20_000, 128, 64, "float32", 3),
    ("cosface()", "sharded", 40_000, 128, 64, "float32", 3),
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
    loss, mode, classes, dim, rows, dtype, *centers = case
    term = eval(loss, vars(tammes))
    reads = frozenset(field for _, leaf in term.leaves() for field in leaf.definition.reads)
    similarity = Pooled(Cosine(), *centers) if centers else Cosine()
    similarity = InnerProduct() if loss.startswith("softmax") else similarity
    sizes = (classes, dim, rows)
    cost = costs(*sizes, reads=reads, dtype=dtype, device="cpu", similarity=similarity)[mode]
    # Weights and features are there before the step.
    assert cost.gradient + cost.scores == pytest.approx(measured[case], rel=0.25)


# --------------------------------------------------------------------- measured on an H200

H200 = [
    # mode, classes, dim, rows, autocast, MiB above what was there, ms of a step. cosface, float32
    # prototypes; torch 2.11.0+cu130, torch.cuda.max_memory_allocated, median of 5 steps. Of steps
    # below 100 MiB one measures how the allocator rounds.
    ("dense", 100_000, 256, 256, None, 197.4, 3.01),
    ("dense", 100_000, 256, 256, "bfloat16", 196.9, 3.16),
    ("dense", 100_000, 512, 1024, None, 595.0, 8.36),
    ("dense", 100_000, 512, 1024, "bfloat16", 688.0, 3.35),
    ("dense", 1_000_000, 512, 512, None, 3915.8, 37.21),
    ("dense", 125_000, 512, 4096, None, 2230.7, 35.78),
    ("dense", 125_000, 512, 4096, "bfloat16", 3065.2, 5.86),
    ("dense", 1_000_000, 512, 512, "bfloat16", 3914.5, 7.66),
    ("streamed", 1_000_000, 512, 512, None, 2945.3, 54.21),
    ("streamed", 125_000, 512, 4096, None, 1285.4, 42.45),
    ("streamed", 1_000_000, 512, 512, "bfloat16", 4227.2, 27.51),
    ("streamed", 125_000, 512, 4096, "bfloat16", 2370.5, 13.99),
    ("streamed", 1_000_000, 128, 512, "bfloat16", 2206.8, 15.89),
    ("fused", 85_742, 512, 512, "bfloat16", 346.4, 6.75),
    ("fused", 1_000_000, 512, 512, "bfloat16", 3921.0, 8.76),
    ("fused", 1_000_000, 512, 4096, "bfloat16", 4773.4, 27.57),
    ("fused", 125_000, 512, 4096, "bfloat16", 1425.1, 7.14),
    ("fused", 1_000_000, 128, 512, "bfloat16", 1715.3, 6.77),
    ("fused", 125_000, 512, 1024, "bfloat16", 631.0, 7.86),
    ("fused", 100_000, 512, 1024, "bfloat16", 510.5, 7.11),
]


def test_a_step_of_three_prototypes_of_a_class_took_what_is_planned():
    # docs/kernels.md: ArcFace at (4096, 512, 1,000,000), and memory beyond keys and gradient.
    many = {"autocast": "bfloat16", "similarity": Pooled(Cosine(), 3)}
    cost = costs(1_000_000, 512, 4096, **many)["fused"]
    assert cost.weights == cost.gradient == 3 * 1_000_000 * 512 * 4
    assert cost.scores - 3 * 1_000_000 * 512 * 2 == pytest.approx(6.0 * GIB, rel=0.1)
    assert cost.seconds == pytest.approx(83.5e-3, rel=0.3)
    streamed = costs(1_000_000, 512, 4096, **many)["streamed"]
    assert streamed.seconds == pytest.approx(807e-3, rel=0.3)


@pytest.mark.parametrize(("mode", "classes", "dim", "rows", "autocast", "mib", "ms"), H200)
def test_a_step_on_an_h200_took_what_is_planned(mode, classes, dim, rows, autocast, mib, ms):
    cost = costs(classes, dim, rows, autocast=autocast)[mode]
    assert (cost.gradient + cost.scores) / MIB == pytest.approx(mib, rel=0.03)
    assert cost.seconds * 1e3 == pytest.approx(ms, rel=0.3)


def taken_on_cuda(criterion, features, labels, autocast):
    """Bytes that a step takes at most above what was there before it."""
    for _ in range(2):
        criterion.zero_grad(set_to_none=True)
        features.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = criterion(features, labels)
        loss.backward()
        del loss
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("mode", "loss"),
    [
        *(
            ("dense", loss)
            for loss in ("cosface()", "softmax(smoothing=0.1)", "logit_divergence()")
        ),
        *(("streamed", loss) for loss in ("cosface()", "softmax()", "logit_divergence()")),
        *(("fused", loss) for loss in ("cosface()", "arcface()", "softmax()")),
    ],
)
def test_a_step_on_cuda_takes_what_was_planned(mode, loss):
    classes, dim, rows = 100_000, 256, 256
    make = tammes.LinearHead if loss.startswith("softmax") else tammes.CosineHead
    options = {"bias": False} if make is tammes.LinearHead else {}
    head = make(dim, classes, implementation=mode, **options)
    term = eval(loss, vars(tammes))
    criterion = tammes.Criterion(head, term).cuda()
    features = torch.randn(rows, dim, device="cuda", requires_grad=True)
    labels = torch.arange(rows, device="cuda")
    found = taken_on_cuda(criterion, features, labels, autocast=mode == "fused")
    linear = {"similarity": InnerProduct()} if options else {}
    half = {"autocast": "bfloat16"} if mode == "fused" else {}
    cost = costs(classes, dim, rows, reads=term.definition.reads, **linear, **half)[mode]
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
    monkeypatch.setitem(tiling.SCORES, "cpu", tiling.SCORES["cpu"] * 4)
    after = costs(100_000, 64, 4096, device="cpu")["streamed"].scores
    # Of 4096 rows, 335 and 1342 fit into a block: 13 blocks of 316 become 4 of 1024.
    assert after - before == (1024 - 316) * 100_000 * 4
    monkeypatch.setitem(tiling.SCORES, "cuda", 2**26)
    assert costs(100_000, 64, 4096)["streamed"].scores < after


def test_the_plan_knows_what_a_head_chooses_by_itself(monkeypatch):
    assert Workload(1000, 8, 100).automatic() == "dense"
    # On a GPU scores in blocks take longer, wherever all of them fit.
    assert Workload(1_000_000, 8, 100).automatic() == "dense"
    assert Workload(10_000_000, 8, 100).automatic() == "streamed"
    assert Workload(40_000, 8, 100, device="cpu").automatic() == "dense"
    assert Workload(1_000_000, 8, 100, device="cpu").automatic() == "streamed"
    monkeypatch.setitem(dispatch._SMALL, "cpu", 10)
    assert Workload(1000, 8, 100, device="cpu").automatic() == "streamed"


def test_a_loss_that_reads_every_score_is_dense_only():
    work = Workload(1_000_000, 8, 100, reads=frozenset({"target", "rest"}))
    assert work.automatic() == "dense"
    assert [cost.mode for cost in plan(work)] == ["dense"]


def test_products_in_half_precision_are_fused_and_others_streamed():
    assert Workload(10_000_000, 8, 100, autocast="bfloat16").automatic() == "fused"
    assert Workload(1_000_000, 8, 100, autocast="bfloat16").automatic() == "dense"
    assert Workload(1_000_000, 8, 100, autocast="bfloat16", device="cpu").automatic() == "streamed"
    # What the dense kernel has no kernels of its own for is fused earlier.
    reads = frozenset({"target", "others", "mean"})
    assert Workload(100_000, 8, 100, autocast="bfloat16", reads=reads).automatic() == "fused"
    for field in UNFUSED - {"rest"}:
        reads = frozenset({"target", "others", field})
        work = Workload(10_000_000, 8, 100, autocast="bfloat16", reads=reads)
        assert work.automatic() == "streamed"
        assert "fused" not in [cost.mode for cost in plan(work)]


def test_shares_of_the_classes_have_no_plain_form():
    work = Workload(1000, 8, 100, autocast="bfloat16")
    assert work.automatic() == "dense"
    assert work.within(100, 1000) == "streamed"
    assert work.within(1000, 100_000) == "fused"


def test_every_way_is_there_and_fused_only_on_cuda():
    ways = ["dense", "streamed", "fused", "sharded", "sampled"]
    assert list(costs(1000, 64, 32)) == ways
    assert list(costs(1000, 64, 32, device="cpu")) == [way for way in ways if way != "fused"]


def test_fused_plan_holds_half_precision_prototypes_and_one_block():
    cost = costs(1_000_000, 512, 4096, autocast="bfloat16")["fused"]
    rows = longest(fused_blocks(4096, 1_000_000, 512, 2))
    assert 800 < rows < 1100
    small = 5 * 4096 * 512 * 4 + 1_000_000 * 4
    sums = rows * 1_000_000 // 128 * 4
    assert cost.scores == 2 * 1_000_000 * (512 + rows) + sums + small
    # What is asked of it: two GiB beyond that copy and the gradient.
    assert cost.scores - 2 * 1_000_000 * 512 < 2 * GIB
    # Where all rows fit, there is no more than they are.
    few = costs(1_000_000, 512, 16, autocast="bfloat16")["fused"]
    sums = 16 * 1_000_000 // 128 * 4
    assert few.scores == 2 * 1_000_000 * (512 + 16) + sums + 5 * 16 * 512 * 4 + 1_000_000 * 4


def test_the_fused_plan_knows_the_limits_of_the_kernel(monkeypatch):
    fused = pytest.importorskip("tammes.kernels.fused.engine", exc_type=ImportError)
    assert fused.launch.tile_of(torch.bfloat16).classes == kernel_costs._TILE
    # It would refuse a device that is not there, but for the interpreter.
    monkeypatch.setattr(fused.launch, "INTERPRETED", True)
    for change in (
        *(
            {"reads": frozenset({"target", "others", field})}
            for field in (*REDUCED, *SUMMED, MAPPED, FREE_MAP)
        ),
        *({"dtype": dtype} for dtype in DTYPES),
        *({"dim": dim} for dim in (1, WIDEST, WIDEST + 1)),
        *({"similarity": Pooled(Cosine(), centers)} for centers in (2, 12, 13)),
        {"similarity": Pooled(Cosine(), 2), "reads": frozenset({"target", "others", "mean"})},
    ):
        work = Workload(**{"classes": 1000, "dim": 64, "batch": 32, **change})
        refused = fused.why_not(work.problem(32, 1000), work.reads)
        assert work.fusable is (refused is None), change


def test_more_blocks_of_rows_are_more_passes_over_the_prototypes():
    def traffic(rows):
        return costs(1_000_000, 512, rows, autocast="bfloat16")["fused"].traffic

    fit = 896
    assert [len(fused_blocks(rows, 1_000_000, 512, 2)) for rows in (fit, 2 * fit)] == [1, 2]
    one, two = traffic(fit), traffic(2 * fit)
    # Twice the scores; the prototypes are gone through once and once more for each block.
    again = 1_000_000 * 512 * 2 * kernel_costs.FUSED.again / Machine().bandwidth
    scores = fit * 1_000_000 * 2 * kernel_costs.FUSED.scores / Machine().bandwidth
    assert two - one == pytest.approx(scores + again)


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
    # Features there, gradients back, labels, and two numbers from each of the seven others.
    bytes_received = (2 * 4096 * 512 * 4 + 16 * 4096) * 7 / 8 + 2 * 4096 * 4 * 7
    # Two blocks of rows are seen against 125,000 classes: their numbers are told apart.
    waits = (4 + 2) * 3 * machine.latency
    expected = bytes_received / machine.link + waits
    assert every["sharded"].exchange == pytest.approx(expected)
    waits = 2 * 3 * machine.latency
    assert every["dense"].exchange == pytest.approx(2 * 2.048e9 * 7 / 8 / machine.link + waits)
    alone = costs(1_000_000, 512, 4096)
    assert alone["dense"].exchange == alone["sharded"].exchange == 0
    assert alone["streamed"].features == 2 * 4096 * 512 * 4


def test_messages_between_nodes_go_at_the_rate_of_the_network():
    machine = replace(Machine(), latency=0.0)
    inside, across = (
        costs(1_000_000, 512, 4096, gpus=8, machine=replace(machine, node=node))["dense"].exchange
        for node in (8, 4)
    )
    assert across / inside == pytest.approx(machine.link / machine.network)


def test_sampling_looks_at_its_share_but_never_misses_a_class_of_the_batch():
    rare = costs(1_000_000, 512, 4096, gpus=8, sample_rate=0.1)["sampled"]
    assert rare.gradient == 12_500 * 512 * 4
    assert rare.weights == 125_000 * 512 * 4
    assert costs(1000, 512, 64, sample_rate=0.1)["sampled"].gradient == 100 * 512 * 4
    # As many as the head really takes, whatever the batch.
    for batch in (64, 500, 4096):
        sampled = costs(1000, 512, batch, sample_rate=0.1)["sampled"]
        assert sampled.gradient == sample_size(batch, 1000, 0.1) * 512 * 4
    assert costs(1000, 512, 4096, sample_rate=1.0)["sampled"].gradient == 1000 * 512 * 4


def test_time_is_three_products_and_four_where_scores_are_made_twice():
    machine = replace(Machine(), flops=1e12)
    every = costs(100_000, 512, 1000, machine=machine)
    for mode in ("dense", "streamed", "fused", "sharded"):
        assert every[mode].products == pytest.approx(6 * 1000 * 100_000 * 512 / 1e12)
    for cost in every.values():
        assert cost.seconds == pytest.approx(cost.products + cost.traffic + cost.exchange)
    # Of so many classes fewer than 32 rows fit into a block of scores.
    thin = costs(10_000_000, 512, 1000, machine=machine)
    assert thin["streamed"].products == pytest.approx(8 * 1000 * 10_000_000 * 512 / 1e12)
    assert thin["fused"].products == pytest.approx(6 * 1000 * 10_000_000 * 512 / 1e12)


def test_no_step_is_faster_than_the_calls_that_start_it():
    assert costs(10, 4, 2)["streamed"].seconds == Machine().launch
    assert costs(10, 4, 2)["dense"].seconds == Machine().launch / 2


@pytest.mark.parametrize("autocast", [None, "bfloat16"])
def test_shards_and_samples_take_less_memory_than_all_classes_on_every_rank(autocast):
    every = costs(1_000_000, 512, 4096, gpus=8, autocast=autocast)
    assert min(every["dense"].total, every["streamed"].total) > every["sharded"].total
    assert every["fused"].total > every["sharded"].total > every["sampled"].total


def test_a_hundred_million_classes_fit_on_64_gpus_and_on_8_of_them():
    for gpus in (8, 64):
        every = costs(100_000_000, 512, 128 * gpus, gpus=gpus, autocast="bfloat16")
        assert every["sharded"].fits
        assert not every["fused"].fits


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
