"""Wide residual networks."""

from torch import Tensor, nn

from tammes.lab.backbones.blocks import (
    FAN_OUT,
    RELU,
    Backbone,
    Blocks,
    GlobalAverage,
    network,
)


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


@network(4, conv=FAN_OUT)
def wrn28_10(blocks: Blocks, *, drop_rate: float = 0.0) -> Backbone:
    """WRN-28-10 (Zagoruyko and Komodakis 2016): 3 x 4 wide blocks, 640 features.

    The drop rate is that of dropout between the convolutions of a block.
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
