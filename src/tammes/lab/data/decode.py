"""Decode images from bytes.

Small images spend more time in Python than in the decoder, so processes help and threads do not.
This file is also the program that those processes run. It imports nothing from Tammes, so they
start in a tenth of a second instead of the seconds that torch takes, and callers of :func:`load
<tammes.lab.data.load>` need no ``if __name__ == "__main__"``.
"""

import contextlib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Any, NamedTuple, TypeAlias

Shape: TypeAlias = tuple[int, int, int]
Fetch: TypeAlias = Callable[[int], bytes | str]
"""Returns the bytes of the image at a row, or the path of its file."""

CHUNK = 256
"""Images per request to a process."""
_MIN_SECONDS = 1.5
"""Estimated decoding time, in seconds, above which worker processes are used."""
_GREY = frozenset({"1", "L", "LA", "La", "I", "I;16", "I;16L", "I;16B", "I;16N"})
_ALPHA = frozenset({"LA", "La", "PA", "RGBA", "RGBa"})


class ImageInfo(NamedTuple):
    """Whether an image is grey, and its size after EXIF rotation."""

    grey: bool
    width: int
    height: int


DecodeResult: TypeAlias = ImageInfo | str
"""Info of an image, or the reason why it is unreadable."""


def read_info(data: bytes | str) -> ImageInfo:
    """Read the colour mode and size of an image from its header."""
    with _open(data) as image:
        return _info(image, _orientation(image))


def decode(data: Any, shape: Shape) -> tuple[ImageInfo, Any]:
    """Decode an image to a given shape.

    It is rotated as EXIF says; transparent parts become white; 16 bits become 8. An image of
    another size is resized with antialiasing to just cover the shape, and centre-cropped.

    ``data`` is bytes, a path, or a Pillow image, which is not changed; ``shape`` has one channel or
    three. Returns the info of the original image, and a uint8 numpy array of the shape.
    """
    import numpy
    from PIL import Image

    channels, height, width = shape
    with _open(data) as image:
        orientation = _orientation(image)
        info = _info(image, orientation)
        if not info.width or not info.height:
            raise ValueError("it has no pixels")
        reduce = min(info.width / width, info.height / height)
        if image.format == "JPEG" and reduce >= 4:
            # The decoder can skip detail that resizing would average away.
            image.draft(None, tuple(int(2 * side / reduce) for side in image.size))
        image.load()
        plain = _eight_bits(image, "L" if channels == 1 else "RGB")
        if orientation in _TURNS:
            plain = plain.transpose(getattr(Image.Transpose, _TURNS[orientation]))
        if plain.size != (width, height):
            reduce = min(plain.width / width, plain.height / height)
            left = (plain.width - width * reduce) / 2
            upper = (plain.height - height * reduce) / 2
            box = (left, upper, left + width * reduce, upper + height * reduce)
            plain = plain.resize((width, height), Image.Resampling.BILINEAR, box=box)
        pixels = numpy.asarray(plain)
    return info, pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


_TURNS = {
    2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE",
    6: "ROTATE_270", 7: "TRANSVERSE", 8: "ROTATE_90",
}  # fmt: skip
"""Operation that undoes each EXIF orientation."""


def _open(data: Any) -> Any:
    from PIL import Image

    if isinstance(data, Image.Image):
        return data.copy()
    return Image.open(io.BytesIO(data) if isinstance(data, bytes) else data)


def _orientation(image: Any) -> int:
    # Looking for missing EXIF data may decode the image. Pillow rotates TIFF itself.
    if "exif" not in image.info:
        return 1
    try:
        return int(image.getexif().get(0x0112, 1))
    except Exception:
        # Damaged EXIF data do not make an image unreadable.
        return 1


def _info(image: Any, orientation: int) -> ImageInfo:
    width, height = image.size
    if orientation in (5, 6, 7, 8):
        # Rotated by 90 degrees: the sides are swapped.
        width, height = height, width
    return ImageInfo(image.mode in _GREY, width, height)


