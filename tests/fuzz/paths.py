"""Ways to evaluate a case with the library."""

import contextlib
import pickle
import random as python_random
from unittest import mock

import torch
from rank_pool import everywhere
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import checkpoint

import tammes
from fuzz.case import Batch
from fuzz.ranges import CENTERS, DISTANCE_HEADS, PROTOTYPE_TERMS, PROXY_TERMS
from tammes.kernels import tiling
from tammes.kernels.streamed import functions

KINDS = {
    "linear": (tammes.LinearHead, {}),
    "linear_no_bias": (tammes.LinearHead, {"bias": False}),
    "cosine": (tammes.CosineHead, {}),
    "cosine_adaptive": (tammes.CosineHead, {}),
    "cosine_raw": (tammes.CosineHead, {"normalize_features": False}),
    "cosine_subcenters": (tammes.CosineHead, {"subcenters": CENTERS["cosine_subcenters"]}),
    "gaussian": (tammes.GaussianHead, {}),
    "distance": (tammes.DistanceHead, {}),
    "reciprocal": (tammes.DistanceHead, {"reciprocal": True}),
    "simplex": (tammes.SimplexHead, {}),
}


# ------------------------------------------------------------------------- a criterion from a case


def loss_code(case):
    """The loss of a case as an expression."""
    if case.within is None:
        return _sum_code(case.terms)
    kind, number, detach = case.within
    name = "eps" if kind == "direct_sum" else "p"
    parts = f"{_sum_code(case.classification)}, {_sum_code(case.metric)}"
    return f"tammes.{kind}({parts}, {name}={number}, detach={detach})"


def _sum_code(terms):
    return " + ".join(
        f"{factor} * tammes.{name}({', '.join(f'{k}={v!r}' for k, v in settings.items())})"
        for factor, name, settings in terms
    ).replace("-inf", 'float("-inf")')


def scale_setting(case):
    """Scale of the head, as its constructor takes it."""
    return "learnable" if case.learnable else "adaptive" if case.adaptive else case.scale


def head_code(case, implementation="dense"):
    """The head of a case as an expression."""
    kind, options = KINDS[case.head]
    options = {**options, "scale": scale_setting(case), "implementation": implementation}
    written = ", ".join(f"{key}={value!r}" for key, value in options.items())
    return f"tammes.{kind.__name__}({case.size}, {case.classes}, {written})"


def criterion_code(case):
    """Options of the criterion of a case, as they are written in a call."""
    options = {"reduction": case.reduction, "ignore_index": case.ignore_index}
    if case.class_weights is not None:
        options["class_weights"] = case.class_weights
    if case.nan_ignored:
        options["validate"] = None
    return ", ".join(f"{key}={value!r}" for key, value in options.items())


def schedules_code(case):
    """Schedules of a case, as they are written in a call."""
    return ", ".join(
        f"{key}=tammes.schedules.{kind}"
        f"({', '.join([*map(repr, args), *(f'{k}={v!r}' for k, v in options.items())])})"
        for key, (kind, args, options) in case.schedules.items()
    )


def build(case, implementation="dense", *, group=None, averaged=True, by_hand=False):
    """A criterion of the library; with a group its head is sharded."""
    kind, options = KINDS[case.head]
    whole = eval(head_code(case, implementation), {"tammes": tammes})
    whole = whole.to(case.torch_parameter_dtype)
    given = {k: v for k, v in case.parameters()._asdict().items() if v is not None}
    whole.load_state_dict(given)
    head = whole
    if group is not None:
        head = tammes.ShardedHead(
            kind,
            case.size,
            case.classes,
            group=group,
            averaged=averaged,
            implementation=implementation,
            scale=scale_setting(case),
            **options,
        ).to(case.torch_parameter_dtype)
        head.load_state_dict(whole.state_dict())
    code = f"tammes.Criterion(head, {loss_code(case)}, {criterion_code(case)})"
    criterion = eval(code, {"tammes": tammes, "head": head})
    if case.torch_parameter_dtype == torch.float64:
        criterion = criterion.double()
    if case.schedules:
        code = f"criterion.schedule({schedules_code(case)}, by_hand={by_hand})"
        eval(code, {"tammes": tammes, "criterion": criterion})
    return criterion.train(case.training)


# --------------------------------------------------------------------------------------- one call


