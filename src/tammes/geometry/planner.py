r"""What a step costs: bytes per rank and time, for every way to get from features to a loss.

With N rows and C classes on a rank and D numbers in a prototype, a step of a head holds

.. math:: \text{weights} + \text{gradient} + \text{optimizer} + \text{scores} + \text{features},

each :math:`CD` or :math:`NC` or :math:`ND` numbers times a factor. The factors of the dense and of
the streamed way are those of :mod:`tammes.kernels`, and tests compare them with what a process
really takes. The backbone is not counted, nor the temporaries of the optimizer's own step, which
come when the scores are gone.

The time is an estimate: matrix products at a given rate, passes over memory at another and
messages at a third, one after the other.
"""

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from tammes.geometry.workload import OPTIMIZERS, Machine, Workload
from tammes.kernels.streamed import Plan, fits_in_gradient
from tammes.similarity import InnerProduct

_DENSE_MATRICES = 4
"""N x C matrices alive at once on the dense way: scores, and steps of their gradient."""
_KEY_BLOCKS = 4
"""Blocks of keys alive at once while their gradient becomes that of the prototypes."""


class Passes(NamedTuple):
    """How often memory is gone through; fitted to an H200 (docs/advise.md has the table)."""

    scores: int
    """Reads and writes of a score."""
    prototypes: int
    """Reads and writes of a prototype, or of its gradient."""
    again: int = 0
    """The same for each block of rows."""


_DENSE = Passes(scores=25, prototypes=26)
_STREAMED = Passes(scores=11, prototypes=33, again=10)
_AUTOCAST = Passes(scores=6, prototypes=0, again=4)
"""What copies in half precision add to the streamed way."""


@dataclass(frozen=True)
class Cost:
    """What one step of a head takes on each rank.

    Attributes:
        mode: ``"dense"``, ``"streamed"``, ``"fused"``, ``"sharded"`` or ``"sampled"``.
        available: whether this version has it; the others are planned, their numbers what the
            design promises.
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
    available: bool
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
        A :class:`Cost` for each of dense, streamed, fused, sharded and sampled.

    Example:
        >>> costs = plan(Workload(classes=1_000_000, dim=512, batch=4096, gpus=8))
        >>> [(cost.mode, round(cost.total / 2**30, 1)) for cost in costs]
        [('dense', 15.3), ('streamed', 9.5), ('fused', 7.6), ('sharded', 2.7), ('sampled', 0.8)]
    """
    estimate = _Estimate(work, machine or Machine())
    every = [estimate.dense()]
    if "rest" not in work.reads:
        every += [estimate.streamed(), estimate.fused(), estimate.sharded(), estimate.sampled()]
    return tuple(every)


