"""Dense kernel on a GPU: three matrix products, and Triton kernels around them.

Computes what :mod:`tammes.kernels.dense` does, for losses that read only the target class and
``others``, which nearly all do, on inner products and cosines with a fixed scale. At common sizes a
step is bound by its launches, so one kernel handles whole rows in each direction. Products take the
dtype of autocast; sums and the numbers of the target class stay in single precision. The softmax
is saved in the dtype of the products, times all per-class factors; up to a factor per row, which
is applied to the ``(N, D)`` side, it is the gradient of the products.
"""

import logging
import math
import threading
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tammes._validation import batched
from tammes.kernels.matmul import halved, multiply
from tammes.kernels.problem import Margin, Problem
from tammes.kernels.reference import gradients_by_reference, loss_gradients_by_reference
from tammes.kernels.tiling import MULTIPLY_ADD, OF_SCORES, WIDEST
from tammes.similarity import InnerProduct, Similarity, full_precision, working_dtype

if TYPE_CHECKING:
    from types import ModuleType

_log = logging.getLogger("tammes")
_NUMBERS = ("target", "gap", "opposite", "others")
_KEPT = ("inverse", "own_inverse", "class_inverses", "keys", "softmax")
_FORWARD = (*_NUMBERS, "rivals", *_KEPT)
_OTHERWISE = OF_SCORES | {"hardest", "mean", "rest"}
"""Numbers that these kernels do not compute."""
_CHUNK, _TILE = 1024, 64
"""Rows that a program sums for the gradient of a bias, and its tile of rows and classes."""
AT_ONCE = 1 << 14
"""Batch size up to which one Triton program goes over the examples faster than torch does."""
ANYWHERE = False
"""Whether to run on any device, as tests do with Triton's interpreter."""


class _Thread(threading.local):
    """Devices on which this thread has launched a kernel."""

    def __init__(self) -> None:
        self.entered: set[int | None] = set()


_thread = _Thread()
_compiled: dict[tuple[Any, ...], Any] = {}
"""Compiled kernels, see :func:`_launch`."""
_MOST = 512
"""Compiled kernels to keep; batches of ever new sizes must not fill the memory."""


def takes(problem: Problem, names: Collection[str]) -> bool:
    """Whether these kernels exist on this machine and support a problem."""
    return supports(problem, names) and has_kernels()


def supports(problem: Problem, names: Collection[str]) -> bool:
    """Whether these kernels can compute all requested numbers that depend on the other classes.

    Numbers that depend on the features alone do not matter.
    """
    features, prototypes, bias, scale, similarity, share, *_ = problem
    return (
        "others" in names
        and _OTHERWISE.isdisjoint(names)
        and working_dtype(features, prototypes) == torch.float32
        and (isinstance(similarity, InnerProduct) or (similarity.is_cosine and bias is None))
        and similarity.centers == 1
        and not isinstance(scale, Tensor)
        and share is None
        and features.shape[1] <= WIDEST
    )


def has_kernels() -> bool:
    """Whether Triton compiles kernels for this machine."""
    return _kernels() is not None


@cache
def _kernels() -> "ModuleType | None":
    """The Triton kernels, or none if Triton cannot be imported or cannot compile one."""
    try:
        from tammes.kernels.fused import row_kernels

        if torch.cuda.is_available():
            vectors = torch.ones(1, 16, device="cuda")
            row_kernels.through_lengths[(1,)](
                vectors, vectors, vectors[0], 16, True, BLOCK=16, **MULTIPLY_ADD
            )
    except Exception as error:
        _log.warning(
            "tammes: dense calls on a GPU run without Triton: %s", str(error).split("\n")[0]
        )
        return None
    return row_kernels


