"""The plain way from features to a split: every score in memory, gradients by autograd."""

from torch import Tensor

from tammes.kernels.problem import Problem, full_precision, working_dtype
from tammes.split import Split, split


def similarity_matrix(problem: Problem) -> Tensor:
    """Similarity of every example to every class, shape ``(N, C)``, in full precision."""
    features, prototypes, bias = problem.features, problem.prototypes, problem.bias
    with full_precision(features.device):
        dtype = working_dtype(features, prototypes)
        similarity = problem.similarity.bind(prototypes)
        query, row_offset = similarity.query(features.to(dtype))
        keys, class_offset = similarity.keys(prototypes.to(dtype))
        matrix = query @ keys.T
        for offset in (class_offset, bias):
            matrix = matrix if offset is None else matrix + offset
        return matrix if row_offset is None else matrix + row_offset[:, None]


def dense_split(problem: Problem, labels: Tensor, reads: frozenset[str]) -> Split:
    """Split a batch with its whole score matrix in memory.

    The reference for every other kernel; differentiable any number of times, and under
    ``torch.compile`` and ``torch.func``.
    """
    with full_precision(problem.features.device):
        # Cast once, so that the parts of a gradient meet in the working dtype.
        dtype = working_dtype(problem.features, problem.prototypes)
        problem = problem._replace(
            features=problem.features.to(dtype), prototypes=problem.prototypes.to(dtype)
        )
        own_prototypes = problem.prototypes.index_select(0, labels)
        own = problem.similarity.own(problem.features, own_prototypes, reads)
        if problem.bias is not None and "target" in own:
            own["target"] = own["target"] + problem.bias.index_select(0, labels)
        return split(similarity_matrix(problem), labels, scale=problem.scale, own=own, reads=reads)
