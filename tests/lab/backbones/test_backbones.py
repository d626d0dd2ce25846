"""Networks: as many parameters as their recipes say, and the structure those recipes describe."""

import inspect
import math
import re
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from tammes.lab import backbones
from tammes.lab.backbones.blocks import groups
from tammes.lab.backbones.dropout import DropBlock
from tammes.lab.backbones.resnet import PaddedShortcut

SHAPES = {
    "mnist_cnn": (1, 28, 28),
    "lsoftmax_mnist": (1, 28, 28),
    "lsoftmax_cifar": (3, 32, 32),
    "lsoftmax_2d": (1, 28, 28),
    "conv4": (3, 84, 84),
    "layer13": (3, 32, 32),
    "resnet18": (3, 32, 32),
    "resnet34": (3, 32, 32),
    "resnet32": (3, 32, 32),
    "wrn28_10": (3, 32, 32),
    "resnet12": (3, 84, 84),
    "resnet12_basic": (3, 84, 84),
    "resnet18_224": (3, 224, 224),
    "resnet50_bnneck": (3, 256, 128),
    "vgg16": (3, 224, 224),
    "vgg16_mod": (3, 224, 224),
    "mobilenet": (3, 224, 224),
    "resnext50": (3, 224, 224),
}
LEAST = {
    "mnist_cnn": 4,
    "lsoftmax_mnist": 8,
    "lsoftmax_cifar": 8,
    "lsoftmax_2d": 8,
    "conv4": 16,
    "layer13": 12,
    "resnet18": 8,
    "resnet34": 8,
    "resnet32": 4,
    "wrn28_10": 4,
    "resnet12": 16,
    "resnet12_basic": 8,
    "resnet18_224": 32,
    "resnet50_bnneck": 16,
    "vgg16": 32,
    "vgg16_mod": 16,
    "mobilenet": 32,
    "resnext50": 32,
}
PAGE = Path(__file__).parents[3] / "docs" / "backbones.md"


def build(text, shape=None):
    return backbones.build(text, shape=shape or SHAPES[text.partition("(")[0]])


def narrow(name, settings="", shape=None):
    """A network an eighth as wide, on small images."""
    text = f"{name}(width=0.125{', ' if settings else ''}{settings})"
    return build(text, shape or (SHAPES[name][0], 32, 32))


def images(name, count=2, size=32):
    return torch.randn(count, SHAPES[name][0], size, size)


def parameters(network):
    return sum(p.numel() for p in network.parameters() if p.requires_grad)


# -------------------------------------------------------------------- counts, summed by hand


def conv(inputs, outputs, side=3, bias=False):
    return inputs * outputs * side * side + (outputs if bias else 0)


def bn(channels):
    return 2 * channels


def cb(inputs, outputs, side=3, bias=False):
    return conv(inputs, outputs, side, bias) + bn(outputs)


def fc(inputs, outputs):
    return inputs * outputs + outputs


def mnist_cnn():
    return cb(1, 32) + cb(32, 64) + fc(64 * 7 * 7, 128) + bn(128)


def lsoftmax(inputs, repeats, flat):
    total, before = cb(inputs, 64, bias=True), 64
    for channels in (64, 128, 256):
        total += cb(before, channels, bias=True) + (repeats - 1) * cb(channels, channels, bias=True)
        before = channels
    return total + fc(flat, 512) + bn(512)


def lsoftmax_2d():
    total, before = 0, 1
    for channels in (32, 64, 128):
        # Each of the two activations has one slope.
        total += cb(before, channels, 5, True) + cb(channels, channels, 5, True) + 2
        before = channels
    return total + fc(128 * 3 * 3, 2) + bn(2)


def layer13():
    first = cb(3, 128) + 2 * cb(128, 128)
    second = cb(128, 256) + 2 * cb(256, 256)
    return first + second + cb(256, 512) + cb(512, 256) + cb(256, 128)


def basic_stages(stem, widths, depths, shortcut=True, strided=(1, 2, 2, 2)):
    """Stages of basic blocks; a projection where channels or size change."""
    total, before = 0, stem
    for channels, depth, stride in zip(widths, depths, strided, strict=False):
        total += cb(before, channels) + (2 * depth - 1) * cb(channels, channels)
        if shortcut and (before != channels or stride != 1):
            total += cb(before, channels, 1)
        before = channels
    return total