def _eight_bits(image: Any, mode: str) -> Any:
    """Convert an image to 8-bit grey or colour without transparency."""
    import numpy
    from PIL import Image

    if image.mode == "F":
        raise ValueError("pixels of 8 or 16 bits are expected, got floating-point numbers")
    if image.mode.startswith("I"):
        wide = numpy.asarray(image).astype("int64").clip(0, 65535)
        image = Image.fromarray(((wide * 255 + 32767) // 65535).astype("uint8"))
    elif image.mode in _ALPHA or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image if image.mode == mode else image.convert(mode)


def reason(error: Exception) -> str:
    """Describe in a few words why an image cannot be read."""
    message = str(error).strip().split("\n")[0]
    if type(error).__name__ == "UnidentifiedImageError":
        return "not an image"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return message[:160] or type(error).__name__


def decode_some(
    items: Sequence[bytes | str], shape: Shape | None, out: Any | None
) -> list[DecodeResult]:
    """Decode images given as bytes or paths, or read their headers if ``shape`` is None.

    Pixels are written to ``out``, if given, a uint8 array ``(len(items), *shape)`` of zeros.
    """
    results: list[DecodeResult] = []
    for position, item in enumerate(items):
        try:
            if shape is None:
                results.append(read_info(item))
                continue
            info, pixels = decode(item, shape)
            results.append(info)
            if out is not None:
                out[position] = pixels
        except Exception as error:
            results.append(reason(error))
    return results


def decode_all(
    fetch: Fetch,
    rows: Sequence[int],
    shape: Shape | None,
    out: Any | None,
    *,
    processes: int | None = None,
    advance: Callable[[int], None] = lambda done: None,
) -> list[DecodeResult]:
    """Decode many images as :func:`decode_some` does, in several processes if that is faster.

    ``fetch`` is called in this process, in order; with 0 ``processes``, so is the decoder.
    ``advance`` is called now and then with the number of decoded images.
    """
    started = time.perf_counter()
    first = rows[:CHUNK]
    results = decode_some([fetch(row) for row in first], shape, _part(out, 0, len(first)))
    if processes is None:
        seconds = (time.perf_counter() - started) / max(len(first), 1) * len(rows)
        processes = min(_cores(), 32) if seconds > _MIN_SECONDS else 0
    chunks = [range(low, min(low + CHUNK, len(rows))) for low in range(CHUNK, len(rows), CHUNK)]
    if not chunks:
        return results
    if processes < 2:
        for chunk in chunks:
            items = [fetch(rows[position]) for position in chunk]
            results += decode_some(items, shape, _part(out, chunk.start, chunk.stop))
            advance(chunk.stop)
        return results
    with ThreadPoolExecutor(processes) as pool:
        workers = [_Worker() for _ in range(processes)]
        idle = list(workers)

        def on_a_worker(items: list[bytes | str], out: Any | None) -> list[DecodeResult]:
            # There are as many threads as workers, so one is always idle.
            worker = idle.pop()
            try:
                return worker.decode(items, shape, out)
            finally:
                idle.append(worker)

        try:
            waiting: list[Future[list[DecodeResult]]] = []
            for number, chunk in enumerate(chunks):
                # Prefetch a few chunks only, to keep few encoded images in memory.
                if number >= 2 * processes:
                    waiting[number - 2 * processes].result()
                    advance(chunks[number - 2 * processes].stop)
                items = [fetch(rows[position]) for position in chunk]
                part = _part(out, chunk.start, chunk.stop)
                waiting.append(pool.submit(on_a_worker, items, part))
            for future in waiting:
                results += future.result()
        finally:
            for worker in workers:
                worker.close()
    return results


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _part(out: Any | None, start: int, stop: int) -> Any | None:
    return None if out is None else out[start:stop]


class _Worker:
    """A decoding process; if it fails, this process takes over its work."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError, ValueError):
            self.process = subprocess.Popen(
                # Without -P the folder of this file would come first on the import path.
                [sys.executable, "-P", os.path.abspath(__file__)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )

    def decode(
        self, items: list[bytes | str], shape: Shape | None, out: Any | None
    ) -> list[DecodeResult]:
        if self.process is not None and self.process.stdin and self.process.stdout:
            try:
                _send(self.process.stdin, items, shape, out is not None)
                return _receive(self.process.stdout, out)
            except (OSError, EOFError, ValueError):
                self.close()
        return decode_some(items, shape, out)

    def close(self) -> None:
        if self.process is not None:
            process, self.process = self.process, None
            process.kill()
            process.communicate()


def _send(pipe: IO[bytes], items: Sequence[bytes | str], shape: Shape | None, pixels: bool) -> None:
    kinds = [len(item) if isinstance(item, bytes) else item for item in items]
    pipe.write(json.dumps([kinds, shape, pixels]).encode() + b"\n")
    for item in items:
        if isinstance(item, bytes):
            pipe.write(item)
    pipe.flush()


def _receive(pipe: IO[bytes], out: Any | None) -> list[DecodeResult]:
    line = pipe.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    if out is not None:
        view = memoryview(out).cast("B")
        while view:
            got = pipe.readinto(view)  # type: ignore[attr-defined]
            if not got:
                raise EOFError
            view = view[got:]
    return [each if isinstance(each, str) else ImageInfo(*each) for each in json.loads(line)]


def _serve() -> None:
    import numpy

    pipe = sys.stdin.buffer
    while line := pipe.readline():
        kinds, shape, pixels = json.loads(line)
        items = [pipe.read(kind) if isinstance(kind, int) else kind for kind in kinds]
        out = None
        if pixels and shape is not None:
            out = numpy.zeros((len(items), *shape), dtype="uint8")
        results = decode_some(items, shape, out)
        sys.stdout.buffer.write(json.dumps(results).encode() + b"\n")
        if out is not None:
            sys.stdout.buffer.write(out.tobytes())
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    _serve()
