"""Settings (hyperparameters) of a criterion's terms, and their values in one call.

Settings are addressed by name: ``margin`` means that of every term that has one, ``cosface.margin``
that of a single term, which takes precedence.
"""

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from tammes._buffers import ExactBuffers
from tammes._setting_values import is_number, on_host
from tammes._validation import unknown_setting
from tammes.schedules import LambdaAnnealing, LambdaDecay, Schedule, WarmUp
from tammes.spelling import nearest_name
from tammes.terms import Batch, Loss, Setting, Term

Place = tuple[str, str]
"""A term and one of its settings, by name."""


class NotAnAttribute:
    """Setting of the loss or the head that cannot be assigned on a criterion of this library.

    No call would read it. Subclasses defined elsewhere may use the name for an attribute.
    """

    def __init__(self, hint: str) -> None:
        self.hint = hint

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        if self.name in instance.__dict__:
            return instance.__dict__[self.name]
        raise AttributeError(f"{owner.__name__} has no attribute {self.name!r}")

    def __set__(self, instance: Any, value: Any) -> None:
        self.check(type(instance))
        instance.__dict__[self.name] = value

    def __delete__(self, instance: Any) -> None:
        if instance.__dict__.pop(self.name, self) is self:
            raise AttributeError(f"{type(instance).__name__} has no attribute {self.name!r}")

    def check(self, kind: type) -> None:
        """Raise ``AttributeError`` for a class of this library, even inside ``fully_shard``."""
        own = next(base for base in kind.__mro__ if not base.__module__.startswith("torch."))
        if own.__module__.startswith("tammes.criterion."):
            raise AttributeError(f"{kind.__name__} has no attribute {self.name!r}; {self.hint}")


