"""How large the class margin can be: known optima, proven bounds, and that they agree."""

import itertools
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.special import eval_gegenbauer, roots_jacobi

from tammes.geometry import largest_class_margin
from tammes.geometry.bounds import KNOWN, fejes_toth, levenshtein
from tammes.metrics.functional import class_margin

DEGREES = {
    (4, 3): 109.4712206,
    (5, 3): 90.0,
    (6, 3): 90.0,
    (7, 3): 77.8695421,
    (8, 3): 74.8584922,
    (9, 3): 70.5287794,
    (10, 3): 66.1468220,
    (11, 3): 63.4349488,
    (12, 3): 63.4349488,
    (13, 3): 57.1367031,
    (14, 3): 55.6705700,
    (24, 3): 43.6907671,
    (10, 4): 80.4059318,
    (24, 4): 60.0,
    (120, 4): 36.0,
}
"""Published to so many digits (Sloane's tables of spherical codes; OEIS for 7, 10, 13 and 14)."""

SHARP = [
    (12, 3),
    (16, 5),
    (27, 6),
    (56, 7),
    (240, 8),
    (112, 21),
    (162, 21),
    (100, 22),
    (275, 22),
    (891, 22),
    (552, 23),
    (4600, 23),
    (196560, 24),
]


@pytest.mark.parametrize("place", DEGREES, ids=str)
def test_known_optima_have_their_published_angle(place):
    limit = largest_class_margin(*place)
    assert limit.exact
    assert limit.degrees == pytest.approx(DEGREES[place], abs=6e-8)


@pytest.mark.parametrize(("count", "size"), [(2, 1), (2, 5), (4, 3), (7, 6), (1000, 999)])
def test_up_to_one_more_than_the_dimension_it_is_the_simplex(count, size):
    limit = largest_class_margin(count, size)
    assert (limit.exact, limit.bound) == (True, "simplex")
    assert math.cos(limit.angle) == pytest.approx(-1 / (count - 1), abs=1e-15)


@pytest.mark.parametrize(("count", "size"), [(4, 2), (5, 3), (6, 3), (1024, 512)])
def test_up_to_twice_the_dimension_it_is_a_right_angle(count, size):
    limit = largest_class_margin(count, size)
    assert (limit.exact, limit.bound, limit.degrees) == (True, "orthoplex", 90.0)


def test_on_the_circle_it_is_a_share_of_the_full_turn():
    limit = largest_class_margin(9, 2)
    assert (limit.exact, limit.bound) == (True, "circle")
    assert limit.degrees == pytest.approx(40, abs=1e-12)


def test_on_a_line_a_third_direction_falls_on_another():
    assert largest_class_margin(3, 1).angle == 0
    assert largest_class_margin(3, 1).exact


def test_an_unknown_case_says_it_is_a_bound_and_which():
    limit = largest_class_margin(1_000_000, 512)
    assert (limit.exact, limit.bound) == (False, "Levenshtein")
    assert 86.9 < limit.degrees < 87.0


def test_the_smallest_of_the_bounds_is_taken():
    assert largest_class_margin(100, 3).bound == "Fejes Tóth"
    assert largest_class_margin(100, 3).angle == fejes_toth(100) < levenshtein(100, 3)
    assert largest_class_margin(50, 4).bound == "Levenshtein"
    # 15 points cannot be further apart than 14, which is a better bound than either.
    fifteen = largest_class_margin(15, 3)
    assert (fifteen.bound, fifteen.exact) == ("fewer points", False)
    assert fifteen.angle == largest_class_margin(14, 3).angle < levenshtein(15, 3)


@pytest.mark.parametrize("place", KNOWN, ids=str)
def test_no_known_arrangement_beats_a_proven_bound(place):
    angle = math.acos(KNOWN[place][0])
    assert angle <= levenshtein(*place) + 1e-12
    if place[1] == 3:
        assert angle <= fejes_toth(place[0]) + 1e-12


@pytest.mark.parametrize("place", SHARP, ids=str)
def test_levenshtein_is_reached_by_the_sharp_arrangements(place):
    assert levenshtein(*place) == pytest.approx(math.acos(KNOWN[place][0]), abs=1e-10)


@pytest.mark.parametrize(("count", "size"), [(2, 3), (4, 3), (7, 8), (9, 8), (512, 600)])
def test_levenshtein_is_rankins_simplex_bound_for_few_points(count, size):
    assert math.cos(levenshtein(count, size)) == pytest.approx(-1 / (count - 1), abs=1e-12)


@pytest.mark.parametrize("size", [3, 8, 512])
def test_levenshtein_is_a_right_angle_for_the_orthoplex(size):
    assert levenshtein(2 * size, size) == pytest.approx(math.pi / 2, abs=1e-12)


