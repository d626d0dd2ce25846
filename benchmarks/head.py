r"""Time one step of a head with very many classes relative to its unavoidable matrix products.

    PYTHONPATH=src:out/peers python benchmarks/head.py --seconds 400 --write results/head_h200.json
    python benchmarks/head.py --sizes "4096,512,1000000;1024,512,1000000"
    python benchmarks/head.py --ten-million      N = 1024, ten million classes, few contestants
    python benchmarks/head.py --table            C = 1e4 ... 1e7 by N = 512 ... 8192, the same few
    python benchmarks/head.py --cpu              (256, 512, 100,000), float32, two threads
    python benchmarks/head.py --quick            small sizes, as a smoke test; also without a GPU

What follows is for the GPU; ``--cpu`` measures like ``criterion.py``. ``out/peers`` holds
third-party wheels for a machine without network access:

    pip install --target out/peers --no-deps --python-version 3.12 --only-binary=:all: \
        "pytorch-metric-learning==2.9.*" liger-kernel cut-cross-entropy

``contestants.py`` defines the contestants and their inputs: the same float32 inputs, bf16
products, forward and backward to features and prototypes.

Time: CUDA events around some steps. The contestants take turns, so that a change of the GPU clock
affects all of them; the median over the turns is reported. Before its turn each gets an empty cache
and one step to fill it. Memory: ``torch.cuda.max_memory_allocated`` of a step minus the memory in
use before it; "beyond" excludes a bf16 copy of the prototypes and their float32 gradient (6 C D
bytes). Losses and gradient norms are recorded too, to show which contestants compute the same.
A contestant that is not installed, runs out of memory or fails is recorded as such.
"""

import argparse
import contextlib
import gc
import importlib.metadata
import json
import logging
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path

import criterion as plain
import torch
from contestants import CONTESTANTS, MARGINS, PRODUCTS, Inputs
from process_memory import extra_memory

SIZES = [(4096, 512, 1_000_000), (1024, 512, 1_000_000)]
TEN_MILLION = (1024, 512, 10_000_000)
TABLE = [(n, 512, c) for c in (10**4, 10**5, 10**6, 10**7) for n in (512, 1024, 2048, 4096, 8192)]
QUICK = [(96, 32, 5_000)]
CPU_SIZE, CPU_QUICK = (256, 512, 100_000), (128, 64, 10_000)
FEW = ("products", "Tammes CosFace")
"""Contestants of the large tables."""

TURN, MOST = 0.1, 20
"""Duration of one turn in seconds, and its largest number of steps."""
SLOW = 1.0
"""Seconds per step above which a contestant has only two turns."""


# --------------------------------------------------------------------------------- measurement


class Contestant:
    """A step, its repetitions per turn, and its measurements."""

    def __init__(self, name, inputs):
        self.inputs, self.turns = inputs, []
        self.row = {"status": "ok"}
        self.step, self.parameters = None, ()
        with self.watched():
            self.step, self.parameters = CONTESTANTS[name](inputs)
            self.look()

    @contextlib.contextmanager
    def watched(self):
        """Record an error and free the memory of the contestant."""
        try:
            yield
        except (ImportError, AttributeError) as error:
            missing = isinstance(error, ImportError) or "has no attribute" in str(error)
            self.row["status"] = f"{'not there' if missing else 'failed'}: {error}"
        except torch.OutOfMemoryError:
            self.row["status"] = "out of memory"
        except Exception as error:
            text = (str(error).strip() or "no message").splitlines()[0]
            self.row["status"] = f"failed: {type(error).__name__}: {text[:300]}"
        if self.row["status"] != "ok":
            self.forget()
            self.step = None

    @property
    def runs(self):
        """Whether the contestant has not failed."""
        return self.step is not None

    def forget(self):
        """Set the gradients to None."""
        for parameter in self.parameters:
            parameter.grad = None

    def look(self):
        """Run the first steps and record their loss, memory and time."""
        heard = Heard()
        logging.getLogger("tammes").addHandler(heard)
        loss = self.step()
        logging.getLogger("tammes").removeHandler(heard)
        row, inputs = self.row, self.inputs
        if heard.lines:
            row["log"] = heard.lines
        if loss is not None:
            row["loss"] = float(loss)
            norms = [float(torch.linalg.vector_norm(p.grad)) for p in self.parameters]
            row["gradient_norms"] = dict(zip(("features", "prototypes"), norms, strict=True))
        del loss
        self.forget()
        free()
        if inputs.device == "cuda":
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            self.step()
            row["extra_bytes"] = torch.cuda.max_memory_allocated() - before
            row["beyond_bytes"] = row["extra_bytes"] - 6 * inputs.c * inputs.d
            self.forget()
        once = seconds(inputs.device, self.step, self.forget, 1)
        self.once, self.steps = once, min(MOST, max(1, round(TURN / once)))

    def turn(self):
        """Run one more turn of steps."""
        with self.watched():
            free()
            self.step()
            self.forget()
            took = seconds(self.inputs.device, self.step, self.forget, self.steps)
            self.turns.append(1e3 * took / self.steps)


