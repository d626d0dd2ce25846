"""Wide residual networks."""

from torch import Tensor, nn

from tammes.lab.backbones.blocks import (
    FAN_OUT,
    RELU,
    Backbone,
    Blocks,
    GlobalAverage,
    Norm,
    Shape,
    initialise,
)


class PreActivation(nn.Module):
    """A residual block that normalises and activates before each convolution.

    Where the map changes, the shortcut is a convolution of what was activated.
    """

    def __init__(
        self, blocks: Blocks, inputs: int, outputs: int, stride: int, drop_rate: float
    ) -> None:
        super().__init__()
        self.activate = nn.Sequential(blocks.normal(inputs), RELU())
        drop: list[nn.Module] = [nn.Dropout(drop_rate)] if drop_rate else []
        self.branch = nn.Sequential(
            *blocks.unit(inputs, outputs, stride=stride), *drop, blocks.conv(outputs, outputs)
        )
        changes = stride != 1 or inputs != outputs
        self.shortcut = blocks.conv(inputs, outputs, 1, stride=stride) if changes else None

    def forward(self, maps: Tensor) -> Tensor:
        """From maps to maps."""
        active = self.activate(maps)
        out: Tensor = self.branch(active)
        return out + (maps if self.shortcut is None else self.shortcut(active))


def wrn28_10(
    *,
    shape: Shape,
    features: int | None = None,
    width: float = 1.0,
    norm: Norm = "batch",
    drop_rate: float = 0.0,
) -> Backbone:
    """WRN-28-10 (Zagoruyko and Komodakis 2016): 3 x 4 wide blocks, 640 features.

    Args:
        shape: channels, height and width of the images.
        features: adds a linear layer of this size.
        width: multiplies the channels.
        norm: ``batch`` or ``group``.
        drop_rate: of dropout between the convolutions of a block.
    """
    blocks = Blocks("wrn28_10", shape, 4, features, width, norm)
    if not 0 <= drop_rate < 1:
        raise ValueError(f"wrn28_10 expects drop_rate in [0, 1), got {drop_rate!r}")
    inputs = blocks.scale(16)
    parts: dict[str, nn.Module] = {"stem": blocks.conv(shape[0], inputs)}
    for stage, (plain, first) in enumerate(((160, 1), (320, 2), (640, 2)), 1):
        outputs = blocks.scale(plain)
        layers = []
        for number in range(4):
            stride = 1 if number else first
            layers.append(PreActivation(blocks, inputs, outputs, stride, drop_rate))
            inputs = outputs
        parts[f"stage{stage}"] = nn.Sequential(*layers)
    parts["last"] = nn.Sequential(blocks.normal(inputs), RELU())
    parts["pool"] = GlobalAverage()
    network = blocks.finish(parts, inputs)
    initialise(network, conv=FAN_OUT)
    return network