@pytest.mark.parametrize("count", [3, 4, 6, 12])
def test_fejes_toth_is_reached_by_triangle_tetrahedron_octahedron_icosahedron(count):
    assert fejes_toth(count) == pytest.approx(largest_class_margin(count, 3).angle, abs=1e-14)


@pytest.mark.parametrize(
    ("count", "size"), [(13, 3), (50, 3), (23, 4), (1000, 4), (30, 7), (300, 16), (4000, 24)]
)
def test_levenshtein_has_a_certificate(count, size):
    """The polynomial behind the bound satisfies Delsarte's conditions, so the bound is proven.

    If f <= 0 on [-1, s] and all its Gegenbauer coefficients are positive or zero, then points with
    cosines up to s are at most f(1) / f_0 many.
    """
    s = math.cos(levenshtein(count, size))
    exponent = (size - 3) / 2
    node, weight = roots_jacobi(64, exponent, exponent)
    # Which degree is in force: the number of points lies between the sizes of two designs.
    degree, odd = next(
        (half, odd)
        for half in range(1, 30)
        for odd in (1, 0)
        if count
        < (
            math.comb(size + half - 1, half) + math.comb(size + half - 2, half - 1)
            if odd
            else 2 * math.comb(size + half - 1, half)
        )
    )
    extra = 0 if odd else 1
    # Orthonormal polynomials of the weight (1-t)(1+t)^extra, and their kernel at s.
    measure = np.sqrt(weight * (1 - node) * (1 + node) ** extra)
    chebyshev = np.polynomial.chebyshev.chebvander
    _, r = np.linalg.qr(measure[:, None] * chebyshev(node, degree - 1))

    def polynomial(t):
        basis = np.linalg.solve(r.T, chebyshev(np.atleast_1d(t), degree - 1).T)
        kernel = basis.T @ np.linalg.solve(r.T, chebyshev(np.array([s]), degree - 1).T)[:, 0]
        return (t - s) * (1 + t) ** extra * kernel**2

    value = polynomial(node)
    top = 2 * degree - 1 + extra
    gegenbauer = np.stack([eval_gegenbauer(i, size / 2 - 1, node) for i in range(top + 1)])
    coefficient = (gegenbauer * weight) @ value / ((gegenbauer**2) @ weight)
    assert (polynomial(np.linspace(-1, s, 2001)) <= 1e-12 * polynomial(1.0)).all()
    assert (coefficient * eval_gegenbauer(np.arange(top + 1), size / 2 - 1, 1) >= -1e-9).all()
    assert polynomial(1.0)[0] / coefficient[0] == pytest.approx(count, rel=1e-8)


@pytest.mark.parametrize("size", [2, 3, 4, 7, 16])
def test_more_classes_never_have_a_larger_margin(size):
    angles = [largest_class_margin(count, size).angle for count in range(2, 300)]
    assert all(after <= before + 1e-12 for before, after in itertools.pairwise(angles))


@pytest.mark.parametrize("count", [3, 8, 25, 200])
def test_more_dimensions_never_have_a_smaller_margin(count):
    angles = [largest_class_margin(count, size).angle for size in range(1, 40)]
    assert all(after >= before - 1e-12 for before, after in itertools.pairwise(angles))


def test_the_bound_goes_on_beyond_the_last_degree():
    angle = levenshtein(10**12, 4)
    assert 0 < angle <= levenshtein(10**6, 4)


@pytest.mark.parametrize("place", [(3, 2), (6, 3), (20, 3), (15, 4), (60, 8)])
def test_no_random_arrangement_beats_the_bound(place, generator):
    best = max(
        float(class_margin(torch.randn(*place, generator=generator, dtype=torch.double)).angle)
        for _ in range(100)
    )
    assert 0 < best <= largest_class_margin(*place).degrees


def test_the_table_in_the_docs_is_the_table_in_the_code():
    page = (Path(__file__).parents[2] / "docs" / "geometry.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (\d+) \| ([\d.]+) \|", page, flags=re.MULTILINE)
    told = {(int(count), int(size)): float(degrees) for count, size, degrees in rows}
    assert told.keys() == KNOWN.keys()
    for place, degrees in told.items():
        assert degrees == pytest.approx(largest_class_margin(*place).degrees, abs=6e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: largest_class_margin(1, 3), "count of 2 or more.*got count=1 and size=3"),
        (lambda: largest_class_margin(2, 0), "size of 1 or more, got count=2 and size=0"),
        (lambda: fejes_toth(2), "count of 3 or more, got 2"),
        (lambda: levenshtein(5, 2), "size of 3 or more, got count=5, size=2"),
    ],
)
def test_impossible_numbers_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
