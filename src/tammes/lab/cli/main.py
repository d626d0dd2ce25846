"""The command ``tammes``.

Every command is a module with ``add_arguments(parser)`` and ``run(arguments)``, imported only when
it is called: ``advise``, ``losses`` and ``checkpoint`` need torch alone, the others say what they
need. What is done is 0, what the user can put right 2, and 1 where ``compare`` or ``reproduce``
shows results with some missing.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

from tammes.lab.config.expressions import did_you_mean

COMMANDS = {
    "demo": "a few losses on digits in a minute, and the page that comes of it",
    "train": "train one model on your data",
    "compare": "train with several losses and seeds, and compare them",
    "reproduce": "run tables and figures of the papers, with the published numbers beside",
    "report": "the page of runs that were trained",
    "advise": "feasible margins and scales, what cannot train, what it costs",
    "losses": "every loss with its formula, settings, heads and source",
    "measure": "margins of prototypes and embeddings in files",
    "evaluate": "recognise new classes from a few images of each: few-shot episodes",
    "checkpoint": "look into a checkpoint of a head, make one file of it, or several of one",
}
"""What each command does; it is the module of that name in :mod:`.commands`."""


class _Mistake(Exception):
    """Something the user can put right, said in a sentence."""


class _Parser(argparse.ArgumentParser):
    """A parser that says one sentence in place of its whole usage."""

    def __init__(self, prog: str) -> None:
        # A shortened flag may mean another one in the next version.
        super().__init__(prog=prog, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments: --"):
            name = message.split()[2].partition("=")[0]
            message += did_you_mean(name, self._option_string_actions)
        raise _Mistake(f"{message}; see {self.prog} --help")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: what stands behind ``tammes`` on the command line; that of this process by
            default.

    Returns:
        The exit code: that of the command, 2 after one sentence on stderr where the user made a
        mistake, or 130 where the user interrupted it.

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
            # Formulas have signs that not every terminal knows.
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
        # Here rather than at the end of the process, where nothing could be done about it.
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
    lines = ["usage: tammes COMMAND ...", ""]
    lines += [f"  {name:<12}{text}" for name, text in COMMANDS.items()]
    return "\n".join([*lines, "", "`tammes COMMAND --help` says more."])


def _load(name: str) -> ModuleType:
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS, otherwise="there are")
        raise _Mistake(f"there is no command {name!r}{hint}")
    return importlib.import_module(f"tammes.lab.cli.{name}")


def _stop_writing() -> int:
    """Whoever read our output has left, as ``head`` does; there is nobody to complain to."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
