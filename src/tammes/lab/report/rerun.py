"""Sections on settings, data and machines, and the commands that repeat the runs."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from tammes.lab.config.schema import Config
from tammes.lab.config.yaml_file import write_yaml
from tammes.lab.records.run_folder import Run, read_each
from tammes.lab.report.load_runs import LoadedRuns
from tammes.lab.report.render.html_page import Block, Cell, Details, Fold, Table, Text, Value
from tammes.lab.stats.seed_groups import Group

_ENVIRONMENT = ("tammes", "commit", "torch", "python", "platform", "device", "threads",
                "world_size", "started")  # fmt: skip
_DEFAULTS = Config().to_dict()


def configuration(loaded: LoadedRuns) -> list[Block]:
    """Show the settings that all groups share, and a table of those that differ."""
    configs = [_resolved(group) for group in loaded.groups]
    keys = [key for key in configs[0] if key not in ("seed", "name")]
    differ = [key for key in keys if len({repr(config[key]) for config in configs}) > 1]
    common = {key: configs[0][key] for key in keys if key not in differ}
    blocks: list[Block] = []
    labels = [group.label for group in loaded.groups]
    if differ == ["loss"]:
        blocks.append(Text("The groups differ only in their loss."))
    elif differ:
        rows: list[list[Cell]] = [
            [Value(label, color=place), *(_shown(config[key]) for key in differ)]
            for place, (label, config) in enumerate(zip(labels, configs, strict=True))
        ]
        blocks.append(
            Table(["group", *differ], rows, caption="Settings that differ between the groups.")
        )
    summary = "Settings" if len(configs) == 1 else "Settings that all groups share"
    blocks.append(Details(f"{summary} (YAML, for --config)", write_yaml(common)))
    return blocks


def _resolved(group: Group) -> dict[str, Any]:
    """Return the settings of a group, with ``auto`` resolved from its record."""
    values = group.config.to_dict()
    recorded = [*read_each(group.every[:1], "environment")]
    for key in (key for key, value in values.items() if value == "auto"):
        for _, found in recorded:
            known = found.get(key)
            known = known.get("name") if isinstance(known, Mapping) else known
            values[key] = known if isinstance(known, str) else "auto"
    return values


def _shown(value: Any) -> str:
    return "" if value is None else str(value)


def data_and_machines(loaded: LoadedRuns) -> list[Block]:
    """Show the data and the machines."""
    rows = [*_of_data(loaded.runs), *_of_machines(loaded.runs)]
    return [Fold("Data and machines", [Table(("what", "value"), rows)])] if rows else []


def _of_data(runs: Sequence[Run]) -> list[tuple[str, str]]:
    found = [data for _, data in read_each(runs, "data")]
    rows = [
        (words, ", ".join(dict.fromkeys(_shown(each.get(key)) for each in found if key in each)))
        for key, words in (
            ("source", "data"), ("test_source", "test data"), ("train", "training images"),
            ("validation", "validation images"), ("test", "test images"),
            ("image", "channels, height, width"), ("mean", "mean"), ("std", "deviation"),
            ("digest", "digest"),
        )
    ]  # fmt: skip
    return [(words, text) for words, text in rows if text]


def _of_machines(runs: Sequence[Run]) -> list[tuple[str, str]]:
    found = [around for _, around in read_each(runs, "environment")]
    rows = []
    for key in _ENVIRONMENT:
        values = dict.fromkeys(_shown(each[key]) for each in found if each.get(key) is not None)
        if values:
            shown = list(values)
            several = f"{shown[0]} to {shown[-1]}" if key == "started" else ", ".join(shown)
            rows.append((key.replace("_", " "), several if len(shown) > 1 else shown[0]))
    backbones = [each["backbone"] for each in found if isinstance(each.get("backbone"), Mapping)]
    for text in dict.fromkeys(
        f"{each.get('name')}, {each.get('parameters'):,} parameters"
        for each in backbones
        if isinstance(each.get("parameters"), int)
    ):
        rows.append(("backbone", text))
    return rows


def rerun(loaded: LoadedRuns, command: str | None) -> list[Block]:
    """Show every command once: those that were typed, and one that trains each group."""
    known = read_each(loaded.runs, "environment")
    typed = [str(each["command"]) for _, each in known if each.get("command")]
    # The command of a single training is among those of the groups below.
    whole = dict.fromkeys(text for text in typed if not text.startswith("tammes train "))
    seed, lines = attrgetter("seed"), []
    for group in loaded.groups:
        own = sorted((run.config for run in group.every), key=seed)
        seeds = ", ".join(map(str, dict.fromkeys(map(seed, own))))
        some = f"seeds {seeds}" if len(own) > 1 else f"seed {seeds}"
        lines.append(f"# {group.label}, {some}\n{train_command(own[0])}")
    count = f"{len(lines)} {'command' if len(lines) == 1 else 'commands'}"
    return [
        Text(
            "A command for the first seed of each group; --seed gives the others. On the same "
            "machine with the same versions it gives the same numbers. Settings that are not "
            "listed have their defaults."
        ),
        *_folded("As it was run", dict.fromkeys([*whole, *([command] if command else [])])),
        *_folded(count, lines),
    ]


def _folded(summary: str, commands: Iterable[str]) -> list[Block]:
    text = "\n\n".join(commands)
    return [Details(summary, text)] if text else []


def train_command(config: Config) -> str:
    """Return the command that trains with a configuration, without settings at their defaults.

    Example:
        >>> train_command(Config(loss="cosface(margin=0.2)", seed=3))
        "tammes train --loss 'cosface(margin=0.2)' --seed 3"
    """
    words = ["tammes", "train"]
    for key, value in config.to_dict().items():
        if value == _DEFAULTS[key] or value is None:
            continue
        text = str(value).lower() if isinstance(value, bool) else str(value)
        # A value that starts with a dash would be parsed as a flag.
        words += [f"--{key}={text}"] if text.startswith("-") else [f"--{key}", text]
    return shlex.join(words)
