"""The ResNet-12 of MetaOptNet."""

from functools import partial

from torch import nn

from tammes.lab.backbones.blocks import (
    FAN_OUT,
    Backbone,
    Blocks,
    GlobalAverage,
    network,
)
from tammes.lab.backbones.dropout import drop_layers
from tammes.lab.backbones.resnet import Residual

_LEAKY = partial(nn.LeakyReLU, 0.1, inplace=True)


@network(16, conv=FAN_OUT)
def resnet12(blocks: Blocks, *, drop_rate: float = 0.0, block_size: int = 5) -> Backbone:
    """The ResNet-12 of MetaOptNet, as in Liu et al. 2020: four blocks of three, 640 features.

    Dropout and DropBlock are those of :func:`.resnet18_224`.

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
