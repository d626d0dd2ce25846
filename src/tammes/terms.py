"""Terms, their sums and products: the algebra that losses are written in.

A term is a small value: the name of a loss and its settings. ``0.5 * sample_margin() + cosface()``
is one too. Nothing here knows of heads, batches or devices; :mod:`tammes.criterion.criterion` does.
"""

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Concatenate, Literal, NamedTuple, ParamSpec, TypeAlias, cast

import torch
from torch import Tensor

from tammes._setting_values import (
    extremes,
    format_number,
    format_setting,
    is_number,
    normalize_setting,
    on_host,
)
from tammes._validation import describe, transforming, unknown_setting
from tammes.split import (
    ALONGSIDE,
    FREE_MAP,
    MAPPED,
    REDUCED,
    SUMMED,
    OthersMap,
    Split,
    adjust_split,
    cutoff_of,
    map_split,
    quadratic_above,
    with_sums,
)
from tammes.states import State

if TYPE_CHECKING:
    from tammes.heads.head import Head
    from tammes.losses.subspace import Complement

Setting: TypeAlias = Any
"""A hyper-parameter: a number, or one per class; in a criterion's call also one per example."""

Requires: TypeAlias = Literal["", "angle", "cosine", "product", "adaptive"]
"""Property of a head that a term depends on."""

_P = ParamSpec("_P")


class Batch(NamedTuple):
    """Input of a term on features.

    Attributes:
        features: shape ``(N, D)``.
        labels: class of each example, shape ``(N,)``; for a term that takes several positives also
            ``(N, P)``, with -1 where an example has fewer.
        valid: which examples count, shape ``(N,)``; the others are to be left out entirely.
        first: how many that count come before these in the batch of all ranks.
        split: for a state that asks for it, the numbers of the own class, see
            :attr:`tammes.states.State.sees`.
        masked: for a term on proxies, which classes are masked, shape ``(C,)``, or none.

    Example:
        >>> labels = torch.tensor([0, 0, -100])
        >>> batch = tammes.Batch(torch.randn(3, 2), labels, labels != -100)
        >>> loss, anchors = tammes.nca()(batch)
    """

    features: Tensor
    labels: Tensor
    valid: Tensor
    first: Tensor | int = 0
    split: Split | None = None
    masked: Tensor | None = None


class Loss:
    """Anything a criterion can be built from: a term, or a sum of weighted terms.

    Example:
        >>> loss = tammes.softmax() + 0.3 * tammes.logit_divergence()
        >>> [(weight, term.name) for weight, term in loss.leaves()]
        [(1.0, 'softmax'), (0.3, 'logit_divergence')]
    """

    def leaves(self) -> Iterator[tuple[float, "Term"]]:
        """Every term with the weight it has in this loss."""
        raise NotImplementedError

    def map(self, change: "Callable[[Term], Term]") -> "Loss":
        """The same loss with every term changed."""
        raise NotImplementedError

    def __add__(self, other: "Loss") -> "Sum":
        if not isinstance(other, Loss):
            return NotImplemented
        return Sum((*_parts(self), *_parts(other)))

    def __radd__(self, other: object) -> "Loss":
        # sum([...]) starts from 0.
        return self if other == 0 else NotImplemented

    def __mul__(self, weight: float) -> "Sum":
        if isinstance(weight, Loss) or not isinstance(weight, (int, float)):
            return NotImplemented
        if not math.isfinite(weight):
            raise ValueError(f"a term expects a finite weight, got {weight}")
        return Sum(tuple((weight * inner, loss) for inner, loss in _parts(self)))

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> "Sum":
        return self * (1 / divisor)

    def __neg__(self) -> "Sum":
        return self * -1

    def __sub__(self, other: "Loss") -> "Sum":
        return self + -other if isinstance(other, Loss) else NotImplemented


def _parts(loss: Loss) -> tuple[tuple[float, Loss], ...]:
    return loss.parts if isinstance(loss, Sum) else ((1.0, loss),)


