"""Page of ``tammes gallery query``: each query with its ranked individuals."""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from tammes.gallery import Gallery
from tammes.gallery.ids import Id
from tammes.lab.data.decode import decode
from tammes.lab.report.render import html_page as page
from tammes.lab.report.render.image_url import image_url

SHOWN = 200
"""Largest number of queries on a page."""
_SIDE = 96
"""Side of the images in pixels."""


class Answer(NamedTuple):
    """Answer to a query: individuals, the most similar first, with an enrolled image of each.

    The query counts as a known individual if the first is similar enough.
    """

    image: str
    known: bool
    ids: Sequence[Id]
    scores: Sequence[float]
    sources: Sequence[str]

    def as_dict(self) -> dict[str, Any]:
        """Return the answer as plain values."""
        ranked = zip(self.ids, self.scores, self.sources, strict=False)
        return {
            "image": self.image,
            "known": self.known,
            "id": self.ids[0] if self.known else None,
            "ranked": [
                {"id": each, "score": score, "image": source} for each, score, source in ranked
            ],
        }


def render_gallery_page(
    answers: Sequence[Answer], total: int, gallery: Gallery, threshold: float | None, command: str
) -> str:
    """Return a page of some of ``total`` queries, as self-contained HTML.

    Below ``threshold`` similarity a query is unknown; None accepts every query.
    """
    unknown = sum(not answer.known for answer in answers)
    lead = [f"{total:,} images searched among {len(gallery):,} individuals."]
    if len(answers) < total:
        lead.append(f"The first {len(answers):,} are shown.")
    if threshold is not None:
        lead.append(f"Individuals are known from a similarity of {threshold:.3f} on.")
    verdict = f"{len(answers) - unknown:,} of the {len(answers):,} images shown are of a known "
    verdict += f"individual, {unknown:,} of an unknown one."
    sections: dict[str, Sequence[page.Block]] = {
        "": [_row(answer) for answer in answers],
        "How to repeat this": [page.Details("Command", command)],
    }
    return page.render("Gallery", page.sections(sections), verdict=[verdict], lead=[" ".join(lead)])


def _row(answer: Answer) -> page.ImageGallery:
    images = [page.Image(_thumbnail(answer.image), "query", wrong=not answer.known)]
    for each, score, source in zip(answer.ids, answer.scores, answer.sources, strict=False):
        images.append(page.Image(_thumbnail(source), f"{each}, {score:.3f}"))
    title = str(answer.ids[0]) if answer.known else "unknown"
    return page.ImageGallery(title, images, answer.image)


@cache
def _thumbnail(source: str) -> str:
    """Return a small image as a data URL; a grey one if the file can no longer be read."""
    try:
        pixels = torch.from_numpy(decode(source, (3, _SIDE, _SIDE))[1].copy())
    except Exception:
        pixels = torch.full((1, _SIDE, _SIDE), 200, dtype=torch.uint8)
    return image_url(pixels)
