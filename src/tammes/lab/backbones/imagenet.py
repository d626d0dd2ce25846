"""Networks for ImageNet: VGG-16 and its variant by Kobayashi, MobileNet and ResNeXt-50."""

import math
from functools import partial

from torch import nn

from tammes.lab.backbones.blocks import (
    FAN_IN,
    FAN_OUT,
    Backbone,
    Blocks,
    GlobalAverage,
    network,
)
from tammes.lab.backbones.resnet import large_stem, residual

_SMALL = partial(nn.init.normal_, std=0.01)
_CARDINALITY = 32


def _vgg_stages(blocks: Blocks) -> tuple[dict[str, nn.Module], int]:
    """Build the 13 convolutions of VGG-16 without final pooling; also returns the channels."""
    channels, repeats = blocks.scaled(64, 128, 256, 512, 512), (2, 2, 3, 3, 3)

    def layers(inputs: int, outputs: int, _: int, stage: int) -> list[nn.Module]:
        chain = blocks.chain(inputs, outputs, repeats[stage - 1], bias=True)
        return chain if stage == 1 else [nn.MaxPool2d(2), *chain]

    return blocks.stages(channels, layers), channels[-1]


@network(32, conv=_SMALL, linear=_SMALL)
def vgg16(blocks: Blocks) -> Backbone:
    """VGG-16 (Simonyan and Zisserman 2015), as in the code of Kobayashi 2019: 4096 features.

    Its convolutions and both of its hidden linear layers are normalised, and there is no dropout.
    The width multiplies the linear layers too.

    Example:
        >>> vgg16(shape=(3, 32, 32), width=0.125).num_features
        512
    """
    parts, channels = _vgg_stages(blocks)
    hidden = blocks.scale(4096)
    parts["pool"] = nn.MaxPool2d(2)
    parts["flatten"] = nn.Flatten()
    parts["hidden"] = blocks.embedding(blocks.flat_size(channels, 5), hidden, relu=True)
    return blocks.embed(parts, hidden, hidden)


@network(16, conv=_SMALL, linear=_SMALL)
def vgg16_mod(blocks: Blocks) -> Backbone:
    """VGG-16-mod (Kobayashi 2018), as in the code of Kobayashi 2019: 4096 features.

    In place of the last pooling and the first linear layer of :func:`vgg16` there are a 1 x 1
    convolution and global average pooling: a quarter of the parameters.
    """
    parts, channels = _vgg_stages(blocks)
    hidden = blocks.scale(4096)
    parts["hidden"] = nn.Sequential(*blocks.unit(channels, hidden, 1, bias=True))
    parts["pool"] = GlobalAverage()
    return blocks.embed(parts, hidden, hidden)


# Fan-in, because in grouped convolutions it counts the inputs of one output value.
@network(32, conv=FAN_IN)
def mobilenet(blocks: Blocks) -> Backbone:
    """MobileNet (Howard et al. 2017, the first one): 13 separable convolutions, 1024 features.

    Each is a depthwise 3 x 3 convolution and a 1 x 1 convolution over all channels.
    """
    first, *channels = blocks.scaled(32, 64, 128, 256, 512, 1024)

    def separable(inputs: int, outputs: int, stride: int, _: int) -> list[nn.Module]:
        depthwise = blocks.unit(inputs, inputs, stride=stride, groups=inputs)
        return [*depthwise, *blocks.unit(inputs, outputs, 1)]

    stem = nn.Sequential(*blocks.unit(blocks.shape[0], first, stride=2))
    depths, strides = (1, 2, 2, 6, 2), (1, 2, 2, 2, 2)
    parts = blocks.stages(channels, separable, inputs=first, depths=depths, strides=strides)
    return blocks.finish({"stem": stem, **parts, "pool": GlobalAverage()}, channels[-1])


@network(32, conv=FAN_OUT)
def resnext50(blocks: Blocks) -> Backbone:
    """ResNeXt-50, 32 x 4d (Xie et al. 2017): bottlenecks in 32 groups, 2048 features.

    With few channels there are fewer groups.
    """
    channels = [2 * half for half in blocks.scaled(128, 256, 512, 1024)]
    return residual(
        blocks, channels, (3, 4, 6, 3),
        stem=large_stem, stem_channels=blocks.scale(64), branch=_grouped_bottleneck,
    )  # fmt: skip


def _grouped_bottleneck(blocks: Blocks, inputs: int, outputs: int, stride: int) -> nn.Module:
    """Build a bottleneck of half the channels with a grouped middle convolution."""
    inside = outputs // 2
    groups = math.gcd(_CARDINALITY, inside)
    return nn.Sequential(
        *blocks.unit(inputs, inside, 1),
        *blocks.unit(inside, inside, stride=stride, groups=groups),
        *blocks.unit(inside, outputs, 1, activation=None),
    )
