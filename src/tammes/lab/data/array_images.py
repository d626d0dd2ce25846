"""Convert arrays and tensors to Pillow images."""

from typing import Any

import torch
from torch import Tensor

from tammes.optional import require

_CHANNELS = ((), (1,), (3,), (4,))
"""Channel dimensions: grey (none or one), colour, colour with transparency."""


def is_array(image: Any) -> bool:
    """Whether an image is a numpy array."""
    return isinstance(image, require("numpy", extra="lab").ndarray)


def is_pillow(image: Any) -> bool:
    """Whether an image is a Pillow image."""
    return isinstance(image, require("PIL.Image", extra="lab").Image)


def as_pillow(image: Any) -> Any:
    """Convert an array or a tensor to a Pillow image; a Pillow image is returned as it is."""
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
    """Convert an array ``(height, width[, channels])`` to a Pillow image."""
    if array.ndim == 2 and array.dtype == "uint16":
        return require("PIL.Image", extra="lab").fromarray(array)
    if array.ndim not in (2, 3) or array.shape[2:] not in _CHANNELS:
        first = array.ndim == 3 and array.shape[:1] in _CHANNELS
        raise ValueError(
            "an array of shape (height, width[, channels]) with 1, 3 or 4 channels is expected, "
            f"got {array.shape}{'; with channels first pass a tensor (torch.as_tensor)' * first}"
        )
    return _from_pixels(as_uint8(torch.from_numpy(array.copy())))


def from_tensor(pixels: Tensor) -> Any:
    """Convert a uint8 tensor ``([channels, ]height, width)`` to a Pillow image."""
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