class Heard(logging.Handler):
    """Logging handler that keeps the lines."""

    def __init__(self):
        super().__init__(logging.DEBUG)
        self.lines = []

    def emit(self, record):
        """Keep a log line."""
        self.lines.append(record.getMessage())


def free():
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def seconds(device, step, forget, steps):
    """Return the seconds that some steps take."""
    if device != "cuda":
        begin = time.perf_counter()
        for _ in range(steps):
            step()
            forget()
        return time.perf_counter() - begin
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(steps):
        step()
        forget()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


def measure(size, names, repeat, until, deadline, device):
    """Return a row for each contestant at one size.

    Args:
        size: N, D and C.
        names: names of the contestants.
        repeat: turns of each.
        until: clock time at which turns end.
        deadline: clock time after which no contestant starts.
        device: device to run on.
    """
    torch.compiler.reset()
    rows, running = {}, {}
    inputs = Inputs(*size, device)
    for name in names:
        if time.monotonic() > deadline:
            rows[name] = {"status": "not measured: out of time"}
            continue
        free()  # including the memory of a contestant that failed
        contestant = Contestant(name, inputs)
        rows[name] = contestant.row
        if contestant.runs:
            running[name] = contestant
    for turn in range(repeat):
        for contestant in running.values():
            needs = (contestant.steps + 1) * contestant.once
            late = time.monotonic() + needs > until
            if contestant.runs and not late and (turn < 2 or contestant.once < SLOW):
                contestant.turn()
    for name, contestant in running.items():
        # If no turn ran in time, use the first steps.
        rows[name]["milliseconds_of_each_turn"] = contestant.turns or [1e3 * contestant.once]
        if contestant.runs:
            median = statistics.median(rows[name]["milliseconds_of_each_turn"])
            rows[name]["milliseconds"] = median
    for bare in PRODUCTS:
        least = rows.get(bare, {}).get("milliseconds")
        for row in rows.values():
            if least and "milliseconds" in row:
                row[f"times_{bare.replace(',', '').replace(' ', '_')}"] = (
                    row["milliseconds"] / least
                )
    del inputs, running
    free()
    return rows


# -------------------------------------------------------------------------------------- report


def table(size, rows):
    lines = [
        "N, D, C = {:,}, {:,}, {:,}".format(*size),
        f"{'':36} {'ms':>9} {'x bf16':>7} {'x fp32':>7} {'extra GiB':>10} {'beyond':>7}",
    ]
    for name, row in rows.items():
        if "milliseconds" not in row:
            lines.append(f"{name:36} {row['status']}")
            continue
        ratios = [row.get(f"times_products_{kind}_out") for kind in ("bf16", "fp32")]
        cells = [f"{ratio:7.2f}" if ratio else f"{'':7}" for ratio in ratios]
        if "extra_bytes" in row:
            cells.append(f"{row['extra_bytes'] / 2**30:10.2f} {row['beyond_bytes'] / 2**30:7.2f}")
        cells.append("; ".join(row.get("log", [])))
        lines.append(f"{name:36} {row['milliseconds']:9.2f} {' '.join(cells)}".rstrip())
    return "\n".join(lines)


