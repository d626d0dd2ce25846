"""Base class of all heads: prototypes, scale, splitting a batch, adding and removing classes."""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from tammes._buffers import ExactBuffers
from tammes._validation import (
    INTEGERS,
    check_classes,
    check_features,
    check_labels,
    check_without_gradient,
    transforming,
)
from tammes.heads.adaptive_scale import adacos_scale, adapted_scale
from tammes.kernels.dispatch import Implementation, check_implementation, split
from tammes.kernels.problem import Problem, unmasked
from tammes.kernels.reference import score_matrix
from tammes.optim.state_transfer import carry_over, find_param_group
from tammes.similarity import Similarity, unit, working_dtype
from tammes.split import ALONGSIDE, REDUCED, Split, read_fields
from tammes.states import read

if TYPE_CHECKING:
    from tammes.distributed.process_group import RankGroup

Scale = float | Literal["learnable", "adaptive"]


class Head(ExactBuffers):
    r"""Prototypes and a scale: scores are :math:`f_c = s\,(a(x, w_c) + b_c)`.

    Attributes:
        weight: the prototypes as stored, shape ``(C, D)``, or ``(C, K, D)`` with K per class.
        bias: added to the similarities, shape ``(C,)``, or none. A class whose bias is ``-inf`` is
            masked: no loss counts it, and it gets no gradient.
        similarity: how a feature is compared with a prototype.
        implementation: ``"dense"`` keeps all N x C scores, ``"streamed"`` a block of them at a
            time, ``"fused"`` does so in Triton kernels on a GPU, ``"auto"`` decides by size.
        group: process group that the classes are sharded over, or ``None``.
        averaged: whether that group's gradients are averaged afterwards, or summed.

    Example:
        >>> head = tammes.CosineHead(4, 3)
        >>> head.prototypes.shape, head.scale
        (torch.Size([3, 4]), 64.0)
        >>> head.add_classes(2, from_features=torch.randn(2, 10, 4))
        >>> head
        CosineHead(4, 5, scale=64)
    """

    weight: Tensor
    bias: Tensor | None
    log_scale: nn.Parameter | None
    adaptive_scale: Tensor | None
    group: "RankGroup | None" = None
    averaged: bool = True
    cast = frozenset({"weight"})

    def __init__(
        self,
        weight: Tensor,
        similarity: Similarity,
        *,
        bias: Tensor | None = None,
        scale: Scale,
        implementation: Implementation = "auto",
        num_classes: int | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        num_classes = len(weight) if num_classes is None else num_classes
        check_implementation(name, implementation)
        self.similarity = similarity
        self.implementation = implementation
        if isinstance(weight, nn.Parameter):
            self.weight = weight
        else:
            self.register_buffer("weight", weight)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias))
        self.register_parameter("log_scale", None)
        self._scale = 1.0
        self.register_buffer("adaptive_scale", None)
        if isinstance(scale, str):
            if scale not in ("learnable", "adaptive"):
                raise ValueError(
                    f"{name} expects scale to be a number, 'learnable' or 'adaptive', got {scale!r}"
                )
            if scale == "adaptive" and not similarity.is_cosine:
                raise ValueError(
                    f"{name} expects scale 'adaptive' with cosines of unit features and unit "
                    f"prototypes only, got {type(similarity).__name__}({similarity.options})"
                )
            # With cosines, which are bounded, start from the fixed scale of AdaCos.
            start = adacos_scale(num_classes) if similarity.is_cosine else 1.0
            # One-dimensional: fully_shard rejects scalar parameters.
            if scale == "adaptive":
                exact = torch.promote_types(torch.get_default_dtype(), torch.float32)
                self.adaptive_scale = torch.full((1,), start, dtype=exact)
            else:
                self.log_scale = nn.Parameter(torch.full((1,), math.log(start)))
        else:
            self.scale = scale

    @property
    def num_classes(self) -> int:
        """Number of classes C."""
        return self.weight.shape[0]

    @property
    def is_sharded(self) -> bool:
        """Whether other ranks hold some of the classes."""
        return self.group is not None and self.group.world_size > 1

    @property
    def embedding_size(self) -> int:
        """Size D of a feature."""
        return self.weight.shape[-1]

    @property
    def scale(self) -> Tensor | float:
        """Factor of the similarities: a number, or a tensor if it is learned or adaptive."""
        if self.log_scale is None:
            adaptive = self.adaptive_scale
            if adaptive is None:
                return self._scale
            return read(adaptive).to(working_dtype(adaptive)).reshape(())
        # In half precision the exponential would be off by a percent.
        return self.log_scale.to(working_dtype(self.log_scale)).exp().reshape(())

    @scale.setter
    def scale(self, value: float) -> None:
        if not hasattr(value, "__float__"):
            raise TypeError(
                f"{type(self).__name__} expects scale to be a number, 'learnable' or 'adaptive', "
                f"got {value!r}"
            )
        check_without_gradient(type(self).__name__, "scale", value, "scale='learnable' learns it")
        if not 0 < value < math.inf:
            raise ValueError(f"{type(self).__name__} expects scale above 0, got {value}")
        with torch.no_grad():
            if self.log_scale is not None:
                self.log_scale.fill_(math.log(value))
            elif self.adaptive_scale is not None:
                self.adaptive_scale.fill_(value)
            else:
                self._scale = float(value)

    @property
    def scale_setting(self) -> Scale:
        """Scale as passed to the constructor: ``"learnable"``, ``"adaptive"`` or the number."""
        if self.log_scale is not None:
            return "learnable"
        return self._scale if self.adaptive_scale is None else "adaptive"

    @torch.no_grad()
    def adapt_scale(self, split: Split, valid: Tensor) -> None:
        """Update the adaptive scale from a batch, see docs/losses.md.

        Args:
            split: with ``target`` and ``others``, at the current scale.
            valid: which examples count, shape ``(N,)``.
        """
        assert self.adaptive_scale is not None
        self.adaptive_scale.copy_(adapted_scale(split, valid, self.adaptive_scale))

    @property
    def prototypes(self) -> Tensor:
        """Prototypes as they are compared, in the shape of ``weight``; normalised if cosine."""
        return self.similarity.keys(self.weight)[0]

    @property
    def has_angle(self) -> bool:
        """Whether the target is a length times a cosine, as angular margins require."""
        return self.similarity.has_angle and self.bias is None

    def problem(self, features: Tensor, labels: Tensor | None = None) -> Problem:
        """Collect the inputs of a kernel.

        Args:
            features: shape ``(N, D)``.
            labels: class of each example, shape ``(N,)``; only a sharded head needs them.
        """
        bias, there = (None, None) if self.bias is None else unmasked(self.bias)
        return Problem(features, self.weight, bias, self.scale, self.similarity, there=there)

    def masked(self) -> Tensor | None:
        """Mask of the classes with a bias of ``-inf``, shape ``(C,)``; none without a bias."""
        return None if self.bias is None else self.bias.detach() == -math.inf

    def logits(self, features: Tensor) -> Tensor:
        """Scores without any margin, for inference.

        Args:
            features: shape ``(N, D)``.

        Returns:
            Scores, shape ``(N, C)``.
        """
        self.check(features)
        return score_matrix(self.problem(features))

    def split(
        self, features: Tensor, labels: Tensor, reads: str | Iterable[str] = (*REDUCED, *ALONGSIDE)
    ) -> Split:
        """Split a batch by its labels.

        Args:
            features: shape ``(N, D)``.
            labels: class of each example, shape ``(N,)``.
            reads: names of the fields to compute.

        Returns:
            The :class:`tammes.Split` of the batch.
        """
        self.check(features)
        check_labels(type(self).__name__, labels, features)
        labels, fields = labels.long(), read_fields(type(self).__name__, reads)
        if not transforming() and labels.device.type == "cpu":
            check_classes(type(self).__name__, labels, self.num_classes, self.masked())
        return split(self.problem(features, labels), labels, fields, self.implementation)

    def forward(self, features: Tensor, labels: Tensor | None = None) -> Tensor | Split:
        """Split the features by their labels; without labels, return their logits."""
        return self.logits(features) if labels is None else self.split(features, labels)

    def check(self, features: Tensor) -> None:
        """Reject features of the wrong shape or type."""
        check_features(type(self).__name__, features, self.embedding_size)

    def add_classes(
        self,
        n: int,
        from_features: Tensor | None = None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """Append classes; existing ones stay bit-identical.

        Args:
            n: number of new classes.
            from_features: features of each new class, shape ``(n, D)`` or ``(n, K, D)``: the new
                prototypes start at their mean. By default they are initialised as in a new head;
                with several prototypes per class, all but the first are in any case.
            optimizer: its state for the old prototypes is carried over to the new parameter.
        """
        if n < 1:
            raise ValueError(f"add_classes expects n of 1 or more, got {n}")
        if from_features is not None:
            shape = tuple(from_features.shape)
            if from_features.ndim not in (2, 3) or (shape[0], shape[-1]) != (
                n,
                self.embedding_size,
            ):
                raise ValueError(
                    f"add_classes expects from_features of shape ({n}, {self.embedding_size}) or "
                    f"({n}, K, {self.embedding_size}), got {shape}"
                )
            from_features = from_features.detach().to(self.weight)
            if from_features.ndim == 3:
                from_features = from_features.mean(1)
        rows = self._new_rows(n, from_features)
        self._replace(torch.arange(self.num_classes), rows, optimizer)

    def remove_classes(
        self, indices: Sequence[int] | Tensor, *, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        """Drop classes; the remaining ones keep their order and stay bit-identical.

        Args:
            indices: the classes to drop.
            optimizer: its state for the prototypes that stay is carried over.
        """
        self._replace(self.kept(indices), self.weight.detach()[:0], optimizer)

    def kept(self, indices: Sequence[int] | Tensor) -> Tensor:
        """Indices of the classes that remain when some are dropped, in order."""
        drop = torch.as_tensor(indices).flatten().cpu()
        if drop.numel() == 0:
            drop = drop.long()
        if drop.dtype not in INTEGERS:
            raise TypeError(f"remove_classes expects indices of an integer type, got {drop.dtype}")
        drop = drop.long()
        if drop.numel() and (drop.min() < 0 or drop.max() >= self.num_classes):
            raise ValueError(
                f"remove_classes expects classes from 0 to {self.num_classes - 1}, "
                f"got {drop.min().item()} to {drop.max().item()}"
            )
        keep = torch.ones(self.num_classes, dtype=torch.bool)
        keep[drop] = False
        if keep.sum() < 2:
            raise ValueError(f"remove_classes expects 2 classes to stay, got {int(keep.sum())}")
        return keep.nonzero().flatten()

    def _new_rows(self, n: int, from_features: Tensor | None) -> Tensor:
        """Prototypes of n new classes; the first of each class starts from features if given."""
        if from_features is None:
            return self._initial(n).to(self.weight)
        given = self._from_features(from_features)
        if self.similarity.centers == 1:
            return given
        rows = self._new_rows(n, None)
        rows[:, 0] = given
        return rows

    def _from_features(self, features: Tensor) -> Tensor:
        """Prototypes in the given directions, with the mean norm of the existing ones.

        If the head compares by distance, at the features themselves.
        """
        if not self.similarity.has_angle:
            return features
        return unit(features) * torch.linalg.vector_norm(self.weight.detach(), dim=-1).mean()

    def _initial(self, n: int) -> Tensor:
        """Initial prototypes of n classes."""
        raise NotImplementedError

    def _replace(self, keep: Tensor, rows: Tensor, optimizer: torch.optim.Optimizer | None) -> None:
        keep = keep.to(self.weight.device)
        bias = None if self.bias is None else self.bias.detach()
        fresh = {"weight": torch.cat([self.weight.detach()[keep], rows])}
        if bias is not None:
            mean = bias[bias != -math.inf].mean()
            fresh["bias"] = torch.cat([bias[keep], mean.expand(len(rows))])
        trained = {name for name in fresh if getattr(self, name).requires_grad}
        if optimizer is not None:
            for name in trained:
                # Raises if the optimizer does not hold it, before anything is changed.
                find_param_group(optimizer, getattr(self, name))
        for name, values in fresh.items():
            old = getattr(self, name)
            if isinstance(old, nn.Parameter):
                new = nn.Parameter(values, requires_grad=old.requires_grad)
                if optimizer is not None and name in trained:
                    carry_over(optimizer, old, new, keep)
                setattr(self, name, new)
            else:
                setattr(self, name, values)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        given = state_dict.get(prefix + "log_scale")
        if isinstance(given, Tensor) and given.ndim == 0:
            # Older state dicts have a scalar.
            state_dict[prefix + "log_scale"] = given.view(1)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        """Sizes, scale, bias and options of the similarity."""
        known = self.scale_setting
        scale = known if isinstance(known, str) else f"{known:g}"
        bias = ", bias=True" if self.bias is not None else ""
        options = "".join(f", {key}={value!r}" for key, value in self.similarity.options.items())
        return f"{self.embedding_size}, {self.num_classes}, scale={scale}{bias}{options}"