@dataclass(frozen=True, repr=False)
class Sum(Loss):
    """A weighted sum of losses; made by ``+`` and ``*``.

    Example:
        >>> tammes.cosface() + 0.5 * tammes.sample_margin()
        cosface(margin=0.35) + 0.5*sample_margin()
    """

    parts: tuple[tuple[float, Loss], ...]

    def leaves(self) -> Iterator[tuple[float, "Term"]]:
        """The terms of all parts, weights multiplied out."""
        for weight, loss in self.parts:
            for inner, term in loss.leaves():
                yield weight * inner, term

    def map(self, change: "Callable[[Term], Term]") -> "Sum":
        """The same sum of changed terms."""
        return Sum(tuple((weight, loss.map(change)) for weight, loss in self.parts))

    def __repr__(self) -> str:
        return " + ".join(
            repr(loss) if weight == 1 else f"{format_number(weight)}*{loss!r}"
            for weight, loss in self.parts
        )


@dataclass(frozen=True, eq=False)
class Definition:
    """Definition shared by all terms of one name; made by :func:`term`."""

    name: str
    function: Callable[..., Any]
    on: Literal["split", "prototypes", "features", "proxies"]
    reads: frozenset[str]
    requires: Requires = ""
    cosines: bool = False
    in_cosines: str = ""
    unless_zero: Mapping[str, str] = field(default_factory=dict)
    fixed: frozenset[str] = frozenset()
    map_others: OthersMap | None = None
    row_numbers: Callable[..., Sequence[Tensor | float]] | None = None
    cutoff: str = ""
    check: Callable[..., None] | None = None
    prepare: Callable[..., dict[str, Setting]] | None = None
    state: Callable[..., State] | None = None
    adjust: Callable[..., tuple[Tensor, Tensor | None]] | None = None
    signature: inspect.Signature = field(default_factory=inspect.Signature)
    builder: Callable[..., "Term"] | None = None
    takes_shards: bool = False
    several_positives: bool = False

    @property
    def has_own_scores(self) -> bool:
        """Whether it reads a split of other scores than the head's: adjusted or mapped ones."""
        return self.adjust is not None or self.map_others is not None

    @property
    def defaults(self) -> dict[str, Setting]:
        """The literature's value of every setting that has one."""
        parameters = self.signature.parameters.values()
        return {p.name: p.default for p in parameters if p.default is not p.empty}


