"""Test everything on a GPU machine without internet: tests, training steps, benchmarks.

    make gpu                                              # at most 9 minutes on an H200
    PYTHONPATH=src python scripts/gpu.py --only training  # one part
    PYTHONPATH=src python scripts/gpu.py --failed         # what failed, after a change of tests
    PYTHONPATH=src python scripts/gpu.py --device cpu --only training --losses 3

Tests, benchmarks and training run side by side in separate processes; steps are timed after these
have ended. Failures are listed, the last line is a summary, and results/gpu.json records what ran
on which version of ``src``. Nothing is installed: the available Python is used.
"""

import argparse
import contextlib
import hashlib
import itertools
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "results" / "gpu.json"
PARTS = ("tests", "benchmarks", "training", "steps")
MARKERS = ("gpu", "kernel", "timm", "torch_version")
"""Markers of the tests that run here."""
LIMIT = 540
"""Time limit of a part that runs in a separate process, in seconds."""
SHARES = {"tests": 4, "training": 3}
"""Processes that share a part, each running every so many-th test or loss."""

BENCHMARKS = {
    "cuda": {
        "criterion": "--quick",
        "everyday": "--device cuda --quick",
        "episodes": "--episodes 200 --tuned 20 --their-episodes 20",
        "gallery": "--quick",
        "head": "--quick",
        "maps": "--quick",
        "retrieval": "--device cuda --quick",
        "sampling": "--device cuda --only cost --rates 1.0 0.1",
        "subspace": "--device cuda --repeats 5",
        "train": "--quick --epochs 1",
    },
    "cpu": {"subspace": "--repeats 2 --classes 8 --size 32 --batch 16"},
}
"""A short form of each benchmark."""
PEERS = ("pytorch_metric_learning", "easyfsl", "liger_kernel", "cut_cross_entropy")
"""Third-party packages that a benchmark may need and a machine may lack."""

SUMS = (
    "softmax() + nca()",
    "direct_sum(softmax(), nca())",
    "direct_sum(cosface(), proto())",
    "direct_sum(softmax(), nca(), eps=0.1)",
    "direct_sum(softmax(), nca(), detach=False)",
    "direct_sum(softmax(), nca(), eps=0.1, detach=False)",
    "spectral_sum(softmax(), nca())",
    "spectral_sum(cosface(), 0.5*proto(), p=0.5)",
    "spectral_sum(softmax(), nca(), detach=False)",
)
COMPILED = (
    "softmax()",
    "cosface()",
    "arcface()",
    "softmax() + 0.1*center()",
    "direct_sum(softmax(), nca())",
    "spectral_sum(softmax(), nca())",
)
"""Losses trained with ``compile``."""
WAYS = {
    "cuda": {
        "default": {},
        "graphs off": {"graphs": "off"},
        "bf16": {"precision": "bf16"},
        "fp16": {"precision": "fp16"},
    },
    "cpu": {"default": {}, "bf16": {"precision": "bf16"}},
}
"""Modes in which every loss is trained; fp32 is the default, and fp16 has no graph."""
STEPS = 5
"""Steps of each training: on a GPU three before a graph is captured, and two replays."""


@dataclass
class Part:
    """Result of one part."""

    count: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def tree_digest(folder: Path = ROOT / "src") -> str:
    """Hash the sources: paths and contents of all ``.py`` and ``.yaml`` files."""
    digest = hashlib.sha256()
    files = (path for path in folder.rglob("*") if path.suffix in (".py", ".yaml"))
    for path in sorted(files, key=lambda path: path.relative_to(folder).as_posix()):
        name, content = path.relative_to(folder).as_posix().encode(), path.read_bytes()
        digest.update(b"%d %d " % (len(name), len(content)) + name + content)
    return digest.hexdigest()


# ------------------------------------------------------------- tests and benchmarks: own processes


class Child:
    """Child process whose output goes to a file, killed at the time limit."""

    def __init__(self, command: list[str], log: Path, **variables: str) -> None:
        self.log, self.began = log, time.monotonic()
        known = environment() | variables
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=known
            )

    def wait(self) -> tuple[int | None, str, float]:
        """Return the exit code (None if killed by us), output and seconds."""
        left = max(1.0, LIMIT - (time.monotonic() - self.began))
        try:
            code: int | None = self.process.wait(left)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            code = None
        return code, self.log.read_text(errors="replace"), time.monotonic() - self.began


