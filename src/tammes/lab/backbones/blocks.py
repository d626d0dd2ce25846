"""Parts of networks, and the settings that all networks have."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from torch import Tensor, nn

from tammes.lab.config.typecheck import above_zero, at_least, check_fields

Norm = Literal["batch", "group"]
Shape = tuple[int, int, int]

_ROOMY = 64
"""Features from which on an embedding can spare a direction, or keep to one orthant."""

RELU = partial(nn.ReLU, inplace=True)
FAN_IN = partial(nn.init.kaiming_normal_, mode="fan_in", nonlinearity="relu")
FAN_OUT = partial(nn.init.kaiming_normal_, mode="fan_out", nonlinearity="relu")
UNIFORM = partial(nn.init.kaiming_uniform_, mode="fan_in", nonlinearity="relu")


class Backbone(nn.Module):
    """Parts that are applied one after the other, from images to features.

    Args:
        parts: by name, in order.
        num_features: how many features come out.
    """

    def __init__(self, parts: Mapping[str, nn.Module], num_features: int) -> None:
        super().__init__()
        self.num_features = num_features
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, images: Tensor) -> Tensor:
        """Features of images.

        Args:
            images: normalised, shape ``(N, C, H, W)``.

        Returns:
            Features, shape ``(N, num_features)``.
        """
        for part in self.children():
            images = part(images)
        return images


class GlobalAverage(nn.Module):
    """Mean over all places of a map."""

    def forward(self, maps: Tensor) -> Tensor:
        """From ``(N, C, H, W)`` to ``(N, C)``."""
        return maps.mean((2, 3))


@dataclass(frozen=True)
class Blocks:
    """Makes the parts of one network with the settings that every network has.

    Args:
        name: of the network, for messages.
        shape: channels, height and width of the images.
        least: smallest side an image may have.
        features: how many features to end with; None for as many as the recipe has.
        width: what the numbers of channels are multiplied with.
        norm: ``batch``, or ``group`` where examples must not depend on each other.
    """

    name: str
    shape: Shape
    least: int
    features: Annotated[int, at_least(1)] | None
    width: Annotated[float, above_zero]
    norm: Norm

    def __post_init__(self) -> None:
        if len(self.shape) != 3 or min(self.shape) < 1:
            raise ValueError(
                f"{self.name} expects the shape (channels, height, width) of the images, "
                f"got {tuple(self.shape)}"
            )
        if min(self.shape[1:]) < self.least:
            raise ValueError(
                f"{self.name} expects images of at least {self.least} x {self.least} pixels, "
                f"got {self.shape[1]} x {self.shape[2]}"
            )
        check_fields(self, self.name)

    def scale(self, channels: int) -> int:
        """Channels of this width: a multiple of 8, so that they divide into groups."""
        return max(8, round(channels * self.width / 8) * 8)

    def scaled(self, *channels: int) -> list[int]:
        """Channels of several stages at this width."""
        return [self.scale(each) for each in channels]

    def flat(self, channels: int, halvings: int) -> int:
        """Numbers in a map whose sides were halved so often, rounded down."""
        return channels * (self.shape[1] >> halvings) * (self.shape[2] >> halvings)

    def normal(self, channels: int) -> nn.Module:
        """Normalisation of maps with so many channels."""
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
    ) -> nn.Conv2d:
        """A convolution that keeps the size of the map, if nothing else is said."""
        padding = kernel // 2 if padding is None else padding
        return nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=padding, bias=bias)

    def unit(
        self,
        inputs: int,
        outputs: int,
        kernel: int = 3,
        *,
        stride: int = 1,
        padding: int | None = None,
        bias: bool = False,
        activation: Callable[[], nn.Module] | None = RELU,
    ) -> list[nn.Module]:
        """Convolution, normalisation and activation, in this order."""
        layers: list[nn.Module] = [
            self.conv(inputs, outputs, kernel, stride=stride, padding=padding, bias=bias),
            self.normal(outputs),
        ]
        return layers if activation is None else [*layers, activation()]

    def chain(
        self,
        inputs: int,
        outputs: int,
        repeats: int,
        kernel: int = 3,
        *,
        bias: bool = False,
        activation: Callable[[], nn.Module] | None = RELU,
    ) -> list[nn.Module]:
        """Several units in a row."""
        layers: list[nn.Module] = []
        for number in range(repeats):
            layers += self.unit(
                outputs if number else inputs, outputs, kernel, bias=bias, activation=activation
            )
        return layers

    def embedding(self, inputs: int, features: int, relu: bool | None) -> nn.Sequential:
        """Linear layer, normalisation and, from 64 features on or if asked, ReLU.

        Of few features a ReLU would leave one orthant, and normalising them within an example
        would take most of their directions: there GroupNorm networks have the linear layer alone.
        """
        layers: list[nn.Module] = [nn.Linear(inputs, features)]
        if self.norm == "batch":
            layers.append(nn.BatchNorm1d(features))
        elif features >= _ROOMY:
            layers.append(nn.GroupNorm(1, features))
        if features >= _ROOMY if relu is None else relu:
            layers.append(RELU())
        return nn.Sequential(*layers)

    def finish(self, parts: Mapping[str, nn.Module], channels: int) -> Backbone:
        """The network, with a linear layer at its end if ``features`` is set."""
        if self.features is None:
            return Backbone(parts, channels)
        embedding = nn.Linear(channels, self.features)
        return Backbone({**parts, "embedding": embedding}, self.features)


def groups(channels: int) -> int:
    """Groups of GroupNorm: as many as divide the channels, at most 32, each of at least two.

    Example:
        >>> [groups(channels) for channels in (8, 64, 160, 3)]
        [4, 32, 32, 1]
    """
    most = min(32, max(1, channels // 2))
    return max(number for number in range(1, most + 1) if channels % number == 0)


def network(
    least: int,
    *,
    conv: Callable[[Tensor], object] | None = None,
    linear: Callable[[Tensor], object] | None = None,
) -> Callable[[Callable[..., Backbone]], Callable[..., Backbone]]:
    """Make a factory of networks of a function that builds one from :class:`Blocks`.

    The factory is called with the settings that every network has (``shape``, ``features``,
    ``width`` and ``norm``) and with those of the function.

    Args:
        least: smallest side an image may have.
        conv: draws the weight of a convolution; None leaves it as PyTorch made it.
        linear: draws that of a linear layer.
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
            made = build(Blocks(build.__name__, shape, least, features, width, norm), **own)
            for module in made.modules():
                draw = conv if isinstance(module, nn.Conv2d) else linear
                if isinstance(module, (nn.Conv2d, nn.Linear)) and draw is not None:
                    draw(module.weight)
                    if module.bias is not None:
                        nn.init.zeros_(module.bias)
            return made

        *shared, _ = inspect.signature(factory).parameters.values()
        _, *own = inspect.signature(build).parameters.values()
        functools.update_wrapper(factory, build)
        factory.__signature__ = inspect.Signature([*shared, *own])  # type: ignore[attr-defined]
        return factory

    return decorate
