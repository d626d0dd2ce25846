"""Largest possible class margin: known optima, and proven bounds where none is known."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_SCHUETTE = "Schütte and van der Waerden 1951"
_DANZER = "Danzer 1963"
_COHN_KUMAR = "Levenshtein 1992; Cohn and Kumar 2007, Table 1"
_KERDOCK = "Cohn, de Laat and Leijenhorst 2024"
_TRIBONACCI = (1 + (19 + 3 * 33**0.5) ** (1 / 3) + (19 - 3 * 33**0.5) ** (1 / 3)) / 3

KNOWN: dict[tuple[int, int], tuple[float, str]] = {
    # Points on the 2-sphere: the solved cases of the Tammes problem beyond the octahedron.
    (7, 3): (math.sin(math.pi / 18) / (1 - math.sin(math.pi / 18)), _SCHUETTE),
    (8, 3): ((8**0.5 - 1) / 7, _SCHUETTE),
    (9, 3): (1 / 3, _SCHUETTE),
    (10, 3): (
        (4 + 4 / 3**0.5 * math.cos(math.atan(687**0.5 / 9) / 3)) ** -0.5,
        f"{_DANZER}; closed form Sugimoto and Tanemura 2015",
    ),
    (11, 3): (5**-0.5, _DANZER),
    (12, 3): (5**-0.5, "Fejes Tóth 1943 (icosahedron)"),
    (13, 3): (math.cos(0.99722359243811916), "Musin and Tarasov 2012 (OEIS A217695)"),
    (14, 3): (math.cos(0.97163474288622408), "Musin and Tarasov 2015 (OEIS A383860)"),
    (24, 3): ((_TRIBONACCI - 1) / (3 - _TRIBONACCI), "Robinson 1961 (snub cube)"),
    # Higher spheres.
    (10, 4): (1 / 6, "Bachoc and Vallentin 2009 (Petersen code)"),
    (24, 4): (1 / 2, "de Laat, Leijenhorst and de Muinck Keizer 2024 (24-cell)"),
    (120, 4): ((1 + 5**0.5) / 4, "Böröczky 1978 (600-cell)"),
    (16, 5): (1 / 5, _COHN_KUMAR),
    (27, 6): (1 / 4, _COHN_KUMAR),
    (56, 7): (1 / 3, _COHN_KUMAR),
    (240, 8): (1 / 2, _COHN_KUMAR),
    (112, 21): (1 / 9, _COHN_KUMAR),
    (162, 21): (1 / 7, _COHN_KUMAR),
    (100, 22): (1 / 11, _COHN_KUMAR),
    (275, 22): (1 / 6, _COHN_KUMAR),
    (891, 22): (1 / 4, _COHN_KUMAR),
    (552, 23): (1 / 5, _COHN_KUMAR),
    (4600, 23): (1 / 3, _COHN_KUMAR),
    (196560, 24): (1 / 2, _COHN_KUMAR),
    (288, 16): (1 / 4, _KERDOCK),
    (4224, 64): (1 / 8, _KERDOCK),
    (66048, 256): (1 / 16, _KERDOCK),
    (1050624, 1024): (1 / 32, _KERDOCK),
}
"""Largest cosine between ``count`` points in ``size`` dimensions at the optimum, and who proved it.

The regular arrangements (simplex, orthoplex, circle) are not listed.
"""

_LAST_DEGREE = 300
"""Half the largest degree at which Levenshtein's bound is evaluated."""


@dataclass(frozen=True)
class LargestClassMargin:
    """Largest possible class margin, or a proven bound of it.

    Attributes:
        angle: angle in radians; no arrangement has a larger smallest angle.
        exact: whether some arrangement has this angle.
        bound: origin of the value: ``"simplex"``, ``"orthoplex"``, ``"circle"``, ``"line"``,
            ``"known"``, ``"fewer points"``, ``"Fejes Tóth"`` or ``"Levenshtein"``.
        source: reference of the proof.

    Example:
        >>> limit = largest_class_margin(12, 3)
        >>> round(limit.degrees, 4), limit.exact, limit.bound, limit.source
        (63.4349, True, 'known', 'Fejes Tóth 1943 (icosahedron)')
    """

    angle: float
    exact: bool
    bound: str
    source: str

    @property
    def degrees(self) -> float:
        """Angle in degrees."""
        return math.degrees(self.angle)


