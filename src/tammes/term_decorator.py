"""Decorator that turns a function into a loss."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, cast, get_args, overload

from torch import Tensor

from tammes._setting_values import normalize_setting
from tammes._term_trial import try_term
from tammes._validation import unknown_setting
from tammes.spelling import nearest_name
from tammes.split import ALONGSIDE, FREE_MAP, MAPPED, REDUCED, SUMMED, OthersMap, quadratic_above
from tammes.states import State
from tammes.terms import Batch, Definition, Requires, Setting, Term, not_a_loss

_P = ParamSpec("_P")
_ALWAYS = frozenset(("scale", "labels", "classes", "rivals", "unit", "cutoff"))
"""Fields of a split that need not be declared."""


class _Decorator(Protocol):
    """Type of the decorator: the builder takes only the settings of the function."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[Batch, Tensor, _P], Any]
    ) -> Callable[_P, Term]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[Any, _P], Any]) -> Callable[_P, Term]: ...


def term(
    *,
    reads: str = " ".join((*REDUCED, *ALONGSIDE)),
    on: Literal["split", "prototypes", "features", "proxies"] = "split",
    requires: Requires = "",
    cosines: bool = False,
    in_cosines: str = "",
    unless_zero: Mapping[str, str] | None = None,
    fixed: str = "",
    map_others: OthersMap | None = None,
    row_numbers: Callable[..., Sequence[Tensor | float]] | None = None,
    cutoff: str = "",
    check: Callable[..., None] | None = None,
    prepare: Callable[..., dict[str, Setting]] | None = None,
    state: Callable[..., State] | None = None,
    adjust: Callable[..., tuple[Tensor, Tensor | None]] | None = None,
    several_positives: bool = False,
) -> _Decorator:
    """Turn a function into a loss: its keyword arguments become the settings of a term.

    The decorated name is then a builder: called with settings, it returns a :class:`Term`. A loss
    of your own on the split is tried on four examples by the first call, where a mistake shows.

    Args:
        reads: fields of the split that the function uses, separated by spaces. All of them by
            default, which is correct but computes more than most losses need.
        on: input of the function. ``"split"``: a :class:`Split`, returns ``(N,)``.
            ``"prototypes"``: the prototypes, returns a scalar. ``"features"``: a :class:`Batch`,
            returns the values ``(N,)`` and which examples are anchors ``(N,)``. ``"proxies"``: a
            batch and the prototypes, returns a scalar or ``(N,)``. A function of the prototypes
            with an argument ``shards`` receives only those of this rank, and a
            :class:`tammes.distributed.sharded_rows.ShardedRows` for access to the others.
        requires: property of the head: ``"angle"`` if the similarity must be a length times a
            cosine, ``"cosine"`` if features and prototypes must be unit vectors, ``"product"`` if
            scaling a prototype must scale the similarity, ``"adaptive"`` if the scale must be
            adaptive.
        cosines: whether to split the cosines, with scale 1, whatever the similarity of the head.
        in_cosines: setting that is a difference of cosines on a cosine head, so at most 2.
        unless_zero: maps a field to a setting; the field is read only if the setting is not zero.
        fixed: settings that neither a call nor a schedule may change, separated by spaces.
        map_others: elementwise map applied to the similarities of the other classes before they
            are reduced: a function of similarities, shape ``(N, C)``, and of numbers per row, shape
            ``(N, 1)`` each. ``others``, ``expected``, ``mean`` and ``softplus`` are then those of
            the scores ``scale * map``. It may be called with any subset of the classes, and is
            differentiated by autograd. ``hardest`` and ``rest`` cannot be read. Fused kernels
            support only :func:`tammes.quadratic_above`.
        row_numbers: computes those numbers per row: called like the function, with a split in which
            only the fields of the target class that are read are known, returns tensors of shape
            ``(N,)`` or numbers.
        cutoff: setting with an integer k, if ``row_numbers`` uses ``split.cutoff``, above which
            there are k other classes. Finding it takes another matrix product. The setting must be
            ``fixed``.
        check: called with the settings, raises ``ValueError`` if they are invalid: when a term is
            built, and for the settings that a call or a schedule changes, where their values may be
            read. For one value per class or example, it is called with the smallest and the
            largest.
        prepare: called with the settings, returns those that the function receives in another form.
        state: called with the term and a head, returns the :class:`tammes.states.State` of the
            term. The function, or ``adjust`` if given, receives a copy of it as ``state=``. Use
            :class:`tammes.states.LearnedNumber` for a learned scalar.
        adjust: replaces the scores by ``gain * score + offset`` before the split: called with the
            settings, with per-class ones as tensors of shape ``(C,)``, returns the offset, in that
            shape or a scalar, and the gain, in that shape or none. The settings it uses must be
            ``fixed``, and ``length``, ``norm``, ``gap``, ``opposite`` and ``distance`` cannot be
            read. A gain requires ``"product"``.
        several_positives: whether examples may have several labels, shape ``(N, P)``.

    Returns:
        A decorator for a module-level function.

    Example:
        >>> import torch, tammes
        >>> @tammes.term(reads="target hardest")
        ... def squared_hinge(split, *, margin=0.2):
        ...     return (split.hardest - split.target + margin).relu().square()
        >>> loss = squared_hinge(margin=0.5) + 2.0 * tammes.zero_centroid()
        >>> loss
        squared_hinge(margin=0.5) + 2*zero_centroid(normalize=True)
        >>> criterion = tammes.Criterion(tammes.CosineHead(8, 3, scale=1.0), loss)
    """

    def decorate(function: Callable[..., Any]) -> Callable[_P, Term]:
        name = function.__name__
        fields = {*reads.split()} - _ALWAYS
        _check_names(name, "reads", fields, (*REDUCED, *ALONGSIDE, *SUMMED, "rest"))
        _check_names(name, "requires", {requires}, get_args(Requires))
        if adjust is not None and not fields.isdisjoint(ALONGSIDE):
            raise ValueError(f"{name} expects reads without {ALONGSIDE} beside adjust, got {reads}")
        if map_others is None and (row_numbers is not None or cutoff):
            raise ValueError(f"{name} expects map_others beside row_numbers and cutoff, got none")
        if cutoff and cutoff not in fixed.split():
            raise ValueError(f"{name} expects its cutoff {cutoff} among fixed, got {fixed!r}")
        if map_others is not None:
            if not fields.isdisjoint(("hardest", "rest")):
                raise ValueError(
                    f"{name} expects reads without hardest and rest beside map_others, got {reads}"
                )
            fields |= {MAPPED} if map_others is quadratic_above else {MAPPED, FREE_MAP}
        # The settings come after the inputs.
        inputs = 2 if on == "proxies" else 1
        parameters = [*inspect.signature(function).parameters.values()][inputs:]
        supplied = ("state", "shards")
        signature = inspect.Signature(
            [p.replace(kind=p.POSITIONAL_OR_KEYWORD) for p in parameters if p.name not in supplied],
            return_annotation=Term,
        )
        for what, named in (("fixed", fixed), ("in_cosines", in_cosines), ("cutoff", cutoff)):
            _check_names(name, what, {*named.split()}, signature.parameters)
        # Those of the library are tried by its tests.
        to_try = not (function.__module__ or "").startswith("tammes.")

        @functools.wraps(function)
        def build(*args: _P.args, **kwargs: _P.kwargs) -> Term:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError as error:
                unknown = next((key for key in kwargs if key not in signature.parameters), None)
                if unknown is not None:
                    raise unknown_setting(name, unknown, signature.parameters) from None
                if any(isinstance(value, Tensor) for value in args):
                    raise not_a_loss(name, args[0]) from None
                raise TypeError(
                    f"{name}{signature.replace(return_annotation=signature.empty)}: {error}"
                ) from None
            for key, value in bound.arguments.items():
                scalar = isinstance(signature.parameters[key].default, (int, float, str))
                if scalar and getattr(value, "ndim", 0) > 1:
                    raise not_a_loss(name, value)
            bound.apply_defaults()
            values = tuple(
                (key, normalize_setting(name, key, value, signature.parameters[key].default))
                for key, value in bound.arguments.items()
            )
            for key, value in values:
                if (on != "split" or key == cutoff) and isinstance(value, tuple):
                    raise ValueError(f"{name} expects one {key} for all classes, got {value!r}")
            made = Term(definition, values)
            made.check()
            nonlocal to_try
            to_try = to_try and not try_term(made)
            return made

        del build.__wrapped__
        build.__signature__ = signature  # type: ignore[attr-defined]
        definition = Definition(
            name=name,
            function=function,
            on=on,
            reads=frozenset(fields),
            requires=requires,
            cosines=cosines,
            in_cosines=in_cosines,
            unless_zero=unless_zero or {},
            fixed=frozenset(fixed.split()),
            map_others=map_others,
            row_numbers=row_numbers,
            cutoff=cutoff,
            check=check,
            prepare=prepare,
            state=state,
            adjust=adjust,
            signature=signature,
            builder=cast(Callable[..., Term], build),
            takes_shards=any(p.name == "shards" for p in parameters),
            several_positives=several_positives,
        )
        build.definition = definition  # type: ignore[attr-defined]
        return build

    return decorate


def _check_names(name: str, what: str, given: set[str], known: Iterable[str]) -> None:
    """Raise for a name that is none of the known ones."""
    known = [*known]
    for wrong in sorted(given.difference(known)):
        near = nearest_name(wrong, known)
        hint = f"did you mean {near}?" if near else f"there are {', '.join(filter(None, known))}"
        raise ValueError(f"{name} has no {wrong!r} for {what}; {hint}")
