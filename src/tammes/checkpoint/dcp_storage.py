"""Safetensors files and an index in JSON as a storage of ``torch.distributed.checkpoint``.

Torch's own storage keeps its index as a pickle, which runs what it is told to when it is read.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from tammes.checkpoint.manifest import Chunk, Index, Part, part_name, places, shard_metadata
from tammes.checkpoint.safetensors_io import (
    DTYPES,
    CheckpointError,
    Stored,
    blocks,
    copy_rows,
    write,
)


class Writer(StorageWriter):
    """Writes a file for each rank, and on the first rank the index when all files are there.

    Args:
        folder: of the checkpoint.
        token: eight letters for the names of the files, the same on all ranks.
        rank: of this process.
        ranks: how many there are.
        index: what it says beside tensors and parts.
    """

    def __init__(self, folder: Path, token: str, rank: int, ranks: int, index: Index) -> None:
        self.folder, self.index = folder, index
        self.path = folder / part_name(rank, ranks, token)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """There is nothing to be forgotten."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Make the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what this rank has to."""
        tensors, offsets = {}, {}
        for item in plan.items:
            assert item.type != WriteItemType.BYTE_IO
            assert item.tensor_data is not None
            tensor, name = planner.resolve_data(item), item.index.fqn
            assert isinstance(tensor, torch.Tensor)
            tensors[name] = (Stored.of(tensor), blocks(tensor))
            offsets[name] = tuple(item.tensor_data.chunk.offsets)
        results = []
        if tensors:
            with open(self.path, "xb") as file:
                written = write(file, tensors, shard_metadata(offsets))
            results = [
                WriteResult(
                    index=item.index,
                    size_in_bytes=tensors[name][0].rows * tensors[name][0].row_bytes,
                    storage_data=(self.path.name, *written, offsets[name], tensors[name][0].shape),
                )
                for item in plan.items
                for name in [item.index.fqn]
            ]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index, if all files are where it is.

        Raises:
            CheckpointError: a rank has written elsewhere, or somebody took its file away.
        """
        for result in (one for each in results for one in each):
            file, size, digest, offset, shape = result.storage_data
            part = self.index.parts.setdefault(file, Part(size, digest))
            part.holds[result.index.fqn] = Chunk(offset, shape)
        for name, part in self.index.parts.items():
            path = self.folder / name
            if not path.is_file() or path.stat().st_size != part.bytes:
                raise CheckpointError(
                    f"{name} is not in {self.folder.absolute()} of the first rank: all ranks are "
                    "expected to write to the same folder, and nobody else meanwhile"
                )
        self.index.write(self.folder)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """A path is one."""
        return True

    def storage_meta(self) -> StorageMeta | None:
        """None is kept."""
        return None


class Reader(StorageReader):
    """Reads rows out of the files of a checkpoint.

    Args:
        folder: of the checkpoint.
        index: its index.
    """

    def __init__(self, folder: Path, index: Index) -> None:
        self.index = index
        self.places = places(folder, index)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """There is nothing to be forgotten."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index in torch's terms."""
        known: dict[str, Any] = {
            name: TensorStorageMetadata(
                TensorProperties(dtype=DTYPES[stored.dtype]),
                torch.Size(stored.shape),
                [
                    ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.shape))
                    for _, chunk in self.index.chunks(name)
                ],
            )
            for name, stored in self.index.tensors.items()
        }
        data = {MetadataIndex(name, offset): None for name, offset in self.places}
        return Metadata(known, storage_data=data)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """All is set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what this rank has asked for."""
        for item in plan.items:
            source = item.storage_index
            assert source.offset is not None
            path, stored = self.places[source.fqn, tuple(source.offset)]
            into = planner.resolve_tensor(item).detach()
            first, whole = tuple(item.storage_offsets), (*item.lengths[:1], *stored.shape[1:])
            with open(path, "rb") as file:
                if tuple(item.lengths) == whole:
                    copy_rows(file, stored, first[0] if first else 0, into)
                else:
                    # A piece that has only some of the columns.
                    rows = torch.empty(whole, dtype=DTYPES[stored.dtype])
                    copy_rows(file, stored, first[0], rows)
                    for dim in range(1, rows.ndim):
                        rows = rows.narrow(dim, first[dim], item.lengths[dim])
                    into.copy_(rows)
            planner.commit_tensor(item, into)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """A path is one."""
        return True


def plainly(work: Callable[[], Any], failed: str) -> Any:
    """Do what torch does with a checkpoint, and say in a sentence what went wrong."""
    try:
        return work()
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        if not isinstance(cause, Exception):
            raise cause from error
        said = " ".join(str(cause).split())[:300]
        raise CheckpointError(f"{failed} (rank {rank}: {said})") from error
