"""Tune scale, margin and learning rate by successive halving, on held-out training images.

Every candidate is trained for a ninth of the epochs, the best third of them for a third, and the
best third of those for all epochs, at least two each time; every run goes through its whole
learning-rate schedule. The given setting takes part in every round. Settings are compared by the
accuracy of the last epoch on images held out of the training set, never on test images. Finished
runs are not repeated.
"""

import ast
import inspect
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tammes.advise.defaults import main_term
from tammes.advise.feasibility import KINDS
from tammes.lab.config import parse_call, parse_loss
from tammes.lab.config.expressions import Call, parse_keywords
from tammes.lab.config.loss_expressions import TERMS
from tammes.lab.config.schema import Config
from tammes.lab.config.shorten import shortened
from tammes.lab.data.sources.loading import say
from tammes.lab.records.atomic_io import locked, writable
from tammes.lab.records.run_folder import Run
from tammes.lab.runner import plan_resources
from tammes.lab.runner.sweep import check, train_all

HELD_OUT = 0.1
"""Share of the training images held out, unless the configuration sets one."""
_FACTOR = 3
"""Factor by which candidates shrink and epochs grow from round to round."""
_ROUNDS = 3
_SCALES, _MARGINS, _RATES = (0.5, 1.0, 2.0), (0.3, 1.0), (1.0, 0.3)
"""Candidates of each setting, as factors of the given value."""


@dataclass(frozen=True)
class Setting:
    """A candidate; a value that the loss or the head does not have is None."""

    scale: float | None
    margin: float | None
    rate: float

    def __str__(self) -> str:
        named = {"scale": self.scale, "margin": self.margin, "lr": self.rate}
        return ", ".join(f"{name} {value:g}" for name, value in named.items() if value is not None)


@dataclass(frozen=True)
class Round:
    """Runs of a round by setting, with their accuracies on the held-out images in percent."""

    epochs: int
    runs: dict[Setting, Run]
    accuracies: dict[Setting, float]


@dataclass(frozen=True)
class Tuning:
    """Result of :func:`tune`.

    Attributes:
        given: the setting of the configuration.
        rounds: all rounds, the shortest first.
        held_out: number of held-out images.
        final: configuration to train with the best setting on all images.
        grid: configuration of every candidate with all epochs, as a full grid search would train.
    """

    given: Setting
    best: Setting
    rounds: tuple[Round, ...]
    held_out: int
    final: Config
    grid: dict[Setting, Config]

    @property
    def standard_error(self) -> float:
        """Standard error of the best accuracy, in points, from the number of held-out images.

        If all images or none are right, one exception is assumed: few images prove little.
        """
        images = max(self.held_out, 2)
        share = self.rounds[-1].accuracies[self.best] / 100
        share = min(max(share, 1 / images), 1 - 1 / images)
        return 100 * math.sqrt(share * (1 - share) / images)

    @property
    def cost(self) -> float:
        """Epochs of all rounds over those of one full run."""
        epochs = sum(each.epochs * len(each.runs) for each in self.rounds)
        return epochs / self.rounds[-1].epochs

    def sentences(self) -> list[str]:
        """Say what was found and how certain it is."""
        last = self.rounds[-1].accuracies
        best, error = last[self.best], self.standard_error
        found = f"{best:.2f} % of {self.held_out:,} held-out images (± {error:.2f})"
        cost = f"The search cost {self.cost:.1f} full runs."
        if self.best == self.given:
            return [f"Keep {self.given}: {found}, and nothing tried was better.", cost]
        gain = best - last[self.given] if self.given in last else math.inf
        text = f"Take {self.best}: {found}"
        if math.isinf(gain):
            return [f"{text}; the given setting did not train.", cost]
        text += f", {gain:.2f} points above the given setting."
        if gain <= error:
            text += " That is less than a standard error: the two cannot be told apart."
        return [text, cost]


