"""Syntax of fields written as calls, parsed with :mod:`ast` and never executed.

Only literals, names, calls, ``+``, ``-`` and ``*`` are accepted; other Python is rejected before
anything is built.
"""

import ast
import inspect
import math
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tammes.spelling import nearest_name

MAX_LENGTH = 10_000
"""Largest length of an expression, in characters."""
MAX_DEPTH = 50
"""Largest nesting depth of brackets, calls and signs."""

T = TypeVar("T")

_DEEP = re.compile(rf"(?:[-+~(\[{{]\s*){{{MAX_DEPTH + 1}}}")


@dataclass(frozen=True)
class Call:
    """A name with settings, as written; ``"flip"`` is the same as ``"flip()"``.

    Attributes:
        name: name of the callee.
        args: positional settings, plain values.
        kwargs: keyword settings, plain values.
    """

    name: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        settings = [repr(v) for v in self.args] + [f"{k}={v!r}" for k, v in self.kwargs.items()]
        return f"{self.name}({', '.join(settings)})"


class Source:
    """Text and its syntax tree, of bounded size; the tree is not validated yet.

    ``form`` turns the text into Python, such as ``"f({})"`` for keyword arguments; ``what`` names
    it in messages.

    Raises:
        ValueError: the text is too long, too deeply nested, or not Python.
    """

    def __init__(self, text: str, what: str, form: str = "{}") -> None:
        if not isinstance(text, str):
            raise ValueError(f"{what} is expected to be text, got {text!r}")
        if len(text) > MAX_LENGTH:
            raise ValueError(
                f"{what} is expected to have at most {MAX_LENGTH} characters, got {len(text)}"
            )
        self.text, self.what = text, what
        inner = re.sub(r"[\r\n\t\f]", " ", text).strip()
        self.line = form.format(inner)
        if not self.line:
            raise ValueError(f"{what} is expected, got nothing")
        if _DEEP.search(text):
            raise self._too_deep()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.tree = ast.parse(self.line, mode="eval").body
        except (RecursionError, MemoryError):
            raise self._too_deep() from None
        except (SyntaxError, ValueError) as error:
            place = (getattr(error, "offset", None) or 0) - form.index("{")
            at = f" at character {place}" if place > 0 else ""
            why = short(getattr(error, "msg", None) or str(error))
            raise ValueError(f"{what}: {short(text)!r} cannot be read{at}: {why}") from None
        if b"#" in self.line.encode()[self.tree.end_col_offset :]:
            raise ValueError(f"{what}: a comment is not allowed, got {short(text)!r}")
        self._check_depth()

    def _check_depth(self) -> None:
        nodes: list[tuple[ast.AST, int]] = [(self.tree, 0)]
        while nodes:
            node, depth = nodes.pop()
            if depth > MAX_DEPTH:
                raise self._too_deep()
            # The syntax tree of a long sum is deep on its left side, which is not nesting.
            left = node.left if isinstance(node, ast.BinOp) else None
            for child in ast.iter_child_nodes(node):
                deeper = isinstance(child, ast.expr) and child is not left
                nodes.append((child, depth + deeper))

    def _too_deep(self) -> ValueError:
        got = short(self.text)
        return ValueError(
            f"{self.what} is expected to be nested at most {MAX_DEPTH} deep, got {got!r}"
        )

    def mistake(self, node: ast.AST, expected: str) -> ValueError:
        """Build the error for an unexpected part."""
        part = ast.get_source_segment(self.line, node) or ""
        within = "" if part.strip() == self.text.strip() else f" in {short(self.text)!r}"
        return ValueError(f"{self.what} expects {expected}, got {short(part)!r}{within}")

    def call(self, node: ast.AST) -> Call:
        """Read a name, or a call with plain values."""
        name, args, kwargs = self.parts(node)
        return Call(
            name,
            tuple(self.value(arg) for arg in args),
            {key: self.value(value) for key, value in kwargs.items()},
        )

    def parts(self, node: ast.AST) -> tuple[str, list[ast.expr], dict[str, ast.expr]]:
        """Split a call into its name and the nodes of its settings."""
        if isinstance(node, ast.Name):
            return node.id, [], {}
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            raise self.mistake(node, "a name such as flip, or a call such as pad_crop(4)")
        kwargs: dict[str, ast.expr] = {}
        for keyword in node.keywords:
            if keyword.arg is None:
                raise self.mistake(node, "settings one by one, without **")
            if keyword.arg in kwargs:
                raise ValueError(
                    f"{self.what}: {keyword.arg} is given twice in {short(self.text)!r}"
                )
            kwargs[keyword.arg] = keyword.value
        return node.func.id, node.args, kwargs

    def value(self, node: ast.AST) -> Any:
        """Read a plain value: a number, text, True, False, None, inf, or a sequence of them."""
        match node:
            case ast.Constant(value=str() | bool() | None):
                return node.value
            case ast.Tuple():
                return tuple(self.value(item) for item in node.elts)
            case ast.List():
                return [self.value(item) for item in node.elts]
            case ast.Name() if node.id != "inf":
                raise self.mistake(node, f"text in quotes, as in '{short(node.id)}'")
        number = self.number(node)
        if number is None:
            raise self.mistake(node, "numbers and texts as settings")
        return number

    def number(self, node: ast.AST) -> int | float | None:
        """Read a signed number; return None for anything else."""
        match node:
            case ast.UnaryOp(op=ast.USub() | ast.UAdd()):
                value = self.number(node.operand)
                return -value if value is not None and isinstance(node.op, ast.USub) else value
            case ast.Name(id="inf"):
                return math.inf
            case ast.Constant(value=float(number)):
                return number
            case ast.Constant(value=int(whole)) if type(whole) is int and abs(whole) < 2**63:
                return whole
        return None


