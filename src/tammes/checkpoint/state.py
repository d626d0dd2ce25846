"""What a checkpoint says of a head, a loss and an optimizer, and where two of them differ."""

import hashlib
import json
from typing import Any

import torch
from torch import Tensor, nn

from tammes.checkpoint.json_tree import names_in, put_together, take_apart
from tammes.checkpoint.manifest import Index
from tammes.checkpoint.safetensors_io import CheckpointError
from tammes.criterion.criterion import Criterion
from tammes.criterion.hyperparameters import named_schedules
from tammes.distributed.process_group import RankGroup
from tammes.distributed.resharding import per_row_state
from tammes.heads.head import Head
from tammes.heads.sharded import ShardedHead
from tammes.optim.state_transfer import OF_ALL_ROWS
from tammes.similarity import Cosine

_LONG = 16
"""Values of a setting above which a checksum stands for them."""
OPTIONAL = ("head.sampler.",)
"""State that a head may have or not, whatever its prototypes."""
PLACE = "head.place"
"""Which classes a sharded head has here."""


def head_of(module: Criterion | Head) -> Head:
    """The head of a criterion, or the head itself."""
    if not isinstance(module, (Criterion, Head)):
        raise TypeError(f"a checkpoint expects a criterion or a head, got {type(module).__name__}")
    return module.head if isinstance(module, Criterion) else module


def rank_group_of(module: Criterion | Head) -> RankGroup:
    """Those who save and load together."""
    head = head_of(module)
    return head.group if isinstance(head, ShardedHead) else RankGroup()


def spread(head: Head) -> dict[nn.Parameter, str]:
    """Parameters of which this rank has only some rows, and their names."""
    if not isinstance(head, ShardedHead):
        return {}
    return {p: f"head.{name}" for name, p in head.named_parameters() if p.ndim}


def state_of(module: Criterion | Head) -> dict[str, Tensor]:
    """The tensors of a criterion or a head, by their names in a criterion."""
    prefix = "" if isinstance(module, Criterion) else "head."
    tensors = {prefix + name: value for name, value in module.state_dict().items()}
    # Of a checkpoint every rank takes what is its own.
    tensors.pop(PLACE, None)
    return tensors


def describe_head(head: Head) -> dict[str, Any]:
    """Kind, sizes and settings of a head."""
    kind = head.kind if isinstance(head, ShardedHead) else type(head)
    known: dict[str, Any] = {
        "kind": kind.__name__,
        "embedding_size": head.embedding_size,
        "num_classes": head.num_classes,
        "scale": "learnable" if head.log_scale is not None else head._scale,
        "bias": head.bias is not None,
    }
    if isinstance(head.similarity, Cosine):
        known["normalize_features"] = head.similarity.normalize_features
    return known


def describe_loss(criterion: Criterion) -> dict[str, Any]:
    """Every term with its weight and settings, by name."""
    known: dict[str, Any] = {}
    for name, (weight, term) in criterion.settings.named.items():
        known[name] = {"weight": weight, **{key: _short(value) for key, value in term.values}}
        if term.within is not None:
            known[name]["within"] = repr(term.within)
    if criterion.class_weights is not None:
        known["class_weights"] = {"values": _short(tuple(criterion.class_weights.tolist()))}
    known["schedules"] = {
        key: repr(value) for key, value in named_schedules(criterion.schedules).items()
    }
    return known


def _short(value: Any) -> Any:
    if isinstance(value, tuple):
        if len(value) <= _LONG:
            return list(value)
        digest = hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
        return f"{len(value)} values {digest}"
    return value if isinstance(value, (bool, int, float, str)) or value is None else repr(value)


def check_same(folder: object, index: Index, module: Criterion | Head) -> None:
    """Refuse a checkpoint of another head or loss, and say where they differ."""
    head = head_of(module)
    here = describe_head(head)
    for key, value in here.items():
        theirs = index.head.get(key, value)
        if theirs != value:
            raise CheckpointError(
                f"{folder}: the head has {key.replace('_', ' ')} {theirs} there and {value} here"
            )
    if isinstance(module, Criterion) and index.loss is not None:
        ours = describe_loss(module)
        for name in {**index.loss, **ours}:
            there, mine = index.loss.get(name), ours.get(name)
            if there == mine:
                continue
            told = f"{name} there is {there} and here {mine}"
            if isinstance(there, dict) and isinstance(mine, dict):
                keys = [k for k in {**there, **mine} if there.get(k) != mine.get(k)]
                told = ", ".join(
                    f"{key} of {name} there is {there.get(key)} and here {mine.get(key)}"
                    for key in keys
                )
            raise CheckpointError(
                f"{folder}: was saved with another loss, {told}; "
                "load into criterion.head to take the prototypes alone"
            )


