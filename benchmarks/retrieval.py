"""Time and memory of retrieval and of verification, on synthetic features and scores.

    python benchmarks/retrieval.py                       Market's size, two CPU threads
    python benchmarks/retrieval.py --write results/retrieval_cpu.json
    python benchmarks/retrieval.py --device cuda         100,000 queries x 1,000,000 gallery items
    python benchmarks/retrieval.py --quick               small sizes, as a smoke test

Retrieval: 3,368 queries x 19,732 gallery items of dimension 512, with 750 identities, six cameras,
junk and distractors, as many as Market-1501 has. ``tammes.metrics.functional.retrieval`` computes
all numbers; the plain ranking sorts every row in numpy and walks through the ranks in Python, as
torchreid does, and computes mAP and CMC only, once. All take turns in one process. Where
pytorch-metric-learning is installed, its AccuracyCalculator computes precision@1, R-precision and
MAP@R; it knows neither cameras nor junk, so its numbers differ.

Verification: 100 million pairs, fed in blocks of a million: EER, TAR at FAR 1e-4, minDCF, on one
thread. Times are of a clock on the wall and of the processor; only the latter are the same on a
machine with other work.

Memory is measured in a fresh process, on a CPU (``process_memory.py``), beyond the inputs.
"""

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from process_memory import extra_memory, processor

import tammes.metrics
from tammes.metrics.functional import retrieval

SIZES = {"cpu": (3_368, 19_732, 512), "cuda": (100_000, 1_000_000, 512)}
QUICK = (60, 400, 32)
PAIRS, BLOCK = 100_000_000, 1_000_000
QUICK_PAIRS = 300_000


# ------------------------------------------------------------------------------------ retrieval


