"""Argument types shared by several commands."""

import argparse


def seeds(text: str) -> int | list[int]:
    """Parse a number of seeds, ``3``, or a list of them, ``0,1,5``."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"a number or a list such as 0,1,5 is expected, got {text!r}"
        ) from None
    return numbers if "," in text else numbers[0]
