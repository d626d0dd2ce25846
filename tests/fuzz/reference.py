"""Independent reference: loss, gradients, terms and states of a case, from formulas alone.

Nothing of the library is imported. Rows that are ignored and classes that are masked are removed
before anything is computed, so that neither can have an influence.
"""

import math
from typing import Any

import torch
from torch import Tensor

from fuzz.formulas import (
    ON_FEATURES,
    ON_PROTOTYPES,
    ON_PROXIES,
    ON_SCORES,
    View,
    distance,
    length,
    norm,
    project,
    similarity,
    unit,
)
from fuzz.ranges import COSINE_HEADS


def scheduled(schedule, steps):
    """Value of a schedule after a number of steps; the library computes it in float32."""
    kind, arguments, options = schedule
    if kind == "WarmUp":
        start, end = arguments
        u = min(1.0, max(0.0, (steps - options["delay"]) / options["steps"]))
        shapes = {
            "linear": u,
            "cosine": (1 - math.cos(math.pi * u)) / 2,
            "exponential": math.expm1(5 * u) / math.expm1(5),
        }
        return start + (end - start) * shapes[options["shape"]]
    if kind == "LambdaAnnealing":
        decayed = arguments[0] * (1 + options["gamma"] * steps) ** -options["power"]
        return max(decayed, options["minimum"])
    if kind == "LambdaDecay":
        u = min(1.0, steps / (0.5 * arguments[0]))
        return (1 + options["start"]) ** (1 - u) * (1 + options["end"]) ** u - 1
    counts = torch.tensor(arguments[0], dtype=torch.float64)
    weights = (1 - 0.9999) / (1 - 0.9999**counts)
    weights = weights * len(counts) / weights.sum()
    return weights if steps >= options["start"] else torch.ones_like(weights)


def _noisy(tensor, noise):
    """A tensor with every number moved by a relative rounding error."""
    if noise is None or tensor is None:
        return tensor
    generator, eps = noise
    signs = torch.randint(2, tensor.shape, generator=generator, dtype=torch.float64) * 2 - 1
    # Minus infinity stays what it is.
    return torch.where(tensor.isfinite(), tensor * (1 + eps * signs).to(tensor.dtype), tensor)


def _moved(tensor, noise, parts):
    """A tensor with every number moved by up to a rounding error of the largest of its row.

    That is what a sum is wrong by, also where the parts cancel, or where in one dimension no error
    of the inputs changes it.
    """
    if noise is None or not tensor.numel():
        return tensor
    generator, eps = noise
    errors = 2 * torch.rand(tensor.shape, generator=generator, dtype=torch.float64) - 1
    sizes = parts.detach().abs()
    largest = sizes if sizes.ndim == 1 else sizes.amax(1, keepdim=True)
    return tensor + (eps * errors * largest).to(tensor.dtype)


def run(case, dtype=torch.float64, noise=None):
    """Loss, gradients, terms and states of every call of a case.

    Args:
        case: what to compute.
        dtype: to compute in.
        noise: none, or a generator and the relative size of random errors, those of all inputs, of
            similarities and of distances.
    """
    parameters = {
        name: _noisy(value.to(dtype), noise)
        for name, value in case.parameters()._asdict().items()
        if value is not None
    }
    parameters |= {
        f"states.{name}.value": _noisy(torch.tensor([start], dtype=dtype), noise)
        for (_, term, settings), name in zip(case.ordered, case.names, strict=True)
        if (start := _learned(case, term, settings)) is not None
    }
    first = parameters.pop("adaptive_scale", None)
    memory = {} if first is None else {"head.adaptive_scale": first}
    memory |= {
        f"{name}.{key}": value
        for (_, term, _), name in zip(case.ordered, case.names, strict=True)
        for key, value in _fresh_state(case, term, dtype).items()
    }
    return [_step(case, parameters, memory, step, dtype, noise) for step in range(case.steps)]


def _learned(case, term, settings):
    """Initial value of the number that a term learns, as the library rounds it, or none."""
    start = {"uniface": math.log(10 * case.classes), "arpl": 0.0}.get(term)
    if term == "sphereface2":
        start = _balanced(case, **settings)
    kept = torch.promote_types(case.torch_parameter_dtype, torch.float32)
    return None if start is None else torch.tensor(start, dtype=kept).item()