def market(queries, gallery, size, device="cpu"):
    """Features around a centre for each identity, a third of the gallery distractors and junk."""
    generator = torch.Generator().manual_seed(0)

    def integers(high, count):
        return torch.randint(high, (count,), generator=generator)

    identities = max(queries * 750 // 3_368, 2)
    centres = F.normalize(torch.randn(identities, size, generator=generator))
    query_ids, gallery_ids = integers(identities, queries), integers(identities, gallery)
    kind = integers(100, gallery)
    query = centres[query_ids] + 0.09 * torch.randn(queries, size, generator=generator)
    items = centres[gallery_ids] + 0.09 * torch.randn(gallery, size, generator=generator)
    stray = kind < 34
    items[stray] = torch.randn(int(stray.sum()), size, generator=generator)
    gallery_ids[stray] = -2
    junk = kind < 20
    cameras = integers(6, queries), integers(6, gallery)
    return [part.to(device) for part in (query, items, query_ids, gallery_ids, *cameras, junk)]


def ours(data):
    result = retrieval(*data)
    return {
        "mAP": float(result.mean_average_precision),
        "rank 1": float(result.cmc[0]),
        "rank 10": float(result.cmc[9]),
        "mINP": float(result.minp),
        "MAP@R": float(result.map_at_r),
        "GAP": float(result.gap),
    }


def plain(data):
    """Sort every row, then go through its ranks in Python, as torchreid does."""
    query, gallery, query_ids, gallery_ids, query_cameras, gallery_cameras, junk = data
    keep = ~junk
    distance = (1 - F.normalize(query) @ F.normalize(gallery[keep]).T).numpy()
    gallery_ids, gallery_cameras = gallery_ids[keep].numpy(), gallery_cameras[keep].numpy()
    order = np.argsort(distance, axis=1)
    match = (gallery_ids[order] == query_ids.numpy()[:, None]).astype(np.int32)
    precisions, curves = [], []
    for row in range(len(query)):
        same = gallery_ids[order[row]] == int(query_ids[row])
        ignored = same & (gallery_cameras[order[row]] == int(query_cameras[row]))
        hits = match[row][~ignored]
        if not hits.any():
            continue
        found = hits.cumsum()
        curve = found.copy()
        curve[curve > 1] = 1
        curves.append(curve[:50])
        ranks = [count / (rank + 1.0) for rank, count in enumerate(found)]
        precisions.append((np.asarray(ranks) * hits).sum() / hits.sum())
    curve = np.asarray(curves, dtype=np.float32).mean(0)
    return {"mAP": float(np.mean(precisions)), "rank 1": float(curve[0])}


def metric_learning(data):
    """AccuracyCalculator of pytorch-metric-learning, without cameras and junk."""
    from pytorch_metric_learning.distances import CosineSimilarity
    from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
    from pytorch_metric_learning.utils.inference import CustomKNN

    query, gallery, query_ids, gallery_ids = data[:4]
    wanted = ("precision_at_1", "r_precision", "mean_average_precision_at_r")
    neighbours = CustomKNN(CosineSimilarity(), batch_size=512)
    calculator = AccuracyCalculator(wanted, k="max_bin_count", knn_func=neighbours)
    found = calculator.get_accuracy(query, query_ids, gallery, gallery_ids)
    return {"rank 1": found["precision_at_1"], "MAP@R": found["mean_average_precision_at_r"]}


CONTESTANTS = {"Tammes": ours, "plain": plain, "PML": metric_learning}


def compare(size, device, names, repeat):
    data = market(*size, device)
    rows = {}
    for turn in range(repeat):
        for name in names:
            if name == "plain" and turn:
                # It takes minutes on a busy machine.
                continue
            began, processor_began = time.perf_counter(), time.process_time()
            try:
                numbers = CONTESTANTS[name](data)
            except ImportError as error:
                print(f"{name}: {error}")
                continue
            seconds = time.perf_counter() - began
            empty = {"seconds_of_each_turn": [], "processor_seconds_of_each_turn": []}
            row = rows.setdefault(name, empty | {"numbers": numbers})
            row["seconds_of_each_turn"].append(seconds)
            processor_seconds = time.process_time() - processor_began
            row["processor_seconds_of_each_turn"].append(processor_seconds)
            print(f"turn {turn + 1}, {name}: {seconds:.2f} s", flush=True)
    for row in rows.values():
        for kind in ("seconds", "processor_seconds"):
            row[kind] = statistics.median(row[f"{kind}_of_each_turn"])
            row[f"{kind}_over_ours"] = row[kind] / rows["Tammes"][kind]
    if "plain" in rows:
        for number in ("mAP", "rank 1"):
            both = [rows[name]["numbers"][number] for name in ("Tammes", "plain")]
            # The plain ranking is in float32.
            assert abs(both[0] - both[1]) < 1e-5, (number, both)
    return rows


# --------------------------------------------------------------------------------- verification


def blocks_of_scores(count, block):
    """Blocks of scores, each a tenth of same pairs; four of them, again and again."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(4):
        same = torch.rand(block, generator=generator) < 0.1
        scores = 0.12 * torch.randn(block, generator=generator) + 0.45 * same
        made.append((scores.clamp(-1, 1), same))
    return [made[i % 4] for i in range(count // block)]


def verify(blocks):
    metric = tammes.metrics.Verification()
    for scores, same in blocks:
        metric.update(scores, same)
    result = metric.compute()
    worst, best = result.bounds()
    numbers = {}
    for name, measure in {
        "EER": lambda r: r.eer,
        "TAR at FAR 1e-4": lambda r: r.tar(1e-4),
        "minDCF": lambda r: r.min_dcf(),
    }.items():
        numbers[name] = [float(measure(each)) for each in (result, worst, best)]
    return numbers


def pairs(count, block, repeat):
    blocks = blocks_of_scores(count, block)
    torch.set_num_threads(1)
    times, processor_times = [], []
    for _ in range(repeat):
        began, processor_began = time.perf_counter(), time.process_time()
        numbers = verify(blocks)
        times.append(time.perf_counter() - began)
        processor_times.append(time.process_time() - processor_began)
        print(f"{count:,} pairs: {times[-1]:.2f} s", flush=True)
    return {
        "pairs": count,
        "block": block,
        "threads": 1,
        "seconds": statistics.median(times),
        "seconds_of_each_turn": times,
        "processor_seconds_of_each_turn": processor_times,
        "numbers_with_bounds": numbers,
    }


# --------------------------------------------------------------------------------------- report


def memory_step(part, quick):
    """Return a function of a size that makes a step, for ``extra_memory``."""

    def make(*size):
        if part == "pairs":
            blocks = blocks_of_scores(*size)
            return lambda: verify(blocks), lambda: None
        data = market(*size)
        return lambda: ours(data), lambda: None

    if part == "pairs":
        block = QUICK_PAIRS // 10 if quick else BLOCK
        return make, (QUICK_PAIRS if quick else PAIRS, block), (100_000, 10_000)
    return make, QUICK if quick else SIZES["cpu"], QUICK


def measured_memory(part, arguments):
    command = [sys.executable, __file__, "--memory-of", part, "--threads", str(arguments.threads)]
    command += ["--quick"] if arguments.quick else []
    answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(answer.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--device", default="cpu", choices=SIZES)
    add("--threads", type=int, default=2)
    add("--repeat", type=int, default=3, help="turns (3)")
    add("--only", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS), help="contestants")
    add("--quick", action="store_true", help="small sizes, to see that it runs")
    add("--write", type=Path, metavar="PATH", help="write JSON")
    add("--memory-of", choices=("retrieval", "pairs"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1 if arguments.memory_of == "pairs" else arguments.threads)
    if arguments.memory_of:
        make, size, warm_up = memory_step(arguments.memory_of, arguments.quick)
        print(json.dumps(extra_memory(make, size, warm_up)))
        return

    given = [f"results/{Path(a).name}" if a == str(arguments.write) else a for a in sys.argv[1:]]
    on_gpu = arguments.device == "cuda"
    size = QUICK if arguments.quick else SIZES[arguments.device]
    found = {
        "command": shlex.join(["python", "benchmarks/retrieval.py", *given]),
        "machine": {
            "device": torch.cuda.get_device_name() if on_gpu else processor(),
            "cores": os.cpu_count(),
            "threads": arguments.threads,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "tammes": tammes.__version__,
        },
        "load_average_before": os.getloadavg(),
        "size": size,
    }
    names = ["Tammes"] if on_gpu else arguments.only
    found["retrieval"] = compare(size, arguments.device, names, arguments.repeat)
    if on_gpu:
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    else:
        found["retrieval"]["Tammes"]["extra_bytes"] = measured_memory("retrieval", arguments)
        count, block = (QUICK_PAIRS, QUICK_PAIRS // 10) if arguments.quick else (PAIRS, BLOCK)
        found["verification"] = pairs(count, block, arguments.repeat)
        found["verification"]["extra_bytes"] = measured_memory("pairs", arguments)
    found["load_average_after"] = os.getloadavg()
    print(json.dumps(found, indent=2))
    if arguments.write:
        arguments.write.parent.mkdir(parents=True, exist_ok=True)
        arguments.write.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
