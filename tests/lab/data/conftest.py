"""What tests of data share: pictures, folders of them, tables of them, and a cache of their own."""

import io
import json

import numpy
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("TAMMES_CACHE", str(folder))
    return folder


@pytest.fixture
def said():
    """What `report` was told, as a list."""
    return []


@pytest.fixture
def picture():
    """Pixels that a seed decides, (height, width) or (height, width, 3)."""

    def make(seed, *, width=10, height=10, grey=False):
        generator = numpy.random.default_rng(seed)
        shape = (height, width) if grey else (height, width, 3)
        return generator.integers(0, 256, shape, dtype="uint8")

    return make


@pytest.fixture
def image_folder(tmp_path, picture):
    """Writes FOLDER/CLASS/NUMBER.png for given counts, or FOLDER/PARTITION/CLASS/NUMBER.png."""

    def make(layout, name="pictures", **options):
        root = tmp_path / name
        for place, count in layout.items():
            (root / place).mkdir(parents=True)
            for number in range(count):
                pixels = picture(sum(map(ord, place)) * 1000 + number, **options)
                Image.fromarray(pixels).save(root / place / f"{number:03}.png")
        return root

    return make


def png(pixels):
    """An image as the bytes of a PNG file."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def write_table():
    """Writes a parquet file in the layout of Hugging Face."""

    def write(path, columns, *, names=None, rows_per_group=3):
        arrays = {}
        for key, values in columns.items():
            if key == "image" and values and isinstance(values[0], bytes):
                values = [{"bytes": value, "path": None} for value in values]
                kind = pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()})
                values = pyarrow.array(values, type=kind)
            arrays[key] = pyarrow.array(values) if isinstance(values, list) else values
        table = pyarrow.table(arrays)
        if names is not None:
            features = {
                "image": {"_type": "Image"},
                "label": {"_type": "ClassLabel", "names": names},
            }
            written = json.dumps({"info": {"features": features}})
            table = table.replace_schema_metadata({"huggingface": written})
        path.parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(table, path, row_group_size=rows_per_group)
        return path

    return write


@pytest.fixture
def encode():
    return png