def wide():
    total, before = conv(3, 16), 16
    for channels in (160, 320, 640):
        total += bn(before) + conv(before, channels) + bn(channels) + conv(channels, channels)
        total += conv(before, channels, 1)
        total += 3 * (2 * bn(channels) + 2 * conv(channels, channels))
        before = channels
    return total + bn(640)


def resnet12():
    total, before = 0, 3
    for channels in (64, 160, 320, 640):
        total += cb(before, channels) + 2 * cb(channels, channels) + cb(before, channels, 1)
        before = channels
    return total


def resnet50():
    total, before = cb(3, 64, 7), 64
    for inside, depth in ((64, 3), (128, 4), (256, 6), (512, 3)):
        outside = 4 * inside
        first = cb(before, inside, 1) + cb(inside, inside) + cb(inside, outside, 1)
        other = cb(outside, inside, 1) + cb(inside, inside) + cb(inside, outside, 1)
        total += first + cb(before, outside, 1) + (depth - 1) * other
        before = outside
    # The neck has a weight for each feature, and no shift.
    return total + 2048


def vgg_stages():
    total, before = 0, 3
    for channels, repeats in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        total += cb(before, channels, bias=True) + (repeats - 1) * cb(channels, channels, bias=True)
        before = channels
    return total


def vgg16():
    return vgg_stages() + fc(512 * 7 * 7, 4096) + bn(4096) + fc(4096, 4096) + bn(4096)


def vgg16_mod():
    return vgg_stages() + cb(512, 4096, 1, bias=True) + fc(4096, 4096) + bn(4096)


def mobilenet():
    total, before = cb(3, 32), 32
    for channels in (64, 128, 128, 256, 256, *6 * (512,), 1024, 1024):
        # Nine weights for each channel by itself, then all channels together.
        total += 9 * before + bn(before) + cb(before, channels, 1)
        before = channels
    return total


def resnext50():
    total, before = cb(3, 64, 7), 64
    for inside, depth in ((128, 3), (256, 4), (512, 6), (1024, 3)):
        outside = 2 * inside
        middle = conv(inside, inside) // 32 + bn(inside) + cb(inside, outside, 1)
        first = cb(before, inside, 1) + middle + cb(before, outside, 1)
        total += first + (depth - 1) * (cb(outside, inside, 1) + middle)
        before = outside
    return total


PLAIN = (64, 128, 256, 512)
COUNTS = {
    "mnist_cnn": (mnist_cnn(), 128),
    "lsoftmax_mnist": (lsoftmax(1, 3, 256 * 4 * 4), 512),
    "lsoftmax_cifar": (lsoftmax(3, 4, 256 * 4 * 4), 512),
    "lsoftmax_2d": (lsoftmax_2d(), 2),
    "conv4": (cb(3, 64, bias=True) + 3 * cb(64, 64, bias=True), 1600),
    "layer13": (layer13(), 128),
    "resnet18": (cb(3, 64) + basic_stages(64, PLAIN, (2, 2, 2, 2)), 512),
    "resnet34": (cb(3, 64) + basic_stages(64, PLAIN, (3, 4, 6, 3)), 512),
    "resnet32": (cb(3, 16) + basic_stages(16, (16, 32, 64), (5, 5, 5), shortcut=False), 64),
    "wrn28_10": (wide(), 640),
    "resnet12": (resnet12(), 640),
    "resnet12_basic": (cb(3, 64) + basic_stages(64, (64, 160, 320, 640), (1, 1, 2, 1)), 640),
    "resnet18_224": (cb(3, 64, 7) + basic_stages(64, PLAIN, (2, 2, 2, 2)), 512),
    "resnet50_bnneck": (resnet50(), 2048),
    "vgg16": (vgg16(), 4096),
    "vgg16_mod": (vgg16_mod(), 4096),
    "mobilenet": (mobilenet(), 1024),
    "resnext50": (resnext50(), 2048),
}


def test_every_network_is_counted():
    assert set(COUNTS) == set(backbones.TABLE) == set(SHAPES) == set(LEAST)