def environment() -> dict[str, str]:
    """Return our environment with the sources of this checkout first."""
    known = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(known)}


# Installed pytest plugins may be broken on such a machine.
_PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark"]
_PYTEST += ["--durations=10", "--tb=short", "-m", " or ".join(MARKERS)]


def start_tests(logs: Path) -> list[Child]:
    """Start every test with one of the markers, in several processes."""
    marked = re.compile(rf"mark\.({'|'.join(MARKERS)})\b")
    files = [p for p in sorted((ROOT / "tests").rglob("test_*.py")) if marked.search(p.read_text())]
    return [
        Child(
            [*_PYTEST, *map(str, files)],
            logs / f"tests{number}.txt",
            TAMMES_TEST_SHARE=f"{number}/{SHARES['tests']}",
        )
        for number in range(SHARES["tests"])
    ]


def run_failed(known: dict, logs: Path) -> dict:
    """Run the tests again that failed, and return the record with what they say now.

    For a change of tests alone: the sources must be those of the record.
    """
    tests = known["parts"]["tests"]
    names = [line.split(" - ")[0].split(maxsplit=1)[1] for line in tests["failures"]]
    part = end_tests([Child([*_PYTEST, *names], logs / "failed.txt")])
    if part.count < len(names) and not part.failures:
        part.failures.append(f"tests: {part.count} of {len(names)} that failed ran again")
    notes = [*tests["notes"], *(f"again, after a change of tests: {name}" for name in names)]
    again = tests | {"failures": part.failures, "notes": notes}
    parts = known["parts"] | {"tests": again}
    counts = {name: Part(p["count"], failures=p["failures"]) for name, p in parts.items()}
    line = closing_line(counts, known["device"], known["tree"], known["seconds"])
    return known | {"parts": parts, "line": line}


def end_tests(children: list[Child]) -> Part:
    """Wait for the tests and return their result."""
    part, slowest = Part(), []
    for child in children:
        code, output, seconds = child.wait()
        last = output.strip().splitlines()[-1] if output.strip() else ""
        failures = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        if code is None:
            failures.append(f"tests: not done after {LIMIT} s")
        elif code and not failures:
            failures.append(f"tests: pytest ended with {code}: {output[-800:]}")
        if failures:
            print(output[-12000:])
        part.seconds = max(part.seconds, seconds)
        part.count += sum(int(n) for n in re.findall(r"(\d+) (?:passed|failed|error)", last))
        part.failures += failures
        part.notes.append(last)
        slowest += re.findall(r"^\s*([\d.]+)s call +(.*)$", output, re.MULTILINE)
    slowest.sort(key=lambda found: -float(found[0]))
    part.notes += [f"{seconds} s: {name}" for seconds, name in slowest[:10]]
    return part


def start_benchmarks(logs: Path, device: str) -> dict[str, Child]:
    """Start a short form of every benchmark."""
    return {
        name: Child(
            [sys.executable, f"benchmarks/{name}.py", *options.split()], logs / f"{name}.txt"
        )
        for name, options in BENCHMARKS[device].items()
    }


def end_benchmarks(children: dict[str, Child]) -> Part:
    """Wait for the benchmarks and return their result."""
    part = Part()
    for name, child in children.items():
        code, output, seconds = child.wait()
        part.seconds = max(part.seconds, seconds)
        lacking = re.search(r"No module named '(\w+)", output)
        if code and lacking and lacking[1] in PEERS:
            part.notes.append(f"{name}: left out, {lacking[1]} is not installed")
            continue
        part.count += 1
        part.notes.append(f"{name}: {seconds:.0f} s")
        if code != 0:
            part.failures.append(f"benchmark {name} ended with {code}: {output[-1500:]}")
    return part


# ------------------------------------------------------------------------------------- training


def start_training(logs: Path, device: str, losses: int | None) -> list[Child]:
    """Start the training of every loss, in several processes that write a record each."""
    shares = SHARES["training"] if device == "cuda" else 1
    options = ["--device", device, *(["--losses", str(losses)] if losses else [])]
    return [
        Child(
            [
                *(sys.executable, __file__, "--only", "training", *options),
                *("--share", f"{number}/{shares}", "--out", str(logs / f"training{number}.json")),
            ],
            logs / f"training{number}.txt",
        )
        for number in range(shares)
    ]


