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
from typing import Any, NoReturn

MAX_LENGTH = 10_000
"""Characters a text may have."""
MAX_DEPTH = 50
"""How deep brackets and signs may be nested."""

_OPEN, _CLOSE = "([{", ")]}"


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


def parse_call(text: str, *, what: str) -> Call:
    """One call.

    Args:
        text: such as ``"cosine(scale=30)"`` or ``"cosine"``.
        what: what the text is, for the message where it is wrong.

    Example:
        >>> parse_call("pad_crop(4, fill='zero')", what="augment")
        Call(name='pad_crop', args=(4,), kwargs={'fill': 'zero'})
    """
    return Reader(text, what).call(parse(text, what=what))


def parse_calls(text: str, *, what: str) -> list[Call]:
    """Calls joined by ``+``, in order; none for ``"none"`` or nothing.

    Example:
        >>> [call.name for call in parse_calls("pad_crop(4) + flip", what="augment")]
        ['pad_crop', 'flip']
    """
    if not isinstance(text, str) or text.strip() in ("", "none"):
        return [] if isinstance(text, str) else [parse_call(text, what=what)]
    reader, node, calls = Reader(text, what), parse(text, what=what), []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        calls.append(reader.call(node.right))
        node = node.left
    calls.append(reader.call(node))
    return calls[::-1]


def normal(text: str) -> str:
    """A text written in the one way that all with the same meaning have.

    Example:
        >>> normal("cosface( margin=.20 ) + 0.50*sample_margin")
        'cosface(margin=0.2) + 0.5 * sample_margin()'
    """
    try:
        tree = parse(text, what="text")
    except ValueError:
        return text
    return ast.unparse(_Called().visit(tree))


class _Called(ast.NodeTransformer):
    """Writes the brackets after names that stand alone; values of settings stay as they are."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Call(node, [], [])

    def visit_Call(self, node: ast.Call) -> ast.AST:
        node.args = [self.visit(part) for part in node.args]
        return node


def split_list(text: str, *, what: str = "list") -> list[str]:
    """Parts of a text between commas, those within brackets left alone.

    Example:
        >>> split_list("softmax, gm_softmax(1, 0), lm_softmax")
        ['softmax', 'gm_softmax(1, 0)', 'lm_softmax']
    """
    check_text(text, what)
    parts, depth, quote, start = [], 0, "", 0
    for place, sign in enumerate(text):
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
        elif sign in _OPEN or sign in _CLOSE:
            depth += 1 if sign in _OPEN else -1
        elif sign == "," and depth == 0:
            parts.append(text[start:place].strip())
            start = place + 1
    parts.append(text[start:].strip())
    if parts[-1] == "":
        # A comma at the end, or nothing at all.
        parts.pop()
    if "" in parts:
        raise ValueError(f"{what}: something is expected before every comma, got {short(text)!r}")
    return parts


def build(
    text_or_call: "str | Call", table: Mapping[str, Callable[..., Any]], *, what: str, **given: Any
) -> Any:
    """Make what a text names.

    Args:
        text_or_call: such as ``"resnet18(width=0.5)"``.
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
    call = parse_call(text_or_call, what=what) if isinstance(text_or_call, str) else text_or_call
    if call.name not in table:
        raise ValueError(
            f"there is no {what} {short(call.name)!r}"
            f"{did_you_mean(call.name, table, otherwise='there are')}"
        )
    make = table[call.name]
    parameters = inspect.signature(make).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    own = [p for p in parameters.values() if p.kind is not p.VAR_POSITIONAL and p.name not in given]
    settings = bind(call, own, what=what)
    fitting = {key: value for key, value in given.items() if takes_any or key in parameters}
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


def check_text(text: str, what: str) -> None:
    """Refuse what is not text, is too long or too deep, or has brackets that do not match."""
    if not isinstance(text, str):
        raise ValueError(f"{what} is expected to be text, got {text!r}")
    if len(text) > MAX_LENGTH:
        raise ValueError(
            f"{what} is expected to have at most {MAX_LENGTH} characters, got {len(text)}"
        )
    opened: list[str] = []
    quote = ""
    for sign in text:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
        elif sign in _OPEN:
            opened.append(sign)
            if len(opened) > MAX_DEPTH:
                _too_deep(text, what)
        elif sign == "#":
            raise ValueError(f"{what}: a comment is not read, got {short(text)!r}")
        elif sign in _CLOSE and (not opened or _OPEN[_CLOSE.index(sign)] != opened.pop()):
            raise ValueError(f"{what}: {sign!r} closes nothing in {short(text)!r}")
    if opened or quote:
        raise ValueError(f"{what}: {(quote or opened[-1])!r} is not closed in {short(text)!r}")
    if re.search(rf"(?:[-+~]\s*){{{MAX_DEPTH + 1}}}", text):
        _too_deep(text, what)


