"""Terms and their weighted sums: the algebra in which losses are written.

A term is a small immutable value: the name of a loss and its settings. A weighted sum such as
``0.5 * sample_margin() + cosface()`` is a loss too. Heads, batches and devices are the business of
:mod:`tammes.criterion.criterion`.
"""

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

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
from tammes._validation import describe, transforming
from tammes.split import (
    SUMMED,
    OthersMap,
    Split,
    adjust_split,
    cutoff_of,
    map_split,
    with_sums,
)
from tammes.states import State

if TYPE_CHECKING:
    from tammes.heads.head import Head
    from tammes.losses.subspace import Complement

Setting: TypeAlias = Any
"""A hyperparameter: a number, or one per class; in a criterion's call also one per example."""

Requires: TypeAlias = Literal["", "angle", "cosine", "product", "adaptive"]
"""Property of a head that a term depends on."""


class Batch(NamedTuple):
    """Input of a term on features.

    Attributes:
        features: shape ``(N, D)``.
        labels: class of each example, shape ``(N,)``; for a term that takes several positives also
            ``(N, P)``, padded with -1.
        valid: which examples count, shape ``(N,)``; the others must have no effect.
        first: number of valid examples before these in the global batch.
        split: numbers of the target class for a state that asks for them, see
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
        """Yield every term with its weight in this loss."""
        raise NotImplementedError

    def map(self, change: "Callable[[Term], Term]") -> "Loss":
        """Apply a function to every term."""
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
        """Yield the terms of all parts, with weights multiplied out."""
        for weight, loss in self.parts:
            for inner, term in loss.leaves():
                yield weight * inner, term

    def map(self, change: "Callable[[Term], Term]") -> "Sum":
        """Apply a function to every term."""
        return Sum(tuple((weight, loss.map(change)) for weight, loss in self.parts))

    def __repr__(self) -> str:
        return " + ".join(
            repr(loss) if weight == 1 else f"{format_number(weight)}*{loss!r}"
            for weight, loss in self.parts
        )


@dataclass(frozen=True, eq=False)
class Definition:
    """Definition shared by all terms of one name; see :func:`tammes.term`, which makes it."""

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
        """Whether it reads the split of adjusted or mapped scores instead of the head's."""
        return self.adjust is not None or self.map_others is not None

    @property
    def defaults(self) -> dict[str, Setting]:
        """Default of every setting that has one, as in the literature."""
        parameters = self.signature.parameters.values()
        return {p.name: p.default for p in parameters if p.default is not p.empty}


@dataclass(frozen=True, repr=False)
class Term(Loss):
    """One loss with its settings; terms of the same name and settings are equal.

    Terms are made by their builders, such as :func:`tammes.cosface`; :func:`tammes.term` makes
    builders of your own losses.

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
    """Subspace to which the features are projected; set by a direct or spectral sum."""

    @property
    def name(self) -> str:
        """The builder's name."""
        return self.definition.name

    @property
    def settings(self) -> dict[str, Setting]:
        """Every setting by name, including defaults."""
        return dict(self.values)

    @property
    def arguments(self) -> Mapping[str, Setting]:
        """Keyword arguments for the term's function."""
        prepare = self.definition.prepare
        return self.settings if prepare is None else {**self.settings, **prepare(**self.settings)}

    def leaves(self) -> Iterator[tuple[float, "Term"]]:
        """Yield the term itself, with weight 1."""
        yield 1.0, self

    def map(self, change: "Callable[[Term], Term]") -> "Term":
        """Apply a function to the term."""
        return change(self)

    def altered(self, **settings: Setting) -> "Term":
        """The same term with some settings replaced."""
        assert self.definition.builder is not None
        return _rebuild(self.definition.builder, {**self.settings, **settings}, self.within)

    @functools.cached_property
    def _extremes(self) -> dict[str, tuple[Setting, ...]]:
        """Values of each setting to check: the extremes of numbers, anything else unchanged."""
        return {
            key: extremes(value) if is_number(self.definition.defaults.get(key)) else (value,)
            for key, value in self.values
        }

    def check(self, **changed: Setting) -> None:
        """Reject settings that the definition does not allow.

        Args:
            **changed: overrides of the term's settings: numbers, or tensors, of which the smallest
                and the largest value are checked.
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
        """Make a new state for this term, or return none if it has no state."""
        return None if self.definition.state is None else self.definition.state(self, head)

    def __call__(self, *inputs: Any, **arguments: Any) -> Any:
        """Evaluate the term, ``(N,)`` for a split; ``arguments`` replace settings."""
        for key in self.definition.fixed.intersection(arguments):
            raise TypeError(
                f"{self.name} expects {key} from the beginning, got another at the call"
            )
        if not transforming():
            self.check(**{k: v for k, v in arguments.items() if k in self.settings and on_host(v)})
        merged = {**self.arguments, **arguments}
        if isinstance(inputs[0], Split):
            like = inputs[0].target
            self._check_given(inputs[0], arguments, merged)
            if self.definition.has_own_scores and inputs[0].rest is None:
                raise ValueError(
                    f"{self.name} expects a split with rest, since it changes the scores of all "
                    "classes, got one without: ask for it in reads, or use a criterion"
                )
            # If the state is missing, the term's function raises the clearer error.
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
            raise not_a_loss(self.name, inputs[0])
        return self.definition.function(*inputs, **merged)

    def _check_given(
        self, split: Split, given: Mapping[str, Any], merged: Mapping[str, Any]
    ) -> None:
        """Reject settings per class or per example that do not fit the split."""
        for key, value in merged.items():
            if isinstance(value, tuple) and len(value) != split.classes:
                raise ValueError(
                    f"{self.name} expects one {key} for each of {split.classes} classes, "
                    f"got {len(value)}"
                )
        for key in self.settings.keys() & given.keys():
            shape = getattr(given[key], "shape", ())
            if shape not in ((), split.labels.shape):
                raise ValueError(
                    f"{self.name} expects {key} to be a number or of shape "
                    f"{tuple(split.labels.shape)}, got {tuple(shape)}"
                )

    def adjustment(
        self, per_class: Callable[[str], Tensor], state: Any = None
    ) -> tuple[Tensor, Tensor | None]:
        """Offset and gain of the scores of every class, shape ``(C,)`` each.

        Args:
            per_class: looks up a setting that has one value per class.
            state: state of the term, if it has one.
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
        # Pickled by the builder's import path, since a definition must not be copied.
        return _rebuild, (self.definition.builder, self.settings, self.within)


def _rebuild(
    builder: Callable[..., Term], settings: dict[str, Setting], within: "Complement | None"
) -> Term:
    return replace(builder(**settings), within=within)


def not_a_loss(name: str, given: Any) -> TypeError:
    """Build the error for a term called with features and labels, as if it were a criterion."""
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
