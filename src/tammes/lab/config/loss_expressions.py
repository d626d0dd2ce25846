"""Losses and schedules written as text: ``"cosface(margin=0.35) + 0.5*sample_margin()"``.

The syntax, and how calls are parsed without ``eval``, is in :mod:`.expressions`.
"""

import ast
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tammes import losses, schedules
from tammes.lab.config.expressions import (
    Call,
    Source,
    bind,
    build,
    did_you_mean,
    parse_keywords,
    short,
)
from tammes.losses.aliases import ALIASES
from tammes.losses.imbalance import margins_from_counts
from tammes.losses.subspace import direct_sum, spectral_sum
from tammes.terms import Loss

TERMS: dict[str, Callable[..., Loss]] = {name: getattr(losses, name) for name in losses.__all__}
"""Builders of terms by name."""

SUMS: dict[str, Callable[..., Loss]] = {"direct_sum": direct_sum, "spectral_sum": spectral_sum}
"""Builders of sums of two losses by name."""
_LOSSES: dict[str, Callable[..., Loss]] = {**TERMS, **ALIASES, **SUMS}

SCHEDULES: dict[str, type[schedules.Schedule]] = {
    name: value
    for name, value in vars(schedules).items()
    if inspect.isclass(value)
    and issubclass(value, schedules.Schedule)
    and value is not schedules.Schedule
}
"""Schedules by name."""

_JOIN = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
_SYNTAX = "terms, with numbers as factors, joined by + and -"

_IN_EPOCHS = {
    "steps": "epochs",
    "total_steps": "epochs",
    "start": "start_epochs",
    "delay": "delay_epochs",
}
"""Settings in steps, and their names in epochs; the ``start`` of ``WarmUp`` is a value instead."""


def parse_loss(text: str, *, counts: Sequence[int] | None = None) -> Loss:
    """Build a loss from text; the ``repr`` of a loss can be read back.

    Args:
        text: weighted sum of terms, such as ``"softmax() + 0.5*spectral_sum(...)"``. A bare name
            is a term with its defaults.
        counts: training examples of each class, for terms such as ``ldam`` that need ``counts``
            and do not set them, and for ``margin=margins_from_counts()``.

    Raises:
        ValueError: the text is invalid; the message quotes the part.

    Example:
        >>> parse_loss("cosface(margin=0.2) + 0.5*sample_margin")
        cosface(margin=0.2) + 0.5*sample_margin()
    """
    source = Source(text, "loss")
    if isinstance(source.tree, ast.Tuple):
        raise ValueError(
            f"loss: one is expected, got {short(text)!r}; `tammes compare --losses` takes several"
        )
    value = _LossParser(source, counts).read(source.tree)
    if not isinstance(value, Loss):
        raise ValueError(f"loss expects a term, such as softmax(), got {short(text)!r}")
    return value


