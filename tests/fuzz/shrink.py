"""Simplify a failing case as long as it keeps failing."""

import copy
import time
from dataclasses import replace

from fuzz.compare import differences
from fuzz.ranges import SETTINGS, Number


def shrink(case, path, seconds=20.0):
    """Simplify greedily: every change is kept that leaves a failure of the same kind.

    Returns:
        The simplest case found, and its failures.
    """
    found = differences(case, path)
    kind, end = _kind(found), time.monotonic() + seconds
    changed = True
    while changed:
        changed = False
        for smaller in simpler(case):
            if time.monotonic() > end:
                return case, found
            still = _failures_if_valid(smaller, path)
            if still and _kind(still) == kind:
                case, found, changed = smaller, still, True
                break
    return case, found


def _kind(found):
    """A message without its numbers, or that numbers differ."""
    first = found[0]
    return str(first.found)[:30] if first.quantity == "raises" else "differs"


def _failures_if_valid(case, path):
    try:
        return differences(case, path)
    except Exception:
        # The reference cannot compute it: the change made no sense.
        return []


def simpler(case):
    """Cases that are simpler in one respect, the largest changes first."""
    if len(case.terms) > 1:
        for place in range(len(case.terms)):
            kept = case.terms[:place] + case.terms[place + 1 :]
            yield _consistent(replace(case, terms=kept))
    for change in (
        {"schedules": {}},
        {"at_call": {}},
        {"within": None},
        {"special": ()},
        {"masked": 0, "masked_own": False},
        {"ignored": 0, "nan_ignored": False},
        {"weights": ""},
        {"class_weights": None},
        {"autocast": False},
        {"learnable": False},
        {"dtype": "float64", "parameter_dtype": "float64"},
        *([{"dtype": "float32", "parameter_dtype": "float32"}] if _is_mixed(case) else []),
        {"steps": 1},
        {"steps": min(case.steps, 2)},
        {"labels": "int64"},
        {"ignore_index": -100},
        {"training": True},
        {"spread": 1.0},
        {"scale": 1.0},
        {"reduction": "sum"},
        {"nan_ignored": False},
    ):
        if any(getattr(case, key) != value for key, value in change.items()):
            yield _consistent(replace(case, **change))
    for name in ("rows", "classes", "size"):
        now, least = getattr(case, name), {"rows": 1, "classes": 2, "size": 1}[name]
        for value in sorted({least, now // 2, now - 1}):
            if least <= value < now:
                yield _consistent(_resized(case, name, value))
    for name in ("schedules", "at_call"):
        for key in getattr(case, name):
            rest = {k: v for k, v in getattr(case, name).items() if k != key}
            yield replace(case, **{name: rest})
    if len(case.special) > 1:
        for place in range(len(case.special)):
            yield replace(case, special=case.special[:place] + case.special[place + 1 :])
    yield from _with_simpler_terms(case)


def _is_mixed(case):
    return case.dtype != case.parameter_dtype or case.dtype in ("bfloat16", "float16")


def _with_simpler_terms(case):
    for place, (factor, name, settings) in enumerate(case.terms):
        changes = [(1.0, settings)] if factor != 1.0 else []
        for key, value in settings.items():
            spec = SETTINGS[name][key]
            if isinstance(value, tuple) and isinstance(spec, Number):
                changes.append((factor, {**settings, key: value[0]}))
            elif isinstance(spec, Number) and value != 0 and spec.low <= 0:
                changes.append((factor, {**settings, key: 0.0}))
        for new_factor, new in changes:
            terms = list(case.terms)
            terms[place] = (new_factor, name, new)
            yield replace(case, terms=tuple(terms))


def _resized(case, name, value):
    case = replace(copy.deepcopy(case), **{name: value})
    if name == "classes":
        cut = case.class_weights
        case.class_weights = None if cut is None else cut[:value]
        case.terms = tuple(
            (f, n, {k: v[:value] if isinstance(v, tuple) else v for k, v in s.items()})
            for f, n, s in case.terms
        )
        if "class_weights" in case.schedules:
            kind, (counts,), options = case.schedules["class_weights"]
            case.schedules["class_weights"] = (kind, (counts[:value],), options)
    return case


def _consistent(case):
    """The same case without what its other parts no longer allow."""
    case = copy.deepcopy(case)
    if not (case.classification and case.metric):
        case.within = None
    if case.within is not None and case.within[0] == "direct_sum" and case.size <= case.classes:
        case.within = None
    settings = {key for _, name, _ in case.terms for key in SETTINGS[name]}
    case.at_call = {k: v for k, v in case.at_call.items() if k in settings}
    case.schedules = {
        k: v for k, v in case.schedules.items() if k in settings or k == "class_weights"
    }
    case.masked = max(0, min(case.masked, case.classes - 2)) if case.head == "linear" else 0
    case.masked_own = case.masked_own and case.masked > 0 and case.ignore_index < 0
    case.ignored = min(case.ignored, case.rows)
    case.nan_ignored = case.nan_ignored and case.ignored > 0
    if case.head == "simplex" and case.classes > case.size + 1 and case.size != 2:
        case = _resized(case, "classes", case.size + 1)
    return case
