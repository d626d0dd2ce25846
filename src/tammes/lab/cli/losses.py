"""``tammes losses``: every loss with its formula, settings, heads and references.

Everything is read from the builders: their signatures, docstrings and the heads they accept.
"""

import argparse
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import tammes
from tammes import losses
from tammes.advise.feasibility import builder
from tammes.advise.text import WIDTH, paragraph
from tammes.lab.cli.arguments import add_argument
from tammes.lab.cli.latex_to_text import docstring, first_formula
from tammes.lab.config.loss_expressions import SUMS
from tammes.losses.aliases import ALIASES
from tammes.terms import Definition, Term

NOTATION = (
    "y the label, a_c similarities and f_c = s a_c scores with scale s, θ the angle to the own "
    "prototype, Λ = log Σ_{c≠y} e^{f_c} over the other classes, f̄ the mean of their scores."
)

_HEADS: dict[str, Callable[[], tammes.Head]] = {
    "LinearHead": lambda: tammes.LinearHead(4, 3),
    "LinearHead(bias=False)": lambda: tammes.LinearHead(4, 3, bias=False),
    "CosineHead": lambda: tammes.CosineHead(4, 3),
    "CosineHead(normalize_features=False)": lambda: tammes.CosineHead(
        4, 3, normalize_features=False
    ),
    "GaussianHead": lambda: tammes.GaussianHead(4, 3),
    "DistanceHead": lambda: tammes.DistanceHead(4, 3),
    "SimplexHead": lambda: tammes.SimplexHead(4, 3),
}
_ADAPTIVE: dict[str, Callable[[], tammes.Head]] = {
    "CosineHead(scale='adaptive')": lambda: tammes.CosineHead(4, 3, scale="adaptive"),
    "SimplexHead(scale='adaptive')": lambda: tammes.SimplexHead(4, 3, scale="adaptive"),
}
"""Heads for losses that work with none of the others."""


