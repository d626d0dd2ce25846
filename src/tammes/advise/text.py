"""Format advice as text for a terminal."""

import math
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tammes.advise.memory_plan import size

if TYPE_CHECKING:
    from tammes.advise.advice import Advice

WIDTH = 100
"""Width of the text in columns."""


def table(rows: Sequence[Sequence[str]], *, right: frozenset[int] = frozenset()) -> Iterator[str]:
    """Format a table with aligned columns; the first row is the header.

    Args:
        rows: cells, the same number in every row.
        right: indices of right-aligned columns.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield f"  {'  '.join(cells)}".rstrip()


def paragraph(label: str, content: str, indent: int) -> str:
    """Format a label with a text next to it, wrapped at :data:`WIDTH`."""
    lead = f"  {label}".ljust(indent)
    return textwrap.fill(content, WIDTH, initial_indent=lead, subsequent_indent=" " * indent)


def number(value: float | str | None) -> str:
    """Format a number for a table."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    return "any" if math.isinf(value) else f"{value:.4g}"


def text(advice: "Advice") -> str:
    """Format all of the advice."""
    blocks = (
        *(_geometry, _margins, _scales, _recommendations, _cautions, _costs),
        *(_evidence, _code, _command),
    )
    return "\n\n".join("\n".join(block(advice)) for block in blocks)


def _geometry(advice: "Advice") -> Iterator[str]:
    work, limit = advice.work, advice.class_margin
    ranks = f"{work.gpus} GPUs" if work.gpus > 1 else "1 GPU"
    where = "the CPU" if work.device == "cpu" else ranks
    each = f" of {work.centers} prototypes each" if work.centers > 1 else ""
    yield (
        f"{work.classes:,} classes{each} in {work.dim:,} dimensions, {advice.loss}, "
        f"batch {work.batch:,} on {where}"
    )
    yield ""
    yield "What the sphere allows"
    known = "reached" if limit.exact else "a bound, not known to be reached"
    yield f"  class margin   A <= {limit.degrees:.2f}°   {limit.bound}, {known} ({limit.source})"
    yield (
        f"  sample margin  {advice.sample_margin:.4f}        1 - cos A, examples on their "
        f"prototypes; never above {advice.sample_margin_limit:.4g}"
    )


def _margins(advice: "Advice") -> Iterator[str]:
    yield "Margins: largest value that all classes can meet; radius of a class at the default"
    rows = [["loss", "setting", "default", "largest", "radius", "rule"]]
    for row in advice.margins:
        radius = "-" if row.radius is None else f"{math.degrees(row.radius):.1f}°"
        largest = number(row.largest) if row.setting else "-"
        default = number(row.default) + ("" if row.feasible else " (too large)")
        rows.append([row.loss, row.setting or "-", default, largest, radius, row.rule])
    yield from table(rows, right=frozenset({3, 4}))


def _scales(advice: "Advice") -> Iterator[str]:
    scales = advice.scales
    yield f"Scale for a posterior of {scales.posterior:g}"
    label = advice.loss if advice.margin is None else f"{advice.loss}, margin {advice.margin:g}"
    rows = [["", "least (proven)", "about (at A)", ""]]
    rows.append(["without a margin", number(scales.least), number(scales.about), ""])
    about = "none" if math.isinf(scales.about_with_margin) else number(scales.about_with_margin)
    rows.append([label, number(scales.least_with_margin), about, ""])
    rows.append(["AdaCos", "", number(scales.adacos), "sqrt(2) log(C - 1)"])
    yield from table(rows, right=frozenset({1, 2}))
    if advice.start is not None:
        yield f"  Before training, at scale {advice.scale:g}, the loss is about {advice.start:.3g}."


def _recommendations(advice: "Advice") -> Iterator[str]:
    yield "Recommended settings"
    indent = max(len(row.setting) for row in advice.recommendations) + 4
    for row in advice.recommendations:
        value = row.value if isinstance(row.value, str) else f"{row.value:g}"
        yield paragraph(row.setting, f"{value}: {row.reason} [{row.basis}]", indent)


def _cautions(advice: "Advice") -> Iterator[str]:
    yield "Cautions" if advice.cautions else "Cautions: none"
    for caution in advice.cautions:
        yield paragraph(caution.level, f"{caution.text} [{caution.source}]", 10)


def _costs(advice: "Advice") -> Iterator[str]:
    if not advice.costs:
        yield "Cost: no head is used"
        return
    machine = advice.machine
    large = max(cost.total for cost in advice.costs) >= 2**30
    unit, name = (2**30, "GiB") if large else (2**20, "MiB")
    yield (
        f"Cost on each rank in {name}, without the backbone; {machine.name} with "
        f"{size(machine.memory)}"
    )
    yield (
        "  ms: estimated work of the device; a step takes at least its calls, "
        f"{machine.launch * 1e3:g} ms, or half of that if dense"
    )
    rows = [
        ["mode", "weights", "gradient", "optimizer", "scores", "features", "total", "ms", ""],
    ]
    for cost in advice.costs:
        parts = (cost.weights, cost.gradient, cost.optimizer, cost.scores, cost.features)
        remarks = ["chosen automatically"] if cost.mode == advice.implementation else []
        remarks += [] if cost.fits else ["does not fit"]
        remarks += [cost.note] if cost.note else []
        gib = [f"{part / unit:.2f}" for part in (*parts, cost.total)]
        rows.append([cost.mode, *gib, f"{cost.work * 1e3:.3g}", ", ".join(remarks)])
    yield from table(rows, right=frozenset(range(1, 8)))


def _evidence(advice: "Advice") -> Iterator[str]:
    rows = [["trained on", "classes", "images each", "", "advised", "best", "with"]]
    for each in advice.evidence:
        best, name = each.best, each.quantity
        how = f"{best.loss}, scale {best.scale:g}, margin {best.margin:g}{best.beyond_defaults}"
        numbers = [f"{each.advised.mean:.1f} %", f"{best.mean:.1f} %"]
        rows.append([each.data, f"{each.classes:,}", str(each.images), name, *numbers, how])
    main, classes = advice.loss.partition("+")[0], advice.work.classes
    if len(rows) == 1:
        yield f"Evidence: no training of ours behind scale and margin of {main}, only its paper"
        return
    seeds = min(each.seeds for each in advice.evidence)
    yield f"Evidence: {main} as advised for each, and the best of 12 settings; {seeds} seeds each"
    yield from table(rows, right=frozenset({1, 2, 4, 5}))
    most = max(each.classes for each in advice.evidence)
    if classes > most:
        yield f"  Yours has {classes:,} classes, more than any of these: tammes tune checks it."


def _code(advice: "Advice") -> Iterator[str]:
    yield "Code"
    yield textwrap.indent(advice.code, "  ")


def _command(advice: "Advice") -> Iterator[str]:
    yield "Command"
    line = " "
    for part in advice.command.replace(" --", "\n--").split("\n"):
        if len(line) + len(part) > WIDTH - 3:
            yield f"{line} \\"
            line = "     "
        line += f" {part}"
    yield line
