"""Progress of a run: a bar on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from tammes.optional import require


class Progress:
    """Shows nothing; subclasses override the events they show."""

    def say(self, text: str) -> None:
        """Show a message."""

    def begin(self, *, epochs: int, steps: int, done: int) -> None:
        """Start training: ``epochs`` of ``steps`` each, of which ``done`` epochs are finished."""

    def step(self, *, epoch: int, step: int, values: Mapping[str, float]) -> None:
        """Update within an epoch: running means and images per second."""

    def epoch(self, row: Mapping[str, Any], *, images_per_second: float) -> None:
        """Finish an epoch; ``row`` is its line of ``metrics.jsonl``."""

    def end(self) -> None:
        """Clean up after training has finished or was interrupted."""


class Lines(Progress):
    """Prints a line per epoch, with the remaining time; to stderr, as stdout is for results."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stderr

    def say(self, text: str) -> None:
        """Print a message."""
        print(text, file=self.stream, flush=True)

    def begin(self, *, epochs: int, steps: int, done: int) -> None:
        """Store the start time."""
        self.total, self.first, self.started = epochs, done, time.monotonic()

    def epoch(self, row: Mapping[str, Any], *, images_per_second: float) -> None:
        """Print the metrics of an epoch."""
        done = row["epoch"] - self.first
        left = (time.monotonic() - self.started) / max(done, 1) * (self.total - row["epoch"])
        self.say(f"epoch {row['epoch']}/{self.total}  {epoch_line(row, images_per_second, left)}")


class Bar(Progress):
    """Shows a bar that moves during the epoch, and a line for each finished epoch."""

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
        """Print a message above the bar."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def begin(self, *, epochs: int, steps: int, done: int) -> None:
        """Show the bar."""
        self.epochs, self.steps = epochs, steps
        self.task = self.bar.add_task("", total=epochs * steps, completed=done * steps, values="")
        self.bar.start()

    def step(self, *, epoch: int, step: int, values: Mapping[str, float]) -> None:
        """Move the bar."""
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
        """Print the metrics of an epoch above the bar."""
        self.bar.update(self.task, completed=row["epoch"] * self.steps)
        self.say(f"epoch {row['epoch']}/{self.epochs}  {epoch_line(row, images_per_second)}")

    def end(self) -> None:
        """Remove the bar."""
        self.bar.stop()


def epoch_line(
    row: Mapping[str, Any], images_per_second: float, seconds_left: float | None = None
) -> str:
    """Format a line of ``metrics.jsonl``, with the throughput and, if known, the remaining time."""
    parts = [f"loss {row['train']['loss']:.4f}"]
    if "accuracy" in row["train"]:
        parts.append(f"train {100 * row['train']['accuracy']:.2f} %")
    for kind in ("validation", "test"):
        if kind in row:
            parts += _tested(kind, row[kind])
    if "class_margin" in row["prototypes"]:
        parts.append(f"class margin {row['prototypes']['class_margin']:.1f}°")
    parts.append(f"{images_per_second:,.0f} images/s")
    if seconds_left is not None:
        minutes, seconds = divmod(round(seconds_left), 60)
        parts.append(f"{minutes}:{seconds:02} left")
    return "  ".join(parts)


def _tested(kind: str, measured: Mapping[str, float]) -> list[str]:
    """Format the metrics on a partition, of training classes or of other identities."""
    if "accuracy" in measured:
        return [
            f"{kind} {100 * measured['accuracy']:.2f} %",
            f"margin {measured['sample_margin']:.3f}",
        ]
    named = (("mean_average_precision", "mAP"), ("recall_at_1", "R@1"), ("eer", "EER"))
    return [f"{word} {100 * measured[key]:.2f} %" for key, word in named if key in measured]


def default_progress() -> Progress:
    """Return a bar on a terminal, lines elsewhere."""
    return Bar() if sys.stderr.isatty() else Lines()
