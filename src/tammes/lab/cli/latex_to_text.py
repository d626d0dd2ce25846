"""Convert LaTeX formulas and docstrings to plain text for a terminal."""

import re
import unicodedata
from collections.abc import Iterator

# \x00 removes the blank before it, \x01 the blank after it.
_SYMBOLS = {
    "ell": "ℓ", "log": "log", "cos": "cos", "sin": "sin", "exp": "exp", "max": "max", "min": "min",
    "arccos": "arccos", "Lambda": "Λ", "lambda": "λ", "theta": "θ", "Phi": "Φ", "phi": "φ",
    "varphi": "φ", "psi": "ψ", "alpha": "α", "beta": "β", "gamma": "γ", "Delta": "Δ", "mu": "μ",
    "sigma": "σ", "kappa": "κ", "rho": "ρ", "pi": "π", "varepsilon": "ε", "epsilon": "ε",
    "sum": "Σ", "infty": "∞", "ne": "≠", "le": "≤", "ge": "≥", "to": "→", "leftarrow": "←",
    "setminus": "\x00∖\x01", "top": "ᵀ", "cdot": "·", "times": "×", "in": "∈", "propto": "∝",
    "notin": "∉", "sim": "∼", "tau": "τ", "delta": "δ",
    "lVert": "‖\x01", "rVert": "\x00‖", "|": "‖", "lfloor": "⌊\x01", "rfloor": "\x00⌋",
    "qquad": "; ", "quad": "; ", ",": " ", ";": " ", " ": " ", "\\": "; ", "{": "{", "}": "}",
    "sqrt": "√",
}  # fmt: skip
_WORDS = frozenset({"log", "cos", "sin", "exp", "max", "min", "arccos"})
_SPACED = frozenset({"ne", "le", "ge", "to", "leftarrow", "in", "notin", "sim", "propto"})
_SIZES = frozenset(
    {"bigl", "bigr", "Bigl", "Bigr", "biggl", "biggr", "left", "right", "displaystyle"}
)
_FRACTIONS = frozenset({"frac", "tfrac", "dfrac"})
_ACCENTS = {"bar": "\u0304", "hat": "\u0302", "tilde": "\u0303"}
_POWERS = {"2": "²", "3": "³", "ᵀ": "ᵀ"}
_TOKEN = re.compile(r"\\([A-Za-z]+|.)|([{}^_])|(\s+)|(.)", re.DOTALL)


def formula(latex: str) -> str:
    r"""Convert a LaTeX formula to one line of plain text.

    Only the LaTeX that occurs in the docstrings of this package is supported.

    Example:
        >>> formula(r"\ell = \log\bigl(1 + e^{\Lambda - s(\cos\theta_y - m)}\bigr)")
        'ℓ = log(1 + e^{Λ − s(cos θ_y − m)})'
        >>> formula(r"\tfrac12\lVert x_i - \bar x\rVert^2")
        '1/2 ‖x_i − x̄‖²'
    """
    text = _Reader(latex.replace("&", "")).text()
    text = re.sub(r"\s*\x00|\x01\s*", "", text)
    text = re.sub(r"\s+", " ", text)
    text = re.sub(r"(\s*[;,]\s*)*;\s*", "; ", text)
    text = re.sub(r" ([,)\]])", r"\1", text)
    text = re.sub(r"([(\[]) ", r"\1", text)
    return unicodedata.normalize("NFC", text.replace("-", "−").strip(" ;,"))


class _Reader:
    """Recursive-descent parser of a formula."""

    def __init__(self, latex: str) -> None:
        self.tokens = [match.groups() for match in _TOKEN.finditer(latex)]
        self.place = 0

    def text(self) -> str:
        """Read up to the end or the closing brace."""
        parts: list[str] = []
        while self.place < len(self.tokens):
            command, special, _, _ = self.tokens[self.place]
            if special == "}":
                break
            if command in _WORDS and parts and re.search(r"[\w)}]$", parts[-1]):
                parts.append(" ")
            of_a_word = bool(parts) and parts[-1].strip() in _WORDS
            piece = self.piece()
            if command in _FRACTIONS and of_a_word:
                parts[-1], piece = parts[-1].strip(), f"({piece.strip()})"
            parts.append(piece)
        return "".join(parts)

    def piece(self) -> str:
        """Read the next symbol, group, or command with its arguments."""
        command, special, blank, character = self.tokens[self.place]
        self.place += 1
        if blank:
            return " "
        if character is not None:
            return character
        if special == "{":
            inside = self.text()
            self.place += 1
            return inside
        if special in ("^", "_"):
            return self.script(special)
        return self.command(command)

    def argument(self) -> str:
        """Read the argument of a command: a group, or the next character."""
        while self.tokens[self.place][2]:
            self.place += 1
        return self.piece()

    def script(self, mark: str) -> str:
        """Read an exponent or an index."""
        inside = self.argument().strip()
        if mark == "^" and inside in _POWERS:
            return _POWERS[inside]
        return f"{mark}{inside}" if len(inside) == 1 else f"{mark}{{{inside}}}"

    def command(self, name: str) -> str:
        """Translate a command."""
        if name in _SIZES:
            return ""
        if name in _FRACTIONS:
            over, under = _closed(self.argument()), _closed(self.argument())
            return f"{over}/{under}" + (" " if self._before_a_letter() else "")
        if name in ("text", "operatorname", "mathrm", "mathcal"):
            return self.argument()
        if name in _ACCENTS:
            return self.argument() + _ACCENTS[name]
        symbol = _SYMBOLS.get(name, name)
        if name in _SPACED:
            # Those common in subscripts have no blanks around them.
            return f"\x00{symbol}\x01" if name in ("ne", "in", "notin") else f" {symbol} "
        if name in _WORDS and self._before_a_letter():
            return f"{symbol} "
        return symbol

    def _before_a_letter(self) -> bool:
        if self.place >= len(self.tokens):
            return False
        command, special, _, character = self.tokens[self.place]
        if command is not None:
            return command not in (*_SIZES, ",", " ", "qquad", "quad", "rVert")
        return special is None and character is not None and character.isalnum()


def _closed(text: str) -> str:
    """Add parentheses unless the text is a single factor."""
    text = text.strip()
    return text if re.fullmatch(r"[\w̄̂̃‖]+|e\^\{[^{}]*\}", text) else f"({text})"


def docstring(text: str) -> Iterator[str]:
    """Yield the lines of a docstring with formulas and roles as plain text."""
    lines = text.splitlines()
    place = 0
    while place < len(lines):
        line = lines[place]
        place += 1
        if ".. math::" not in line:
            yield _inline(line).rstrip()
            continue
        block = [line.split(".. math::", 1)[1]]
        while place < len(lines) and lines[place].strip():
            block.append(lines[place])
            place += 1
        for part in formula(" ".join(block)).split("; "):
            yield f"    {part}"


def _inline(line: str) -> str:
    line = re.sub(r":math:`([^`]*)`", lambda match: formula(match[1]), line)
    line = re.sub(r":\w+:`~?(?:tammes\.)?([^`]*)`", r"\1", line)
    return line.replace("``", "")


def first_formula(text: str) -> str:
    """Return the first displayed formula of a docstring, in one line."""
    match = re.search(r"\.\. math::(.*?)(?:\n\s*\n|\Z)", text, re.DOTALL)
    return formula(match[1]) if match else ""
