"""Read and write YAML of plain values: recipes and configurations."""

import re
from pathlib import Path
from typing import Any

from tammes.lab.config.expressions import short
from tammes.optional import require

_NUMBER = (
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)
"""Reads 5e-4 as a number, unlike YAML 1.1, and quotes text that looks like one when writing."""


def read_yaml(path: Path) -> Any:
    """Read a YAML file and reject duplicate keys; a ValueError begins with the path."""
    yaml = require("yaml", extra="lab")

    class Strict(yaml.SafeLoader):  # type: ignore[name-defined]
        pass

    def table(loader: Any, node: Any) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                # Keys merged by << may be overridden.
                continue
            key = loader.construct_object(key_node, deep=True)
            if not isinstance(key, str | int | float):
                raise ValueError(f"a key of a table is expected to be text, got {key!r}")
            if str(key) in seen:
                raise ValueError(f"the key {key!r} appears twice in a table")
            seen.add(str(key))
        loader.flatten_mapping(node)
        return {
            loader.construct_object(key_node, deep=True): loader.construct_object(value, deep=True)
            for key_node, value in node.value
        }

    Strict.add_implicit_resolver(*_NUMBER)
    # Keep dates as text.
    Strict.add_constructor("tag:yaml.org,2002:timestamp", Strict.construct_yaml_str)
    Strict.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, table)
    try:
        return Strict(path.read_text(encoding="utf-8")).get_single_data()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not YAML (it is not text)") from None
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = short(getattr(error, "problem", None) or str(error))
        raise ValueError(f"{path}: not YAML ({problem}{place})") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def write_yaml(values: dict[str, Any]) -> str:
    """Write plain values as YAML from which :func:`read_yaml` restores them."""
    yaml = require("yaml", extra="lab")

    class Dumper(yaml.SafeDumper):  # type: ignore[name-defined]
        pass

    Dumper.add_implicit_resolver(*_NUMBER)
    # Some unprintable characters count as line breaks, so they have to be escaped.
    plain = all(value.isprintable() for value in values.values() if isinstance(value, str))
    text: str = yaml.dump(values, Dumper=Dumper, sort_keys=False, allow_unicode=plain, width=100)
    return text
