"""Trained runs for the tests of their use: of digits, and of a folder of photographs."""

import numpy
import pytest
from PIL import Image

from tammes.lab.config.schema import Config
from tammes.lab.training.loop import train


def photograph(seed, size):
    """Pixels (height, width, 3): a gradient of a colour that the seed decides, and noise."""
    generator = numpy.random.default_rng(seed)
    width, height = size
    ramp = (
        numpy.linspace(0, 1, height)[:, None, None] * numpy.linspace(0.3, 1, width)[None, :, None]
    )
    noise = generator.integers(0, 40, (height, width, 3))
    return (ramp * generator.integers(60, 215, 3) + noise).astype("uint8")


def write_photographs(folder, *, first=0):
    """Files of several formats, sizes and orientations: JPEG, PNG with transparency, grey PNG."""
    folder.mkdir(parents=True)
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = Image.fromarray(photograph(first, (50, 30)))
    turned.save(folder / "a_turned.jpg", exif=exif.tobytes(), quality=95)
    clear = Image.fromarray(photograph(first + 1, (26, 40))).convert("RGBA")
    clear.putalpha(120)
    clear.save(folder / "b_clear.png")
    Image.fromarray(photograph(first + 2, (33, 33))).convert("L").save(folder / "c_grey.png")
    Image.fromarray(photograph(first + 3, (200, 160))).save(folder / "d_large.jpg", quality=95)


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("digits")
    config = Config(data="digits", loss="cosface()", backbone="mnist_cnn(features=8)", epochs=1)
    return train(config, folder)


@pytest.fixture(scope="session")
def photographs(tmp_path_factory):
    """A folder of photographs, test images apart."""
    root = tmp_path_factory.mktemp("photographs")
    for part, start in (("train", 0), ("test", 500)):
        for number, name in enumerate(("ape", "bee", "cat")):
            write_photographs(root / part / name, first=start + 10 * number)
    return root


@pytest.fixture(scope="session")
def photograph_run(photographs, tmp_path_factory):
    """A run whose evaluation crops the centre."""
    config = Config(
        data=str(photographs),
        image_size=20,
        augment="resized_crop(0.5, 1.0, size=16, zoom=1.25) + flip()",
        backbone="mnist_cnn(features=8)",
        loss="softmax()",
        batch_size=4,
        epochs=2,
        lr=0.01,
    )
    return train(config, tmp_path_factory.mktemp("run"))
