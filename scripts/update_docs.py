"""Regenerate the parts of ``docs/`` that quote the code; tests fail if a page is out of date.

These are the table of fields in configuration.md, that of columns in glossary.md, and outputs of
commands in scaling.md, advise.md, choosing.md, doctor.md, fewshot.md and kernels.md. ``make docs``
runs this, and the scripts that write docs/contract.md and docs/results.md.
"""

import contextlib
import dataclasses
import io
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import advice_evidence
import doctor_table
import everyday_table
import fewshot_table
import scaling_table

from tammes.lab.cli.main import main
from tammes.lab.config.flags import field_help
from tammes.lab.config.schema import Config
from tammes.lab.config.typecheck import type_name
from tammes.lab.report.glossary import COLUMNS

DOCS = Path(__file__).parents[1] / "docs"
SCRIPTS: dict[str, Callable[[list[str]], object]] = {
    "scripts/scaling_table.py": scaling_table.main,
    "scripts/advice_evidence.py": advice_evidence.main,
    "scripts/doctor_table.py": doctor_table.main,
    "scripts/fewshot_table.py": fewshot_table.main,
    "scripts/everyday_table.py": everyday_table.main,
}
"""Scripts whose output pages quote."""


def printed(command: str) -> str:
    """Run a command of this repository and return its output."""
    words = shlex.split(command)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        if words[0] == "tammes":
            main(words[1:])
        else:
            SCRIPTS[words[1]](words[2:])
    return output.getvalue().rstrip("\n")


def with_outputs(page: str) -> str:
    """Return a page with every command output updated: below a command, or between two marks."""
    page = re.sub(
        r"^```\n\$ (.+)\n[^`]*```",
        lambda found: f"```\n$ {found[1]}\n{printed(found[1])}\n```",
        page,
        flags=re.MULTILINE,
    )
    return re.sub(
        r"^<!-- (python .+) -->\n(?:.|\n)*?<!-- end -->",
        lambda found: f"<!-- {found[1]} -->\n\n{printed(found[1])}\n\n<!-- end -->",
        page,
        flags=re.MULTILINE,
    )


def with_fields(page: str) -> str:
    """Return a page with the table of configuration fields updated."""
    return _with_table(page, "fields", _fields())


def with_columns(page: str) -> str:
    """Return a page with the table of the columns of pages updated."""
    rows = [f"| {name} | {text} |" for name, text in sorted(COLUMNS.items(), key=_alphabetically)]
    return _with_table(page, "columns", "\n".join(["| column | meaning |", "|---|---|", *rows]))


def _alphabetically(row: tuple[str, str]) -> tuple[str, str]:
    return row[0].lower(), row[0]


def _with_table(page: str, name: str, table: str) -> str:
    """Return a page with the table between the two marks of a name replaced."""
    begin, end = f"<!-- {name}: made by scripts/update_docs.py -->", f"<!-- end of {name} -->"
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    assert found
    assert closed
    return f"{before}{begin}\n{table}\n{end}{after}"


def _fields() -> str:
    fields = {field.name: field for field in dataclasses.fields(Config)}
    rows = ["| field | type | default | meaning |", "|---|---|---|---|"]
    for name, meaning in field_help().items():
        default = fields[name].default
        shown = {"None": "null", "True": "true", "False": "false"}.get(str(default), default)
        shown = f"`{shown}`" if shown != "" else ""
        meaning = meaning.replace("``", "`").replace("|", "\\|")
        mark = "" if name in Config().identity() else " *"
        rows.append(f"| `{name}`{mark} | {type_name(fields[name].type)} | {shown} | {meaning} |")
    return "\n".join(rows)


UPDATES = {
    "configuration": with_fields,
    "glossary": with_columns,
    "scaling": with_outputs,
    "advise": with_outputs,
    "choosing": with_outputs,
    "doctor": with_outputs,
    "fewshot": with_outputs,
    "kernels": with_outputs,
}
"""Update functions by page."""

if __name__ == "__main__":
    for name, update in UPDATES.items():
        path = DOCS / f"{name}.md"
        path.write_text(update(path.read_text(encoding="utf-8")), encoding="utf-8")
        print(path)