def _launch(
    name: str,
    key: tuple[Any, ...] | None,
    programs: int,
    arguments: tuple[Any, ...],
    constants: dict[str, Any],
    warps: int = 4,
) -> None:
    """Launch a kernel, if possible without the search that Triton makes at every launch.

    Triton compiles a kernel for the dtypes of its arguments, and for which addresses and integers
    are multiples of 16. Finding the right one among the compiled kernels takes longer than the
    launch.

    Args:
        name: name of the kernel.
        key: determines all of that, together with the name, for contiguous tensors of one dtype
            each: kernels that have been launched with it are launched again. If none, Triton
            searches. It begins with the index of the device.
        programs: number of programs.
        arguments: positional arguments.
        constants: the remaining parameters, in their order.
        warps: warps of each program.
    """
    if key is not None and (ready := _compiled.get((name, *key))) is not None:
        _launch_compiled(ready, key[0], programs, (*arguments, *constants.values()))
        return
    kernel = getattr(_kernels(), name)
    made = kernel[(programs,)](*arguments, **constants, num_warps=warps, **MULTIPLY_ADD)
    # The interpreter compiles nothing.
    if key is not None and made is not None and _launches_directly():
        if len(_compiled) >= _MOST:
            _compiled.clear()
        _compiled[name, *key] = made


def _launch_compiled(made: Any, device: int, programs: int, arguments: tuple[Any, ...]) -> None:
    """Launch a compiled kernel as Triton does after its search, without a profiler's hooks."""
    stream = torch._C._cuda_getCurrentRawStream(device)
    made.run(
        programs, 1, 1, stream, made.function, made.packed_metadata, None, None, None, *arguments
    )


def _launches_directly() -> bool:
    """Whether compiled kernels can be launched as above; this cannot be tried in a recording."""
    return not torch.cuda.is_current_stream_capturing() and _this_triton_does()


@cache
def _this_triton_does() -> bool:
    """Whether a compiled kernel of this version of Triton can be launched as above: tried once."""
    rows = torch.arange(32.0, device="cuda").view(2, 16)
    found = torch.ones_like(rows), torch.ones_like(rows)
    inverses = rows[:, 1].contiguous().reciprocal()
    arguments = rows, inverses, 16, True
    kernels = _kernels()
    assert kernels is not None
    # The comparison synchronises, this once. Setting the mode warns the first time.
    watched = torch.cuda.get_sync_debug_mode()
    if watched:
        torch.cuda.set_sync_debug_mode("default")
    try:
        made = kernels.through_lengths[(2,)](found[0], *arguments, BLOCK=16, **MULTIPLY_ADD)
        _launch_compiled(made, rows.device.index, 2, (found[1], *arguments, 16))
        return torch.equal(*found)
    except Exception as error:
        _log.debug("tammes: Triton searches for its kernels at every launch: %s", error)
        return False
    finally:
        if watched:
            torch.cuda.set_sync_debug_mode(watched)


def _aligned(*tensors: Tensor | None) -> bool:
    """Whether the addresses of tensors are multiples of 16, as those of new tensors are.

    Compiled autograd traces a backward pass, where tensors have none.
    """
    if torch.compiler.is_compiling():
        return False
    bits = 0
    for tensor in tensors:
        if tensor is not None:
            bits |= tensor.data_ptr()
    return bits & 15 == 0


