"""Compare what a path gives with the reference.

One tolerance holds for all. A path computes in the working dtype, whose rounding error is eps. Its
scores f are wrong by eps * |f|, which changes exponentials, and with them losses and gradients, by
that share. So a result may be wrong by ``FACTOR * eps * (1 + max|f|)`` times its size, where the
size is its largest number or, where parts of it cancel, that of the parts. Where a result is worse
conditioned than that, as at a kink or for angles near pi, it may be wrong by ``FACTOR`` times what
rounding errors of the inputs, of the similarities and of the distances change the exact result by;
the angle to the own class has no such error of its own. A gradient has the dtype of its tensor, in
which autograd adds the gradients of the terms: each may be rounded once, their sum as well. Nothing
is decided case by case.
"""

import math
from dataclasses import dataclass

import torch

from fuzz import reference
from fuzz.formulas import norm
from fuzz.paths import PATHS, TAKES
from fuzz.ranges import COSINE_HEADS, FEATURE_TERMS, PROTOTYPE_TERMS, PROXY_TERMS

FACTOR = 16
HALF = ("bfloat16", "float16")


@dataclass
class Difference:
    """A result of a path that is not that of the reference.

    Attributes:
        path: name of the path.
        step: which call.
        quantity: name of the result, or ``raises``.
        found: of the path, or the error.
        expected: of the reference.
        error: largest difference.
        allowed: largest difference that rounding explains.
    """

    path: str
    step: int
    quantity: str
    found: object
    expected: object
    error: float = math.inf
    allowed: float = 0.0

    def __str__(self):
        if self.quantity == "raises":
            return f"{self.path}: raises {self.found}"
        return (
            f"{self.path}, call {self.step}: {self.quantity} is wrong by {self.error:.3g} "
            f"(allowed {self.allowed:.3g}, largest number {_largest(self.expected):.3g})"
        )


class Reference:
    """Exact results of a case, and how much rounding may change them."""

    def __init__(self, case):
        self.case = case
        self.exact = reference.run(case)
        self._spreads = {}

    def spread(self, eps):
        """Largest change of each result by rounding of the inputs and of the computation."""
        if eps not in self._spreads:
            runs = [
                reference.run(self.case, noise=(torch.Generator().manual_seed(seed), eps))
                for seed in range(6)
            ]
            if eps >= torch.finfo(torch.float32).eps:
                runs.append(reference.run(self.case, torch.float32))
            self._spreads[eps] = [
                {
                    key: max(_error(run[step][key].double(), value) for run in runs)
                    for key, value in exact.items()
                }
                for step, exact in enumerate(self.exact)
            ]
        return self._spreads[eps]


def differences(case, path, exact=None):
    """Everything that a path has wrong; nothing where it does not take the case."""
    if path in TAKES and not TAKES[path](case):
        return None
    # Under a compiler no values are looked at.
    if case.masked_own and path in ("compiled", "inductor"):
        return None
    try:
        found = PATHS[path](case)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        # Of several ranks one refuses its batch, and so do the others that hear of it.
        if case.masked_own and ("ValueError" in message or "its batch" in message):
            return []
        return [Difference(path, 0, "raises", message[:400], None)]
    if case.masked_own:
        return [Difference(path, 0, "raises", "nothing, where the own class is masked", None)]
    exact = exact or Reference(case)
    wrong = []
    for step, (results, expected) in enumerate(zip(found, exact.exact, strict=True)):
        scale = expected.get("state head.adaptive_scale")
        sizes = _sizes(case, step, case.scale if scale is None else scale.item())
        wanted = expected.keys() - ({"grad weight"} if case.head == "simplex" else set())
        if results.keys() != wanted:
            names = sorted(results.keys() ^ wanted)
            wrong.append(Difference(path, step, "raises", f"results differ by name: {names}", None))
            continue
        if results["loss"].dtype != case.working_dtype:
            message = f"a loss of dtype {results['loss'].dtype}, not {case.working_dtype}"
            wrong.append(Difference(path, step, "raises", message, None))
        for key in results:
            difference = _compare(case, path, step, key, results[key], exact, sizes)
            if difference is not None:
                wrong.append(difference)
    return wrong


def _compare(case, path, step, key, found, exact, sizes):
    expected = exact.exact[step][key]
    if found.shape != expected.shape:
        return Difference(path, step, key, found, expected)
    value, largest = found.detach().double().cpu(), _largest(expected)
    error = _error(value, expected)
    eps, bound = _eps(case), sizes["scores"]
    size = max(largest, sizes.get(key, 0.0))
    if key.startswith("grad ") and torch.finfo(found.dtype).eps > eps:
        parts = 1 + len(case.terms)
        rounding = parts * torch.finfo(found.dtype).eps * size + torch.finfo(found.dtype).tiny
    else:
        rounding = 0.0
    if path == "fused" and _half_products(case) is not None:
        # Products take half precision in: its rounding is one of the inputs.
        half = torch.finfo(_half_products(case)).eps
        allowed = FACTOR * half * max(largest, sizes.get(f"scores in {key}", 0.0))
        allowed += FACTOR * exact.spread(half)[step][key] + rounding
    else:
        allowed = FACTOR * eps * bound * size + rounding
        if not error <= allowed:
            allowed += FACTOR * exact.spread(eps)[step][key]
    if error <= allowed:
        return None
    return Difference(path, step, key, found, expected, error, allowed)