def _balanced(case, **settings):
    """Offset at which both parts of sphereface2 have the same slope where all cosines are 0."""
    margin, balance, power = (
        sum(value) / len(value) if isinstance(value, (list, tuple)) else value
        for value in (settings[key] for key in ("margin", "balance", "power"))
    )
    learned = case.parameters().log_scale
    scale = case.scale if learned is None else learned.double().exp().item()
    middle, low, high = 2 * 0.5**power - 1, -1e4, 1e4
    for _ in range(200):
        offset = (low + high) / 2
        own = math.log(balance) - _log1pexp(scale * (middle - margin) + offset)
        rest = math.log((1 - balance) * (case.classes - 1))
        rest -= _log1pexp(-scale * (middle + margin) - offset)
        low, high = (offset, high) if own > rest else (low, offset)
    return round(low, 3)


def _log1pexp(value):
    return value if value > 700 else math.log1p(math.exp(value))


def _fresh_state(case, term, dtype):
    if term == "center":
        return {"centers": torch.zeros(case.classes, case.size, dtype=dtype)}
    if term == "adaface":
        return {
            "mean": torch.tensor([20.0], dtype=dtype),
            "std": torch.tensor([100.0], dtype=dtype),
        }
    if term == "curricularface":
        return {"mean": torch.zeros(1, dtype=dtype)}
    if term == "elasticface":
        return {"steps": torch.zeros(1, dtype=torch.int64)}
    return {}


def _step(case, parameters, memory, step, dtype, noise) -> dict[str, Any]:
    batch = case.batch(step)
    leaves = {name: value.clone().requires_grad_() for name, value in parameters.items()}
    leaves["features"] = _noisy(batch.features.to(dtype), noise).requires_grad_()
    call = dict(batch.settings)
    if case.weights == "learned":
        leaves["weights"] = batch.weights.to(dtype).requires_grad_()
    for key, kind in case.at_call.items():
        if kind == "learned":
            leaves[key] = call[key] = call[key].to(dtype).requires_grad_()
        elif kind == "each":
            call[key] = call[key].to(dtype)
    past = step if case.training else 0
    changes = {key: scheduled(value, past) for key, value in case.schedules.items()}
    changes |= call

    counted = batch.labels.long() != case.ignore_index
    features, classes = leaves["features"][counted], batch.labels.long()[counted]
    weights = torch.ones(len(classes), dtype=dtype)
    if batch.weights is not None:
        weights = leaves.get("weights", batch.weights.to(dtype))[counted]
    by_class = changes.get("class_weights", case.class_weights)
    if by_class is not None:
        weights = weights * torch.as_tensor(by_class, dtype=dtype)[classes]
    total = weights.sum() if weights.sum() != 0 else torch.ones((), dtype=dtype)

    view = _view(case, leaves, memory, features, classes, noise)
    if case.training:
        if case.adaptive and any(term in ON_SCORES for _, term, _ in case.terms):
            memory["head.adaptive_scale"] = _adapted_scale(view)
            view = _view(case, leaves, memory, features, classes, noise)
        _update_norms(case, memory, features)
        _update_targets(case, memory, view)
    rows, terms = torch.zeros(len(classes), dtype=dtype), {}
    for (factor, term, settings), name in zip(case.ordered, case.names, strict=True):
        own = {key: _select(changes.get(key, v), classes, counted) for key, v in settings.items()}
        state = {k.split(".")[1]: v for k, v in memory.items() if k.split(".")[0] == name}
        if f"states.{name}.value" in leaves:
            state["value"] = leaves[f"states.{name}.value"]
        if term == "elasticface":
            state["training"] = case.training
        values = _values(case, term, view, own | ({"state": state} if state else {}), weights)
        rows = rows + factor * values
        terms[name] = ((weights * values).sum() / total).detach()
    rows = rows * weights
    loss = torch.zeros(case.rows, dtype=dtype).index_put((counted.nonzero()[:, 0],), rows)
    if case.reduction != "none":
        loss = loss.sum() / (total if case.reduction == "mean" else 1)
    gradients = torch.autograd.grad(
        (loss * batch.upstream.to(dtype)).sum(), [*leaves.values()], materialize_grads=True
    )
    if case.training:
        _move_centers(case, memory, features.detach(), classes)
        memory |= {key: value + 1 for key, value in memory.items() if key.endswith(".steps")}
    found = {"loss": loss.detach()}
    found |= {f"grad {name}": g for name, g in zip(leaves, gradients, strict=True)}
    found |= {f"term {name}": value for name, value in terms.items()}
    found |= {f"state {name}": value.clone() for name, value in memory.items()}
    return found


def _select(value, classes, counted):
    """A setting of each example that counts, from one per class or one per example."""
    if isinstance(value, tuple) and len(value) and not isinstance(value[0], int):
        return torch.tensor(value, dtype=torch.float64)[classes]
    return value[counted] if isinstance(value, Tensor) and value.ndim else value


