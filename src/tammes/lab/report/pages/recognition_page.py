"""Page of ``tammes evaluate`` about retrieval, verification or open sets."""

from collections.abc import Sequence

from tammes.lab.recognition.embeddings import IdentityEmbeddings
from tammes.lab.recognition.results import Listing, RankedItem, Ranking, Recognition
from tammes.lab.report.charts import recognition as charts
from tammes.lab.report.charts.chart import Chart, sentence
from tammes.lab.report.render import html_page as page
from tammes.lab.report.verdicts import verdict_on_recognition

_TITLES = {"retrieval": "Retrieval", "verification": "Verification", "openset": "Open set"}
_ERRORS = ("eer", "fpr95")
"""Error rates, which have no bar as smaller is better."""
_HEADLINES = 6
"""Largest number of cards."""


def recognition_page(
    found: Recognition,
    examples: IdentityEmbeddings,
    command: str,
    *,
    verdict: Sequence[str] | None = None,
) -> str:
    """Return the page of an evaluation as self-contained HTML.

    The examples have names and images; ``verdict`` is by default that on the result alone.
    """
    ranked = {
        heading: _rankings(examples, rankings) for heading, rankings in found.rankings.items()
    }
    notes = list(found.notes)
    if examples.pictures is not None:
        notes += examples.pictures.notes()
    if any(number.low is not None for number in found.numbers):
        notes.append(
            "ranges and bands are 95 % bootstrap intervals over identities: identities are drawn "
            "with replacement, not images or pairs"
        )
    sections: dict[str, list[page.Block]] = {
        "": [_cards(found)],
        **{heading: _listing(table) for heading, table in found.tables.items()},
        "Thresholds to deploy": _listing(found.threshold_listing()),
        "Curves": _curves(found),
        "Identities that fail most": _listing(found.failing),
        **ranked,
        "All numbers": [_numbers(found)],
        "Counts": [page.Table(("what", "number"), _counts(found))],
        "How to repeat this": [page.Details("Command", command)],
    }
    title = f"{_TITLES[found.protocol]}: {found.title}"
    lead = [f"{sentence(text)}." for text in (*found.summary, *notes)]
    if verdict is None:
        verdict = verdict_on_recognition(found)
    return page.render(title, page.sections(sections), verdict=verdict, lead=lead)


def _cards(found: Recognition) -> page.Cards:
    cards = []
    for number in found.numbers[:_HEADLINES]:
        share = number.value if number.percent and number.key not in _ERRORS else None
        cards.append(page.Card(number.name, number.shown(), number.shown_interval(), share))
    return page.Cards(cards)


def _numbers(found: Recognition) -> page.Table:
    rows = [
        (number.name, page.Value(number.shown(), number.value), number.shown_interval())
        for number in found.numbers
    ]
    return page.Table(("number", "value", "95 % interval"), rows)


def _counts(found: Recognition) -> list[tuple[str, page.Value]]:
    return [
        (key.replace("_", " "), page.Value(f"{count:,}", count))
        for key, count in found.counts.items()
    ]


def _listing(listing: Listing) -> list[page.Block]:
    rows = [
        [
            page.Value(text, value) if isinstance(value, int | float) else text
            for text, value in zip(listing.texts(row), row, strict=True)
        ]
        for row in listing.rows
    ]
    return page.table(listing.columns, rows, listing.caption)


def _curves(found: Recognition) -> list[page.Block]:
    blocks: list[page.Block] = []

    def show(chart: Chart, title: str, caption: str) -> None:
        blocks.extend(page.pictures(chart, title=title, caption=caption))

    if "cmc" in found.curves:
        caption = "Share of the queries with a match among the first k items."
        show(charts.cmc.chart(found.curves["cmc"]), "CMC", caption)
    if "roc" in found.curves:
        roc = found.curves["roc"]
        caption = "Pairs of one identity that are accepted, at each share of accepted pairs of two."
        show(charts.roc.chart(roc), "ROC", caption)
        caption = "Both error rates, on logarithmic scales."
        show(charts.det.chart(roc, found.counts["same"]), "DET", caption)
    if "tpir" in found.curves:
        names = {"x": "FPIR", "y": "TPIR"}
        caption = "Known probes that are accepted and right, at each share of accepted unknown "
        caption += "ones; the area under it is the OSCR of a gallery."
        show(charts.roc.chart(found.curves["tpir"], **names), "Identification", caption)
    if "known" in found.curves:
        names = {"x": "accepted unknown", "y": "accepted known"}
        caption = "Known probes that are accepted, right or wrong."
        show(charts.roc.chart(found.curves["known"], **names), "Known or unknown", caption)
    caption = "Each histogram is a share of its group; where they overlap, no threshold is right."
    show(charts.score_histogram.chart(found.scores, axis="similarity"), "Scores", caption)
    return blocks


def _rankings(examples: IdentityEmbeddings, rankings: Sequence[Ranking]) -> list[page.Block]:
    """Show rankings as images; those without images as rows of a table."""
    galleries = [gallery for each in rankings if (gallery := _gallery(examples, each)) is not None]
    if len(galleries) == len(rankings):
        return [*galleries]
    columns, rows = ["example", "identity", "remark"], []
    if any(each.items for each in rankings):
        columns.append("ranked items")
    for each in rankings:
        items = [_caption(examples, item, place) for place, item in enumerate(each.items, 1)]
        name = examples.names[each.query]
        row = [name, _identity(examples, each.query), each.remark, ", ".join(items)]
        rows.append(row[: len(columns)])
    return [*page.table(columns, rows), *galleries]


def _gallery(examples: IdentityEmbeddings, ranking: Ranking) -> page.ImageGallery | None:
    """Show an example and its ranked items as images; None if any image is missing."""
    if examples.pictures is None:
        return None
    first = examples.pictures.show(ranking.query)
    others = [examples.pictures.show(item.row) for item in ranking.items]
    shown = [source for source in others if source is not None]
    if first is None or len(shown) < len(others):
        return None
    name, rows = examples.names[ranking.query], [item.row for item in ranking.items]
    if len(rows) == 1:
        # A pair, which has no ranks.
        texts = [_identity(examples, row) or examples.names[row] for row in (ranking.query, *rows)]
        images = [
            page.Image(source, text) for source, text in zip((first, *shown), texts, strict=True)
        ]
        return page.ImageGallery(f"{name} and {examples.names[rows[0]]}", images, ranking.remark)
    images = [page.Image(first, f"query {_identity(examples, ranking.query)}")]
    for place, (source, item) in enumerate(zip(shown, ranking.items, strict=True), 1):
        images.append(page.Image(source, _caption(examples, item, place), not item.match))
    return page.ImageGallery(name, images, ranking.remark)


def _identity(examples: IdentityEmbeddings, row: int) -> str:
    return "" if examples.identities is None else str(examples.identities[row])


def _caption(examples: IdentityEmbeddings, item: RankedItem, place: int) -> str:
    name = _identity(examples, item.row) or examples.names[item.row]
    mark = "" if item.match else " (wrong)"
    return f"{place}. {name}{mark} {item.similarity:.3f}"