def tune(
    config: Config,
    out: str | os.PathLike[str] = "tuning",
    *,
    scales: Sequence[float] | None = None,
    margins: Sequence[float] | None = None,
    rates: Sequence[float] | None = None,
    workers: int | None = None,
    report: Callable[[str], None] | None = None,
) -> Tuning:
    """Search for scale, margin and learning rate by successive halving.

    Args:
        config: configuration whose loss, head and learning rate are tuned.
        out: parent folder of the runs.
        scales: scales to try; by default 0.5, 1 and 2 times that of the head.
        margins: margins to try; by default 0.3 and 1 times that of the loss.
        rates: learning rates to try; by default 1 and 0.3 times that of the configuration.
        workers: number of concurrent runs; by default one per core, or six per GPU.
        report: called with one-line messages; prints to stderr by default.

    Returns:
        The best setting, and everything that was tried.

    Raises:
        ValueError: there is nothing to tune, or no run trained.
    """
    report = report or say
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError("tune starts its own processes and cannot run under torchrun")
    if config.identities or config.select_epoch:
        other = "identities" if config.identities else "select_epoch"
        raise ValueError(f"tune compares on held-out images of trained classes, got {other}")
    plan_resources(1, workers, accelerator=config.accelerator)
    folder = writable(Path(out), flag="--out")
    config = config.replace(validation=config.validation or HELD_OUT, name="")
    with locked(folder, "another search is running in this folder"):
        head = parse_call(check([config], report)[config.loss], what="head")
        search = _Search(config, head)
        settings = search.candidates(scales, margins, rates)
        grid = {setting: search.config(setting, config.epochs) for setting in settings}
        epochs = sorted({-(-config.epochs // _FACTOR**power) for power in range(_ROUNDS)})
        rounds: list[Round] = []
        for number, length in enumerate(epochs, 1):
            count = len(settings)
            each = f"{length} epoch{'s' if length > 1 else ''} each"
            report(f"round {number} of {len(epochs)}: {count} settings, {each}")
            configs = [search.config(setting, length) for setting in settings]
            at = plan_resources(count, workers, accelerator=config.accelerator)
            runs = train_all(configs, folder, at=at, report=report)
            done = dict(zip(settings, runs, strict=True))
            scores = {s: _accuracy(run) for s, run in done.items() if run.status == "done"}
            if not scores:
                reason = runs[0].failure.get("message", "interrupted")
                raise ValueError(
                    f"tune: no setting trained {length} epoch{'s' * (length > 1)}: {reason}"
                )
            rounds.append(Round(length, done, scores))
            ordered = sorted(scores, key=lambda setting: -scores[setting])
            kept = ordered[: max(2, count // _FACTOR)]
            if search.given in scores and search.given not in kept:
                kept.append(search.given)
            settings = kept
    best = ordered[0]
    held_out = int(rounds[-1].runs[best].data["validation"])
    return Tuning(search.given, best, tuple(rounds), held_out, search.final(best), grid)


def _accuracy(run: Run) -> float:
    # The last epoch: the best one would favour settings whose accuracy fluctuates.
    return 100 * float(run.metrics[-1]["validation"]["accuracy"])


class _Search:
    """Builds the configurations of the candidates around the given setting."""

    def __init__(self, config: Config, head: Call) -> None:
        self.base, self.head = config, head
        # Class counts that the loss may need are not known yet, and do not matter here.
        term = main_term(parse_loss(config.loss, counts=(1, 1)))
        kind = None if term is None else KINDS.get(term.name)
        self.term, self.margin_name = term, ""
        margin = None
        if term is not None and kind is not None and kind.setting in term.settings:
            value = term.settings[kind.setting]
            # The schedule would override a tuned margin.
            scheduled = kind.setting in parse_keywords(config.schedules, what="schedules")
            if isinstance(value, (int, float)) and not scheduled:
                self.margin_name, margin = kind.setting, float(value)
        scale = head.kwargs.get("scale")
        unit = head.name in ("cosine", "simplex") and head.kwargs.get("normalize_features", True)
        scale = float(scale) if unit and isinstance(scale, (int, float)) else None
        self.given = Setting(scale, margin, config.lr)

    def candidates(
        self,
        scales: Sequence[float] | None,
        margins: Sequence[float] | None,
        rates: Sequence[float] | None,
    ) -> list[Setting]:
        """Return all combinations, with the given setting first."""
        given = self.given
        tried: list[list[float | None]] = []
        for name, values, own, factors in (
            ("scales", scales, given.scale, _SCALES),
            ("margins", margins, given.margin, _MARGINS),
            ("rates", rates, given.rate, _RATES),
        ):
            if values is not None and own is None:
                raise ValueError(
                    f"tune expects no {name} for {self.base.loss} on {self.head}, got {values}"
                )
            if values is None and own is not None:
                values = [float(f"{own * factor:.2g}") for factor in factors]
            tried.append([None] if values is None else [*values])
        every = [
            Setting(scale, margin, rate)
            for scale in tried[0]
            for margin in tried[1]
            for rate in tried[2]
            if rate is not None
        ]
        return [*dict.fromkeys([given, *every])]

    def config(self, setting: Setting, epochs: int) -> Config:
        """Return the configuration of a run with a setting."""
        # Evaluate on the test images once, only to record the result.
        name = f"{setting}, {epochs} epoch{'s' * (epochs > 1)}"
        return shortened(self._with(setting), epochs).replace(evaluate_every=epochs, name=name)

    def final(self, setting: Setting) -> Config:
        """Return the configuration to train with a setting on all images."""
        return self._with(setting).replace(validation=0.0)

    def _with(self, setting: Setting) -> Config:
        changes: dict[str, str | float] = {"lr": setting.rate}
        if setting.scale is not None:
            kwargs = {**self.head.kwargs, "scale": setting.scale}
            changes["head"] = str(Call(self.head.name, self.head.args, kwargs))
        if setting.margin is not None and self.term is not None:
            changes["loss"] = with_setting(
                self.base.loss, self.term.name, self.margin_name, setting.margin
            )
        if self.base.head_lr is not None:
            changes["head_lr"] = self.base.head_lr * setting.rate / self.base.lr
        return self.base.replace(**changes)


def with_setting(loss: str, term: str, name: str, value: float) -> str:
    """Return a loss expression with one setting of the first term of this name replaced.

    Example:
        >>> with_setting("0.5*sample_margin() + cosface", "cosface", "margin", 0.1)
        '0.5 * sample_margin() + cosface(margin=0.1)'
    """
    tree = ast.parse(loss, mode="eval")
    place = [*inspect.signature(TERMS[term]).parameters].index(name)

    class Replace(ast.NodeTransformer):
        done = False

        def change(self, node: ast.Name | ast.Call) -> ast.AST:
            call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
            if self.done or not isinstance(call.func, ast.Name) or call.func.id != term:
                return self.generic_visit(node)
            self.done = True
            args, number = list(call.args), ast.Constant(value)
            if place < len(args):
                args[place] = number
                return ast.Call(call.func, args, call.keywords)
            keywords = [each for each in call.keywords if each.arg != name]
            return ast.Call(call.func, args, [*keywords, ast.keyword(name, number)])

        visit_Name = visit_Call = change

    return ast.unparse(ast.fix_missing_locations(Replace().visit(tree)))