def parse_call(text: str, *, what: str) -> Call:
    """Read one call; ``what`` names the setting in messages.

    Example:
        >>> parse_call("pad_crop(4, fill='zero')", what="augment")
        Call(name='pad_crop', args=(4,), kwargs={'fill': 'zero'})
    """
    source = Source(text, what)
    return source.call(source.tree)


def parse_calls(text: str, *, what: str) -> list[Call]:
    """Read calls joined by ``+``, in order; an empty text or ``"none"`` has none.

    Example:
        >>> [call.name for call in parse_calls("pad_crop(4) + flip", what="augment")]
        ['pad_crop', 'flip']
    """
    if _is_none(text):
        return []
    source = Source(text, what)
    node, calls = source.tree, []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        calls.append(source.call(node.right))
        node = node.left
    calls.append(source.call(node))
    return calls[::-1]


def parse_keywords(text: str, *, what: str) -> dict[str, Call]:
    """Read calls by keyword, separated by commas; an empty text or ``"none"`` has none.

    Example:
        >>> parse_keywords("margin=WarmUp(0, 0.35)", what="schedules")
        {'margin': Call(name='WarmUp', args=(0, 0.35), kwargs={})}
    """
    if _is_none(text):
        return {}
    source = Source(text, what, "keywords({})")
    name, args, kwargs = source.parts(source.tree)
    if name != "keywords" or args:
        raise source.mistake(
            (*args, source.tree)[0], "parts such as margin=WarmUp(0, 0.35, epochs=5)"
        )
    return {key: source.call(node) for key, node in kwargs.items()}


def _is_none(text: Any) -> bool:
    return isinstance(text, str) and text.strip() in ("", "none")


def normal(text: str) -> str:
    """Return the canonical form of an expression, the same however it is written.

    Example:
        >>> normal("cosface( margin=.20 ) + 0.50*sample_margin")
        'cosface(margin=0.2) + 0.5 * sample_margin()'
    """
    try:
        return ast.unparse(_AddParentheses().visit(Source(text, "text").tree))
    except (ValueError, RecursionError):
        return text


