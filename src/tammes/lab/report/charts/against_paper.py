"""Charts of a reproduction: differences against claims, and paper against ours."""

from collections.abc import Sequence

from tammes.lab.report.charts.chart import Layer, Line, Panel, Points, Rule
from tammes.lab.report.charts.training_curves import Drawing, drawing
from tammes.lab.report.paper_comparison import PaperComparison, published
from tammes.lab.reproduce.claims import Better, Bound, Course, Near, Peak
from tammes.lab.reproduce.judge import Comparison
from tammes.lab.reproduce.quantities import KNOWN
from tammes.lab.stats.paired import Difference, Summary
from tammes.lab.stats.seed_groups import Quantity, format_difference, format_mean

OUTCOMES = {"holds": 2, "leans": 4, "fails": 1, "open": None}
"""Palette index of each outcome."""
_TOGETHER = 12
"""Largest number of comparisons for which all columns share one panel."""


def claim_charts(comparison: PaperComparison) -> list[Drawing]:
    """Chart the differences of each claim with their intervals, against the claimed value."""
    drawings: list[Drawing] = []
    for number, verdict in enumerate(comparison.verdicts, 1):
        claim, panels = verdict.claim, []
        if isinstance(claim, Course | Peak):
            continue
        known = [part for part in verdict.parts if part.difference]
        columns = dict.fromkeys(part.column for part in known)
        if known and len(known) <= _TOGETHER:
            panels.append(
                _claim_panel(comparison, claim, known, f"Claim {number}", len(columns) > 1)
            )
            columns = {}
        for column in columns:
            parts = [part for part in known if part.column == column]
            heading = f", {comparison.headings[column]}" if len(columns) > 1 else ""
            panels.append(_claim_panel(comparison, claim, parts, f"Claim {number}{heading}", False))
        caption = f"{claim.says} Bars: 95 % intervals over seeds; hollow: one seed."
        drawings += drawing(f"claim-{number}", panels, caption)
    return drawings


def _claim_panel(
    comparison: PaperComparison,
    claim: Better | Near | Bound,
    parts: Sequence[Comparison],
    title: str,
    headings: bool,
) -> Panel:
    quantity = KNOWN[claim.quantity]
    rows = [" against ".join(comparison.labels[name] for name in part.rows) for part in parts]
    if headings:
        rows = [
            f"{comparison.headings[p.column]}: {row}" for p, row in zip(parts, rows, strict=True)
        ]
    groups: dict[tuple[str, bool], list[tuple[int, Difference]]] = {}
    for row, part in enumerate(parts):
        if part.difference is not None:
            key = (part.outcome, part.difference.interval is None)
            groups.setdefault(key, []).append((row, part.difference))
    layers: list[Layer] = []
    ends: list[float] = []
    for outcome, one_seed in sorted(groups, key=lambda key: (list(OUTCOMES).index(key[0]), key[1])):
        places, each = zip(*groups[outcome, one_seed], strict=True)
        means = [less.mean for less in each]
        spans = [less.interval for less in each if less.interval is not None]
        lows, highs = ([low for low, _ in spans], [high for _, high in spans])
        texts = [
            f"{rows[row]}: {format_difference(quantity, less).rstrip(' *')}{quantity.suffix}, "
            f"n = {len(less.seeds)}, {outcome}"
            for row, less in zip(places, each, strict=True)
        ]
        look = (outcome, OUTCOMES[outcome], 7, one_seed)
        layers.append(Points(means, places, *look, texts, lows, highs))
        ends += [*means, *lows, *highs]
    axis, values = _axis_and_bounds(claim)
    ends += values
    room = 0.06 * (max(ends) - min(ends)) or 1.0
    layers += map(Rule, values)
    around = (min(ends) - room, max(ends) + room)
    axis = f"{quantity.heading}: {axis}"
    return Panel(layers, title, axis, x_range=around, rows=rows, above=True)


def _axis_and_bounds(claim: Better | Near | Bound) -> tuple[str, list[float]]:
    """Return the axis label of a claim, and the values to mark."""
    match claim:
        case Better():
            label = f"better by, {claim.by:g} claimed" if claim.by else "better by"
            return label, list(dict.fromkeys((0.0, claim.by)))
        case Near():
            whose = "the paper's" if claim.near == "paper" else "the released code's"
            label = f"ours minus {whose}, {claim.within:g} allowed"
            return label, [-claim.within, 0.0, claim.within]
    bounds = (("at least", claim.at_least), ("at most", claim.at_most))
    words = [f"{word} {bound:g}" for word, bound in bounds if bound is not None]
    return f"distance from the bound, {' and '.join(words)}", [0.0]


def paper_against_ours(comparison: PaperComparison) -> list[Drawing]:
    """Plot the paper's numbers against ours, one panel per quantity."""
    every = [
        _against(comparison, quantity, columns) for quantity, columns in comparison.quantities()
    ]
    panels = [panel for panel in every if panel is not None]
    caption = "On the dashed line both are equal. Bars: 95 % intervals over seeds, "
    caption += "where a spread is known."
    return drawing("paper-against-ours", panels, caption, columns=3, tall=True)


def _against(
    comparison: PaperComparison, quantity: Quantity, columns: Sequence[str]
) -> Panel | None:
    layers: list[Layer] = []
    ends: list[float] = []
    longest = 0.0
    for place, column in enumerate(columns):
        name = comparison.headings[column]
        points: list[tuple[float, float, float, str]] = []
        for cell in comparison.cells(quantity, column):
            if cell.paper is None or cell.ours is None:
                continue
            ours, paper, half = cell.ours.mean, cell.paper.mean, None
            if cell.paper.std and cell.paper_seeds > 1:
                half = Summary(cell.paper_seeds, paper, cell.paper.std).half
            if half:
                both = [paper - half, paper + half]
                layers.append(Line([ours] * 2, both, "", color=place, group=name, thin=True))
            shown = f"{comparison.labels[cell.row]}: ours {format_mean(quantity, cell.ours)}, "
            shown += f"paper {published(quantity, cell.paper)}"
            points.append((ours, paper, cell.ours.half or 0.0, shown))
        if points:
            xs, ys, halves, texts = zip(*points, strict=True)
            lows, highs = zip(*((x - half, x + half) for x, _, half, _ in points), strict=True)
            layers.append(Points(xs, ys, name, place, 6, False, texts, lows, highs, name))
            ends += [*xs, *ys]
            longest = max(longest, *halves)
    if not ends:
        return None
    span = max(ends) - min(ends)
    # Cut off long intervals, such as those over two seeds: otherwise the points would coincide.
    room = (0.08 * span + min(longest, 0.4 * span)) or longest or 0.01 * abs(ends[0]) or 1.0
    low, high = min(ends) - room, max(ends) + room
    diagonal = Line([low, high], [low, high], "", "dashed", None)
    return Panel(
        [diagonal, *layers],
        f"Paper against ours: {quantity.name}",
        f"ours: {quantity.heading}",
        f"paper: {quantity.heading}",
        x_range=(low, high),
        y_range=(low, high),
        equal=True,
    )
