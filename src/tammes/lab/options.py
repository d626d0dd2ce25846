"""The configuration as flags and YAML: ``--config run.yaml --lr 0.05``; a flag beats the file.

Flags are plain argparse, so that every command has the same help and the same errors. Types and
YAML are read by jsonargparse, which is imported only when there is a configuration to read.
"""

import argparse
import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tammes.lab.config import Config
from tammes.lab.expression.syntax import did_you_mean, short
from tammes.optional import require

_PREFIX = "config_"
"""Before the names of fields among the parsed arguments, so that a command's own do not clash."""


def add_config(parser: argparse.ArgumentParser, *, leave_out: Sequence[str] = ()) -> None:
    """Add ``--config``, ``--print_config`` and a flag for each field of :class:`.Config`.

    Args:
        parser: of a command.
        leave_out: fields that the command sets itself.
    """
    group = parser.add_argument_group(
        "configuration",
        "Each is a line of YAML too; what a flag says comes before what the file says.",
    )
    group.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="FILE",
        help="YAML with any of the fields below; of several files the later ones count more",
    )
    group.add_argument(
        "--print_config",
        "--print-config",
        action="store_true",
        help="print the whole configuration as YAML and stop",
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
    """The configuration that flags and files say.

    Args:
        arguments: parsed by a parser that :func:`add_config` was called with.
        **defaults: of a command, where they differ from those of :class:`.Config`.

    Returns:
        The configuration. With ``--print_config`` it is printed, and the program ends.

    Raises:
        ValueError: with a sentence that names the file or the field.
    """
    given = {
        key.removeprefix(_PREFIX): value
        for key, value in vars(arguments).items()
        if key.startswith(_PREFIX)
    }
    values = dict(defaults)
    for path in arguments.config:
        values |= read_file(path)
    values |= _typed(given)
    config = Config.from_dict(values)
    if arguments.print_config:
        print(to_yaml(config), end="")
        raise SystemExit(0)
    return config


def read_file(path: str) -> dict[str, Any]:
    """What a YAML file says of the configuration, with its types checked.

    Args:
        path: of the file.

    Raises:
        ValueError: with a sentence that names the file.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not YAML (it is no text)") from None
    if not re.sub(r"(?m)^\s*(#.*)?$|^---$", "", text).strip():
        return {}
    parser = _parser()
    try:
        found = parser.parse_string(text, defaults=False)
    except Exception as error:
        raise ValueError(f"{path}: {_sentence(error)}") from None
    return _plain(found)


def to_yaml(config: Config) -> str:
    """A configuration as YAML that :func:`read_file` takes."""
    yaml = require("yaml", extra="lab")
    values = config.to_dict()
    # Some signs that are not printable count as ends of lines; they have to be written by number.
    plain = all(value.isprintable() for value in values.values() if isinstance(value, str))
    text: str = yaml.safe_dump(values, sort_keys=False, allow_unicode=plain, width=100)
    return text


def field_help() -> dict[str, str]:
    """What the docstring of :class:`.Config` says of each field, in one line each.

    Example:
        >>> field_help()["epochs"]
        'how long to train'
    """
    _, _, text = inspect.getdoc(Config).partition("Args:\n")  # type: ignore[union-attr]
    says: dict[str, str] = {}
    for name, first, more in re.findall(r"^    (\w+): (.*)((?:\n {8}.*)*)", text, re.MULTILINE):
        says[name] = " ".join(f"{first} {more}".split()).rstrip(".")
    return says


def type_name(kind: Any) -> str:
    """The type of a field in words.

    Example:
        >>> type_name(int | None)
        'a whole number or null'
    """
    parts = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    return " or ".join(_words(part) for part in parts)


def _words(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        *most, last = typing.get_args(kind)
        return f"{', '.join(most)} or {last}"
    known = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        types.NoneType: "null",
    }
    return known[kind]


def _metavar(kind: Any) -> str:
    first = typing.get_args(kind)[0] if isinstance(kind, types.UnionType) else kind
    if typing.get_origin(first) is typing.Literal:
        return "{" + ",".join(typing.get_args(first)) + "}"
    return {int: "N", float: "X", bool: "{true,false}", str: "TEXT"}[first]


def _parser() -> Any:
    """A parser of jsonargparse that knows the fields, and raises in place of exiting."""
    jsonargparse = require("jsonargparse", extra="lab")
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Config)
    return parser


def _typed(given: dict[str, str]) -> dict[str, Any]:
    """Values of flags as the types of their fields."""
    if not given:
        return {}
    parser = _parser()
    try:
        found = parser.parse_args([f"--{k}={v}" for k, v in given.items()], defaults=False)
    except Exception as error:
        raise ValueError(f"--{_sentence(error)}") from None
    return _plain(found)


def _plain(found: Any) -> dict[str, Any]:
    values: dict[str, Any] = found.as_dict()
    return values


def _sentence(error: Exception) -> str:
    """What jsonargparse says, in the words of the house."""
    fields = {field.name: field for field in dataclasses.fields(Config)}
    text = " ".join(str(error).split())
    unknown = re.search(r"Option '([^']*)' is not accepted", text)
    if unknown:
        return f"a configuration has no {unknown[1]!r}{did_you_mean(unknown[1], fields)}"
    wrong = re.search(r'key "(\w+)":.*(?:Got|Given) value: (.*)$', text)
    if wrong and wrong[1] in fields:
        kind = type_name(fields[wrong[1]].type)
        return f"{wrong[1]} is expected to be {kind}, got {short(wrong[2])}"
    broken = re.search(r"Problems parsing config: (.*)", text)
    if broken:
        return f"not YAML ({short(re.sub(' in .<unicode string>.', '', broken[1]))})"
    if "Unexpected config" in text:
        return "lines such as lr: 0.1 are expected"
    return short(text)
