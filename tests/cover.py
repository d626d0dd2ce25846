"""Thin out a grid of test parameters: what shows something new runs always, the rest is slow."""

import itertools

import pytest
from catalogue import CLASSES, HEADS, KERNEL_HEADS, fits, numbers_read


def slow(*values):
    """A parameter that only ``make check`` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)


def cover(cases, shows):
    """Parameters of all cases; those that show nothing new are marked ``slow``.

    ``shows(*case)`` names what a case can find, as hashable values. A case that names one which no
    case before it named runs in ``make test`` as well; every case runs in ``make check``.
    """
    seen, parameters = set(), []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        found = set(shows(*values))
        parameters.append(slow(*values) if found <= seen else pytest.param(*values))
        seen |= found
    return parameters


def kernel_cases(terms):
    """Scale, head and term for comparing a kernel with the dense one, wherever they fit."""
    return cover(
        [
            (scale, head, term)
            for scale, head, term in itertools.product(("learnable", 3.0), KERNEL_HEADS, terms)
            if fits(terms[term], HEADS[head](6, CLASSES))
        ],
        lambda scale, head, term: [scale, *numbers_read(terms[term], head)],
    )
