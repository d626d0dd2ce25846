"""The command ``tammes``.

Every command is a module with ``add_arguments(parser)`` and ``run(arguments)``, imported only when
it is called: ``advise``, ``losses`` and ``checkpoint`` need only torch, the others name a missing
package. Exit codes: 0 for success, 2 for a user error, 1 if ``compare`` or ``reproduce`` ends with
missing results or ``doctor`` has a warning, 130 after an interruption.
"""

import argparse
import importlib
import os
import re
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

from tammes.lab.config.expressions import did_you_mean

COMMANDS = {
    "demo": "compare a few losses on digits in a minute, and write a page",
    "train": "train one model on your data",
    "compare": "train several losses with several seeds and compare them",
    "tune": "search for scale, margin and learning rate of a loss on held-out images",
    "reproduce": "reproduce tables and figures of the papers, next to the published numbers",
    "report": "compare finished runs on a page",
    "doctor": "say what is wrong with runs, why, and what to change",
    "advise": "say which margins and scales are feasible, and what a step costs",
    "losses": "show every loss with its formula, settings, heads and references",
    "measure": "measure the margins of prototypes and embeddings from files",
    "evaluate": "test retrieval, verification, open sets or few-shot episodes",
    "predict": "predict the classes of images with a trained model",
    "gallery": "enrol individuals, and recognise them in images",
    "export": "write a trained model to an ONNX or a torch.export file",
    "checkpoint": "inspect, merge or split the checkpoint of a head",
}
"""Commands and their summaries; each is a module of this package."""
SECTIONS = {
    "Train": ("demo", "train", "compare", "tune", "reproduce"),
    "Look at results": ("report", "doctor", "measure", "evaluate"),
    "Use a trained model": ("predict", "gallery", "export", "checkpoint"),
    "Choose a loss": ("advise", "losses"),
}
"""Sections of ``tammes --help``."""


_FOLDER = re.compile(r"[^\W\d][\w./-]*")
"""A word that may be meant as a folder of images."""


class _Mistake(Exception):
    """User error, explained in one sentence."""


class _Parser(argparse.ArgumentParser):
    """Parser that reports errors in one sentence, without the usage."""

    def __init__(self, prog: str) -> None:
        # An abbreviated flag may mean another one in the next version.
        super().__init__(prog=prog, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments: "):
            first = message.removeprefix("unrecognized arguments: ")
            name = first.partition("=")[0]
            if name.startswith("--"):
                message += did_you_mean(name.split()[0], self._option_string_actions)
            elif "--data" in self._option_string_actions and _FOLDER.fullmatch(first):
                message += f"; did you mean --data {first}?"
        choice = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if choice:
            message += did_you_mean(choice[1], re.findall(r"[\w-]+", choice[2]))
        raise _Mistake(f"{message}; see {self.prog} --help")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, given by the words after ``tammes``; by default those of this process.

    Returns:
        The exit code of the command; 2 after a user error, explained on stderr; 130 after an
        interruption.

    Example:
        >>> main(["losses", "normface", "--json"]) # doctest: +ELLIPSIS
        {
          "name": "normface",
        ...
        0
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # Formulas contain characters that some terminals cannot encode.
            stream.reconfigure(errors="replace")
    name = "tammes"
    try:
        if not words or words[0] in ("-h", "--help", "help"):
            print(_usage())
            return 0
        if words[0] == "--version":
            import tammes

            print(f"tammes {tammes.__version__}")
            return 0
        command = _load(words[0])
        name = f"tammes {words[0]}"
        parser = _Parser(prog=name)
        command.add_arguments(parser)
        code = int(command.run(parser.parse_args(words[1:])))
        # Flushed here, where a broken pipe can still be handled.
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130
    except (_Mistake, ValueError, ImportError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            return _stop_writing()
        print(f"{name}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _usage() -> str:
    lines = ["usage: tammes COMMAND ..."]
    for heading, names in SECTIONS.items():
        lines += ["", f"{heading}:", *(f"  {name:<12}{COMMANDS[name]}" for name in names)]
    return "\n".join([*lines, "", "`tammes COMMAND --help` shows the options of a command."])


def _load(name: str) -> ModuleType:
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS, otherwise="there are")
        raise _Mistake(f"there is no command {name!r}{hint}")
    return importlib.import_module(f"tammes.lab.cli.{name}")


def _stop_writing() -> int:
    """Discard further output after the reader has closed the pipe, as ``head`` does."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
