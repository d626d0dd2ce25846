"""Identities as integer codes, and bootstrap intervals over identities."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tammes._validation import INTEGERS

Identities = Sequence[int] | Sequence[str] | Tensor
"""Identities, cameras and other names: integers or strings, one per row."""


class BootstrapInterval(NamedTuple):
    """Bootstrap interval of a number.

    Attributes:
        value: the number on the full data.
        low: lower end.
        high: upper end.
        undefined: resamples in which the number is undefined (NaN), which are left out.
    """

    value: float
    low: float
    high: float
    undefined: int


class Codes(NamedTuple):
    """Identities as integers: equal identities have equal codes, on every rank.

    Attributes:
        values: the codes, shape ``(N,)``.
        strings: whether the identities are strings.
    """

    values: Tensor
    strings: bool


def encode_identities(
    name: str, what: str, identities: Identities, count: int, device: torch.device | None = None
) -> Codes:
    """Check identities and convert them to integers; strings become 64 bits of a hash.

    Messages begin with ``name`` and call the argument ``what``.
    """
    wrong = ""
    if isinstance(identities, Tensor):
        wrong = "" if identities.dtype in INTEGERS else str(identities.dtype)
    elif isinstance(identities, str) or not hasattr(identities, "__len__"):
        wrong = type(identities).__name__
    if wrong:
        raise TypeError(f"{name} expects {what} to be integers or strings, got {wrong}")
    shape = tuple(getattr(identities, "shape", (len(identities),)))
    if shape != (count,):
        raise ValueError(f"{name} expects {what} of shape ({count},), got {shape}")
    if isinstance(identities, Tensor):
        return Codes(identities.detach().to(device, torch.long), strings=False)
    kinds = {str if isinstance(value, str) else type(value) for value in identities}
    strings = kinds == {str}
    if not strings and not all(issubclass(kind, Integral) for kind in kinds):
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise TypeError(f"{name} expects {what} to be all integers or all strings, got {names}")
    code: Callable[[Any], int] = _hash if strings else int
    known = {value: code(value) for value in set(identities)}
    codes = [known[value] for value in identities]
    return Codes(torch.tensor(codes, dtype=torch.long, device=device), strings)


def _hash(text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def check_kinds(name: str, first: Codes, second: Codes) -> None:
    """Raise ``TypeError`` if strings would be compared with integers."""
    if first.strings != second.strings and len(first.values) and len(second.values):
        raise TypeError(
            f"{name} expects identities of one kind, got strings and integers, which never match"
        )


def intervals(
    result: Any,
    measure: Callable[[Any], Mapping[str, Any]] | None = None,
    *,
    resamples: int = 1000,
    level: float = 0.95,
    generator: torch.Generator | None = None,
) -> dict[str, BootstrapInterval]:
    r"""Bootstrap intervals over identities, for any number of a result.

    Examples of one identity are not independent, so identities are resampled, not queries or pairs.
    A resample draws as many identities as there are, with replacement; identity :math:`a` is drawn
    :math:`n_a` times. An example of :math:`a` then counts :math:`n_a` times. A pair of two examples
    of :math:`a` counts :math:`n_a` times, a pair of :math:`a` and :math:`b` counts :math:`n_a n_b`
    times: as often as it occurs among the drawn identities, where two draws of one identity make
    no pair. For retrieval, queries are resampled and the gallery is kept. The interval is between
    quantiles of the resamples (percentile bootstrap).

    Args:
        result: a result that knows the identities of its examples: of ``retrieval``,
            ``identification`` or ``open_set_accuracy``; of ``verification``, ``fold_accuracy`` or
            ``openset`` if identities were given.
        measure: function of such a result that returns numbers by name; by default all scalars.
        resamples: number of resamples.
        level: fraction of the resamples that the interval contains.
        generator: CPU generator; torch's global one by default.

    Returns:
        An :class:`BootstrapInterval` for each name.

    Example:
        >>> import torch
        >>> from tammes.metrics.functional import intervals, verification
        >>> scores, same = torch.tensor([0.9, 0.4, 0.3, 0.5]), torch.tensor([1, 1, 0, 0])
        >>> result = verification(scores, same, identities=([1, 2, 1, 2], [1, 2, 2, 3]))
        >>> found = intervals(result, lambda r: {"auc": r.auc}, resamples=100)
        >>> found["auc"].value, found["auc"].low <= 0.75 <= found["auc"].high
        (0.75, True)

    References:
        Efron and Tibshirani, An Introduction to the Bootstrap, 1993, Chapter 13; Poh, Martin and
        Bengio, Performance Generalization in Biometric Authentication Using Joint User-Specific and
        Sample Bootstraps, PAMI 2007.
    """
    if getattr(result, "identities", None) is None:
        raise ValueError(
            "intervals expects a result that knows the identities of its examples, got "
            f"{type(result).__name__} without identities"
        )
    if not 0 < level < 1 or resamples < 1:
        raise ValueError(
            f"intervals expects 0 < level < 1 and 1 resample or more, got {level} and {resamples}"
        )
    measure = _scalar_tensors if measure is None else measure
    drawn = resample_identities(result, measure, resamples=resamples, generator=generator)
    ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.double)
    found = {}
    for name, number in measure(result).items():
        low, high = drawn[name].nanquantile(ends).tolist()
        undefined = int(drawn[name].isnan().sum())
        found[name] = BootstrapInterval(float(number), low, high, undefined)
    return found


def resample_identities(
    result: Any,
    measure: Callable[[Any], Mapping[str, Any]],
    *,
    resamples: int,
    generator: torch.Generator | None = None,
) -> dict[str, Tensor]:
    """Return the numbers of every resample of :func:`intervals` by name, each of shape ``(R,)``.

    Results on the same examples have the same identities in a resample if the generators have the
    same state, so that their numbers are paired.
    """
    everyone, places = torch.cat(result.identities).unique(return_inverse=True)
    sides = places.view(len(result.identities), -1)
    rows = []
    for _ in range(resamples):
        drawn = torch.randint(len(everyone), (len(everyone),), generator=generator)
        counts = torch.bincount(drawn, minlength=len(everyone)).double().to(sides.device)
        weights = counts[sides[0]]
        if len(sides) == 2:
            weights = torch.where(sides[0] == sides[1], weights, weights * counts[sides[1]])
        rows.append({name: float(n) for name, n in measure(result.weighted(weights)).items()})
    return {name: torch.tensor([row[name] for row in rows], dtype=torch.double) for name in rows[0]}


def _scalar_tensors(result: Any) -> dict[str, Tensor]:
    """Scalar tensors of a result; counts are integers and left out."""
    fields = result._asdict().items()
    return {name: value for name, value in fields if isinstance(value, Tensor) and value.ndim == 0}
