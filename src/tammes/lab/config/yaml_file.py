"""Read YAML files of plain values: recipes and configurations."""

import re
from pathlib import Path
from typing import Any

from tammes.lab.config.expressions import short
from tammes.optional import require


def read_yaml(path: Path) -> Any:
    """Read a YAML file; duplicate keys are rejected.

    Raises:
        ValueError: the file cannot be read or parsed; the message begins with the path.
    """
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

    # Read 5e-4 as a number, unlike YAML 1.1; keep dates as text.
    number = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
    Strict.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
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
