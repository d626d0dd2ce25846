"""The command ``tammes checkpoint``."""

import argparse
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

from tammes.checkpoint import CheckpointError, divide, export
from tammes.checkpoint.json_tree import from_json
from tammes.checkpoint.manifest import Index, check_parts, locate_chunks, read
from tammes.checkpoint.safetensors_io import DTYPES, read_header
from tammes.lab.cli.arguments import add_argument


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tammes checkpoint`` to a parser."""
    parser.description = (
        "Inspect the checkpoint of a head (sharded or not), merge its prototypes into a single "
        "file, or split such a file into a checkpoint."
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    inside = "show the contents of a checkpoint and verify its files"
    add = partial(add_argument, actions.add_parser("inspect", help=inside))
    add("folder FOLDER", "checkpoint folder")
    add("--json", "print JSON instead of a table")
    merge = actions.add_parser("merge", help="write the prototypes to a single file")
    add = partial(add_argument, merge)
    add("folder FOLDER", "checkpoint folder")
    add("file FILE.safetensors", "file to write")
    split = actions.add_parser("split", help="make a checkpoint from a single file")
    add = partial(add_argument, split)
    add("file FILE.safetensors", "file with the prototypes as 'weight'")
    add("folder FOLDER", "checkpoint folder to write")
    add("--parts N", "number of files (%(default)s)", 1)


def run(arguments: argparse.Namespace) -> int:
    """Run ``tammes checkpoint`` and return the exit code."""
    if arguments.action == "inspect":
        contents = inspect(Path(arguments.folder))
        as_json = arguments.json
        text = json.dumps(contents, indent=2, allow_nan=False) if as_json else as_text(contents)
    elif arguments.action == "merge":
        _check_suffix(arguments.file)
        export(arguments.folder, arguments.file)
        rows, *_, size = read_header(Path(arguments.file))[0]["weight"].shape
        text = f"  {rows} prototypes of {size} numbers in {arguments.file}"
    else:
        _check_suffix(arguments.file)
        divide(arguments.file, arguments.folder, parts=arguments.parts)
        text = as_text(inspect(Path(arguments.folder)))
    print(text)
    return 0


def inspect(folder: Path) -> dict[str, Any]:
    """Return the contents of a checkpoint as plain values; raises if it is missing or damaged."""
    index = read(folder)
    check_parts(folder, index)
    locate_chunks(folder, index)
    head = {name: value for name, value in index.head.items() if value is not None}
    weight = index.tensors["head.weight"]
    return {
        "folder": str(folder),
        "tammes": index.tammes,
        "classes": head.pop("num_classes"),
        "embedding_size": head.pop("embedding_size"),
        "dtype": str(DTYPES[weight.dtype]).removeprefix("torch."),
        "head": head,
        "loss": index.loss,
        "optimizer": None if index.optimizer is None else index.optimizer["kind"],
        "parts": {
            name: {"bytes": part.bytes, "classes": _classes(index, name)}
            for name, part in index.parts.items()
        },
        "bytes": sum(part.bytes for part in index.parts.values()),
        "state": {
            name: list(stored.shape)
            for name, stored in index.tensors.items()
            if not name.startswith(("more.", "optimizer."))
        },
        "more": sorted(from_json(index.more, dict(index.tensors))) if index.more else [],
    }


def as_text(contents: dict[str, Any]) -> str:
    """Format the result of :func:`inspect` as a table for a terminal."""
    head = dict(contents["head"])
    kind = head.pop("kind", "a head")
    settings = ", ".join(f"{key}={value}" for key, value in head.items())
    terms = [name for name, settings in (contents["loss"] or {}).items() if "weight" in settings]
    lines = [
        f"checkpoint      {contents['folder']}, intact, {_size(contents['bytes'])}",
        f"prototypes      {contents['classes']} classes of {contents['embedding_size']} numbers, "
        f"{contents['dtype']}",
        f"head            {kind}({settings})",
        f"loss            {' + '.join(terms) or 'none, a head alone'}",
        f"optimizer       {contents['optimizer'] or 'none'}",
        f"beside          {', '.join(contents['more']) or 'nothing'}",
        f"parts           {len(contents['parts'])}",
    ]
    for name, part in contents["parts"].items():
        first, last = part["classes"] or (0, -1)
        classes = f"classes {first} to {last}" if first <= last else "no classes"
        lines.append(f"  {name}  {_size(part['bytes']):>9}  {classes}")
    return "\n".join(lines)


def _classes(index: Index, file: str) -> tuple[int, int] | None:
    """Return the first and last class whose prototypes a file holds."""
    chunk = index.parts[file].holds.get("head.weight")
    return None if chunk is None else (chunk.offset[0], chunk.offset[0] + chunk.shape[0] - 1)


def _size(count: int) -> str:
    power = min(int(math.log(max(count, 1), 1024)), 4)
    unit = ("bytes", "KiB", "MiB", "GiB", "TiB")[power]
    return f"{count / 1024**power:.{1 if power else 0}f} {unit}"


def _check_suffix(file: str) -> None:
    if Path(file).suffix != ".safetensors":
        raise CheckpointError(f"{file}: a file with the suffix .safetensors is expected")
