"""Progress over images: a bar on a terminal, a line every few seconds elsewhere."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO

from tammes.lab.data.images import DataError
from tammes.lab.inference.preprocess import UnreadableImage
from tammes.optional import require

_PAUSE = 10.0
"""Seconds between two lines."""


class ImageProgress:
    """Shows how many images are done; a context manager.

    It writes to stderr by default, so that stdout holds results only.
    """

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self.total, self.done = total, 0
        self.stream = stream or sys.stderr
        self.started = self.printed = time.monotonic()
        self.bar: Any = None

    def __enter__(self) -> "ImageProgress":
        if self.stream.isatty():
            rich = require("rich.progress", extra="lab")
            self.bar = rich.Progress(
                rich.BarColumn(),
                rich.MofNCompleteColumn(),
                rich.TextColumn("images"),
                rich.TimeRemainingColumn(),
                console=require("rich.console", extra="lab").Console(file=self.stream),
                transient=True,
                # Results in a file or a pipe must not be printed above the bar.
                redirect_stdout=sys.stdout.isatty(),
            )
            self.task = self.bar.add_task("", total=self.total)
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def advance(self) -> None:
        """Count an image as done."""
        self.done += 1
        if self.bar is not None:
            self.bar.update(self.task, completed=self.done)
            return
        now = time.monotonic()
        if now - self.printed > _PAUSE:
            self.printed = now
            speed = self.done / (now - self.started)
            self.say(f"{self.done:,} of {self.total:,} images, {speed:,.0f} images/s")

    def say(self, text: str) -> None:
        """Show a message."""
        if self.bar is not None:
            self.bar.console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            print(text, file=self.stream, flush=True)


@contextlib.contextmanager
def watched_images(
    total: int, *, skip: bool
) -> Iterator[tuple[Callable[[Iterable[Any]], Iterator[Any]], Callable[[Any], None] | None]]:
    """Show the progress over images; with ``skip``, report unreadable ones instead of raising.

    Yields:
        A function that counts images as they are iterated over, and one to call for an unreadable
        image, or None if that is an error.
    """
    with ImageProgress(total) as progress:

        def watched(images: Iterable[Any]) -> Iterator[Any]:
            for image in images:
                yield image
                progress.advance()

        def leave_out(error: UnreadableImage) -> None:
            progress.say(f"{error}, it is left out")

        try:
            yield watched, leave_out if skip else None
        except UnreadableImage as error:
            raise DataError(f"{error}; --skip-corrupt leaves such images out") from error