def weigh_examples(
    labels: Tensor, ignored: int, *, mean: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Return labels (0 if ignored), the mask of valid examples, weights, and the number of valid.

    None if the batch is so large that torch is as fast.

    Args:
        labels: int64, at least one, shape ``(N,)``.
        ignored: label of ignored examples.
        mean: whether the weights sum to one.
    """
    count = len(labels)
    if count > AT_ONCE or not has_kernels():
        return None
    labels = labels.contiguous()
    kept, valid = torch.empty_like(labels), torch.empty_like(labels, dtype=torch.bool)
    weights = torch.empty_like(labels, dtype=torch.float32)
    total = weights.new_empty(())
    key = (labels.device.index, count, ignored, mean) if _aligned(labels) else None
    arguments = labels, kept, valid, weights, total, ignored, count
    with on(labels.device):
        _launch("weigh", key, 1, arguments, _whole_batch(count, mean))
    return kept, valid, weights, total


def _whole_batch(count: int, mean: bool) -> dict[str, Any]:
    """Constants of a kernel that has one program for the whole batch."""
    return {"MEAN": mean, "BLOCK": min(1024, _power_of_two(count))}


def split_on_gpu(
    problem: Problem, labels: Tensor, names: tuple[str, ...], low: torch.dtype | None
) -> dict[str, Tensor]:
    """Compute the numbers of a split, by name; with a bias, ``rivals`` too.

    Args:
        problem: one that :func:`takes` accepts; a bias of ``-inf`` masks a class.
        labels: class of each example, shape ``(N,)``.
        names: names of the numbers.
        low: dtype of the inputs of products, or none for single precision.
    """
    features, prototypes, bias, scale, similarity, _, there, valid = problem
    assert not isinstance(scale, Tensor)
    if there is not None:
        bias = torch.where(there, 0.0 if bias is None else bias, -torch.inf)
    # Converted here, under autograd: double backward differentiates the saved tensors.
    features, prototypes = features.contiguous(), prototypes.contiguous()
    bias = None if bias is None else bias.to(features.dtype).contiguous()
    labels = labels.long().contiguous()
    angles = "gap" in names or "opposite" in names
    if torch.compiler.is_compiling():
        found = dict(
            zip(
                _FORWARD,
                torch.ops.tammes.split(
                    *(features, prototypes, bias, labels, valid),
                    *(float(scale), similarity.is_cosine, angles, low),
                ),
                strict=True,
            )
        )
    else:
        with on(features.device):
            found = dict(
                zip(
                    (*_NUMBERS, "rivals"),
                    _Split.apply(
                        *(features, prototypes, bias, labels, valid),
                        *(scale, similarity, angles, low),
                    ),
                    strict=True,
                )
            )
    wanted = names if bias is None else (*names, "rivals")
    return {name: found[name] for name in wanted}


class Entropy(NamedTuple):
    """Cross entropy that is computed beside the softmax.

    Attributes:
        ignored: label of ignored examples.
        margin: margin of the target class.
        slopes: filled with the derivative of each loss by ``others``, shape ``(N,)``.
    """

    ignored: int
    margin: Margin
    slopes: Tensor


def cross_entropy_on_gpu(
    problem: Problem,
    labels: Tensor,
    margin: Margin,
    ignored: int,
    low: torch.dtype | None,
    *,
    mean: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross entropy of a batch with a margin, a copy, and the number of valid examples.

    Args:
        problem: one that :func:`takes` accepts, without masks; a bias of ``-inf`` masks a class.
        labels: class of each example or ``ignored``, at least one, shape ``(N,)``.
        margin: margin of the target class; an angle on a cosine head only.
        ignored: label of ignored examples.
        low: dtype of the inputs of products, or none for single precision.
        mean: whether to return the mean over the valid examples, or the sum.
    """
    features, prototypes = problem.features.float(), problem.prototypes.float()
    bias = None if problem.bias is None else problem.bias.float().contiguous()
    with on(features.device):
        loss, numbers = _CrossEntropy.apply(
            *(features.contiguous(), prototypes.contiguous(), bias, labels.contiguous()),
            *(problem.scale, problem.similarity, margin, ignored, mean, low),
        )
        copy, count = numbers.unbind()
    return loss, copy, count


class _CrossEntropy(torch.autograd.Function):
    """From features, prototypes and bias to a loss, and its copy and the number of examples."""

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        prototypes: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        scale: float,
        similarity: Similarity,
        margin: Margin,
        ignored: int,
        mean: bool,
        low: torch.dtype | None,
    ) -> tuple[Tensor, Tensor]:
        count, unit = labels.shape[0], similarity.is_cosine
        kept, slopes = torch.empty_like(labels), features.new_empty(count)
        loss, numbers = features.new_empty(()), features.new_empty(2)
        entropy = Entropy(ignored, margin, slopes)
        angles = margin.angle != 0
        found = forward_pass(
            features, prototypes, bias, kept, labels, scale, unit, angles, low, entropy
        )
        key = (labels.device.index, count, ignored, mean) if _aligned(labels) else None
        arguments = found[3], labels, loss, numbers, ignored, count
        _launch("reduce_rows", key, 1, arguments, _whole_batch(count, mean))
        ctx.save_for_backward(
            *(features, prototypes, bias, labels, kept, numbers, slopes, found[1], *found[5:])
        )
        ctx.settings = scale, similarity, margin, ignored, mean, low
        ctx.mark_non_differentiable(numbers)
        ctx.set_materialize_grads(False)
        return loss, numbers

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        # Read once: activation checkpointing hands them out once.
        features, prototypes, bias, labels, kept_labels, *saved = ctx.saved_tensors
        numbers, slopes, bend, *kept = saved
        if d_loss is None:
            return (None,) * 10
        scale, similarity, margin, ignored, mean, low = ctx.settings
        with full_precision(features.device), on(features.device):
            if torch.is_grad_enabled() or batched((d_loss,)):
                problem = Problem(
                    features, prototypes, bias, scale, similarity, valid=labels != ignored
                )
                again = loss_gradients_by_reference(problem, kept_labels, margin, d_loss, mean=mean)
                return *again, *[None] * 7
            found = backward_pass(
                features, prototypes, kept_labels, labels, tuple(kept),
                (d_loss, numbers, bend, slopes), ctx.needs_input_grad[:3],
                scale, similarity.is_cosine, bend is not None, low, (ignored, mean),
            )  # fmt: skip
            return *found, *[None] * 7


