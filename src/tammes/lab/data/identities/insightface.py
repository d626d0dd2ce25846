"""Pair files of InsightFace, such as ``lfw.bin``: pickles, read without running any code.

The file is not unpickled: :mod:`pickletools` lists its opcodes, and those that build bytes,
integers, booleans, lists and tuples are interpreted here. All others are errors, among them all
that name a function or a class.
"""

import io
import os
import pickletools
from dataclasses import dataclass
from typing import Any

import torch

from tammes.lab.data.identities.examples import IdentityPairs, existing_file
from tammes.lab.data.images import DataError

_BYTES = frozenset({"BINBYTES", "SHORT_BINBYTES", "BINBYTES8"})
_STRINGS = frozenset({"BINSTRING", "SHORT_BINSTRING"})
"""Strings of Python 2, which are bytes that pickletools decodes as Latin-1."""
_NUMBERS = frozenset({"INT", "BININT", "BININT1", "BININT2"})
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PUT = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
_GET = frozenset({"GET", "BINGET", "LONG_BINGET"})
_NOTHING = frozenset({"PROTO", "FRAME"})


@dataclass(frozen=True)
class EncodedImages:
    """Encoded images in memory, and the path of their file."""

    path: str
    contents: tuple[bytes, ...]

    def __len__(self) -> int:
        return len(self.contents)

    def fetch(self, row: int) -> bytes:
        """Return the bytes of an image."""
        return self.contents[row]

    def name(self, row: int) -> str:
        """Return the file and row of an image."""
        return f"{self.path} image {row}"


def read_insightface(path: str | os.PathLike[str]) -> IdentityPairs:
    """Read pairs of InsightFace: two encoded images per pair, and whether they match.

    Files may be written by Python 2 or 3. The pairs are sorted by fold, and
    :func:`tammes.metrics.functional.fold_accuracy` splits them itself.

    Args:
        path: path of the ``.bin`` file.

    Returns:
        The pairs, without folds and without identities.

    References:
        https://github.com/deepinsight/insightface, ``recognition/arcface_torch/eval``.
    """
    file = existing_file(path, "pairs")
    content = _read_plain_pickle(str(file), file.read_bytes())
    if not (isinstance(content, list | tuple) and len(content) == 2):
        raise DataError(f"{file}: a list of images and a list of booleans are expected")
    images, same = content
    if not (isinstance(images, list | tuple) and all(isinstance(each, bytes) for each in images)):
        raise DataError(f"{file}: a list of images as bytes is expected first")
    if not (isinstance(same, list | tuple) and all(_is_flag(each) for each in same)):
        raise DataError(f"{file}: a list of booleans is expected second")
    if len(images) != 2 * len(same) or not images:
        raise DataError(
            f"{file}: two images for each pair are expected, got {len(images):,} images for "
            f"{len(same):,} pairs"
        )
    empty = [row for row, image in enumerate(images) if not image]
    if empty:
        raise DataError(f"{file}: {len(empty):,} images have no bytes, the first is {empty[0]}")
    rows = torch.arange(len(images)).view(-1, 2)
    return IdentityPairs(
        items=EncodedImages(str(file), tuple(images)),
        left=rows[:, 0],
        right=rows[:, 1],
        same=torch.tensor([bool(each) for each in same]),
    )


def _is_flag(value: Any) -> bool:
    return isinstance(value, int) and value in (0, 1)


def _read_plain_pickle(title: str, data: bytes) -> Any:
    """Read the bytes, integers, booleans, lists and tuples of a pickle."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    try:
        # Reading from memory allocates no more than there is, whatever length a file claims.
        for opcode, argument, _ in pickletools.genops(io.BytesIO(data)):
            if opcode.name == "STOP":
                return stack.pop()
            _follow(opcode.name, argument, stack, marks, memo)
    except _RefusedError as error:
        raise DataError(
            f"{title}: bytes, lists and booleans are expected, got {error}, which is not read, as "
            "a pickle can run code; write the file again from lists, with protocol 4"
        ) from error
    except (ValueError, IndexError, KeyError, AttributeError, TypeError) as error:
        message = str(error).split("\n")[0][:160]
        raise DataError(f"{title}: damaged, or not a pickle ({message})") from error
    raise AssertionError("pickletools.genops ends with STOP or raises")


class _RefusedError(Exception):
    """An opcode that is not interpreted."""


def _follow(
    name: str, argument: Any, stack: list[Any], marks: list[int], memo: dict[int, Any]
) -> None:
    """Interpret one opcode."""

    def top(count: int) -> list[Any]:
        if count > len(stack):
            raise IndexError("a value is missing")
        values = stack[len(stack) - count :]
        del stack[len(stack) - count :]
        return values

    if name in _BYTES or name in _NUMBERS:
        stack.append(argument)
    elif name in _STRINGS:
        stack.append(argument.encode("latin-1"))
    elif name in ("NEWTRUE", "NEWFALSE"):
        stack.append(name == "NEWTRUE")
    elif name == "MARK":
        marks.append(len(stack))
    elif name == "EMPTY_LIST":
        stack.append([])
    elif name in ("LIST", "TUPLE", "APPENDS"):
        values = top(len(stack) - marks.pop())
        if name == "APPENDS":
            _as_list(stack[-1]).extend(values)
        else:
            stack.append(values if name == "LIST" else tuple(values))
    elif name == "APPEND":
        (value,) = top(1)
        _as_list(stack[-1]).append(value)
    elif name in _TUPLES:
        stack.append(tuple(top(_TUPLES[name])))
    elif name in _PUT:
        memo[argument] = stack[-1]
    elif name == "MEMOIZE":
        memo[len(memo)] = stack[-1]
    elif name in _GET:
        stack.append(memo[argument])
    elif name not in _NOTHING:
        what = f" {argument!r}" if isinstance(argument, str) else ""
        raise _RefusedError(f"{name}{what[:80]}")


def _as_list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"a list is expected, got {type(value).__name__}")
    return value
