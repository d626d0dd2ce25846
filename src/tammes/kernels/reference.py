"""Reference kernel: a split in plain torch, all scores in memory, gradients by autograd."""

from collections.abc import Mapping

import torch
from torch import Tensor

from tammes.angles import shifted_cosine
from tammes.kernels.problem import Margin, Problem
from tammes.kernels.score_map import ScoreMap
from tammes.similarity import (
    Cosine,
    InnerProduct,
    full_precision,
    has_exact_products,
    working_dtype,
)
from tammes.split import (
    ALONGSIDE,
    Split,
    assemble,
    columns,
    cross_entropy,
    cutoff_of,
    fill_target,
    of_target,
    split_matrix,
    with_sums,
)

_UNROLLED = 8
"""Dimensions up to which inductor unrolls a sum over them."""


def target_rows(prototypes: Tensor, labels: Tensor) -> Tensor:
    """Select the prototypes of the target classes, shape ``(N, D)``."""
    if prototypes.shape[-1] <= _UNROLLED and _fuses():
        # With unrolled sums, inductor (torch 2.13) may read the gradient of these rows before
        # index_add has filled it, and the prototypes lose it. An operator that it cannot fuse
        # keeps the order.
        prototypes = _unfused(prototypes)
    return prototypes.index_select(0, labels)


def _fuses() -> bool:
    """Whether a compiler may fuse operations here.

    Not in a program that is exported, nor among transforms of ``torch.func``: forward mode would
    lose the derivative of an operator that it does not know. In torch 2.11 every compilation
    counts as an export.
    """
    transformed = torch._C._are_functorch_transforms_active()
    return torch.compiler.is_compiling() and not (torch.compiler.is_exporting() or transformed)


@torch.library.custom_op("tammes::unfused", mutates_args=())
def _unfused(tensor: Tensor) -> Tensor:
    """Copy a tensor, as an operator that is opaque to a compiler."""
    return tensor.clone()


_unfused.register_fake(torch.empty_like)
_unfused.register_autograd(lambda _, gradient: _unfused(gradient))
_unfused.register_vmap(lambda _, dims, tensor: (_unfused(tensor), dims[0]))


def score_matrix(problem: Problem) -> Tensor:
    """Score of every example for every class, shape ``(N, C)``; ``-inf`` for a masked class."""
    # Masked after scaling: the gradient of a learned scale would be NaN at -inf.
    scaled = problem.scale * similarity_matrix(problem._replace(there=None))
    return _masked(scaled, problem.there)


def similarity_matrix(problem: Problem) -> Tensor:
    """Similarity of every example to every class, shape ``(N, C)``; ``-inf`` for a masked class."""
    problem = _working(problem)
    with full_precision(problem.features.device):
        query, row_offset = problem.similarity.query(problem.features)
        return _masked(_products(problem, query, row_offset), problem.there)


def _masked(matrix: Tensor, there: Tensor | None) -> Tensor:
    return matrix if there is None else matrix.masked_fill(~there, -torch.inf)


def _working(problem: Problem) -> Problem:
    """Cast inputs once, so that gradients add up in the working dtype; bind the similarity."""
    dtype = working_dtype(problem.features, problem.prototypes)
    return problem._replace(
        features=problem.features.to(dtype),
        prototypes=problem.prototypes.to(dtype),
        bias=None if problem.bias is None else problem.bias.to(dtype),
        similarity=problem.similarity.bind(problem.prototypes),
    )


def _products(problem: Problem, query: Tensor, row_offset: Tensor | None) -> Tensor:
    keys, class_offset = problem.similarity.keys(problem.prototypes)
    matrix = problem.similarity.products(query, keys)
    for offset in (class_offset, problem.bias):
        matrix = matrix if offset is None else matrix + offset
    return matrix if row_offset is None else matrix + row_offset[:, None]


