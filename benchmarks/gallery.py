"""Time and memory of a gallery of a million identities.

    python benchmarks/gallery.py                         a million identities, two CPU threads
    python benchmarks/gallery.py --write results/gallery_cpu.json
    python benchmarks/gallery.py --only many --write results/gallery_cpu.json
                                                         one part; the others in the file are kept
    python benchmarks/gallery.py --quick                 small sizes, as a smoke test

One query: ``Gallery.identify`` with the five best identities next to ``rows @ query`` with the same
rows in one tensor, in turns. Many queries: slices of 512, each identified and multiplied in turns;
the bare product writes blocks of scores into memory that is used again, and of several shapes of
blocks the one that is fastest on the first slice is taken. Ratios are of medians of the turns for
one query, and of sums over the slices for many, on the wall and of the processor.

Memory is the peak of a fresh process (``process_memory.py``), Python and torch included, that
enrols blocks of embeddings, saves the gallery, drops it and loads it.

Approximate: time and recall of FAISS and usearch, where installed, on fewer identities; a query is
a template with noise.
"""

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from process_memory import highest, processor, reset_highest

import tammes

SIZES = {"identities": 1_000_000, "dimension": 512, "queries": 10_000, "approximate": 20_000}
QUICK = {"identities": 3_000, "dimension": 32, "queries": 700, "approximate": 500}
PARTS = ("memory", "one", "many", "approximate")
SLICE, TOP, BLOCK = 512, 5, 65_536
SHAPES = ((512, 2_048), (512, 8_192), (512, 65_536), (256, 8_192))
"""Queries and rows of the blocks that the bare product tries."""


def embeddings(first, last, dimension):
    """Return random embeddings of a range of identities, the same in every process."""
    generator = torch.Generator().manual_seed(first)
    return torch.randn(last - first, dimension, generator=generator)


def names(first, last):
    return [f"identity-{number:07d}" for number in range(first, last)]


def filled(count, dimension):
    """Enrol identities by blocks."""
    gallery = tammes.Gallery()
    for first in range(0, count, BLOCK):
        last = min(first + BLOCK, count)
        gallery.enrol(embeddings(first, last, dimension), names(first, last))
    return gallery


def one_tensor(count, dimension):
    """Return the rows of the gallery in one tensor."""
    rows = torch.empty(count, dimension)
    for first in range(0, count, BLOCK):
        block = embeddings(first, min(first + BLOCK, count), dimension)
        rows[first : first + BLOCK] = torch.nn.functional.normalize(block)
    return rows


def timed(work):
    began, processor_began = time.perf_counter(), time.process_time()
    result = work()
    return result, time.perf_counter() - began, time.process_time() - processor_began


class Turns:
    """Seconds of the turns of identifying and of the bare product."""

    def __init__(self):
        self.seconds = {"identify": [], "product": []}
        self.processor_seconds = {"identify": [], "product": []}

    def take(self, name, work):
        """Do a turn and return its result."""
        result, seconds, processor_seconds = timed(work)
        self.seconds[name].append(seconds)
        self.processor_seconds[name].append(processor_seconds)
        return result

    def report(self, summary):
        """Summarise the turns: seconds, their ratio, and all of them."""
        found = {}
        for kind in ("seconds", "processor_seconds"):
            turns = getattr(self, kind)
            numbers = {name: summary(values) for name, values in turns.items()}
            found[kind] = numbers | {"ratio": numbers["identify"] / numbers["product"]}
            found[f"{kind}_of_each_turn"] = turns
        pairs = zip(self.seconds["identify"], self.seconds["product"], strict=True)
        found["median_ratio_of_turns"] = statistics.median(a / b for a, b in pairs)
        return found


# ----------------------------------------------------------------------------------- searching


def one_query(gallery, rows, repeat):
    query = torch.randn(rows.shape[1], generator=torch.Generator().manual_seed(1))
    unit = query / query.norm()
    turns = Turns()
    for turn in range(repeat + 1):
        scores = turns.take("product", lambda: rows @ unit)
        found = turns.take("identify", lambda: gallery.identify(query, TOP))
        if not turn:
            # The first turn reads the memory for the first time.
            turns = Turns()
    best = scores.topk(TOP).values
    torch.testing.assert_close(found.scores[0], best, atol=1e-5, rtol=0)
    return turns.report(statistics.median)


def product(query, rows, shape):
    """Multiply by blocks, without keeping the scores."""
    height, width = shape
    memory = torch.empty(height * width)
    for part in query.split(height):
        for block in rows.split(width):
            scores = memory[: len(part) * len(block)].view(len(part), len(block))
            torch.mm(part, block.T, out=scores)