@dataclass(frozen=True)
class LossInfo:
    """Description of a loss.

    Attributes:
        formula: first formula of its docstring, in plain text.
        settings: settings with a default, and their defaults.
        required: settings without a default.
        on: input of the loss: ``"split"``, ``"prototypes"``, ``"features"``, or ``"losses"`` for a
            sum of two.
        dense: whether it needs the whole logit matrix in memory.
        criterion: name of the ready-made criterion, or an empty string.
        also: other names of the same loss.
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
    also: list[str]


def _builder(name: str) -> Callable[..., Any]:
    """Find a builder or one of the two sums by its name, an alias or its criterion class."""
    wanted = name.strip().lower().replace("_", "").replace("-", "")
    for known, function in SUMS.items():
        if wanted == known.replace("_", ""):
            return function
    return builder(name)


def loss_info(name: str) -> LossInfo:
    """Describe a loss, by the name of its builder or of its ready-made criterion.

    Example:
        >>> loss_info("CosFace").settings
        {'margin': 0.35}
    """
    function = _builder(name)
    text = inspect.getdoc(function) or ""
    definition: Definition | None = getattr(function, "definition", None)
    parameters = inspect.signature(function).parameters.values()
    required = [p.name for p in parameters if p.default is p.empty]
    references = re.search(r"^References:\n(.*)", text, re.DOTALL | re.MULTILINE)
    return LossInfo(
        name=function.__name__,
        summary=text.split("\n", 1)[0],
        formula=first_formula(text),
        settings={p.name: p.default for p in parameters if p.default is not p.empty},
        required=required,
        on="losses" if definition is None else definition.on,
        heads=[*_HEADS] if definition is None else _heads(function, required),
        dense=definition is not None and "rest" in definition.reads,
        criterion=_criterion(function.__name__),
        source=[] if references is None else _references(references[1]),
        also=[
            other
            for other, build in ALIASES.items()
            if build is function and other != function.__name__
        ],
    )


def all_loss_info() -> Iterator[LossInfo]:
    """Describe every loss and the two sums."""
    for name in (*losses.__all__, *SUMS):
        yield loss_info(name)


def _heads(build: Callable[..., Term], required: list[str]) -> list[str]:
    """Return the heads that a criterion accepts for a loss, by trying each."""
    term = build(**dict.fromkeys(required, (1.0, 1.0, 1.0)))
    return _accepted(term, _HEADS) or _accepted(term, _ADAPTIVE)


def _accepted(term: Term, heads: dict[str, Callable[[], tammes.Head]]) -> list[str]:
    found = []
    for name, make in heads.items():
        try:
            tammes.Criterion(make(), term)
        except ValueError:
            continue
        found.append(name)
    return found


def _criterion(name: str) -> str:
    plain = name.replace("_", "")
    # Filter by name first: getattr on other names may import the lab.
    alike = (known for known in tammes.__all__ if known.lower() == plain)
    return next((known for known in alike if inspect.isclass(getattr(tammes, known))), "")


def _references(text: str) -> list[str]:
    """Split a section of references, joining continuation lines."""
    joined = re.sub(r"(?<!\.)\n\s*", " ", inspect.cleandoc(text))
    return [line.strip() for line in joined.splitlines() if line.strip()]


def _call(info: LossInfo) -> str:
    settings = (*info.required, *(f"{key}={value!r}" for key, value in info.settings.items()))
    return f"{info.name}({', '.join(settings)})"


def _heads_text(info: LossInfo) -> str:
    if info.on == "proxies":
        return "any; computed from the features and the prototypes"
    if info.on in ("prototypes", "features"):
        return f"any; computed from the {info.on}"
    if len(info.heads) == len(_HEADS):
        return "any"
    return ", ".join(info.heads)


def listing() -> str:
    """Format all losses, a few lines each."""
    blocks = [textwrap.fill(NOTATION, WIDTH)]
    for info in all_loss_info():
        lines = [_call(info), f"  {info.summary}", paragraph("formula", info.formula, 12)]
        heads = _heads_text(info) + ("; needs the whole logit matrix" if info.dense else "")
        lines.append(paragraph("heads", heads, 12))
        lines.append(paragraph("source", " ".join(info.source), 12))
        lines += [paragraph("also", ", ".join(info.also), 12)] if info.also else []
        blocks.append("\n".join(lines))
    blocks.append(
        "`tammes losses NAME` shows one in full, `--plot FILE` plots it, `--json` prints JSON."
    )
    return "\n\n".join(blocks)


def description(name: str) -> str:
    """Format one loss: its docstring as plain text, heads, criterion and notation."""
    info = loss_info(name)
    text = inspect.getdoc(_builder(name)) or ""
    lines = [f"tammes.{_call(info)}", ""]
    lines += docstring(text)
    lines += ["", paragraph("heads", _heads_text(info), 12)]
    if info.also:
        lines.append(paragraph("also", ", ".join(info.also), 12))
    if info.criterion:
        ready = f"tammes.{info.criterion}(embedding_size, num_classes, ...)"
        lines.append(paragraph("criterion", ready, 12))
    if info.dense:
        lines.append(paragraph("memory", "needs the whole logit matrix", 12))
    lines.append(paragraph("notation", NOTATION, 12))
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tammes losses`` to a parser."""
    parser.description = "List all losses, or show one in full."
    add = partial(add_argument, parser)
    add("name NAME", "loss to show in full", nargs="?")
    add("--json", "print JSON instead of text")
    plot = "plot psi(theta), loss and gradient of NAME to a .png, .svg, .pdf or .html file"
    add("--plot FILE", plot)


def run(arguments: argparse.Namespace) -> int:
    """Run ``tammes losses`` and return the exit code."""
    name = arguments.name
    if arguments.plot is not None:
        if name is None:
            raise ValueError("--plot expects the name of a loss")
        known = loss_info(name).name
        from tammes.lab.report.charts.loss_curves import plot_loss

        plot_loss(known, arguments.plot)
        print(arguments.plot)
    elif arguments.json:
        found = [*map(asdict, all_loss_info())] if name is None else asdict(loss_info(name))
        print(json.dumps(found, indent=2, ensure_ascii=False, allow_nan=False))
    else:
        print(listing() if name is None else description(name))
    return 0
