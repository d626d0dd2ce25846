"""Small images as data URLs, to embed in a page."""

import base64
import io
from typing import Any

from torch import Tensor

from tammes.optional import require

_EXACT = 1024
"""Largest PNG in bytes; larger pictures are compressed lossily."""


def image_url(picture: Tensor | Any) -> str:
    """Encode a picture: as PNG if that is small, else as lossy WebP.

    Args:
        picture: uint8 of shape ``(1 or 3, height, width)``, or a ``PIL.Image``.

    Example:
        >>> import torch
        >>> image_url(torch.zeros(3, 2, 2, dtype=torch.uint8))[:22]
        'data:image/png;base64,'
    """
    if isinstance(picture, Tensor):
        channels, height, width = picture.shape
        data = bytes(picture.permute(1, 2, 0).flatten().tolist())
        mode = "L" if channels == 1 else "RGB"
        images = require("PIL.Image", extra="lab")
        picture = images.frombytes(mode, (width, height), data)
    kind, data = "png", _encoded(picture, "png", optimize=True)
    if len(data) > _EXACT:
        kind, data = "webp", _encoded(picture, "webp", quality=80, method=6)
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _encoded(picture: Any, kind: str, **how: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **how)
    return buffer.getvalue()
