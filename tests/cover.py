"""Thin out a grid of test parameters: what shows something new runs always, the rest is slow."""

import pytest


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
