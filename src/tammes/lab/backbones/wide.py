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

    Args:
        blocks: settings that all networks share.
        drop_rate: rate of dropout between the convolutions of a block.
    """
    if not 0 <= drop_rate < 1:
        raise ValueError(f"wrn28_10 expects drop_rate in [0, 1), got {drop_rate!r}")
    inputs = blocks.scale(16)
    parts: dict[str, nn.Module] = {"stem": blocks.conv(blocks.shape[0], inputs)}
    for stage, (plain, first) in enumerate(((160, 1), (320, 2), (640, 2)), 1):
        outputs = blocks.scale(plain)
        layers = []
        for number in range(4):
            stride = 1 if number else first
            layers.append(PreActivation(blocks, inputs, outputs, stride, drop_rate))
            inputs = outputs
        parts[f"stage{stage}"] = nn.Sequential(*layers)
    parts["last"] = nn.Sequential(blocks.norm_layer(inputs), RELU())
    parts["pool"] = GlobalAverage()
    return blocks.finish(parts, inputs)
