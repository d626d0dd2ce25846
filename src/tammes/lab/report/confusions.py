"""Pairs of close or confused classes, with example images."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tammes.lab.measure.measures import closest_pairs, degrees_between
from tammes.lab.report.load_runs import InspectedRun
from tammes.lab.report.render.html_page import Block, Cell, Image, ImageGallery, Table, Text, Value
from tammes.lab.report.render.image_url import image_url
from tammes.similarity import unit

_WORST = 12
"""Largest number of images among the worst mistakes."""


@dataclass(frozen=True)
class Pair:
    """Two classes: the angle between their prototypes, and the errors in both directions."""

    first: int
    second: int
    degrees: float | None
    first_as_second: int
    second_as_first: int

    @property
    def confused(self) -> int:
        """Number of errors in both directions."""
        return self.first_as_second + self.second_as_first


def pairs(seen: InspectedRun, count: int) -> list[Pair]:
    """Return the ``count`` most confused and the ``count`` closest pairs, most confused first."""
    confused: Counter[tuple[int, int]] = Counter()
    for (label, prediction), number in seen.confused.items():
        confused[min(label, prediction), max(label, prediction)] += number
    # Ties are broken by class number, so that the page is deterministic.
    often = sorted(confused, key=lambda pair: (-confused[pair], pair))[:count]
    close = [] if seen.prototypes is None else closest_pairs(seen.prototypes, count)
    chosen = dict.fromkeys([*often, *((i, j) for _, i, j in close)])
    rows = None if seen.prototypes is None else unit(seen.prototypes.double())
    found = [
        Pair(
            i,
            j,
            None if rows is None else degrees_between(rows[i], rows[j]),
            seen.confused.get((i, j), 0),
            seen.confused.get((j, i), 0),
        )
        for i, j in chosen
    ]
    return sorted(found, key=lambda pair: (-pair.confused, pair.degrees or 0.0))


def pair_blocks(seen: InspectedRun, count: int) -> list[Block]:
    """Show a table of :func:`pairs`, and images of them if the record has some."""
    found = pairs(seen, count)
    if not found:
        return []
    blocks: list[Block] = []
    counted = seen.counts is not None
    columns = ["class", "and class", "angle °"]
    columns += ["first as second", "second as first", "% of both"] if counted else []
    rows = []
    for pair in found:
        angle = None if pair.degrees is None else Value(f"{pair.degrees:.2f}", pair.degrees)
        row: list[Cell] = [seen.name(pair.first), seen.name(pair.second), angle]
        if seen.counts is not None:
            total = int(seen.counts[[pair.first, pair.second]].sum())
            share = 100 * pair.confused / max(total, 1)
            row += [pair.first_as_second, pair.second_as_first, Value(f"{share:.1f}", share)]
        rows.append(row)
    if seen.confused:
        what = f"The {count} pairs most often confused, and the {count} closest by angle"
    else:
        what = (
            "No example was confused; the closest pairs by angle"
            if counted
            else "The closest pairs by angle"
        )
    blocks.append(Table(columns, rows, caption=f"{what}. Seed {seen.seed}."))
    galleries = [gallery for pair in found if (gallery := _gallery(seen, pair)) is not None]
    if galleries:
        blocks.append(
            Text("Dashed: predicted as the other class. Plain: a correct one of each class.")
        )
    return [*blocks, *galleries]


def worst_mistakes(seen: InspectedRun) -> list[Block]:
    """Show the misclassified images with the most negative margins, the worst first."""
    if seen.images is None:
        return []
    known = [
        (margin, place) for place, margin in enumerate(seen.image_margins) if margin is not None
    ]
    images = []
    for margin, place in sorted(known)[:_WORST]:
        kinds = (seen.image_labels[place], seen.image_predictions[place])
        text = f"{' as '.join(map(seen.name, kinds))}, {margin:+.2f}"
        images.append(Image(image_url(seen.images[place]), text))
    detail = "Cosine to the true class minus that to the predicted one."
    return [ImageGallery("Worst mistakes", images, detail)] if images else []


def _gallery(seen: InspectedRun, pair: Pair) -> ImageGallery | None:
    """Show the errors of a pair between a correct example of each class; None without errors."""
    if seen.images is None:
        return None
    both = {(pair.first, pair.second), (pair.second, pair.first)}
    kinds = list(zip(seen.image_labels, seen.image_predictions, strict=True))
    wrong = [place for place, kind in enumerate(kinds) if kind in both]
    if not wrong:
        return None
    first, second = seen.name(pair.first), seen.name(pair.second)
    images = [*_right(seen, kinds, pair.first)]
    for place in wrong:
        label, prediction = kinds[place]
        text = f"{seen.name(label)}, predicted as {seen.name(prediction)}"
        images.append(Image(image_url(seen.images[place]), text, wrong=True))
    images += _right(seen, kinds, pair.second)
    detail = "" if pair.degrees is None else f"{pair.degrees:.1f}° apart"
    return ImageGallery(f"{first} and {second}", images, detail)


def _right(seen: InspectedRun, kinds: Sequence[tuple[int, int]], name: int) -> list[Image]:
    assert seen.images is not None
    place = next((place for place, kind in enumerate(kinds) if kind == (name, name)), None)
    return [] if place is None else [Image(image_url(seen.images[place]), seen.name(name))]
