"""Losses, heads and schedules written as text: ``"cosface(margin=0.35) + 0.5*sample_margin()"``.

What a text may contain, and how calls are read without running anything, is in
:mod:`.syntax`.
"""

import ast
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tammes import losses, schedules
from tammes.compose import Loss
from tammes.lab.expression.syntax import (
    MAX_DEPTH,
    Call,
    Reader,
    bind,
    build,
    did_you_mean,
    parse,
    parse_call,
    short,
    split_list,
)
from tammes.subspace import direct_sum, spectral_sum

TERMS: dict[str, Callable[..., Loss]] = {name: getattr(losses, name) for name in losses.__all__}
"""Builders of terms by name."""

_SUMS: dict[str, Callable[..., Loss]] = {"direct_sum": direct_sum, "spectral_sum": spectral_sum}

SCHEDULES: dict[str, type[schedules.Schedule]] = {
    name: value
    for name, value in vars(schedules).items()
    if inspect.isclass(value)
    and issubclass(value, schedules.Schedule)
    and value is not schedules.Schedule
}
"""Schedules by name."""

_IN_EPOCHS = {
    "steps": "epochs",
    "total_steps": "epochs",
    "start": "start_epochs",
    "delay": "delay_epochs",
}
"""How a number of steps is given in epochs, where it is one: ``WarmUp`` also has a ``start``."""


def parse_loss(text: str, *, counts: Sequence[int] | None = None) -> Loss:
    """A loss of the algebra from its text; what a loss prints as is read back.

    Args:
        text: terms with weights and sums, such as ``"softmax() + 0.5*spectral_sum(...)"``. A name
            alone is a term with its defaults.
        counts: training examples of each class, for a term that has ``counts`` and is not given
            any, such as ``ldam``.

    Returns:
        The loss.

    Raises:
        ValueError: with a sentence that names the place.

    Example:
        >>> parse_loss("cosface(margin=0.2) + 0.5*sample_margin")
        cosface(margin=0.2) + 0.5*sample_margin()
    """
    tree = parse(text, what="loss")
    value = _LossReader(text, counts).expression(tree, 0)
    if not isinstance(value, Loss):
        raise ValueError(f"loss expects a term, such as softmax(), got {short(text)!r}")
    return value


class _LossReader(Reader):
    """Goes through the tree of a loss."""

    def __init__(self, text: str, counts: Sequence[int] | None) -> None:
        super().__init__(text, "loss")
        self.counts = counts

    def expression(self, node: ast.AST, depth: int) -> Loss | float:
        if depth > MAX_DEPTH:
            raise ValueError(
                f"loss is expected to be nested at most {MAX_DEPTH} deep, got {short(self.text)!r}"
            )
        # A long sum is deep to the left, and is not what the limit is for.
        chain: list[ast.BinOp] = []
        while isinstance(node, ast.BinOp):
            chain.append(node)
            node = node.left
        value = self.operand(node, depth)
        for parent in reversed(chain):
            right = self.expression(parent.right, depth + 1)
            value = self.join(parent, value, right)
        return value

    def operand(self, node: ast.AST, depth: int) -> Loss | float:
        number = self.number(node)
        if number is not None:
            return float(number)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
            value = self.expression(node.operand, depth + 1)
            return -value if isinstance(node.op, ast.USub) else value
        if isinstance(node, (ast.Name, ast.Call)):
            return self.term(node, depth)
        raise self.mistake(node, "terms, numbers, +, - and *")

    def join(self, node: ast.BinOp, left: Loss | float, right: Loss | float) -> Loss | float:
        both = isinstance(left, Loss), isinstance(right, Loss)
        if isinstance(node.op, ast.Mult):
            if all(both):
                raise self.mistake(node, "a term to be multiplied with a number")
            return left * right  # type: ignore[operator]
        if isinstance(node.op, (ast.Add, ast.Sub)):
            if both in ((True, False), (False, True)):
                raise self.mistake(node, "a number only as a factor")
            return left + right if isinstance(node.op, ast.Add) else left - right  # type: ignore[operator]
        raise self.mistake(node, "terms, numbers, +, - and *")

    def term(self, node: ast.Name | ast.Call, depth: int) -> Loss:
        name, args, kwargs = self.parts(node)
        make = TERMS.get(name) or _SUMS.get(name)
        if make is None:
            hint = did_you_mean(name, (*TERMS, *_SUMS)) or "; `tammes losses` lists them"
            raise ValueError(f"loss: there is no {short(name)!r} in {short(self.text)!r}{hint}")
        parameters = list(inspect.signature(make).parameters.values())
        if name in _SUMS:
            # The first two are losses themselves.
            of_losses = {parameter.name for parameter in parameters[:2]}
            call = Call(
                name,
                tuple(self.part(arg, place < 2, depth) for place, arg in enumerate(args)),
                {key: self.part(value, key in of_losses, depth) for key, value in kwargs.items()},
            )
        else:
            call = self.call(node)
            takes = [parameter.name for parameter in parameters]
            missing = "counts" in takes and "counts" not in call.kwargs
            if missing and self.counts is not None and len(call.args) <= takes.index("counts"):
                call = Call(name, call.args, {**call.kwargs, "counts": tuple(self.counts)})
        settings = bind(call, parameters, what="loss")
        try:
            return make(**settings)
        except (TypeError, OverflowError) as error:
            raise ValueError(f"loss: {short(str(call))}: {error}") from error

    def part(self, node: ast.AST, is_loss: bool, depth: int) -> Any:
        return self.expression(node, depth + 1) if is_loss else self.value(node)


def parse_schedules(
    text: str, *, steps_per_epoch: int, counts: Sequence[int] | None = None
) -> dict[str, schedules.Schedule]:
    """Schedules by the setting they change.

    Args:
        text: such as ``"margin=WarmUp(0, 0.35, epochs=5)"``, several joined by commas. ``epochs``
            stands for ``steps`` or ``total_steps``, ``start_epochs`` for the ``start`` of
            ``DeferredReweighting``, ``delay_epochs`` for ``delay``.
        steps_per_epoch: what an epoch is in steps.
        counts: training examples of each class, for a schedule that is not given any.

    Example:
        >>> schedule = parse_schedules("margin=WarmUp(0, 0.35, epochs=5)", steps_per_epoch=10)
        >>> schedule["margin"].length
        50
    """
    if text.strip() in ("", "none"):
        return {}
    found: dict[str, schedules.Schedule] = {}
    for part in split_list(text, what="schedules"):
        key, sign, value = part.partition("=")
        if not sign or not key.strip().isidentifier():
            raise ValueError(
                "schedules expects parts such as margin=WarmUp(0, 0.35, epochs=5), "
                f"got {short(part)!r}"
            )
        if key.strip() in found:
            raise ValueError(f"schedules: {key.strip()} is given twice")
        call = _in_steps(parse_call(value, what="schedules"), steps_per_epoch)
        kind = SCHEDULES.get(call.name)
        takes_counts = kind is not None and "counts" in _parameters(kind)
        if takes_counts and counts is not None and not call.args and "counts" not in call.kwargs:
            call = Call(call.name, (tuple(counts),), call.kwargs)
        found[key.strip()] = build(call, SCHEDULES, what="schedule")
    return found


def _parameters(kind: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(kind).parameters


def _in_steps(call: Call, steps_per_epoch: int) -> Call:
    """The same call with epochs turned into steps."""
    kind = SCHEDULES.get(call.name)
    if kind is None:
        return call
    known = {
        epochs: steps
        for steps, epochs in _IN_EPOCHS.items()
        # A start that is a value, as that of WarmUp, is a float.
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
