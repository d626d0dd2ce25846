"""Sizes of a training job, and the machine it runs on."""

import os
import re
from dataclasses import dataclass, replace
from numbers import Integral

import torch

from tammes.kernels.dense_gpu import supports
from tammes.kernels.dispatch import Way, in_memory, is_small
from tammes.kernels.problem import Problem
from tammes.kernels.tiling import MOST_CENTERS, WIDEST
from tammes.similarity import Cosine, Similarity, working_dtype
from tammes.split import FREE_MAP

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
        launch: minimum seconds of a streamed or fused step, for launching its kernels; a dense step
            takes half of that.
        network: bytes per second from an accelerator to those of other nodes.
        node: accelerators per node.
        latency: seconds of the shortest message; a collective of G ranks takes log2 G times that.
        device: ``"cuda"`` or ``"cpu"``.

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
    device: str = "cuda"


CPU = Machine(
    "CPU", 16 * 2**30, 1e11, 1e11, 2e10, 1e9, 1e-3, network=1e9, latency=1e-4, device="cpu"
)
"""A small CPU; its memory is measured, its times are a guess."""
H200 = Machine()
"""The only GPU that the times were measured on."""


def _like_the_h200(name: str, gib: float, tflops: float, half: float, gb: float) -> Machine:
    """Return a GPU that reaches the same fractions of its data sheet as the H200."""
    return Machine(name, gib * 2**30, tflops * 0.75e12, half * 0.7e12, gb * 1e9 / 1.2)


MACHINES = {
    "h200": H200,
    "h100": _like_the_h200("H100", 79, 67, 989, 3350),
    "a100": _like_the_h200("A100", 79, 19.5, 312, 2039),
    "v100": _like_the_h200("V100", 31, 15.7, 125, 900),
    "l4": _like_the_h200("L4", 22, 30.3, 121, 300),
    "t4": _like_the_h200("T4", 14.5, 8.1, 65, 320),
    "rtx4090": _like_the_h200("RTX 4090", 23.5, 82.6, 165, 1008),
    "rtx3090": _like_the_h200("RTX 3090", 23.5, 35.6, 71, 936),
    "cpu": CPU,
}
"""Machines by name. For all but the H200 and the CPU, rates are those of the data sheet (TFLOP/s in
float32 and half precision, GB/s), times the fraction of it that the H200 reaches."""


def machine_at_hand() -> Machine:
    """Return the machine this process runs on: its GPU, or else its CPU."""
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        return gpu_named(properties.name, float(properties.total_memory))
    memory = CPU.memory
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return replace(CPU, name="this machine's CPU", memory=memory)


def gpu_named(name: str, memory: float) -> Machine:
    """Return a GPU with its own memory and the rates of its kind, those of an L4 if unknown.

    Example:
        >>> gpu_named("NVIDIA A100-SXM4-40GB", 40 * 2**30).flops == MACHINES["a100"].flops
        True
    """
    words = re.split(r"[^a-z0-9]+", name.lower().replace("rtx ", "rtx"))
    known = next((key for key in MACHINES if key in words), None)
    if known is None:
        return replace(MACHINES["l4"], name=f"{name} (rates of an L4)", memory=memory)
    return replace(MACHINES[known], name=name, memory=memory)


def choose_machine(
    machine: Machine | str | None, device: str | None, gpus: int = 1
) -> tuple[Machine, str]:
    """Return the machine to plan for and its device; by default the one at hand.

    If a GPU is requested and none is at hand, an H200 is assumed.
    """
    if isinstance(machine, str):
        if machine not in MACHINES:
            known = ", ".join(MACHINES)
            raise ValueError(f"advise expects machine to be one of {known}, got {machine}")
        machine = MACHINES[machine]
    if machine is None:
        machine = machine_at_hand()
        wanted = device or ("cuda" if gpus > 1 else machine.device)
        if machine.device != wanted:
            machine = CPU if wanted == "cpu" else H200
    return machine, device or machine.device


UNFUSED = frozenset({"softplus", "rest", FREE_MAP})
"""Fields of a split that the fused kernel does not compute."""

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
        similarity: similarity of features and prototypes; a class may have several prototypes.
        sample_rate: fraction of the classes per step with sampled classes.
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
            if not isinstance(value, Integral) or value < least:
                raise ValueError(
                    f"advise expects {name} to be a whole number from {least}, got {value}"
                )
            object.__setattr__(self, name, int(value))
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
    def centers(self) -> int:
        """Prototypes per class."""
        return self.similarity.centers

    @property
    def numbers(self) -> int:
        """Numbers in all prototypes of a class."""
        return self.centers * self.dim

    @property
    def unfused(self) -> frozenset[str]:
        """Fields the loss reads that the fused kernel does not compute."""
        return self.reads & (UNFUSED if self.centers == 1 else UNFUSED | {"mean"})

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
        shape = (classes, self.dim) if self.centers == 1 else (classes, self.centers, self.dim)
        features, prototypes = number.expand(rows, self.dim), number.expand(shape)
        return Problem(features, prototypes, None, 1.0, self.similarity)

    @property
    def half(self) -> bool:
        """Whether products are computed in half precision."""
        return self.autocast is not None and self.device == "cuda"

    @property
    def on_gpu(self) -> bool:
        """Whether the dense implementation has Triton kernels for the fields and precision."""
        return self.device == "cuda" and supports(self.problem(1, 2), self.reads)

    @property
    def fusable(self) -> bool:
        """Whether the fused kernel supports the fields, precision and size."""
        small = self.dim <= WIDEST and self.centers <= MOST_CENTERS and self.dtype != "float64"
        return small and self.device == "cuda" and not self.unfused

    def automatic(self) -> Way:
        """Choice of ``implementation="auto"`` for this loss, with all classes on every rank."""
        problem = self.problem(self.rows, self.classes)
        if "rest" in self.reads or in_memory(problem, self.reads, self.half, self.fusable):
            return "dense"
        return self.within(self.rows, self.classes)

    def within(self, rows: int, classes: int) -> Way:
        """Choice of ``implementation="auto"`` for rows of all ranks and a shard of the classes."""
        large = not is_small(self.problem(rows, classes))
        return "fused" if large and self.half and self.fusable else "streamed"
