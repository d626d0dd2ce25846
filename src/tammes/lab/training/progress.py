"""How far a run is, for whoever watches: a bar on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from tammes.optional import require


class Progress:
    """Says nothing; the others override what they show."""

    def say(self, text: str) -> None:
        """A line worth reading."""

    def begin(self, *, epochs: int, steps: int, done: int) -> None:
        """Training starts: ``epochs`` of ``steps`` each, of which ``done`` epochs are behind."""

    def step(self, *, epoch: int, step: int, values: Mapping[str, float]) -> None:
        """Now and then within an epoch: running means, and images per second."""

    def epoch(self, row: Mapping[str, Any], *, images_per_second: float) -> None:
        """An epoch is over; ``row`` is its line of ``metrics.jsonl``."""

    def end(self) -> None:
        """Training is over, or was interrupted."""


class Lines(Progress):
    """A line for each epoch, with the time that is left.

    Args:
        stream: where to; stderr by default, so that stdout holds results only.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stderr

    def say(self, text: str) -> None:
        """Print it."""
        print(text, file=self.stream, flush=True)

    def begin(self, *, epochs: int, steps: int, done: int) -> None:
        """Remember when."""
        self.total, self.first, self.started = epochs, done, time.monotonic()

    def epoch(self, row: Mapping[str, Any], *, images_per_second: float) -> None:
        """Print its numbers."""
        done = row["epoch"] - self.first
        left = (time.monotonic() - self.started) / max(done, 1) * (self.total - row["epoch"])
        self.say(f"epoch {row['epoch']}/{self.total}  {described(row, images_per_second, left)}")


class Bar(Progress):
    """A bar that moves within the epoch, and a line for each epoch that is over."""

    def __init__(self) -> None:
        rich = require("rich.progress", extra="lab")
        self.console = require("rich.console", extra="lab").Console(stderr=True)
        self.bar = rich.Progress(
            rich.TextColumn("{task.description}"),
            rich.BarColumn(),
            rich.TextColumn("{task.fields[values]}"),
            rich.TimeRemainingColumn(),
            console=self.console,
            transient=True,
        )

    def say(self, text: str) -> None:
        """Print it above the bar."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def begin(self, *, epochs: int, steps: int, done: int) -> None:
        """Show the bar."""
        self.epochs, self.steps = epochs, steps
        self.task = self.bar.add_task("", total=epochs * steps, completed=done * steps, values="")
        self.bar.start()

    def step(self, *, epoch: int, step: int, values: Mapping[str, float]) -> None:
        """Move it."""
        shown = f"loss {values['loss']:.4f}"
        if "accuracy" in values:
            shown += f"  accuracy {100 * values['accuracy']:.1f} %"
            shown += f"  margin {values['sample_margin']:.3f}"
        shown += f"  {values['images_per_second']:,.0f}/s"
        self.bar.update(
            self.task,
            completed=(epoch - 1) * self.steps + step,
            description=f"epoch {epoch}/{self.epochs}",
            values=shown,
        )

    def epoch(self, row: Mapping[str, Any], *, images_per_second: float) -> None:
        """Print its numbers above the bar."""
        self.bar.update(self.task, completed=row["epoch"] * self.steps)
        self.say(f"epoch {row['epoch']}/{self.epochs}  {described(row, images_per_second)}")

    def end(self) -> None:
        """Take it away."""
        self.bar.stop()


def described(
    row: Mapping[str, Any], images_per_second: float, seconds_left: float | None = None
) -> str:
    """The numbers of an epoch in a line.

    Args:
        row: a line of ``metrics.jsonl``.
        images_per_second: while training.
        seconds_left: until the end, if it is to be said.
    """
    parts = [f"loss {row['train']['loss']:.4f}"]
    if "accuracy" in row["train"]:
        parts.append(f"train {100 * row['train']['accuracy']:.2f} %")
    for kind in ("validation", "test"):
        if kind in row:
            parts.append(f"{kind} {100 * row[kind]['accuracy']:.2f} %")
            parts.append(f"margin {row[kind]['sample_margin']:.3f}")
    if "class_margin" in row["prototypes"]:
        parts.append(f"class margin {row['prototypes']['class_margin']:.1f}°")
    parts.append(f"{images_per_second:,.0f} images/s")
    if seconds_left is not None:
        minutes, seconds = divmod(round(seconds_left), 60)
        parts.append(f"{minutes}:{seconds:02} left")
    return "  ".join(parts)


def choose() -> Progress:
    """A bar on a terminal, lines elsewhere."""
    return Bar() if sys.stderr.isatty() else Lines()
