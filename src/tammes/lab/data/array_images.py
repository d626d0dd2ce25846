"""Images in arrays and tensors, converted to those of Pillow."""

from typing import Any

import torch
from torch import Tensor

from tammes.optional import require

_CHANNELS = ((), (1,), (3,), (4,))
"""Shapes of a pixel: grey, colour, colour with transparency."""


def is_array(image: Any) -> bool:
    """Whether an image is an array of numpy."""
    return isinstance(image, require("numpy", extra="lab").ndarray)


def is_pillow(image: Any) -> bool:
    """Whether an image is one of Pillow."""
    return isinstance(image, require("PIL.Image", extra="lab").Image)


def as_pillow(image: Any) -> Any:
    """Return an array, a tensor or an image of Pillow as one of Pillow."""
    if isinstance(image, Tensor):
        return from_tensor(as_uint8(image.detach().cpu()))
    if is_array(image):
        return from_array(image)
    if not is_pillow(image):
        raise ValueError(
            "bytes, a path, a Pillow image, an array or a tensor is expected, "
            f"got {type(image).__name__}"
        )
    return image


def from_array(array: Any) -> Any:
    """Return an array ``(height, width[, channels])`` as an image of Pillow."""
    if array.ndim == 2 and array.dtype == "uint16":
        return require("PIL.Image", extra="lab").fromarray(array)
    if array.ndim not in (2, 3) or array.shape[2:] not in _CHANNELS:
        first = array.ndim == 3 and array.shape[:1] in _CHANNELS
        raise ValueError(
            "an array of shape (height, width[, channels]) with 1, 3 or 4 channels is expected, "
            f"got {array.shape}{'; tensors have channels first, torch.as_tensor' * first}"
        )
    return _from_pixels(as_uint8(torch.from_numpy(array.copy())))


def from_tensor(pixels: Tensor) -> Any:
    """Return a tensor ``([channels, ]height, width)`` as an image of Pillow."""
    if pixels.ndim not in (2, 3) or tuple(pixels.shape[:-2]) not in _CHANNELS:
        raise ValueError(
            "a tensor of shape ([channels, ]height, width) with 1, 3 or 4 channels is expected, "
            f"got {tuple(pixels.shape)}"
        )
    return _from_pixels(pixels if pixels.ndim == 2 else pixels.permute(1, 2, 0))


def _from_pixels(pixels: Tensor) -> Any:
    grey = pixels.ndim == 3 and pixels.shape[2] == 1
    array = (pixels[:, :, 0] if grey else pixels).contiguous().numpy()
    return require("PIL.Image", extra="lab").fromarray(array)


def as_uint8(values: Tensor) -> Tensor:
    """Convert pixels to uint8; floating-point ones are expected in [0, 1]."""
    if values.dtype == torch.uint8:
        return values
    if not values.is_floating_point():
        kind = str(values.dtype).removeprefix("torch.")
        raise ValueError(f"pixels are expected as uint8 or in [0, 1], got {kind}; convert to uint8")
    if not bool(((values >= 0) & (values <= 1)).all()):
        low, high = float(values.min()), float(values.max())
        hint = ""
        if low < 0:
            hint = "; take images before they are normalised"
        elif high > 1:
            hint = "; divide by 255"
        raise ValueError(
            f"floating-point pixels are expected in [0, 1], got {low:g} to {high:g}{hint}"
        )
    return (values * 255).round().byte()