def wanted_of(folder: object, index: Index, module: Criterion | Head) -> list[str]:
    """Names of the tensors that are to be loaded into a criterion or a head.

    Raises:
        CheckpointError: one of them is missing or has another shape.
    """
    head = head_of(module)
    whole = isinstance(module, Criterion) and index.loss is not None
    rows = spread(head).values()
    wanted = []
    for name, tensor in state_of(module if whole else head).items():
        stored = index.tensors.get(name)
        if stored is None and name.startswith(OPTIONAL):
            continue
        if stored is None:
            raise CheckpointError(f"{folder}: {name} is not in it")
        shape = (head.num_classes, *tensor.shape[1:]) if name in rows else tuple(tensor.shape)
        if not same_shape(stored.shape, shape):
            raise CheckpointError(f"{folder}: {name} has shape {stored.shape}, expected {shape}")
        wanted.append(name)
    return wanted


def same_shape(stored: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether a tensor that was stored fits; a single number may be stored with dimensions or not.

    Example:
        >>> same_shape((), (1,)), same_shape((2,), (1,))
        (True, False)
    """
    return stored == wanted or {stored, wanted} == {(), (1,)}


def optimizer_state(
    optimizer: torch.optim.Optimizer, head: Head, group: RankGroup, tensors: dict[str, Tensor]
) -> tuple[Any, set[str]]:
    """An optimizer as JSON, and names of the tensors of which this rank has only some rows.

    Args:
        optimizer: which may hold more than the head.
        head: some of its parameters may be spread over the ranks.
        group: ranks that the head is sharded over.
        tensors: added to.
    """
    groups, states, split = [], {}, set[str]()
    known, position = spread(head), 0
    for number, params in enumerate(optimizer.param_groups):
        settings = {key: value for key, value in params.items() if key != "params"}
        name = f"optimizer.group{number}"
        groups.append([len(params["params"]), take_apart(settings, name, tensors)])
        for parameter in params["params"]:
            state = dict(optimizer.state.get(parameter, {}))
            name = f"optimizer.{position}"
            if parameter in known:
                rows = per_row_state(group, optimizer, parameter)
                for key, value in state.items():
                    if isinstance(value, Tensor) and value.ndim and key not in rows:
                        raise TypeError(
                            "a checkpoint of a sharded head expects an optimizer whose state has "
                            "a number for each weight or one for all, got "
                            f"{type(optimizer).__name__} with {key} of shape {tuple(value.shape)}"
                        )
                state |= rows
                split |= {f"{name}.{key}" for key in rows}
            if state:
                states[str(position)] = take_apart(state, name, tensors)
            position += 1
    return {"kind": type(optimizer).__name__, "groups": groups, "state": states}, split


def wanted_of_optimizer(
    folder: object, index: Index, optimizer: torch.optim.Optimizer, head: Head
) -> tuple[list[str], set[str]]:
    """Names of the tensors of an optimizer, and of those this rank wants only some rows of.

    Raises:
        CheckpointError: it is the state of another optimizer.
    """
    saved = index.optimizer
    if saved is None:
        raise CheckpointError(f"{folder}: no optimizer is in it")
    kind = type(optimizer).__name__
    if saved["kind"] != kind:
        raise CheckpointError(f"{folder}: the optimizer is {saved['kind']} there and {kind} here")
    there = [count for count, _ in saved["groups"]]
    here = [len(group["params"]) for group in optimizer.param_groups]
    if there != here:
        raise CheckpointError(
            f"{folder}: the optimizer has groups of {there} parameters there and of {here} here"
        )
    flat = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    known, names, split = spread(head), [*names_in(saved["groups"])], set[str]()
    for position, state in saved["state"].items():
        parameter = flat[int(position)]
        shape = tuple(parameter.shape)
        if parameter in known:
            shape = (head.num_classes, *shape[1:])
        for name in names_in(state):
            found = index.tensors[name].shape
            # Some optimizers have one number for a row or a column; of rows here and there, none.
            fits = all(n == size or n == 1 for n, size in zip(found, shape, strict=False))
            if len(found) == len(shape) and found != shape and (parameter in known or not fits):
                raise CheckpointError(
                    f"{folder}: {name} has shape {found}, expected {shape} as its parameter"
                )
            names.append(name)
            if parameter in known and found:
                split.add(name)
    return names, split


def restore_optimizer(
    optimizer: torch.optim.Optimizer, saved: dict[str, Any], tensors: dict[str, Tensor]
) -> None:
    """Give an optimizer its state back."""
    groups, position = [], 0
    for count, settings in saved["groups"]:
        numbers = list(range(position, position + count))
        groups.append({**put_together(settings, tensors), "params": numbers})
        position += count
    states = {int(number): put_together(s, tensors) for number, s in saved["state"].items()}
    flat = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, state in states.items():
        states[number] = {key: _like(key, value, flat[number]) for key, value in state.items()}
    optimizer.load_state_dict({"state": states, "param_groups": groups})


def _like(key: str, value: Any, parameter: Tensor) -> Any:
    """A value of a parameter's shape, spread over ranks as ``fully_shard`` has spread that."""
    if isinstance(value, Tensor) and key not in OF_ALL_ROWS:
        shape = tuple(parameter.shape)
        value = value.reshape(shape) if same_shape(tuple(value.shape), shape) else value
    spread_out = getattr(parameter, "placements", None)
    if spread_out is None or not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(parameter, DTensor)
    # Every rank has read all of it.
    value = value.to(parameter.device)
    return distribute_tensor(value, parameter.device_mesh, spread_out, src_data_rank=None)
