"""Embeddings for a gallery: given directly, or computed from images by its model."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tammes.gallery.templates import ROWS
from tammes.similarity import directions


class EmbeddedImages(Protocol):
    """Embeddings of a batch of images."""

    @property
    def positions(self) -> list[int]:
        """Index of each among the given images; unreadable images are left out."""

    @property
    def names(self) -> list[str]:
        """Name of each, such as the path of its file."""

    @property
    def embeddings(self) -> Tensor:
        """Embeddings, shape ``(n, D)``."""


class Embedder(Protocol):
    """Model that embeds images, such as :func:`tammes.load` returns."""

    @property
    def digest(self) -> str:
        """Hash of its weights and of its preprocessing."""

    def embed_batches(
        self, images: Any, *, unreadable: Callable[[Any], None] | None = None
    ) -> Iterator[EmbeddedImages]:
        """Embed images batch by batch; report unreadable images, or raise for the first."""


class Embedded(NamedTuple):
    """Validated embeddings in blocks, with the names and the number of the given images."""

    blocks: list[Tensor]
    positions: list[int]
    names: list[str]
    given: int


def model_digest(model: Embedder | str) -> str:
    """Return the digest of a model; a digest is returned unchanged."""
    if isinstance(model, str):
        return model
    if not callable(getattr(model, "embed_batches", None)):
        raise TypeError(
            "Gallery expects model to be a model that tammes.load returns, or its digest, got "
            f"{type(model).__name__}"
        )
    return model.digest


def embed(
    name: str,
    x: Any,
    model: Embedder | None,
    size: int | None,
    unreadable: Callable[[Any], None] | None = None,
) -> Embedded:
    """Check embeddings, or embed images with the model of a gallery.

    Args:
        name: name that messages begin with.
        x: embeddings of a floating type, shape ``(N, D)`` or ``(D,)``; or images.
        model: model of the gallery, or none.
        size: dimension of its embeddings; None while it is empty.
        unreadable: called for each image that cannot be read; by default the first is an error.
    """
    if _is_float_array(x) and not isinstance(x, Tensor):
        x = torch.as_tensor(x)
    if isinstance(x, Tensor) and x.is_floating_point() and x.ndim <= 2:
        x = x[None] if x.ndim == 1 else x
        _check(name, x, size)
        return Embedded([x][: len(x)], list(range(len(x))), [], len(x))
    if model is None:
        raise TypeError(
            f"{name} expects embeddings of a floating type, shape (N, D), or a gallery with a "
            f"model to embed images, got {type(x).__name__}"
        )
    found, skipped = Embedded([], [], [], 0), 0

    def skip(image: Any) -> None:
        nonlocal skipped
        skipped += 1
        assert unreadable is not None
        unreadable(image)

    for batch in model.embed_batches(x, unreadable=unreadable and skip):
        block = batch.embeddings.detach()
        _check(name, block, size)
        size = block.shape[1]
        found.blocks.append(block)
        found.positions.extend(batch.positions)
        found.names.extend(batch.names)
    return found._replace(given=len(found.positions) + skipped)


def _check(name: str, embeddings: Tensor, size: int | None) -> None:
    """Raise ``ValueError`` for embeddings of another dimension, NaN or infinity."""
    if embeddings.ndim != 2 or embeddings.shape[1] != (size or embeddings.shape[1] or -1):
        hint = "" if size is None else "; were they made by another model?"
        raise ValueError(
            f"{name} expects embeddings of shape (N, {size or 'D'}), "
            f"got {tuple(embeddings.shape)}{hint}"
        )
    for first in range(0, len(embeddings), ROWS):
        block = embeddings[first : first + ROWS]
        # Summing is cheaper than testing every element.
        if bool(block.sum(dtype=torch.double).isfinite()):
            continue
        wrong = (~block.isfinite()).any(1).nonzero()
        if len(wrong):
            raise ValueError(
                f"{name} expects finite embeddings, got NaN or infinity in row "
                f"{first + int(wrong[0])} of {len(embeddings):,}"
            )


def check_lengths(name: str, blocks: list[Tensor]) -> None:
    """Raise ``ValueError`` for zero embeddings, which have no direction."""
    zeros = sum(
        int((part.amax(1) == 0).logical_and(part.amin(1) == 0).sum())
        for block in blocks
        for part in block.split(ROWS)
    )
    if zeros:
        count = sum(map(len, blocks))
        raise ValueError(
            f"{name} expects embeddings other than zero, got {zeros:,} of {count:,} that are "
            "zero and have no direction"
        )


def unit_rows(embeddings: Tensor, device: torch.device) -> Tensor:
    """Normalise rows to float32, even if their norms exceed its range."""
    rows = embeddings.detach().to(device)
    largest = rows.abs().amax(1, keepdim=True).double()
    usual = (largest == 0) | ((largest > 2.0**-60) & (largest < 2.0**60))
    if bool(usual.all()):
        return directions(rows.float())
    rows = rows.double() / torch.where(largest > 0, largest, 1.0)
    # The largest magnitude in a row is now 1, so its norm is at least 1, unless it is zero.
    return (rows / rows.norm(dim=1, keepdim=True).clamp_min(1)).float()


def _is_float_array(x: Any) -> bool:
    """Whether a value is a numpy array of a floating type with at most two dimensions."""
    return getattr(getattr(x, "dtype", None), "kind", "") == "f" and getattr(x, "ndim", 3) <= 2
