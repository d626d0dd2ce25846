"""Sizes of a training job, and the machine it runs on."""

from dataclasses import dataclass

import torch

from tammes.kernels.dense_gpu import supports
from tammes.kernels.dispatch import SMALL, Way, in_memory
from tammes.kernels.problem import Problem
from tammes.similarity import Cosine, Similarity, working_dtype

OPTIMIZERS = {"sgd": 0, "momentum": 1, "adagrad": 1, "rmsprop": 1, "adam": 2, "adamw": 2}
"""Copies of the weights in the optimizer state; ``momentum`` is SGD with momentum."""

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class Machine:
    """One accelerator, with rounded rates that are reached in practice.

    Attributes:
        name: name of the accelerator.
        memory: bytes of memory.
        flops: additions and multiplications per second of products in float32.
        half_flops: the same in half precision.
        bandwidth: bytes per second to and from memory.
        link: bytes per second from one accelerator to another of the same node.
        launch: minimum seconds of a streamed or fused step, for launching its kernels; a dense one
            has half as many.
        network: bytes per second of an accelerator to those of other nodes.
        node: number of accelerators of a node.
        latency: seconds of the shortest message; a collective of G ranks takes log2 G times that.

    Example:
        >>> small = Machine("24 GiB", memory=24 * 2**30, flops=2e13, bandwidth=8e11)
    """

    name: str = "H200"
    memory: float = 139 * 2**30
    flops: float = 5e13
    half_flops: float = 7e14
    bandwidth: float = 4e12
    link: float = 2e11
    launch: float = 6.5e-3
    network: float = 4e10
    node: int = 8
    latency: float = 1e-5


CPU = Machine("CPU", 16 * 2**30, 1e11, 1e11, 2e10, 1e9, 1e-3, network=1e9, latency=1e-4)
"""A small CPU; its memory is measured, its times are a guess."""

UNFUSED = frozenset({"excess", "softplus", "rest"})
"""Fields of a split that the fused kernel does not compute."""
WIDEST = 4096
"""Largest embedding size of the fused kernel."""

_COSINE = Cosine()


@dataclass(frozen=True)
class Workload:
    """Training job; all sizes are those of the whole job.

    Attributes:
        classes: number of classes C.
        dim: size D of a feature.
        batch: examples in a step, over all ranks.
        gpus: number of ranks.
        dtype: dtype of prototypes and features.
        autocast: dtype of matrix products under autocast on CUDA, or ``None``.
        optimizer: a name of :data:`OPTIMIZERS`.
        reads: fields of the split that the loss reads.
        similarity: similarity of features and prototypes.
        sample_rate: fraction of the other classes per step with sampled classes.
        device: ``"cuda"`` or ``"cpu"``.

    Example:
        >>> Workload(classes=1_000_000, dim=512, batch=4096).automatic()
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
        for name, least in (("classes", 2), ("dim", 1), ("batch", 1), ("gpus", 1)):
            value = getattr(self, name)
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
            if getattr(self, name) not in known:
                names = ", ".join(str(value) for value in known if value is not None)
                raise ValueError(
                    f"advise expects {name} to be one of {names}, got {getattr(self, name)}"
                )
        if not 0 < self.sample_rate <= 1:
            raise ValueError(
                f"advise expects sample_rate above 0 and up to 1, got {self.sample_rate}"
            )

    @property
    def rows(self) -> int:
        """Examples per rank."""
        return -(-self.batch // self.gpus)

    @property
    def shard(self) -> int:
        """Classes per rank if sharded."""
        return -(-self.classes // self.gpus)

    @property
    def stored(self) -> int:
        """Bytes of a stored number."""
        return DTYPES[self.dtype].itemsize

    @property
    def working(self) -> int:
        """Bytes of a number in computations."""
        return working_dtype(torch.empty(0, dtype=DTYPES[self.dtype])).itemsize

    @property
    def rounds(self) -> bool:
        """Whether a gradient is accumulated in the working precision before it is stored."""
        return self.stored != self.working

    def problem(self, rows: int, classes: int) -> Problem:
        """Problem with features and prototypes of these sizes on the meta device."""
        # The meta device counts as CUDA, here as in the kernel.
        device = "cpu" if self.device == "cpu" else "meta"
        number = torch.empty(1, 1, dtype=DTYPES[self.dtype], device=device)
        features, prototypes = number.expand(rows, self.dim), number.expand(classes, self.dim)
        return Problem(features, prototypes, None, 1.0, self.similarity)

    @property
    def half(self) -> bool:
        """Whether products are computed in half precision."""
        return self.autocast is not None and self.device == "cuda"

    @property
    def on_gpu(self) -> bool:
        """Whether the dense implementation has kernels of its own for the fields and precision."""
        return self.device == "cuda" and supports(self.problem(1, 2), self.reads)

    @property
    def fusable(self) -> bool:
        """Whether the fused kernel supports the fields, precision and size."""
        small = self.dim <= WIDEST and self.dtype != "float64"
        return small and self.device == "cuda" and UNFUSED.isdisjoint(self.reads)

    def automatic(self) -> Way:
        """Choice of ``implementation="auto"`` for this loss, with all classes on every rank."""
        problem = self.problem(self.rows, self.classes)
        if "rest" in self.reads or in_memory(problem, self.reads, self.half, self.fusable):
            return "dense"
        return self.within(self.rows, self.classes)

    def within(self, rows: int, classes: int) -> Way:
        """Choice of ``implementation="auto"`` for rows of all ranks and a shard of the classes."""
        large = rows * classes >= SMALL
        return "fused" if large and self.half and self.fusable else "streamed"