@pytest.mark.parametrize("name", COUNTS)
def test_parameters_and_features_are_those_of_the_recipe(name):
    count, features = COUNTS[name]
    network = build(name)
    assert parameters(network) == count
    assert network.num_features == features


@pytest.mark.parametrize(
    ("name", "published"),
    [
        # With the classifier of ten classes that publications count in.
        ("wrn28_10", 36_479_194 - fc(640, 10)),
        ("resnet32", 464_154 - fc(64, 10)),
        ("resnet12", 12_424_320),
        # ImageNet's, without their classifiers of 1000.
        ("resnet18_224", 11_689_512 - fc(512, 1000)),
        ("resnet50_bnneck", 25_557_032 - fc(2048, 1000) + 2048),
        # Without the normalisation of linear layers, which torchvision's do not have.
        ("vgg16", 138_365_992 - fc(4096, 1000) + 2 * bn(4096)),
        ("mobilenet", 4_231_976 - fc(1024, 1000)),
        ("resnext50", 25_028_904 - fc(2048, 1000)),
    ],
)
def test_sums_by_hand_meet_published_counts(name, published):
    assert COUNTS[name][0] == published


@pytest.mark.parametrize("name", COUNTS)
def test_the_page_has_the_right_numbers(name):
    count, features = COUNTS[name]
    row = re.search(rf"^\| `{name}` .*$", PAGE.read_text(), re.MULTILINE)
    assert row, "not in the table"
    cells = [cell.strip() for cell in row.group().split("|")]
    assert f"{count:,}" in cells
    assert str(features) in cells
    own = set(inspect.signature(backbones.TABLE[name]).parameters)
    own -= {"shape", "features", "width", "norm"}
    assert set(re.findall(r"`(\w+)`", cells[-2])) == own


# ----------------------------------------------------------------- settings all of them have


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("name", COUNTS)
def test_narrow_network_has_its_features_and_learns_everywhere(name, norm):
    network = narrow(name, f"norm='{norm}'")
    features = network(images(name))
    assert features.shape == (2, network.num_features)
    (features**2).sum().backward()
    for key, parameter in network.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, key


@pytest.mark.parametrize("name", COUNTS)
def test_features_can_be_as_many_as_one_likes(name):
    network = narrow(name, "features=5")
    assert network.num_features == 5
    assert network(images(name)).shape == (2, 5)


@pytest.mark.parametrize("name", COUNTS)
def test_with_group_norm_examples_do_not_depend_on_each_other(name):
    # In double precision: groups of two values on a map of one pixel enlarge rounding.
    network = narrow(name, "norm='group'").double().train()
    batch = images(name, 3).double()
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in network.modules())
    assert_close(network(batch)[:1], network(batch[:1]))


@pytest.mark.parametrize("name", COUNTS)
def test_with_batch_norm_they_do(name):
    network = narrow(name).train()
    batch = images(name, 3)
    assert not torch.allclose(network(batch)[:2], network(batch[:2]), atol=1e-3)


@pytest.mark.parametrize("width", [1 / 16, 0.5, 1.5])
@pytest.mark.parametrize("name", ["conv4", "resnet32", "wrn28_10"])
def test_channels_of_any_width_divide_into_groups(name, width):
    network = build(f"{name}(width={width}, norm='group')", (3, 32, 32))
    for module in network.modules():
        if isinstance(module, nn.GroupNorm):
            assert module.num_channels % 8 == 0
            assert 4 <= module.num_groups <= 32


def test_width_multiplies_the_channels():
    network = build("lsoftmax_cifar(width=1.5)")
    widths = [m.out_channels for m in network.modules() if isinstance(m, nn.Conv2d)]
    assert widths == [96] + 4 * [96] + 4 * [192] + 4 * [384]


def test_groups_divide_the_channels_and_have_two_at_least():
    for channels in range(2, 700):
        number = groups(channels)
        assert channels % number == 0
        assert 1 <= number <= 32
        assert channels // number >= 2
    assert groups(1) == 1


