"""Plain stacks of convolutions."""

from torch import nn

from tammes.lab.backbones.blocks import (
    FAN_IN,
    FAN_OUT,
    UNIFORM,
    Backbone,
    Blocks,
    GlobalAverage,
    network,
)


@network(4, conv=UNIFORM, linear=nn.init.xavier_uniform_)
def mnist_cnn(blocks: Blocks, *, relu: bool | None = None) -> Backbone:
    """The MNIST network of Zhou et al. 2022: two convolutions and a linear layer.

    The embedding has 128 features by default, and ends in a ReLU from 64 features on.

    Example:
        >>> mnist_cnn(shape=(1, 28, 28), features=3).num_features
        3
    """
    channels = blocks.scaled(32, 64)
    parts = blocks.stages(channels, lambda i, o, *_: [*blocks.unit(i, o), nn.MaxPool2d(2)])
    parts["flatten"] = nn.Flatten()
    return blocks.embed(parts, blocks.flat_size(channels[-1], 2), 128, relu)


def _lsoftmax(blocks: Blocks, repeats: int, relu: bool | None) -> Backbone:
    """Build a convolution, three stages that end in pooling, and a linear layer."""
    inputs, height, width = blocks.shape
    first, *channels = blocks.scaled(64, 64, 128, 256)

    def stage(inputs: int, outputs: int, *_: int) -> list[nn.Module]:
        # Pooling in Caffe keeps the last row and column of an odd size.
        pool = nn.MaxPool2d(2, ceil_mode=True)
        return [*blocks.chain(inputs, outputs, repeats, bias=True), pool]

    parts: dict[str, nn.Module] = {"stem": nn.Sequential(*blocks.unit(inputs, first, bias=True))}
    parts |= blocks.stages(channels, stage, inputs=first)
    parts["flatten"] = nn.Flatten()
    return blocks.embed(parts, channels[-1] * -(-height // 8) * -(-width // 8), 512, relu)


@network(8, conv=FAN_IN, linear=FAN_IN)
def lsoftmax_mnist(blocks: Blocks, *, relu: bool | None = None) -> Backbone:
    """The MNIST network released with L-Softmax (Liu et al. 2016): 1 + 3 x 3 convolutions.

    The embedding has 512 features by default, and ends in a ReLU from 64 features on.
    """
    return _lsoftmax(blocks, 3, relu)


@network(8, conv=FAN_IN, linear=FAN_IN)
def lsoftmax_cifar(blocks: Blocks, *, relu: bool | None = None) -> Backbone:
    """The CIFAR network released with L-Softmax (Liu et al. 2016): 1 + 3 x 4 convolutions.

    The embedding is that of :func:`lsoftmax_mnist`; a width of 1.5 gives the 96, 192 and 384
    channels reported for CIFAR-100.
    """
    return _lsoftmax(blocks, 4, relu)


@network(8)
def lsoftmax_2d(blocks: Blocks) -> Backbone:
    """The network behind the 2-D figure of L-Softmax (Liu et al. 2016): 3 x 2 convolutions, 5 x 5.

    The weights have the default initialisation of PyTorch, as in the public re-implementation. The
    embedding has 2 features by default.
    """
    channels, options = blocks.scaled(32, 64, 128), {"bias": True, "activation": nn.PReLU}

    def stage(inputs: int, outputs: int, *_: int) -> list[nn.Module]:
        return [*blocks.chain(inputs, outputs, 2, kernel=5, **options), nn.MaxPool2d(2)]

    parts = blocks.stages(channels, stage)
    parts["flatten"] = nn.Flatten()
    return blocks.embed(parts, blocks.flat_size(channels[-1], 3), 2, relu=False)


@network(16, conv=FAN_OUT)
def conv4(blocks: Blocks) -> Backbone:
    """Conv-4 of few-shot learning (as in Liu et al. 2020): 4 convolutions, 1600 features at 84 px.

    Example:
        >>> conv4(shape=(3, 84, 84)).num_features
        1600
    """
    channels = blocks.scaled(64, 64, 64, 64)
    parts = blocks.stages(
        channels, lambda i, o, *_: [*blocks.unit(i, o, bias=True), nn.MaxPool2d(2)]
    )
    parts["flatten"] = nn.Flatten()
    return blocks.finish(parts, blocks.flat_size(channels[-1], 4))


@network(12, conv=FAN_OUT)
def layer13(blocks: Blocks) -> Backbone:
    """The 13-layer network of Kobayashi 2019, as in the author's PyTorch port: 128 features."""
    small, middle, large = blocks.scaled(128, 256, 512)
    parts = blocks.stages(
        (small, middle), lambda i, o, *_: [*blocks.chain(i, o, 3), nn.MaxPool2d(2)]
    )
    parts["stage3"] = nn.Sequential(
        *blocks.unit(middle, large, padding=0),
        *blocks.unit(large, middle),
        *blocks.unit(middle, small),
    )
    return blocks.finish({**parts, "pool": GlobalAverage()}, small)
