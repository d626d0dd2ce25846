"""Recipes as YAML files: found by name, and what one of them takes over from another."""

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tammes.lab.expression.syntax import did_you_mean
from tammes.optional import require

_HERE = Path(__file__).parent
_TAKEN = ("config", "settings", "quick")
"""Tables that a recipe shares with the one it is like, name by name."""


class RecipeError(ValueError):
    """A recipe is not there, or is not one; the message is one sentence."""


def names() -> list[str]:
    """Names of all recipes.

    Example:
        >>> "kobayashi2019/table2" in names()
        True
    """
    return sorted(str(file.relative_to(_HERE).with_suffix("")) for file in _HERE.rglob("*.yaml"))


def find(name: str | Path) -> tuple[Path, str]:
    """The file of a recipe, and how it is called.

    Args:
        name: such as ``kobayashi2019/table2``, or a path that ends in ``.yaml``.
    """
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        # Two files of one name in different folders are two recipes.
        inside = not path.is_absolute() and ".." not in path.parts
        return path, path.with_suffix("").as_posix() if inside else path.stem
    if str(name) not in names():
        near = difflib.get_close_matches(str(name), names(), n=1)
        hint = f"did you mean {near[0]}?" if near else "`tammes reproduce` lists them"
        raise RecipeError(f"there is no recipe {str(name)!r}; {hint}")
    return _HERE / f"{name}.yaml", str(name)


def values_of(path: Path) -> Any:
    """What a file says.

    Raises:
        RecipeError: it is not there, or no text.
        ValueError: it is not YAML that a recipe can be.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: {getattr(error, 'strerror', None) or 'not text'}") from None
    return _yaml(text)


def as_table(given: Any, what: str) -> dict[str, Any]:
    """Names and values, or a sentence about what should have them."""
    if not isinstance(given, Mapping):
        raise ValueError(f"{what} is expected to be a table of names and values, got {given!r}")
    return {str(key): value for key, value in given.items()}


def start_from(
    given: Mapping[str, Any], folder: Path, before: tuple[Path, ...] = ()
) -> Mapping[str, Any]:
    """What a recipe says, with what it takes over from the one it is ``like``.

    That is, where it says nothing else: configuration, settings, what is quick, and lines of the
    protocol. ``null`` leaves a name out, and a line with nothing but its ``what`` a line.

    Args:
        given: what the recipe says itself.
        folder: where a file that it is like is looked for.
        before: files that led here.
    """
    own = dict(given)
    name = own.pop("like", None)
    if name is None:
        return own
    if not isinstance(name, str):
        raise ValueError(f"like is expected to be the name of a recipe, got {name!r}")
    path, title = find(folder / name if name.endswith((".yaml", ".yml")) else name)
    if path in before:
        circle = ", ".join(each.name for each in (*before, path))
        raise ValueError(f"like goes round in a circle: {circle}")
    try:
        said = as_table(values_of(path), "a recipe")
        other = start_from(said, path.parent, (*before, path))
        for key in _TAKEN:
            own[key] = _merged(key, other, own)
        own["protocol"] = _lines(other, own)
    except RecipeError:
        raise
    except ValueError as error:
        raise RecipeError(f"like {title}: {error}") from error
    return own


def _merged(key: str, other: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    theirs, mine = as_table(other.get(key, {}), key), as_table(own.get(key, {}), key)
    for each, value in mine.items():
        if value is None and each not in theirs:
            raise ValueError(f"{key} has no {each!r} to leave out{did_you_mean(each, theirs)}")
    return {each: value for each, value in {**theirs, **mine}.items() if value is not None}


def _lines(other: Mapping[str, Any], own: Mapping[str, Any]) -> list[Any]:
    theirs, mine = _by_what(other), _by_what(own)
    for what, line in mine.items():
        if [*line] == ["what"] and what not in theirs:
            raise ValueError(f"protocol has no {what!r} to leave out{did_you_mean(what, theirs)}")
    return [line for line in {**theirs, **mine}.values() if [*line] != ["what"]]


def _by_what(given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    lines = given.get("protocol", [])
    if not isinstance(lines, list):
        raise ValueError(f"protocol is expected to be a list, got {lines!r}")
    found: dict[str, dict[str, Any]] = {}
    for line in (as_table(each, "a line of the protocol") for each in lines):
        what = line.get("what")
        if not isinstance(what, str) or what in found:
            raise ValueError(
                f"each line of the protocol is expected to have its what, got {what!r}"
            )
        found[what] = line
    return found


def _yaml(text: str) -> Any:
    """What YAML says, where no name stands twice in a table."""
    yaml = require("yaml", extra="lab")

    class Strict(yaml.SafeLoader):  # type: ignore[name-defined]
        pass

    def table(loader: Any, node: Any) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                # What << takes over may be changed.
                continue
            key = loader.construct_object(key_node, deep=True)
            if not isinstance(key, str | int | float):
                raise ValueError(f"a name in a table is expected to be a text, got {key!r}")
            if str(key) in seen:
                raise ValueError(f"{key!r} stands twice in a table")
            seen.add(str(key))
        loader.flatten_mapping(node)
        return {
            loader.construct_object(key_node, deep=True): loader.construct_object(value, deep=True)
            for key_node, value in node.value
        }

    # As everywhere but in YAML 1.1, 5e-4 is a number.
    number = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
    Strict.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    Strict.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, table)
    try:
        return Strict(text).get_single_data()
    except (yaml.YAMLError, RecursionError) as error:
        said = " ".join(str(error).split())
        raise ValueError(f"not YAML that a recipe can be ({said[:200]})") from None
