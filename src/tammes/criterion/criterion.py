"""Criterion: a head and a loss, called by the training loop."""

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal, Never, Self, cast

import torch
from torch import Tensor, nn

from tammes._validation import (
    check_batch,
    check_class_weights,
    check_reduction,
    check_values,
    describe,
    transforming,
    unknown_setting,
    whole_number,
)
from tammes.criterion.evaluate_terms import (
    Noted,
    SplitGroup,
    check_cosine_margin,
    check_fit,
    group_terms,
    margin_of,
    split_terms,
)
from tammes.criterion.general_call import general_call
from tammes.criterion.graphed import GraphedCriterion
from tammes.criterion.hyperparameters import NotAnAttribute, Settings, named_schedules
from tammes.criterion.param_groups import param_groups
from tammes.criterion.resize import check_new_values, check_resizable, follow
from tammes.criterion.stale_weight_warning import UpdateWatch
from tammes.distributed.global_batch import GlobalBatch, make_global_batch
from tammes.heads.head import Head
from tammes.kernels import dense_gpu
from tammes.kernels.dense import dense_cross_entropy, dense_split, takes_raw
from tammes.kernels.dispatch import Implementation, choose_kernel
from tammes.kernels.problem import Margin, Problem
from tammes.schedules import Schedule
from tammes.similarity import full_precision, product_dtype, working_dtype
from tammes.split import ALONGSIDE
from tammes.states import State, States
from tammes.terms import Loss, Setting, Term

Reduction = Literal["mean", "sum", "none"]


