r"""What a step costs: bytes per rank and time, for every way to get from features to a loss.

With N rows and C classes on a rank and D numbers in a prototype, a step of a head holds

.. math:: \text{weights} + \text{gradient} + \text{optimizer} + \text{scores} + \text{features},

each :math:`CD` or :math:`NC` or :math:`ND` numbers times a factor. The factors are those of
:mod:`tammes.kernels`, and tests compare them with what a process really takes. The backbone is not
counted, nor the temporaries of the optimizer's own step, which come when the scores are gone.

The time is an estimate: matrix products at a given rate, passes over memory at another and
messages at a third, one after the other.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

from tammes.advise import kernel_costs
from tammes.advise.kernel_costs import Inside
from tammes.advise.workload import OPTIMIZERS, Machine, Workload
from tammes.heads.class_sampling import sample_size

COLLECTIVES = 4
"""Of a sharded step: sizes, labels, features and their gradient; and one for each block of rows."""


@dataclass(frozen=True)
class Cost:
    """What one step of a head takes on each rank.

    Attributes:
        mode: ``"dense"``, ``"streamed"``, ``"fused"``, ``"sharded"`` or ``"sampled"``.
        weights: bytes of the prototypes on a rank.
        gradient: bytes of their gradient.
        optimizer: bytes of the optimizer's state.
        scores: bytes of scores and other temporaries of the call and its backward.
        features: bytes of features and their gradient, those gathered from other ranks included,
            and of the buckets in which gradients are averaged.
        products: seconds of matrix products.
        traffic: seconds of passes over memory.
        exchange: seconds of messages between ranks.
        seconds: the sum, but never less than the calls themselves take; an estimate.
        fits: whether the bytes fit on the machine.
        note: what else to know.

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
    def total(self) -> int:
        """All bytes."""
        return self.weights + self.gradient + self.optimizer + self.scores + self.features

    def to_dict(self) -> dict[str, Any]:
        """Every field and the sum of the bytes."""
        return {**asdict(self), "total": self.total}


