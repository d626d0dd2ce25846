"""Time one training step of a criterion relative to its three unavoidable matrix products.

    python benchmarks/criterion.py            both sizes, prints a table
    python benchmarks/criterion.py --write    and writes results/criterion_cpu.json
    python benchmarks/criterion.py --quick    a small size, as a smoke test

Contestants, in float32, on the same features and labels: Tammes (``implementation="auto"``),
pytorch-metric-learning, torch written by hand, and the bare products ``x @ W.T``, ``g @ W`` and
``g.T @ x``, whose inputs exist beforehand and whose outputs are new, as gradients are.

Time: forward and backward, gradients set to None beforehand. All contestants take turns in one
process, so that a change in the machine's load affects all of them; the median over the turns is
reported, and the median over the turns of each turn's ratio to that turn's products. On a busy
machine look at the ratio of the fastest turns instead: others can only slow a turn down.

Memory: a fresh process for each contestant. Features, labels and prototypes are created, one step
on other tensors loads the code and the permanent buffers of libraries (13 MB for a product), those
tensors are freed, and then one step is taken: the extra memory is the peak resident size during
that step minus the resident size just before. It includes the gradients that the step leaves
behind: those of the prototypes alone are C * D * 4 bytes. ``process_memory.py`` explains how it is
measured.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from functools import partial
from importlib import metadata
from pathlib import Path

import torch
import torch.nn.functional as F
from process_memory import extra_memory, processor

SIZES = [(256, 512, 10_000), (256, 512, 100_000)]
QUICK = [(128, 64, 10_000)]
WARM_UP = (256, 512, 10_000)  # enough for the streamed kernel and the full buffers of a product
SCALE, COSINE_MARGIN, ANGLE = 64.0, 0.35, 0.5
RESULTS = Path(__file__).resolve().parent.parent / "results" / "criterion_cpu.json"


# --------------------------------------------------------------------------------- contestants


def products(n, size, classes):
    features, prototypes = torch.randn(n, size), torch.randn(classes, size)
    gradient = torch.randn(n, classes)

    def step():
        return features @ prototypes.T, gradient @ prototypes, gradient.T @ features

    return step, lambda: None


def training_step(criterion, n, size, classes):
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(n, size, generator=generator, requires_grad=True)
    labels = torch.randint(classes, (n,), generator=generator)

    def step():
        criterion(features, labels).backward()

    def forget():
        features.grad = None
        criterion.zero_grad(set_to_none=True)

    return step, forget


def tammes_cosface(n, size, classes):
    import tammes

    criterion = tammes.CosFace(size, classes, margin=COSINE_MARGIN, scale=SCALE)
    return training_step(criterion, n, size, classes)


def tammes_arcface(n, size, classes):
    import tammes

    criterion = tammes.ArcFace(size, classes, margin=ANGLE, scale=SCALE)
    return training_step(criterion, n, size, classes)


def pml_cosface(n, size, classes):
    from pytorch_metric_learning.losses import CosFaceLoss

    criterion = CosFaceLoss(classes, size, margin=COSINE_MARGIN, scale=SCALE)
    return training_step(criterion, n, size, classes)


def pml_arcface(n, size, classes):
    from pytorch_metric_learning.losses import ArcFaceLoss

    criterion = ArcFaceLoss(classes, size, margin=ANGLE * 180 / torch.pi, scale=SCALE)
    return training_step(criterion, n, size, classes)


class ByHand(torch.nn.Module):
    """Hand-written loss without a library: a margin on the target before a cross entropy."""

    def __init__(self, bend, size, classes):
        super().__init__()
        self.bend = bend
        self.weight = torch.nn.Parameter(torch.randn(classes, size))

    def forward(self, features, labels):
        """Mean loss of a batch."""
        cosine = F.linear(F.normalize(features), F.normalize(self.weight))
        column = labels[:, None]
        target = self.bend(cosine.gather(1, column))
        return F.cross_entropy(SCALE * cosine.scatter(1, column, target), labels)


def eager_cosface(n, size, classes):
    return training_step(ByHand(lambda c: c - COSINE_MARGIN, size, classes), n, size, classes)


def eager_arcface(n, size, classes):
    def bend(cosine):
        return (cosine.clamp(-1 + 1e-6, 1 - 1e-6).acos() + ANGLE).cos()

    return training_step(ByHand(bend, size, classes), n, size, classes)


CONTESTANTS = {
    "bare products": products,
    "Tammes CosFace": tammes_cosface,
    "Tammes ArcFace": tammes_arcface,
    "PML CosFace": pml_cosface,
    "PML ArcFace": pml_arcface,
    "eager CosFace": eager_cosface,
    "eager ArcFace": eager_arcface,
}


# --------------------------------------------------------------------------------- measurement


def set_up(threads):
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    # Silence Tammes (nothing is trained here) and PML (it uses deprecated NumPy functions).
    warnings.simplefilter("ignore")


def seconds(contestants, size, repeat, say):
    """Seconds of every turn of each contestant at one size."""
    ready = {}
    for name, make in contestants.items():
        ready[name] = make(*size)
    turns = {name: [] for name in ready}
    for turn in range(repeat + 1):
        for name, (step, forget) in ready.items():
            forget()
            begin = time.perf_counter()
            step()
            took = time.perf_counter() - begin
            forget()
            if turn:  # the first turn warms up
                turns[name].append(took)
        say(f"turn {turn} of {repeat}")
    return turns


def extra_memory_elsewhere(script, name, size, threads):
    command = [sys.executable, script, "--threads", str(threads)]
    command += ["--memory-of", name, "--size", *map(str, size)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


# -------------------------------------------------------------------------------------- report


def measure(contestants, script, size, repeat, threads, say):
    """A row for each contestant; ``script --memory-of NAME`` prints the memory of one."""
    memory = {}
    for name in contestants:
        memory[name] = extra_memory_elsewhere(script, name, size, threads)
        say(f"memory of {name}")
    turns = seconds(contestants, size, repeat, say)
    rows = {}
    for name in contestants:
        ratios = [a / b for a, b in zip(turns[name], turns["bare products"], strict=True)]
        rows[name] = {
            "seconds": statistics.median(turns[name]),
            "seconds_of_each_turn": turns[name],
            "ratio_to_products": statistics.median(ratios),
            "ratio_of_fastest": min(turns[name]) / min(turns["bare products"]),
            "extra_bytes": memory[name],
        }
    for name, row in rows.items():
        _, _, loss = name.partition(" ")
        if f"PML {loss}" in rows:
            row["share_of_pml_memory"] = row["extra_bytes"] / rows[f"PML {loss}"]["extra_bytes"]
    return rows


def table(size, rows):
    lines = [
        "N, D, C = {:,}, {:,}, {:,}".format(*size),
        f"{'':24} {'ms':>8} {'x products':>11} {'fastest':>8} {'extra MiB':>10} {'of PML':>7}",
    ]
    for name, row in rows.items():
        share = f"{row['share_of_pml_memory']:7.2f}" if "share_of_pml_memory" in row else ""
        milliseconds, extra = 1e3 * row["seconds"], row["extra_bytes"] / 2**20
        lines.append(
            f"{name:24} {milliseconds:8.0f} {row['ratio_to_products']:11.2f} "
            f"{row['ratio_of_fastest']:8.2f} {extra:10.0f} {share}"
        )
    return "\n".join(line.rstrip() for line in lines)


def progress():
    """Return a function that shows the progress on a terminal."""
    return (
        partial(print, end="\x1b[K\r", file=sys.stderr) if sys.stderr.isatty() else lambda _: None
    )


def machine(threads):
    import tammes

    try:
        peer = metadata.version("pytorch-metric-learning")
    except metadata.PackageNotFoundError:
        peer = "not installed"
    return {
        "cpu": processor(),
        "cores": os.cpu_count(),
        "threads": threads,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tammes": tammes.__version__,
        "pytorch_metric_learning": peer,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one small size, 3 turns")
    parser.add_argument("--repeat", type=int, help="turns of each contestant (default 9)")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (default 2)")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    parser.add_argument("--memory-of", choices=CONTESTANTS, help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    set_up(arguments.threads)
    if arguments.memory_of:
        print(json.dumps(extra_memory(CONTESTANTS[arguments.memory_of], arguments.size, WARM_UP)))
        return

    say = progress()
    repeat = arguments.repeat or (3 if arguments.quick else 9)
    found = {
        "command": " ".join(["python", "benchmarks/criterion.py", *sys.argv[1:]]),
        "machine": machine(arguments.threads),
        "load_average_before": os.getloadavg(),
        "turns": repeat,
        "sizes": [],
    }
    for size in QUICK if arguments.quick else SIZES:
        rows = measure(CONTESTANTS, __file__, size, repeat, arguments.threads, say)
        found["sizes"].append({"n": size[0], "d": size[1], "c": size[2], "contestants": rows})
        print(table(size, rows), end="\n\n", flush=True)
    found["load_average_after"] = os.getloadavg()
    print("{cpu}, {threads} threads, torch {torch}".format(**found["machine"]))
    print(
        "load average before and after: {:.2f}, {:.2f}".format(
            found["load_average_before"][0], found["load_average_after"][0]
        )
    )
    if arguments.write:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(found, indent=2) + "\n")
        print(f"written: {RESULTS}")


if __name__ == "__main__":
    main()