def _too_deep(text: str, what: str) -> NoReturn:
    raise ValueError(
        f"{what} is expected to be nested at most {MAX_DEPTH} deep, got {short(text)!r}"
    )


def parse(text: str, *, what: str) -> ast.expr:
    """The tree of a text; nothing of it is looked at yet."""
    check_text(text, what)
    line = re.sub(r"[\r\n\t\f]", " ", text).strip()
    if not line:
        raise ValueError(f"{what} is expected, got nothing")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(line, mode="eval").body
    except (RecursionError, MemoryError):
        _too_deep(text, what)
    except (SyntaxError, ValueError) as error:
        place = getattr(error, "offset", None)
        where = f" at character {place}" if place else ""
        raise ValueError(f"{what}: {short(text)!r} cannot be read{where}") from None


class Reader:
    """Reads parts of a tree, with the whole text at hand for messages."""

    def __init__(self, text: str, what: str) -> None:
        self.text, self.what = text, what

    def mistake(self, node: ast.AST, expected: str) -> ValueError:
        """What to raise for a part that does not belong there."""
        line = re.sub(r"[\r\n\t\f]", " ", self.text).strip()
        part = ast.get_source_segment(line, node) or ""
        within = "" if part.strip() == line else f" in {short(line)!r}"
        return ValueError(f"{self.what} expects {expected}, got {short(part)!r}{within}")

    def call(self, node: ast.AST) -> Call:
        """A name, or a call of one with plain values."""
        name, args, kwargs = self.parts(node)
        return Call(
            name,
            tuple(self.value(arg) for arg in args),
            {key: self.value(value) for key, value in kwargs.items()},
        )

    def parts(self, node: ast.AST) -> tuple[str, list[ast.expr], dict[str, ast.expr]]:
        """Name and settings of a call, the settings not read yet."""
        if isinstance(node, ast.Name):
            return node.id, [], {}
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            raise self.mistake(node, "a name such as flip, or a call such as pad_crop(4)")
        kwargs: dict[str, ast.expr] = {}
        for keyword in node.keywords:
            if keyword.arg is None:
                raise self.mistake(node, "settings one by one")
            # A name given twice does not get through the parser.
            kwargs[keyword.arg] = keyword.value
        return node.func.id, node.args, kwargs

    def value(self, node: ast.AST, depth: int = 0) -> Any:
        """A plain value: a number, text, True, False, None, inf, or a sequence of them."""
        if depth > MAX_DEPTH:
            _too_deep(self.text, self.what)
        if isinstance(node, ast.Constant) and isinstance(node.value, (str, bool, type(None))):
            return node.value
        if isinstance(node, (ast.Tuple, ast.List)):
            items = [self.value(item, depth + 1) for item in node.elts]
            return tuple(items) if isinstance(node, ast.Tuple) else items
        number = self.number(node, depth)
        if number is not None:
            return number
        if isinstance(node, ast.Name):
            raise self.mistake(node, f"text in quotes, as in '{short(node.id)}'")
        raise self.mistake(node, "numbers and texts as settings")

    def number(self, node: ast.AST, depth: int = 0) -> int | float | None:
        """A number with its sign, or none where it is something else."""
        sign = 1
        while isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.UAdd, ast.USub)):
            sign = -sign if isinstance(node.op, ast.USub) else sign
            node, depth = node.operand, depth + 1
            if depth > MAX_DEPTH:
                _too_deep(self.text, self.what)
        if isinstance(node, ast.Name) and node.id == "inf":
            return sign * math.inf
        value = node.value if isinstance(node, ast.Constant) else None
        if type(value) is float or (type(value) is int and abs(value) < 2**63):
            return sign * value
        return None
