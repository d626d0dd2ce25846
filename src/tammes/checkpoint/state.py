"""Describe and compare the head, loss and optimizer of a checkpoint."""

import hashlib
import json
from typing import Any

import torch
from torch import Tensor, nn

from tammes.checkpoint.json_tree import from_json, tensor_names, to_json
from tammes.checkpoint.manifest import Index
from tammes.checkpoint.safetensors_io import CheckpointError
from tammes.criterion.criterion import Criterion
from tammes.criterion.hyperparameters import named_schedules
from tammes.distributed.process_group import RankGroup
from tammes.distributed.resharding import per_row_state
from tammes.heads.head import Head
from tammes.heads.sharded import SPREAD, ShardedHead
from tammes.optim.state_transfer import SHARED_STATE
from tammes.similarity import Cosine
from tammes.terms import Term

_LONG = 16
"""Settings with more values than this are stored as a checksum."""
OPTIONAL = ("head.sampler.",)
"""Prefixes of state that a head may lack."""
PLACE = "head.place"
"""Buffer with the range of classes on this rank."""


def head_of(module: Criterion | Head) -> Head:
    """Return the head of a criterion, or the head itself."""
    if not isinstance(module, (Criterion, Head)):
        raise TypeError(f"a checkpoint expects a criterion or a head, got {type(module).__name__}")
    return module.head if isinstance(module, Criterion) else module


def rank_group_of(module: Criterion | Head) -> RankGroup:
    """Return the ranks that save and load together."""
    head = head_of(module)
    return RankGroup() if head.group is None else head.group


def sharded_parameters(head: Head) -> dict[nn.Parameter, str]:
    """Map the parameters that are sharded over the ranks to their names."""
    if not isinstance(head, ShardedHead):
        return {}
    return {p: f"head.{name}" for name, p in head.named_parameters() if name in SPREAD}


def named_state(module: Criterion | Head) -> dict[str, Tensor]:
    """Return the tensors of a criterion or a head, by their names in a criterion."""
    prefix = "" if isinstance(module, Criterion) else "head."
    tensors = {prefix + name: value for name, value in module.state_dict().items()}
    # The range of classes depends on the number of ranks, so it is not saved.
    tensors.pop(PLACE, None)
    return tensors


def describe_head(head: Head) -> dict[str, Any]:
    """Describe a head: kind, sizes and settings."""
    kind = head.kind if isinstance(head, ShardedHead) else type(head)
    known: dict[str, Any] = {
        "kind": kind.__name__,
        "embedding_size": head.embedding_size,
        "num_classes": head.num_classes,
        "scale": head.scale_setting,
        "bias": head.bias is not None,
    }
    if isinstance(head.similarity, Cosine):
        known["normalize_features"] = head.similarity.normalize_features
    if head.similarity.centers > 1:
        known["pooling"] = "max"
    return known | head.similarity.options


def describe_loss(criterion: Criterion) -> dict[str, Any]:
    """Describe a loss: every term by name, with its weight and settings."""
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


def _defaults(term: Term) -> dict[str, Any]:
    parameters = term.definition.signature.parameters.values()
    return {p.name: _short(p.default) for p in parameters if p.default is not p.empty}


def _short(value: Any) -> Any:
    if isinstance(value, tuple):
        if len(value) <= _LONG:
            return list(value)
        digest = hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
        return f"{len(value)} values {digest}"
    return value if isinstance(value, (bool, int, float, str)) or value is None else repr(value)


def check_compatible(folder: object, index: Index, module: Criterion | Head) -> None:
    """Raise ``CheckpointError`` if the checkpoint is of another head or loss."""
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
            if isinstance(there, dict) and name in module.settings.named:
                # A setting that the term did not have then is what it was: the default.
                there = {**_defaults(module.settings.named[name][1]), **there}
            if there == mine:
                continue
            difference = f"{name} there is {there} and here {mine}"
            if isinstance(there, dict) and isinstance(mine, dict):
                keys = [k for k in {**there, **mine} if there.get(k) != mine.get(k)]
                difference = ", ".join(
                    f"{key} of {name} there is {there.get(key)} and here {mine.get(key)}"
                    for key in keys
                )
            raise CheckpointError(
                f"{folder}: was saved with another loss, {difference}; "
                "load into criterion.head to take the prototypes alone"
            )