@dataclass(frozen=True, repr=False)
class Term(Loss):
    """One loss with its settings; equal to another of the same name and settings.

    Terms are made by their builders, such as :func:`tammes.cosface`; your own by :func:`term`.

    Example:
        >>> term = tammes.cosface(margin=0.2)
        >>> term.settings
        {'margin': 0.2}
        >>> term == tammes.cosface(margin=0.2)
        True
    """

    definition: Definition
    values: tuple[tuple[str, Setting], ...]
    within: "Complement | None" = None
    """Where a term on features sees them projected to; set by a direct or spectral sum."""

    @property
    def name(self) -> str:
        """The builder's name."""
        return self.definition.name

    @property
    def settings(self) -> dict[str, Setting]:
        """Every setting by name, the defaults included."""
        return dict(self.values)

    @property
    def arguments(self) -> Mapping[str, Setting]:
        """Arguments of the function behind the term."""
        prepare = self.definition.prepare
        return self.settings if prepare is None else {**self.settings, **prepare(**self.settings)}

    def leaves(self) -> Iterator[tuple[float, "Term"]]:
        """Itself, once."""
        yield 1.0, self

    def map(self, change: "Callable[[Term], Term]") -> "Term":
        """The changed term."""
        return change(self)

    def altered(self, **settings: Setting) -> "Term":
        """The same term with some settings replaced."""
        assert self.definition.builder is not None
        return _rebuild(self.definition.builder, {**self.settings, **settings}, self.within)

    @functools.cached_property
    def _extremes(self) -> dict[str, tuple[Setting, ...]]:
        """Values of each setting that a check sees: extremes of numbers, anything else whole."""
        return {
            key: extremes(value) if is_number(self.definition.defaults.get(key)) else (value,)
            for key, value in self.values
        }

    def check(self, **changed: Setting) -> None:
        """Hold settings to what the definition asks.

        Args:
            **changed: those that are not what the term says: numbers, or tensors of several, of
                which the smallest and the largest are looked at.
        """
        defaults, found = self.definition.defaults, dict(self._extremes)
        for key, value in changed.items():
            found[key] = tuple(
                normalize_setting(self.name, key, one, defaults.get(key)) for one in extremes(value)
            )
        if self.definition.check is not None:
            for values in itertools.product(*found.values()):
                self.definition.check(**dict(zip(found, values, strict=True)))

    def make_state(self, head: "Head") -> State | None:
        """A fresh memory for this term, where it has one."""
        return None if self.definition.state is None else self.definition.state(self, head)

    def __call__(self, *inputs: Any, **arguments: Any) -> Any:
        """Evaluate the term, ``(N,)`` for a split; ``arguments`` replace settings."""
        if not transforming():
            self.check(**{k: v for k, v in arguments.items() if k in self.settings and on_host(v)})
        merged = {**self.arguments, **arguments}
        if isinstance(inputs[0], Split):
            like = inputs[0].target
            if self.definition.has_own_scores and inputs[0].rest is None:
                raise ValueError(
                    f"{self.name} expects a split with rest, since it changes the scores of all "
                    "classes, got one without: ask for it in reads, or use a criterion"
                )
            # Of a term without its state, the function itself tells what is missing.
            complete = self.definition.state is None or merged.get("state") is not None
            wanted = complete and "distance" in self.definition.reads and not transforming()
            if wanted and on_host(like) and len(like) and bool(inputs[0].distance.isnan().all()):
                raise ValueError(
                    f"{self.name} expects a split with distance, got one of scores alone: use a "
                    "criterion, or give own={'distance': ...} to tammes.split"
                )
            if self.definition.adjust is not None:
                inputs = (self._adjusted(inputs[0], merged.pop("state", None)), *inputs[1:])
            for name, value in merged.items():
                if isinstance(value, tuple):
                    per_class = torch.tensor(value, dtype=like.dtype, device=like.device)
                    merged[name] = per_class[inputs[0].labels]
            if self.definition.map_others is not None:
                make, top = self.definition.row_numbers, merged.get(self.definition.cutoff, 0)
                if top:
                    largest = inputs[0].rest.detach().sort(descending=True).values
                    edge = cutoff_of(largest / inputs[0].scale, top)
                    inputs = (inputs[0]._replace(cutoff=edge), *inputs[1:])
                numbers = () if make is None else make(inputs[0], **merged)
                mapped = map_split(inputs[0], self.definition.map_others, numbers)
                inputs = (mapped, *inputs[1:])
            if not self.definition.reads.isdisjoint(SUMMED):
                inputs = (with_sums(inputs[0], self.definition.reads), *inputs[1:])
        elif self.definition.on != "prototypes" and isinstance(inputs[0], Tensor):
            raise _not_a_loss(self.name, inputs[0])
        return self.definition.function(*inputs, **merged)

    def adjustment(
        self, per_class: Callable[[str], Tensor], state: Any = None
    ) -> tuple[Tensor, Tensor | None]:
        """Offset and gain of the scores of every class, shape ``(C,)`` each.

        Args:
            per_class: looks up a setting that has one value per class.
            state: of a term that has one.
        """
        assert self.definition.adjust is not None
        given = {k: per_class(k) if isinstance(v, tuple) else v for k, v in self.arguments.items()}
        if self.definition.state is not None:
            if state is None:
                raise ValueError(f"{self.name} expects its state from a criterion, got none")
            given["state"] = state
        return self.definition.adjust(**given)

    def _adjusted(self, split: Split, state: Any) -> Split:
        like, given = split.target, self.arguments
        offset, gain = self.adjustment(
            lambda key: torch.tensor(given[key], dtype=like.dtype, device=like.device), state
        )
        return adjust_split(split, offset, gain)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={format_setting(v)}' for k, v in self.values)})"

    def __reduce__(self) -> tuple[Any, ...]:
        # By the builder's import path: a definition is no value to be copied.
        return _rebuild, (self.definition.builder, self.settings, self.within)


def _rebuild(
    builder: Callable[..., Term], settings: dict[str, Setting], within: "Complement | None"
) -> Term:
    return replace(builder(**settings), within=within)


