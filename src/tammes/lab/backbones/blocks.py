"""Building blocks of networks, and the settings that all networks share."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Annotated, Any, Literal

from torch import Tensor, nn

from tammes.lab.config.typecheck import above_zero, at_least, check_fields

Norm = Literal["batch", "group"]
Shape = tuple[int, int, int]

_WIDE = 64
"""Smallest number of features at which an embedding tolerates GroupNorm and a ReLU."""

RELU = partial(nn.ReLU, inplace=True)
FAN_IN = partial(nn.init.kaiming_normal_, mode="fan_in", nonlinearity="relu")
FAN_OUT = partial(nn.init.kaiming_normal_, mode="fan_out", nonlinearity="relu")
UNIFORM = partial(nn.init.kaiming_uniform_, mode="fan_in", nonlinearity="relu")


def bnneck(size: int, norm: str = "batch") -> nn.Module:
    """Return the BNNeck of Luo et al. 2019: normalisation with a scale but without a shift."""
    neck = nn.BatchNorm1d(size) if norm == "batch" else nn.GroupNorm(1, size)
    neck.bias.requires_grad_(False)
    return neck


class Backbone(nn.Module):
    """A sequence of named parts, from images to features."""

    def __init__(self, parts: Mapping[str, nn.Module], num_features: int) -> None:
        super().__init__()
        self.num_features = num_features
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, images: Tensor) -> Tensor:
        """Compute features ``(N, num_features)`` of normalised images ``(N, C, H, W)``."""
        for part in self.children():
            images = part(images)
        return images


class Projected(nn.Module):
    """Network followed by a linear layer, between its features and the loss.

    Few-shot methods train on projected features, and recognise novel classes by the features before
    the projection: ``projected.network(images)``.
    """

    def __init__(self, network: Backbone, num_features: int) -> None:
        super().__init__()
        self.network, self.num_features = network, num_features
        self.layer = nn.Linear(network.num_features, num_features)

    def forward(self, images: Tensor) -> Tensor:
        """Compute projected features of images, shape ``(N, num_features)``."""
        projected: Tensor = self.layer(self.network(images))
        return projected


class GlobalAverage(nn.Module):
    """Global average pooling."""

    def forward(self, maps: Tensor) -> Tensor:
        """Average ``(N, C, H, W)`` to ``(N, C)``."""
        return maps.mean((2, 3))


@dataclass(frozen=True)
class Blocks:
    """Builds the layers of a network with the settings that all networks share.

    Args:
        features: number of features; None for the network's default.
        width: multiplier of the channels.
        norm: ``batch``, or ``group`` if examples must not depend on each other.
    """

    name: str
    shape: Shape
    min_side: int
    features: Annotated[int, at_least(1)] | None
    width: Annotated[float, above_zero]
    norm: Norm

    def __post_init__(self) -> None:
        if len(self.shape) != 3 or min(self.shape) < 1:
            raise ValueError(
                f"{self.name} expects the shape (channels, height, width) of the images, "
                f"got {tuple(self.shape)}"
            )
        if min(self.shape[1:]) < self.min_side:
            raise ValueError(
                f"{self.name} expects images of at least {self.min_side} x {self.min_side} pixels, "
                f"got {self.shape[1]} x {self.shape[2]}"
            )
        check_fields(self, self.name)

    def scale(self, channels: int) -> int:
        """Scale channels by the width to a multiple of 8, so that GroupNorm can divide them."""
        return max(8, round(channels * self.width / 8) * 8)

    def scaled(self, *channels: int) -> list[int]:
        """Scale the channels of several stages by the width."""
        return [self.scale(each) for each in channels]

    def flat_size(self, channels: int, halvings: int) -> int:
        """Return the size of a flattened map after ``halvings`` poolings that round down."""
        return channels * (self.shape[1] >> halvings) * (self.shape[2] >> halvings)

    def norm_layer(self, channels: int) -> nn.Module:
        """Build a normalisation layer."""
        if self.norm == "batch":
            return nn.BatchNorm2d(channels)
        return nn.GroupNorm(groups(channels), channels)

    def conv(
        self,
        inputs: int,
        outputs: int,
        kernel: int = 3,
        *,
        stride: int = 1,
        padding: int | None = None,
        bias: bool = False,
        groups: int = 1,
    ) -> nn.Conv2d:
        """Build a convolution that keeps the size of the map by default."""
        padding = kernel // 2 if padding is None else padding
        return nn.Conv2d(inputs, outputs, kernel, stride, padding, groups=groups, bias=bias)

    def unit(
        self,
        inputs: int,
        outputs: int,
        kernel: int = 3,
        *,
        activation: Callable[[], nn.Module] | None = RELU,
        **options: Any,
    ) -> list[nn.Module]:
        """Build convolution (with the options of :meth:`conv`), normalisation and activation."""
        conv = self.conv(inputs, outputs, kernel, **options)
        layers: list[nn.Module] = [conv, self.norm_layer(outputs)]
        return layers if activation is None else [*layers, activation()]

    def chain(self, inputs: int, outputs: int, repeats: int, **options: Any) -> list[nn.Module]:
        """Build several units in a row, with the options of :meth:`unit`."""
        sizes = [inputs, *[outputs] * repeats]
        return [layer for pair in pairwise(sizes) for layer in self.unit(*pair, **options)]

    def stages(
        self,
        channels: Sequence[int],
        layers: Callable[[int, int, int, int], list[nn.Module]],
        *,
        inputs: int | None = None,
        depths: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
    ) -> dict[str, nn.Module]:
        """Build ``stage1``, ``stage2`` and so on, each of one or more blocks in a row.

        Args:
            channels: outputs of each stage.
            layers: returns a block for its inputs, outputs, stride and the number of its stage.
            inputs: channels before the first stage; those of the images by default.
            depths: blocks of each stage, 1 by default.
            strides: stride of the first block of each stage, 1 by default.
        """
        before, ones = inputs or self.shape[0], [1] * len(channels)
        parts: dict[str, nn.Module] = {}
        sizes = zip(channels, depths or ones, strides or ones, strict=True)
        for stage, (outputs, depth, first) in enumerate(sizes, 1):
            blocks = layers(before, outputs, first, stage)
            for _ in range(1, depth):
                blocks += layers(outputs, outputs, 1, stage)
            parts[f"stage{stage}"] = nn.Sequential(*blocks)
            before = outputs
        return parts

    def embedding(self, inputs: int, features: int, relu: bool | None) -> nn.Sequential:
        """Build a linear layer, normalisation and, by default from 64 features on, ReLU.

        With few features a ReLU would leave a single orthant, and normalising within an example
        would remove most directions: GroupNorm networks then have no normalisation here.
        """
        layers: list[nn.Module] = [nn.Linear(inputs, features)]
        if self.norm == "batch":
            layers.append(nn.BatchNorm1d(features))
        elif features >= _WIDE:
            layers.append(nn.GroupNorm(1, features))
        if features >= _WIDE if relu is None else relu:
            layers.append(RELU())
        return nn.Sequential(*layers)

    def embed(
        self, parts: Mapping[str, nn.Module], inputs: int, default: int, relu: bool | None = None
    ) -> Backbone:
        """Build the network, ending in an :meth:`embedding` of ``features`` or a default size."""
        size = self.features or default
        return Backbone({**parts, "embedding": self.embedding(inputs, size, relu)}, size)

    def finish(self, parts: Mapping[str, nn.Module], channels: int) -> Backbone:
        """Build the network, with a final linear layer if ``features`` is set."""
        if self.features is None:
            return Backbone(parts, channels)
        embedding = nn.Linear(channels, self.features)
        return Backbone({**parts, "embedding": embedding}, self.features)


def groups(channels: int) -> int:
    """Return the number of groups of GroupNorm: a divisor of the channels, at most 32.

    Example:
        >>> [groups(channels) for channels in (8, 64, 160, 3)]
        [4, 32, 32, 1]
    """
    largest = min(32, max(1, channels // 2))
    return max(number for number in range(1, largest + 1) if channels % number == 0)


def network(
    min_side: int,
    *,
    conv: Callable[[Tensor], object] | None = None,
    linear: Callable[[Tensor], object] | None = None,
) -> Callable[[Callable[..., Backbone]], Callable[..., Backbone]]:
    """Turn a function that builds a network from :class:`Blocks` into a factory.

    The factory takes the settings that all networks share (``shape``, ``features``, ``width`` and
    ``norm``) and those of the function.

    Args:
        min_side: smallest side of an image.
        conv: initialises the weight of a convolution; None keeps the default of PyTorch.
        linear: initialises the weight of a linear layer.
    """

    def decorate(build: Callable[..., Backbone]) -> Callable[..., Backbone]:
        def factory(
            *,
            shape: Shape,
            features: int | None = None,
            width: float = 1.0,
            norm: Norm = "batch",
            **own: Any,
        ) -> Backbone:
            backbone = build(Blocks(build.__name__, shape, min_side, features, width, norm), **own)
            for module in backbone.modules():
                initialise = conv if isinstance(module, nn.Conv2d) else linear
                if isinstance(module, (nn.Conv2d, nn.Linear)) and initialise is not None:
                    initialise(module.weight)
                    if module.bias is not None:
                        nn.init.zeros_(module.bias)
            return backbone

        *shared, _ = inspect.signature(factory).parameters.values()
        _, *own = inspect.signature(build).parameters.values()
        functools.update_wrapper(factory, build)
        factory.__signature__ = inspect.Signature([*shared, *own])  # type: ignore[attr-defined]
        return factory

    return decorate
