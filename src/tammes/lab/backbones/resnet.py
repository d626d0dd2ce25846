"""Residual networks of the recipes."""

from collections.abc import Callable, Sequence
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from tammes.lab.backbones.blocks import (
    FAN_IN,
    FAN_OUT,
    RELU,
    UNIFORM,
    Backbone,
    Blocks,
    GlobalAverage,
    bnneck,
    network,
)
from tammes.lab.backbones.dropout import drop_layers

_LEAKY = partial(nn.LeakyReLU, 0.1, inplace=True)


class Residual(nn.Module):
    """A residual branch, its shortcut, and a module after their sum."""

    def __init__(self, branch: nn.Module, shortcut: nn.Module, after: nn.Module) -> None:
        super().__init__()
        self.branch, self.shortcut, self.after = branch, shortcut, after

    def forward(self, maps: Tensor) -> Tensor:
        """Apply branch, shortcut and the module after their sum."""
        out: Tensor = self.after(self.branch(maps) + self.shortcut(maps))
        return out


class PaddedShortcut(nn.Module):
    """Strided identity with zeros for the missing channels (option A)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.stride, before = stride, (outputs - inputs) // 2
        self.padding = (0, 0, 0, 0, before, outputs - inputs - before)

    def forward(self, maps: Tensor) -> Tensor:
        """Subsample the maps and pad the channels."""
        return F.pad(maps[:, :, :: self.stride, :: self.stride], self.padding)


class PreActivation(nn.Module):
    """A residual block that normalises and activates before each convolution.

    If the shape changes, the shortcut is a convolution of the activated input.
    """

    def __init__(
        self, blocks: Blocks, inputs: int, outputs: int, stride: int, drop_rate: float
    ) -> None:
        super().__init__()
        self.activate = nn.Sequential(blocks.norm_layer(inputs), RELU())
        drop: list[nn.Module] = [nn.Dropout(drop_rate)] if drop_rate else []
        self.branch = nn.Sequential(
            *blocks.unit(inputs, outputs, stride=stride), *drop, blocks.conv(outputs, outputs)
        )
        changes = stride != 1 or inputs != outputs
        self.shortcut = blocks.conv(inputs, outputs, 1, stride=stride) if changes else None

    def forward(self, maps: Tensor) -> Tensor:
        """Apply the block."""
        active = self.activate(maps)
        out: Tensor = self.branch(active)
        return out + (maps if self.shortcut is None else self.shortcut(active))


def projection(blocks: Blocks, inputs: int, outputs: int, stride: int) -> nn.Module:
    """Build a shortcut: 1 x 1 convolution and normalisation if the shape changes (option B)."""
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(*blocks.unit(inputs, outputs, 1, stride=stride, activation=None))


def _padded(blocks: Blocks, inputs: int, outputs: int, stride: int) -> nn.Module:
    """Build a shortcut without parameters."""
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return PaddedShortcut(inputs, outputs, stride)


def _basic(blocks: Blocks, inputs: int, outputs: int, stride: int) -> nn.Sequential:
    """Build the branch of a basic block: two 3 x 3 convolutions."""
    return nn.Sequential(
        *blocks.unit(inputs, outputs, stride=stride),
        *blocks.unit(outputs, outputs, activation=None),
    )


def _bottleneck(blocks: Blocks, inputs: int, outputs: int, stride: int) -> nn.Sequential:
    """Build the branch of a bottleneck: 1 x 1, 3 x 3 and 1 x 1, a quarter as wide inside."""
    inside = outputs // 4
    return nn.Sequential(
        *blocks.unit(inputs, inside, 1),
        *blocks.unit(inside, inside, stride=stride),
        *blocks.unit(inside, outputs, 1, activation=None),
    )


def small_stem(blocks: Blocks, channels: int) -> nn.Sequential:
    """Build the stem for small images: one unit that keeps their size."""
    return nn.Sequential(*blocks.unit(blocks.shape[0], channels))


def large_stem(blocks: Blocks, channels: int) -> nn.Sequential:
    """Build the stem for large images, which reduces each side to a quarter."""
    unit = blocks.unit(blocks.shape[0], channels, 7, stride=2)
    return nn.Sequential(*unit, nn.MaxPool2d(3, stride=2, padding=1))


def residual(
    blocks: Blocks,
    channels: Sequence[int],
    depths: Sequence[int],
    strides: Sequence[int] = (1, 2, 2, 2),
    *,
    stem: Callable[[Blocks, int], nn.Module] = small_stem,
    stem_channels: int | None = None,
    branch: Callable[[Blocks, int, int, int], nn.Module] = _basic,
    shortcut: Callable[[Blocks, int, int, int], nn.Module] = projection,
    after: Callable[[], nn.Module] = RELU,
    drop: Callable[[int], list[nn.Module]] = lambda stage: [],
) -> Backbone:
    """Build a residual network; ``drop`` gives the drop layers after each block of a stage."""
    inputs = stem_channels or channels[0]

    def layers(inputs: int, outputs: int, stride: int, stage: int) -> list[nn.Module]:
        dims = (inputs, outputs, stride)
        block = Residual(branch(blocks, *dims), shortcut(blocks, *dims), after())
        return [block, *drop(stage)]

    parts = {"stem": stem(blocks, inputs)}
    parts |= blocks.stages(channels, layers, inputs=inputs, depths=depths, strides=strides)
    return blocks.finish({**parts, "pool": GlobalAverage()}, channels[-1])


@network(8, conv=UNIFORM, linear=nn.init.xavier_uniform_)
def resnet18(blocks: Blocks, *, relu_after: bool = False) -> Backbone:
    """The CIFAR ResNet-18 of Zhou et al. 2022: 3 x 3 stem, 512 features that can be negative.

    With ``relu_after`` there is a ReLU after each addition, as is usual; the paper's code has none.

    Example:
        >>> resnet18(shape=(3, 32, 32), width=0.125).num_features
        64
    """
    channels = blocks.scaled(64, 128, 256, 512)
    return residual(blocks, channels, (2, 2, 2, 2), after=RELU if relu_after else nn.Identity)


@network(8, conv=UNIFORM, linear=nn.init.xavier_uniform_)
def resnet34(blocks: Blocks, *, relu_after: bool = False) -> Backbone:
    """The CIFAR ResNet-34 of Zhou et al. 2022; see :func:`resnet18`."""
    channels = blocks.scaled(64, 128, 256, 512)
    return residual(blocks, channels, (3, 4, 6, 3), after=RELU if relu_after else nn.Identity)


@network(4, conv=FAN_IN, linear=FAN_IN)
def resnet32(blocks: Blocks) -> Backbone:
    """The CIFAR ResNet-32 of LDAM (Cao et al. 2019): shortcuts without parameters, 64 features."""
    channels = blocks.scaled(16, 32, 64)
    return residual(blocks, channels, (5, 5, 5), (1, 2, 2), shortcut=_padded)


@network(4, conv=FAN_OUT)
def wrn28_10(blocks: Blocks, *, drop_rate: float = 0.0) -> Backbone:
    """WRN-28-10 (Zagoruyko and Komodakis 2016): 3 x 4 wide blocks, 640 features.

    ``drop_rate`` is the rate of dropout between the convolutions of a block.
    """
    if not 0 <= drop_rate < 1:
        raise ValueError(f"wrn28_10 expects drop_rate in [0, 1), got {drop_rate!r}")
    inputs, *channels = blocks.scaled(16, 160, 320, 640)

    def layers(inputs: int, outputs: int, stride: int, _: int) -> list[nn.Module]:
        return [PreActivation(blocks, inputs, outputs, stride, drop_rate)]

    stem: dict[str, nn.Module] = {"stem": blocks.conv(blocks.shape[0], inputs)}
    parts = stem | blocks.stages(
        channels, layers, inputs=inputs, depths=(4, 4, 4), strides=(1, 2, 2)
    )
    parts["last"] = nn.Sequential(blocks.norm_layer(channels[-1]), RELU())
    return blocks.finish({**parts, "pool": GlobalAverage()}, channels[-1])


@network(16, conv=FAN_OUT)
def resnet12(blocks: Blocks, *, drop_rate: float = 0.0, block_size: int = 5) -> Backbone:
    """The ResNet-12 of MetaOptNet (Liu et al. 2020): four blocks of 3 convolutions, 640 features.

    Dropout and DropBlock are those of :func:`resnet18_224`.

    Example:
        >>> resnet12(shape=(3, 84, 84), width=0.125).num_features
        80
    """
    drop = drop_layers(blocks.name, drop_rate, block_size)
    channels = blocks.scaled(64, 160, 320, 640)

    def layers(inputs: int, outputs: int, _: int, stage: int) -> list[nn.Module]:
        branch = nn.Sequential(
            *blocks.unit(inputs, outputs, activation=_LEAKY),
            *blocks.unit(outputs, outputs, activation=_LEAKY),
            *blocks.unit(outputs, outputs, activation=None),
        )
        # The shortcut has a convolution even if the number of channels does not change.
        shortcut = nn.Sequential(*blocks.unit(inputs, outputs, 1, activation=None))
        return [Residual(branch, shortcut, _LEAKY()), nn.MaxPool2d(2), *drop(stage)]

    parts = blocks.stages(channels, layers)
    return blocks.finish({**parts, "pool": GlobalAverage()}, channels[-1])


@network(8, conv=FAN_OUT)
def resnet12_basic(blocks: Blocks) -> Backbone:
    """The ResNet-12 of Laenen and Bertinetto 2021: basic blocks 1, 1, 2, 1 and 640 features.

    The ResNet-12 of MetaOptNet is :func:`resnet12`.
    """
    return residual(blocks, blocks.scaled(64, 160, 320, 640), (1, 1, 2, 1))


@network(32, conv=FAN_OUT)
def resnet18_224(blocks: Blocks, *, drop_rate: float = 0.0, block_size: int = 5) -> Backbone:
    """ResNet-18 for large images, as in Liu et al. 2020: 7 x 7 stem, 512 features.

    ``drop_rate`` is the rate of dropout after the blocks of stages 1 and 2, and of DropBlock, with
    squares of ``block_size``, after those of stages 3 and 4.
    """
    drop = drop_layers(blocks.name, drop_rate, block_size)
    channels = blocks.scaled(64, 128, 256, 512)
    return residual(blocks, channels, (2, 2, 2, 2), stem=large_stem, drop=drop)


@network(16, conv=FAN_OUT)
def resnet50_bnneck(blocks: Blocks) -> Backbone:
    """ResNet-50 for person re-identification (Luo et al. 2019): last stride 1, BNNeck.

    The neck normalises the 2048 features, without a shift. The classifier uses the features after
    it; metric losses use those before, ``network.body(images)``. Weights are random; use
    ``timm:resnet50(pretrained=True)`` for pretrained ones. ``features`` adds a linear layer before
    the neck.
    """
    # Four times the inner channels, so that these are a multiple of 8 as well.
    channels = [4 * inside for inside in blocks.scaled(64, 128, 256, 512)]
    body = residual(
        blocks, channels, (3, 4, 6, 3), (1, 2, 2, 1),
        stem=large_stem, stem_channels=blocks.scale(64), branch=_bottleneck,
    )  # fmt: skip
    size = body.num_features
    return Backbone({"body": body, "neck": bnneck(size, blocks.norm)}, size)
