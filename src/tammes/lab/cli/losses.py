"""``tammes losses``: every loss with its formula, settings, heads and source.

All of it is taken from the builders: what they do, their defaults and their docstrings.
"""

import argparse
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import tammes
from tammes import losses
from tammes.advise.feasibility import builder
from tammes.advise.text import WIDTH, paragraph
from tammes.lab.cli.latex_to_text import docstring, first_formula
from tammes.losses.subspace import direct_sum, spectral_sum
from tammes.terms import Definition, Term

NOTATION = (
    "y the label, a_c similarities and f_c = s a_c scores with scale s, θ the angle to the own "
    "prototype, Λ = log Σ_{c≠y} e^{f_c} over the other classes, f̄ the mean of their scores."
)

_SUMS: dict[str, Callable[..., Any]] = {"direct_sum": direct_sum, "spectral_sum": spectral_sum}

_HEADS: dict[str, Callable[[], tammes.Head]] = {
    "LinearHead": lambda: tammes.LinearHead(4, 3),
    "LinearHead(bias=False)": lambda: tammes.LinearHead(4, 3, bias=False),
    "CosineHead": lambda: tammes.CosineHead(4, 3),
    "CosineHead(normalize_features=False)": lambda: tammes.CosineHead(
        4, 3, normalize_features=False
    ),
    "GaussianHead": lambda: tammes.GaussianHead(4, 3),
    "SimplexHead": lambda: tammes.SimplexHead(4, 3),
}


@dataclass(frozen=True)
class Entry:
    """What there is to know of a loss.

    Attributes:
        name: of the builder.
        summary: first line of its docstring.
        formula: first formula of its docstring, in plain text.
        settings: every setting that has a default, with it.
        required: settings without one.
        on: what it is computed from: ``"split"``, ``"prototypes"``, ``"features"``, or ``"losses"``
            for a sum of two.
        heads: heads it works on.
        dense: whether it needs all scores in memory.
        criterion: the ready-made class, or nothing.
        source: its references.
    """

    name: str
    summary: str
    formula: str
    settings: dict[str, Any]
    required: list[str]
    on: str
    heads: list[str]
    dense: bool
    criterion: str
    source: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return asdict(self)


def _find(name: str) -> Callable[..., Any]:
    """A builder, or one of the two sums, by a name that may be written as that of its class."""
    wanted = name.strip().lower().replace("_", "").replace("-", "")
    for known, function in _SUMS.items():
        if wanted == known.replace("_", ""):
            return function
    return builder(name)


def entry(name: str) -> Entry:
    """What there is to know of one loss.

    Args:
        name: of its builder, or of its ready-made criterion.

    Example:
        >>> entry("CosFace").settings
        {'margin': 0.35}
    """
    function = _find(name)
    text = inspect.getdoc(function) or ""
    definition: Definition | None = getattr(function, "definition", None)
    parameters = inspect.signature(function).parameters.values()
    references = re.search(r"^References:\n(.*)", text, re.DOTALL | re.MULTILINE)
    return Entry(
        name=function.__name__,
        summary=text.split("\n", 1)[0],
        formula=first_formula(text),
        settings={p.name: p.default for p in parameters if p.default is not p.empty},
        required=[p.name for p in parameters if p.default is p.empty],
        on="losses" if definition is None else definition.on,
        heads=[*_HEADS] if definition is None else _heads(function),
        dense=definition is not None and "rest" in definition.reads,
        criterion=_criterion(function.__name__),
        source=[] if references is None else _references(references[1]),
    )


def entries() -> Iterator[Entry]:
    """Every loss, and the two sums."""
    for name in (*losses.__all__, *_SUMS):
        yield entry(name)


def _heads(build: Callable[..., Term]) -> list[str]:
    """Heads that a criterion accepts for a loss, found by trying."""
    required = [
        p.name for p in inspect.signature(build).parameters.values() if p.default is p.empty
    ]
    term = build(**dict.fromkeys(required, (1.0, 1.0, 1.0)))
    found = []
    for name, make in _HEADS.items():
        try:
            tammes.Criterion(make(), term)
        except ValueError:
            continue
        found.append(name)
    return found


def _criterion(name: str) -> str:
    plain = name.replace("_", "")
    classes = (value for value in tammes.__all__ if inspect.isclass(getattr(tammes, value, None)))
    return next((known for known in classes if known.lower() == plain), "")


def _references(text: str) -> list[str]:
    """One string for each reference: a line that does not go on the one before."""
    joined = re.sub(r"(?<!\.)\n\s*", " ", inspect.cleandoc(text))
    return [line.strip() for line in joined.splitlines() if line.strip()]


def _call(found: Entry) -> str:
    settings = (*found.required, *(f"{key}={value!r}" for key, value in found.settings.items()))
    return f"{found.name}({', '.join(settings)})"


def _where(found: Entry) -> str:
    if found.on in ("prototypes", "features"):
        return f"any; computed from the {found.on}"
    if len(found.heads) == len(_HEADS):
        return "any"
    return ", ".join(found.heads)


def listing() -> str:
    """Every loss, some lines each."""
    blocks = [textwrap.fill(NOTATION, WIDTH)]
    for found in entries():
        lines = [_call(found), f"  {found.summary}", paragraph("formula", found.formula, 12)]
        heads = _where(found) + ("; needs all scores in memory" if found.dense else "")
        lines.append(paragraph("heads", heads, 12))
        lines.append(paragraph("source", " ".join(found.source), 12))
        blocks.append("\n".join(lines))
    blocks.append(
        "`tammes losses NAME` has more, `--plot FILE` draws it, `--json` is for programs."
    )
    return "\n\n".join(blocks)


def description(name: str) -> str:
    """One loss: its docstring as plain text, and what a user has to know to build it."""
    found = entry(name)
    text = inspect.getdoc(_find(name)) or ""
    lines = [f"tammes.{_call(found)}", ""]
    lines += docstring(text)
    lines += ["", paragraph("heads", _where(found), 12)]
    if found.criterion:
        ready = f"tammes.{found.criterion}(embedding_size, num_classes, ...)"
        lines.append(paragraph("criterion", ready, 12))
    if found.dense:
        lines.append(paragraph("memory", "needs all scores at once", 12))
    lines.append(paragraph("notation", NOTATION, 12))
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what ``tammes losses`` takes to a parser."""
    parser.description = "List every loss, or show one of them."
    parser.add_argument("name", nargs="?", default=None, metavar="NAME", help="one loss, all of it")
    parser.add_argument("--json", action="store_true", help="print JSON in place of text")
    parser.add_argument(
        "--plot",
        metavar="FILE",
        default=None,
        help="draw psi(theta), loss and gradient of NAME into a .png, .svg, .pdf or .html",
    )


def run(arguments: argparse.Namespace) -> int:
    """Do what ``tammes losses`` is asked to.

    Args:
        arguments: parsed with :func:`add_arguments`.

    Returns:
        The exit code.
    """
    name = arguments.name
    if arguments.plot is not None:
        if name is None:
            raise ValueError("--plot expects the name of a loss")
        known = entry(name).name
        from tammes.lab.report.charts.gallery import plot_loss

        plot_loss(known, arguments.plot)
        print(arguments.plot)
    elif arguments.json:
        found = [each.to_dict() for each in entries()] if name is None else entry(name).to_dict()
        print(json.dumps(found, indent=2, ensure_ascii=False, allow_nan=False))
    else:
        print(listing() if name is None else description(name))
    return 0