class Settings(ExactBuffers):
    """Terms of a loss by name, and the arguments of each.

    A setting with one value per class is a buffer, so that it moves with the criterion; it is not
    saved in the ``state_dict``, since the loss defines it.

    Args:
        loss: the loss of the criterion.
        num_classes: number of classes.
        like: tensor whose dtype and device per-class values take.
        class_weights: one weight per class, on the CPU.

    Attributes:
        loss: the loss of the criterion.
        num_classes: number of classes.
        class_weights: weight of each class's examples.
        named: weight and term by name; a second term of the same name is numbered.
        arguments: default arguments of each term.
    """

    class_weights: Tensor | None

    def __init__(
        self, loss: Loss, num_classes: int, like: Tensor, class_weights: Tensor | None = None
    ) -> None:
        super().__init__()
        if class_weights is None:
            self.register_buffer("class_weights", None, persistent=False)
        else:
            self.register_constant("class_weights", class_weights, like.device)
        self.loss, self.num_classes = loss, num_classes
        self.named: dict[str, tuple[float, Term]] = {}
        self.arguments: dict[str, Mapping[str, Setting]] = {}
        for weight, term in loss.leaves():
            name, twin = term.name, 1
            while name in self.named:
                twin += 1
                name = f"{term.name}_{twin}"
            self.named[name] = (weight, term)
            self.arguments[name] = term.arguments
            for key, value in self.arguments[name].items():
                if not isinstance(value, tuple):
                    continue
                if len(value) != num_classes:
                    raise ValueError(
                        f"{term.name} expects one {key} for each of {num_classes} classes, "
                        f"got {len(value)}"
                    )
                dtype = torch.promote_types(like.dtype, torch.float32)
                values = torch.tensor(value, dtype=dtype, device="cpu")
                self.register_constant(f"{name}_{key}", values, like.device)

    def known_class_weights(self) -> Tensor | None:
        """Return the class weights with their values, even if the criterion is on ``meta``."""
        meta = self.class_weights is not None and self.class_weights.is_meta
        return self._constants["class_weights"] if meta else self.class_weights

    @property
    def uses_prototypes(self) -> bool:
        """Whether any term depends on the prototypes."""
        return any(term.definition.on != "features" for _, term in self.named.values())

    def check_schedule(self, key: str, schedule: Schedule, num_classes: int) -> Tensor:
        """Reject a schedule of a setting that is unknown, not a single number, or fixed.

        Its current value and, if known, its final value must be valid for the terms; the values in
        between are checked when the criterion is called. Returns the checked values.
        """
        places = self.places(key)
        if not places and key != "class_weights":
            raise ValueError(f"Criterion.schedule expects a setting of {self.loss!r}, got {key!r}")
        for name, own in places:
            _, term = self.named[name]
            value = self.arguments[name][own]
            if not is_number(value) and not isinstance(value, tuple):
                raise ValueError(
                    f"Criterion.schedule expects a setting that is a number, got {key!r}"
                )
            if own in term.definition.fixed or isinstance(term.settings.get(own), tuple):
                raise ValueError(
                    f"a schedule expects a setting that is one number and free to change, "
                    f"got {own} of {term!r}"
                )
        if not isinstance(schedule, Schedule):
            raise TypeError(f"Criterion.schedule expects a Schedule for {key}, got {schedule!r}")
        shape = (num_classes,) if key == "class_weights" else ()
        if schedule.value.shape != shape:
            raise ValueError(
                f"Criterion.schedule expects {key} of shape {shape}, "
                f"got {tuple(schedule.value.shape)}"
            )
        values = [schedule.value]
        if isinstance(schedule, (LambdaAnnealing, LambdaDecay, WarmUp)):
            end = schedule.at(schedule.steps.new_tensor(math.inf, dtype=torch.get_default_dtype()))
            values += [end] if bool(end.isfinite()) else []
        for name, own in places:
            self.named[name][1].check(**{own: torch.stack(values)})
        return torch.stack(values)

    def names(self) -> set[str]:
        """Names of all settings."""
        return {key for own in self.arguments.values() for key in own}

    def places(self, name: str) -> list[Place]:
        """Resolve a name to the setting of every term that has it or, with a dot, of one term."""
        term, dot, key = name.rpartition(".")
        terms = [term] if dot else [*self.arguments]
        return [(each, key) for each in terms if key in self.arguments.get(each, {})]

    def _by_place(self, *changed: Mapping[str, Setting]) -> dict[Place, Setting]:
        """Merge overrides: later mappings win; within one, a name with a dot wins."""
        return {
            place: some[name]
            for some in changed
            for name in sorted(some, key=lambda name: "." in name)
            for place in self.places(name)
        }

    def per_class(self) -> set[str]:
        """Names of the settings with one value per class."""
        terms = [term for _, term in self.named.values()]
        return {key for term in terms for key, value in term.values if isinstance(value, tuple)}

    def check(
        self,
        scheduled: Mapping[str, Setting],
        changed: Mapping[str, Setting],
        valid: Tensor,
        *,
        values: bool | None,
    ) -> None:
        """Reject invalid per-call overrides and scheduled values.

        Args:
            scheduled: scheduled settings: a number each.
            changed: settings given for this call: a number, or one per example.
            valid: which examples count, shape ``(N,)``.
            values: whether to check values: ``False`` only where that does not synchronise,
                ``True`` everywhere, ``None`` nowhere.
        """
        unknown = sorted(name for name in changed if not self.places(name))
        if unknown:
            known = self.names()
            # Prefer a misspelt name, for which the message has a hint.
            name = next((name for name in unknown if nearest_name(name, known)), unknown[0])
            raise unknown_setting("the criterion", name, known)
        places = self._by_place(scheduled, changed)
        for name, (_, term) in self.named.items():
            own = {key: value for (which, key), value in places.items() if which == name}
            if not term.definition.fixed.isdisjoint(own):
                raise TypeError(
                    f"{term.name} expects {', '.join(sorted(term.definition.fixed))} from the "
                    "beginning, got another at the call"
                )
            for key, value in own.items():
                _check_shape(key, value, len(valid), term)
            looked_at = {
                key: value[valid.to(value.device)] if _is_rows(value) else value
                for key, value in own.items()
                if not isinstance(value, Tensor)
                or values
                or (values is not None and on_host(value) and (on_host(valid) or not value.ndim))
            }
            if looked_at:
                term.check(**looked_at)

    def adjustment(
        self, name: str, dtype: torch.dtype, masked: Tensor | None, state: Any = None
    ) -> tuple[Tensor, Tensor | None]:
        """Offset and gain that a term applies to the scores of every class, shape ``(C,)`` each.

        Args:
            name: name of the term.
            dtype: dtype of the scores.
            masked: which classes are masked, shape ``(C,)``: they take the smallest value of the
                others, so that they do not affect other classes.
            state: state of the term, if it has one.
        """

        def per_class(key: str) -> Tensor:
            values = self.get_buffer(f"{name}_{key}").to(dtype)
            if masked is None:
                return values
            return torch.where(masked, values.masked_fill(masked, torch.inf).amin(), values)

        _, term = self.named[name]
        offset, gain = term.adjustment(per_class, state)
        return offset.to(dtype), gain

    def resolve(
        self,
        batch: Batch,
        scheduled: Mapping[str, Setting],
        changed: Mapping[str, Setting],
        dtype: torch.dtype,
    ) -> dict[str, dict[str, Setting]]:
        """Arguments of every term: numbers, or tensors of one value per example.

        Args:
            batch: the examples, whose labels select from per-class values.
            scheduled: scheduled settings.
            changed: settings given for this call, as :meth:`check` accepts them.
            dtype: dtype of the losses.
        """
        places = self._by_place(scheduled, changed)
        return {
            name: {
                key: _on_batch(places[name, key], batch, dtype)
                if (name, key) in places
                else self.get_buffer(f"{name}_{key}")[batch.labels].to(dtype)
                if isinstance(value, tuple)
                else value
                for key, value in own.items()
            }
            for name, own in self.arguments.items()
        }


def named_schedules(schedules: nn.ModuleDict) -> dict[str, Schedule]:
    """Flatten schedules, which are nested by term, to the full names of their settings."""
    found: dict[str, Schedule] = {}
    for name, kept in schedules.items():
        if isinstance(kept, nn.ModuleDict):
            found |= {f"{name}.{key}": cast(Schedule, schedule) for key, schedule in kept.items()}
        else:
            found[name] = cast(Schedule, kept)
    return found


def _is_rows(value: Setting) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0


def _check_shape(key: str, value: Setting, count: int, term: Term) -> None:
    """Reject anything but a number or, where the term allows it, one per example."""
    if isinstance(value, (int, float, str)):
        return
    shapes: list[tuple[int, ...]] = [()]
    if term.definition.on == "split":
        shapes.append((count,))
    if not isinstance(value, Tensor) or tuple(value.shape) not in shapes:
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"the criterion expects {key} to be a number or a tensor of shape "
            f"{' or '.join(map(str, shapes))}, got {got}"
        )


def _on_batch(value: Setting, batch: Batch, dtype: torch.dtype) -> Setting:
    if not isinstance(value, Tensor):
        return value
    value = value.to(batch.features.device, dtype)
    # Values of ignored examples may be anything, even NaN; 1 is valid for every setting.
    return torch.where(batch.valid, value, 1.0) if value.ndim else value
