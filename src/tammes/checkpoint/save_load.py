"""Checkpoints of a head, sharded or not: saved on any number of ranks, loaded on any other.

A checkpoint is a folder: an ``index.json`` and, for every rank that saved, a safetensors file with
its rows. ``torch.distributed.checkpoint`` decides who writes and who reads what. Nothing is
pickled, so reading one runs nothing. All ranks must see the same folder.
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

from tammes.checkpoint.json_tree import names_in, put_together, take_apart
from tammes.checkpoint.manifest import (
    FILE,
    Chunk,
    Index,
    Part,
    check_parts,
    part_name,
    places,
    read,
    shard_metadata,
)
from tammes.checkpoint.safetensors_io import (
    DTYPES,
    CheckpointError,
    Stored,
    read_header,
    replacing,
    stored_blocks,
    write,
)
from tammes.checkpoint.state import (
    OPTIONAL,
    PLACE,
    check_same,
    describe_head,
    describe_loss,
    head_of,
    optimizer_state,
    rank_group_of,
    restore_optimizer,
    same_shape,
    spread,
    state_of,
    wanted_of,
    wanted_of_optimizer,
)
from tammes.criterion.criterion import Criterion
from tammes.distributed.process_group import RankGroup
from tammes.distributed.resharding import all_gather_strings, shard_bounds
from tammes.heads.head import Head
from tammes.heads.sharded import ShardedHead

__all__ = ["CheckpointError", "divide", "export", "load", "save"]

_Path = str | PathLike[str]
_OF_A_HEAD = ("weight", "bias", "log_scale")
_ROWS = ("head.weight", "head.bias")
"""Of these every part has the rows of its classes; all else is in the first."""
_HEAD = "tammes_head"
"""Under which name a single file says what head it is of."""


def save(
    folder: _Path,
    module: Criterion | Head,
    optimizer: torch.optim.Optimizer | None = None,
    **more: Any,
) -> None:
    """Save a criterion or a head, and whatever goes with it.

    All ranks must call it together. The folder changes in one step when everything is written: a
    save that was interrupted, however roughly, leaves the checkpoint that was there before.

    Args:
        folder: where to; made if it is missing, a checkpoint that is there is replaced.
        module: what to save; a sharded head is saved by rows, each by the rank that has it, all
            else once.
        optimizer: its state is saved too, whatever else it holds. On a sharded head it has to be
            one with a number for each weight, such as SGD, Adam or AdamW.
        **more: tensors, numbers, texts, and lists, tuples and dictionaries of them, such as
            ``backbone=backbone.state_dict()``. Those of the first rank are kept.

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
    from tammes.checkpoint.dcp_storage import Writer, plainly

    head, group, folder = head_of(module), rank_group_of(module), Path(folder)
    device = head.weight.device
    tensors = state_of(module)
    rows = set(spread(head).values())
    saved = None
    if optimizer is not None:
        saved, split = optimizer_state(optimizer, head, group, tensors)
        rows |= split
    beside = take_apart(more, "more", tensors)
    whole = {
        name: _whole(group, tensor, head.num_classes) if name in rows else tensor
        for name, tensor in tensors.items()
    }
    index = Index(
        tammes=tammes.__version__,
        head=describe_head(head),
        loss=describe_loss(module) if isinstance(module, Criterion) else None,
        tensors={name: Stored.of(tensor) for name, tensor in whole.items()},
        optimizer=saved,
        more=beside,
    )
    token = all_gather_strings(group, secrets.token_hex(4), device)[0]
    writer = Writer(folder, token, group.rank, group.world_size, index)

    def work() -> None:
        # Of what all have, the first rank's is written.
        planner = DefaultSavePlanner(flatten_state_dict=False, dedup_save_to_lowest_rank=True)
        _dcp(state_dict_saver.save, whole, group, storage_writer=writer, planner=planner)

    try:
        plainly(work, f"{folder}: the checkpoint could not be saved, the one before it stays")
    except BaseException:
        with contextlib.suppress(CheckpointError, OSError):
            if not (folder / FILE).exists() or writer.path.name not in read(folder).parts:
                writer.path.unlink(missing_ok=True)
        raise