@pytest.mark.parametrize("name", COUNTS)
def test_the_smallest_image_it_accepts_goes_through(name):
    shape = (SHAPES[name][0], LEAST[name], LEAST[name])
    network = narrow(name, shape=shape)
    assert network(torch.randn(2, *shape)).shape == (2, network.num_features)


@pytest.mark.parametrize("name", COUNTS)
def test_a_smaller_image_is_refused_with_a_sentence(name):
    least = LEAST[name]
    message = f"^{name} expects images of at least {least} x {least} pixels, got 64 x {least - 1}$"
    with pytest.raises(ValueError, match=message):
        build(name, (3, 64, least - 1))


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("shape", [(1, 33, 40), (4, 40, 33)])
def test_images_may_have_any_channels_and_sides(name, shape):
    network = narrow(name, shape=shape)
    assert network(torch.randn(2, *shape)).shape == (2, network.num_features)


@pytest.mark.parametrize("name", COUNTS)
def test_weights_are_those_of_the_seed(name):
    states = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        states.append(torch.cat([p.flatten() for p in narrow(name).parameters()]))
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


@pytest.mark.parametrize("name", COUNTS)
def test_channels_last_changes_nothing(name):
    network, batch = narrow(name).eval(), images(name)
    expected = network(batch)
    network = network.to(memory_format=torch.channels_last)
    found = network(batch.contiguous(memory_format=torch.channels_last))
    assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("resnt18", "there is no backbone 'resnt18'; did you mean resnet18?"),
        ("resnet18(feature=3)", "resnet18 has no setting 'feature'; did you mean features?"),
        ("resnet18(features=0)", "features of resnet18 is expected to be at least 1, got 0"),
        (
            "conv4(features=2.5)",
            "features of conv4 is expected to be a whole number or null, got 2.5",
        ),
        ("layer13(width=0)", "width of layer13 is expected to be above 0, got 0"),
        ("layer13(width='a')", "width of layer13 is expected to be a number, got 'a'"),
        (
            "resnet32(norm='layer')",
            "norm of resnet32 is expected to be batch or group, got 'layer'",
        ),
        ("resnet12(drop_rate=1)", r"resnet12 expects drop_rate in \[0, 1\), got 1"),
        ("wrn28_10(drop_rate=-1)", r"wrn28_10 expects drop_rate in \[0, 1\), got -1"),
        ("resnet12(drop_rate=0.1, block_size=0)", "block_size to be at least 1, got 0"),
    ],
)
def test_a_wrong_text_is_refused_with_a_sentence(text, message):
    with pytest.raises(ValueError, match=message) as caught:
        backbones.build(text, shape=(3, 32, 32))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("shape", [(3, 0, 0), (0, 32, 32)])
def test_a_wrong_shape_is_refused_with_a_sentence(shape):
    with pytest.raises(ValueError, match=r"expects the shape \(channels, height, width\)"):
        backbones.build("conv4", shape=shape)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((1, 8, 8), "mnist_cnn"),
        ((1, 28, 28), "mnist_cnn"),
        ((3, 29, 29), "conv4"),
        ((3, 224, 224), "conv4"),
        ((1, 8, 64), "mnist_cnn"),
    ],
)
def test_auto_goes_by_the_size_of_the_images(shape, expected):
    assert backbones.resolve("auto", shape) == expected
    assert backbones.resolve(" auto(features=3)", shape) == f"{expected}(features=3)"
    assert backbones.build("auto(features=3)", shape=shape).num_features == 3
    assert backbones.resolve("resnet18(width=2)", shape) == "resnet18(width=2)"


# -------------------------------------------------------------------------- initial weights


def convolutions(network):
    return [m for m in network.modules() if isinstance(m, nn.Conv2d)]


FANS = {
    "conv4": "out",
    "layer13": "out",
    "resnet12": "out",
    "resnet12_basic": "out",
    "resnet18_224": "out",
    "resnet50_bnneck": "out",
    "wrn28_10": "out",
    "resnext50": "out",
    "mobilenet": "in",
    "resnet32": "in",
    "lsoftmax_mnist": "in",
    "lsoftmax_cifar": "in",
}