def _not_a_loss(name: str, given: Any) -> TypeError:
    """Build the error for a term that is called as if it were a loss of features and labels."""
    import tammes

    offered = {key.lower(): key for key in tammes.__all__ if key[0].isupper()}
    ready = offered.get(name.replace("_", ""))
    criterion = (
        f"tammes.{ready}(embedding_size, num_classes)"
        if ready
        else f"tammes.Criterion(tammes.CosineHead(embedding_size, num_classes), {name}())"
    )
    return TypeError(
        f"{name} builds a term from settings, got {describe(given)}; for a loss of features and "
        f"labels build criterion = {criterion} once and call criterion(features, labels)"
    )


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
) -> Callable[[Callable[Concatenate[Any, _P], Any]], Callable[_P, Term]]:
    """Make a loss of a function: its keyword arguments become the settings of a term.

    The decorated name is then a builder: called with settings, it returns a :class:`Term`.

    Args:
        reads: the fields of the split that the function uses, separated by blanks. All of them
            by default, which is right but computes more than most losses need.
        on: what the function is given: a :class:`Split` and returns ``(N,)``; the ``prototypes``
            and returns a scalar; a :class:`Batch` of ``features`` and returns the values
            ``(N,)`` and which of the examples could be anchors ``(N,)``; or, as ``proxies``, a
            batch and the prototypes and returns a scalar or ``(N,)``. A function of the prototypes
            that has an argument ``shards`` is given only those of this rank, and a
            :class:`tammes.distributed.sharded_rows.ShardedRows` to ask for the others.
        requires: ``"angle"`` where the similarity must be a length times a cosine, ``"cosine"``
            where it must be bounded, ``"product"`` where it must be that of a feature and a
            prototype; ``"adaptive"`` where the scale of cosines must follow each batch.
        cosines: the split is that of the cosines, with scale 1, whatever the head's own is.
        in_cosines: setting that is a difference of cosines on a cosine head, so at most 2.
        unless_zero: fields that are read only where a setting is not zero, by field.
        fixed: settings that are what they are from the beginning, separated by blanks: neither a
            call nor a schedule can change them.
        map_others: where the similarities of the other classes are to be mapped before they are
            summed up: an elementwise function of them, shape ``(N, C)``, and of numbers of the
            row, shape ``(N, 1)`` each. ``others``, ``expected``, ``mean`` and ``softplus`` are
            then those of the scores ``scale * map``. It may be given any part of the classes, and
            is differentiated by autograd. ``hardest`` and ``rest`` cannot be read. With
            :func:`tammes.quadratic_above` and numbers for it, fused kernels serve the term.
        row_numbers: those numbers: called like the function, with a split of which ``target`` and
            what travels along are known where they are read, returns tensors of shape ``(N,)`` or
            numbers.
        cutoff: setting that is a whole number k, where those numbers are made of ``split.cutoff``:
            above it there are k other classes. Finding it takes a product of its own. Such a
            setting must be ``fixed``.
        check: called with the settings, raises ``ValueError``: when a term is built, and with what
            a call or a schedule changes, wherever values are looked at. It is given numbers: of
            values per class or per example the smallest and the largest.
        prepare: called with the settings, returns those the function is given in another form.
        state: called with the term and a head, returns the memory of a stateful term, of which
            the function is given a copy as ``state=``; or ``adjust``, where there is one. A number
            to be learned is a :class:`tammes.states.LearnedNumber`.
        adjust: where the split is to be that of other scores, ``gain * score + offset``: called
            with the settings, those of one value per class as tensors of shape ``(C,)``, returns
            offset and gain in that shape, or an offset without dimensions for all classes; the
            gain or none. The settings it uses must be ``fixed``, and fields of the feature and its
            own prototype alone cannot be read. A gain requires a ``"product"``.
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
        fields = {*reads.split()}
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
        # Behind what it is a function of.
        inputs = 2 if on == "proxies" else 1
        parameters = [*inspect.signature(function).parameters.values()][inputs:]
        supplied = ("state", "shards")
        signature = inspect.Signature(
            [p.replace(kind=p.POSITIONAL_OR_KEYWORD) for p in parameters if p.name not in supplied],
            return_annotation=Term,
        )

        @functools.wraps(function)
        def build(*args: _P.args, **kwargs: _P.kwargs) -> Term:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError as error:
                unknown = next((key for key in kwargs if key not in signature.parameters), None)
                if unknown is not None:
                    raise unknown_setting(name, unknown, signature.parameters) from None
                if any(isinstance(value, Tensor) for value in args):
                    raise _not_a_loss(name, args[0]) from None
                raise TypeError(
                    f"{name}{signature.replace(return_annotation=signature.empty)}: {error}"
                ) from None
            for key, value in bound.arguments.items():
                scalar = isinstance(signature.parameters[key].default, (int, float, str))
                if scalar and getattr(value, "ndim", 0) > 1:
                    raise _not_a_loss(name, value)
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