def load(
    folder: _Path, module: Criterion | Head, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Load a checkpoint, on as many ranks as there are now.

    All ranks must call it together. Everything is checked and read before anything is changed: what
    is refused leaves the criterion and the optimizer as they were, on all ranks.

    Args:
        folder: of the checkpoint.
        module: what to load into: a criterion of the same head and loss, or a head alone. Its head
            may be sharded or not, whatever the one was that was saved.
        optimizer: gets its state back; it has to hold the same parameters in the same order.

    Returns:
        What was saved beside, on every rank; tensors are on the CPU.

    Raises:
        CheckpointError: one sentence on what is missing, damaged or different.
    """
    from torch.distributed.checkpoint import state_dict_loader
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    from tammes.checkpoint.dcp_storage import Reader, plainly

    head, group, folder = head_of(module), rank_group_of(module), Path(folder)
    rows, fault = set(spread(head).values()), ""
    try:
        index = read(folder)
        check_same(folder, index, module)
        own = wanted_of(folder, index, module)
        others = [*names_in(index.more)]
        if optimizer is not None:
            names, split = wanted_of_optimizer(folder, index, optimizer, head)
            others, rows = others + names, rows | split
        check_parts(folder, index, share=group.rank, of=group.world_size)
        reader = Reader(folder, index)
    except (CheckpointError, OSError) as error:
        fault = str(error) or type(error).__name__
    _refuse_together(group, fault, head.weight.device)

    def room(name: str) -> Tensor:
        stored = index.tensors[name]
        shape = list(stored.shape)
        if name in rows:
            start, stop = shard_bounds(shape[0], group.world_size, group.rank)
            shape[0] = stop - start
        return torch.empty(shape, dtype=DTYPES[stored.dtype])

    # Beside what is there, on the CPU: a file that cannot be read must leave everything as it was.
    read_in = {name: room(name) for name in own + others}
    whole = {
        name: _whole(group, tensor, index.tensors[name].shape[0]) if name in rows else tensor
        for name, tensor in read_in.items()
    }

    def work() -> None:
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        _dcp(state_dict_loader.load, whole, group, storage_reader=reader, planner=planner)

    plainly(work, f"{folder}: the checkpoint could not be read, nothing was changed")
    into: torch.nn.Module = module
    state = {name: read_in[name] for name in own}
    if isinstance(head, ShardedHead):
        state[PLACE] = head.place
    if isinstance(module, Head) or index.loss is None:
        into = head
        state = {name.removeprefix("head."): tensor for name, tensor in state.items()}
    # What is wanted has been compared with what is there; only a sampler may be left as it is.
    into.load_state_dict(state, strict=False)
    if optimizer is not None:
        restore_optimizer(optimizer, index.optimizer, read_in)
    more: dict[str, Any] = put_together(index.more, read_in) if index.more is not None else {}
    return more


def export(folder: _Path, file: _Path) -> None:
    """Write the head of a checkpoint to a single safetensors file.

    It has the names of a head's ``state_dict``, so that a plain head of all classes loads it as
    ``safetensors.torch.load_file`` returns it. It is written by blocks of rows: the prototypes need
    not fit into memory.

    Args:
        folder: of the checkpoint.
        file: where to; takes the place of one that is there when all is written.

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
    where = places(folder, index)

    def pieces(name: str) -> Iterator[Tensor]:
        for _, chunk in index.chunks(name):
            yield from stored_blocks(*where[name, chunk.offset])

    tensors: dict[str, tuple[Stored, Iterable[Tensor]]] = {
        name.removeprefix("head."): (stored, pieces(name))
        for name, stored in index.tensors.items()
        if name.startswith("head.") and not name.startswith(OPTIONAL)
    }
    with replacing(Path(file)) as stream:
        write(stream, tensors, {"format": "pt", _HEAD: json.dumps(index.head)})


def divide(file: _Path, folder: _Path, *, parts: int = 1) -> None:
    """Make a checkpoint of a single safetensors file, as :func:`export` or others write them.

    It holds a head alone: loaded into a criterion it leaves all but the head as it is.

    Args:
        file: with the prototypes as ``weight``, ``head.weight`` or ``prototypes``, and what else
            the head has as ``bias`` and ``log_scale``.
        folder: where to; made if it is missing, a checkpoint that is there is replaced.
        parts: number of files.
    """
    import tammes

    file, folder = Path(file), Path(folder)
    if parts < 1:
        raise CheckpointError(f"a checkpoint is expected to have 1 part or more, got {parts}")
    tensors, head = _only_head(file)
    classes = head["num_classes"]
    index = Index(tammes.__version__, head, None, tensors)
    token = secrets.token_hex(4)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for number in range(parts):
            start, stop = shard_bounds(classes, parts, number)
            pieces: dict[str, tuple[Stored, Iterable[Tensor]]] = {}
            offsets = {}
            for name, stored in tensors.items():
                first, shape = 0, stored.shape
                if name in _ROWS:
                    first, shape = start, (stop - start, *shape[1:])
                elif number:
                    continue
                piece = Stored(stored.dtype, shape, stored.begin + first * stored.row_bytes)
                pieces[name] = (piece, stored_blocks(file, piece))
                offsets[name] = (first, *(0 for _ in shape[1:])) if shape else ()
            name = part_name(number, parts, token)
            with open(folder / name, "xb") as stream:
                written = write(stream, pieces, shard_metadata(offsets))
            holds = {key: Chunk(offsets[key], piece.shape) for key, (piece, _) in pieces.items()}
            index.parts[name] = Part(*written, holds)
    except BaseException:
        for number in range(parts):
            (folder / part_name(number, parts, token)).unlink(missing_ok=True)
        raise
    index.write(folder)


def _only_head(file: Path) -> tuple[dict[str, Stored], dict[str, Any]]:
    """The tensors of a head that are in a single file, and what is known of it.

    Raises:
        CheckpointError: one sentence that names the file and what does not fit.
    """
    inside, metadata = read_header(file)
    found: dict[str, Stored] = {}
    for name, stored in inside.items():
        plain = name.removeprefix("head.").replace("prototypes", "weight")
        if plain in _OF_A_HEAD and found.setdefault(plain, stored) is not stored:
            raise CheckpointError(f"{file}: there is more than one {plain} in it")
    weight = found.get("weight")
    if weight is None or len(weight.shape) != 2:
        raise CheckpointError(f"{file}: no prototypes of shape (C, D) are in it under 'weight'")
    classes, size = weight.shape
    for name, shape in (("bias", (classes,)), ("log_scale", (1,))):
        if name in found and not same_shape(found[name].shape, shape):
            raise CheckpointError(f"{file}: {name} has shape {found[name].shape}, expected {shape}")
    for name, stored in found.items():
        if not DTYPES[stored.dtype].is_floating_point:
            raise CheckpointError(f"{file}: {name} is of the type {stored.dtype}, no float")
    head = {"embedding_size": size, "num_classes": classes, "bias": "bias" in found}
    try:
        told = json.loads(metadata.get(_HEAD, "{}"))
        fits = {key: told.get(key, value) for key, value in head.items()} == head
    except (ValueError, AttributeError):
        fits = False
    if not fits:
        raise CheckpointError(f"{file}: what it says of its head does not fit its tensors")
    return {f"head.{name}": found[name] for name in _OF_A_HEAD if name in found}, {**head, **told}


def _whole(group: RankGroup, rows: Tensor, total: int) -> Tensor:
    """The rows here as those of a tensor that is spread over the ranks."""
    if group.world_size == 1:
        return rows
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = DeviceMesh.from_group(group.process_group, rows.device.type)
    shape = torch.Size([total, *rows.shape[1:]])
    stride = torch.empty(shape, device="meta").stride()
    rows = rows.detach().contiguous()
    return DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def _dcp(work: Any, tensors: dict[str, Tensor], group: RankGroup, **options: Any) -> None:
    with warnings.catch_warnings():
        # That a process is alone is no news.
        warnings.filterwarnings("ignore", message=".*single process.*")
        alone = group.world_size == 1
        work(
            tensors, process_group=None if alone else group.process_group, no_dist=alone, **options
        )


def _refuse_together(group: RankGroup, fault: str, device: torch.device) -> None:
    """Refuse on all ranks what one of them has found."""
    for told in all_gather_strings(group, fault, device):
        if told:
            raise CheckpointError(told)