def largest_class_margin(count: int, size: int) -> LargestClassMargin:
    r"""Largest possible smallest angle between ``count`` directions in ``size`` dimensions.

    Exact for :math:`k \le d+1` (simplex, :math:`\arccos\frac{-1}{k-1}`), for :math:`k \le 2d`
    (:math:`90°`), on the circle (:math:`2\pi/k`) and for the arrangements in :data:`KNOWN`;
    otherwise the smallest of the bounds of Levenshtein and, in three dimensions, Fejes Tóth, and
    of the known optimum of fewer points. Rankin's bounds are Levenshtein's first two. Welch's bound
    does not apply: it bounds the absolute cosine, that is, the angle between lines, while
    prototypes may be opposite.

    Args:
        count: number :math:`k` of classes, at least 2.
        size: dimension :math:`d`, at least 1.

    Returns:
        The :class:`LargestClassMargin`.

    Example:
        >>> round(largest_class_margin(8, 3).degrees, 4)
        74.8585
        >>> limit = largest_class_margin(1_000_000, 512)
        >>> limit.exact, limit.bound, round(limit.degrees, 2)
        (False, 'Levenshtein', 86.96)

    References:
        Rankin 1955; Fejes Tóth 1943; Levenshtein, Designs as Maximum Codes in Polynomial Metric
        Spaces, 1992.
    """
    if count < 2 or size < 1:
        raise ValueError(
            "largest_class_margin expects count of 2 or more and size of 1 or more, "
            f"got {count=} and {size=}"
        )
    if count <= size + 1:
        return LargestClassMargin(math.acos(-1 / (count - 1)), True, "simplex", "Rankin 1955")
    if size == 1:
        return LargestClassMargin(0.0, True, "line", "a line has two directions")
    if count <= 2 * size:
        return LargestClassMargin(math.pi / 2, True, "orthoplex", "Rankin 1955")
    if size == 2:
        return LargestClassMargin(2 * math.pi / count, True, "circle", "the circle's angles sum up")
    if (count, size) in KNOWN:
        cosine, source = KNOWN[count, size]
        return LargestClassMargin(math.acos(cosine), True, "known", source)
    bounds = [
        LargestClassMargin(levenshtein(count, size), False, "Levenshtein", "Levenshtein 1992")
    ]
    if size == 3:
        angle = fejes_toth(count)
        bounds.append(LargestClassMargin(angle, False, "Fejes Tóth", "Fejes Tóth 1943"))
    # More points are never further apart, so the optimum of fewer points is a bound too.
    fewer = max((known for known, d in KNOWN if d == size and known < count), default=None)
    if fewer is not None:
        cosine, source = KNOWN[fewer, size]
        source = f"at most that of {fewer} points: {source}"
        bounds.append(LargestClassMargin(math.acos(cosine), False, "fewer points", source))
    return min(bounds, key=lambda bound: bound.angle)


def fejes_toth(count: int) -> float:
    r"""Upper bound of the smallest angle between points on the 2-sphere, in radians.

    .. math:: \delta^2 \le 4 - \frac{1}{\sin^2\omega},\qquad \omega = \frac{\pi k}{6(k-2)}

    for the smallest distance :math:`\delta`; reached for k = 3, 4, 6 and 12.

    Args:
        count: number :math:`k` of points, at least 3.

    Example:
        >>> round(math.degrees(fejes_toth(12)), 4)
        63.4349
    """
    if count < 3:
        raise ValueError(f"fejes_toth expects count of 3 or more, got {count}")
    omega = math.pi * count / (6 * (count - 2))
    distance = math.sqrt(4 - math.sin(omega) ** -2)
    return 2 * math.asin(min(distance / 2, 1.0))