def step(case, criterion, batch, call=None):
    """Loss, gradients, terms and states of one call of a criterion."""
    device = criterion.head.weight.device
    features, labels, weights, settings, upstream = batch
    features = features.to(device, copy=True).requires_grad_()
    leaves = {"features": features}
    if weights is not None:
        weights = weights.to(device, copy=True).requires_grad_(case.weights == "learned")
        if case.weights == "learned":
            leaves["weights"] = weights
    settings = dict(settings)
    for key, kind in case.at_call.items():
        if kind in ("each", "learned"):
            settings[key] = settings[key].to(device, copy=True)
        if kind == "learned":
            leaves[key] = settings[key].requires_grad_()
    call = criterion if call is None else call
    criterion.zero_grad(set_to_none=True)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=case.autocast):
        loss = call(features, labels.to(device), weights=weights, **settings)
    if loss.requires_grad:
        (loss * upstream.to(device)).sum().backward()
    leaves |= {name.removeprefix("head."): p for name, p in criterion.named_parameters()}
    found = {"loss": loss.detach()}
    for name, leaf in leaves.items():
        found[f"grad {name}"] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    found |= {f"term {name}": value for name, value in criterion.terms.items()}
    for name, state in criterion.states.items():
        found |= {f"state {name}.{key}": value.clone() for key, value in state.named_buffers()}
    if case.adaptive:
        found["state head.adaptive_scale"] = criterion.head.adaptive_scale.clone()
    return found


def _calls(case, criterion, call=None):
    return [step(case, criterion, case.batch(number), call) for number in range(case.steps)]


# ------------------------------------------------------------------------------------------ paths


def dense(case):
    """All scores in memory."""
    return _calls(case, build(case, "dense"))


def streamed_blocks(case):
    """Rows and classes of a block of the streamed path, or none for the library's own choice."""
    random = python_random.Random(f"blocks {case.seed}")
    if random.random() < 0.3:
        return None
    return random.choice((1, 2, 3, 5)), random.choice((1, 2, 3, 5)), random.random() < 0.3


@contextlib.contextmanager
def cut(rows, classes, thin):
    """Cut the streamed path into small blocks; thin blocks go class by class."""

    def blocks(self, problem):
        return tiling.cut(len(problem.features), rows), tiling.cut(len(problem.prototypes), classes)

    def class_blocks(problem):
        return tiling.cut(len(problem.prototypes), classes)

    with (
        mock.patch.object(tiling.Plan, "blocks", blocks),
        mock.patch.object(tiling.Plan, "too_thin", return_value=thin),
        mock.patch.object(functions, "class_blocks", class_blocks),
    ):
        yield


def stream(case):
    """One block of scores at a time."""
    blocks = streamed_blocks(case)
    with contextlib.nullcontext() if blocks is None else cut(*blocks):
        return _calls(case, build(case, "streamed"))


def fused(case):
    """Kernels of the GPU, or Triton's interpreter."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return _calls(case, build(case, "fused").to(device))


def can_be_fused(case):
    """Whether the fused kernels take this case, and no other path in their place."""
    summed = {"hinge", "bce", "uniface", "sphereface2"}
    if case.head in DISTANCE_HEADS:
        return False
    if case.dtype == case.parameter_dtype == "bfloat16" and not torch.cuda.is_available():
        # Triton's interpreter multiplies the bits of bfloat16 as if they were integers.
        return False
    # What is not a sum over the batch, or takes a gradient beside the head, is streamed.
    learned = "learned" in (case.weights, *case.at_call.values())
    if case.reduction == "none" or learned or "float64" in (case.dtype, case.parameter_dtype):
        return False
    on_scores = {name for _, name, _ in case.classification} - {*PROTOTYPE_TERMS, *PROXY_TERMS}
    return not on_scores <= summed


def compiled(case, backend="aot_eager"):
    """Through ``torch.compile``.

    Unless told otherwise, torch goes back through anything it has compiled under the autocast that
    it was called under, also where the call had left it: products of the backward pass then are
    those of half precision. Here it is told otherwise.
    """
    torch._dynamo.reset()
    criterion = build(case, either(case))
    with functorch_config.patch(backward_pass_autocast="off"):
        return _calls(case, criterion, torch.compile(criterion, backend=backend))


def inductor(case):
    """Through ``torch.compile`` with its default backend."""
    return compiled(case, "inductor")


def checkpointed(case):
    """Recomputed in the backward pass by ``torch.utils.checkpoint``."""
    criterion = build(case, either(case), by_hand=True)

    def call(features, labels, **options):
        again = checkpoint(criterion, features, labels, use_reentrant=False, **options)
        assert isinstance(again, torch.Tensor)
        return again

    found = []
    for number in range(case.steps):
        found.append(step(case, criterion, case.batch(number), call))
        if case.training:
            criterion.step()
    return found


def resumed(case):
    """Saved and loaded into a fresh criterion before the last call."""
    return _with_break(case, _reloaded)


def pickled(case):
    """Pickled and unpickled before the last call."""
    return _with_break(case, lambda _, criterion: pickle.loads(pickle.dumps(criterion)))


def _reloaded(case, criterion):
    fresh = build(case, either(case))
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.fill_(0.5)
    fresh.load_state_dict(criterion.state_dict())
    return fresh


def _with_break(case, change):
    criterion, found = build(case, either(case)), []
    for number in range(case.steps):
        if number == case.steps - 1:
            criterion = change(case, criterion)
        found.append(step(case, criterion, case.batch(number)))
    return found


def either(case):
    """One of the two implementations, by the seed; a head of distances has one."""
    return "dense" if case.head in DISTANCE_HEADS else ("dense", "streamed")[case.seed % 2]


# ----------------------------------------------------------------------------------- several ranks


def ranks_of(case):
    """Number of ranks of a case, whether their gradients are averaged, and each one's rows."""
    random = python_random.Random(f"ranks {case.seed}")
    size = random.randint(1, 4)
    cuts = sorted(random.randint(0, case.rows) for _ in range(size - 1))
    bounds = [slice(a, b) for a, b in zip([0, *cuts], [*cuts, case.rows], strict=True)]
    return size, random.random() < 0.5, bounds


