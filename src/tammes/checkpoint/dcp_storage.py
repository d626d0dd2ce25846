"""Storage for ``torch.distributed.checkpoint``: safetensors files and an index in JSON.

Torch's own storage keeps its index as a pickle, which can execute code when it is read.
"""

import contextlib
import os
from collections.abc import Iterator
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

from tammes.checkpoint.manifest import (
    Chunk,
    Index,
    PartFile,
    locate_chunks,
    part_name,
    shard_metadata,
)
from tammes.checkpoint.safetensors_io import (
    DTYPES,
    CheckpointError,
    TensorInfo,
    blocks,
    copy_rows,
    write,
)


class _Unchanged:
    """Steps of a storage that do nothing here: the plans of torch are used as they are."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: there is no state to reset."""

    def prepare_local_plan(self, plan: Any) -> Any:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        """Return the plans unchanged."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Accept every path."""
        return True


class CheckpointWriter(_Unchanged, StorageWriter):
    """Writes one file per rank; the first rank writes the index once all files are there.

    The token, eight letters for the file names, is the same on all ranks.
    """

    def __init__(self, folder: Path, token: str, rank: int, world_size: int, index: Index) -> None:
        self.folder, self.index = folder, index
        self.path = folder / part_name(rank, world_size, token)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Create the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the tensors that the plan assigns to this rank."""
        tensors, offsets = {}, {}
        for item in plan.items:
            assert item.type != WriteItemType.BYTE_IO
            assert item.tensor_data is not None
            tensor, name = planner.resolve_data(item), item.index.fqn
            assert isinstance(tensor, torch.Tensor)
            tensors[name] = (TensorInfo.from_tensor(tensor), blocks(tensor))
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
        """Write the index, if the files of all ranks are in the folder.

        Raises:
            CheckpointError: a rank wrote to another folder, or its file was removed.
        """
        for result in (one for each in results for one in each):
            file, size, digest, offset, shape = result.storage_data
            part = self.index.parts.setdefault(file, PartFile(size, digest))
            part.holds[result.index.fqn] = Chunk(offset, shape)
        for name, part in self.index.parts.items():
            path = self.folder / name
            if not path.is_file() or path.stat().st_size != part.bytes:
                raise CheckpointError(
                    f"{name} is not in {self.folder.absolute()} of the first rank: all ranks are "
                    "expected to write to the same folder, and no other process at the same time"
                )
        self.index.write(self.folder)

    def storage_meta(self) -> StorageMeta | None:
        """Return ``None``: the index holds all metadata."""
        return None


class CheckpointReader(_Unchanged, StorageReader):
    """Reads rows from the files of a checkpoint."""

    def __init__(self, folder: Path, index: Index) -> None:
        self.index = index
        self.chunks = locate_chunks(folder, index)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Convert the index to torch's metadata."""
        tensors: dict[str, Any] = {
            name: TensorStorageMetadata(
                TensorProperties(dtype=DTYPES[info.dtype]),
                torch.Size(info.shape),
                [
                    ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.shape))
                    for _, chunk in self.index.chunks(name)
                ],
            )
            for name, info in self.index.tensors.items()
        }
        data = {MetadataIndex(name, offset): None for name, offset in self.chunks}
        return Metadata(tensors, storage_data=data)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: the index has been read already."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the tensors that the plan assigns to this rank."""
        for item in plan.items:
            source = item.storage_index
            assert source.offset is not None
            path, info = self.chunks[source.fqn, tuple(source.offset)]
            target = planner.resolve_tensor(item).detach()
            first, whole = tuple(item.storage_offsets), (*item.lengths[:1], *info.shape[1:])
            with open(path, "rb") as file:
                if tuple(item.lengths) == whole:
                    copy_rows(file, info, first[0] if first else 0, target)
                else:
                    # The plan wants only some of the columns.
                    rows = torch.empty(whole, dtype=DTYPES[info.dtype])
                    copy_rows(file, info, first[0], rows)
                    for dim in range(1, rows.ndim):
                        rows = rows.narrow(dim, first[dim], item.lengths[dim])
                    target.copy_(rows)
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future


@contextlib.contextmanager
def translate_errors(failed: str) -> Iterator[None]:
    """Turn an error of ``torch.distributed.checkpoint`` into one sentence."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        if not isinstance(cause, Exception):
            raise cause from error
        reason = " ".join(str(cause).split())[:300]
        raise CheckpointError(f"{failed} (rank {rank}: {reason})") from error
