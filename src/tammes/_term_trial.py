"""Trial evaluation of a user's loss when it is first built, so that mistakes raise there.

A field that a loss reads but does not declare holds NaN, and a map that mixes classes gives a
different loss for every block size; without a trial, neither mistake raises an error.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tammes._validation import describe, transforming
from tammes.split import (
    ALONGSIDE,
    REDUCED,
    SUMMED,
    Split,
    columns,
    cutoff_of,
    split,
    split_matrix,
    with_sums,
)
from tammes.terms import Term

_FIELDS = frozenset((*REDUCED, *ALONGSIDE, *SUMMED, "rest"))
_SCALE = 4.0
_ROWS = 4


def try_term(term: Term) -> bool:
    """Evaluate a term on the split of four examples, and raise an error for a mistake in it.

    Only certain mistakes raise: a function that fails on this split for another reason will raise
    its own error when it is called. Terms with a state or adjusted scores are not tried.

    Returns:
        Whether tensors have values here; not in a compiler, nor among fake tensors.
    """
    if transforming() or type(torch.empty(0, device="cpu")) is not Tensor:
        return False
    # Whatever the caller has set, and with the random numbers of the caller left alone.
    with torch.device("cpu"), torch.inference_mode(False), torch.random.fork_rng(devices=[]):
        _try(term)
    return True


def _try(term: Term) -> None:
    definition = term.definition
    if definition.on != "split" or definition.adjust is not None:
        return
    _check_arguments(term)
    if definition.state is not None:
        return
    if definition.map_others is not None:
        similarity, numbers = _try_numbers(term)
        if numbers is None or not _try_map(term, similarity, numbers):
            return
    declared = definition.reads & _FIELDS
    value = _attempt(term.name, lambda: _evaluate(term, declared))
    if not _is_known(value):
        missing = _missing(lambda fields: _evaluate(term, fields), declared)
        if missing:
            raise ValueError(
                f"{term.name} reads {' and '.join(missing)} of the split, got reads="
                f"{_listed(declared)!r} without: undeclared fields are not computed"
            )
    if value is _FAILED:
        return
    if not isinstance(value, Tensor) or value.shape != (_ROWS,):
        raise ValueError(
            f"{term.name} expects a function that returns the loss of each example, shape (N,), "
            f"got {describe(value)} for N = {_ROWS}"
        )
    if value.dtype != _dtype():
        raise ValueError(
            f"{term.name} expects losses of the dtype of its split, got {value.dtype} "
            f"for {_dtype()}"
        )


def _check_arguments(term: Term) -> None:
    """Raise unless ``row_numbers`` takes the split and the settings."""
    make, given = term.definition.row_numbers, dict(term.arguments)
    if make is None:
        return
    if term.definition.state is not None:
        given["state"] = None
    if not _binds(make, None, **given):
        raise TypeError(
            f"row_numbers of {term.name} is called with the split and the settings, "
            f"row_numbers({', '.join(['split', *given])}), got one of {inspect.signature(make)}"
        )


def _try_numbers(term: Term) -> tuple[Tensor, Sequence[Any] | None]:
    """Return the similarities of the examples and their row numbers, or none if those failed."""
    make = term.definition.row_numbers
    # The other classes are not known before they are mapped.
    declared = term.definition.reads & {"target", *ALONGSIDE}
    similarity = _split(declared, term)[1]
    if make is None:
        return similarity, ()

    def numbers(fields: frozenset[str]) -> Any:
        return make(_split(fields, term)[0], **_arguments(term))

    found = _attempt(f"row_numbers of {term.name}", lambda: numbers(declared))
    if not _is_known(found):
        missing = _missing(numbers, declared)
        late = [field for field in missing if field not in ("target", *ALONGSIDE)]
        if late:
            raise ValueError(
                f"row_numbers of {term.name} is given the own class alone, target "
                f"{_listed(ALONGSIDE)}, got a function that reads {' and '.join(late)}"
            )
        if missing:
            raise ValueError(
                f"row_numbers of {term.name} reads {' and '.join(missing)} of the split, got reads="
                f"{_listed(term.definition.reads & _FIELDS)!r} without: add it there"
            )
    if found is _FAILED:
        return similarity, None
    if not isinstance(found, (tuple, list)):
        raise TypeError(
            f"row_numbers of {term.name} expects a tuple of numbers, also of one, "
            f"got {describe(found)}"
        )
    for number in found:
        shape = number.shape if isinstance(number, Tensor) else ()
        if not isinstance(number, (Tensor, float, int)) or shape not in ((), (_ROWS,)):
            hint = ": for split.cutoff, name its setting in term(cutoff=)" * (number is None)
            raise ValueError(
                f"row_numbers of {term.name} expects numbers, or tensors of shape (N,), "
                f"got {describe(number)} for N = {_ROWS}{hint}"
            )
    return similarity, found


def _try_map(term: Term, similarity: Tensor, numbers: Sequence[Any]) -> bool:
    """Return whether the map could be evaluated; raise if it is not elementwise."""
    function = term.definition.map_others
    assert function is not None
    if not _binds(function, None, *numbers):
        raise TypeError(
            f"map_others of {term.name} is called with similarities and what row_numbers returns, "
            f"{1 + len(numbers)} arguments in all, got one of {inspect.signature(function)}"
        )

    # As tensors of shape (N,), as a block gets them.
    wide = [torch.as_tensor(n, dtype=similarity.dtype).expand(_ROWS) for n in numbers]

    def part(rows: slice, classes: slice) -> Any:
        given = similarity[rows, classes].clone()
        return _attempt(
            f"map_others of {term.name}", lambda: function(given, *(n[rows, None] for n in wide))
        )

    every, half = slice(None), slice(2)
    whole = part(every, every)
    if whole is _FAILED:
        return False
    if not isinstance(whole, Tensor) or whole.shape != similarity.shape:
        raise ValueError(
            f"map_others of {term.name} expects one number for each similarity, "
            f"got {describe(whole)} for {tuple(similarity.shape)}"
        )
    if whole.dtype != similarity.dtype:
        raise ValueError(
            f"map_others of {term.name} expects the dtype of the similarities, "
            f"got {whole.dtype} for {similarity.dtype}"
        )
    for rows, classes, what in ((every, half, "classes"), (half, every, "examples")):
        found, expected = part(rows, classes), whole[rows, classes]
        alike = isinstance(found, Tensor) and found.shape == expected.shape
        if alike and not torch.allclose(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True):
            raise ValueError(
                f"map_others of {term.name} expects a function of each similarity and numbers of "
                f"its row, got one that mixes {what}: it is given a block of them at a time"
            )
    return True


def _evaluate(term: Term, fields: frozenset[str]) -> Any:
    """Evaluate the function on a split with only some fields."""
    rows, similarity = _split(fields, term)
    definition, given = term.definition, _arguments(term)
    if definition.map_others is not None:
        make = definition.row_numbers
        numbers = () if make is None else make(rows, **given)
        mapped = definition.map_others(similarity, *columns(numbers))
        own = {name: getattr(rows, name) for name in ("target", *ALONGSIDE)}
        rows = split_matrix(mapped, rows.labels, _SCALE, None, own, fields)
    rows = with_sums(rows, fields)
    rows = rows if "rest" in fields else rows._replace(rest=None)
    before = {name: t._version for name, t in rows._asdict().items() if isinstance(t, Tensor)}
    value = definition.function(rows, **given)
    changed = [name for name, version in before.items() if getattr(rows, name)._version > version]
    if changed:
        raise _Mistake(f"changes {' and '.join(changed)} of the split in place: make a new tensor")
    return value


def _split(fields: frozenset[str], term: Term) -> tuple[Split, Tensor]:
    """Split of four examples of two classes among six, and their cosines."""
    places = torch.arange(_ROWS * 6, dtype=_dtype(), device="cpu").view(_ROWS, 6)
    similarity = 0.7 * (1.7 * places).sin()
    labels = torch.arange(_ROWS, device="cpu") % 2
    own = {}
    if "distance" in fields:
        own["distance"] = (2 - 2 * similarity.gather(1, labels[:, None]).squeeze(1)).sqrt()
    rows = split(similarity, labels, scale=_SCALE, own=own, reads=fields)
    if term.definition.cutoff:
        others = similarity.scatter(1, labels[:, None], -torch.inf)
        top = term.settings[term.definition.cutoff]
        rows = rows._replace(cutoff=cutoff_of(others.sort(descending=True).values, top))
    return rows, similarity


def _arguments(term: Term) -> dict[str, Any]:
    """Return the arguments of the function; values per class are selected per example."""
    return {
        key: torch.tensor([value[0], value[-1]] * 2, dtype=_dtype(), device="cpu")
        if isinstance(value, tuple) and value
        else value
        for key, value in term.arguments.items()
    }


def _dtype() -> torch.dtype:
    """Dtype of the trial: that of tensors which the author makes, float32 or wider."""
    return torch.promote_types(torch.get_default_dtype(), torch.float32)


def _missing(evaluate: Callable[[frozenset[str]], Any], declared: frozenset[str]) -> list[str]:
    """Return the undeclared fields that a function cannot be evaluated without."""

    def is_known(fields: frozenset[str]) -> bool:
        return _is_known(_attempt("", lambda: evaluate(fields)))

    if not is_known(_FIELDS):
        return []
    return [field for field in sorted(_FIELDS - declared) if not is_known(_FIELDS - {field})]


class _Mistake(Exception):
    """A certain mistake in the function."""


_FAILED = object()
"""Stands for the value of a function that raised an error."""
_ONE_NUMBER = ("converted to Scalar", "converted to Python scalars", "Boolean value of Tensor")
"""Words of torch about ``.item()``, ``float()`` and ``if`` of a tensor with several numbers."""


def _attempt(name: str, evaluate: Callable[[], Any]) -> Any:
    """Evaluate a function of the user's, without gradients."""
    try:
        with torch.no_grad():
            return evaluate()
    except _Mistake as mistake:
        raise ValueError(f"{name} {mistake}") from None
    except Exception as error:
        if any(words in str(error) for words in _ONE_NUMBER):
            raise TypeError(
                f"{name} makes one number of a tensor, which has one for each example: "
                "torch.where chooses between two values"
            ) from error
        return _FAILED


def _is_known(value: Any) -> bool:
    """Whether there is a value, without NaN or None in it."""
    values = value if isinstance(value, (tuple, list)) else [value]
    return value is not _FAILED and not any(
        v is None or (isinstance(v, Tensor) and v.is_floating_point() and bool(v.isnan().any()))
        for v in values
    )


def _binds(function: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Whether a function takes these arguments, as far as its signature tells."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except ValueError:
        # Builtin functions of torch have no signature.
        return True
    except TypeError:
        return False
    return True


def _listed(fields: Sequence[str] | frozenset[str]) -> str:
    order = (*REDUCED, *ALONGSIDE, *SUMMED, "rest")
    return " ".join(field for field in order if field in fields)
