"""Configuration from flags and YAML: ``--config run.yaml --lr 0.05``; flags override files."""

import argparse
import dataclasses
import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from tammes.lab.config.schema import Config
from tammes.lab.config.typecheck import check_names, fit, from_text, members
from tammes.lab.config.yaml_file import read_yaml, write_yaml

_TYPES = {field.name: field.type for field in dataclasses.fields(Config)}

DEFAULT_DATA = f"data: {Config.data}, the default; --data names your own"
"""Message about the data set if none was given; see ``uses_default_data`` in the arguments."""
_PREFIX = "config_"
"""Prefix of fields in the parsed arguments, to tell them from those of the command."""


def add_config(parser: argparse.ArgumentParser, *, leave_out: Sequence[str] = ()) -> None:
    """Add ``--config``, ``--print_config`` and flags for all fields but those in ``leave_out``."""
    group = parser.add_argument_group(
        "configuration",
        "Every field is also a key of the YAML file; flags override the file.",
    )
    group.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="FILE",
        help="YAML file with any of the fields below; later files override earlier ones",
    )
    group.add_argument(
        "--print_config",
        "--print-config",
        action="store_true",
        help="print the whole configuration as YAML and exit",
    )
    says = field_help()
    for field in dataclasses.fields(Config):
        if field.name in leave_out:
            continue
        flags = dict.fromkeys((f"--{field.name}", f"--{field.name.replace('_', '-')}"))
        switch = {"nargs": "?", "const": "true"} if field.type is bool else {}
        default = "" if field.default in (None, "") else f" [{field.default}]"
        group.add_argument(
            *flags,
            dest=f"{_PREFIX}{field.name}",
            default=argparse.SUPPRESS,
            metavar=_metavar(field.type),
            help=(says[field.name].replace("``", "") + default).replace("%", "%%"),
            **switch,  # type: ignore[arg-type]
        )


def read_config(arguments: argparse.Namespace, **defaults: Any) -> Config:
    """Return the configuration given by flags and files.

    With ``--print_config`` it is printed and the program exits. An invalid value raises ValueError,
    which names the file or the field. Sets ``arguments.uses_default_data``. ``defaults`` are those
    of the command that differ from those of :class:`.Config`.
    """
    values = dict(defaults)
    for path in arguments.config:
        values |= read_file(path)
    for name, kind in _TYPES.items():
        text = getattr(arguments, f"{_PREFIX}{name}", None)
        if text is not None:
            values[name] = from_text(text, kind, f"--{name}")
    arguments.uses_default_data = "data" not in values
    config = Config.from_dict(values)
    if arguments.print_config:
        print(write_yaml(config.to_dict()), end="")
        raise SystemExit(0)
    return config


def read_file(path: str) -> dict[str, Any]:
    """Read configuration fields from a YAML file and check their types; errors name the file."""
    found = read_yaml(Path(path))
    if found is None:
        return {}
    try:
        if not isinstance(found, dict):
            raise ValueError("lines such as lr: 0.1 are expected")
        check_names(map(str, found), _TYPES, "a configuration has no")
        return {name: _typed(value, _TYPES[name], name) for name, value in found.items()}
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _typed(value: Any, kind: Any, what: str) -> Any:
    """Convert a YAML value to the type of a field; accepts quoted numbers, and 1 for 1.0."""
    if isinstance(value, str):
        return from_text(value, kind, what)
    return float(value) if type(fit(value, kind, what)) is int and float in members(kind) else value


def field_help() -> dict[str, str]:
    """Return the description of each field from the docstring of :class:`.Config`, one line each.

    Example:
        >>> field_help()["epochs"]
        'number of training epochs'
    """
    _, _, text = inspect.getdoc(Config).partition("Args:\n")  # type: ignore[union-attr]
    says: dict[str, str] = {}
    for name, first, more in re.findall(r"^    (\w+): (.*)((?:\n {8}.*)*)", text, re.MULTILINE):
        says[name] = " ".join(f"{first} {more}".split()).rstrip(".")
    return says


def _metavar(kind: Any) -> str:
    first = members(kind)[0]
    if get_origin(first) is Literal:
        return "{" + ",".join(get_args(first)) + "}"
    return {int: "N", float: "X", bool: "{true,false}", str: "TEXT"}[first]
