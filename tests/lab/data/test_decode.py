"""One image from its bytes, and many of them in processes."""

import io
import sys

import numpy
import pytest
from PIL import Image

from tammes.lab.data.decode import CHUNK, ImageInfo, decode, decode_all, read_info


def encoded(image, kind, **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.fixture
def colour(picture):
    return Image.fromarray(picture(0, width=6, height=4))


@pytest.fixture
def grey(picture):
    return Image.fromarray(picture(0, width=6, height=4, grey=True))


def test_colour_comes_as_it_is(colour):
    found, pixels = decode(encoded(colour, "PNG"), (3, 4, 6))
    assert found == ImageInfo(False, 6, 4)
    assert (pixels == numpy.asarray(colour).transpose(2, 0, 1)).all()


def test_grey_comes_in_one_channel_or_in_three_equal_ones(grey):
    found, pixels = decode(encoded(grey, "PNG"), (1, 4, 6))
    assert found == ImageInfo(True, 6, 4)
    assert (pixels[0] == numpy.asarray(grey)).all()
    _, three = decode(encoded(grey, "PNG"), (3, 4, 6))
    assert (three == pixels).all()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_undone(kind, orientation):
    # Four blocks of different colour, as they are to be seen.
    shown = numpy.zeros((64, 32, 3), dtype="uint8")
    shown[:32, :, 0], shown[32:, :, 2] = 255, 255
    shown[:, 16:, 1] = 120
    stored = Image.fromarray(shown).transpose(UNDONE[orientation]) if orientation > 1 else None
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(stored or Image.fromarray(shown), kind, exif=exif.tobytes())
    found, pixels = decode(data, (3, 64, 32))
    assert found == read_info(data) == ImageInfo(False, 32, 64)
    # The middle of the blocks: formats that lose something blur their edges.
    off = abs(pixels.transpose(1, 2, 0).astype(int) - shown)
    assert off[[[8], [24], [40], [56]], [[6, 10, 22, 26]]].max() < 25
    # An image that Pillow has opened is decoded alike, and stays as it is.
    opened = Image.open(io.BytesIO(data))
    again, same = decode(opened, (3, 64, 32))
    assert again == found
    assert (same == pixels).all()
    opened.load()


T = Image.Transpose
UNDONE = {
    # What a camera does that says so.
    2: T.FLIP_LEFT_RIGHT,
    3: T.ROTATE_180,
    4: T.FLIP_TOP_BOTTOM,
    5: T.TRANSPOSE,
    6: T.ROTATE_90,
    7: T.TRANSVERSE,
    8: T.ROTATE_270,
}


@pytest.mark.parametrize("mode", ["I;16", "I;16B"])
def test_sixteen_bits_become_eight(mode):
    wide = numpy.array([[0, 257, 400, 32896, 65535]], dtype=">u2" if mode == "I;16B" else "<u2")
    image = Image.frombytes(mode, (5, 1), wide.tobytes())
    found, pixels = decode(encoded(image, "TIFF"), (1, 1, 5))
    assert found.grey
    # 400 / 257 is 1.6.
    assert pixels.flatten().tolist() == [0, 1, 2, 128, 255]


def test_one_bit_becomes_black_and_white():
    image = Image.fromarray(numpy.array([[0, 255]], dtype="uint8")).convert("1")
    found, pixels = decode(encoded(image, "PNG"), (1, 1, 2))
    assert found.grey
    assert pixels.flatten().tolist() == [0, 255]


def test_transparent_parts_become_white():
    image = Image.fromarray(numpy.array([[[9, 8, 7, 255], [9, 8, 7, 0]]], dtype="uint8"), "RGBA")
    found, pixels = decode(encoded(image, "PNG"), (3, 1, 2))
    assert not found.grey
    assert pixels[:, 0, 0].tolist() == [9, 8, 7]
    assert pixels[:, 0, 1].tolist() == [255, 255, 255]


def test_grey_with_transparency_stays_grey():
    image = Image.fromarray(numpy.array([[[50, 255], [50, 0]]], dtype="uint8"), "LA")
    found, pixels = decode(encoded(image, "PNG"), (1, 1, 2))
    assert found.grey
    assert pixels.flatten().tolist() == [50, 255]


@pytest.mark.parametrize("transparent", [False, True])
def test_a_palette_becomes_its_colours(transparent):
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 200, 100, 0])
    image.putpixel((1, 0), 1)
    options = {"transparency": 1} if transparent else {}
    found, pixels = decode(encoded(image, "PNG", **options), (3, 1, 2))
    assert not found.grey
    assert pixels[:, 0, 0].tolist() == [10, 20, 30]
    assert pixels[:, 0, 1].tolist() == ([255, 255, 255] if transparent else [200, 100, 0])


