"""What is to be computed, and on what: the sizes a plan is made for."""

from dataclasses import dataclass

import torch

from tammes.kernels.dispatch import Way, choose_kernel
from tammes.kernels.problem import Problem
from tammes.similarity import Cosine, Similarity, working_dtype

OPTIMIZERS = {"sgd": 0, "momentum": 1, "adagrad": 1, "rmsprop": 1, "adam": 2, "adamw": 2}
"""Copies of the weights an optimizer keeps; ``momentum`` is SGD with momentum."""

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class Machine:
    """One accelerator, in round numbers of what is reached rather than of what is printed.

    Attributes:
        name: what the numbers are of.
        memory: bytes.
        flops: additions and multiplications per second of products in single precision.
        half_flops: the same in half precision.
        bandwidth: bytes per second to and from memory.
        link: bytes per second from one accelerator to another of the same node.
        launch: seconds a step takes at least, for the calls that start its parts.
        network: bytes per second of an accelerator to those of other nodes.
        node: accelerators of a node.
        latency: seconds a message takes however short it is; a collective of G ranks takes it
            log2 G times.

    Example:
        >>> small = Machine("24 GiB", memory=24 * 2**30, flops=2e13, bandwidth=8e11)
    """

    name: str = "H200"
    memory: float = 139 * 2**30
    flops: float = 5e13
    half_flops: float = 7e14
    bandwidth: float = 4e12
    link: float = 2e11
    launch: float = 5e-3
    network: float = 4e10
    node: int = 8
    latency: float = 1e-5


CPU = Machine("CPU", 16 * 2**30, 1e11, 1e11, 2e10, 1e9, 1e-3, network=1e9, latency=1e-4)
"""A small CPU; what it takes of memory is measured, its times are a guess."""

UNFUSED = frozenset({"excess", "softplus", "rest"})
"""Fields of a split that the fused kernel does not have."""
WIDEST = 4096
"""Numbers in the longest feature that it takes."""

_COSINE = Cosine()


@dataclass(frozen=True)
class Workload:
    """What is to be computed; all sizes are those of the whole job.

    Attributes:
        classes: number of classes C.
        dim: size D of a feature.
        batch: examples in a step, over all ranks.
        gpus: number of ranks.
        dtype: what prototypes and features are stored in.
        autocast: what products are computed in on CUDA, where it is half precision.
        optimizer: a name of :data:`OPTIMIZERS`.
        reads: fields of the split that the loss reads.
        similarity: how features are compared with prototypes.
        sample_rate: share of the other classes that the sampled way looks at.
        device: ``"cuda"`` or ``"cpu"``.

    Example:
        >>> Workload(classes=1_000_000, dim=512, batch=4096, gpus=8).automatic()
        'streamed'
        >>> Workload(classes=1_000_000, dim=512, batch=4096, autocast="bfloat16").automatic()
        'fused'
    """

    classes: int
    dim: int
    batch: int
    gpus: int = 1
    dtype: str = "float32"
    autocast: str | None = None
    optimizer: str = "momentum"
    reads: frozenset[str] = frozenset({"target", "others"})
    similarity: Similarity = _COSINE
    sample_rate: float = 0.1
    device: str = "cuda"

    def __post_init__(self) -> None:
        _check(self)

    @property
    def rows(self) -> int:
        """Examples on a rank."""
        return -(-self.batch // self.gpus)

    @property
    def shard(self) -> int:
        """Classes on a rank, where they are sharded."""
        return -(-self.classes // self.gpus)

    @property
    def stored(self) -> int:
        """Bytes of a number as it is stored."""
        return DTYPES[self.dtype].itemsize

    @property
    def working(self) -> int:
        """Bytes of a number as it is computed with."""
        return working_dtype(torch.empty(0, dtype=DTYPES[self.dtype])).itemsize

    @property
    def rounds(self) -> bool:
        """Whether a gradient is collected in the working precision before it is stored."""
        return self.stored != self.working

    def problem(self, rows: int, classes: int) -> Problem:
        """Features and prototypes of these sizes, of which no number is in memory."""
        # A device that is not there is taken for CUDA, here as in the kernel.
        device = "cpu" if self.device == "cpu" else "meta"
        number = torch.empty(1, 1, dtype=DTYPES[self.dtype], device=device)
        features, prototypes = number.expand(rows, self.dim), number.expand(classes, self.dim)
        return Problem(features, prototypes, None, 1.0, self.similarity)

    @property
    def half(self) -> bool:
        """Whether products are computed in half precision."""
        return self.autocast is not None and self.device == "cuda"

    @property
    def fusable(self) -> bool:
        """Whether the fused kernel has what the loss reads, in this precision and size."""
        small = self.dim <= WIDEST and self.dtype != "float64"
        return small and self.device == "cuda" and UNFUSED.isdisjoint(self.reads)

    def automatic(self) -> Way:
        """What ``implementation="auto"`` takes for this loss, with all classes on every rank."""
        if "rest" in self.reads:
            return "dense"
        if self._asked(self.rows, self.classes) == "dense":
            return "dense"
        return self.within(self.rows, self.classes)

    def within(self, rows: int, classes: int) -> Way:
        """The same for rows of all ranks against some of the classes, which have no plain form."""
        large = self._asked(rows, classes) != "dense"
        return "fused" if large and self.half and self.fusable else "streamed"

    def _asked(self, rows: int, classes: int) -> Way:
        # The kernels know only the machine they are on, which may have no GPU: that it would take
        # the fused way is not theirs to say here.
        return choose_kernel("auto", self.problem(rows, classes), self.reads)


def _check(work: Workload) -> None:
    for name, least in (("classes", 2), ("dim", 1), ("batch", 1), ("gpus", 1)):
        value = getattr(work, name)
        if not isinstance(value, int) or value < least:
            raise ValueError(
                f"advise expects {name} to be a whole number from {least}, got {value}"
            )
    for name, known in (
        ("dtype", (*DTYPES,)),
        ("autocast", (None, "bfloat16", "float16")),
        ("optimizer", (*OPTIMIZERS,)),
        ("device", ("cuda", "cpu")),
    ):
        if getattr(work, name) not in known:
            names = ", ".join(str(value) for value in known if value is not None)
            raise ValueError(
                f"advise expects {name} to be one of {names}, got {getattr(work, name)}"
            )
    if not 0 < work.sample_rate <= 1:
        raise ValueError(f"advise expects sample_rate above 0 and up to 1, got {work.sample_rate}")