def many_queries(gallery, rows, count):
    generator = torch.Generator().manual_seed(2)
    query = torch.nn.functional.normalize(torch.randn(count, rows.shape[1], generator=generator))
    first = query[:SLICE]
    tried = {shape: timed(lambda shape=shape: product(first, rows, shape))[1] for shape in SHAPES}
    shape = min(tried, key=tried.get)
    print(f"bare product: blocks of {shape} of {tried}", flush=True)
    turns = Turns()
    for number, part in enumerate(query.split(SLICE)):
        turns.take("product", lambda part=part: product(part, rows, shape))
        found = turns.take("identify", lambda part=part: gallery.identify(part, TOP))
        print(f"slice {number}: {turns.seconds['identify'][-1]:.1f} s", flush=True)
    best = (part[:4] @ rows.T).topk(TOP).values
    torch.testing.assert_close(found.scores[:4], best, atol=1e-5, rtol=0)
    shapes = {"bare_product_block": shape, "seconds_of_shapes": {str(s): tried[s] for s in tried}}
    return shapes | turns.report(sum)


def approximate(count, dimension):
    gallery = filled(count, dimension)
    noise = torch.randn(256, dimension, generator=torch.Generator().manual_seed(3))
    queries = embeddings(0, min(BLOCK, count), dimension)[:256] + noise
    rows = {}
    for engine in ("faiss", "usearch"):
        try:
            recall, seconds, _ = timed(lambda engine=engine: gallery.search_with(engine, queries))
        except ImportError as error:
            print(f"{engine}: {error}")
            continue
        searched = timed(lambda: gallery.identify(queries, 10))[1]
        gallery.search_with("exact", queries)
        exact = timed(lambda: gallery.identify(queries, 10))[1]
        rows[engine] = {
            "recall_at_10": recall.recall,
            "seconds_to_build_and_measure": seconds,
            "seconds": searched,
            "seconds_of_the_exact_search": exact,
        }
    return {"identities": count, "queries": len(queries), "noise": 1.0, "engines": rows}


# -------------------------------------------------------------------------------------- memory


def phases(count, dimension):
    """Peak memory of enrolling, saving and loading, in this process, in bytes."""
    peaks, seconds = {}, {}

    def phase(name, work):
        reset_highest()
        result, seconds[name], _ = timed(work)
        peaks[name] = highest()
        return result

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gallery.safetensors"
        gallery = phase("enrol", lambda: filled(count, dimension))
        phase("save", partial(gallery.save, path))
        written = path.stat().st_size
        del gallery
        loaded = phase("load", lambda: tammes.Gallery.load(path))
        assert len(loaded) == count
    return {"peak_bytes": peaks, "seconds": seconds, "file_bytes": written}


def measured_memory(arguments):
    command = [sys.executable, __file__, "--memory", "--threads", str(arguments.threads)]
    command += ["--quick"] if arguments.quick else []
    answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = json.loads(answer.splitlines()[-1])
    return found | {"peak_gib": max(found["peak_bytes"].values()) / 2**30}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--threads", type=int, default=2)
    add("--repeat", type=int, default=15, help="turns of one query (15)")
    add("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts (all)")
    add("--queries", type=int, help="number of queries (10,000)")
    add("--quick", action="store_true", help="small sizes, to see that it runs")
    add("--write", type=Path, metavar="PATH", help="write JSON")
    add("--memory", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    size = dict(QUICK if arguments.quick else SIZES)
    size["queries"] = arguments.queries or size["queries"]
    count, dimension = size["identities"], size["dimension"]
    if arguments.memory:
        print(json.dumps(phases(count, dimension)))
        return

    given = [f"results/{Path(a).name}" if a == str(arguments.write) else a for a in sys.argv[1:]]
    command = shlex.join(["python", "benchmarks/gallery.py", *given])
    machine = {
        "device": processor(),
        "cores": os.cpu_count(),
        "threads": arguments.threads,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tammes": tammes.__version__,
    }
    found = {}
    if arguments.write and arguments.write.exists():
        found = json.loads(arguments.write.read_text())

    def part(name, work):
        before = os.getloadavg()
        result = work()
        found[name] = {
            "command": command,
            "machine": machine,
            "size": size,
            "load_average": [before, os.getloadavg()],
            **result,
        }
        print(json.dumps({name: found[name]}, indent=2), flush=True)
        if arguments.write:
            arguments.write.parent.mkdir(parents=True, exist_ok=True)
            arguments.write.write_text(json.dumps(found, indent=2) + "\n")

    if "memory" in arguments.only:
        part("memory", lambda: measured_memory(arguments))
    if "one" in arguments.only or "many" in arguments.only:
        gallery, rows = filled(count, dimension), one_tensor(count, dimension)
        if "one" in arguments.only:
            part("one_query", lambda: one_query(gallery, rows, arguments.repeat))
        if "many" in arguments.only:
            part("many_queries", lambda: many_queries(gallery, rows, size["queries"]))
    if "approximate" in arguments.only:
        part("approximate", lambda: approximate(size["approximate"], dimension))


if __name__ == "__main__":
    main()
