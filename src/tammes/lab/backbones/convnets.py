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

    Args:
        blocks: settings that all networks share.
        features: size of the embedding, 128 by default; 3 for plots.
        relu: whether the embedding ends in a ReLU; by default from 64 features on.

    Example:
        >>> mnist_cnn(shape=(1, 28, 28), features=3).num_features
        3
    """
    first, second = blocks.scaled(32, 64)
    size = blocks.features or 128
    return Backbone(
        {
            "stage1": nn.Sequential(*blocks.unit(blocks.shape[0], first), nn.MaxPool2d(2)),
            "stage2": nn.Sequential(*blocks.unit(first, second), nn.MaxPool2d(2)),
            "flatten": nn.Flatten(),
            "embedding": blocks.embedding(blocks.flat_size(second, 2), size, relu),
        },
        size,
    )


def _lsoftmax(
    blocks: Blocks, repeats: int, channels: tuple[int, int, int], relu: bool | None
) -> Backbone:
    """Build a convolution, three stages that end in pooling, and a linear layer."""
    inputs, height, width = blocks.shape
    first = blocks.scale(64)
    parts: dict[str, nn.Module] = {"stem": nn.Sequential(*blocks.unit(inputs, first, bias=True))}
    inputs = first
    for number, plain in enumerate(channels, 1):
        outputs = blocks.scale(plain)
        # Pooling in Caffe keeps the last row and column of an odd size.
        pool = nn.MaxPool2d(2, ceil_mode=True)
        parts[f"stage{number}"] = nn.Sequential(
            *blocks.chain(inputs, outputs, repeats, bias=True), pool
        )
        inputs, height, width = outputs, -(-height // 2), -(-width // 2)
    parts["flatten"] = nn.Flatten()
    size = blocks.features or 512
    parts["embedding"] = blocks.embedding(inputs * height * width, size, relu)
    return Backbone(parts, size)


@network(8, conv=FAN_IN, linear=FAN_IN)
def lsoftmax_mnist(blocks: Blocks, *, relu: bool | None = None) -> Backbone:
    """The MNIST network released with L-Softmax (Liu et al. 2016): 1 + 3 x 3 convolutions.

    Args:
        blocks: settings that all networks share.
        features: size of the embedding, 512 by default.
        relu: whether the embedding ends in a ReLU; by default from 64 features on.
    """
    return _lsoftmax(blocks, 3, (64, 128, 256), relu)


@network(8, conv=FAN_IN, linear=FAN_IN)
def lsoftmax_cifar(blocks: Blocks, *, relu: bool | None = None) -> Backbone:
    """The CIFAR network released with L-Softmax (Liu et al. 2016): 1 + 3 x 4 convolutions.

    Args:
        blocks: settings that all networks share.
        features: size of the embedding, 512 by default.
        width: multiplies the channels; 1.5 gives 96, 192 and 384, reported for CIFAR-100.
        relu: whether the embedding ends in a ReLU; by default from 64 features on.
    """
    return _lsoftmax(blocks, 4, (64, 128, 256), relu)


@network(8)
def lsoftmax_2d(blocks: Blocks) -> Backbone:
    """The network behind the 2-D figure of L-Softmax (Liu et al. 2016): 3 x 2 convolutions, 5 x 5.

    The weights have the default initialisation of PyTorch, as in the public re-implementation.

    Args:
        blocks: settings that all networks share.
        features: size of the embedding, 2 by default.
    """
    parts: dict[str, nn.Module] = {}
    inputs = blocks.shape[0]
    for number, plain in enumerate((32, 64, 128), 1):
        outputs = blocks.scale(plain)
        layers = blocks.chain(inputs, outputs, 2, 5, bias=True, activation=nn.PReLU)
        parts[f"stage{number}"] = nn.Sequential(*layers, nn.MaxPool2d(2))
        inputs = outputs
    parts["flatten"] = nn.Flatten()
    size = blocks.features or 2
    parts["embedding"] = blocks.embedding(blocks.flat_size(inputs, 3), size, relu=False)
    return Backbone(parts, size)


@network(16, conv=FAN_OUT)
def conv4(blocks: Blocks) -> Backbone:
    """Conv-4 of few-shot learning (as in Liu et al. 2020): four convolutions, 1600 features at 84.

    Example:
        >>> conv4(shape=(3, 84, 84)).num_features
        1600
    """
    channels = blocks.scale(64)
    parts: dict[str, nn.Module] = {
        f"stage{number}": nn.Sequential(
            *blocks.unit(blocks.shape[0] if number == 1 else channels, channels, bias=True),
            nn.MaxPool2d(2),
        )
        for number in range(1, 5)
    }
    parts["flatten"] = nn.Flatten()
    return blocks.finish(parts, blocks.flat_size(channels, 4))


@network(12, conv=FAN_OUT)
def layer13(blocks: Blocks) -> Backbone:
    """The 13-layer network of Kobayashi 2019, as in the author's PyTorch port: 128 features."""
    small, middle, large = blocks.scaled(128, 256, 512)
    parts = {
        "stage1": nn.Sequential(*blocks.chain(blocks.shape[0], small, 3), nn.MaxPool2d(2)),
        "stage2": nn.Sequential(*blocks.chain(small, middle, 3), nn.MaxPool2d(2)),
        "stage3": nn.Sequential(
            *blocks.unit(middle, large, padding=0),
            *blocks.unit(large, middle),
            *blocks.unit(middle, small),
        ),
        "pool": GlobalAverage(),
    }
    return blocks.finish(parts, small)
