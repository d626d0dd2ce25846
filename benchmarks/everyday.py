"""Time one step of the losses everybody uses, at the sizes everybody has.

    python benchmarks/everyday.py                 CPU, one and two threads, prints a table
    python benchmarks/everyday.py --write         and writes results/everyday_cpu.json
    python benchmarks/everyday.py --device cuda   GPU, float32 and bf16 autocast
    python benchmarks/everyday.py --compiled      CosFace under torch.compile, on a GPU
    python benchmarks/everyday.py --only Tammes   that contestant, beside the code by hand
    python benchmarks/everyday.py --same-thread   backward in the thread of the call, on a GPU too
    python benchmarks/everyday.py --quick         the smallest size, as a smoke test

Contestants, on the same features and labels: Tammes as it is built by default, the same loss
written by hand in a few lines of torch, and pytorch-metric-learning. On a GPU also Tammes by its
CUDA graphs (``criterion.graphed``); with ``--compiled``, Tammes and the code by hand under
``torch.compile`` instead, which takes half a minute for each row.

Time: forward and backward, gradients set to None beforehand. All contestants of a size take turns
in one process, so that a change in the machine's load affects all of them, and in random order, so
that none always runs after the same other one. On a CPU with one thread it is
the processor time of the thread, which others do not add to. The median over the turns is reported,
and the median over the turns of each turn's ratio to the code by hand.
"""

import argparse
import json
import math
import os
import random
import statistics
import time
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from criterion import machine, progress

import tammes

DIMENSION, SCALE, COSINE_MARGIN, ANGLE = 512, 64.0, 0.35, 0.5
SIZES = {
    "cpu": [(128, 100), (128, 1_000), (128, 10_000), (1024, 100), (1024, 1_000), (1024, 10_000)],
    "cuda": [(128, 100), (1024, 10_000), (1024, 100_000), (512, 1_000_000), (4096, 1_000_000)],
}
CONTESTANTS = ["PML", "Tammes", "Tammes, graphed"]
COMPILED = ["by hand, compiled", "Tammes, compiled", "Tammes, graphed"]
ENTRIES = 2_500_000_000
"""Scores above which only CosFace runs, in bf16: others keep too many copies of the matrix."""
RESULTS = Path(__file__).resolve().parent.parent / "results"


# --------------------------------------------------------------------------------- by hand


class ByHand(torch.nn.Module):
    """Prototypes, and a loss of features, prototypes and labels in a few lines of torch."""

    def __init__(self, loss, classes, bias=False):
        super().__init__()
        self.loss = loss
        self.weight = torch.nn.Parameter(torch.randn(classes, DIMENSION) / DIMENSION**0.5)
        self.bias = torch.nn.Parameter(torch.zeros(classes)) if bias else None

    def forward(self, features, labels):
        """Mean loss of a batch."""
        return self.loss(features, self.weight, self.bias, labels)


def softmax_by_hand(x, w, b, y):
    return F.cross_entropy(F.linear(x, w, b), y)


def cosface_by_hand(x, w, b, y):
    cosine = F.linear(F.normalize(x), F.normalize(w))
    return F.cross_entropy(SCALE * (cosine - COSINE_MARGIN * F.one_hot(y, len(w))), y)


def arcface_by_hand(x, w, b, y):
    cosine = F.linear(F.normalize(x), F.normalize(w))
    target = cosine.gather(1, y[:, None])
    sine = (1 - target * target).clamp_min(1e-6).sqrt()
    bent = target * math.cos(ANGLE) - sine * math.sin(ANGLE)
    return F.cross_entropy(SCALE * cosine.scatter(1, y[:, None], bent.to(cosine.dtype)), y)


def lm_softmax_by_hand(x, w, b, y):
    scores = SCALE * F.linear(F.normalize(x), F.normalize(w))
    target = scores.gather(1, y[:, None]).squeeze(1)
    others = scores.scatter(1, y[:, None], float("-inf")).logsumexp(1)
    return ((others - target) / SCALE).mean()


LOSSES = {
    "softmax": (softmax_by_hand, lambda c: tammes.Softmax(DIMENSION, c)),
    "CosFace": (
        cosface_by_hand,
        lambda c: tammes.CosFace(DIMENSION, c, margin=COSINE_MARGIN, scale=SCALE),
    ),
    "ArcFace": (arcface_by_hand, lambda c: tammes.ArcFace(DIMENSION, c, margin=ANGLE, scale=SCALE)),
    "LM-Softmax": (lm_softmax_by_hand, lambda c: tammes.LMSoftmax(DIMENSION, c, scale=SCALE)),
}


def peers(name, classes):
    """The loss in pytorch-metric-learning, where it is there."""
    try:
        from pytorch_metric_learning import losses
    except ImportError:
        return None
    if name == "CosFace":
        return losses.CosFaceLoss(classes, DIMENSION, margin=COSINE_MARGIN, scale=SCALE)
    if name == "ArcFace":
        return losses.ArcFaceLoss(classes, DIMENSION, margin=math.degrees(ANGLE), scale=SCALE)
    return None


