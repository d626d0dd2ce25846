"""Arguments that several commands take."""

import argparse


def seeds(text: str) -> int | list[int]:
    """How many seeds, or which: ``3`` or ``0,1,5``."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"a number or 0,1,5 is expected, got {text!r}") from None
    return numbers if "," in text else numbers[0]
