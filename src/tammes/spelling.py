"""Guess which name a misspelt one stands for."""

import difflib
from collections.abc import Iterable

_SYMBOLS = {
    "s": "scale",
    "m": "margin",
    "infeatures": "embeddingsize",
    "outfeatures": "numclasses",
    "learningrate": "lr",
    "crossentropy": "softmax",
}
"""Names in papers and other libraries, and the names here."""


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that was probably meant, or None.

    Example:
        >>> nearest_name("m", ["margin", "scale"]), nearest_name("marign", ["margin", "scale"])
        ('margin', 'margin')
    """
    plain = {each.lower().replace("_", ""): each for each in known}
    wanted = name[:100].lower().replace("_", "").replace("-", "")
    wanted = _SYMBOLS.get(wanted, wanted)
    near = difflib.get_close_matches(wanted, plain, n=1)
    return plain[near[0]] if near else None
