"""Print a failing case as a few lines of plain Python."""

import torch

from fuzz import paths

_MOST = 60
"""Numbers of a case up to which its tensors are written out."""


def script(case, found):
    """Lines that reproduce the first failure of a case.

    Args:
        case: a case, as simple as possible.
        found: its differences.
    """
    first = found[0]
    lines = ["import torch, tammes"]
    numbers = case.classes * case.size + case.steps * case.rows * (case.size + 2)
    if numbers <= _MOST and first.path not in ("sharded", "grouped"):
        lines += _written_out(case, first.path)
    else:
        lines += [
            'import sys; sys.path.insert(0, "tests")',
            "from fuzz.case import Case; from fuzz.paths import PATHS; from fuzz import reference",
            f"case = {case!r}",
            f"print(PATHS[{first.path!r}](case)[{first.step}][{first.quantity!r}])"
            if first.quantity != "raises"
            else f"PATHS[{first.path!r}](case)",
        ]
    lines += [f"# {line}" for line in _outcome(found)]
    return "\n".join(lines)


def command(case, path):
    """Command that runs only this case, as it was drawn."""
    return f"python tests/fuzz/run.py --seed {case.seed} --cases 1 --paths {path}"


def _outcome(found):
    for difference in found[:3]:
        yield str(difference)[:300]
        if isinstance(difference.found, torch.Tensor) and difference.found.numel() <= 12:
            yield f"  found     {difference.found.detach().double().flatten().tolist()}"
            yield f"  reference {difference.expected.flatten().tolist()}"


def _written_out(case, path):
    implementation = {"dense": "dense", "streamed": "streamed", "fused": "fused"}.get(
        path, paths.either(case)
    )
    parameters = case.parameters()._asdict()
    tensors = ", ".join(f'"{k}": {_tensor(v)}' for k, v in parameters.items() if v is not None)
    by_hand = ", by_hand=True" if path == "checkpointed" else ""
    yield f"head = {paths.head_code(case, implementation)}.to({case.torch_parameter_dtype})"
    yield f"head.load_state_dict({{{tensors}}})"
    yield f"loss = {paths.loss_code(case)}"
    options = paths.criterion_code(case)
    yield f"criterion = call = tammes.Criterion(head, loss, {options}).train({case.training})"
    if case.torch_parameter_dtype == torch.float64:
        yield "criterion = call = criterion.double()"
    if case.schedules:
        yield f"criterion.schedule({paths.schedules_code(case)}{by_hand})"
    if path in ("compiled", "inductor"):
        backend = "aot_eager" if path == "compiled" else "inductor"
        yield 'torch._functorch.config.backward_pass_autocast = "off"'
        yield f"call = torch.compile(criterion, backend={backend!r})"
    elif path == "checkpointed":
        yield "from torch.utils.checkpoint import checkpoint"
        yield "call = lambda *a, **k: checkpoint(criterion, *a, use_reentrant=False, **k)"
    for step in range(case.steps):
        yield from _call(case, path, step)
    yield "print({name: p.grad for name, p in criterion.named_parameters()}, criterion.terms)"


def _call(case, path, step):
    batch = case.batch(step)
    options = {} if batch.weights is None else {"weights": batch.weights}
    options |= batch.settings
    given = "".join(
        f", {key}={_tensor(value) if isinstance(value, torch.Tensor) else value}"
        for key, value in options.items()
    )
    if step == case.steps - 1 and path == "pickled":
        yield "import pickle; criterion = call = pickle.loads(pickle.dumps(criterion))"
    if step == case.steps - 1 and path == "resumed":
        yield "saved = criterion.state_dict()  # and build head and criterion anew as above, then"
        yield "criterion.load_state_dict(saved)"
    yield f"features = {_tensor(batch.features)}.requires_grad_()"
    yield "criterion.zero_grad()"
    line = f"value = call(features, {_tensor(batch.labels)}{given})"
    blocks = paths.streamed_blocks(case)
    if path == "streamed" and blocks is not None:
        yield 'import sys; sys.path.insert(0, "tests"); from fuzz.paths import cut'
        line = f"with cut{blocks}: {line}; (value * {_tensor(batch.upstream)}).sum().backward()"
        yield line
    elif case.autocast:
        yield f'with torch.autocast("cpu", dtype=torch.bfloat16): {line}'
        yield f"(value * {_tensor(batch.upstream)}).sum().backward()"
    else:
        yield line
        yield f"(value * {_tensor(batch.upstream)}).sum().backward()"
    yield "print(value, features.grad)"


def _tensor(tensor):
    values = str(tensor.tolist()).replace("nan", "torch.nan").replace("inf", "torch.inf")
    empty = "" if tensor.numel() else f".reshape({tuple(tensor.shape)})"
    return f"torch.tensor({values}, dtype={tensor.dtype}){empty}"
