"""The syntax of settings that have settings: calls, read with :mod:`ast` and never run.

Only literals, names, calls, ``+``, ``-`` and ``*`` are read; everything else Python has is refused
before anything is built.
"""

import ast
import difflib
import inspect
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_LENGTH = 10_000
"""Characters a text may have."""
MAX_DEPTH = 50
"""Depth to which brackets, calls and signs may be nested."""

_DEEP = re.compile(rf"(?:[-+~(\[{{]\s*){{{MAX_DEPTH + 1}}}")


@dataclass(frozen=True)
class Call:
    """A name with settings, as written: ``"flip"`` is the same as ``"flip()"``.

    Attributes:
        name: what is called.
        args: settings by place, plain values.
        kwargs: settings by name, plain values.
    """

    name: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        settings = [repr(v) for v in self.args] + [f"{k}={v!r}" for k, v in self.kwargs.items()]
        return f"{self.name}({', '.join(settings)})"


class Source:
    """A text and its tree, which has a bounded size and has not been looked at yet.

    Args:
        text: one expression.
        what: what the text is, for messages.
        form: Python around the text, such as ``"f({})"`` for settings of a call.

    Raises:
        ValueError: with a sentence, where the text is too long, nested too deep, or not Python.
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
            raise ValueError(f"{what}: a comment is not read, got {short(text)!r}")
        self._check_depth()

    def _check_depth(self) -> None:
        nodes: list[tuple[ast.AST, int]] = [(self.tree, 0)]
        while nodes:
            node, depth = nodes.pop()
            if depth > MAX_DEPTH:
                raise self._too_deep()
            # A long sum is deep to the left, and is not what the limit is for.
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
        """Return the error for a part that does not belong there."""
        part = ast.get_source_segment(self.line, node) or ""
        within = "" if part.strip() == self.text.strip() else f" in {short(self.text)!r}"
        return ValueError(f"{self.what} expects {expected}, got {short(part)!r}{within}")

    def call(self, node: ast.AST) -> Call:
        """Read a name, or a call of one with plain values."""
        name, args, kwargs = self.parts(node)
        return Call(
            name,
            tuple(self.value(arg) for arg in args),
            {key: self.value(value) for key, value in kwargs.items()},
        )

    def parts(self, node: ast.AST) -> tuple[str, list[ast.expr], dict[str, ast.expr]]:
        """Return name and settings of a call, the settings not read yet."""
        if isinstance(node, ast.Name):
            return node.id, [], {}
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            raise self.mistake(node, "a name such as flip, or a call such as pad_crop(4)")
        kwargs: dict[str, ast.expr] = {}
        for keyword in node.keywords:
            if keyword.arg is None:
                raise self.mistake(node, "settings one by one")
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
        """Read a number with its sign, or return None where it is something else."""
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
    """Read one call.

    Args:
        text: such as ``"cosine(scale=30)"`` or ``"cosine"``.
        what: what the text is, for the message where it is wrong.

    Example:
        >>> parse_call("pad_crop(4, fill='zero')", what="augment")
        Call(name='pad_crop', args=(4,), kwargs={'fill': 'zero'})
    """
    source = Source(text, what)
    return source.call(source.tree)


def parse_calls(text: str, *, what: str) -> list[Call]:
    """Read calls joined by ``+``, in order; none for ``"none"`` or nothing.

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
    """Read calls by name, joined by commas; none for ``"none"`` or nothing.

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
    """Write a text in the one way that all with the same meaning have.

    Example:
        >>> normal("cosface( margin=.20 ) + 0.50*sample_margin")
        'cosface(margin=0.2) + 0.5 * sample_margin()'
    """
    try:
        return ast.unparse(_AddParentheses().visit(Source(text, "text").tree))
    except (ValueError, RecursionError):
        return text


class _AddParentheses(ast.NodeTransformer):
    """Writes the brackets after names that stand alone; values of settings stay as they are."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Call(node, [], [])

    def visit_Call(self, node: ast.Call) -> ast.AST:
        node.args = [self.visit(part) for part in node.args]
        return node


def split_list(text: str, *, what: str = "list") -> list[str]:
    """Split a text at its commas, those within brackets left alone.

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
    call: "str | Call", table: Mapping[str, Callable[..., Any]], *, what: str, **context: Any
) -> Any:
    """Make what a text names.

    Args:
        call: such as ``"resnet18(width=0.5)"``.
        table: what there is, by name.
        what: what is made, for the message where the text is wrong.
        **given: what the text cannot set; what the chosen one does not take is left out.

    Returns:
        What ``table[name]`` returns for these settings.

    Raises:
        ValueError: with a sentence that names what is wrong and, if near, what may be meant.

    Example:
        >>> build("power(3)", {"power": lambda exponent, base: base**exponent}, what="law", base=2)
        8
    """
    call = parse_call(call, what=what) if isinstance(call, str) else call
    if call.name not in table:
        raise ValueError(
            f"there is no {what} {short(call.name)!r}"
            f"{did_you_mean(call.name, table, otherwise='there are')}"
        )
    make = table[call.name]
    parameters = inspect.signature(make).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    own = [
        p for p in parameters.values() if p.kind is not p.VAR_POSITIONAL and p.name not in context
    ]
    settings = bind(call, own, what=what)
    fitting = {key: value for key, value in context.items() if takes_any or key in parameters}
    try:
        return make(**settings, **fitting)
    except TypeError as error:
        # A word where a number belongs: it came from the text like everything else here.
        raise ValueError(f"{what}: {short(str(call))}: {error}") from error


def bind(call: Call, parameters: Iterable[inspect.Parameter], *, what: str) -> dict[str, Any]:
    """Settings of a call by name, or a sentence about the one that is too much or missing."""
    parameters = list(parameters)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    own = {p.name: p for p in parameters if p.kind is not p.VAR_KEYWORD}
    places = [p.name for p in own.values() if p.kind is not p.KEYWORD_ONLY]
    if len(call.args) > len(places):
        most = f"at most {len(places)} without a name" if places else "no setting"
        if own and not places:
            most = f"settings by name only, such as {next(iter(own))}"
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
    """The near miss as the end of a sentence; what there is, where nothing is near and few are."""
    plain = {each.lower().replace("_", ""): each for each in known}
    wanted = name[:100].lower().replace("_", "").replace("-", "")
    near = difflib.get_close_matches(wanted, plain, n=1)
    if near:
        return f"; did you mean {plain[near[0]]}?"
    if otherwise and plain:
        return f"; {otherwise} {', '.join(sorted(plain.values()))}"
    return ""


def short(text: str) -> str:
    """A text for a message: one line, not too long."""
    line = " ".join(str(text).split())
    return line if len(line) <= 80 else f"{line[:77]}..."
