"""The command ``tammes``, one module per subcommand."""

from tammes.lab.cli.main import main

__all__ = ["main"]
