"""Criterion: a head and a loss, the object that a training loop calls."""

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal, Never, Self, cast

import torch
from torch import Tensor, nn

from tammes._compile import outside_compile
from tammes._recomputation import checkpointing, once, recomputing
from tammes._validation import (
    check_class_weights,
    check_features,
    check_labels,
    check_reduction,
    check_values,
    check_weights,
    describe,
    transforming,
    unknown_setting,
)
from tammes.criterion.evaluate_terms import (
    Arguments,
    Noted,
    check_cosine_margin,
    check_fit,
    group_terms,
    other_terms,
    split_terms,
)
from tammes.criterion.graphed import GraphedCriterion
from tammes.criterion.hyperparameters import Settings, named_schedules
from tammes.criterion.param_groups import param_groups
from tammes.criterion.resize import check_new_values, check_resizable, follow
from tammes.criterion.stale_weight_warning import UpdateWatch
from tammes.distributed.global_batch import (
    GlobalBatch,
    WeightedBatch,
    make_global_batch,
    per_example_settings,
)
from tammes.heads.adaptive_scale import ADAPTIVE_READS
from tammes.heads.head import Head
from tammes.kernels import dense_gpu
from tammes.kernels.dense import takes_raw
from tammes.kernels.dispatch import Implementation, choose_kernel, split
from tammes.kernels.problem import Problem
from tammes.kernels.streamed.functions import own_split
from tammes.schedules import Schedule
from tammes.similarity import working_dtype
from tammes.split import ALONGSIDE
from tammes.states import Hook, LearnedNumber, Reading, States
from tammes.terms import Batch, Loss, Setting

Reduction = Literal["mean", "sum", "none"]