def end_training(children: list[Child]) -> Part:
    """Wait for the training and return its result."""
    part = Part()
    for child in children:
        code, output, seconds = child.wait()
        part.seconds = max(part.seconds, seconds)
        written = child.log.with_suffix(".json")
        if not written.exists():
            how = f"was not done after {LIMIT} s" if code is None else f"ended with {code}"
            part.failures.append(f"training {how}: {output[-1500:]}")
            continue
        own = json.loads(written.read_text())["parts"]["training"]
        part.count += own["count"]
        part.failures += own["failures"]
        part.notes += own["notes"]
    return part


def every_loss() -> dict[str, str]:
    """Return every term of the tests' catalogue and some sums as expressions for 10 classes."""
    sys.path.insert(0, str(ROOT / "tests"))
    import catalogue

    texts = {name: repr(term) for name, term in catalogue.TERMS.items()}
    for name in catalogue.PROTOTYPE_TERMS:
        # Alone it would give the network no gradient.
        texts[name] = f"softmax() + 0.1*{texts[name]}"
    texts["cosface_per_class"] = f"cosface(margin={[0.05 * c for c in range(10)]})"
    for name in ("ldam", "logit_adjustment", "vs_softmax"):
        texts[name] = f"{name}(counts={[60 - 5 * c for c in range(10)]})"
    return texts | {text: text for text in SUMS}


class Watched:
    """Hook into training that records the step, the initial weights and the messages."""

    def __init__(self) -> None:
        from tammes.lab.training import loop as module
        from tammes.lab.training.progress import Progress

        watched = self

        class Step(module.Step):
            def __init__(self, *arguments: Any, **options: Any) -> None:
                super().__init__(*arguments, **options)
                watched.step = self
                watched.before = [p.detach().clone() for p in self.model.parameters()]

        self.module, self.plain, module.Step = module, module.Step, Step
        self.progress, self.messages = Progress(), []
        self.progress.say = lambda text: self.messages.append(text)

    def close(self) -> None:
        """Restore the original step class."""
        self.module.Step = self.plain


def train_each(
    device: str, losses: int | None, say: Callable[[str], None], share: tuple[int, int] = (0, 1)
) -> Part:
    """Train a few steps of every loss in every mode, or one share of these trainings."""
    part, began, watched = Part(), time.monotonic(), Watched()
    texts = dict(list(every_loss().items())[-losses:] if losses else every_loss())
    jobs = [
        (name, text, way, changes)
        for way, changes in WAYS[device].items()
        for name, text in texts.items()
    ]
    if device == "cuda":
        jobs += [(text, text, "compile", {"compile": True}) for text in COMPILED]
    jobs = jobs[share[0] :: share[1]]
    by_way = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("TAMMES_CACHE", f"{folder}/cache")
        for number, (name, text, way, changes) in enumerate(jobs):
            since = time.monotonic()
            try:
                note = _train_one(watched, text, changes, device, Path(folder) / str(number))
            except Exception as error:
                note = None
                where = traceback.extract_tb(error.__traceback__)[-1]
                reason = f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"
                at = f"{Path(where.filename).name}:{where.lineno}"
                part.failures.append(f"training {name}, {way}: {reason} at {at}")
                say(part.failures[-1])
            if note:
                part.notes.append(f"{name}, {way}: {note}")
            by_way[way] = by_way.get(way, 0.0) + time.monotonic() - since
    watched.close()
    part.notes += [f"{way}: {seconds:.0f} s" for way, seconds in by_way.items()]
    part.count, part.seconds = len(jobs), time.monotonic() - began
    return part


def _train_one(watched: Watched, text: str, changes: dict, device: str, folder: Path) -> str:
    """Train one loss and check the result; return a note, if any."""
    import torch

    from tammes.lab.config.schema import Config

    config = Config(
        data="digits", loss=text, backbone="mnist_cnn(width=0.25)", batch_size=100,
        limit=100 * STEPS, epochs=1, lr=0.01, accelerator=device, **changes,
    )  # fmt: skip
    watched.messages.clear()
    run = watched.module.train(config, folder, progress=watched.progress)
    (row,) = run.metrics
    if row["step"] != STEPS or not all(math.isfinite(v) for v in row["train"].values()):
        raise AssertionError(f"{row['step']} steps, {row['train']}")
    after = list(watched.step.model.parameters())
    if not any(not torch.equal(p, old) for p, old in zip(after, watched.before, strict=True)):
        raise AssertionError("no weight has moved")
    without = [line for line in watched.messages if "CUDA graph cannot record" in line]
    expected = device == "cuda" and config.graphs == "auto" and config.precision != "fp16"
    if expected and watched.step.recording is None and len(without) != 1:
        raise AssertionError(f"neither a graph nor one sentence on why: {watched.messages}")
    if without and run.environment.get("graphs") != without[0]:
        raise AssertionError("the record does not say that there was no graph")
    return without[0] if without else ""