class _Split(torch.autograd.Function):
    """From features, prototypes and bias to the numbers of a split."""

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        prototypes: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        valid: Tensor | None,
        scale: float,
        similarity: Similarity,
        angles: bool,
        low: torch.dtype | None,
    ) -> tuple[Tensor | None, ...]:
        unit = similarity.is_cosine
        found = forward_pass(features, prototypes, bias, labels, valid, scale, unit, angles, low)
        ctx.save_for_backward(features, prototypes, bias, labels, valid, *found[5:])
        ctx.scale, ctx.similarity, ctx.angles, ctx.low = scale, similarity, angles, low
        ctx.set_materialize_grads(False)
        if bias is not None:
            ctx.mark_non_differentiable(found[4])
        return found[:5]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        # Read once: activation checkpointing hands them out once.
        saved = ctx.saved_tensors
        with full_precision(saved[0].device), on(saved[0].device):
            if torch.is_grad_enabled() or batched(gradients):
                return *_by_reference(ctx, saved, gradients[:4]), *[None] * 6
            features, prototypes, _, labels, valid, *kept = saved
            found = backward_pass(
                features, prototypes, labels, valid, tuple(kept), gradients[:4],
                ctx.needs_input_grad[:3], ctx.scale, ctx.similarity.is_cosine, ctx.angles, ctx.low,
            )  # fmt: skip
            return *found, *[None] * 6


def _by_reference(
    ctx: Any, saved: tuple[Any, ...], gradients: tuple[Tensor | None, ...]
) -> list[Tensor | None]:
    """Gradients of features, prototypes and bias that may be batched or differentiated again."""
    features, prototypes, bias, labels, valid, *_ = saved
    problem = Problem(features, prototypes, bias, ctx.scale, ctx.similarity, valid=valid)
    if bias is not None and valid is None:
        # The class mask has been merged into the bias as -inf; ``valid`` makes it a mask again.
        problem = problem._replace(valid=torch.ones_like(labels, dtype=torch.bool))
    names = _NUMBERS if ctx.angles else ("target", "others")
    wanted = {n: g for n, g in zip(_NUMBERS, gradients, strict=True) if n in names}
    return gradients_by_reference(problem, labels, wanted)[:3]


