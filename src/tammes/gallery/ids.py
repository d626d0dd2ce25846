"""Identities as keys of a gallery: strings or integers."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from numbers import Integral
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tammes.checkpoint.safetensors_io import byte_view

Id: TypeAlias = str | int
"""Identity: a string or an integer; a gallery has only one of the two."""


def as_ids(name: str, ids: Any, known: Sequence[Id] = ()) -> list[Id]:
    """Check identities and return them as strings or Python integers.

    Args:
        name: name that messages begin with.
        ids: a sequence, tensor or numpy array of strings or integers; or a single one.
        known: existing identities, whose type they must share.
    """
    ids = ids.tolist() if hasattr(ids, "tolist") else ids
    if isinstance(ids, str | Integral):
        ids = [ids]
    if isinstance(ids, bytes) or not isinstance(ids, Iterable):
        raise TypeError(f"{name} expects ids to be strings or integers, got {type(ids).__name__}")
    values = list(ids)
    kinds = {_kind(value) for value in values}
    if not kinds <= {"str", "int"} or len(kinds) > 1:
        raise TypeError(
            f"{name} expects ids to be all strings or all integers, got {', '.join(sorted(kinds))}"
        )
    if kinds and known and _kind(known[0]) not in kinds:
        had, got = ("strings", "integers") if isinstance(known[0], str) else ("integers", "strings")
        raise TypeError(
            f"{name} expects ids that are {had}, as those enrolled before, got {got}; "
            f"{known[0]!r} and {values[0]!r} never match"
        )
    checked = [str(value) if isinstance(value, str) else int(value) for value in values]
    for value in checked:
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError(f"{name} expects integers of 64 bits as ids, got {value}")
    return checked


def _kind(value: Any) -> str:
    if isinstance(value, str):
        return "str"
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    return "int" if whole else type(value).__name__


def shown(ids: Iterable[Id]) -> str:
    """List the first few identities, for a message."""
    listed = list(ids)
    more = f" and {len(listed) - 3:,} more" if len(listed) > 3 else ""
    return ", ".join(map(repr, listed[:3])) + more


def pack_strings(texts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Return the concatenated bytes of strings, and where each of them ends."""
    encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
    ends = torch.tensor([len(text) for text in encoded], dtype=torch.long).cumsum(0)
    joined = bytearray(b"".join(encoded))
    # torch.frombuffer rejects an empty buffer.
    packed = torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0).byte()
    return packed, ends


def unpack_strings(joined: Tensor, ends: Tensor) -> list[str]:
    """Return the strings that :func:`pack_strings` packed."""
    text = bytes(byte_view(joined))
    edges = [0, *ends.tolist()]
    if edges != sorted(edges) or edges[-1] != len(text):
        raise ValueError("the ends of its strings are damaged")
    return [text[begin:end].decode("utf-8", "surrogatepass") for begin, end in pairwise(edges)]
