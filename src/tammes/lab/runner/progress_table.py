"""Progress of many runs: a live table on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from tammes.lab.runner import Cell, Event
from tammes.optional import require

_ROWS = 24
"""Largest number of rows; running cells come first."""
_PAUSE = 10.0
"""Least seconds between two lines about the same run, if there is no table."""


@dataclass
class CellStatus:
    """State and progress of a cell."""

    name: str
    state: str = "waiting"
    epoch: int = 0
    epochs: int = 0
    first: int = 0
    accuracy: float | None = None
    reason: str = ""
    began: float = 0.0
    printed: float = 0.0
    seconds: float = 0.0

    @property
    def left(self) -> float | None:
        """Estimated remaining seconds, after the first epoch."""
        done = self.epoch - self.first
        if self.state != "running" or done < 1:
            return None
        return self.seconds / done * (self.epochs - self.epoch)

    def update(self, values: Mapping[str, Any], now: float) -> None:
        """Update from values that the run emitted: ``begin`` or ``epoch``."""
        if values.get("what") == "begin":
            self.epochs, self.epoch = values["epochs"], values["done"]
            self.first, self.began = values["done"], now
        elif values.get("what") == "epoch":
            self.epoch, self.seconds = values["epoch"], now - self.began
            self.accuracy = values.get("accuracy", self.accuracy)


class ProgressTable:
    """Shows the events of :func:`.run_cells`; a context manager around the call.

    It writes to stderr by default, so that stdout holds results only.
    """

    def __init__(self, cells: Sequence[Cell], stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stderr
        self.rows = {id(cell): CellStatus(cell.name) for cell in cells}
        self.live: Any = None
        self.printed: set[str] = set()

    def __enter__(self) -> "ProgressTable":
        if self.stream.isatty():
            console = require("rich.console", extra="lab").Console(file=self.stream)
            self.live = require("rich.live", extra="lab").Live(
                get_renderable=self._table, console=console, refresh_per_second=4
            )
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.stop()

    def __call__(self, event: Event) -> None:
        """Show an event."""
        row, now = self.rows[id(event.cell)], time.monotonic()
        if event.kind == "progress":
            row.update(event.values, now)
            text = event.values.get("say")
            if text is not None and text not in self.printed:
                # Every run reports the same messages about the data: print each once.
                self.printed.add(text)
                self._say(f"{row.name}: {text}")
            if event.values.get("what") == "epoch" and now - row.printed > _PAUSE:
                row.printed = now
                self._line(row)
            return
        row.state = "running" if event.kind == "started" else event.kind
        row.reason = str(event.values.get("reason", ""))
        if event.kind == "started":
            row.began = row.printed = now
        self._line(row)

    def _say(self, text: str) -> None:
        if self.live is not None:
            self.live.console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            print(text, file=self.stream, flush=True)

    def _line(self, row: CellStatus) -> None:
        """Print a line about a cell if there is no table; failures are always printed."""
        if self.live is None or row.state == "failed":
            ended = sum(each.state in ("done", "failed") for each in self.rows.values())
            self._say(f"[{ended}/{len(self.rows)}] {row.name}: {status_line(row)}")

    def _table(self) -> Any:
        table = require("rich.table", extra="lab").Table(box=None, pad_edge=False)
        text = require("rich.text", extra="lab").Text
        for heading in ("run", "", "epoch", "accuracy", "left"):
            table.add_column(heading, justify="left" if heading in ("run", "") else "right")
        order = ("running", "failed", "stopped", "waiting", "done")
        rows = sorted(self.rows.values(), key=lambda row: order.index(row.state))
        styles = {"running": "bold", "failed": "red", "done": "green", "waiting": "dim"}
        for row in rows[:_ROWS]:
            epoch = f"{row.epoch}/{row.epochs}" if row.epochs else ""
            accuracy = "" if row.accuracy is None else f"{100 * row.accuracy:.2f} %"
            cells = (row.name, row.state, epoch, accuracy, _clock(row.left))
            table.add_row(*map(text, cells), style=styles.get(row.state))
        if len(rows) > _ROWS:
            hidden = [row.state for row in rows[_ROWS:]]
            counts = [f"{hidden.count(s)} {s}" for s in order if s in hidden]
            table.add_row(text(f"and {', '.join(counts)}"), style="dim")
        return table


def status_line(row: CellStatus) -> str:
    """Format the status of a cell as a line."""
    if row.state == "failed":
        return f"failed: {row.reason}"
    parts = [row.state]
    if row.epochs:
        parts.append(f"epoch {row.epoch}/{row.epochs}")
    if row.accuracy is not None:
        parts.append(f"accuracy {100 * row.accuracy:.2f} %")
    if row.left is not None:
        parts.append(f"{_clock(row.left)} left")
    return ", ".join(parts)


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