def _half_products(case):
    """Dtype of the inputs of the fused products where that is a half precision one."""
    if case.autocast and torch.cuda.is_available():
        return torch.bfloat16
    return case.torch_dtype if case.dtype == case.parameter_dtype in HALF else None


def _eps(case):
    """Rounding error of the working dtype.

    A schedule is computed in float32, which a straight line between numbers of the grid does not
    show; the states, the scale, the counts of ``ldam`` and the terms on the prototypes of a
    head that is not in float64 are in float32 as well.
    """
    rounded = any(o.get("shape") != "linear" for _, _, o in case.schedules.values())
    narrow = case.parameter_dtype != "float64"
    of_head = case.stateful or case.learnable or case.within is not None
    of_head = of_head or any(
        name in (*PROTOTYPE_TERMS, *PROXY_TERMS, "ldam") for _, name, _ in case.terms
    )
    if rounded or (narrow and of_head):
        return torch.finfo(torch.float32).eps
    return torch.finfo(case.working_dtype).eps


def _error(value, expected):
    """Largest difference; infinite where one of the two is not a number."""
    if not value.numel():
        return 0.0
    difference = (value - expected).abs()
    difference = torch.where(value == expected, 0.0, difference)
    largest = difference.max().item()
    return math.inf if math.isnan(largest) else largest


def _largest(tensor):
    if not isinstance(tensor, torch.Tensor) or not tensor.numel():
        return 0.0
    finite = tensor[tensor.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0


def _sizes(case, step, scale):
    """Size of the parts that results are made of: scores, and gradients of scores."""
    batch, parameters = case.batch(step), case.parameters()
    counted = batch.labels.long() != case.ignore_index
    lengths = norm(batch.features[counted].double())
    x = _largest(lengths)
    w = _largest(norm(parameters.weight.double()))
    shortest_x = lengths[lengths > 1e-12].min().item() if (lengths > 1e-12).any() else 1.0
    widths = norm(parameters.weight.double())
    shortest_w = widths[widths > 1e-12].min().item()
    if case.head == "gaussian":
        scores, by_x, by_w = (x + w) ** 2 / 2, x + w, x + w
    elif case.head == "distance":
        scores, by_x, by_w = x + w, 1.0, 1.0
    elif case.head == "reciprocal":
        scores, by_x, by_w = (x + w) ** 2 / case.size + x * w, 2 * x + 3 * w, 3 * x + 2 * w
    elif case.head in COSINE_HEADS:
        scores, by_x, by_w = 1.0, 1 / shortest_x, 1 / shortest_w
    elif case.head == "cosine_raw":
        scores, by_x, by_w = x, 1.0, x / shortest_w
    else:
        bias = 0.0 if parameters.bias is None else _largest(parameters.bias.double())
        scores, by_x, by_w = x * w + bias, w, x
    scores, by_x, by_w = scale * scores, scale * by_x, scale * by_w
    names = [name for _, name, _ in case.terms]
    if any(name in FEATURE_TERMS for name in names):
        scores, by_x = max(scores, 12 * x * x), max(by_x, 12 * x)
    if "super_symmetry" in names:
        by_w = max(by_w, 4 * case.classes * w**3)
    if any(name in PROXY_TERMS for name in names):
        scores, by_x = max(scores, 48.0), max(by_x, 32 / shortest_x)
        by_w = max(by_w, 32 / shortest_w)
    if "sample_margin" in names:
        by_x, by_w = max(by_x, 1 / shortest_x), max(by_w, 1 / shortest_w)
    if any(name in ("cac", "arpl") for name in names):
        # Of the distance to the own prototype, which is that of unit vectors on cosine heads.
        by_x = max(by_x, 1 / shortest_x if case.head in COSINE_HEADS else 1.0)
        by_w = max(by_w, 1 / shortest_w if case.head in (*COSINE_HEADS, "cosine_raw") else 1.0)
    factor = sum(abs(factor) for factor, _, _ in case.terms)
    weights = torch.ones(len(lengths)) if batch.weights is None else batch.weights[counted].double()
    largest, total = _largest(weights), weights.sum().item()
    if case.class_weights is not None:
        largest, total = 3 * largest, 3 * total
    share = factor * _largest(batch.upstream)
    if case.reduction == "mean":
        share, divisor = share / max(total, 1e-3), max(total, 1e-3)
    else:
        divisor = 1.0
    symmetry = (case.classes * w * w) ** 2 if "super_symmetry" in names else 0.0
    value = max(1 + scores, symmetry)
    sizes = {
        "scores": 1 + scores,
        "loss": factor * value * total / divisor / (1 + scores),
        "grad features": share * largest * by_x,
        "grad weight": share * total * by_w,
        "grad bias": share * total * scale,
        "grad log_scale": share * total,
        "grad weights": share * value / (1 + scores),
    }
    for name in case.names:
        sizes[f"term {name}"] = value / (1 + scores)
        # A learned number may act on the score of every class.
        sizes[f"grad states.{name}.value"] = share * total * case.classes
    if "logit_divergence" in names:
        # A difference of two sums of scores: of two classes zero, whatever the scores are.
        sizes["scores in loss"] = factor * scores * total / divisor
        sizes |= {f"scores in term {n}": scores for n in case.names if "logit_divergence" in n}
        # Its gradient by a score is a difference of scores; that of the scale has another in it.
        sizes["grad log_scale"] *= max(1.0, scores)
    for key, kind in case.at_call.items():
        if kind == "learned":
            sizes[f"grad {key}"] = share * largest * scale
    return sizes