def test_cmyk_becomes_colour():
    image = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    _, pixels = decode(encoded(image, "JPEG", quality=100), (3, 8, 8))
    assert pixels[0].min() > 200
    assert pixels[1:].max() < 60


def test_floating_point_pixels_are_refused():
    data = encoded(Image.new("F", (2, 2)), "TIFF")
    with pytest.raises(ValueError, match="floating-point"):
        decode(data, (1, 2, 2))


def test_the_shorter_side_is_resized_and_the_middle_cut_out():
    # Three blocks of 20 side by side; only the middle one is left.
    wide = numpy.zeros((20, 60, 3), dtype="uint8")
    wide[:, :20, 0], wide[:, 20:40, 1], wide[:, 40:, 2] = 255, 255, 255
    _, pixels = decode(encoded(Image.fromarray(wide), "PNG"), (3, 10, 10))
    assert (pixels[1, :, 1:-1] == 255).all()
    assert (pixels[[0, 2], :, 1:-1] == 0).all()
    tall = Image.fromarray(wide.transpose(1, 0, 2).copy())
    _, pixels = decode(encoded(tall, "PNG"), (3, 10, 10))
    assert (pixels[1, 1:-1] == 255).all()
    assert (pixels[[0, 2], 1:-1] == 0).all()


def test_shrinking_is_antialiased():
    # A fine chessboard is grey from afar; picking every fourth pixel would make it black or white.
    board = (numpy.indices((64, 64)).sum(0) % 2 * 255).astype("uint8")
    _, pixels = decode(encoded(Image.fromarray(board), "PNG"), (1, 16, 16))
    assert abs(pixels.astype(int) - 127).max() < 12


def test_a_large_jpeg_is_what_the_whole_of_it_shrinks_to(picture):
    smooth = Image.fromarray(picture(1, width=9, height=6)).resize((120, 80), Image.BICUBIC)
    data = encoded(smooth, "JPEG", quality=95)
    _, pixels = decode(data, (3, 20, 20))
    whole = Image.open(io.BytesIO(data)).resize((20, 20), Image.BILINEAR, box=(20, 0, 100, 80))
    assert abs(pixels.transpose(1, 2, 0).astype(int) - numpy.asarray(whole)).max() <= 8


def test_damaged_exif_data_do_not_matter(colour):
    data = encoded(colour, "PNG", exif=b"Exif\x00\x00nothing like it")
    assert decode(data, (3, 4, 6))[0] == ImageInfo(False, 6, 4)


@pytest.fixture
def many(picture, encode):
    items = [encode(picture(number, width=5, height=5)) for number in range(700)]
    items[300], items[650] = b"no image", items[650][:60]
    return items


@pytest.mark.parametrize("processes", [0, 2, 3])
def test_processes_find_what_one_finds(many, processes, tmp_path):
    path = tmp_path / "file.png"
    path.write_bytes(many[500])
    items = [*many[:500], str(path), *many[501:]]
    out = numpy.zeros((700, 3, 5, 5), dtype="uint8")
    found = decode_all(items.__getitem__, range(700), (3, 5, 5), out, processes=processes)
    assert [row for row, each in enumerate(found) if isinstance(each, str)] == [300, 650]
    assert found[300] == "not an image"
    assert "truncated" in found[650].lower()
    assert set(each for each in found if not isinstance(each, str)) == {ImageInfo(False, 5, 5)}
    for row in (0, 255, 256, 500, 699):
        assert (out[row] == decode(many[row], (3, 5, 5))[1]).all()


@pytest.mark.parametrize("program", ["/bin/false", "/nowhere/python", ""])
def test_where_processes_fail_the_work_is_done_all_the_same(many, program, monkeypatch):
    monkeypatch.setattr(sys, "executable", program)
    out = numpy.zeros((700, 3, 5, 5), dtype="uint8")
    found = decode_all(many.__getitem__, range(700), (3, 5, 5), out, processes=2)
    assert sum(isinstance(each, str) for each in found) == 2
    assert (out[699] == decode(many[699], (3, 5, 5))[1]).all()


def test_looking_finds_sizes_without_pixels(many):
    found = decode_all(many.__getitem__, range(700), None, None, processes=2)
    assert found[0] == ImageInfo(False, 5, 5)
    assert found[300] == "not an image"
    # The header of a truncated file is whole.
    assert found[650] == ImageInfo(False, 5, 5)


@pytest.mark.parametrize("processes", [0, 2])
def test_decoding_tells_how_far_it_is(many, processes):
    done = []
    rows = [row % 256 for row in range(8 * CHUNK)]
    decode_all(many.__getitem__, rows, (3, 5, 5), None, processes=processes, advance=done.append)
    assert done
    assert done == sorted(set(done))
    assert max(done) <= len(rows)