def reference_split(
    problem: Problem,
    labels: Tensor,
    reads: frozenset[str],
    mapping: ScoreMap | None = None,
) -> Split:
    """Split a batch in plain torch operations.

    The reference for every kernel; differentiable any number of times, and under
    ``torch.compile`` and ``torch.func``.
    """
    with full_precision(problem.features.device):
        problem = _working(problem)
        query, row_offset = problem.similarity.query(problem.features)
        matrix = _products(problem, query, row_offset)
        own = _own_numbers(problem, labels, reads, query, matrix)
        if mapping is not None:
            known = assemble(own, labels, problem.scale, matrix.shape[1], matrix)
            if mapping.top:
                rest = fill_target(_masked(matrix.detach(), problem.there), labels, -torch.inf)
                largest = rest.topk(min(mapping.top + 1, rest.shape[1])).values
                known = known._replace(cutoff=cutoff_of(largest, mapping.top))
            # The map must not see the target class: its gradient could be 0 times infinity.
            matrix = mapping.function(
                fill_target(matrix, labels, 0.0), *columns(mapping.numbers(known))
            )
        split = split_matrix(matrix, labels, problem.scale, problem.there, own, reads)
        return with_sums(split, reads)


def _own_numbers(
    problem: Problem, labels: Tensor, reads: frozenset[str], query: Tensor, matrix: Tensor
) -> dict[str, Tensor]:
    """Compute the numbers of the target class that are more accurate than the matrix."""
    features, prototypes, bias, _, similarity, *_ = problem
    exact = "target" in reads and has_exact_products(features.dtype)
    inner = exact and isinstance(similarity, InnerProduct)
    cosine = exact and isinstance(similarity, Cosine) and "gap" not in reads
    product = of_target(matrix, labels) if inner or cosine else None
    apart = reads - {"target"} if inner else reads
    own: dict[str, Tensor] = {}
    if not apart.isdisjoint(("target", *ALONGSIDE)):
        own = similarity.own(features, target_rows(prototypes, labels), apart, query)
    if bias is not None and "target" in own:
        own["target"] = own["target"] + bias.index_select(0, labels)
    if product is not None:
        # Cosines need the digits near 1 and -1, but their gradient is as accurate by products.
        digits = (own["target"] - product).detach() if "target" in own else 0.0
        own["target"] = product + digits
    return own


def gradients_by_reference(
    problem: Problem,
    labels: Tensor,
    wanted: Mapping[str, Tensor | None],
) -> list[Tensor | None]:
    """Gradients of features, prototypes, bias and scale, given those of a split's numbers.

    For batched gradients, and for ``create_graph``. ``wanted["mean"]`` is the gradient of the sum
    over the classes.
    """
    with torch.enable_grad():
        split = reference_split(problem.masked(), labels, frozenset(wanted))
        numbers = split._asdict() | {"mean": split.mean * split.rivals}
    return _differentiate(
        problem,
        [
            (numbers[name], value)
            for name, value in wanted.items()
            if value is not None and numbers[name].requires_grad
        ],
    )


def loss_gradients_by_reference(
    problem: Problem, labels: Tensor, margin: Margin, d_loss: Tensor, *, mean: bool
) -> list[Tensor | None]:
    """Gradients of features, prototypes and bias, given that of a mean or sum of cross entropies.

    For batched gradients, and for ``create_graph``.
    """
    with torch.enable_grad():
        given, valid = problem.masked(), problem.valid
        reads = frozenset(("gap" if margin.angle else "target", "others"))
        split = reference_split(given, labels, reads)
        target = split.target
        if margin.angle:
            target = shifted_cosine(split.gap, split.opposite, margin.angle)
        losses = cross_entropy(split, target, margin.similarity)
        count: Tensor | int = len(labels)
        if valid is not None:
            if given.there is not None:
                # As in the kernels, the loss of a masked class is NaN, and so is its gradient.
                losses = losses * torch.where(given.there.index_select(0, labels), 1.0, torch.nan)
            losses, count = torch.where(valid, losses, 0.0), valid.sum().clamp_min(1)
        loss = losses.sum() / count if mean else losses.sum()
    return _differentiate(problem, [(loss, d_loss)])[:3]


def _differentiate(problem: Problem, pairs: list[tuple[Tensor, Tensor]]) -> list[Tensor | None]:
    """Gradients of features, prototypes, bias and scale, given numbers and their gradients."""
    scale = problem.scale if isinstance(problem.scale, Tensor) else None
    inputs = (problem.features, problem.prototypes, problem.bias, scale)
    needed = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
    found = iter(
        torch.autograd.grad(
            [number for number, _ in pairs],
            needed,
            [value for _, value in pairs],
            create_graph=torch.is_grad_enabled(),
            allow_unused=True,
        )
    )
    return [next(found) if t is not None and t.requires_grad else None for t in inputs]
