"""Photographs of several formats, to train on and to predict."""

import numpy
from PIL import Image


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
