"""``python -m tammes`` is the command ``tammes``."""

import sys

from tammes.lab.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
