"""Add arguments to a command in one line each; argument types that several commands share."""

import argparse
from typing import Any


def add_argument(
    parser: argparse.ArgumentParser, flag: str, text: str, default: Any = None, **options: Any
) -> None:
    """Add an argument, such as ``"--way N"``, to the parser of a command.

    Args:
        parser: parser of the command.
        flag: name of the argument, and the placeholder of its value. Without placeholder, default
            and options it is a switch.
        text: help.
        default: default; if it is a number, the argument has its type.
        **options: further options of :meth:`argparse.ArgumentParser.add_argument`.
    """
    name, _, metavar = flag.partition(" ")
    if not metavar and default is None and not options:
        options["action"] = "store_true"
    else:
        options["default"] = default
    if metavar:
        options["metavar"] = metavar
    if isinstance(default, int | float):
        options.setdefault("type", type(default))
    if options.get("type") is int:
        options["type"] = whole_number
    parser.add_argument(name, help=text, **options)


def whole_number(text: str) -> int:
    """Parse a whole number."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"a whole number such as 1000 is expected, got {text!r}"
        ) from None


def seeds(text: str) -> int | list[int]:
    """Parse a number of seeds, ``3``, or a list of them, ``0,1,5``."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"a number or a list such as 0,1,5 is expected, got {text!r}"
        ) from None
    return numbers if "," in text else numbers[0]
