"""Draw a random case from one integer."""

import random as python_random

from fuzz.case import Case
from fuzz.ranges import CENTERS, HEADS, SETTINGS, Choice, Counts, fits, on_grid


def draw(seed):
    """Draw a case from an integer."""
    random = python_random.Random(seed)

    def chance(probability):
        return random.random() < probability

    head = random.choice(HEADS)
    small = not chance(0.12)
    case = Case(
        seed,
        head=head,
        rows=random.choice((0, 1, 1, 2, 3, 4, 5, 7, 9) if small else (13, 33, 65)),
        classes=random.choice((2, 3, 4, 5, 7, 9, 12) if small else (17, 63, 65, 130)),
        size=random.choice((1, 2, 3, 4, 6, 7, 9) if small else (5, 16, 33)),
        scale=random.choice((0.5, 1.0, 1.0, 4.0, 8.0, 30.0, 64.0)),
        learnable=chance(0.25) and head != "cosine_adaptive",
        reduction=random.choice(("mean", "mean", "sum", "none")),
        training=not chance(0.1),
        spread=random.choice((0.125, 1.0, 1.0, 1.0, 8.0)),
        labels=random.choice(("int64", "int64", "int32", "int16")),
        ignore_index=random.choice((-100, -100, -1, 0)),
    )
    if head == "simplex" and case.classes > case.size + 1 and case.size != 2:
        case.classes = case.size + 1
    case.dtype, case.parameter_dtype = random.choice(
        4 * [("float64", "float64")]
        + 4 * [("float32", "float32")]
        + [(half, "float32") for half in ("bfloat16", "float16")]
        + [(half, half) for half in ("bfloat16", "float16")]
        + [("float32", "float64"), ("float64", "float32")]
    )
    case.autocast = case.parameter_dtype == "float32" and chance(0.15)
    names = [name for name in SETTINGS if fits(name, head)]
    chosen = [random.choice(names) for _ in range(random.choice((1, 1, 2, 2, 3)))]
    case.terms = tuple(
        (random.choice((1.0, 1.0, 0.5, 0.25, 2.0, -0.5)), name, _draw_settings(random, name, case))
        for name in chosen
    )
    if case.classification and case.metric and chance(0.5):
        options = [("spectral_sum", random.choice((0.25, 0.5, 1.0, 2.0)), chance(0.7))]
        if case.size > case.classes * CENTERS.get(head, 1):
            options.append(("direct_sum", random.choice((None, 0.125)), chance(0.7)))
        case.within = random.choice(options)
    in_span = case.within is not None and any(s.get("normalize") for _, _, s in case.metric)
    if in_span and (head == "simplex" or case.size == 1):
        # Nothing but rounding errors may be left of a feature, and they have no direction.
        case.within = in_span = None
    if case.rows:
        case.ignored = random.choice((0, 0, 1, random.randint(0, case.rows)))
        case.nan_ignored = case.ignored > 0 and chance(0.2)
        special = ["zero", "repeated", *([] if in_span else ["aligned", "opposite"])]
        if case.within is None and head != "simplex":
            special += ["zero_prototype", "repeated_prototype"]
        case.special = tuple(random.sample(special, random.choice((0, 0, 0, 1, 2))))
    case.weights = random.choice(("", "", "given", "learned"))
    if chance(0.25):
        case.class_weights = tuple(on_grid(random, 0, 3) for _ in range(case.classes))
    if head == "linear" and case.classes > 2 and chance(0.4):
        case.masked = random.randint(1, case.classes - 2)
        usable = case.classes - case.masked
        if 0 <= case.ignore_index < case.classes:
            usable -= not bool(case.masked_classes()[case.ignore_index])
        if usable < 1:
            case.masked = 0
        case.masked_own = case.masked > 0 and case.rows > case.ignored and chance(0.08)
        if case.masked_own:
            # An ignored row is no error.
            case.ignore_index = -100
            case.ignored, case.nan_ignored = 0, False
    if case.classes < 3 and case.ignore_index == 0:
        case.ignore_index = -100
    _draw_changes(random, case)
    if case.stateful or case.schedules:
        case.steps = 3
    return case


def _draw_settings(random, name, case):
    settings = {}
    for key, spec in SETTINGS[name].items():
        if isinstance(spec, Choice):
            settings[key] = random.choice(spec.values)
        elif isinstance(spec, Counts):
            settings[key] = tuple(random.randint(1, 200) for _ in range(case.classes))
        elif spec.per_class and random.random() < 0.15:
            settings[key] = tuple(spec.draw(random) for _ in range(case.classes))
        else:
            settings[key] = spec.draw(random)
    if settings.get("extension") == "linear":
        settings.pop("m1", None)
    return settings


def _draw_changes(random, case):
    """Draw what changes from call to call: settings at the call, and schedules."""
    for key in case.adjustable():
        kind = random.random()
        low, high = case.range_of(key)
        per_class = any(isinstance(s.get(key), tuple) for _, _, s in case.terms)
        if kind < 0.1:
            case.at_call[key] = on_grid(random, low, high)
        elif kind < 0.3 and key in case.per_example():
            case.at_call[key] = random.choice(("each", "each", "learned"))
        elif kind < 0.45 and not per_class:
            case.schedules[key] = _draw_schedule(random, key, low, high)
    if case.class_weights is None and random.random() < 0.08:
        counts = tuple(random.randint(1, 200) for _ in range(case.classes))
        case.schedules["class_weights"] = ("DeferredReweighting", (counts,), {"start": 1})


def _draw_schedule(random, key, low, high):
    if key == "blend" and random.random() < 0.5:
        return random.choice(
            (
                ("LambdaAnnealing", (8.0,), {"gamma": 0.5, "power": 2.0, "minimum": 0.125}),
                ("LambdaDecay", (4,), {"start": 8.0, "end": 0.5}),
            )
        )
    shape = random.choice(("linear", "linear", "cosine", "exponential"))
    ends = (on_grid(random, low, high), on_grid(random, low, high))
    return ("WarmUp", ends, {"steps": 2, "shape": shape, "delay": random.choice((0, 0, 1))})