def tensors_to_load(folder: object, index: Index, module: Criterion | Head) -> list[str]:
    """Return the names of the tensors to load into a criterion or a head.

    Raises:
        CheckpointError: a tensor is missing or has another shape.
    """
    head = head_of(module)
    whole = isinstance(module, Criterion) and index.loss is not None
    rows = sharded_parameters(head).values()
    names = []
    for name, tensor in named_state(module if whole else head).items():
        info = index.tensors.get(name)
        if info is None and name.startswith(OPTIONAL):
            continue
        if info is None:
            raise CheckpointError(f"{folder}: {name} is not in it")
        shape = (head.num_classes, *tensor.shape[1:]) if name in rows else tuple(tensor.shape)
        if not same_shape(info.shape, shape):
            raise CheckpointError(f"{folder}: {name} has shape {info.shape}, expected {shape}")
        names.append(name)
    return names


def same_shape(stored: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Compare two shapes; a scalar may be stored with shape ``()`` or ``(1,)``.

    Example:
        >>> same_shape((), (1,)), same_shape((2,), (1,))
        (True, False)
    """
    return stored == wanted or {stored, wanted} == {(), (1,)}


def optimizer_state(
    optimizer: torch.optim.Optimizer, head: Head, group: RankGroup, tensors: dict[str, Tensor]
) -> tuple[Any, set[str]]:
    """Convert the state of an optimizer to JSON, and return the names of its sharded tensors.

    Args:
        optimizer: may hold more parameters than those of the head.
        head: some of its parameters may be sharded over the ranks.
        group: ranks that the head is sharded over.
        tensors: collects the tensors of the state by name.
    """
    groups, states, split = [], {}, set[str]()
    known, position = sharded_parameters(head), 0
    for number, params in enumerate(optimizer.param_groups):
        settings = {key: value for key, value in params.items() if key != "params"}
        name = f"optimizer.group{number}"
        groups.append([len(params["params"]), to_json(settings, name, tensors)])
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
                states[str(position)] = to_json(state, name, tensors)
            position += 1
    return {"kind": type(optimizer).__name__, "groups": groups, "state": states}, split


def optimizer_tensors_to_load(
    folder: object, index: Index, optimizer: torch.optim.Optimizer, head: Head
) -> tuple[list[str], set[str]]:
    """Return the names of the tensors of an optimizer, and of those that are sharded.

    Raises:
        CheckpointError: the state is that of another optimizer.
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
    known, names, split = sharded_parameters(head), [*tensor_names(saved["groups"])], set[str]()
    for position, state in saved["state"].items():
        parameter = flat[int(position)]
        shape = tuple(parameter.shape)
        if parameter in known:
            shape = (head.num_classes, *shape[1:])
        for name in tensor_names(state):
            saved_shape = index.tensors[name].shape
            # Some optimizers keep one number per row or column; a sharded head allows none of them.
            fits = all(n == size or n == 1 for n, size in zip(saved_shape, shape, strict=False))
            if (
                len(saved_shape) == len(shape)
                and saved_shape != shape
                and (parameter in known or not fits)
            ):
                raise CheckpointError(
                    f"{folder}: {name} has shape {saved_shape}, expected {shape} as its parameter"
                )
            names.append(name)
            if parameter in known and saved_shape:
                split.add(name)
    return names, split


def restore_optimizer(
    optimizer: torch.optim.Optimizer, saved: dict[str, Any], tensors: dict[str, Tensor]
) -> None:
    """Load a saved state into an optimizer."""
    groups, position = [], 0
    for count, settings in saved["groups"]:
        numbers = list(range(position, position + count))
        groups.append({**from_json(settings, tensors), "params": numbers})
        position += count
    states = {int(number): from_json(s, tensors) for number, s in saved["state"].items()}
    flat = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, state in states.items():
        states[number] = {
            key: _shaped_like(key, value, flat[number]) for key, value in state.items()
        }
    optimizer.load_state_dict({"state": states, "param_groups": groups})


def _shaped_like(key: str, value: Any, parameter: Tensor) -> Any:
    """Reshape and shard a value like its parameter, which ``fully_shard`` may have sharded."""
    if isinstance(value, Tensor) and key not in SHARED_STATE:
        shape = tuple(parameter.shape)
        value = value.reshape(shape) if same_shape(tuple(value.shape), shape) else value
    placements = getattr(parameter, "placements", None)
    if placements is None or not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(parameter, DTensor)
    # Every rank has read the full tensor.
    value = value.to(parameter.device)
    return distribute_tensor(value, parameter.device_mesh, placements, src_data_rank=None)
