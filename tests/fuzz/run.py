"""Fuzz every path of a criterion: ``python tests/fuzz/run.py --minutes 60``."""

import argparse
import logging
import os
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

if not torch.cuda.is_available():
    # Triton reads it when a kernel is defined.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def main():
    """Read the command line, run, and end with status 1 if anything failed."""
    from fuzz.campaign import EVERY, run
    from fuzz.paths import PATHS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, help="how long to run")
    parser.add_argument("--cases", type=int, help="number of cases, in place of a time")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first case")
    parser.add_argument("--paths", default=",".join(PATHS), help=f"of {', '.join(PATHS)}")
    parser.add_argument("--json", type=Path, help="file to write the summary to")
    parser.add_argument("--no-shrink", action="store_true", help="print failing cases as drawn")
    options = parser.parse_args()
    names = options.paths.split(",")
    unknown = sorted(set(names) - set(PATHS))
    if unknown:
        parser.error(f"--paths expects some of {', '.join(PATHS)}, got {', '.join(unknown)}")
    if options.minutes is None and options.cases is None:
        options.minutes = 1.0
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "overflow encountered", RuntimeWarning)
    logging.getLogger("tammes").setLevel(logging.ERROR)
    summary = run(
        names,
        first=options.seed,
        cases=options.cases,
        minutes=options.minutes,
        # A few named cases go through every path; a long run spends its time evenly.
        every=None if options.cases is not None else EVERY,
        tell=lambda line: print(line, flush=True),
        shrinking=0.0 if options.no_shrink else 20.0,
    )
    print(summary)
    if options.json is not None:
        options.json.write_text(summary.to_json() + "\n")
    return 1 if summary.failures else 0


if __name__ == "__main__":
    sys.exit(main())
