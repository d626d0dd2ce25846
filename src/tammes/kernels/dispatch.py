"""Choice of the kernel for a call, by device, size and the fields that its terms read."""

import logging
from collections.abc import Iterable
from functools import cache
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tammes._validation import transforming
from tammes.kernels import dense_gpu
from tammes.kernels.dense import dense_split
from tammes.kernels.dense_gpu import supports
from tammes.kernels.problem import Problem
from tammes.kernels.reference import reference_split
from tammes.kernels.streamed.functions import streamed_split
from tammes.kernels.tiling import Plan, dense_matrices, most_prototypes
from tammes.similarity import full_precision, product_dtype, working_dtype
from tammes.split import MAPPED, Split

Implementation = Literal["auto", "dense", "streamed", "fused"]
Way = Literal["dense", "reference", "streamed", "fused"]

_IMPLEMENTATIONS = frozenset(get_args(Implementation))

_SMALL = {"cpu": 1 << 22, "cuda": 1 << 20}
"""Number of scores below which the dense kernel is at least as fast, and its matrices small, by
device type."""
_FUSED = 1 << 27
"""Number of scores above which the fused kernel is chosen on a GPU, in half precision. On an H200
at 10^8 scores dense took half the time of fused (an eager step is bound by launches, and dense has
fewer); at 5 10^8 fused takes 0.8 to 1.2 times as long as dense, depending on the speed of Python,
and up to half the memory."""
_ROOM = 4 << 30
"""Bytes that dense matrices may take on a GPU, and no more than an eighth of its memory. Below
this, computing scores in blocks is slower."""
_OPERATOR = 1 << 25
"""Number of scores above which compiled code in half precision calls the dense kernel as an
operator instead of tracing the reference, which multiplies in single precision: on an H200 that
takes 0.57 times as long at 10^8 scores, and 1.2 times at 10^7."""
_log = logging.getLogger("tammes")


def check_implementation(name: str, implementation: str) -> None:
    """Reject an unknown implementation."""
    if implementation not in _IMPLEMENTATIONS:
        raise ValueError(
            f"{name} expects implementation 'auto', 'dense', 'streamed' or 'fused', "
            f"got {implementation!r}"
        )


def check_dense(name: str, implementation: Implementation) -> None:
    """Reject an implementation other than dense, for a similarity that is not a product."""
    if implementation not in ("auto", "dense"):
        raise ValueError(
            f"{name} expects implementation 'auto' or 'dense', since it has all scores in memory, "
            f"got {implementation!r}"
        )


def choose_kernel(implementation: Implementation, problem: Problem, reads: frozenset[str]) -> Way:
    """Choose the kernel of one call; transforms and most compiled calls get the reference."""
    if implementation not in _IMPLEMENTATIONS:
        check_implementation("a head", implementation)
    if not problem.similarity.has_kernels:
        check_dense("a head of distances", implementation)
        return "reference"
    if problem.share is None:
        if "rest" in reads or forward_ad._current_level >= 0:
            return "reference"
        if transforming():
            compiling = torch.compiler.is_compiling()
            return "dense" if compiling and compiles(problem, reads) else "reference"
        if implementation == "dense" or (
            implementation == "auto" and _stays_in_memory(problem, reads)
        ):
            # The dense kernel supports one prototype per class, and no score map.
            plain = problem.similarity.centers == 1 and MAPPED not in reads
            return "dense" if plain and problem.features.shape[0] else "reference"
    elif "rest" in reads:
        raise ValueError(
            "a head that has only some of the classes expects terms without rest, "
            "got one that reads it"
        )
    # Classes sharded over ranks are always streamed or fused.
    if implementation == "fused" or (implementation == "auto" and _pays(problem)):
        reason = why_not_fused(problem, reads)
        if reason is None:
            return "fused"
        if implementation == "fused":
            _tell(reason)
    return "streamed"


def compiles(problem: Problem, reads: frozenset[str]) -> bool:
    """Whether compiled code calls the dense GPU kernel as an operator."""
    half = product_dtype(problem.features.device) is not None or dense_gpu.ANYWHERE
    if not half or _scores(problem) < _OPERATOR or not supports(problem, reads):
        return False
    if torch._C._are_functorch_transforms_active():
        return False
    # Imported here: it would make importing tammes import the compiler.
    from tammes.kernels.compiled_split import is_available

    return is_available()


def _stays_in_memory(problem: Problem, reads: frozenset[str]) -> bool:
    if is_small(problem):
        return True
    half = product_dtype(problem.features.device) is not None
    return in_memory(problem, reads, half, half and why_not_fused(problem, reads) is None)


def is_small(problem: Problem) -> bool:
    """Whether there are so few scores that dense is chosen whatever it needs."""
    return _scores(problem) < _SMALL.get(problem.features.device.type, _SMALL["cuda"])


def _scores(problem: Problem) -> int:
    return problem.features.shape[0] * most_prototypes(problem) * problem.similarity.centers


def in_memory(problem: Problem, reads: frozenset[str], half: bool, fusable: bool) -> bool:
    """Whether the dense kernel is the fastest choice and its matrices fit in memory.

    Args:
        problem: with all classes; on the device ``meta`` it stands for one on a GPU.
        reads: fields of the split that are read.
        half: whether products are in half precision.
        fusable: whether the fused kernel could run.
    """
    if is_small(problem):
        return True
    scores, device = _scores(problem), problem.features.device
    if device.type not in ("cuda", "meta"):
        return False
    lean = supports(problem, reads)
    if half and problem.similarity.centers > 1:
        # The reference multiplies in single precision.
        return False
    if half and fusable and scores > (_FUSED if lean else 0):
        return False
    item = working_dtype(problem.features, problem.prototypes).itemsize
    pooled = problem.similarity.centers > 1
    matrices = 1.5 if lean else dense_matrices(reads | {"rest"} if pooled else reads)
    return scores * item * matrices <= _room(device)


@cache
def _room(device: torch.device) -> int:
    if device.type != "cuda":
        return _ROOM
    return min(_ROOM, torch.cuda.get_device_properties(device).total_memory // 8)


def _pays(problem: Problem) -> bool:
    """Whether the fused kernel is faster: products in half precision, and enough scores."""
    return product_dtype(problem.features.device) is not None and not is_small(problem)


def why_not_fused(problem: Problem, reads: frozenset[str]) -> str | None:
    """Return the reason a problem cannot use the fused kernel, or none."""
    try:
        from tammes.kernels.fused.engine import why_not
    except Exception as error:
        return f"triton cannot be imported ({type(error).__name__}: {error})"
    return why_not(problem, reads)


@cache
def _tell(reason: str) -> None:
    """Warn once that the requested kernel cannot run."""
    _log.warning("tammes: implementation='fused' falls back to 'streamed': %s", reason)


def split(
    problem: Problem, labels: Tensor, reads: Iterable[str], implementation: Implementation
) -> Split:
    """Split a batch by its labels; differentiable with every kernel.

    The fused kernel computes whole losses only: for a split alone, streamed takes its place.
    """
    reads = frozenset(reads)
    kernel = choose_kernel(implementation, problem, reads)
    if kernel == "reference":
        return reference_split(problem, labels, reads)
    low = product_dtype(problem.features.device)
    if kernel == "dense":
        with full_precision(problem.features.device):
            return dense_split(problem, labels, reads, low=low)
    plan = Plan(reads, _never, (), product_dtype=low)
    return streamed_split(problem, labels, plan)


def _never(*_: object) -> torch.Tensor:
    raise AssertionError("a split alone has no terms")
