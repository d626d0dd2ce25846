"""Run many cases over many paths, and keep count."""

import collections
import itertools
import json
import time
from dataclasses import dataclass, field

from fuzz.compare import Reference, differences
from fuzz.draw import draw
from fuzz.reproduce import command, script
from fuzz.shrink import shrink

EVERY = {"fused": 8, "sharded": 4, "grouped": 6, "compiled": 25, "inductor": 400}
"""Slow paths take one case in so many."""


@dataclass
class Failure:
    """A case that a path has wrong.

    Attributes:
        path: name of the path.
        seed: of the case as it was drawn.
        cause: path, quantity, terms and dtype, by which failures are grouped.
        report: the simplified case as code.
    """

    path: str
    seed: int
    cause: tuple
    report: str


@dataclass
class Summary:
    """What was tried and what was found."""

    cases: int = 0
    seconds: float = 0.0
    by_path: dict = field(default_factory=lambda: collections.defaultdict(collections.Counter))
    by_term: collections.Counter = field(default_factory=collections.Counter)
    failures: list = field(default_factory=list)

    def __str__(self):
        lines = [f"{self.cases} cases in {self.seconds:.0f} s"]
        for path, count in self.by_path.items():
            rate = count["cases"] / max(count["milliseconds"] / 1000, 1e-3)
            lines.append(
                f"  {path:13} {count['cases']:6} cases {count['comparisons']:8} comparisons "
                f"{rate:8.1f} cases/s  {count['failures']} failures"
            )
        lines.append("comparisons of whole cases by term:")
        lines.append("  " + ", ".join(f"{k} {v}" for k, v in sorted(self.by_term.items())))
        groups = collections.defaultdict(list)
        for failure in self.failures:
            groups[failure.cause].append(failure)
        for cause, members in sorted(groups.items(), key=lambda item: -len(item[1])):
            seeds = ", ".join(str(f.seed) for f in members[:8])
            lines.append(f"FAILED {len(members)}: {' / '.join(map(str, cause))} (seeds {seeds})")
        lines.append("no failures" if not self.failures else f"{len(self.failures)} failures")
        return "\n".join(lines)

    def to_json(self):
        """The same as JSON."""
        return json.dumps(
            {
                "cases": self.cases,
                "seconds": round(self.seconds, 1),
                "paths": self.by_path,
                "terms": self.by_term,
                "failures": [vars(failure) for failure in self.failures],
            },
            indent=1,
        )


def run(
    paths,
    *,
    first=0,
    cases=None,
    minutes=None,
    every=EVERY,
    tell=None,
    shrinking=20.0,
    most=None,
):
    """Fuzz.

    Args:
        paths: names of the paths.
        first: seed of the first case; the following cases have the following seeds.
        cases: number of cases, or none for as many as there is time for.
        minutes: time, or none.
        every: for each slow path, how many cases it takes one of; none for all cases.
        tell: called with a line of text for each failure, and with the progress every minute.
        shrinking: seconds to simplify one failing case.
        most: number of failures after which to stop, or none.
    """
    summary, start = Summary(), time.monotonic()
    minute = 0
    for seed in itertools.count(first):
        summary.seconds = time.monotonic() - start
        done = cases is not None and summary.cases >= cases
        done = done or (most is not None and len(summary.failures) >= most)
        if done or (minutes is not None and summary.seconds > 60 * minutes):
            return summary
        if tell is not None and summary.seconds // 60 > minute:
            minute = summary.seconds // 60
            tell(f"{minute:.0f} min: {summary.cases} cases, {len(summary.failures)} failures")
        _one(summary, seed, paths, every or {}, tell, shrinking)
    return summary


def _one(summary, seed, paths, every, tell, shrinking):
    case = draw(seed)
    exact = None if case.masked_own else Reference(case)
    summary.cases += 1
    small = None
    for place, path in enumerate(paths):
        # Each path has its turn at another case.
        if (seed + place) % every.get(path, 1):
            continue
        begin = time.monotonic()
        found = differences(case, path, exact)
        if found is None:
            continue
        count = summary.by_path[path]
        count["milliseconds"] += int(1000 * (time.monotonic() - begin))
        count["cases"] += 1
        count["comparisons"] += 1 if exact is None else sum(len(e) for e in exact.exact)
        summary.by_term.update({name for _, name, _ in case.terms})
        if found:
            count["failures"] += 1
            small = _failed(summary, case, path, found, small, tell, shrinking)


def _failed(summary, case, path, found, small, tell, shrinking):
    """Note a failure; the simplified case of another path is tried first, and returned."""
    still = [] if small is None else differences(small, path)
    if still:
        found = still
    elif shrinking:
        small, found = shrink(case, path, shrinking)
    else:
        small = case
    first = found[0]
    what = str(first.found)[:60] if first.quantity == "raises" else first.quantity
    terms = "+".join(sorted({name for _, name, _ in small.terms}))
    report = f"{script(small, found)}\n# rerun: {command(case, path)}"
    cause = (path, terms, f"{small.dtype} on {small.parameter_dtype} {small.head}", what)
    summary.failures.append(Failure(path, case.seed, cause, report))
    if tell is not None:
        tell(f"{'-' * 20} seed {case.seed}, {path}\n{report}")
    return small