def _adapted_scale(view):
    """Scale of AdaCos, from the scale so far and the angles of a batch, shape ``(1,)``."""
    scale = view.scale.detach().view(1)
    if not len(view.labels):
        return scale
    total = view.rest.detach().exp().sum() / len(view.labels)
    # Of an even number the smaller angle.
    median = view.target.detach().clamp(-1, 1).acos().median().clamp_max(math.pi / 4)
    return (total.log() / median.cos()).clamp_min(math.sqrt(2) * math.log(2)).view(1)


def _view(case, leaves, memory, features, classes, noise):
    weight, bias = leaves["weight"], leaves.get("bias")
    there = torch.ones(case.classes, dtype=torch.bool) if bias is None else bias.isfinite()
    place = there.cumsum(0) - 1
    some = None if bias is None else bias[there]
    own = weight[classes]
    if own.ndim == 3:
        # The nearest centre stands for the class.
        each = (unit(features)[:, None] * unit(own)).sum(2)
        own = own[torch.arange(len(own)), each.argmax(1)]
    if "log_scale" in leaves:
        scale = leaves["log_scale"].exp().squeeze()
    elif case.adaptive:
        scale = memory["head.adaptive_scale"].squeeze()
    else:
        scale = torch.tensor(case.scale, dtype=weight.dtype)
    unit_heads = (*COSINE_HEADS, "cosine_raw")
    scores = similarity(case.head, features, weight[there], some)
    cosines = similarity("cosine", features, weight[there], None)
    # The opposite prototype is as far as both vectors are long.
    near, far = (distance(case.head, features, sign * own) for sign in (1, -1))
    return View(
        features=features,
        own=own,
        labels=place[classes],
        classes=classes,
        similarity=_moved(scores, noise, scores),
        cosines=_moved(cosines, noise, cosines),
        scale=scale,
        length=length(case.head, features, own),
        distance=_moved(near, noise, torch.maximum(near, far)),
        prototypes=unit(weight) if case.head in unit_heads else weight,
        there=there,
        rounding=8 * torch.finfo(case.working_dtype).eps,
    )


def _values(case, term, view, settings, weights):
    """Value of a term for each example that counts."""
    dtype = view.features.dtype
    settings = {
        key: value.to(dtype) if isinstance(value, Tensor) else value
        for key, value in settings.items()
    }
    if term in ON_SCORES:
        return ON_SCORES[term](view, **settings)
    if term in ON_PROTOTYPES:
        return ON_PROTOTYPES[term](view.prototypes, **settings).expand(len(weights))
    if term in ON_PROXIES:
        return ON_PROXIES[term](view, **settings).expand(len(weights))
    features = view.features
    if case.within is not None:
        features = project(features, view.prototypes, case.within)
    rows, anchors = ON_FEATURES[term](features, view.classes, **settings)
    values = torch.stack(rows) if rows else features.sum(1)
    anchored = (weights * anchors).sum()
    # The mean over all examples is the mean over the anchors.
    share = weights.sum() / torch.where(anchored == 0, 1.0, anchored)
    return torch.where(anchors, values, 0.0) * share


def _update_norms(case, memory, features):
    for (_, term, settings), name in zip(case.ordered, case.names, strict=True):
        if term != "adaface" or not len(features):
            continue
        norms = norm(features.detach()).clamp(1e-3, 100.0)
        momentum = settings["momentum"]
        mean = memory[f"{name}.mean"]
        memory[f"{name}.mean"] = (1 - momentum) * mean + momentum * norms.mean()
        if len(norms) > 1:
            std = memory[f"{name}.std"]
            memory[f"{name}.std"] = (1 - momentum) * std + momentum * norms.std()


def _update_targets(case, memory, view):
    for (_, term, settings), name in zip(case.ordered, case.names, strict=True):
        if term == "curricularface" and len(view.labels):
            mean, momentum = memory[f"{name}.mean"], settings["momentum"]
            now = view.target.detach().mean()
            memory[f"{name}.mean"] = (1 - momentum) * mean + momentum * now


def _move_centers(case, memory, features, classes):
    for (_, term, settings), name in zip(case.ordered, case.names, strict=True):
        if term != "center":
            continue
        centers = memory[f"{name}.centers"].clone()
        for c in classes.unique():
            mine = features[classes == c]
            pull = (mine - centers[c]).sum(0) / (1 + len(mine))
            centers[c] = centers[c] + settings["rate"] * pull
        memory[f"{name}.centers"] = centers
