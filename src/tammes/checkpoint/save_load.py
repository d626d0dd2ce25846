"""Checkpoints of a head, sharded or not: saved on any number of ranks, loaded on any other.

A checkpoint is a folder: an ``index.json`` and, for every rank that saved, a safetensors file with
its rows. ``torch.distributed.checkpoint`` decides which rank writes and reads what. Nothing is
pickled, so reading a checkpoint executes no code. All ranks must see the same folder.
"""

import contextlib
import json
import secrets
import warnings
from collections.abc import Iterable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tammes.checkpoint.json_tree import from_json, tensor_names, to_json
from tammes.checkpoint.manifest import (
    FILE,
    Chunk,
    Index,
    PartFile,
    check_parts,
    locate_chunks,
    part_name,
    read,
    shard_metadata,
)
from tammes.checkpoint.safetensors_io import (
    DTYPES,
    CheckpointError,
    TensorInfo,
    atomic_write,
    read_blocks,
    read_header,
    write,
)
from tammes.checkpoint.state import (
    OPTIONAL,
    PLACE,
    check_compatible,
    describe_head,
    describe_loss,
    head_of,
    named_state,
    optimizer_state,
    optimizer_tensors_to_load,
    rank_group_of,
    restore_optimizer,
    same_shape,
    sharded_parameters,
    tensors_to_load,
)
from tammes.criterion.criterion import Criterion
from tammes.distributed.process_group import RankGroup
from tammes.distributed.resharding import all_gather_strings, shard_bounds
from tammes.heads.head import Head
from tammes.heads.sharded import SPREAD, ShardedHead

__all__ = ["CheckpointError", "divide", "export", "load", "save"]

_Path = str | PathLike[str]
_HEAD_TENSORS = ("weight", "bias", "log_scale", "adaptive_scale")
_SHARDED_TENSORS = tuple(f"head.{name}" for name in SPREAD)
"""Tensors divided among the parts by rows; all others are in the first part."""
_HEAD_KEY = "tammes_head"
"""Metadata key of a single file under which it describes its head."""


def save(
    folder: _Path,
    module: Criterion | Head,
    optimizer: torch.optim.Optimizer | None = None,
    **more: Any,
) -> None:
    """Save a criterion or a head, with its optimizer and other values.

    All ranks must call it together. The checkpoint is replaced atomically once everything is
    written: if a save is interrupted, even by a kill, the previous checkpoint stays.

    Args:
        folder: folder of the checkpoint; created if missing, and a checkpoint in it is replaced.
        module: criterion or head to save; each rank saves its rows of a sharded head, everything
            else is saved once.
        optimizer: its state is saved too; it may hold other parameters as well. With a sharded
            head its state must have one value per weight, as in SGD, Adam or AdamW.
        **more: tensors, numbers, strings, and lists, tuples and dictionaries of them, such as
            ``backbone=backbone.state_dict()``. Those of the first rank are saved.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from tammes import checkpoint
        >>> criterion = tammes.CosFace(8, 100)
        >>> with TemporaryDirectory() as folder:
        ...     checkpoint.save(folder, criterion, epoch=3)
        ...     checkpoint.load(folder, criterion)
        {'epoch': 3}
    """
    from torch.distributed.checkpoint import state_dict_saver
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    import tammes
    from tammes.checkpoint.dcp_storage import CheckpointWriter, translate_errors

    head, group, folder = head_of(module), rank_group_of(module), Path(folder)
    device = head.weight.device
    tensors = named_state(module)
    rows = set(sharded_parameters(head).values())
    saved = None
    if optimizer is not None:
        saved, split = optimizer_state(optimizer, head, group, tensors)
        rows |= split
    extra = to_json(more, "more", tensors)
    whole = {
        name: _as_dtensor(group, tensor, head.num_classes) if name in rows else tensor
        for name, tensor in tensors.items()
    }
    index = Index(
        tammes=tammes.__version__,
        head=describe_head(head),
        loss=describe_loss(module) if isinstance(module, Criterion) else None,
        tensors={name: TensorInfo.from_tensor(tensor) for name, tensor in whole.items()},
        optimizer=saved,
        more=extra,
    )
    token = all_gather_strings(group, secrets.token_hex(4), device)[0]
    writer = CheckpointWriter(folder, token, group.rank, group.world_size, index)
    # Tensors that all ranks have are written by the first rank.
    planner = DefaultSavePlanner(flatten_state_dict=False, dedup_save_to_lowest_rank=True)
    try:
        with translate_errors(
            f"{folder}: the checkpoint could not be saved, the previous one stays"
        ):
            _run_dcp(state_dict_saver.save, whole, group, storage_writer=writer, planner=planner)
    except BaseException:
        with contextlib.suppress(CheckpointError, OSError):
            if not (folder / FILE).exists() or writer.path.name not in read(folder).parts:
                writer.path.unlink(missing_ok=True)
        raise