@pytest.mark.parametrize(("name", "fan"), FANS.items())
def test_convolutions_start_normal_with_the_variance_of_the_recipe(name, fan):
    # Together they are standard normal: enough weights for a percent, whatever the network.
    scaled = []
    for module in convolutions(build(f"{name}(width=0.5)")):
        outputs, inputs, height, width = module.weight.shape
        count = height * width * (outputs if fan == "out" else inputs)
        scaled.append((module.weight.detach() * math.sqrt(count / 2)).flatten())
        assert module.bias is None or not module.bias.any()
    scaled = torch.cat(scaled)
    assert abs(scaled.std() - 1) < 0.01
    # A normal distribution, not a uniform one: its fourth moment is 3.
    assert abs((scaled**4).mean() / 3 - 1) < 0.1


@pytest.mark.parametrize("name", ["mnist_cnn", "resnet18", "resnet34"])
def test_the_networks_of_zhou_start_uniform(name):
    network = build(f"{name}(features=128)")
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            bound = math.sqrt(6 / module.weight[0].numel())
        elif isinstance(module, nn.Linear):
            bound = math.sqrt(6 / sum(module.weight.shape))
        else:
            continue
        assert module.weight.abs().max() <= bound
        assert module.weight.abs().max() > 0.95 * bound
        assert module.bias is None or not module.bias.any()


@pytest.mark.parametrize("name", ["vgg16", "vgg16_mod"])
def test_the_vgg_networks_start_normal_with_a_deviation_of_a_hundredth(name):
    network = narrow(name)
    layers = [m for m in network.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    weights = torch.cat([layer.weight.detach().flatten() for layer in layers])
    assert abs(weights.std() / 0.01 - 1) < 0.01
    assert abs((weights**4).mean() / (3 * 0.01**4) - 1) < 0.1
    assert all(layer.bias is not None and not layer.bias.any() for layer in layers)


# --------------------------------------------------------------------------- their structure


def map_sizes(network, shape, part):
    """Height and width of what comes out of a part."""
    seen = []
    part.register_forward_hook(lambda module, given, out: seen.append(tuple(out.shape[2:])))
    network(torch.randn(2, *shape))
    return seen[0]


def test_the_512_channels_of_layer13_have_no_padding():
    network = narrow("layer13")
    assert map_sizes(network, (3, 32, 32), network.stage2) == (8, 8)
    assert map_sizes(network, (3, 32, 32), network.stage3) == (6, 6)


def test_the_last_stage_of_the_bnneck_network_keeps_its_size():
    shape = (3, 256, 128)
    network = narrow("resnet50_bnneck", shape=shape)
    assert map_sizes(network, shape, network.body.stage3) == (16, 8)
    assert map_sizes(network, shape, network.body.stage4) == (16, 8)


@pytest.mark.parametrize(
    ("name", "size"),
    [("resnet12", 5), ("resnet12_basic", 11), ("resnet18_224", 7), ("conv4", 5)],
)
def test_maps_before_pooling_have_the_size_of_the_recipe(name, size):
    network = narrow(name, shape=SHAPES[name])
    assert map_sizes(network, SHAPES[name], network.stage4) == (size, size)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("vgg16", (224, 112, 56, 28, 14)),
        ("vgg16_mod", (224, 112, 56, 28, 14)),
        ("mobilenet", (112, 56, 28, 14, 7)),
        ("resnext50", (56, 28, 14, 7)),
    ],
)
def test_stages_of_the_imagenet_networks_have_maps_of_the_recipe(name, sizes):
    network = narrow(name, shape=SHAPES[name])
    for number, size in enumerate(sizes, 1):
        part = getattr(network, f"stage{number}")
        assert map_sizes(network, SHAPES[name], part) == (size, size), part


@pytest.mark.parametrize(("name", "layers"), [("vgg16", 2), ("vgg16_mod", 1)])
def test_vgg_linear_layers_are_normalised_without_dropout(name, layers):
    kinds = [type(m) for m in narrow(name).modules()]
    assert kinds.count(nn.Linear) == kinds.count(nn.BatchNorm1d) == layers
    assert kinds.count(nn.Conv2d) + kinds.count(nn.Linear) == 15
    assert nn.Dropout not in kinds