class _Estimate:
    """The formulas, with the sizes they share."""

    def __init__(self, work: Workload, machine: Machine) -> None:
        self.work, self.machine = work, machine
        self.copies = OPTIMIZERS[work.optimizer]
        # A gradient is collected in the working precision before it is stored.
        self.rounds = work.stored != work.working

    def cost(
        self,
        mode: str,
        *,
        classes: int,
        kept: int,
        scores: int,
        features: int,
        products: float,
        passes: float,
        messages: float,
        available: bool = True,
        note: str = "",
    ) -> Cost:
        """Put together what is common to all: ``kept`` of the rank's classes get a gradient."""
        work, machine = self.work, self.machine
        row = work.dim * work.stored
        half = work.autocast is not None and work.device == "cuda" and mode != "dense"
        parts = {
            "weights": classes * row,
            "gradient": kept * row,
            "optimizer": self.copies * classes * row,
            "scores": max(0, scores),
            "features": features,
        }
        computing = products / (machine.half_flops if half else machine.flops)
        moving, talking = passes / machine.bandwidth, messages / machine.link
        return Cost(
            mode=mode,
            available=available,
            **parts,
            products=computing,
            traffic=moving,
            exchange=talking,
            seconds=max(computing + moving + talking, machine.launch),
            fits=sum(parts.values()) <= machine.memory,
            note=note,
        )

    def replicated(self, mode: str, **numbers: Any) -> Cost:
        """All classes on every rank; gradients are averaged between them."""
        work = self.work
        weights = work.classes * work.dim * work.stored
        others = work.gpus - 1
        return self.cost(
            mode,
            classes=work.classes,
            kept=work.classes,
            features=2 * work.rows * work.dim * work.working + (weights if others else 0),
            messages=2 * weights * others / work.gpus,
            **numbers,
        )

    def dense(self) -> Cost:
        """All scores in memory; gradients by autograd."""
        work = self.work
        matrix = work.rows * work.classes * work.working
        prototypes = work.classes * work.dim * work.working
        copy = prototypes if self.rounds else 0
        keys = 0 if isinstance(work.similarity, InnerProduct) else prototypes
        forward = dense_matrices(work.reads) * matrix + keys + copy
        backward = 3 * prototypes + copy
        return self.replicated(
            "dense",
            scores=max(forward, backward) - work.classes * work.dim * work.stored,
            products=6 * work.rows * work.classes * work.dim,
            passes=_DENSE.scores * matrix + _DENSE.prototypes * prototypes,
            note="needs all scores at once" if "rest" in work.reads else "",
        )

    def streamed(self) -> Cost:
        """One block of scores at a time; gradients are made in forward."""
        work = self.work
        scores, passes = self.blocks(work.rows, work.classes)
        products = 6 * work.rows * work.classes * work.dim
        return self.replicated("streamed", scores=scores, products=products, passes=passes)

    def blocks(self, rows: int, classes: int) -> tuple[int, int]:
        """Temporaries and traffic in bytes of the streamed kernel, cut as it cuts itself."""
        work = self.work
        plan = Plan(work.similarity, work.reads, _never, (1.0,))
        problem = work.problem(rows, classes)
        row_blocks, class_blocks = plan.blocks(problem)
        height, width = row_blocks[0].stop, class_blocks[0].stop
        block, prototypes = height * classes, classes * work.dim
        # A linear head needs no keys but the prototypes themselves; under autocast a product is
        # made beside what it is written to, from copies in half precision.
        half = work.autocast is not None and work.device == "cuda"
        tile, linear = width * work.dim, isinstance(work.similarity, InnerProduct)
        low = height * width + (tile // 2 if linear else tile * 3 // 2) if half else 0
        beside = max(0 if linear else _KEY_BLOCKS * tile, low)
        # One short block of scores lies in the memory of the gradient, and is copied out in pieces.
        shared = fits_in_gradient(problem, row_blocks)
        if shared:
            beside = max(beside, height * width + (0 if linear else tile))
        # An expectation takes a second block of scores for a while, and a third to sum up.
        expected = "expected" in work.reads
        taken = max(2 * block if expected else 0, beside) + (0 if shared else block)
        if self.rounds:
            # Collected first and stored then, where the blocks of keys have been.
            taken += prototypes - min(beside, prototypes * work.stored // work.working)
        taken += 2 * rows * work.dim + classes
        matrix, again = rows * classes, len(row_blocks)
        passes = (2 if expected else 1) * _STREAMED.scores * matrix
        passes += (_STREAMED.prototypes + _STREAMED.again * again) * prototypes
        if half:
            passes += _AUTOCAST.scores * matrix + _AUTOCAST.again * again * prototypes
        return taken * work.working, passes * work.working

    def fused(self) -> Cost:
        """No score is ever in memory: each is made again in backward, where it is used."""
        work = self.work
        prototypes = work.classes * work.dim * work.working
        return self.replicated(
            "fused",
            scores=8 * work.rows * work.working + (prototypes if self.rounds else 0),
            products=8 * work.rows * work.classes * work.dim,
            passes=4 * prototypes,
            available=False,
        )

    def sharded(self) -> Cost:
        """Each rank has a share of the classes and sees the features of all ranks."""
        work = self.work
        scores, passes = self.blocks(work.batch, work.shard)
        return self.cost(
            "sharded",
            classes=work.shard,
            kept=work.shard,
            scores=scores,
            features=self.gathered(),
            products=6 * work.batch * work.shard * work.dim,
            passes=passes,
            messages=self.gathering(),
            available=False,
        )

    def sampled(self) -> Cost:
        """Like sharded, but only some of the other classes are looked at in a step."""
        work = self.work
        present = work.shard * -_expm1(work.batch, 1 / work.classes)
        kept = min(work.shard, max(round(work.sample_rate * work.shard), round(present), 1))
        scores, passes = self.blocks(work.batch, kept)
        note = f"approximate: {kept:,} of {work.shard:,} classes"
        return self.cost(
            "sampled",
            classes=work.shard,
            kept=kept,
            # The rows that are looked at are copied together.
            scores=scores + kept * work.dim * work.stored,
            features=self.gathered(),
            products=6 * work.batch * kept * work.dim,
            passes=passes,
            messages=self.gathering(),
            available=False,
            note=note,
        )

    def gathered(self) -> int:
        """Bytes of a rank's own features, of all of them, and of their gradients."""
        work = self.work
        own = 2 * work.rows * work.dim * work.working
        return own + (2 * work.batch * work.dim * work.working if work.gpus > 1 else 0)

    def gathering(self) -> float:
        """Bytes a rank sends: its features to all, and the gradients of theirs back."""
        work = self.work
        share = (work.gpus - 1) / work.gpus
        return 2 * work.batch * work.dim * work.working * share


def dense_matrices(reads: frozenset[str]) -> int:
    """Matrices of all scores alive at once on the dense way, by what the loss reads."""
    more = {"expected", "mean", "rest"} & reads or {"hardest", "others"} <= reads
    return _DENSE_MATRICES + (1 if more else 0)


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


def _expm1(count: int, rate: float) -> float:
    """``(1 - rate)**count - 1``, exact where the rate is tiny."""
    return float(torch.expm1(count * torch.log1p(torch.tensor(-rate, dtype=torch.double))))


def _never(*_: Any) -> torch.Tensor:
    raise AssertionError("a plan is not run")
