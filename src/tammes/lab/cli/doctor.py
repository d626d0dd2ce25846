"""The command ``tammes doctor``."""

import argparse
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from tammes.lab.cli.arguments import add_argument
from tammes.lab.records.run_folder import RecordError, Run, find_runs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tammes doctor`` to a parser."""
    parser.description = (
        "Say what is wrong with runs, why, and what to change: the findings during training, and a "
        "diagnosis of the finished model. The exit code is 0 if all runs are healthy and 1 if "
        "there is a warning. docs/doctor.md explains every finding."
    )
    add = partial(add_argument, parser)
    add("runs RUN", "run directories, or directories that contain runs at any depth", nargs="+")
    add("--json", "print the findings as JSON")
    mute = "findings to leave out, separated by commas, besides those that the runs mute"
    add("--mute NAMES", mute, "")


def run(arguments: argparse.Namespace) -> int:
    """Run ``tammes doctor``; return 0 if all runs are healthy, 1 if one has a warning."""
    from tammes.lab.training.health import muted_names

    muted = muted_names(arguments.mute)
    examined = [_examine(each, muted) for each in find_runs(arguments.runs)]
    if arguments.json:
        print(json.dumps(examined, indent=2, ensure_ascii=False, allow_nan=False))
    else:
        print("\n".join(line for each in examined for line in _lines(each)))
    return int(not all(each["healthy"] for each in examined))


def _examine(run: Run, muted: Sequence[str]) -> dict[str, Any]:
    """Return the status and findings of a run, each with the time it was first found."""
    from tammes.lab.training.health import diagnose_run, first_findings, muted_names

    muted = (*muted, *muted_names(run.config.mute))
    looked = first_findings(run.health, run.config.epochs)
    found = {name: finding for name, finding in looked.items() if name not in muted}
    unread = ""
    if run.status == "failed":
        found["failed"] = {
            "when": "at its end",
            "name": "failed",
            "measured": run.failure["message"],
            "why": "the run has no result",
            "change": "see the findings before it, if there are any",
            "severity": "warning",
        }
    elif run.status == "done":
        try:
            for finding in diagnose_run(run, muted).findings:
                found.setdefault(finding.name, {"when": "finished model", **finding.to_dict()})
        except RecordError as error:
            # A run without weights still has the findings during training.
            unread = str(error)
    findings = list(found.values())
    return {
        "run": str(run.folder),
        "status": run.status,
        "healthy": all(each["severity"] != "warning" for each in findings),
        "findings": findings,
        **({"unread": unread} if unread else {}),
    }


def _lines(examined: dict[str, Any]) -> list[str]:
    state = "healthy" if examined["healthy"] else "ill"
    lines = [f"{examined['run']}: {state} ({examined['status']})"]
    for each in examined["findings"]:
        name = f"{each['name']}, {each['when']}"
        if each["severity"] == "note":
            name = f"note, {name}"
        lines.append(f"  {name}: {each['measured']}; {each['why']}; {each['change']}")
    if "unread" in examined:
        lines.append(f"  the finished model was not examined: {examined['unread']}")
    return lines
