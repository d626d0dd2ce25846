"""Match an error message by its key words, so that the wording between them can be improved."""

import re


def pattern(text: str) -> str:
    """Return a regular expression for a whole message of one line.

    A family of messages has one row with the exact text. The others name who speaks, what about
    and what was received, with ``...`` where any words may stand; a hint may follow.
    """
    parts = re.split(r" ?\.\.\. ?", text)
    hint = "([:;,] .*)?" if len(parts) > 1 else ""
    return rf"\A{'.*'.join(map(re.escape, parts))}{hint}\Z"