class Criterion(nn.Module):
    r"""A head and a sum of terms: ``loss = criterion(features, labels)``.

    .. math:: L = \frac{\sum_i w_i\,\ell_i}{\sum_i w_i},\qquad
              \ell_i = \sum_t \lambda_t\,\ell_i^{(t)}

    Terms on the split and on features have one value per example; a term on the prototypes has a
    single value, which is counted once per example, so that the mean of the ``reduction="none"``
    losses is the ``"mean"`` reduction.

    Args:
        head: owns prototypes and scale.
        loss: a term, or a sum of weighted terms.
        reduction: ``"mean"`` (weighted, as in torch's cross entropy), ``"sum"`` or ``"none"``. The
            mean of a batch whose weights are all zero is zero.
        ignore_index: examples with this label are ignored.
        class_weights: weight of each class's examples, shape ``(C,)``.
        validate: whether to check the values of labels and features: ``False`` on the CPU only,
            ``True`` on an accelerator too, which synchronises it, ``None`` nowhere.
        implementation: overrides that of the head: ``"auto"``, ``"dense"``, ``"streamed"`` or
            ``"fused"``.
        group: process group whose batches form one global batch, or ``True`` for the default group
            of ``torch.distributed``. Every rank then returns the loss of the global batch, also for
            terms that compare examples, and backbone and prototypes get its gradient. Ranks may
            have different numbers of examples, even none. A sharded head brings its own group.
        averaged: whether the ranks' gradients are averaged afterwards, as DistributedDataParallel
            and FSDP do, or summed.
        even: promise that all ranks always have equally many examples; saves a small collective,
            which synchronises an accelerator.

    Attributes:
        head: the head; assign another that the terms fit to replace it. With equally many classes
            and dimensions terms keep their states, else they start afresh.
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

    margin = NotAnAttribute(
        "criterion.loss = tammes.cosface(margin=...) changes it for all calls, "
        "criterion(features, labels, margin=...) for one, criterion.schedule(margin=...) over time"
    )
    scale = NotAnAttribute("criterion.head.scale = ... changes it")
    implementation = NotAnAttribute("criterion.head.implementation = ... changes it")
    # Margin of a loss that is a cross entropy, and so one function of the batch. Criteria pickled
    # before there were any have none.
    _entropy: Margin | None = None

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
        _check_head(head)
        _check_loss(loss)
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
        self._even: tuple[tuple[Any, ...], Tensor] | None = None
        self._step_by_hand = False
        self._watch = UpdateWatch()
        self._compose(loss, class_weights)
        self._make_states({})

    @property
    def loss(self) -> Loss:
        """The term or sum of terms; assign another to replace it.

        Terms that stay keep their states, new ones start afresh; schedules must fit the new terms.
        If a new term has a learned parameter, add it to the optimizer.
        """
        return self.settings.loss

    @loss.setter
    def loss(self, loss: Loss) -> None:
        self._replace(self.head, loss)

    def _replace(self, head: Head, loss: Loss) -> None:
        """Replace the head or the loss, if the loss, the schedules and the weights fit the head."""
        _check_head(head)
        _check_loss(loss)
        old, classes, weights = self.head, head.num_classes, self.settings.known_class_weights()
        _check_terms(head, loss)
        if weights is not None:
            check_class_weights(weights, classes)
        settings = Settings(loss, classes, head.weight)
        _check_schedules(head, settings, named_schedules(self.schedules))
        if head is not old:
            batch = self.global_batch
            self.global_batch = make_global_batch(
                head,
                None if batch is None or batch.sharded else batch.group,
                averaged=batch is None or batch.averaged,
                even=batch is not None and batch.even,
            )
            super().__setattr__("head", head)
            self.schedules.to(head.weight.device)
            self._watch = UpdateWatch()
        same_size = (classes, head.embedding_size) == (old.num_classes, old.embedding_size)
        before = self.settings.named if same_size else {}
        self._compose(loss, weights)
        self._make_states(before)
        self.states.to(head.weight.device, working_dtype(head.weight))

    def __setattr__(self, name: str, value: Any) -> None:
        """Check what is assigned, before torch stores it: a module under any name."""
        if name == "loss":
            object.__setattr__(self, name, value)
            return
        # DataParallel puts a copy of each module into a replica, before it has its tensors.
        if name == "head" and "settings" in self._modules and "_is_replica" not in vars(self):
            self._replace(value, self.loss)
            return
        if name in ("margin", "scale", "implementation"):
            getattr(Criterion, name).check(type(self))
        elif name == "reduction":
            check_reduction(value)
        elif name == "ignore_index":
            value = whole_number("Criterion", name, value)
        super().__setattr__(name, value)

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
        _check_terms(self.head, loss)
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
        self._usual = self._only_group()
        self._entropy = self._usual and margin_of(self.head, self._usual, self.settings.arguments)

    def _make_states(self, before: Mapping[str, tuple[float, Term]]) -> None:
        """Make the states of the terms; unchanged terms keep theirs."""
        made = States()
        for name, (_, term) in self.settings.named.items():
            kept = name in before and before[name][1] == term and name in self.states
            state = cast(State, self.states[name]) if kept else term.make_state(self.head)
            if state is not None:
                if unseen := state.sees - {"target", *ALONGSIDE}:
                    raise ValueError(
                        f"{name} expects its state to see numbers of the own class, "
                        f"{', '.join(('target', *ALONGSIDE))}, got {', '.join(sorted(unseen))}"
                    )
                made[name] = state
        self.states = made.train(self.training)

    def _only_group(self) -> SplitGroup | None:
        """Return the only group of terms, if the fast path of :meth:`forward` can evaluate it.

        It cannot with maps or adjustments of the scores, states, class weights, or settings per
        class.
        """
        if len(self._groups) != 1 or self._others or self._per_class:
            return None
        group, definitions = self._groups[0], [t.definition for t in self._groups[0].terms]
        alone = any(d.has_own_scores or d.state is not None for d in definitions)
        if alone or group.cosines or self.class_weights is not None:
            return None
        return group if type(self.head).problem is Head.problem else None

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
                ``(N, P)``, padded with ``ignore_index``.
            weights: weight of each example, shape ``(N,)``.
            **settings: override settings of the terms for this call: a number, or one per example.
                ``margin`` applies to every term that has one, ``cosface.margin`` to that term
                alone: ``criterion(features, labels, **{"cosface.margin": 0.2})``.

        Returns:
            A scalar, or with ``reduction="none"`` the weighted losses, shape ``(N,)``.
        """
        tracing, group, watch = transforming(), self._usual, self._watch
        if self.training and not tracing and watch.noticed != watch.steps_taken:
            watch.notice(self.head.weight, features, used=self._uses_prototypes)
        plain = None
        if group is not None and not (tracing or settings or weights is not None):
            plain = self._plain_batch(features, labels, group.reads)
        if group is None or plain is None:
            return general_call(self, features, labels, weights, settings)

        dense, problem, labels, weights, count = plain
        device, arguments = features.device, self.settings.arguments
        noted: dict[str, Noted] = {}
        if weights is None:
            margin, mean = cast(Margin, self._entropy), self.reduction == "mean"
            low = product_dtype(device)
            with full_precision(device):
                loss, copy, total = dense_cross_entropy(
                    problem, labels, margin, self.ignore_index, low, mean=mean
                )
            # A copy: the loss may be changed in place.
            noted, count = {group.names[0]: (copy, None)}, None if mean else total
        elif not dense:
            loss, noted = split_terms(
                self.head, problem, [group], self.settings, arguments, labels, None, weights
            )
        else:
            low = product_dtype(device)
            with full_precision(device):
                split = dense_split(problem, labels, group.reads, low)
                rows: Tensor | None = None
                for name, term, weight in zip(*group[:3], strict=True):
                    values = term.definition.function(split, **arguments[name])
                    noted[name] = values.detach(), weights
                    values = values if weight == 1 else weight * values
                    rows = values if rows is None else rows + values
                assert rows is not None
                loss = torch.dot(rows, weights)
        if torch._C._current_graph_task_id() == -1:
            # Otherwise activation checkpointing is recomputing a call that was noted before.
            vars(self).update(_noted=noted, _noted_total=count)
        return loss

    if TYPE_CHECKING:
        # Calls have the type of forward; torch declares Any.
        __call__ = forward

    def _plain_batch(
        self, features: Tensor, labels: Tensor, reads: frozenset[str]
    ) -> tuple[bool, Problem, Tensor, Tensor | None, Tensor | int | None] | None:
        """Check a batch and collect the inputs of the fast path; none if it needs the general one.

        Returns:
            Whether to use the dense kernel, the problem, the labels, the weights of the examples or
            none if the whole loss is one function, and the divisor for the mean of each term, or
            none if the weights sum to one already.
        """
        if self.reduction == "none" or self._changing:
            return None
        head, name, mean = self.head, type(self).__name__, self.reduction == "mean"
        prototypes = head.weight
        if self.global_batch is not None and (head.group or self._scope()):
            return None
        check_batch(name, features, labels, prototypes, type(head).__name__, self._several)
        if labels.ndim != 1 or not labels.shape[0]:
            return None
        labels = labels.long()
        if features.is_cuda or dense_gpu.ANYWHERE:
            # These kernels mask ignored examples and classes themselves, without synchronising.
            problem = Problem(features, prototypes, head.bias, head.scale, head.similarity)
            if self.validate or choose_kernel(head.implementation, problem, reads) != "dense":
                return None
            if not takes_raw(problem, reads):
                return None
            if self._entropy is not None and labels.shape[0] <= dense_gpu.AT_ONCE:
                return True, problem, labels, None, None
            weighed = dense_gpu.weigh_examples(labels, self.ignore_index, mean=mean)
            if weighed is None:
                return None
            labels, valid, weights, count = weighed
            return True, problem._replace(valid=valid), labels, weights, None if mean else count
        problem = head.problem(features)
        if features.device.type != "cpu" or self.validate is None or problem.there is not None:
            return None
        dense = choose_kernel(head.implementation, problem, reads) == "dense"
        if not check_values(name, features, labels, len(prototypes), None, self.ignore_index):
            return None
        if dense and self._entropy is not None and not isinstance(problem.scale, Tensor):
            return True, problem, labels, None, None
        size = labels.shape[0], features.dtype, prototypes.dtype, mean
        if self._even is None or self._even[0] != size:
            self._even = size, _even_weights(features, prototypes, mean)
        return dense, problem, labels, self._even[1], None if mean else labels.shape[0]

    def logits(self, features: Tensor) -> Tensor:
        """Scores without any margin, for inference, shape ``(N, C)``."""
        return self.head.logits(features)

    def graphed(self, features: Tensor, labels: Tensor) -> GraphedCriterion:
        """Record a call and its gradient as CUDA graphs; returns a callable used like this one.

        At common sizes a GPU step is bound by its kernel launches; a replay is a single one.
        Schedules, states and changes of the loss keep working. Batches of another shape run as
        plain calls; so does every call, after a warning, if nothing can be recorded.

        Args:
            features: an example batch, shape ``(N, D)``.
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
        # Reading an attribute of a module takes as long as an operation of torch.
        modules = cast(dict[str, nn.Module], self._modules)
        # By length: torch 2.11 cannot compile the truth of these dictionaries.
        known = len(modules["states"]._modules) + len(modules["schedules"]._modules)
        return known > 0 or modules["head"]._buffers["adaptive_scale"] is not None

    def schedule(self, *, by_hand: bool | None = None, **schedules: Schedule) -> Self:
        """Attach schedules to settings by name.

        A schedule is part of the criterion: saved in its ``state_dict``, it resumes where it
        stopped. It steps with every call in training mode, or when you call :meth:`step`.

        Args:
            by_hand: step only in :meth:`step`, for gradient accumulation or one step per epoch.
                Applies to all schedules of the criterion until set again.
            **schedules: a schedule for each setting, such as ``margin``, ``blend``, or
                ``cosface.margin`` for a single term; and for ``class_weights``.

        Returns:
            The criterion itself.

        Example:
            >>> from tammes.schedules import WarmUp
            >>> criterion = tammes.CosFace(8, 3).schedule(margin=WarmUp(0.0, 0.35, steps=1000))
        """
        _check_schedules(self.head, self.settings, schedules)
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
        # A schedule that drives several settings still steps once.
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
            backbone: the network that computes the features; parameters it shares with the
                criterion count as the criterion's.
            lr: learning rate of the backbone.
            head_lr: learning rate of the criterion, ``lr`` by default.
            weight_decay: weight decay of the backbone.
            head_weight_decay: weight decay of the prototypes, ``weight_decay`` by default; bias and
                scale have none.

        Returns:
            Parameter groups for any torch optimizer.

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
            n: number of new classes.
            from_features: features of each new class, see :meth:`tammes.heads.Head.add_classes`.
            optimizer: its state is carried over.
            **per_class: n values for every setting with one per class, such as ``counts`` of
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
        """Show the head, the loss, and the options that differ from their defaults."""
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


def _check_head(head: Head) -> None:
    """Raise ``TypeError`` for anything but a head."""
    if not isinstance(head, Head):
        raise TypeError(
            "Criterion expects a head, such as tammes.CosineHead(embedding_size, num_classes), "
            f"got {describe(head)}"
        )


def _check_terms(head: Head, loss: Loss) -> None:
    """Reject a loss with a term that does not work with the head."""
    for _, term in loss.leaves():
        check_fit(head, term)
        check_cosine_margin(head, term)


def _check_schedules(head: Head, settings: Settings, schedules: Mapping[str, Schedule]) -> None:
    """Reject schedules that the terms or the head do not allow."""
    for key, schedule in schedules.items():
        values = settings.check_schedule(key, schedule, head.num_classes)
        for name, own in settings.places(key):
            _, term = settings.named[name]
            if own == term.definition.in_cosines:
                check_cosine_margin(head, term, values)


def _check_loss(loss: Loss) -> None:
    """Raise ``TypeError`` unless a loss is made of terms."""
    if not isinstance(loss, Loss):
        name = getattr(loss, "__name__", "")
        hint = f"; {name}() builds it" if hasattr(loss, "definition") else ""
        raise TypeError(
            "Criterion expects a loss made of terms, such as tammes.cosface(), "
            f"got {name or type(loss).__name__}{hint}"
        )


def _even_weights(features: Tensor, prototypes: Tensor, mean: bool) -> Tensor:
    """Weights of a batch in which every example counts equally."""
    dtype, count = working_dtype(features, prototypes), len(features)
    with torch.inference_mode(False):
        return torch.full((count,), 1 / count if mean else 1.0, dtype=dtype, device=features.device)
