"""The command ``tammes reproduce``."""

import argparse
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from tammes.lab.cli.arguments import add_argument, seeds
from tammes.lab.cli.report import write_figures
from tammes.lab.config.expressions import did_you_mean
from tammes.lab.data.sources.loading import KNOWN, say
from tammes.lab.report.pages.reproduction_page import reproduction_figures, reproduction_page
from tammes.lab.report.paper_comparison import PaperComparison
from tammes.lab.report.paper_comparison_writers import print_table
from tammes.lab.report.render.html_page import write
from tammes.lab.report.verdicts import as_text, verdict_on_reproduction
from tammes.lab.reproduce import recipes
from tammes.lab.reproduce.ledger import Entry, Ledger
from tammes.lab.reproduce.recipes import Recipe
from tammes.lab.reproduce.run import RunnerSettings, Selection, reproduce, with_local_data


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tammes reproduce`` to a parser."""
    parser.description = (
        "Reproduce tables and figures of the papers, and show the results next to the published "
        "numbers. Without a name, list all recipes. Repeating the command resumes an interrupted "
        "reproduction and runs only the cells that are missing. The exit code is 1 if some still "
        "are."
    )
    add = partial(add_argument, parser)
    own = "recipe such as kobayashi2019/table2, or your own YAML file"
    add("recipes RECIPE", own, nargs="*")
    add("--rows NAMES", "only these rows, separated by commas")
    add(
        "--columns NAMES",
        "only these columns, separated by commas; columns with large data run only if named",
    )
    add("--seeds N", "number of seeds, or a list: 0,1,5 [as in the recipe]", type=seeds)
    add(
        "--data PLACE",
        "folder of data sets under their short names, or the folder of one data set: "
        "cifar10=FOLDER; may be repeated [$TAMMES_DATA, or the Hugging Face hub]",
        [],
        action="append",
    )
    add("--out DIR", "directory of ledgers, runs and pages [reproductions]", "reproductions")
    add(
        "--quick",
        "smoke test with few images, narrow networks and two epochs; its numbers mean nothing",
    )
    add("--plan", "list the cells that are done and open, and exit")
    engine = "run cells in processes on this machine, or on a Ray cluster [local]"
    add("--engine", engine, "local", choices=("local", "ray"))
    add(
        "--address HOST:PORT",
        "address of a Ray cluster; without one, a cluster is started on this machine",
    )
    parallel = "number of concurrent cells; by default one per core, or six per GPU"
    add("--parallel N", parallel, type=int)
    add("--retries N", "retries of a cell whose process was killed [2]", 2)
    add("--retry-failed", "retry cells whose loss was not finite")
    add("--figures DIR", "also write every chart as PNG and SVG to this directory")


def run(arguments: argparse.Namespace) -> int:
    """Run ``tammes reproduce``; return 0, 1 if cells are missing, 130 if it was interrupted."""
    if not arguments.recipes:
        print(listing())
        return 0
    _check(arguments)
    rows, columns = _names(arguments.rows), _names(arguments.columns)
    selections = [
        Selection(recipes.load(name), rows, columns, arguments.seeds)
        for name in dict.fromkeys(arguments.recipes)
    ]
    for selection in selections:
        _check_cells(selection)
    sources = _sources(arguments.data)
    out = Path(arguments.out)
    if arguments.plan:
        for selection in selections:
            path = _path(out, selection.recipe, arguments.quick)
            print(_plan(selection, path, arguments.quick, sources))
        return 0
    engine = RunnerSettings(
        arguments.engine, arguments.address, arguments.parallel, arguments.retries
    )
    try:
        ledgers = reproduce(
            selections,
            out,
            quick=arguments.quick,
            sources=sources,
            engine=engine,
            retry_failed=arguments.retry_failed,
        )
    except KeyboardInterrupt:
        say("interrupted; repeat the command to resume")
        return 130
    complete = True
    for selection, ledger in zip(selections, ledgers, strict=True):
        _show(selection.recipe, ledger, out, arguments)
        states = _states(selection, ledger, arguments.quick, sources)
        complete &= not any(_is_open(entry) for entry in states.values())
    return 0 if complete else 1


def listing() -> str:
    """List all recipes with their titles, sources and sizes."""
    lines = []
    for name in recipes.names():
        recipe = recipes.load(name)
        count = len([*recipe.places()]) * recipe.seeds
        lines.append(f"{name:<26}{recipe.title}")
        where = ", ".join(
            f"{column.name} (on request)" if column.on_request else column.name
            for column in recipe.columns.values()
        )
        about = f"{count} runs: {len(recipe.rows)} rows; {where}" if recipe.rows else "no runs"
        lines.append(f"{'':<26}{recipe.source}; {about}")
    return "\n".join([*lines, "", "`tammes reproduce NAME` runs the missing cells of one."])


def _show(recipe: Recipe, ledger: Ledger, out: Path, arguments: argparse.Namespace) -> None:
    """Print the table of a recipe and write its page."""
    print(print_table(recipe, ledger), flush=True)
    found = verdict_on_reproduction(PaperComparison(recipe, ledger))
    print(f"\n{as_text(found, width=120)}", flush=True)
    page = _path(out, recipe, arguments.quick).with_suffix(".html")
    write(page, reproduction_page(recipe, ledger))
    print(f"\n  page: {page.resolve()}")
    if arguments.figures is not None:
        folder = Path(arguments.figures) / recipe.name
        count = write_figures(reproduction_figures(recipe, ledger), folder)
        print(f"  figures: {count} as PNG and SVG in {folder}")


def _states(
    selection: Selection, ledger: Ledger, quick: bool, sources: Mapping[str, str]
) -> dict[tuple[str, str, int], Entry | None]:
    """Return the entries of all selected cells, by row, column and seed."""
    recipe, rows, columns = selection.recipe, selection.rows, selection.columns
    which = recipe.seed_numbers(selection.seeds, quick=quick)
    states: dict[tuple[str, str, int], Entry | None] = {
        (*place, seed): None for place in recipe.places(rows, columns) for seed in which
    }
    tuned = ledger.tuned_settings(recipe)
    for cell in recipe.planned(rows, columns, selection.seeds, quick=quick, tuned=tuned):
        states[*cell.place, cell.seed] = ledger.find(with_local_data(cell, sources))
    return states


def _is_open(entry: Entry | None) -> bool:
    """Whether a cell has no result yet."""
    return entry is None or entry.status == "failed"


def _plan(selection: Selection, path: Path, quick: bool, sources: Mapping[str, str]) -> str:
    """List the done and open cells of a recipe."""
    recipe = selection.recipe
    ledger = Ledger.at(path, recipe, quick=quick)
    states = _states(selection, ledger, quick, sources)
    lines = [f"{recipe.name}: {recipe.title}"]
    seconds = [entry.seconds for entry in ledger.cells if entry.status == "done"]
    for (row, column, seed), entry in states.items():
        state = "open" if entry is None else f"{entry.status}, {entry.seconds:.0f} s"
        lines.append(f"  {row}, {column}, seed {seed}: {state}")
    tuned = ledger.tuned_settings(recipe)
    trials = {
        trial.folder
        for place in recipe.places(selection.rows, selection.columns)
        if place not in tuned
        for trial in recipe.trials(*place)
    }
    missing = sum(map(_is_open, states.values()))
    known = f"; a cell took {sum(seconds) / len(seconds):.0f} s" if seconds else ""
    tried = f", and {len(trials)} tuning runs" if trials else ""
    return "\n".join([*lines, f"  {missing} of {len(states)} cells are open{tried}{known}"])


def _path(out: Path, recipe: Recipe, quick: bool) -> Path:
    return out / ("quick" if quick else "") / f"{recipe.name}.json"


def _check(arguments: argparse.Namespace) -> None:
    several = len(set(arguments.recipes)) > 1
    for flag in ("rows", "columns"):
        if several and getattr(arguments, flag) is not None:
            raise ValueError(f"--{flag} is for one recipe, got {len(set(arguments.recipes))}")
    if arguments.address is not None and arguments.engine != "ray":
        raise ValueError("--address is the address of a Ray cluster and expects --engine ray")
    if arguments.parallel is not None and arguments.parallel < 1:
        raise ValueError(f"--parallel is expected to be at least 1, got {arguments.parallel}")
    if arguments.retries < 0:
        raise ValueError(f"--retries is expected to be at least 0, got {arguments.retries}")


def _check_cells(selection: Selection) -> None:
    """Reject a selection of rows and columns without a single cell."""
    recipe = selection.recipe
    if recipe.rows and not [*recipe.places(selection.rows, selection.columns)]:
        named = ",".join(recipe.columns)
        hint = f"; try --columns {named}" if selection.columns is None else ""
        raise ValueError(f"{recipe.name} has no cell in these rows and columns{hint}")


def _sources(texts: Sequence[str]) -> dict[str, str]:
    """Return folders of data sets by name; a folder without a name becomes ``$TAMMES_DATA``."""
    places: dict[str, str] = {}
    for text in texts:
        name, sign, place = text.partition("=")
        if sign and not place:
            raise ValueError(f"--data expects a folder or NAME=FOLDER, got {text!r}")
        if not sign:
            if not Path(text).expanduser().is_dir():
                raise ValueError(f"--data expects a folder or NAME=FOLDER, got {text!r}")
            os.environ["TAMMES_DATA"] = str(Path(text).expanduser().resolve())
            continue
        if name not in KNOWN:
            raise ValueError(f"--data: there is no data set {name!r}{did_you_mean(name, KNOWN)}")
        places[name] = place
    return places


def _names(text: str | None) -> list[str] | None:
    if text is None:
        return None
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ValueError(f"names separated by commas are expected, got {text!r}")
    return list(dict.fromkeys(names))