def load(
    folder: _Path, module: Criterion | Head, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Load a checkpoint, on any number of ranks.

    All ranks must call it together. Everything is checked and read before anything is changed: on
    an error the criterion and the optimizer stay as they were, on all ranks.

    Args:
        folder: folder of the checkpoint.
        module: criterion with the same head and loss, or a head alone. Its head may be sharded or
            not, regardless of the head that was saved.
        optimizer: optimizer to restore; it must hold the same parameters in the same order.

    Returns:
        The values saved as ``**more``, on every rank; tensors are on the CPU.

    Raises:
        CheckpointError: the checkpoint is missing, damaged, or of another head, loss or optimizer.
    """
    from torch.distributed.checkpoint import state_dict_loader
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    from tammes.checkpoint.dcp_storage import CheckpointReader, translate_errors

    head, group, folder = head_of(module), rank_group_of(module), Path(folder)
    rows, error_text = set(sharded_parameters(head).values()), ""
    try:
        index = read(folder)
        check_compatible(folder, index, module)
        own = tensors_to_load(folder, index, module)
        others = [*tensor_names(index.more)]
        if optimizer is not None:
            names, split = optimizer_tensors_to_load(folder, index, optimizer, head)
            others, rows = others + names, rows | split
        check_parts(folder, index, rank=group.rank, world_size=group.world_size)
        reader = CheckpointReader(folder, index)
    except (CheckpointError, OSError) as error:
        error_text = str(error) or type(error).__name__
    # All ranks raise the error of any.
    for text in all_gather_strings(group, error_text, head.weight.device):
        if text:
            raise CheckpointError(text)

    def allocate(name: str) -> Tensor:
        info = index.tensors[name]
        shape = list(info.shape)
        if name in rows:
            start, stop = shard_bounds(shape[0], group.world_size, group.rank)
            shape[0] = stop - start
        return torch.empty(shape, dtype=DTYPES[info.dtype])

    # Into new tensors on the CPU: if a file cannot be read, nothing must have changed.
    read_in = {name: allocate(name) for name in own + others}
    whole = {
        name: _as_dtensor(group, tensor, index.tensors[name].shape[0]) if name in rows else tensor
        for name, tensor in read_in.items()
    }
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    with translate_errors(f"{folder}: the checkpoint could not be read, nothing was changed"):
        _run_dcp(state_dict_loader.load, whole, group, storage_reader=reader, planner=planner)
    target: torch.nn.Module = module
    state = {name: read_in[name] for name in own}
    if isinstance(head, ShardedHead):
        state[PLACE] = head.place
    if isinstance(module, Head) or index.loss is None:
        target = head
        state = {name.removeprefix("head."): tensor for name, tensor in state.items()}
    # The names were checked above; only the state of a sampler may be missing.
    target.load_state_dict(state, strict=False)
    if optimizer is not None:
        restore_optimizer(optimizer, index.optimizer, read_in)
    more: dict[str, Any] = from_json(index.more, read_in) if index.more is not None else {}
    return more


def export(folder: _Path, file: _Path) -> None:
    """Write the head of a checkpoint to a single safetensors file.

    The names are those of a head's ``state_dict``, so a plain head of all classes loads what
    ``safetensors.torch.load_file`` returns. The file is written by blocks of rows: the prototypes
    need not fit into memory.

    Args:
        folder: folder of the checkpoint.
        file: file to write; an existing one is replaced once everything is written.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from safetensors.torch import load_file
        >>> from tammes import checkpoint
        >>> head = tammes.LinearHead(4, 3)
        >>> with TemporaryDirectory() as folder:
        ...     checkpoint.save(f"{folder}/saved", head)
        ...     checkpoint.export(f"{folder}/saved", f"{folder}/head.safetensors")
        ...     head.load_state_dict(load_file(f"{folder}/head.safetensors"))
        <All keys matched successfully>
    """
    folder = Path(folder)
    index = read(folder)
    check_parts(folder, index)
    chunks = locate_chunks(folder, index)

    def pieces(name: str) -> Iterator[Tensor]:
        for _, chunk in index.chunks(name):
            yield from read_blocks(*chunks[name, chunk.offset])

    tensors: dict[str, tuple[TensorInfo, Iterable[Tensor]]] = {
        name.removeprefix("head."): (info, pieces(name))
        for name, info in index.tensors.items()
        if name.startswith("head.") and not name.startswith(OPTIONAL)
    }
    with atomic_write(Path(file)) as stream:
        write(stream, tensors, {"format": "pt", _HEAD_KEY: json.dumps(index.head)})


def divide(file: _Path, folder: _Path, *, parts: int = 1) -> None:
    """Make a checkpoint from a single safetensors file, such as :func:`export` writes.

    It holds only a head: loading it into a criterion changes nothing but the head.

    Args:
        file: has the prototypes as ``weight``, ``head.weight`` or ``prototypes``, and, if the head
            has them, ``bias``, ``log_scale`` and ``adaptive_scale``.
        folder: folder of the checkpoint; created if missing, and a checkpoint in it is replaced.
        parts: number of files.
    """
    import tammes

    file, folder = Path(file), Path(folder)
    if parts < 1:
        raise CheckpointError(f"divide expects 1 part or more, got {parts}")
    tensors, head = _read_head_file(file)
    classes = head["num_classes"]
    index = Index(tammes.__version__, head, None, tensors)
    token = secrets.token_hex(4)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for number in range(parts):
            start, stop = shard_bounds(classes, parts, number)
            pieces: dict[str, tuple[TensorInfo, Iterable[Tensor]]] = {}
            offsets = {}
            for name, info in tensors.items():
                first, shape = 0, info.shape
                if name in _SHARDED_TENSORS:
                    first, shape = start, (stop - start, *shape[1:])
                elif number:
                    continue
                piece = TensorInfo(info.dtype, shape, info.begin + first * info.row_bytes)
                pieces[name] = (piece, read_blocks(file, piece))
                offsets[name] = (first, *(0 for _ in shape[1:])) if shape else ()
            name = part_name(number, parts, token)
            with open(folder / name, "xb") as stream:
                written = write(stream, pieces, shard_metadata(offsets))
            holds = {key: Chunk(offsets[key], piece.shape) for key, (piece, _) in pieces.items()}
            index.parts[name] = PartFile(*written, holds)
    except BaseException:
        for number in range(parts):
            (folder / part_name(number, parts, token)).unlink(missing_ok=True)
        raise
    index.write(folder)


def _read_head_file(file: Path) -> tuple[dict[str, TensorInfo], dict[str, Any]]:
    """Read the tensors of a head in a single file, and the description of the head.

    Raises:
        CheckpointError: the file does not hold exactly one head.
    """
    inside, metadata = read_header(file)
    tensors: dict[str, TensorInfo] = {}
    for name, info in inside.items():
        plain = name.removeprefix("head.").replace("prototypes", "weight")
        if plain in _HEAD_TENSORS and tensors.setdefault(plain, info) is not info:
            raise CheckpointError(f"{file}: it has more than one {plain}")
    weight = tensors.get("weight")
    if weight is None or len(weight.shape) not in (2, 3):
        raise CheckpointError(f"{file}: it has no prototypes of shape (C, D) under 'weight'")
    classes, *_, size = weight.shape
    for name, shape in (("bias", (classes,)), ("log_scale", (1,)), ("adaptive_scale", (1,))):
        if name in tensors and not same_shape(tensors[name].shape, shape):
            raise CheckpointError(
                f"{file}: {name} has shape {tensors[name].shape}, expected {shape}"
            )
    for name, info in tensors.items():
        if not DTYPES[info.dtype].is_floating_point:
            raise CheckpointError(f"{file}: {name} has dtype {info.dtype}, expected a float")
    head = {"embedding_size": size, "num_classes": classes, "bias": "bias" in tensors}
    try:
        description = json.loads(metadata.get(_HEAD_KEY, "{}"))
        fits = {key: description.get(key, value) for key, value in head.items()} == head
    except (ValueError, AttributeError):
        fits = False
    if not fits:
        raise CheckpointError(f"{file}: its description of the head does not match its tensors")
    return {f"head.{name}": tensors[name] for name in _HEAD_TENSORS if name in tensors}, {
        **head,
        **description,
    }


def _as_dtensor(group: RankGroup, rows: Tensor, total: int) -> Tensor:
    """Wrap the rows of this rank as a tensor sharded over the ranks."""
    if group.world_size == 1:
        return rows
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = DeviceMesh.from_group(group.process_group, rows.device.type)
    shape = torch.Size([total, *rows.shape[1:]])
    stride = torch.empty(shape, device="meta").stride()
    rows = rows.detach().contiguous()
    return DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def _run_dcp(work: Any, tensors: dict[str, Tensor], group: RankGroup, **options: Any) -> None:
    with warnings.catch_warnings():
        # A single process is a normal case here.
        warnings.filterwarnings("ignore", message=".*single process.*")
        alone = group.world_size == 1
        work(
            tensors, process_group=None if alone else group.process_group, no_dist=alone, **options
        )