def sharded(case):
    """Classes and examples spread over ranks."""
    return _over_ranks(case, True)


def grouped(case):
    """Examples spread over ranks, each of which has all prototypes."""
    return _over_ranks(case, False)


def _over_ranks(case, of_classes):
    size, averaged, _ = ranks_of(case)
    ranks = [_unpacked(steps) for steps in everywhere(size, work_of_a_rank, case, of_classes)]
    return [
        _merged(case, [rank[number] for rank in ranks], averaged, of_classes)
        for number in range(case.steps)
    ]


def work_of_a_rank(group, case, of_classes):
    """Results of one rank on its part of every batch."""
    _, averaged, bounds = ranks_of(case)
    own = bounds[torch.distributed.get_rank(group)]
    if of_classes:
        criterion = build(case, either(case), group=group, averaged=averaged)
    else:
        criterion = build(case, either(case))
        code = f"tammes.Criterion(head, {loss_code(case)}, {criterion_code(case)}, **more)"
        more = {"group": group, "averaged": averaged}
        whole = eval(code, {"tammes": tammes, "head": criterion.head, "more": more})
        whole.schedules = criterion.schedules
        criterion = whole.to(torch.float64 if case.parameter_dtype == "float64" else None)
        criterion.train(case.training)
    steps = [step(case, criterion, _part(case.batch(n), own)) for n in range(case.steps)]
    return [
        {key: (str(v.dtype), v.detach().double().numpy()) for key, v in found.items()}
        for found in steps
    ]


def _part(batch, rows):
    settings = {
        key: value[rows] if isinstance(value, torch.Tensor) else value
        for key, value in batch.settings.items()
    }
    return Batch(
        batch.features[rows],
        batch.labels[rows],
        None if batch.weights is None else batch.weights[rows],
        settings,
        batch.upstream[rows] if batch.upstream.ndim else batch.upstream,
    )


def _unpacked(steps):
    return [
        {
            key: torch.from_numpy(value).to(getattr(torch, dtype.removeprefix("torch.")))
            for key, (dtype, value) in found.items()
        }
        for found in steps
    ]


def _merged(case, ranks, averaged, of_classes):
    """Results of all ranks as those of one process."""
    rowwise = case.reduction == "none"
    found = {}
    for key in ranks[0]:
        parts = [rank[key] for rank in ranks]
        of_example = key.startswith("grad ") and _is_of_examples(case, key)
        of_class = of_classes and key in ("grad weight", "grad bias")
        if of_example or of_class or (key == "loss" and rowwise):
            whole = torch.cat(parts)
        elif key.startswith("grad ") and not of_classes:
            # A wrapper sums or averages the gradients of what every rank has a copy of.
            whole = sum(part.double() for part in parts).to(parts[0].dtype)
            whole = whole / len(parts) if averaged else whole
        else:
            whole = parts[0]
            for other in parts[1:]:
                same = torch.allclose(whole.double(), other.double(), rtol=1e-2, equal_nan=True)
                whole = whole if same else torch.full_like(whole, torch.nan)
        if averaged and of_example and not rowwise:
            whole = whole / len(parts)
        if averaged and rowwise and key.startswith("grad ") and not of_example:
            whole = whole * len(parts)
        found[key] = whole
    return found


def _is_of_examples(case, key):
    name = key.removeprefix("grad ")
    return name in ("features", "weights") or case.at_call.get(name) == "learned"


def can_be_sharded(case):
    """Whether the head of a case can be spread over ranks."""
    return case.head not in ("simplex", *DISTANCE_HEADS)


PATHS = {
    "dense": dense,
    "streamed": stream,
    "fused": fused,
    "sharded": sharded,
    "grouped": grouped,
    "compiled": compiled,
    "inductor": inductor,
    "checkpointed": checkpointed,
    "resumed": resumed,
    "pickled": pickled,
}
"""Every path by name."""

TAKES = {
    "streamed": lambda case: case.head not in DISTANCE_HEADS,
    "fused": can_be_fused,
    "sharded": can_be_sharded,
}
"""Paths that take only some cases."""