def test_mobilenet_looks_at_places_one_channel_at_a_time():
    stem, *layers = convolutions(narrow("mobilenet"))
    assert stem.groups == 1
    for number, layer in enumerate(layers):
        alone = number % 2 == 0
        assert layer.kernel_size == ((3, 3) if alone else (1, 1))
        assert layer.groups == (layer.in_channels if alone else 1)


def test_the_bottlenecks_of_resnext_are_in_32_groups():
    network = build("resnext50(width=0.25)", (3, 32, 32))
    inside = [m for m in convolutions(network) if m.kernel_size == (3, 3)]
    assert [m.groups for m in inside] == 16 * [32]
    assert [m.in_channels for m in inside[:1]] == [32]


def test_the_neck_normalises_without_a_shift():
    network = narrow("resnet50_bnneck")
    assert not network.neck.bias.requires_grad
    assert network.neck.weight.requires_grad
    batch = images("resnet50_bnneck", 8)
    before = network.body(batch)
    expected = (before - before.mean(0)) / (before.var(0, unbiased=False) + 1e-5).sqrt()
    assert_close(network(batch), expected, atol=1e-3, rtol=1e-3)


def test_features_of_the_cifar_resnets_of_zhou_can_be_negative():
    assert narrow("resnet18")(images("resnet18")).min() < 0
    assert narrow("resnet18", "relu_after=True")(images("resnet18")).min() >= 0


@pytest.mark.parametrize(
    "name", ["resnet32", "resnet12_basic", "resnet18_224", "wrn28_10", "resnext50"]
)
def test_features_of_the_other_resnets_cannot(name):
    assert narrow(name)(images(name)).min() >= 0


def test_an_embedding_ends_in_a_relu_from_64_features_on_or_if_asked():
    for settings, negative in [
        ("", False),
        ("features=3", True),
        ("features=64", False),
        ("features=3, relu=True", False),
        ("relu=False", True),
    ]:
        features = narrow("mnist_cnn", settings)(images("mnist_cnn", 8))
        assert (features.min() < 0) == negative, settings


def test_the_2d_embedding_covers_the_plane():
    features = narrow("lsoftmax_2d")(images("lsoftmax_2d", 8))
    assert (features.min(0).values < 0).all()


def test_a_small_embedding_keeps_its_directions_with_group_norm():
    # Normalising three numbers within an example would leave a circle of the sphere.
    features = narrow("mnist_cnn", "features=3, norm='group'")(images("mnist_cnn", 50))
    assert features.sum(1).abs().min() > 1e-4
    assert torch.linalg.matrix_rank(features - features.mean(0)) == 3


def test_resnet32_has_shortcuts_without_parameters():
    network = narrow("resnet32")
    shortcuts = [m for m in network.modules() if isinstance(m, PaddedShortcut)]
    assert len(shortcuts) == 2
    assert not any(True for m in shortcuts for _ in m.parameters())


def test_a_padded_shortcut_by_hand():
    maps = torch.arange(2 * 4 * 4.0).reshape(1, 2, 4, 4)
    found = PaddedShortcut(2, 4, 2)(maps)
    assert torch.equal(found[:, 1:3], maps[:, :, ::2, ::2])
    assert not found[:, [0, 3]].any()


@pytest.mark.parametrize("name", ["resnet18", "resnet32", "resnet12_basic", "wrn28_10"])
def test_a_block_whose_branch_is_0_lets_its_input_through(name):
    network = narrow(name)
    block = network.stage1[-1] if name == "wrn28_10" else network.stage2[-1]
    block = network.stage3[-1] if name == "resnet12_basic" else block
    nn.init.zeros_(list(block.branch.parameters())[-1])
    for module in block.branch.modules():
        if isinstance(module, (nn.Conv2d, nn.BatchNorm2d)):
            nn.init.zeros_(module.weight)
    channels = next(m for m in block.modules() if isinstance(m, nn.Conv2d)).in_channels
    maps = torch.randn(2, channels, 8, 8)
    expected = maps if name in ("resnet18", "wrn28_10") else F.relu(maps)
    assert torch.equal(block(maps), expected)