def contestants(name, classes, device, only):
    """Modules that take features and labels and return a loss, by name."""
    by_hand, build = LOSSES[name]
    found = {
        "by hand": lambda: ByHand(by_hand, classes, bias=name == "softmax"),
        "PML": lambda: peers(name, classes),
        "Tammes": lambda: build(classes),
    }
    if device == "cuda":
        found["Tammes, graphed"] = found["Tammes"]
        found["by hand, compiled"] = lambda: torch.compile(found["by hand"]())
        found["Tammes, compiled"] = lambda: torch.compile(found["Tammes"]())
    # A million prototypes take seconds to draw on a CPU.
    with torch.device(device):
        wanted = {key: build() for key, build in found.items() if key == "by hand" or key in only}
    return {key: module.to(device) for key, module in wanted.items() if module is not None}


# --------------------------------------------------------------------------------- measurement


def step_of(module, features, labels, autocast, graphed, threads):
    parameters = [*module.parameters()]
    if graphed:
        with torch.autocast(features.device.type, torch.bfloat16, enabled=autocast):
            module = module.graphed(features, labels)

    def step():
        features.grad = None
        for parameter in parameters:
            parameter.grad = None
        with torch.autocast(features.device.type, torch.bfloat16, enabled=autocast):
            loss = module(features, labels)
        with torch.autograd.set_multithreading_enabled(threads):
            loss.backward()

    return step


def take_turns(steps, budget, device, clock):
    """Seconds of every turn of each step, in rounds, until the time is up."""

    def timed(step):
        begin = clock()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        return clock() - begin

    for step in steps.values():
        for _ in range(3):
            timed(step)
    turns = {name: [] for name in steps}
    end = time.perf_counter() + budget
    order, shuffle = [*steps], random.Random(0).shuffle
    while time.perf_counter() < end or len(turns["by hand"]) < 9:
        shuffle(order)
        for name in order:
            turns[name].append(timed(steps[name]))
    return turns


def measure(name, n, classes, device, autocast, budget, clock, only, threads):
    """Milliseconds of each contestant, and its ratio to the code by hand."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(n, DIMENSION, generator=generator).to(device).requires_grad_()
    labels = torch.randint(classes, (n,), generator=generator).to(device)
    # Otherwise torch compiles for any size after the first ones, and at last not at all.
    torch.compiler.reset()
    made = contestants(name, classes, device, only)
    steps = {
        key: step_of(module, features, labels, autocast, key.endswith("graphed"), threads)
        for key, module in made.items()
    }
    turns = take_turns(steps, budget, device, clock)
    return {
        key: {
            "milliseconds": 1e3 * statistics.median(times),
            "of_by_hand": statistics.median(
                a / b for a, b in zip(times, turns["by hand"], strict=True)
            ),
        }
        for key, times in turns.items()
    }


def table(rows):
    names = sorted({key for row in rows for key in row["contestants"]})
    lines = [f"{'':34}" + "".join(f"{name:>20}" for name in names)]
    for row in rows:
        label = f"{row['loss']:<11}{row['n']:>5} x {row['c']:<9,} {row['setting']:<6}"
        cells = []
        for name in names:
            cell = row["contestants"].get(name)
            text = "" if cell is None else f"{cell['milliseconds']:.3f} ({cell['of_by_hand']:.2f})"
            cells.append(f"{text:>20}")
        lines.append(f"{label:<34}" + "".join(cells))
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--quick", action="store_true", help="the smallest size, few turns")
    parser.add_argument("--losses", nargs="+", default=[*LOSSES], choices=LOSSES)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each row of the table")
    parser.add_argument("--largest", type=int, default=1_000_000, help="number of classes")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--only", nargs="+", default=CONTESTANTS, choices=CONTESTANTS)
    parser.add_argument("--compiled", action="store_true", help="CosFace under torch.compile")
    parser.add_argument("--same-thread", action="store_true", help="backward in this thread")
    parser.add_argument("--write", action="store_true", help="into results/everyday_*.json")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)

    device, path, say = arguments.device, RESULTS / f"everyday_{arguments.device}.json", progress()
    if arguments.same_thread:
        path = path.with_stem(f"{path.stem}_same_thread")
    if arguments.compiled:
        device, path = "cuda", RESULTS / "everyday_compiled.json"
        arguments.losses, arguments.only = ["CosFace"], COMPILED
    sizes = [size for size in SIZES[device] if size[1] <= arguments.largest]
    sizes = sizes[:1] if arguments.quick else sizes
    budget = 0.2 if arguments.quick else arguments.seconds
    settings = [str(t) for t in arguments.threads] if device == "cpu" else ["fp32", "bf16"]
    rows = []
    for setting in settings:
        if device == "cpu":
            torch.set_num_threads(int(setting))
        clock = time.thread_time if setting == "1" else time.perf_counter
        for n, classes in sizes:
            for name in arguments.losses:
                say(f"{setting}: {name} at {n} x {classes}")
                if n * classes > ENTRIES and (setting == "fp32" or name != "CosFace"):
                    continue
                found = measure(
                    *(name, n, classes, device, setting == "bf16", budget, clock),
                    *(arguments.only, not arguments.same_thread),
                )
                rows.append(
                    {"loss": name, "n": n, "c": classes, "setting": setting, "contestants": found}
                )
                if arguments.write:
                    write(path, device, settings, rows)
    print(table(rows))


def write(path, device, settings, rows):
    """Write the rows so far: what was measured is kept if a later row fails."""
    told = machine(settings) | {"load_average": os.getloadavg()}
    if device == "cuda":
        told["gpu"] = torch.cuda.get_device_name()
    path.write_text(json.dumps({"machine": told, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
