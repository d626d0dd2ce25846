"""Findings, and the checks that make them."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from tammes.doctor.snapshot import Snapshot

Severity = Literal["warning", "note"]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a training run.

    Attributes:
        measured: what was measured, with the limit.
        why: why it matters.
        change: what to change.
        severity: ``"warning"``, or ``"note"`` if it may be intended.
        name: name of the check, by which it is muted.

    Example:
        >>> finding = Finding("loss 4.61", "nothing is learned", "lower lr", name="loss-at-chance")
        >>> print(finding)
        loss-at-chance: loss 4.61; nothing is learned; lower lr
    """

    measured: str
    why: str
    change: str
    severity: Severity = "warning"
    name: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain strings."""
        return asdict(self)

    def __str__(self) -> str:
        note = "note, " if self.severity == "note" else ""
        return f"{note}{self.name}: {self.measured}; {self.why}; {self.change}"


@dataclass(frozen=True)
class Check:
    """Check of a snapshot for one problem; made by :func:`check`.

    Attributes:
        name: name of the check.
        function: returns a finding without a name, or None.
    """

    name: str
    function: Callable[[Snapshot], Finding | None]

    def __call__(self, snapshot: Snapshot) -> Finding | None:
        """Check a snapshot."""
        found = self.function(snapshot)
        return None if found is None else replace(found, name=self.name)


def check(name: str) -> Callable[[Callable[[Snapshot], Finding | None]], Check]:
    """Turn a function of a snapshot into a named check."""
    return lambda function: Check(name, function)