class _AddParentheses(ast.NodeTransformer):
    """Add parentheses to bare names; keyword settings are left alone."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Call(node, [], [])

    def visit_Call(self, node: ast.Call) -> ast.AST:
        node.args = [self.visit(part) for part in node.args]
        return node


def split_list(text: str, *, what: str = "list") -> list[str]:
    """Split a text at its commas, except those within brackets.

    Example:
        >>> split_list("softmax, gm_softmax(1, 0), lm_softmax")
        ['softmax', 'gm_softmax(1, 0)', 'lm_softmax']
    """
    if isinstance(text, str) and not text.strip():
        return []
    source = Source(text, what)
    parts = source.tree.elts if isinstance(source.tree, ast.Tuple) else [source.tree]
    return [ast.get_source_segment(source.line, part) or "" for part in parts]


def build(
    call: "str | Call", table: Mapping[str, Callable[..., T]], *, what: str, **context: Any
) -> T:
    """Call the function that an expression names.

    Args:
        call: such as ``"resnet18(width=0.5)"``, or a parsed call.
        table: functions by name.
        what: kind of object that is built, for messages.
        **context: arguments that the text cannot set; those that the function does not take are
            dropped.

    Raises:
        ValueError: a name or setting is unknown, missing or invalid; the message suggests a near
            match.

    Example:
        >>> build("power(3)", {"power": lambda exponent, base: base**exponent}, what="law", base=2)
        8
    """
    call = parse_call(call, what=what) if isinstance(call, str) else call
    settings = check_call(call, table, what=what, context=context)
    make = table[call.name]
    parameters = inspect.signature(make).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    fitting = {key: value for key, value in context.items() if takes_any or key in parameters}
    try:
        return make(**settings, **fitting)
    except TypeError as error:
        # For example, a string in place of a number.
        raise ValueError(f"{what}: {short(str(call))}: {error}") from error


def check_call(
    call: "str | Call",
    table: Mapping[str, Callable[..., Any]],
    *,
    what: str,
    context: Collection[str] = (),
) -> dict[str, Any]:
    """Check a call as :func:`build` does, without building; return its settings.

    ``context`` names the arguments that :func:`build` supplies.

    Raises:
        ValueError: a name or setting is unknown, repeated or missing.
    """
    call = parse_call(call, what=what) if isinstance(call, str) else call
    if call.name not in table:
        raise ValueError(
            f"there is no {what} {short(call.name)!r}"
            f"{did_you_mean(call.name, table, otherwise='there are')}"
        )
    parameters = inspect.signature(table[call.name]).parameters.values()
    own = [p for p in parameters if p.kind is not p.VAR_POSITIONAL and p.name not in context]
    return bind(call, own, what=what)


def bind(call: Call, parameters: Iterable[inspect.Parameter], *, what: str) -> dict[str, Any]:
    """Bind the settings of a call to parameters; raise if one is unknown, repeated or missing."""
    parameters = list(parameters)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    own = {p.name: p for p in parameters if p.kind is not p.VAR_KEYWORD}
    places = [p.name for p in own.values() if p.kind is not p.KEYWORD_ONLY]
    if len(call.args) > len(places):
        plural = "" if len(places) == 1 else "s"
        most = f"at most {len(places)} positional setting{plural}" if places else "no setting"
        if own and not places:
            most = f"keyword settings only, such as {next(iter(own))}"
        raise ValueError(f"{what}: {call.name} takes {most}, got {short(str(call))!r}")
    settings = dict(zip(places, call.args, strict=False))
    for key, value in call.kwargs.items():
        if key not in own and not takes_any:
            hint = did_you_mean(key, own, otherwise="it has")
            raise ValueError(f"{what}: {call.name} has no setting {short(key)!r}{hint}")
        if key in settings:
            raise ValueError(f"{what}: {call.name} is given {key} twice")
        settings[key] = value
    for parameter in own.values():
        if parameter.default is parameter.empty and parameter.name not in settings:
            raise ValueError(f"{what}: {call.name} expects {parameter.name}, got none")
    return settings


def did_you_mean(name: str, known: Iterable[str], *, otherwise: str = "") -> str:
    """Return the end of a message: the nearest known name, or ``otherwise`` and all of them."""
    known = list(known)
    near = nearest_name(name, known)
    if near is not None:
        return f"; did you mean {near}?"
    return f"; {otherwise} {', '.join(sorted(known))}" if otherwise and known else ""


def short(text: str) -> str:
    """Shorten a text to one line for a message."""
    line = " ".join(str(text).split())
    return line if len(line) <= 80 else f"{line[:77]}..."
