"""Head whose prototypes are sharded over ranks; each rank holds some of the classes."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tammes._validation import check_sizes
from tammes.distributed.process_group import RankGroup
from tammes.distributed.resharding import (
    all_gather_mask,
    checksum,
    global_mean_row,
    per_row_state,
    redistribute_rows,
    shard_bounds,
    shared_seed,
)
from tammes.heads.class_sampling import Sampler, sample_size
from tammes.heads.head import Head
from tammes.heads.sharded_init import KINDS, Kind, draw, draw_from
from tammes.kernels.dispatch import Implementation
from tammes.kernels.problem import Problem, Share, unmasked
from tammes.kernels.reference import score_matrix
from tammes.optim.sparse_rows import select_rows
from tammes.optim.state_transfer import find_param_group, initial_state, replace_parameter
from tammes.split import ALONGSIDE, REDUCED, Split

SPREAD = ("weight", "bias")
"""Parameters sharded by rows; the scale is replicated."""


class Top(NamedTuple):
    """Best classes of each example, best first.

    Attributes:
        scores: shape ``(N, k)``.
        classes: shape ``(N, k)``.
    """

    scores: Tensor
    classes: Tensor


def _check_proposal(
    proposal: Sequence[float] | Tensor, num_classes: int, sample_rate: float
) -> Tensor:
    """Return a valid proposal for all classes, in single precision on the CPU."""
    chances = torch.as_tensor(proposal, dtype=torch.float32, device="cpu").detach()
    if chances.shape != (num_classes,) or not bool(((chances > 0) & chances.isfinite()).all()):
        smallest = f", smallest {chances.min().item():g}" if chances.numel() else ""
        raise ValueError(
            f"ShardedHead expects a proposal of {num_classes} positive numbers, one for each "
            f"class, got shape {tuple(chances.shape)}{smallest}"
        )
    if sample_rate == 1:
        raise ValueError("ShardedHead expects a sample_rate below 1 with a proposal, got 1")
    return chances


class ShardedHead(Head):
    r"""A head whose classes are sharded over the ranks of a ``torch.distributed`` group.

    Each of G ranks holds the prototypes of at most :math:`\lceil C/G \rceil` classes as an ordinary
    parameter, so any optimizer trains them. :class:`tammes.Criterion` does the rest: it gathers the
    features of all ranks, and each rank compares them with its classes. All ranks must call it
    together; their batches may have different sizes. If ``torch.distributed`` is not initialised,
    it is a plain head.

    The initial prototypes do not depend on the number of ranks. With :mod:`tammes.checkpoint` a
    head saved on any number of ranks loads on any other; a ``state_dict`` holds the prototypes of
    its rank and loads only there. One of a plain head with all classes loads too.

    Wrap only the backbone in ``DistributedDataParallel`` or ``fully_shard``, which would treat the
    prototypes of the ranks as copies of the same parameter.

    Args:
        kind: :class:`tammes.CosineHead`, :class:`tammes.LinearHead` or
            :class:`tammes.GaussianHead`.
        embedding_size: size D of a feature.
        num_classes: total number of classes C.
        group: process group; by default that of ``torch.distributed``, if initialised.
        sample_rate: fraction of the classes used in a training step, which always includes those in
            the batch. In evaluation mode all classes are used.
        correct: let sampled classes stand for those left out, see docs/sampling.md.
        proposal: sampling probabilities of the classes up to a factor, shape ``(C,)``, such as
            their counts in the data: with ``correct`` the log-q correction of recommenders. Uniform
            by default.
        averaged: whether the ranks' gradients of the backbone are averaged, as
            ``DistributedDataParallel`` and ``fully_shard`` do, or summed.
        implementation: as in the kind of head.
        **options: further options of the kind of head, such as ``scale``.

    Attributes:
        weight: the prototypes of this rank, shape ``(stop - start, D)``.
        start: first class of this rank.
        stop: one past the last class of this rank.
        group: ranks that the classes are sharded over.

    Example:
        >>> head = tammes.ShardedHead(tammes.CosineHead, 8, 1000, scale=30.0)
        >>> head
        ShardedHead(CosineHead, 8, 1000, scale=30, classes 0 to 999 here)
        >>> criterion = tammes.Criterion(head, tammes.cosface())
        >>> criterion(torch.randn(4, 8), torch.tensor([0, 1, 2, 999])).backward()
        >>> head.top(torch.randn(4, 8), k=3).classes.shape
        torch.Size([4, 3])
    """

    place: Tensor
    group: RankGroup

    def __init__(
        self,
        kind: Kind,
        embedding_size: int,
        num_classes: int,
        *,
        group: Any = None,
        sample_rate: float = 1.0,
        correct: bool = False,
        proposal: Sequence[float] | Tensor | None = None,
        averaged: bool = True,
        implementation: Implementation = "auto",
        **options: Any,
    ) -> None:
        if kind not in KINDS:
            names = ", ".join(known.__name__ for known in KINDS)
            raise TypeError(
                f"ShardedHead expects one of the heads {names}, "
                f"got {getattr(kind, '__name__', repr(kind))}"
            )
        check_sizes("ShardedHead", embedding_size, num_classes)
        if not 0 < sample_rate <= 1:
            raise ValueError(
                f"ShardedHead expects sample_rate above 0 and at most 1, got {sample_rate}"
            )
        chances = None
        if proposal is not None:
            chances = _check_proposal(proposal, num_classes, sample_rate)
        group = RankGroup(group)
        told = None if chances is None else checksum(chances.numpy().tobytes())
        settings = repr((kind, sorted(options.items()), sample_rate, correct, told, averaged))
        group.check_equal(
            "ShardedHead",
            embedding_size=embedding_size,
            num_classes=num_classes,
            checksum_of_the_settings=checksum(settings.encode()),
        )
        start, stop = shard_bounds(num_classes, group.world_size, group.rank)
        seed = shared_seed(group)
        like, weight, bias = draw(kind, embedding_size, options, seed, start, stop)
        super().__init__(
            nn.Parameter(weight),
            like.similarity,
            bias=bias,
            scale=like.scale_setting,
            implementation=implementation,
            num_classes=num_classes,
        )
        self.kind, self.options, self.group = kind, options, group
        self.correct, self.averaged = correct, averaged
        self.sampler = None
        if sample_rate < 1:
            here = None if chances is None else chances[start:stop]
            self.sampler = Sampler(sample_rate, seed, here)
        self._settle(num_classes, start, stop)

    def _settle(self, num_classes: int, start: int, stop: int) -> None:
        """Record the classes of this rank, also in a buffer that reveals if a wrapper copies it."""
        self._num_classes, self.start, self.stop = num_classes, start, stop
        self._size = self.group.world_size
        place = torch.tensor([start, stop, num_classes], device=self.weight.device)
        self.register_buffer("place", place, persistent=self._size > 1)
        self._seen: tuple[Tensor, int] | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Parameter) and hasattr(value, "placements") and self._size > 1:
            raise RuntimeError(
                "ShardedHead was given to fully_shard, which takes the prototypes of all ranks of "
                f"{self.group.name} for copies of the same; shard the backbone only"
            )
        super().__setattr__(name, value)

    @property
    def num_classes(self) -> int:
        """Total number of classes C."""
        return self._num_classes

    @property
    def sample_rate(self) -> float:
        """Fraction of the classes used in a training step."""
        return 1.0 if self.sampler is None else self.sampler.rate

    def problem(self, features: Tensor, labels: Tensor | None = None) -> Problem:
        """Collect the inputs of a kernel: the classes of this rank, or a sample of them.

        Args:
            features: features of all ranks, shape ``(N, D)``.
            labels: class of each example among all C, shape ``(N,)``; without labels, the problem
                is that of this rank's classes alone.
        """
        self.check_place()
        sampler = self.sampler if self.training else None
        if labels is None or (self.group.process_group is None and sampler is None):
            return super().problem(features)
        # Where values are not checked, a label out of range must make the loss NaN.
        unknown = (labels < 0) | (labels >= self.num_classes)
        features = features.masked_fill(unknown[:, None], torch.nan)
        own = labels - self.start
        own = torch.where((own >= 0) & (own < len(self.weight)), own, -1)
        weight, bias, counts, most = self.weight, self.bias, None, self._count(0)
        classes: Tensor | slice = slice(self.start, self.stop)
        if sampler is not None:
            # A graph break. Problem and Share are made after it, since torch 2.11 cannot carry a
            # named tuple across one.
            masked = super().masked()
            index, own, counts = sampler(own, len(weight), start=self.start, masked=masked)
            weight = select_rows(weight, index)
            bias = None if bias is None else select_rows(bias, index)
            most = sample_size(len(own), most, sampler.rate)
            classes = index + self.start
        bias, there = unmasked(bias)
        share = Share(
            own,
            self.num_classes,
            self.group,
            counts=counts if self.correct else None,
            factor=float(self.group.world_size) if self.averaged else 1.0,
            most=most,
            here=classes,
        )
        return Problem(
            features, weight, bias, self.scale, self.similarity, share=share, there=there
        )

    def masked(self) -> Tensor | None:
        """See :meth:`Head.masked`; all ranks must call it together."""
        here = super().masked()
        return (
            here
            if here is None
            else all_gather_mask(self.group, here, self.start, self.num_classes)
        )

    def check_place(self) -> None:
        """Reject a head whose prototypes were overwritten by those of the first rank.

        All ranks check together at the first call; later a rank checks only if its buffer has been
        written to, to avoid synchronising.
        """
        if self.group.world_size != self._size:
            raise RuntimeError(
                f"ShardedHead was made on {self._size} ranks and is used on "
                f"{self.group.world_size} ({self.group.name}); "
                "make it after torch.distributed has started"
            )
        if self._size == 1 or self.place.is_meta:
            return
        seen = self._seen
        if seen is not None and seen[0] is self.place and seen[1] == self.place._version:
            return
        place = self.place.new_tensor([self.start, self.stop, self.num_classes])
        wrong = (self.place != place).any().long()
        if seen is None:
            wrong = self.group.all_reduce(wrong.view(1))
        if int(wrong):
            raise RuntimeError(
                "ShardedHead was wrapped in DistributedDataParallel, which put the prototypes of "
                f"the first rank in place of all others of {self.group.name}; wrap the backbone "
                "only, and make the head anew"
            )
        self._seen = (self.place, self.place._version)

    def split(
        self, features: Tensor, labels: Tensor, reads: str | Iterable[str] = (*REDUCED, *ALONGSIDE)
    ) -> Split:
        """Split a batch by its labels.

        All ranks must call it together, each with its own examples, and run backward together.
        Gradients are those of ``reduction="none"``.

        Args:
            features: shape ``(N, D)``; N may differ between the ranks.
            labels: class of each example among all C, shape ``(N,)``.
            reads: names of the fields to compute, the same on all ranks.
        """
        if self.group.world_size == 1:
            return super().split(features, labels, reads)
        # Imported here, since it imports this module.
        from tammes.heads.sharded_split import split_together

        return split_together(self, features, labels, reads)

    @torch.no_grad()
    def logits(self, features: Tensor) -> Tensor:
        """Scores without any margin, for inference.

        All ranks must call it together, each with its own features. It has no gradient. The scores
        are gathered on all ranks, for the examples of one rank at a time: with N examples in total,
        each rank receives ``N * C`` numbers. :meth:`top` sends ``N * k`` instead.

        Args:
            features: shape ``(N, D)``; N may differ between the ranks.

        Returns:
            Scores for all classes, shape ``(N, C)``.
        """
        result = features.new_empty(0, self.num_classes)
        for rank, scores in enumerate(self._scores(features)):
            padded = scores.new_zeros(len(scores), self._count(0))
            padded[:, : scores.shape[1]] = scores
            parts = self.group.all_gather(padded)
            if rank == self.group.rank:
                counts = [self._count(other) for other in range(self._size)]
                columns = [part[:, :n] for part, n in zip(parts, counts, strict=True)]
                result = torch.cat(columns, 1)
        return result

    @torch.no_grad()
    def top(self, features: Tensor, k: int = 1, *, shared: bool = False) -> Top:
        """Find the best classes of each example, without gathering all its scores on one rank.

        All ranks must call it together, each with its own features. It has no gradient.

        Args:
            features: shape ``(N, D)``; N may differ between the ranks.
            k: number of classes.
            shared: promise that all ranks pass the same features, which then are not sent.
        """
        if not 1 <= k <= self.num_classes:
            raise ValueError(f"top expects k from 1 to {self.num_classes} classes, got {k}")
        self.group.check_equal("top", k=k)
        found = Top(features.new_empty(0, k), self.place.new_empty(0, k))
        whose = self._scores(features, shared=shared)
        for rank, scores in enumerate(whose):
            best = scores.topk(min(k, scores.shape[1]), dim=1)
            missing = k - best.values.shape[1]
            values = nn.functional.pad(best.values, (0, missing), value=-torch.inf)
            classes = nn.functional.pad(best.indices + self.start, (0, missing), value=-1)
            values, classes = (self.group.all_gather(x).movedim(0, 1) for x in (values, classes))
            if shared or rank == self.group.rank:
                values, classes = values.flatten(1), classes.flatten(1)
                scores, order = values.topk(k, dim=1)
                found = Top(scores, classes.gather(1, order))
        return found

    def _scores(self, features: Tensor, *, shared: bool = False) -> Iterator[Tensor]:
        """Yield the scores of each rank's features for the local classes, rank by rank."""
        self.check(features)
        self.check_place()
        if shared:
            yield score_matrix(self.problem(features))
            return
        counts = self.group.all_gather_ints(rows=len(features))["rows"]
        longest = max(counts)
        together = self.group.all_gather_rows(features, longest)
        for rank, count in enumerate(counts):
            yield score_matrix(self.problem(together[rank * longest : rank * longest + count]))

    def _count(self, rank: int) -> int:
        """Number of classes of a rank."""
        start, stop = shard_bounds(self.num_classes, self._size, rank)
        return stop - start

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        errors: list[str] = args[-1]
        place = state_dict.pop(prefix + "place", None)
        whose = None if place is None else place.tolist()
        here = [self.start, self.stop, self.num_classes]
        for name in SPREAD:
            given, own = state_dict.get(prefix + name), getattr(self, name)
            if not isinstance(given, Tensor) or own is None or given.ndim != own.ndim:
                continue
            if whose is None and len(given) == self.num_classes:
                state_dict[prefix + name] = given[self.start : self.stop]
            elif whose != here or len(given) != len(own):
                first = "" if whose is None else f" from class {whose[0]} on of {whose[2]}"
                errors.append(
                    f"ShardedHead expects the {name} of all {self.num_classes} classes or of the "
                    f"{len(own)} of this rank from class {self.start} on, got {len(given)} rows"
                    f"{first}; tammes.checkpoint saves and loads those of all ranks"
                )
                state_dict[prefix + name] = own.detach()
        if self._size > 1:
            # Given even for a head on the meta device, whose own buffer has no values.
            device = state_dict.get(prefix + "weight", self.place).device
            state_dict[prefix + "place"] = torch.tensor(here, device=device)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _initial(self, n: int) -> Tensor:
        """Prototypes of new classes, all of them on every rank."""
        seed = shared_seed(self.group)
        return draw(self.kind, self.embedding_size, self.options, seed, 0, n)[1]

    def _from_features(self, features: Tensor) -> Tensor:
        """Prototypes of new classes from features, all of them on every rank."""
        lengths = torch.linalg.vector_norm(self.weight.detach().double(), dim=-1)
        total = self.group.all_reduce(lengths.sum().view(1))
        length = total / (self.num_classes * self.similarity.centers)
        return draw_from(self.kind, self.options, features, length)

    def _replace(self, keep: Tensor, rows: Tensor, optimizer: torch.optim.Optimizer | None) -> None:
        if self.sampler is not None and self.sampler.proposal is not None:
            raise ValueError(
                "ShardedHead expects the same classes as long as it has a proposal, which has one "
                "value for each, got a change of classes: make a new head with another proposal"
            )
        self.group.check_equal(
            "a change of classes",
            classes_kept=len(keep),
            new_classes=len(rows),
            checksum_of_the_classes_kept=checksum(keep.numpy().tobytes()),
        )
        total = len(keep) + len(rows)
        start, stop = shard_bounds(total, self._size, self.group.rank)
        new = slice(max(start - len(keep), 0), max(stop - len(keep), 0))
        own_new = new.stop - new.start

        def follow(values: Tensor, fresh: Tensor) -> Tensor:
            first, last = min(start, len(keep)), min(stop, len(keep))
            old = redistribute_rows(self.group, values.detach(), self.start, keep, first, last)
            return torch.cat([old, fresh[new].to(old)])

        fresh = {"weight": rows}
        if self.bias is not None:
            bias = self.bias.detach()
            fresh["bias"] = global_mean_row(self.group, bias[bias != -torch.inf]).expand(len(rows))
        held = {n: getattr(self, n) for n in fresh if getattr(self, n).requires_grad}
        states: dict[str, dict[str, Tensor]] = {}
        if optimizer is not None:
            states = {n: per_row_state(self.group, optimizer, held[n]) for n in held}
        for name, values in fresh.items():
            old: nn.Parameter = getattr(self, name)
            parameter = nn.Parameter(follow(old, values), requires_grad=old.requires_grad)
            if name in states:
                assert optimizer is not None
                group, _ = find_param_group(optimizer, old)
                moved = {}
                for key, value in states[name].items():
                    mean = global_mean_row(self.group, value)
                    moved[key] = follow(value, initial_state(key, group, values, mean))
                replace_parameter(optimizer, old, parameter, moved, len(parameter) - own_new)
            setattr(self, name, parameter)
        self._settle(total, start, stop)

    def extra_repr(self) -> str:
        """Kind, sizes, scale and the classes here."""
        here = f"classes {self.start} to {self.stop - 1}" if len(self.weight) else "no classes"
        on = f" of rank {self.group.rank} of {self._size}" if self._size > 1 else ""
        rate = "" if self.sampler is None else f", sample_rate={self.sample_rate:g}"
        return f"{self.kind.__name__}, {super().extra_repr()}{rate}, {here} here{on}"
