"""Estimated memory and time of a sharded head, by number of classes and ranks.

    python scripts/scaling_table.py                              the table of docs/scaling.md
    python scripts/scaling_table.py --classes 1000000 --gpus 8   the arithmetic of one case

All numbers are from :func:`tammes.advise.memory_plan.plan` for :class:`tammes.ShardedHead`.
"""

import argparse
from collections.abc import Sequence

from tammes.advise import kernel_costs
from tammes.advise.memory_plan import COLLECTIVES, Cost, exchange, messages, plan, size
from tammes.advise.text import table
from tammes.advise.workload import OPTIMIZERS, Machine, Workload

CLASSES = (1_000_000, 10_000_000, 100_000_000)
GPUS = (1, 8, 64)
ROWS = 128
"""Examples per rank."""
_HEAD = (
    *("classes", "GPUs", "batch", "classes on a rank"),
    *("weights, gradient, momentum", "scratch", "features", "GiB in all"),
    *("products", "passes", "messages", "ms in all", "sampled: GiB", "ms"),
)


def workload(classes: int, gpus: int, *, rows: int = ROWS, dim: int = 512) -> Workload:
    """Return the workload of the table: CosFace, bfloat16 products, SGD with momentum."""
    return Workload(classes, dim, rows * gpus, gpus=gpus, autocast="bfloat16")


def by_mode(work: Workload, machine: Machine) -> dict[str, Cost]:
    """Return the costs by mode."""
    return {cost.mode: cost for cost in plan(work, machine)}


def scaling_table(
    classes: Sequence[int] = CLASSES,
    gpus: Sequence[int] = GPUS,
    *,
    rows: int = ROWS,
    dim: int = 512,
    machine: Machine | None = None,
) -> str:
    """Return memory and time of a sharded step as a Markdown table.

    Args:
        classes: numbers of classes.
        gpus: numbers of ranks.
        rows: examples per rank.
        dim: dimension of the features.
        machine: machine of one rank; by default an H200.

    Example:
        >>> print(scaling_table([1_000_000], [8]).splitlines()[2][:43])
        | 1,000,000 | 8 | 1,024 | 125,000 | 0.72 |
    """
    machine = machine or Machine()
    lines = [_line(_HEAD), _line(["---:"] * len(_HEAD))]
    for count in classes:
        for ranks in gpus:
            work = workload(count, ranks, rows=rows, dim=dim)
            lines.append(_line(_cells(work, machine)))
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(work: Workload, machine: Machine) -> list[str]:
    every = by_mode(work, machine)
    cost, sampled = every["sharded"], every["sampled"]
    kept = cost.weights + cost.gradient + cost.optimizer
    memory = [_gib(part) for part in (kept, cost.scores, cost.features, cost.total)]
    times = [_ms(part) for part in (cost.products, cost.traffic, cost.exchange, cost.seconds)]
    if not cost.fits:
        memory[-1], times = f"{memory[-1]}: too much", ["–"] * 4
    few = [_gib(sampled.total), _ms(sampled.seconds)] if sampled.fits else ["–"] * 2
    counts = [f"{n:,}" for n in (work.classes, work.gpus, work.batch, work.shard)]
    return [*counts, *memory, *times, *few]


def _gib(count: float) -> str:
    gib = count / 2**30
    return f"{gib:.2f}" if gib < 10 else f"{gib:.1f}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}" if seconds < 0.01 else f"{seconds * 1e3:.1f}"


def arithmetic(work: Workload, machine: Machine | None = None) -> str:
    """Write out the arithmetic behind one row of the table.

    Example:
        >>> print(arithmetic(workload(1_000_000, 8)).splitlines()[2])
          weights    125,000 x 512 x 4 B                                  244.14 MiB
    """
    machine = machine or Machine()
    cost = by_mode(work, machine)["sharded"]
    way, inside = kernel_costs.shared(work, work.batch, work.shard)
    copies = OPTIMIZERS[work.optimizer]
    row = f"{work.shard:,} x {work.dim} x {work.stored} B"
    words = f"{work.batch:,} x {work.dim} x {work.working} B"
    flops = machine.half_flops if work.half else machine.flops
    factor = inside.products // (work.batch * work.shard * work.dim)
    product = f"{factor} x {work.batch:,} x {work.shard:,} x {work.dim} at {flops:g} a second"
    moved = f"{size(inside.passes)} at {machine.bandwidth:g} B a second"
    rows = [
        ["weights", row, size(cost.weights)],
        ["gradient", row, size(cost.gradient)],
        ["optimizer", f"{copies} x the weights", size(cost.optimizer)],
        ["scratch", _scratch(work, way, inside.blocks), size(cost.scores)],
        ["features", f"own and gathered, each with its gradient: 2 x {words}", size(cost.features)],
        ["memory", f"of {size(machine.memory)}", size(cost.total)],
        ["products", product, _exact(cost.products)],
        ["passes", moved, _exact(cost.traffic)],
        *(_messages(work, machine, cost, inside.blocks) if work.gpus > 1 else []),
        ["time", f"at least {machine.launch * 1e3:g} ms of calls", _exact(cost.seconds)],
    ]
    lines = [
        f"{work.classes:,} classes on {work.gpus} ranks, {work.batch:,} examples a step",
        f"each rank: {work.shard:,} classes, {work.rows:,} examples, {way}",
        *table(rows, right=frozenset({2})),
    ]
    return "\n".join(lines)


def _scratch(work: Workload, way: str, blocks: int) -> str:
    if way != "fused":
        return f"{blocks} x a block of scores, and keys beside it"
    height, number = -(-work.batch // blocks), 2 if work.half else work.working
    sizes = f"{work.shard:,} x ({work.dim} + {height:,}) x {number} B"
    return f"keys, exponentials of {height:,} rows, {blocks} x: {sizes}"


def _messages(work: Workload, machine: Machine, cost: Cost, blocks: int) -> list[list[str]]:
    rate = machine.link if work.gpus <= machine.node else machine.network
    sent, wait = messages(work), exchange(work, machine, 0.0, 1)
    rows = [
        [f"{name}, sent", f"{size(count)} at {rate:g} B a second", _exact(count / rate)]
        for name, count in sent.items()
    ]
    calls = COLLECTIVES + blocks
    rows.append(["waits", f"{calls} collectives of {wait * 1e6:.0f} us", _exact(calls * wait)])
    # Keys depend on the prototypes only, and their gradient does not need that of the features.
    hidden = (sent["features"] + sent["gradient"]) / rate + 2 * wait
    share = hidden / (cost.products + cost.traffic + cost.exchange)
    saved = f"at most, by sending features and gradient meanwhile: {share:.1%}"
    return [*rows, ["(overlap)", saved, f"({_exact(hidden)})"]]


def _exact(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, or the arithmetic of one case."""
    parser = argparse.ArgumentParser(prog="python scripts/scaling_table.py")
    parser.add_argument(
        "--classes", type=int, help="print the arithmetic for this number of classes"
    )
    parser.add_argument(
        "--gpus", type=int, default=8, help="number of ranks in that case (%(default)s)"
    )
    parser.add_argument("--rows", type=int, default=ROWS, help="examples per rank (%(default)s)")
    parser.add_argument(
        "--dim", type=int, default=512, help="dimension of the features (%(default)s)"
    )
    given = parser.parse_args(arguments)
    if given.classes is None:
        print(scaling_table(rows=given.rows, dim=given.dim))
    else:
        print(arithmetic(workload(given.classes, given.gpus, rows=given.rows, dim=given.dim)))


if __name__ == "__main__":
    main()