def levenshtein(count: int, size: int) -> float:
    r"""Levenshtein's bound of the smallest angle between points on a sphere, in radians.

    The best bound from polynomials of a given degree: :math:`k` points with largest cosine
    :math:`s` satisfy :math:`k \le L_m(d, s)`, which is increasing in :math:`s` and solved for
    it. With :math:`P_i` the Gegenbauer polynomials of dimension :math:`d`, :math:`P_i(1) = 1`,

    .. math::
        L_{2j-1} &= \binom{j+d-3}{j-1}\Bigl[\frac{2j+d-3}{d-1}
            - \frac{P_{j-1}(s) - P_j(s)}{(1-s)P_j(s)}\Bigr] \\
        L_{2j} &= \binom{j+d-2}{j}\Bigl[\frac{2j+d-1}{d-1}
            - \frac{(1+s)(P_j(s) - P_{j+1}(s))}{(1-s)(P_j(s)+P_{j+1}(s))}\Bigr]

    :math:`L_1` and :math:`L_2` are Rankin's bounds. Reached by the simplex, the orthoplex, the
    icosahedron, the roots of E8 and the other sharp arrangements in :data:`KNOWN`.

    Args:
        count: number :math:`k` of points, at least 2.
        size: dimension :math:`d`, at least 3.

    Example:
        >>> round(math.degrees(levenshtein(240, 8)), 4)
        60.0
    """
    if count < 2 or size < 3:
        raise ValueError(
            f"levenshtein expects count of 2 or more and size of 3 or more, got {count=}, {size=}"
        )
    degree = 1
    while degree < 2 * _LAST_DEGREE and _design_size(degree + 1, size) <= count:
        degree += 1
    # Beyond the last degree, use its last value: a bound for fewer points holds for more.
    low, high = _last_root(degree, size), _last_root(degree + 1, size)
    for _ in range(100):
        middle = (low + high) / 2
        if _levenshtein_count(degree, size, middle) <= count:
            low = middle
        else:
            high = middle
    return math.acos(low)


def _design_size(degree: int, size: int) -> int:
    """Fewest points of a spherical design of this strength, where the next degree takes over."""
    half, odd = divmod(degree, 2)
    if odd:
        return 2 * math.comb(size + half - 1, half)
    return math.comb(size + half - 1, half) + math.comb(size + half - 2, half - 1)


def _last_root(degree: int, size: int) -> float:
    """Cosine at which Levenshtein's bound of this degree starts: a root of a Jacobi polynomial."""
    if degree == 1:
        return -1.0
    count = degree // 2
    alpha = (size - 1) / 2
    beta = alpha if degree % 2 else alpha - 1
    # The roots of orthogonal polynomials are the eigenvalues of their recurrence (Golub, Welsch);
    # in plain Python, since criteria are also built on the meta device.
    diagonal, below = [(beta - alpha) / (alpha + beta + 2)], [0.0]
    for i in range(1, count):
        total = 2 * i + alpha + beta
        diagonal.append((beta**2 - alpha**2) / (total * (total + 2)))
        product = 4 * i * (i + alpha) * (i + beta) * (i + alpha + beta)
        below.append(product / (total**2 * (total**2 - 1)))
    low, high = -1.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if _all_below(middle, diagonal, below):
            high = middle
        else:
            low = middle
    return high


def _all_below(value: float, diagonal: Sequence[float], squares: Sequence[float]) -> bool:
    """Whether all eigenvalues of a symmetric tridiagonal matrix are below a value (Sturm)."""
    pivot = 1.0
    for entry, square in zip(diagonal, squares, strict=True):
        pivot = entry - value - square / pivot
        if pivot >= 0:
            return False
    return True


def _levenshtein_count(degree: int, size: int, cosine: float) -> float:
    half, odd = divmod(degree + 1, 2)
    before, now = 1.0, cosine
    for i in range(1, half + odd):
        before, now = now, ((2 * i + size - 2) * cosine * now - i * before) / (i + size - 2)
    if not odd:
        bracket = (2 * half + size - 3) / (size - 1) - (before - now) / ((1 - cosine) * now)
        return math.comb(half + size - 3, half - 1) * bracket
    bracket = (1 + cosine) * (before - now) / ((1 - cosine) * (before + now))
    return math.comb(half + size - 2, half) * ((2 * half + size - 1) / (size - 1) - bracket)
