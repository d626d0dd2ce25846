r"""Cost of a step: bytes per rank and time, for every implementation of the head.

With N rows and C prototypes on a rank and D numbers in each, a step of a head holds

.. math:: \text{weights} + \text{gradient} + \text{optimizer} + \text{scores} + \text{features},

each :math:`CD` or :math:`NC` or :math:`ND` numbers times a factor. The factors are those of
:mod:`tammes.kernels`, and tests compare them with the memory of a real process. The backbone is not
included, nor the temporaries of the optimizer step, when the scores have been freed.

The time is an estimate: matrix products, passes over memory and messages, each at its own rate, one
after the other.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

from tammes.advise import kernel_costs
from tammes.advise.kernel_costs import Inside
from tammes.advise.workload import OPTIMIZERS, Machine, Workload
from tammes.heads.class_sampling import sample_size

COLLECTIVES = 4
"""Collectives of a sharded step: sizes, labels, features, their gradient; one more per block."""


@dataclass(frozen=True)
class Cost:
    """Cost of one step of a head on each rank.

    Attributes:
        mode: ``"dense"``, ``"streamed"``, ``"fused"``, ``"sharded"`` or ``"sampled"``.
        weights: bytes of the prototypes on a rank.
        gradient: bytes of their gradient.
        optimizer: bytes of the optimizer's state.
        scores: bytes of scores and other temporaries of the call and its backward.
        features: bytes of features and their gradient, including those gathered from other ranks,
            and of the buckets in which gradients are averaged.
        products: seconds of matrix products.
        traffic: seconds of passes over memory.
        exchange: seconds of messages between ranks.
        seconds: estimated sum, at least the overhead of the calls.
        fits: whether the bytes fit on the machine.
        note: additional remark.

    Example:
        >>> dense = plan(Workload(classes=1000, dim=64, batch=256))[0]
        >>> dense.weights == dense.gradient == 1000 * 64 * 4
        True
    """

    mode: str
    weights: int
    gradient: int
    optimizer: int
    scores: int
    features: int
    products: float
    traffic: float
    exchange: float
    seconds: float
    fits: bool
    note: str = ""

    @property
    def work(self) -> float:
        """Estimated seconds of the device, without the overhead of the calls."""
        return self.products + self.traffic + self.exchange

    @property
    def total(self) -> int:
        """Total bytes."""
        return self.weights + self.gradient + self.optimizer + self.scores + self.features

    def to_dict(self) -> dict[str, Any]:
        """Convert to a dictionary of all fields and the total bytes."""
        return {**asdict(self), "total": self.total}


def plan(work: Workload, machine: Machine | None = None) -> tuple[Cost, ...]:
    """Cost of every implementation, on each rank.

    Args:
        work: sizes of the job.
        machine: machine to run on; an H200 by default.

    Returns:
        A :class:`Cost` for each of dense, streamed, fused (on CUDA), sharded and sampled; only for
        dense if the loss needs all scores at once.

    Example:
        >>> costs = plan(Workload(classes=1_000_000, dim=512, batch=4096, gpus=8))
        >>> [(cost.mode, round(cost.total / 2**30, 1)) for cost in costs]
        [('dense', 9.5), ('streamed', 8.6), ('fused', 11.5), ('sharded', 1.7), ('sampled', 0.8)]
    """
    estimate = _Estimate(work, machine or Machine())
    if "rest" in work.reads:
        note = "needs all scores at once"
        return (estimate.replicated("dense", kernel_costs.dense(work), note),)
    ways = {
        "dense": kernel_costs.dense(work),
        "streamed": kernel_costs.streamed(work, work.rows, work.classes),
    }
    if work.fusable:
        ways["fused"] = kernel_costs.fused(work, work.rows, work.classes)
    every = [estimate.replicated(mode, inside) for mode, inside in ways.items()]
    return (*every, estimate.sharded(), estimate.sharded(sampled=True))


class _Estimate:
    """Cost formulas for one job and machine."""

    def __init__(self, work: Workload, machine: Machine) -> None:
        self.work, self.machine = work, machine

    def cost(
        self,
        mode: str,
        inside: Inside,
        *,
        classes: int,
        trained: int,
        features: int,
        exchange: float,
        note: str = "",
    ) -> Cost:
        """Add the costs that all implementations share; ``trained`` classes get a gradient."""
        work, machine = self.work, self.machine
        row = work.numbers * work.stored
        parts = {
            "weights": classes * row,
            "gradient": trained * row,
            "optimizer": OPTIMIZERS[work.optimizer] * classes * row,
            "scores": inside.scores,
            "features": features,
        }
        half = work.half and (mode != "dense" or work.on_gpu)
        products = inside.products / (machine.half_flops if half else machine.flops)
        traffic = inside.passes / machine.bandwidth
        return Cost(
            mode=mode,
            **parts,
            products=products,
            traffic=traffic,
            exchange=exchange,
            seconds=max(products + traffic + exchange, machine.launch * inside.launches),
            fits=sum(parts.values()) <= machine.memory,
            note=note,
        )

    def replicated(self, mode: str, inside: Inside, note: str = "") -> Cost:
        """Cost with all classes on every rank, whose gradients are averaged."""
        work = self.work
        weights = work.classes * work.numbers * work.stored
        others = work.gpus - 1
        return self.cost(
            mode,
            inside,
            classes=work.classes,
            trained=work.classes,
            features=2 * work.rows * work.dim * work.working + (weights if others else 0),
            # An all-reduce sends the gradients twice; the loss is a separate message.
            exchange=exchange(work, self.machine, 2 * weights * others / work.gpus, 2),
            note=note,
        )

    def sharded(self, *, sampled: bool = False) -> Cost:
        """Cost with a shard of the classes on each rank, from which a step may sample."""
        work = self.work
        trained = sample_size(work.batch, work.shard, work.sample_rate) if sampled else work.shard
        way, inside = kernel_costs.shared(work, work.batch, trained)
        note = f"{way} on each rank" if work.gpus > 1 else ""
        if sampled:
            # The sampled rows are copied.
            inside = inside._replace(scores=inside.scores + trained * work.numbers * work.stored)
            note = f"approximate: {trained:,} of {work.shard:,} classes"
        # Features of this rank and, if there are others, of all ranks, with their gradients.
        rows = work.rows + (work.batch if work.gpus > 1 else 0)
        received = sum(messages(work).values())
        return self.cost(
            "sampled" if sampled else "sharded",
            inside,
            classes=work.shard,
            trained=trained,
            features=2 * rows * work.dim * work.working,
            exchange=exchange(work, self.machine, received, COLLECTIVES + inside.blocks),
            note=note,
        )


def messages(work: Workload) -> dict[str, float]:
    """Bytes that a rank of a sharded head receives in a step, by kind.

    Example:
        >>> found = messages(Workload(classes=1_000_000, dim=512, batch=4096, gpus=8))
        >>> {name: int(count) for name, count in found.items()}
        {'features': 7340032, 'gradient': 7340032, 'labels': 57344, 'numbers': 229376}
    """
    share = (work.gpus - 1) / work.gpus
    rows = work.batch * work.dim * work.working * share
    # Labels and their mask as float64; for each field read, one number of every rank.
    numbers = len(work.reads) * work.batch * work.working * (work.gpus - 1)
    return {
        "features": rows,
        "gradient": rows,
        "labels": 16 * work.batch * share,
        "numbers": numbers,
    }


def exchange(work: Workload, machine: Machine, received: float, collectives: int) -> float:
    """Seconds of some collectives, one after the other.

    Args:
        work: job, with the number of ranks.
        machine: machine, with the speed of its links.
        received: total bytes that a rank receives.
        collectives: number of collectives.
    """
    if work.gpus == 1:
        return 0.0
    rate = machine.link if work.gpus <= machine.node else machine.network
    return received / rate + collectives * math.ceil(math.log2(work.gpus)) * machine.latency


def size(count: float) -> str:
    """Format a number of bytes.

    Example:
        >>> size(3 << 20), size(1.5 * 2**30)
        ('3.00 MiB', '1.50 GiB')
    """
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if count >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count / 2**10:.2f} KiB"