def plan(work: Workload, machine: Machine | None = None) -> tuple[Cost, ...]:
    """Cost of every way to compute a loss, on each rank.

    Args:
        work: what is to be computed.
        machine: where; an H200 by default.

    Returns:
        A :class:`Cost` for each of dense, streamed, fused (on CUDA), sharded and sampled; only for
        dense where the loss needs all scores at once.

    Example:
        >>> costs = plan(Workload(classes=1_000_000, dim=512, batch=4096, gpus=8))
        >>> [(cost.mode, round(cost.total / 2**30, 1)) for cost in costs]
        [('dense', 15.3), ('streamed', 8.8), ('fused', 11.5), ('sharded', 2.0), ('sampled', 0.8)]
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
    return (*every, estimate.sharded(), estimate.sampled())


class _Estimate:
    """The formulas, with the sizes they share."""

    def __init__(self, work: Workload, machine: Machine) -> None:
        self.work, self.machine = work, machine

    def cost(
        self,
        mode: str,
        inside: Inside,
        *,
        classes: int,
        kept: int,
        features: int,
        exchange: float,
        note: str = "",
    ) -> Cost:
        """Put together what is common to all ways.

        Args:
            mode: which it is.
            inside: what its kernel does.
            classes: of the rank.
            kept: how many of them get a gradient.
            features: bytes.
            exchange: seconds.
            note: what else to know.
        """
        work, machine = self.work, self.machine
        row = work.dim * work.stored
        parts = {
            "weights": classes * row,
            "gradient": kept * row,
            "optimizer": OPTIMIZERS[work.optimizer] * classes * row,
            "scores": inside.scores,
            "features": features,
        }
        half = work.half and mode != "dense"
        products = inside.products / (machine.half_flops if half else machine.flops)
        traffic = inside.passes / machine.bandwidth
        return Cost(
            mode=mode,
            **parts,
            products=products,
            traffic=traffic,
            exchange=exchange,
            seconds=max(products + traffic + exchange, machine.launch),
            fits=sum(parts.values()) <= machine.memory,
            note=note,
        )

    def replicated(self, mode: str, inside: Inside, note: str = "") -> Cost:
        """All classes on every rank; gradients are averaged between them."""
        work = self.work
        weights = work.classes * work.dim * work.stored
        others = work.gpus - 1
        return self.cost(
            mode,
            inside,
            classes=work.classes,
            kept=work.classes,
            features=2 * work.rows * work.dim * work.working + (weights if others else 0),
            # The mean of the gradients goes round in two halves; the loss is told beside it.
            exchange=exchange(work, self.machine, 2 * weights * others / work.gpus, 2),
            note=note,
        )

    def sharded(self) -> Cost:
        """Each rank has a share of the classes and sees the features of all ranks."""
        work = self.work
        way, inside = kernel_costs.shared(work, work.batch, work.shard)
        return self.cost(
            "sharded",
            inside,
            classes=work.shard,
            kept=work.shard,
            features=self.gathered(),
            exchange=self.gathering(inside.blocks),
            note=f"{way} on each rank" if work.gpus > 1 else "",
        )

    def sampled(self) -> Cost:
        """Like sharded, but only some of the other classes are looked at in a step."""
        work = self.work
        kept = sample_size(work.batch, work.shard, work.sample_rate)
        _, inside = kernel_costs.shared(work, work.batch, kept)
        # The rows that are looked at are copied together.
        inside = inside._replace(scores=inside.scores + kept * work.dim * work.stored)
        return self.cost(
            "sampled",
            inside,
            classes=work.shard,
            kept=kept,
            features=self.gathered(),
            exchange=self.gathering(inside.blocks),
            note=f"approximate: {kept:,} of {work.shard:,} classes",
        )

    def gathered(self) -> int:
        """Bytes of a rank's own features, of all of them, and of their gradients."""
        work = self.work
        own = 2 * work.rows * work.dim * work.working
        return own + (2 * work.batch * work.dim * work.working if work.gpus > 1 else 0)

    def gathering(self, blocks: int) -> float:
        """Seconds of a sharded step's messages."""
        work = self.work
        received = sum(messages(work).values())
        return exchange(work, self.machine, received, COLLECTIVES + blocks)


def messages(work: Workload) -> dict[str, float]:
    """Bytes that a rank of a sharded head receives in a step, by what they are.

    Example:
        >>> found = messages(Workload(classes=1_000_000, dim=512, batch=4096, gpus=8))
        >>> {name: int(count) for name, count in found.items()}
        {'features': 7340032, 'gradient': 7340032, 'labels': 57344, 'numbers': 229376}
    """
    share = (work.gpus - 1) / work.gpus
    rows = work.batch * work.dim * work.working * share
    # Labels and whether they count, as doubles; of each number that is read, one of every rank.
    numbers = len(work.reads) * work.batch * work.working * (work.gpus - 1)
    return {
        "features": rows,
        "gradient": rows,
        "labels": 16 * work.batch * share,
        "numbers": numbers,
    }


def exchange(work: Workload, machine: Machine, received: float, collectives: int) -> float:
    """Seconds of some messages, one after the other.

    Args:
        work: how many ranks there are.
        machine: how fast they talk.
        received: bytes that a rank receives in all.
        collectives: how many messages that are.
    """
    if work.gpus == 1:
        return 0.0
    rate = machine.link if work.gpus <= machine.node else machine.network
    return received / rate + collectives * math.ceil(math.log2(work.gpus)) * machine.latency


def size(count: float) -> str:
    """Bytes as a person reads them.

    Example:
        >>> size(3 << 20), size(1.5 * 2**30)
        ('3.00 MiB', '1.50 GiB')
    """
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if count >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count / 2**10:.2f} KiB"
