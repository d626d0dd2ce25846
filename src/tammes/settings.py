"""The settings of a criterion's terms, as one call has them."""

from collections.abc import Mapping

import torch
from torch import Tensor

from tammes.compose import Batch, Loss, Setting, Term
from tammes.schedules import Schedule
from tammes.steady import Steady


class Settings(Steady):
    """The terms of a loss by name, and what each is to be called with.

    A setting of one value per class is kept as a buffer, so that it moves with the criterion; it is
    no part of the saved state, since the loss already says it.

    Args:
        loss: as it was given.
        num_classes: number of classes.
        like: of the dtype and on the device that values per class are to have.
        class_weights: one weight per class, on the CPU.

    Attributes:
        loss: as it was given.
        class_weights: weight of each class's examples.
        named: weight and term by name; a second term of the same name is numbered.
        arguments: what each is called with where nothing changes it.
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
        self.loss = loss
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

    @property
    def uses_prototypes(self) -> bool:
        """Whether any term depends on the prototypes."""
        return any(term.definition.on != "features" for _, term in self.named.values())

    def check_schedule(self, key: str, schedule: Schedule, num_classes: int) -> None:
        """Refuse a schedule of what is no setting, no number, fixed, or one value per class."""
        if key not in self.names() | {"class_weights"}:
            raise ValueError(f"Criterion.schedule expects a setting of {self.loss!r}, got {key!r}")
        if key not in self.names(numbers=True) | {"class_weights"}:
            raise ValueError(f"Criterion.schedule expects a setting that is a number, got {key!r}")
        for _, term in self.named.values():
            if key in term.definition.fixed or isinstance(term.settings.get(key), tuple):
                raise ValueError(
                    f"a schedule expects a setting that is one number and free to change, "
                    f"got {key} of {term!r}"
                )
        if not isinstance(schedule, Schedule):
            raise TypeError(f"Criterion.schedule expects a Schedule for {key}, got {schedule!r}")
        shape = (num_classes,) if key == "class_weights" else ()
        if schedule.value.shape != shape:
            raise ValueError(
                f"Criterion.schedule expects {key} of shape {shape}, "
                f"got {tuple(schedule.value.shape)}"
            )

    def names(self, *, numbers: bool = False) -> set[str]:
        """Every setting of every term, or only those that are numbers."""
        return {
            key
            for own in self.arguments.values()
            for key, value in own.items()
            if not numbers
            or (isinstance(value, (int, float, tuple)) and not isinstance(value, bool))
        }

    def per_class(self) -> set[str]:
        """The settings that have one value per class."""
        terms = [term for _, term in self.named.values()]
        return {key for term in terms for key, value in term.values if isinstance(value, tuple)}

    def check(self, changed: Mapping[str, Setting], count: int) -> None:
        """Refuse what a call changes and cannot.

        Args:
            changed: settings that are not what the terms say: a number, or one per example.
            count: number of examples.
        """
        unknown = sorted(set(changed) - self.names())
        if unknown:
            raise TypeError(
                f"the criterion has no setting {', '.join(map(repr, unknown))}: "
                f"its terms have {sorted(self.names())}"
            )
        for name, (_, term) in self.named.items():
            if not term.definition.fixed.isdisjoint(changed):
                raise TypeError(
                    f"{term.name} expects {', '.join(sorted(term.definition.fixed))} from the "
                    "beginning, got another at the call"
                )
            own = {key: changed[key] for key in self.arguments[name].keys() & changed.keys()}
            plain = {
                k: v for k, v in own.items() if k in term.settings and not isinstance(v, Tensor)
            }
            if plain:
                # Held to what the builder of the term asks.
                term.altered(**plain)
            for key, value in own.items():
                _check_shape(key, value, count, term)

    def resolve(
        self, batch: Batch, changed: Mapping[str, Setting]
    ) -> dict[str, dict[str, Setting]]:
        """Arguments of every term: numbers, or tensors of one value per example.

        Args:
            batch: the examples, whose labels choose among values per class.
            changed: settings that are not what the terms say, as :meth:`check` lets them pass.
        """
        return {
            name: {
                key: _on_batch(changed[key], batch)
                if key in changed
                else self.get_buffer(f"{name}_{key}")[batch.labels]
                if isinstance(value, tuple)
                else value
                for key, value in own.items()
            }
            for name, own in self.arguments.items()
        }


def _check_shape(key: str, value: Setting, count: int, term: Term) -> None:
    """Refuse all but a number, and one for each example where the term can have that."""
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


def _on_batch(value: Setting, batch: Batch) -> Setting:
    if not isinstance(value, Tensor):
        return value
    value = value.to(batch.features.device)
    # What an ignored example has does not count, even if it is NaN; one is in every range.
    return torch.where(batch.valid, value, 1.0) if value.ndim else value