def test_a_wide_block_activates_before_its_convolutions():
    block = narrow("wrn28_10").stage1[0].eval()
    maps = torch.randn(2, block.shortcut.in_channels, 8, 8)
    active = F.relu(maps / math.sqrt(1 + 1e-5))
    assert_close(block(maps) - block.branch(active), block.shortcut(active), atol=1e-5, rtol=1e-4)


def test_the_blocks_of_resnet12_leak():
    slopes = [m.negative_slope for m in narrow("resnet12").modules() if isinstance(m, nn.LeakyReLU)]
    assert slopes == 12 * [0.1]
    assert not any(isinstance(m, nn.ReLU) for m in narrow("resnet12").modules())


def test_only_the_2d_network_has_prelu():
    assert sum(isinstance(m, nn.PReLU) for m in narrow("lsoftmax_2d").modules()) == 6


def test_odd_maps_lose_nothing_when_the_released_lsoftmax_network_pools():
    network = narrow("lsoftmax_mnist", shape=(1, 28, 28))
    assert map_sizes(network, (1, 28, 28), network.stage3) == (4, 4)


# --------------------------------------------------------------------------------- dropping


@pytest.mark.parametrize("name", ["resnet12", "resnet18_224", "wrn28_10"])
def test_nothing_is_dropped_by_default(name):
    assert not any(isinstance(m, (nn.Dropout, DropBlock)) for m in narrow(name).modules())


@pytest.mark.parametrize(("name", "each"), [("resnet12", 1), ("resnet18_224", 2)])
def test_early_stages_have_dropout_and_late_ones_dropblock(name, each):
    network = narrow(name, "drop_rate=0.1, block_size=3")
    for stage, kind in (("stage1", nn.Dropout), ("stage2", nn.Dropout), ("stage3", DropBlock)):
        found = [m for m in getattr(network, stage).modules() if isinstance(m, kind)]
        assert len(found) == each
    blocks = [m for m in network.stage4.modules() if isinstance(m, DropBlock)]
    assert [(m.rate, m.size, m.steps) for m in blocks] == each * [(0.1, 3, 40_000)]
    features = network(torch.randn(2, 3, 84, 84))
    assert features.shape == (2, network.num_features)


def test_wide_blocks_have_dropout_between_their_convolutions():
    network = narrow("wrn28_10", "drop_rate=0.3")
    kinds = [type(m) for m in network.stage1[0].branch]
    assert kinds == [nn.Conv2d, nn.BatchNorm2d, nn.ReLU, nn.Dropout, nn.Conv2d]


def trained(rate, size, steps=1, batches=1):
    block = DropBlock(rate, size, steps=steps)
    block.batches += batches
    return block


def test_dropblock_drops_its_share_and_keeps_the_mean():
    maps = torch.ones(200, 8, 10, 10)
    out = trained(0.1, 3)(maps)
    # Squares overlap now and then, so a little less than the rate is dropped.
    assert 0.08 < (out == 0).float().mean() < 0.1
    assert_close(out.mean(), torch.tensor(1.0))
    assert len(out.unique()) == 2


def test_what_dropblock_drops_is_made_of_whole_squares():
    dropped = trained(0.05, 3)(torch.ones(20, 4, 10, 10)) == 0
    corners = dropped.unfold(2, 3, 1).unfold(3, 3, 1).flatten(4).all(4)
    covered = F.max_pool2d(F.pad(corners.float(), (2, 2, 2, 2)), 3, stride=1) > 0
    assert dropped.any()
    assert torch.equal(covered, dropped)


def test_channels_are_dropped_each_for_itself():
    dropped = trained(0.2, 3)(torch.ones(50, 2, 10, 10)) == 0
    assert (dropped[:, 0] != dropped[:, 1]).any()


def test_dropblock_starts_at_0_and_counts_its_batches():
    block, maps = DropBlock(0.5, 1, steps=10), torch.ones(50, 10, 10, 10)
    shares = [(block(maps) == 0).float().mean().item() for _ in range(13)]
    expected = [0.5 * min(batch / 10, 1) for batch in range(13)]
    assert_close(torch.tensor(shares), torch.tensor(expected), atol=0.01, rtol=0)
    assert shares[0] == 0
    assert block.state_dict()["batches"] == 13