def forward_pass(
    features: Tensor,
    prototypes: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    valid: Tensor | None,
    scale: float,
    unit: bool,
    angles: bool,
    low: torch.dtype | None,
    entropy: Entropy | None = None,
) -> tuple[Tensor | None, ...]:
    """Compute the tensors named in :data:`_FORWARD`, or none for those that do not apply.

    With ``entropy``, ``valid`` has the labels of the batch, ``labels`` is filled with those that
    are not ignored and 0, and the result has the losses of the examples in place of ``others`` and
    the derivative of the target by its cosine in place of ``gap``.
    """
    (count, size), classes = features.shape, prototypes.shape[0]
    block = _power_of_two(size)
    query = torch.empty_like(features, dtype=low)
    target, others = features.new_empty(count), features.new_empty(count)
    inverse = own_inverse = class_inverses = gap = opposite = rivals = None
    keys = prototypes
    if low is not None:
        # Norms may exceed the range of half precision, so its products take unit rows.
        keys = torch.empty_like(prototypes, dtype=low)
    if unit:
        inverse, own_inverse = features.new_empty(count), features.new_empty(count)
        class_inverses = features.new_empty(classes)
        if angles:
            gap = features.new_empty(count)
            opposite = features.new_empty(count) if entropy is None else None
    if bias is not None and entropy is None:
        rivals = features.new_empty(count)
    ignored, margin, slopes = (0, Margin(), target) if entropy is None else entropy

    def given(tensor: Tensor | None) -> Tensor:
        # A kernel needs some tensor for an argument that it will not read.
        return target if tensor is None else tensor

    flags = unit, angles, valid is not None, bias is not None, low is not None, entropy is not None
    key = None
    if _aligned(features, prototypes, labels, valid, bias):
        key = (features.device.index, count, classes, size, ignored, low, *flags)
    arguments = (
        *(features, prototypes, labels if entropy is None else valid, given(valid), given(bias)),
        *(query, keys, given(inverse), given(own_inverse), given(class_inverses)),
        *(target, given(gap), given(opposite), labels, ignored),
        *(math.cos(margin.angle), math.sin(margin.angle), count, classes, size, *flags),
    )
    programs = count if low is None and not unit else count + classes
    _launch("pair", key, programs, arguments, {"BLOCK": block}, _warps(block))
    products = multiply(query, keys.t())
    softmax = products if low is None else torch.empty_like(products, dtype=low)
    block = min(4096, _power_of_two(classes))
    scores = (
        *(products, given(class_inverses), given(bias), labels, softmax, others, given(rivals)),
        *(given(valid), target, slopes, ignored, margin.similarity, classes, float(scale)),
        *(_lift(low), unit and low is None, bias is not None, entropy is not None),
        _covers_target(entropy is not None, unit, low),
    )
    _launch("softmax_of_others", key, count, scores, {"BLOCK": block}, _warps(block))
    kept = (inverse, own_inverse, class_inverses, None if low is None else keys, softmax)
    return target, gap, opposite, others, rivals, *kept