class Criterion(nn.Module):
    r"""A head and a sum of terms: ``loss = criterion(features, labels)``.

    .. math:: L = \frac{\sum_i w_i\,\ell_i}{\sum_i w_i},\qquad
              \ell_i = \sum_t \lambda_t\,\ell_i^{(t)}

    Terms on the split and on features have a value for each example; a term on the prototypes has
    one for all and counts as that of every example, so that the mean of the rows of
    ``reduction="none"`` is the mean reduction.

    Args:
        head: owns prototypes and scale.
        loss: a term, or a sum of weighted terms.
        reduction: ``"mean"`` (weighted, as torch's cross entropy has it), ``"sum"`` or ``"none"``.
            A batch in which nothing counts has mean zero.
        ignore_index: examples with this label count for nothing.
        class_weights: weight of each class's examples, shape ``(C,)``.
        validate: where the values of labels and features are checked: on the CPU; with ``True`` on
            an accelerator too, which waits for it; with ``None`` nowhere.
        implementation: of the head, if it is to be changed: ``"auto"``, ``"dense"``,
            ``"streamed"`` or ``"fused"``.
        group: whose batches are one batch: a process group, or ``True`` for the default one of
            ``torch.distributed``. Every rank then returns the loss of all of them, in whatever a
            term compares, and backbone and prototypes get its gradient. Ranks may have different
            numbers of examples, also none. A sharded head says it itself.
        averaged: the ranks' gradients are averaged, as DistributedDataParallel and FSDP do;
            ``False`` where they are summed.
        even: a promise that all ranks always have equally many examples: saves a small collective,
            which waits for an accelerator.

    Attributes:
        terms: mean of each term over the examples of the last call, by name, before its weight,
            detached; for logging. With a group, over the examples of all ranks.

    Example:
        >>> criterion = tammes.Criterion(
        ...     tammes.CosineHead(8, 3, scale=16.0),
        ...     tammes.cosface(margin=0.35) + 0.5 * tammes.sample_margin(),
        ... )
        >>> loss = criterion(torch.randn(4, 8), torch.tensor([0, 1, 2, 0]))
        >>> loss.backward()
        >>> list(criterion.terms)
        ['cosface', 'sample_margin']
    """

    def __init__(
        self,
        head: Head,
        loss: Loss,
        *,
        reduction: Reduction = "mean",
        ignore_index: int = -100,
        class_weights: Sequence[float] | Tensor | None = None,
        validate: bool | None = False,
        implementation: Implementation | None = None,
        group: Any = None,
        averaged: bool = True,
        even: bool = False,
        **unknown: Never,
    ) -> None:
        super().__init__()
        if unknown:
            own, shared = (signature(kind).parameters.values() for kind in (type(self), Criterion))
            known = {p.name for p in own if p.kind is not p.VAR_KEYWORD}
            known |= {p.name for p in shared if p.kind is p.KEYWORD_ONLY}
            raise unknown_setting(type(self).__name__, next(iter(unknown)), known)
        if not isinstance(head, Head):
            raise TypeError(
                "Criterion expects a head, such as tammes.CosineHead(embedding_size, num_classes), "
                f"got {describe(head)}"
            )
        if not isinstance(loss, Loss):
            raise TypeError(
                "Criterion expects a loss made of terms, such as tammes.cosface(), "
                f"got {getattr(loss, '__name__', type(loss).__name__)}"
            )
        check_reduction(reduction)
        if class_weights is not None:
            class_weights = check_class_weights(class_weights, head.num_classes)
        if implementation is not None:
            head.implementation = implementation
        self.head = head
        self.reduction = reduction
        self.ignore_index = ignore_index
        self.validate = validate
        self.global_batch = make_global_batch(head, group, averaged=averaged, even=even)
        self.states = States()
        self.schedules = nn.ModuleDict()
        self._noted: dict[str, Noted] = {}
        self._noted_total: Tensor | float | None = None
        self._even: tuple[tuple[int, torch.dtype, float], Tensor] | None = None
        self._step_by_hand = False
        self._watch = UpdateWatch()
        self._compose(loss, class_weights)
        for name, (_, term) in self.settings.named.items():
            state = term.make_state(head)
            if state is not None:
                if unseen := state.sees - {"target", *ALONGSIDE}:
                    raise ValueError(
                        f"{name} expects its state to see numbers of the own class, "
                        f"{', '.join(('target', *ALONGSIDE))}, got {', '.join(sorted(unseen))}"
                    )
                self.states[name] = state

    @property
    def class_weights(self) -> Tensor | None:
        """Weight of each class's examples, shape ``(C,)``, or none."""
        return self.settings.class_weights

    @class_weights.setter
    def class_weights(self, weights: Sequence[float] | Tensor | None) -> None:
        if weights is not None:
            weights = check_class_weights(weights, self.head.num_classes)
        self._compose(self.loss, weights)

    @property
    def terms(self) -> dict[str, Tensor]:
        """Mean of each term over the examples of the last call, before its weight, detached."""
        total = self._noted_total
        means = {}
        for name, (values, weights) in self._noted.items():
            # Copied, as a graphed call writes the next values to the same memory.
            mean = values.clone() if weights is None else (values * weights).sum()
            means[name] = mean if total is None else mean / total
        return means

    def _compose(self, loss: Loss, class_weights: Tensor | None) -> None:
        """Prepare the terms of a loss once, so that a call only evaluates them."""
        for _, term in loss.leaves():
            check_fit(self.head, term)
            check_cosine_margin(self.head, term)
        self.loss = loss
        self.settings = Settings(loss, self.head.num_classes, self.head.weight, class_weights)
        named = self.settings.named
        self._groups = group_terms(self.head, named, self.settings.arguments)
        self._others = {
            name: pair for name, pair in named.items() if pair[1].definition.on != "split"
        }
        self._uses_prototypes = self.settings.uses_prototypes
        definitions = [term.definition for _, term in named.values()]
        self._several = all(d.several_positives or d.on == "prototypes" for d in definitions)
        values = [value for own in self.settings.arguments.values() for value in own.values()]
        self._per_class = any(isinstance(value, tuple) for value in values)
        # Where one kernel is all there is to a call: what it reads.
        plain = len(self._groups) == 1 and not self._others and not self._groups[0].cosines
        plain = plain and type(self.head).problem is Head.problem
        # An adjustment adds to the scores after the problem is made.
        plain = plain and all(t.definition.adjust is None for t in self._groups[0].terms)
        self._plain = self._groups[0].reads if plain else None

    def forward(
        self,
        features: Tensor,
        labels: Tensor,
        *,
        weights: Tensor | None = None,
        **settings: Setting,
    ) -> Tensor:
        """Loss of a batch.

        Args:
            features: shape ``(N, D)``.
            labels: class of each example in ``[0, C)``, or ``ignore_index``, shape ``(N,)``. For a
                loss that takes several positives, such as :func:`tammes.multi_positive`, also
                ``(N, P)``, filled up with ``ignore_index``.
            weights: weight of each example, shape ``(N,)``.
            **settings: settings of the terms for this call: a number, or one per example. A name
                such as ``margin`` goes to every term that has it, one such as ``cosface.margin`` to
                that term alone: ``criterion(features, labels, **{"cosface.margin": 0.2})``.

        Returns:
            A scalar, or with ``reduction="none"`` the weighted losses, shape ``(N,)``.
        """
        tracing, head, scope = transforming(), self.head, self._scope()
        problem = None if tracing or scope is not None else self._raw_problem(features, settings)
        raw = problem is not None
        if problem is None and scope is None and head.group is None:
            # In one process a head collects its problem without looking at labels.
            problem = head.problem(features)
        if problem is None:
            masked = head.masked()
        else:
            masked = None if problem.there is None else ~problem.there
        changing = self._changing
        none_ignored = False
        if scope is None:
            none_ignored = self._check(features, labels, weights, settings, masked, tracing)
        else:
            max_rows = scope.validate(
                type(self).__name__,
                lambda: self._check(features, labels, weights, settings, masked, tracing),
                features,
                embedding_size=head.embedding_size,
                num_classes=head.num_classes,
                values_per_example=len(per_example_settings(settings)) + (weights is not None),
                labels_per_example=labels.shape[-1] if getattr(labels, "ndim", 1) == 2 else 1,
            )
        # Before it is compared: a small integer type would wrap the ignored label round.
        labels = labels.long()
        dtype = working_dtype(features, head.weight)
        even = total = weighed = None
        if raw and weights is None and self.class_weights is None:
            mean = self.reduction == "mean"
            weighed = dense_gpu.weigh_examples(labels, self.ignore_index, mean=mean)
        if weighed is not None:
            labels, valid, even, total = weighed
            batch = Batch(features, labels, valid)
        else:
            labels, valid = self._positives(labels)
            if none_ignored:
                even = self._even_weights(labels, dtype)
            else:
                none_ignored = not tracing and labels.device.type == "cpu" and bool(valid.all())
            batch = Batch(features, labels, valid)
            if raw or not none_ignored:
                # What an ignored example holds must not leak, not even as 0 times NaN.
                ignored = ~valid
                kept = features if raw else features.masked_fill(ignored.unsqueeze(1), 0.0)
                one = labels if labels.ndim == 2 else labels.masked_fill(ignored, 0)
                batch = Batch(kept, one, valid)
        if problem is not None and (raw or not none_ignored):
            problem = problem._replace(features=batch.features, valid=valid if raw else None)
        own = whole = WeightedBatch(batch, weights, settings)
        mine = slice(None)
        if scope is not None:
            whole, mine = scope.gather(own, max_rows, features=self._compares_features)
        # A rank splits its own examples; all of them, if it has only some of the prototypes.
        part = whole if scope is not None and scope.sharded else own

        if problem is None and self._groups:
            problem = head.problem(part.batch.features, part.batch.labels)
        arguments: Arguments = self.settings.arguments
        groups, class_weights = self._groups, self.settings.class_weights
        if changing or settings or self._per_class:
            here = part.batch
            if part is not whole and len(self.states) > 0:
                here = here._replace(first=whole.batch.valid[: mine.start].sum())
            now = self._read(whole.batch, here, problem, tracing)
            if now.scale is not None and problem is not None:
                problem = problem._replace(scale=now.scale)
            arguments = self.settings.resolve(part.batch, now.scheduled, part.settings, dtype)
            for name, state in now.states.items():
                arguments[name]["state"] = state
            groups = group_terms(head, self.settings.named, arguments)
            class_weights = now.class_weights
        watch = self._watch
        if self.training and not tracing and watch.noticed != watch.steps_taken:
            watch.notice(head.weight, features, used=self._uses_prototypes)

        plain = weights is None and class_weights is None and masked is None and scope is None
        if plain and even is not None:
            weights = even
        else:
            weights = self._weigh(whole, class_weights, masked, dtype)
            total = weights.sum()
            if whole.weights is None and class_weights is None:
                # Whole numbers.
                total = total.clamp_min(1)
            else:
                total = torch.where(total == 0, torch.ones_like(total), total)
            if self.reduction == "mean":
                weights = weights / total
        rowwise = self.reduction == "none"
        some = weights if part is whole else weights[mine]
        loss, noted = split_terms(
            head,
            problem,
            groups,
            self.settings,
            arguments,
            part.batch,
            masked,
            some,
            rowwise=rowwise,
        )
        if self._others:
            batch = whole.batch._replace(masked=masked)
            if scope is not None:
                batch = batch._replace(features=scope.for_replicated_loss(batch.features))
            rows = dict(other_terms(head, self._others, arguments, batch, weights))
        else:
            rows = {}
        losses = [self._others[n][0] * (r if rowwise else r.sum()) for n, r in rows.items()]
        if scope is None:
            loss = sum(losses, loss)
        else:
            sums = {n: v if w is None else (v * w).sum() for n, (v, w) in noted.items()}
            loss, sums = scope.combine(loss, losses, sums, mine)
            noted = {name: (total_of, None) for name, total_of in sums.items()}
        again = not tracing and torch._C._current_graph_task_id() != -1
        if again:
            # Activation checkpointing: the first pass has noted and counted this call.
            return loss
        if not _transformed(tracing):
            noted |= {name: (r.detach().sum(), None) for name, r in rows.items()}
            self._noted = {name: noted[name] for name in self.settings.named}
            count = len(labels) if total is None else total.detach()
            self._noted_total = None if self.reduction == "mean" else count
        if changing:
            self._remember("after", whole.batch, tracing)
            # The first pass of a checkpoint may be without gradient.
            learning = self.training and (torch.is_grad_enabled() or checkpointing())
            if learning and not self._step_by_hand:
                self.step()
        return loss

    if TYPE_CHECKING:
        # A call has the type of forward; torch's own is Any.
        __call__ = forward

    def _raw_problem(self, features: Tensor, settings: Mapping[str, Setting]) -> Problem | None:
        """Collect a problem for kernels that mask examples and classes themselves, or none."""
        head, on_gpu = self.head, dense_gpu.ANYWHERE or getattr(features, "is_cuda", False)
        if not on_gpu or self._plain is None or settings or self.validate:
            return None
        if self._changing or features.ndim != 2 or not len(features):
            return None
        problem = Problem(features, head.weight, head.bias, head.scale, head.similarity)
        way = choose_kernel(head.implementation, problem, self._plain)
        return problem if way == "dense" and takes_raw(problem, self._plain) else None

    def _positives(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Labels, where there are several with -1 for those that fill up, and which rows count."""
        there = labels != self.ignore_index
        return (
            (labels, there) if labels.ndim == 1 else (labels.masked_fill(~there, -1), there.any(1))
        )

    def _even_weights(self, labels: Tensor, dtype: torch.dtype) -> Tensor:
        """Weights of a batch in which every example counts alike, made once for each size."""
        share = 1 / len(labels) if self.reduction == "mean" else 1.0
        if self._even is None or self._even[0] != (len(labels), dtype, share):
            with torch.inference_mode(False):
                weights = torch.full(labels.shape[:1], share, dtype=dtype, device=labels.device)
            self._even = (len(labels), dtype, share), weights
        return self._even[1]

    def logits(self, features: Tensor) -> Tensor:
        """Scores without any margin, for inference, shape ``(N, C)``."""
        return self.head.logits(features)

    def graphed(self, features: Tensor, labels: Tensor) -> GraphedCriterion:
        """Record a call and its gradient as CUDA graphs; returns a callable used like this one.

        At everyday sizes a GPU waits for its launches; a replay has one. Schedules, states, and
        changes of the loss are followed, batches of another shape run as plain calls, and where
        nothing can be recorded every call does, with a warning.

        Args:
            features: a batch as it will be, shape ``(N, D)``.
            labels: shape ``(N,)``.

        Example:
            >>> criterion = tammes.CosFace(8, 3)
            >>> features = torch.randn(4, 8, requires_grad=True)
            >>> fast = criterion.graphed(features, torch.tensor([0, 1, 2, 0]))
            >>> loss = fast(features, torch.tensor([2, 1, 0, 0]))
        """
        return GraphedCriterion(self, features, labels)

    def _scope(self) -> GlobalBatch | None:
        """Return the global batch of the process group, or ``None`` in a single process."""
        batch = self.global_batch
        return None if batch is None or batch.group.world_size == 1 else batch

    @property
    def _changing(self) -> bool:
        """Whether a call changes states, schedules or an adaptive scale."""
        known = len(self.states) > 0 or len(self.schedules) > 0
        return known or self.head.adaptive_scale is not None

    @property
    def _compares_features(self) -> bool:
        """Whether a term, a state or the scale reads features of other examples than its own."""
        adaptive = self.head.adaptive_scale is not None
        return (
            adaptive
            or self.states.read_features
            or any(
                term.definition.on in ("features", "proxies") for _, term in self._others.values()
            )
        )

    @staticmethod
    def _weigh(
        examples: WeightedBatch,
        class_weights: Tensor | None,
        masked: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        """Weigh the examples, shape ``(N,)``; NaN where an example's own class is masked."""
        batch, weights, _ = examples
        result = batch.valid.to(dtype)
        if weights is not None:
            result = torch.where(batch.valid, weights.to(dtype), 0.0)
        if class_weights is not None:
            result = result * class_weights.to(dtype)[batch.labels]
        if masked is not None:
            # Where values are not checked, an example of a masked class must show.
            own = masked[batch.labels.clamp_min(0)] & (batch.labels >= 0)
            own = own if own.ndim == 1 else own.any(1)
            result = result.masked_fill(batch.valid & own, torch.nan)
        return result

    def _scheduled(self) -> dict[str, Tensor]:
        """Current values of the terms' settings that follow a schedule."""
        schedules = named_schedules(self.schedules)
        return {key: schedule() for key, schedule in schedules.items() if key != "class_weights"}

    def _read(self, whole: Batch, part: Batch, problem: Problem | None, tracing: bool) -> Reading:
        """Read the states and schedules of this call, which later calls change."""

        def make() -> Reading:
            seen, scale = whole, None
            if problem is not None:
                every = problem._replace(features=whole.features)
                if self.training and self.states.sees:
                    run = own_split if problem.share is None else outside_compile(own_split)
                    seen = whole._replace(split=run(every, whole.labels, self.states.sees))
                if self.head.adaptive_scale is not None:
                    scale = self._adapted_scale(whole, every, tracing)
            self._remember("before", seen, tracing)
            weights = self.schedules["class_weights"]() if deferred else self.class_weights
            named = self.settings.named
            on_features = {name for name in named if named[name][1].definition.on == "features"}
            read = {name: whole if name in on_features else part for name in self.states}
            return Reading(self._scheduled(), weights, self.states.reading(read), scale)

        deferred = "class_weights" in self.schedules
        now = once(self, make) if self.training and self._changing else make()
        if recomputing():
            # Learned numbers are the same, but the first pass may have been without a graph.
            for name, state in self.states.items():
                if isinstance(state, LearnedNumber):
                    now.states[name] = state.reading(part)
        return now

    def _adapted_scale(self, batch: Batch, problem: Problem, tracing: bool) -> Tensor | float:
        """Scale of the head, which in training follows the examples of all ranks first."""
        if self.training and not _transformed(tracing):
            run = split if problem.share is None else outside_compile(split)
            with torch.no_grad():
                seen = run(problem, batch.labels, ADAPTIVE_READS, self.head.implementation)
                self.head.adapt_scale(seen, batch.valid)
        return self.head.scale

    def _check(
        self,
        features: Tensor,
        labels: Tensor,
        weights: Tensor | None,
        settings: Mapping[str, Setting],
        masked: Tensor | None,
        tracing: bool,
    ) -> bool:
        """Reject a call with wrong shapes, types, devices or, where they are known, values.

        Returns:
            Whether it is known, on a CPU, that there are examples and none is ignored.
        """
        name, prototypes = type(self).__name__, self.head.weight
        check_features(type(self.head).__name__, features, prototypes.shape[-1])
        check_labels(name, labels, features, several=self._several)
        weighed = self.class_weights is not None or "class_weights" in self.schedules
        if labels.ndim == 2 and weighed:
            raise ValueError(
                f"{name} expects one label per example where it has class_weights, got labels of "
                f"shape {tuple(labels.shape)}"
            )
        if weights is not None:
            check_weights(name, weights, labels)
        if features.device != prototypes.device:
            raise ValueError(
                f"{name} expects features on {prototypes.device}, where its prototypes are, "
                f"got {features.device}"
            )
        # Values are read in plain eager mode only, and where that does not wait for a GPU.
        wanted = self.validate or features.device.type == "cpu"
        none_ignored = False
        if not tracing and wanted and self.validate is not None:
            classes, ignored = self.settings.num_classes, self.ignore_index
            none_ignored = check_values(name, features, labels.long(), classes, masked, ignored)
        if settings or self.schedules:
            valid = labels.long() != self.ignore_index
            values = None if tracing else self.validate
            self.settings.check(self._scheduled(), settings, valid, values=values)
        return none_ignored and labels.device.type == "cpu" and len(labels) > 0

    def _remember(self, hook: Hook, batch: Batch, tracing: bool) -> None:
        if self.training and not _transformed(tracing):
            self.states.run_hook(hook, batch)

    def schedule(self, *, by_hand: bool | None = None, **schedules: Schedule) -> Self:
        """Attach schedules to settings, by the name of the setting.

        A schedule is part of the criterion: saved in its ``state_dict``, it resumes where it
        stopped. It steps with every call in training mode, or when you call :meth:`step`.

        Args:
            by_hand: do not step by itself: for gradient accumulation, or steps that are epochs.
                Holds for all schedules of the criterion, until it is said otherwise.
            **schedules: a schedule for each setting, such as ``margin``, ``blend`` or, of one term
                alone, ``cosface.margin``; and for ``class_weights``.

        Returns:
            The criterion itself.

        Example:
            >>> from tammes.schedules import WarmUp
            >>> criterion = tammes.CosFace(8, 3).schedule(margin=WarmUp(0.0, 0.35, steps=1000))
        """
        for key, schedule in schedules.items():
            self.settings.check_schedule(key, schedule, self.head.num_classes)
        for key, schedule in schedules.items():
            term, dot, own = key.rpartition(".")
            if dot and term not in self.schedules:
                self.schedules[term] = nn.ModuleDict()
            kept = cast(nn.ModuleDict, self.schedules[term]) if dot else self.schedules
            kept[own] = schedule.to(self.head.weight.device)
        if by_hand is not None:
            self._step_by_hand = by_hand
        return self

    def step(self) -> None:
        """Advance all schedules by one step."""
        # One schedule may drive several settings, and still steps once.
        for schedule in set(named_schedules(self.schedules).values()):
            schedule.step()

    def param_groups(
        self,
        backbone: nn.Module | None = None,
        *,
        lr: float,
        head_lr: float | None = None,
        weight_decay: float = 0.0,
        head_weight_decay: float | None = None,
    ) -> list[dict[str, Any]]:
        """Parameter groups for an optimizer: the backbone's and the criterion's own.

        Args:
            backbone: what makes the features; parameters it shares with the criterion count as
                the criterion's.
            lr: learning rate of the backbone.
            head_lr: learning rate of the criterion, ``lr`` by default.
            weight_decay: of the backbone.
            head_weight_decay: of the prototypes, ``weight_decay`` by default. Bias and scale have
                none.

        Returns:
            Groups for any optimizer of torch.

        Example:
            >>> criterion = tammes.CosFace(8, 3)
            >>> groups = criterion.param_groups(torch.nn.Linear(4, 8), lr=0.1, head_lr=1.0)
            >>> [(group["lr"], len(group["params"])) for group in groups]
            [(0.1, 2), (1.0, 1)]
        """
        return param_groups(
            self,
            backbone,
            lr=lr,
            head_lr=lr if head_lr is None else head_lr,
            weight_decay=weight_decay,
            head_weight_decay=weight_decay if head_weight_decay is None else head_weight_decay,
        )

    def add_classes(
        self,
        n: int,
        from_features: Tensor | None = None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        **per_class: Sequence[float],
    ) -> None:
        """Append classes to the head and to every setting with one value per class.

        Args:
            n: how many.
            from_features: features of each new class, see :meth:`tammes.heads.Head.add_classes`.
            optimizer: its state is carried over.
            **per_class: n values for every setting that has one per class, such as ``counts`` of
                :func:`tammes.ldam`; and for ``class_weights``.
        """
        check_resizable(self, self.head.num_classes + n)
        check_new_values(self, n, per_class)
        old = torch.arange(self.head.num_classes)
        self.head.add_classes(n, from_features, optimizer=optimizer)
        self._compose(*follow(self, old, n, per_class))

    def remove_classes(
        self, indices: Sequence[int] | Tensor, *, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        """Drop classes from the head and from every setting with one value per class.

        Args:
            indices: the classes to drop.
            optimizer: its state for the classes that stay is carried over.
        """
        keep = self.head.kept(indices)
        check_resizable(self, len(keep))
        self.head.remove_classes(indices, optimizer=optimizer)
        self._compose(*follow(self, keep, 0, {}))

    def __repr__(self) -> str:
        """Show the head, the loss, and options that are not the default."""
        lines = [f"head={self.head!r}", f"loss={self.loss!r}"]
        schedules = named_schedules(self.schedules)
        lines += [f"{key} follows {schedule!r}" for key, schedule in schedules.items()]
        if self.reduction != "mean":
            lines.append(f"reduction={self.reduction!r}")
        if self.ignore_index != -100:
            lines.append(f"ignore_index={self.ignore_index}")
        if self.class_weights is not None:
            lines.append(f"class_weights of {len(self.class_weights)} classes")
        if self.global_batch is not None:
            lines.append(f"group={self.global_batch.group.name!r}")
        return f"{type(self).__name__}(\n  " + ",\n  ".join(lines) + "\n)"


def _transformed(tracing: bool) -> bool:
    """Whether tensors belong to a functorch transform and must not be stored."""
    return tracing and not torch.compiler.is_compiling()