class _LossParser:
    """Parser of sums of weighted terms."""

    def __init__(self, source: Source, counts: Sequence[int] | None) -> None:
        self.source, self.counts = source, counts

    def read(self, node: ast.AST) -> Any:
        number = self.source.number(node)
        if number is not None:
            return float(number)
        match node:
            case ast.UnaryOp(op=ast.USub() | ast.UAdd()):
                value = self.read(node.operand)
                return -value if isinstance(node.op, ast.USub) else value
            case ast.Name() | ast.Call():
                return self.read_term(node)
            case ast.BinOp():
                return self.read_sum(node)
        raise self.source.mistake(node, _SYNTAX)

    def read_sum(self, node: ast.BinOp) -> Loss | float:
        # The syntax tree of a long sum is deep on its left side: a loop avoids recursion.
        chain, first = [node], node.left
        while isinstance(first, ast.BinOp):
            chain.append(first)
            first = first.left
        value = self.read(first)
        for parent in reversed(chain):
            right = self.read(parent.right)
            try:
                value = _JOIN[type(parent.op)](value, right)
            except (KeyError, TypeError):
                raise self.source.mistake(parent, _SYNTAX) from None
        return value

    def read_term(self, node: ast.Call | ast.Name) -> Loss:
        name, args, kwargs = self.source.parts(node)
        make = _LOSSES.get(name)
        if make is None:
            hint = did_you_mean(name, _LOSSES) or "; `tammes losses` lists them"
            text = short(self.source.text)
            raise ValueError(f"loss: there is no {short(name)!r} in {text!r}{hint}")
        parameters = inspect.signature(make).parameters
        # The first two arguments of a sum are losses themselves.
        of_losses = [*parameters][:2] if name in SUMS else []

        def setting(key: str, part: ast.expr) -> Any:
            if key in of_losses:
                return self.read(part)
            return self.read_margins(part) if _is_helper(part) else self.source.value(part)

        names = [*parameters, *[""] * len(args)]
        places = tuple(setting(key, part) for key, part in zip(names, args, strict=False))
        named = {key: setting(key, part) for key, part in kwargs.items()}
        if self.counts is not None and "counts" in names[len(args) :]:
            named.setdefault("counts", tuple(self.counts))
        call = Call(name, places, named)
        settings = bind(call, parameters.values(), what="loss")
        try:
            return make(**settings)
        except (TypeError, OverflowError) as error:
            raise ValueError(f"loss: {short(str(call))}: {error}") from error

    def read_margins(self, node: ast.expr) -> tuple[float, ...]:
        """Read ``margins_from_counts(...)`` as the value of a setting."""
        call = self.source.call(node)
        if self.counts is not None and not call.args:
            call = Call(call.name, call.args, {"counts": tuple(self.counts), **call.kwargs})
        parameters = inspect.signature(margins_from_counts).parameters.values()
        return margins_from_counts(**bind(call, parameters, what="loss"))


def _is_helper(node: ast.expr) -> bool:
    name = node.func if isinstance(node, ast.Call) else node
    return isinstance(name, ast.Name) and name.id == margins_from_counts.__name__


def parse_schedules(
    text: str, *, steps_per_epoch: int, counts: Sequence[int] | None = None
) -> dict[str, schedules.Schedule]:
    """Build schedules, by the setting that they change.

    Args:
        text: such as ``"margin=WarmUp(0, 0.35, epochs=5)"``, separated by commas. ``epochs``
            replaces ``steps`` or ``total_steps``, ``start_epochs`` the ``start`` of
            ``DeferredReweighting``, and ``delay_epochs`` ``delay``.
        steps_per_epoch: number of steps in an epoch.
        counts: training examples of each class, for schedules that need but do not set them.

    Example:
        >>> schedule = parse_schedules("margin=WarmUp(0, 0.35, epochs=5)", steps_per_epoch=10)
        >>> schedule["margin"].length
        50
    """
    found: dict[str, schedules.Schedule] = {}
    for key, given in parse_keywords(text, what="schedules").items():
        call = _in_steps(given, steps_per_epoch)
        kind = SCHEDULES.get(call.name)
        takes_counts = kind is not None and "counts" in _parameters(kind)
        if takes_counts and counts is not None and not call.args and "counts" not in call.kwargs:
            call = Call(call.name, (tuple(counts),), call.kwargs)
        found[key] = build(call, SCHEDULES, what="schedule")
    return found


def _parameters(kind: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(kind).parameters


def _in_steps(call: Call, steps_per_epoch: int) -> Call:
    """Convert settings in epochs to steps."""
    kind = SCHEDULES.get(call.name)
    if kind is None:
        return call
    known = {
        epochs: steps
        for steps, epochs in _IN_EPOCHS.items()
        # A start that is a value, as in WarmUp, is not annotated as int.
        if steps in _parameters(kind) and _parameters(kind)[steps].annotation is int
    }
    kwargs: dict[str, Any] = {}
    for key, value in call.kwargs.items():
        steps = known.get(key, key)
        if steps != key:
            if not isinstance(value, (int, float)) or not 0 <= value < 1e9:
                raise ValueError(
                    f"schedules: {call.name} expects {key} of 0 or more, got {value!r}"
                )
            value = round(value * steps_per_epoch)
            value = max(value, 1) if key == "epochs" else value
        if steps in kwargs:
            raise ValueError(f"schedules: {call.name} is given {steps} twice")
        kwargs[steps] = value
    return Call(call.name, call.args, kwargs)