def test_dropblock_does_nothing_at_test():
    block, maps = trained(0.5, 3).eval(), torch.randn(2, 3, 8, 8)
    assert block(maps) is maps
    assert block.batches == 1


def test_a_block_larger_than_the_map_drops_the_map():
    out = trained(0.5, 7)(torch.ones(400, 4, 2, 2))
    share = (out == 0).float()
    assert torch.equal(share.amax((2, 3)), share.amin((2, 3)))
    assert 0.45 < share.mean() < 0.55


def test_everything_dropped_is_0():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        out = trained(1.0, 2)(torch.ones(1, 1, 2, 2, dtype=dtype))
        assert out.dtype == dtype
        assert not out.any()


# ------------------------------------------------------------------------------------- timm


class FakeTimm(types.ModuleType):
    """As much of timm as is used."""

    def __init__(self):
        super().__init__("timm")
        self.asked = None

    def is_model(self, name):
        return name in ("resnet50", "vit_small_patch16_224")

    def list_models(self):
        return ["resnet50", "vit_small_patch16_224"]

    def create_model(self, name, **settings):
        self.asked = (name, settings)
        network = nn.Sequential(nn.Flatten(), nn.LazyLinear(7))
        network.num_features = 7
        return network


@pytest.fixture
def timm(monkeypatch):
    module = FakeTimm()
    monkeypatch.setitem(sys.modules, "timm", module)
    return module


def test_timm_is_asked_for_a_network_without_classifier(timm):
    network = backbones.build("timm:resnet50", shape=(1, 8, 8))
    assert timm.asked == ("resnet50", {"pretrained": False, "num_classes": 0, "in_chans": 1})
    assert network.num_features == 7
    assert network(torch.randn(2, 1, 8, 8)).shape == (2, 7)


def test_settings_of_timm_networks(timm):
    text = "timm:vit_small_patch16_224.dino(pretrained=True, features=3)"
    network = backbones.build(text, shape=(3, 8, 8))
    assert timm.asked[0] == "vit_small_patch16_224.dino"
    assert timm.asked[1] == {"pretrained": True, "num_classes": 0, "in_chans": 3}
    assert network.num_features == 3
    assert network(torch.randn(2, 3, 8, 8)).shape == (2, 3)


def test_a_neck_normalises_the_features_of_a_timm_network(timm):
    network = backbones.build("timm:resnet50(features=4, neck=True)", shape=(1, 8, 8)).train()
    assert network.num_features == 4
    features = network(torch.randn(64, 1, 8, 8))
    torch.testing.assert_close(features.mean(0), torch.zeros(4), atol=1e-5, rtol=0)
    assert not network.neck.bias.requires_grad


def test_features_are_those_of_the_layer_before_the_classifier(timm):
    create = timm.create_model

    def with_hidden(name, **settings):
        network = create(name, **settings)
        network.num_features, network.head_hidden_size = 5, 7
        return network

    timm.create_model = with_hidden
    assert backbones.build("timm:resnet50", shape=(1, 8, 8)).num_features == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("timm:resnet5", "timm has no network 'resnet5'; did you mean timm:resnet50?"),
        ("timm:resnet50(width=2)", "has no setting 'width'"),
    ],
)
@pytest.mark.usefixtures("timm")
def test_a_wrong_name_or_setting_of_timm_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        backbones.build(text, shape=(3, 8, 8))


def test_without_timm_it_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ImportError, match=r"^timm could not .* pip install 'tammes\[timm\]'$"):
        backbones.build("timm:resnet50", shape=(3, 8, 8))


# ---------------------------------------------------------------------------------- compiled


@pytest.fixture
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize(
    "text",
    [
        "layer13(width=0.125)",
        pytest.param("resnet12(width=0.125, drop_rate=0.1)", marks=pytest.mark.slow),
        pytest.param("wrn28_10(width=0.05)", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_networks_compile_into_one_graph(text, backend):
    network = backbones.build(text, shape=(3, 32, 32))
    compiled = torch.compile(network, fullgraph=True, backend=backend)
    batch = torch.randn(2, 3, 32, 32)
    compiled(batch).sum().backward()
    assert all(p.grad is not None for p in network.parameters())
    network.eval()
    assert_close(compiled(batch), network(batch))