def hardware(device):
    found = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    if device == "cuda":
        found["device_bytes"] = torch.cuda.get_device_properties(0).total_memory
        question = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm", "--format=csv,noheader"]
        with contextlib.suppress(OSError):
            done = subprocess.run(question, capture_output=True, text=True, check=False)
            found["driver_and_clock"] = done.stdout.strip()
    for package in ("triton", "pytorch-metric-learning", "liger-kernel", "cut-cross-entropy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    with contextlib.suppress(ImportError):
        import tammes

        found["tammes"] = tammes.__version__
    return found


def on_device(arguments, found, write):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not arguments.quick:
        raise SystemExit("head.py finds no GPU; --cpu measures on the CPU, --quick tries it out")
    begin = time.monotonic()
    wanted = [part.strip() for part in arguments.only.split(",") if part.strip()]
    every = [n for n in CONTESTANTS if n in PRODUCTS or not wanted or any(w in n for w in wanted)]
    few = [name for name in every if name.startswith(FEW)]
    jobs = [(size, every) for size in sizes_of(arguments)]
    jobs += [(TEN_MILLION, few)] if arguments.ten_million else []
    jobs += [(size, few) for size in TABLE] if arguments.table else []
    found |= {"machine": hardware(device), "turns": arguments.repeat, "sizes": []}
    deadline = begin + arguments.seconds
    for done, (size, names) in enumerate(jobs):
        now = time.monotonic()
        # Divide the remaining time among the remaining sizes by their estimated cost.
        guesses = [guess(*job, arguments.repeat) for job in jobs[done:]]
        until = now + (deadline - now) * guesses[0] / sum(guesses)
        rows = measure(size, names, arguments.repeat, until, deadline, device)
        n, d, c = size
        found["sizes"].append({"n": n, "d": d, "c": c, "contestants": rows})
        found["seconds"] = time.monotonic() - begin
        print(table(size, rows), end="\n\n", flush=True)
        write(found)  # the results so far
    print("{device}, torch {torch}, {0:.0f} s".format(found["seconds"], **found["machine"]))


def guess(size, names, repeat):
    """Estimate the seconds that a size takes."""
    n, d, c = size
    step = 6 * n * d * c / 2e14
    compiling = 20 * sum(name.startswith(("compiled", "cut")) for name in names)
    return compiling + len(names) * (2 + (repeat + 3) * max(2 * step, TURN + step))


def sizes_of(arguments):
    """Return the sizes at which all contestants are compared."""
    if arguments.sizes:
        sizes = [tuple(map(int, part.split(","))) for part in arguments.sizes.split(";") if part]
        if any(len(size) != 3 for size in sizes):
            raise SystemExit('head.py expects --sizes as "N,D,C;N,D,C"')
        return sizes
    if arguments.quick:
        return QUICK
    return [] if arguments.ten_million or arguments.table else SIZES


# ------------------------------------------------------------------------------------- the CPU


def streamed_on_cpu(loss):
    def make(n, d, c):
        import tammes

        criterion = getattr(tammes, loss)(
            d, c, margin=MARGINS[loss], scale=plain.SCALE, implementation="streamed"
        )
        return plain.training_step(criterion, n, d, c)

    return make


ON_CPU = {
    "bare products": plain.products,
    "Tammes CosFace": streamed_on_cpu("CosFace"),
    "Tammes ArcFace": streamed_on_cpu("ArcFace"),
    "PML CosFace": plain.pml_cosface,
    "PML ArcFace": plain.pml_arcface,
}


def on_cpu(arguments, found, write):
    size, threads = CPU_QUICK if arguments.quick else CPU_SIZE, arguments.threads
    found["load_average_before"] = os.getloadavg()
    rows = plain.measure(ON_CPU, __file__, size, arguments.repeat, threads, plain.progress())
    n, d, c = size
    for row in rows.values():
        row["beyond_gradients_bytes"] = row["extra_bytes"] - 4 * d * (n + c)
    found["machine"] = plain.machine(threads)
    found["load_average_after"] = os.getloadavg()
    found["busy"] = max(found["load_average_before"][0], found["load_average_after"][0]) > 2.5
    if found["busy"]:
        found["note"] = (
            "others used the machine: compare the fastest turns (ratio_of_fastest); with several "
            "threads even those wait for each other, most where products are small"
        )
    found |= {"turns": arguments.repeat, "sizes": [{"n": n, "d": d, "c": c, "contestants": rows}]}
    print(plain.table(size, rows))
    for name, row in rows.items():
        print(f"{name:24} beyond gradients {row['beyond_gradients_bytes'] / 1e6:7.0f} MB")
    print(found.get("note", ""))
    write(found)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--sizes", default="", metavar="N,D,C;...", help="sizes at which all are compared")
    add("--ten-million", action="store_true", help="N = 1024, ten million classes")
    add("--table", action="store_true", help="C = 1e4 ... 1e7 by N = 512 ... 8192")
    add("--only", default="", metavar="NAME,...", help="contestants whose names have a part of it")
    add("--repeat", type=int, metavar="K", help="turns (7; 3 with --quick)")
    add("--seconds", type=float, default=400.0, metavar="X", help="begin nothing after (400)")
    add("--write", type=Path, metavar="PATH", help="write JSON")
    add("--cpu", action="store_true", help="on the CPU, in float32, with two threads")
    add("--quick", action="store_true", help="small sizes, to see that it runs")
    add("--memory-of", choices=ON_CPU, help=argparse.SUPPRESS)
    add("--threads", type=int, default=2, metavar="K", help="of the CPU (2)")
    add("--size", type=int, nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.repeat = arguments.repeat or (3 if arguments.quick else 7)
    plain.set_up(arguments.threads)
    if arguments.memory_of:
        print(json.dumps(extra_memory(ON_CPU[arguments.memory_of], arguments.size, plain.WARM_UP)))
        return

    def write(found):
        if arguments.write:
            arguments.write.parent.mkdir(parents=True, exist_ok=True)
            arguments.write.write_text(json.dumps(found, indent=2) + "\n")

    # Do not record the path of the output file, which is specific to the machine.
    given = [f"results/{Path(a).name}" if a == str(arguments.write) else a for a in sys.argv[1:]]
    found = {"command": shlex.join(["python", "benchmarks/head.py", *given])}
    (on_cpu if arguments.cpu else on_device)(arguments, found, write)
    if arguments.write:
        print(f"written: {arguments.write}")


if __name__ == "__main__":
    main()