def backward_pass(
    features: Tensor,
    prototypes: Tensor,
    labels: Tensor,
    valid: Tensor | None,
    kept: tuple[Tensor | None, ...],
    gradients: tuple[Tensor | None, ...],
    needed: tuple[bool, ...],
    scale: float,
    unit: bool,
    angles: bool,
    low: torch.dtype | None,
    entropy: tuple[int, bool] | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of features, prototypes and bias, given those of :data:`_NUMBERS`.

    ``entropy`` has the ignored label and whether the loss is a mean; ``gradients`` are then the
    gradient of the loss, the loss and the number of valid examples, the derivative of the target by
    its cosine, and the slopes.
    """
    inverse, own_inverse, class_inverses, keys, softmax = kept
    assert softmax is not None
    need_features, need_prototypes, need_bias = needed
    (count, size), classes = features.shape, prototypes.shape[0]
    factor = scale / _lift(low)
    block = _power_of_two(size)
    ignored, mean = entropy or (0, False)
    zeros = None
    if any(gradient is None for gradient in (gradients if angles else gradients[::3])):
        zeros = features.new_zeros(count)
    d_target, d_gap, d_opposite, d_others = (
        zeros if found is None else found.contiguous() for found in gradients
    )
    d_features = None
    if need_features:
        d_features = multiply(softmax, prototypes if keys is None else keys)
    whole = _covers_target(entropy is not None, unit, low)
    own_rows = features if whole else torch.empty_like(features)
    # In a large batch, the gradient of a row may underflow in float16.
    weighted = torch.empty_like(features, dtype=None if low is torch.float16 else low)
    parts = own_rows if entropy is None else features.new_empty(count)
    flags = (
        *(unit, angles, valid is not None, low is None, need_features),
        *(entropy is not None, whole, mean),
    )
    key = None
    given = d_target, d_gap, d_opposite, d_others
    if _aligned(features, prototypes, labels, valid, softmax, *given):
        key = (features.device.index, count, classes, size, ignored, low, *flags)
    arguments = (
        *(features, prototypes, labels, labels if valid is None else valid),
        *((inverse, own_inverse) if unit else (own_rows, own_rows)),
        own_rows if d_features is None else d_features,
        *(d_others, d_target, d_others if d_gap is None else d_gap),
        *(d_opposite if angles else d_others, weighted, own_rows, parts, ignored),
        *(classes, size, factor, float(scale), *flags),
    )
    _launch("pair_back", key, count, arguments, {"BLOCK": block}, _warps(block))
    d_prototypes = d_bias = None
    if need_prototypes:
        left, most = halved(weighted, low) if low is torch.float16 else (weighted, None)
        d_prototypes = multiply(softmax.t(), left)
        if most is not None:
            d_prototypes *= most
        if not whole:
            d_prototypes.index_add_(0, labels, own_rows)
        if unit:
            rows = d_prototypes, prototypes, class_inverses, size, low is None
            _launch("through_lengths", key, classes, rows, {"BLOCK": block}, _warps(block))
    if need_bias:
        # With a cross entropy, the target class has -1 in the gradient of the scores.
        own, own_factor = d_target, 1.0
        if entropy is None:
            assert d_others is not None
            parts = d_others * factor
        else:
            own, own_factor = parts, 0.0 if whole else -_lift(low)
        chunks, blocks = (count + _CHUNK - 1) // _CHUNK, (classes + _TILE - 1) // _TILE
        sums = features.new_empty(chunks, classes)
        columns = softmax, parts, labels, own, sums, count, classes, own_factor
        constants = {"CHUNK": _CHUNK, "TILE": _TILE}
        _launch("column_sums", key, chunks * blocks, columns, constants)
        d_bias = sums.sum(0) if chunks > 1 else sums.view(classes)
    return d_features, d_prototypes, d_bias


def _covers_target(entropy: bool, unit: bool, low: torch.dtype | None) -> bool:
    """Whether the products of the backward pass include the target class.

    Otherwise its part is computed in single precision, and from differences of unit vectors.
    """
    return entropy and not unit and low is None


def _lift(low: torch.dtype | None) -> float:
    """Factor of the softmax that keeps small probabilities from underflowing in float16."""
    return 2.0**14 if low is torch.float16 else 1.0


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Make a device current: Triton launches on the current one."""
    if device.type != "cuda":
        return nullcontext()
    if device.index not in _thread.entered:
        # A product that is the first launch of a thread, such as autograd's, warns that there is
        # no CUDA context.
        torch.zeros((), device=device)
        _thread.entered.add(device.index)
    same = torch.cuda.current_device() == device.index
    return nullcontext() if same else torch.cuda.device(device)


def _power_of_two(number: int) -> int:
    """The next power of two, at least 16: the length of a block."""
    return 1 << max(4, (number - 1).bit_length())


def _warps(block: int) -> int:
    return 4 if block <= 1024 else 8