# ------------------------------------------------------------------------------ the time of a step

TIMED = {
    "plain sum": "softmax() + nca()",
    "direct sum": "direct_sum(softmax(), nca())",
    "spectral sum": "spectral_sum(softmax(), nca())",
}


def time_steps(device: str) -> tuple[Part, dict]:
    """Time a default step: ResNet-12, 512 images of 32 pixels in 64 classes."""
    part, began, found = Part(), time.monotonic(), {}
    small = device == "cpu"
    for precision in ("fp32",) if small else ("fp32", "bf16"):
        times = {}
        for name, loss in TIMED.items():
            try:
                times[name] = _time_step(loss, precision, device, small)
            except Exception as error:
                part.failures.append(f"steps {name}, {precision}: {type(error).__name__}: {error}")
        part.count += len(TIMED)
        plain = times.get("plain sum", {}).get("milliseconds")
        for each in times.values():
            each["of_plain"] = plain and round(each["milliseconds"] / plain, 3)
        found[precision] = times
        part.notes += [f"{precision} {name}: {each}" for name, each in times.items()]
    part.seconds = time.monotonic() - began
    return part, found


def _time_step(loss: str, precision: str, device: str, small: bool) -> dict:
    import torch

    from tammes.lab.config.schema import Config
    from tammes.lab.data import Images
    from tammes.lab.training import loop as module
    from tammes.lab.training.fabric import launch
    from tammes.lab.training.progress import Progress

    rows, side, classes, repeats = (16, 16, 4, 4) if small else (512, 32, 64, 100)
    torch.manual_seed(0)
    labels = torch.arange(rows) % classes
    images = Images(
        labels=labels,
        index=torch.arange(rows),
        classes=tuple(map(str, range(classes))),
        shape=(3, side, side),
        pixels=torch.randint(256, (rows, 3, side, side), dtype=torch.uint8),
    )
    config = Config(
        data="made", loss=loss, backbone="resnet12(width=0.0625)" if small else "resnet12",
        batch_size=rows, precision=precision, accelerator=device, lr=0.01,
    )  # fmt: skip
    plain, module.prepare_data = module.prepare_data, lambda *_: (images, None, images)
    try:
        with tempfile.TemporaryDirectory() as folder:
            work = module._set_up(launch(config, Path(folder)), config, Path(folder), Progress())
    finally:
        module.prepare_data = plain
    work.model.train()
    (batch,) = work.loader([torch.arange(rows)])
    marks = []
    for number in range(repeats + 11):
        work.step(batch, epoch=0, step=number)
        if small:
            marks.append(time.perf_counter())
        else:
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()
    if not small:
        torch.cuda.synchronize()
    # The first steps precede the graph or warm it up.
    pairs = itertools.pairwise(marks[10:])
    times = [1e3 * (b - a) if small else a.elapsed_time(b) for a, b in pairs]
    if work.step.sums.first_nonfinite() is not None:
        raise AssertionError("the loss was not finite")
    graphs = 0 if work.step.recording is None else len(work.step.recording.pieces) // 2 + 1
    return {
        "milliseconds": round(statistics.median(times), 3),
        "tenth": round(sorted(times)[len(times) // 10], 3),
        "steps": len(times),
        "graphs": graphs,
    }


# ------------------------------------------------------------------------------------------- all


def closing_line(parts: dict[str, Part], device: str, digest: str, seconds: float) -> str:
    """Summarize all parts in one line."""
    nouns = {"tests": "test", "training": "training", "benchmarks": "benchmark", "steps": "time"}
    counts = [
        f"{parts[name].count} {noun}{'' if parts[name].count == 1 else 's'}"
        for name, noun in nouns.items()
        if name in parts
    ]
    failed = sum(len(part.failures) for part in parts.values())
    how = f"{failed} failed" if failed else "all passed"
    minutes, rest = divmod(round(seconds), 60)
    where = f"on {device} (tree {digest[:8]}), {minutes} min {rest} s"
    return f"gpu: {', '.join(counts)}: {how} {where}"


def record(parts: dict[str, Part], device: str, digest: str, seconds: float, times: dict) -> dict:
    """Return the contents of results/gpu.json."""
    versions = {"python": platform.python_version()}
    for name in ("torch", "triton", "lightning"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "line": closing_line(parts, device, digest, seconds),
        "tree": digest,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device,
        "versions": versions,
        "command": " ".join(["python", "scripts/gpu.py", *sys.argv[1:]]),
        "seconds": round(seconds, 1),
        "parts": {
            name: {
                "count": part.count,
                "seconds": round(part.seconds, 1),
                "failures": part.failures,
                "notes": part.notes,
            }
            for name, part in parts.items()
        },
        "step_milliseconds": times,
    }


def merged(known: dict, found: dict) -> dict:
    """Merge a record of some parts with the record of parts that ran before."""
    parts = known["parts"] | found["parts"]
    seconds = sum(part["seconds"] for part in parts.values())
    line = closing_line(
        {name: Part(part["count"], failures=part["failures"]) for name, part in parts.items()},
        found["device"],
        found["tree"],
        seconds,
    )
    times = found["step_milliseconds"] or known["step_milliseconds"]
    return found | {"parts": parts, "line": line, "step_milliseconds": times, "seconds": seconds}


def main() -> int:
    """Run the selected parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=PARTS, action="append", help="a part; may be repeated")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--losses", type=int, help="train only the last so many losses")
    parser.add_argument("--share", metavar="I/N", help="train every N-th loss, in this process")
    parser.add_argument("--failed", action="store_true", help="tests that failed in the record")
    parser.add_argument("--out", type=Path, help="record (results/gpu.json; nothing on a CPU)")
    given = parser.parse_args()
    began, digest, only = time.monotonic(), tree_digest(), given.only or PARTS
    logs = Path(tempfile.mkdtemp(prefix="gpu-"))
    if given.failed:
        known = json.loads((given.out or RECORD).read_text())
        if known["tree"] != digest:
            parser.error("src has changed since the record: run everything again")
        found = run_failed(known, logs)
        (given.out or RECORD).write_text(json.dumps(found, indent=2) + "\n")
        print(*found["parts"]["tests"]["failures"], found["line"], sep="\n")
        return int(bool(found["parts"]["tests"]["failures"]))
    import torch

    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device; --device cpu tries the script itself")
    tests = start_tests(logs) if "tests" in only else None
    benchmarks = start_benchmarks(logs, given.device) if "benchmarks" in only else {}
    training = None
    if "training" in only and not given.share:
        training = start_training(logs, given.device, given.losses)
    parts: dict[str, Part] = {}
    times: dict = {}

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:5.0f} s] {text}", flush=True)

    def ended(name: str, part: Part) -> None:
        parts[name] = part
        say(f"{name}: {part.count} in {part.seconds:.0f} s, {len(part.failures)} failed")
        for note in part.notes:
            print(f"          {note}", flush=True)

    name = torch.cuda.get_device_name() if given.device == "cuda" else "CPU"
    if given.share:
        number, shares = map(int, given.share.split("/"))
        ended("training", train_each(given.device, given.losses, say, (number, shares)))
    if training is not None:
        ended("training", end_training(training))
    if benchmarks:
        ended("benchmarks", end_benchmarks(benchmarks))
    if tests is not None:
        ended("tests", end_tests(tests))
    if "steps" in only:
        part, times = time_steps(given.device)
        ended("steps", part)
    seconds = time.monotonic() - began
    found = record(parts, name, digest, seconds, times)
    out = given.out or (RECORD if given.device == "cuda" else None)
    if out is not None:
        with contextlib.suppress(OSError, ValueError):
            known = json.loads(out.read_text())
            if known["tree"] == digest and given.only:
                # The other parts ran on the same sources.
                found = merged(known, found)
        out.write_text(json.dumps(found, indent=2) + "\n")
    for part in parts.values():
        for failure in part.failures:
            print(failure)
    print(found["line"])
    return int(any(part.failures for part in parts.values()))


if __name__ == "__main__":
    sys.exit(main())
