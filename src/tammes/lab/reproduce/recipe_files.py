"""Find recipes by name, and merge a recipe with the one it is ``like``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tammes.lab.config.expressions import did_you_mean
from tammes.lab.config.typecheck import as_table, fit
from tammes.lab.config.yaml_file import read_yaml

_HERE = Path(__file__).parent / "recipes"
_INHERITED = ("config", "settings", "quick")
"""Tables that are merged key by key."""


class RecipeError(ValueError):
    """Error in a recipe, or no such recipe; the message is one sentence."""


def names() -> list[str]:
    """Return the names of all recipes.

    Example:
        >>> "kobayashi2019/table2" in names()
        True
    """
    return sorted(str(file.relative_to(_HERE).with_suffix("")) for file in _HERE.rglob("*.yaml"))


def find_recipe(name: str | Path) -> tuple[Path, str]:
    """Return the file and the name of a recipe, given its name or a path that ends in ``.yaml``."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        # The relative path is the name: files of one name in two folders are two recipes.
        inside = not path.is_absolute() and ".." not in path.parts
        return path, path.with_suffix("").as_posix() if inside else path.stem
    if str(name) not in names():
        hint = did_you_mean(str(name), names()) or "; `tammes reproduce` lists them"
        raise RecipeError(f"there is no recipe {str(name)!r}{hint}")
    return _HERE / f"{name}.yaml", str(name)


def inherit(
    values: Mapping[str, Any], folder: Path, before: tuple[Path, ...] = ()
) -> Mapping[str, Any]:
    """Merge the values of a recipe with those of the recipe it is ``like``.

    Configuration, settings, quick form and protocol are inherited. ``null`` removes a key, and a
    protocol line with nothing but ``what`` removes that line. A relative path in ``like`` refers to
    ``folder``; ``before`` are the files followed so far, to detect cycles.
    """
    own = dict(values)
    name = own.pop("like", None)
    if name is None:
        return own
    if not isinstance(name, str):
        raise ValueError(f"like is expected to be the name of a recipe, got {name!r}")
    path, title = find_recipe(folder / name if name.endswith((".yaml", ".yml")) else name)
    if path in before:
        circle = ", ".join(each.name for each in (*before, path))
        raise ValueError(f"like has a cycle: {circle}")
    try:
        other_values = as_table(read_yaml(path), "the recipe")
        other = inherit(other_values, path.parent, (*before, path))
        for key in _INHERITED:
            own[key] = _merged(key, other, own)
        own["protocol"] = _lines(other, own)
    except ValueError as error:
        raise ValueError(f"like {title}: {error}") from error
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


def _by_what(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    lines: dict[str, dict[str, Any]] = {}
    for line in fit(values.get("protocol", []), list[Mapping[str, Any]], "protocol"):
        what = line.get("what")
        if not isinstance(what, str) or what in lines:
            raise ValueError(
                f"each line of the protocol is expected to have its what, got {what!r}"
            )
        lines[what] = line
    return lines
