"""One pass over a batch for the sum of its losses: forward computes the gradients too.

:class:`RowGraph` is the small autograd graph of everything that takes O(D) per row;
:class:`OnePass` drives an engine over the scores of all rows.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from tammes.kernels.merge import exchange, scale_gradient
from tammes.kernels.problem import Problem
from tammes.kernels.score_map import MappedRows, ScoreMap
from tammes.kernels.streamed.score_blocks import Back, Engine, Keys, Needs, Rows
from tammes.kernels.tiling import Plan, class_blocks
from tammes.split import Split, assemble, cutoff_of

Take = Callable[[str, Tensor], tuple[Tensor, Tensor | None]]
"""Select prototypes, and their bias if there is one, by index; the name labels their gradient."""


def take(tensor: Tensor, places: Tensor, dtype: torch.dtype) -> Tensor:
    """Select rows of a tensor in a dtype; zeros where the tensor is empty."""
    if len(tensor) == 0:
        zeros = tensor.new_zeros(len(places), *tensor.shape[1:], dtype=dtype)
        # Zeros that require a gradient, so that this rank joins the collectives in backward.
        return zeros + tensor.sum().to(dtype)
    return tensor.index_select(0, places.clamp_min(0)).to(dtype)


class RowGraph:
    """Graph from features to queries and target-class numbers, and from numbers to a split.

    Args:
        problem: its similarity is bound.
        features: features of these rows, in the working dtype, shape ``(n, D)``.
        scale: factor of the scores, a scalar or ``(n,)``.
        shown: the scale that terms see; a separate leaf, since ranks sum the gradient of ``scale``
            but have that of ``shown`` in common.
        labels: shape ``(n,)``.
        reads: fields of the split to compute.
        take: selects rows of the prototypes.
        alike: whether every rank computes the same loss from the split.
        mapping: map of the other classes' scores, or none.
        product_dtype: dtype of the products that find a cutoff.
    """

    def __init__(
        self,
        *,
        problem: Problem,
        features: Tensor,
        scale: Tensor,
        shown: Tensor | float,
        labels: Tensor,
        reads: frozenset[str],
        take: Take,
        alike: bool,
        mapping: ScoreMap | None = None,
        product_dtype: torch.dtype | None = None,
    ) -> None:
        self.problem, self.features = problem, features
        self.labels, self.take, self.alike = labels, take, alike
        self.own = labels if problem.share is None else problem.share.own
        query, offset = problem.similarity.query(features)
        self.query = query * (scale[:, None] if scale.ndim else scale)
        self.offset = None if offset is None else offset * scale
        self.known = self._own_numbers(query, reads)
        self.mapped: MappedRows | None = None
        if mapping is not None:
            known = self.own_split(shown)
            if mapping.top:
                known = known._replace(cutoff=self._cutoff(mapping.top, product_dtype))
            rows = [self._row_number(number) for number in (shown, *mapping.numbers(known))]
            if problem.share is not None and not alike:
                # Gradients through the ranks' classes add up, but the exchange averages them.
                size = problem.share.group.world_size
                rows = [scale_gradient(number, size) for number in rows]
            self.mapped = MappedRows(mapping.function, tuple(rows))

    def own_split(self, shown: Tensor | float) -> Split:
        """Split of all rows with the numbers of the target class alone."""
        return self._split(self._everywhere(self.known), slice(None), shown)

    @torch.no_grad()
    def _cutoff(self, top: int, low: torch.dtype | None) -> Tensor:
        """Find the cutoff in a separate pass over the scores, shape ``(n,)``."""
        query, share, there = self.query, self.problem.share, self.problem.there
        scale = torch.as_tensor(self.problem.scale, dtype=query.dtype, device=query.device)
        problem = self.problem._replace(scale=scale.detach())
        blocks = class_blocks(problem)
        keys = Keys(problem, Needs(False, False, False, False), blocks, low)
        # Largest scores, and how many classes each stands for.
        found = query.new_zeros(2, len(query), top + 1)
        found[0] = -torch.inf
        for block in blocks:
            scores = query.new_empty(len(query), block.stop - block.start)
            keys.fill(scores, query, self.offset, block)
            if there is not None:
                scores.masked_fill_(~there[block], -torch.inf)
            own = torch.arange(block.start, block.stop, device=query.device) == self.own[:, None]
            scores.masked_fill_(own, -torch.inf)
            values, places = scores.topk(min(top + 1, scores.shape[1]))
            many = torch.ones_like(values)
            if keys.counts is not None:
                many = keys.counts[block][places].to(values)
            found = _largest(torch.cat([found, torch.stack([values, many])], 2), top)
        if share is not None and share.group.world_size > 1:
            found = _largest(torch.cat([*share.group.all_gather(found)], 2), top)
        return cutoff_of(found[0] / scale, top, found[1])

    def _row_number(self, number: Tensor | float) -> Tensor:
        """Expand a number to all rows, in the working dtype, shape ``(n,)``."""
        like = self.query
        return torch.as_tensor(number, dtype=like.dtype, device=like.device).expand(len(like))

    def rows(self, block: slice) -> Rows:
        """Return the engine's input for some rows."""
        return Rows(
            self.query[block].detach(),
            None if self.offset is None else self.offset[block].detach(),
            self.own[block],
            None if self.mapped is None else self.mapped.take(block),
        )

    def hardest(self, features: Tensor, rows: Tensor, bias: Tensor | None) -> Tensor:
        """Similarity to the hardest other class, given its prototypes and bias."""
        similarity = self.problem.similarity.target(features, rows)
        return similarity if bias is None else similarity + bias

    def split(self, numbers: dict[str, Tensor], block: slice, shown: Tensor | float) -> Split:
        """Build the split of some rows.

        Args:
            numbers: those of the engine, those of the target class, and the similarity to the
                hardest class, as tensors that require a gradient.
            block: which rows.
            shown: the scale that terms see.
        """
        if self.problem.share is not None or self.problem.there is not None:
            rivals = self._rivals(block)
            numbers = numbers | {"rivals": rivals}
            if "hardest" in numbers:
                masked_out = torch.full_like(rivals, float("-inf"))
                numbers["hardest"] = torch.where(rivals > 0, numbers["hardest"], masked_out)
        return self._split(self._everywhere(numbers), block, shown)

    def _own_numbers(self, query: Tensor, reads: frozenset[str]) -> dict[str, Tensor]:
        rows, bias = self.take("own", self.own)
        known = self.problem.similarity.own(self.features, rows, reads, query)
        if bias is not None and "target" in known:
            known["target"] = known["target"] + bias
        if self.problem.share is None:
            return known
        here = self.own >= 0
        return {name: torch.where(here, value, 0.0) for name, value in known.items()}

    def _rivals(self, block: slice) -> Tensor:
        """Count the unmasked other classes that the prototypes here stand for."""
        share, there, own = self.problem.share, self.problem.there, self.own[block]
        counts = None if share is None else share.counts
        mine = own >= 0
        if there is None:
            here = len(self.problem.prototypes) if counts is None else counts.sum()
        else:
            here = (there if counts is None else counts * there).sum()
            mine = mine & there[own.clamp_min(0)] if len(there) else mine
        return here - mine.to(self.query.dtype)

    def _everywhere(self, mine: dict[str, Tensor]) -> dict[str, Tensor]:
        share = self.problem.share
        if share is None or share.group.world_size == 1:
            return mine
        return exchange(share.group, mine, alike=self.alike)

    def _split(self, numbers: dict[str, Tensor], block: slice, shown: Tensor | float) -> Split:
        share = self.problem.share
        classes = len(self.problem.prototypes) if share is None else share.classes
        like = self.query.detach()[block, 0]
        return assemble(numbers, self.labels[block], shown, classes, like)


def _largest(found: Tensor, top: int) -> Tensor:
    """Keep the k + 1 largest scores with their counts, shape ``(2, n, k + 1)``."""
    places = found[0].topk(top + 1).indices
    return found.gather(2, places.expand(2, -1, -1))


def combine(coefficients: Sequence[float], values: Tensor) -> Tensor:
    """Weighted sum of the terms, shape ``(n,)``, without copying the weights to the device."""
    weighted = [weight * value for weight, value in zip(coefficients, values, strict=True)]
    return torch.stack(weighted).sum(0)


class _Leaves:
    """Leaves of a small graph, by name."""

    def __init__(self) -> None:
        self.named: dict[str, Tensor] = {}

    def new(self, name: str, value: Tensor) -> Tensor:
        """Add a leaf that requires a gradient."""
        self.named[name] = value.detach().requires_grad_()
        return self.named[name]

    def gradients(self, outputs: list[Tensor], d_outputs: list[Tensor]) -> dict[str, Tensor | None]:
        """Gradient of every leaf, or none if no output depends on it."""
        # Outputs that depend on no leaf require no gradient.
        pairs = [(o, d) for o, d in zip(outputs, d_outputs, strict=True) if o.requires_grad]
        found: Sequence[Tensor | None] = [None] * len(self.named)
        if pairs and self.named:
            found = torch.autograd.grad(
                [o for o, _ in pairs],
                [*self.named.values()],
                [d for _, d in pairs],
                allow_unused=True,
            )
        return dict(zip(self.named, found, strict=True))


class OnePass:
    """Loss and gradients of a batch, accumulated over blocks of rows.

    The scale of the problem is a tensor in the working dtype, and its similarity is bound.
    """

    def __init__(
        self,
        problem: Problem,
        labels: Tensor,
        weights: Tensor,
        plan: Plan,
        needs: Needs,
        engine: Engine,
        blocks: Sequence[slice],
    ) -> None:
        features, self.share = problem.features, problem.share
        assert isinstance(problem.scale, Tensor)
        self.dtype = problem.scale.dtype
        self.problem = problem
        self.labels, self.plan, self.needs = labels, plan, needs
        self.weights = weights.to(self.dtype)
        self.engine, self.blocks = engine, blocks
        like = torch.zeros((), dtype=self.dtype, device=features.device)
        self.loss = like.clone()
        self.sums = like.expand(len(plan.coefficients)).clone()
        self.d_scale, self.d_shown = like.clone(), like.clone()
        self.d_features: Tensor | None = None
        self.d_rows: list[tuple[Tensor, Tensor]] = []
        self.d_bias: list[tuple[Tensor, Tensor]] = []

    def run(self) -> None:
        """Process all blocks: sets ``loss`` and ``sums``, and prepares :meth:`gradients`."""
        leaves = _Leaves()
        with torch.enable_grad():
            self.graph = self._graph(leaves)
        wanted = _Wanted(self.graph)
        for block in self.blocks:
            self._block(block, wanted)
        self.engine.close()
        if any(self.needs):
            self._through_rows(leaves, wanted)
        del self.graph

    def _graph(self, leaves: _Leaves) -> RowGraph:
        problem, plan, needs = self.problem, self.plan, self.needs
        assert isinstance(problem.scale, Tensor)
        features, scale = problem.features.to(self.dtype), problem.scale.to(self.dtype)
        self.shown = scale
        if needs.scale:
            # One leaf value per row, since each row's gradient has its own weight.
            each = scale.expand(len(self.labels)).clone()
            scale, self.shown = leaves.new("scale", each), leaves.new("shown", each)
        return RowGraph(
            problem=problem,
            features=leaves.new("features", features) if needs.features else features.detach(),
            scale=scale,
            shown=self.shown,
            labels=self.labels,
            reads=plan.reads,
            mapping=plan.mapping,
            product_dtype=plan.product_dtype,
            take=partial(self._take, leaves),
            alike=True,
        )

    def _take(self, leaves: _Leaves, name: str, places: Tensor) -> tuple[Tensor, Tensor | None]:
        """Select prototypes and their bias, as leaves if they need a gradient."""
        bias = self.problem.bias
        rows = take(self.problem.prototypes, places, self.dtype)
        rows = leaves.new(name, rows) if self.needs.prototypes else rows
        if bias is None:
            return rows, None
        row_bias = take(bias, places, self.dtype)
        return rows, leaves.new(f"{name} bias", row_bias) if self.needs.bias else row_bias

    def _block(self, block: slice, wanted: "_Wanted") -> None:
        """Compute numbers, loss and gradients of a block of rows."""
        graph, weights, leaves = self.graph, self.weights[block], _Leaves()
        rows = graph.rows(block)
        found = self.engine.forward(rows)
        known = {name: value[block] for name, value in graph.known.items()}
        with torch.enable_grad():
            numbers = {n: leaves.new(n, value) for n, value in (known | found.numbers).items()}
            if found.place is not None:
                features = leaves.new("features", graph.features[block])
                hard = self._take(leaves, "hard rows", found.place)
                numbers["hardest"] = graph.hardest(features, *hard)
            shown = self.shown
            if self.needs.scale:
                shown = leaves.new("shown", shown[block])
            values = self.plan.evaluate(graph.split(numbers, block, shown), block)
            loss = combine(self.plan.coefficients, values)
        self.loss += loss.detach() @ weights
        self.sums += values.detach() @ weights
        if not any(self.needs):
            return
        d_leaves = leaves.gradients([loss], [torch.ones_like(loss)])
        back = self.engine.backward(rows, {n: d_leaves[n] for n in found.numbers}, weights)
        wanted.note(block, {name: d_leaves[name] for name in known}, back)
        if found.place is not None:
            wanted.note_features(block, d_leaves["features"])
            self._note_rows("hard rows", found.place, d_leaves, weights)
        if self.needs.scale:
            d_shown = d_leaves["shown"]
            self.d_shown += 0.0 if d_shown is None else d_shown @ weights
            self.d_scale += 0.0 if back.scale is None else back.scale @ weights

    def _through_rows(self, leaves: _Leaves, wanted: "_Wanted") -> None:
        """Backpropagate the collected gradients through the row graph."""
        if wanted.mapped is not None and self.share is not None:
            wanted.mapped = self.share.group.all_reduce(wanted.mapped)
        found = leaves.gradients(*wanted.pairs(self.graph))
        self._note_rows("own", self.graph.own, found, self.weights)
        if self.needs.features:
            d_features = found["features"]
            assert d_features is not None
            if wanted.features is not None:
                d_features = d_features + wanted.features
            self.d_features = d_features * self.weights[:, None]
        if self.needs.scale:
            for name, total in (("scale", self.d_scale), ("shown", self.d_shown)):
                gradient = found[name]
                total += 0.0 if gradient is None else gradient @ self.weights

    def _note_rows(
        self, name: str, places: Tensor, found: dict[str, Tensor | None], weights: Tensor
    ) -> None:
        """Store gradients of single rows of the prototypes and of the bias."""
        if len(self.problem.prototypes) == 0:
            return
        # The gradient of a class on another rank is zero here, so any index will do.
        places = places.clamp_min(0)
        rows, bias = found.get(name), found.get(f"{name} bias")
        if rows is not None:
            self.d_rows.append((places, rows * weights.view(-1, *(1 for _ in rows.shape[1:]))))
        if bias is not None:
            self.d_bias.append((places, bias * weights))

    def gradients(self, factor: Tensor) -> list[Tensor | None]:
        """Return the gradients of features, prototypes, bias and scale, times a factor; once."""
        d_prototypes, d_offsets = self.engine.finish(factor)
        d_features, d_bias, d_scale = self.d_features, None, None
        if d_prototypes is not None:
            for places, rows in self.d_rows:
                d_prototypes.index_add_(0, places, rows * factor)
        if self.needs.bias:
            d_bias = d_offsets
            for places, values in self.d_bias:
                d_bias = d_bias.index_add(0, places, values * factor)
        if self.needs.scale:
            d_scale = (
                self.d_scale if self.share is None else self.share.group.all_reduce(self.d_scale)
            )
            # The gradient through the terms is the same on all ranks and counts once.
            d_scale = (d_scale + self.d_shown) * factor
        if d_features is not None:
            d_features = d_features * (factor if self.share is None else factor * self.share.factor)
        return [d_features, d_prototypes, d_bias, d_scale]


class _Wanted:
    """Gradients of queries and target-class numbers, collected over blocks, before weighting."""

    def __init__(self, graph: RowGraph) -> None:
        self.query = torch.zeros_like(graph.query)
        self.known = {name: torch.zeros_like(value) for name, value in graph.known.items()}
        self.offset = None if graph.offset is None else torch.zeros_like(graph.offset)
        self.mapped: Tensor | None = None
        if graph.mapped is not None:
            self.mapped = torch.zeros_like(torch.stack(graph.mapped.numbers).detach())
        self.features: Tensor | None = None

    def note(self, block: slice, known: dict[str, Tensor | None], back: Back) -> None:
        """Store the gradients of a block."""
        self.query[block] = back.query
        if self.offset is not None and back.offset is not None:
            self.offset[block] = back.offset
        for name, gradient in known.items():
            if gradient is not None:
                self.known[name][block] = gradient
        for place, gradient in enumerate(back.mapped):
            if gradient is not None and self.mapped is not None:
                self.mapped[place, block] = gradient

    def note_features(self, block: slice, gradient: Tensor | None) -> None:
        """Store the gradient of the features through the hardest class."""
        if gradient is not None:
            if self.features is None:
                self.features = torch.zeros_like(self.query)
            self.features[block] = gradient

    def pairs(self, graph: RowGraph) -> tuple[list[Tensor], list[Tensor]]:
        """Pair outputs of the row graph with their gradients."""
        outputs, wanted = [graph.query], [self.query]
        if graph.offset is not None and self.offset is not None:
            outputs.append(graph.offset)
            wanted.append(self.offset)
        if graph.mapped is not None and self.mapped is not None:
            outputs += graph.mapped.numbers
            wanted += self.mapped
        return [*outputs, *graph.known.values()], [*wanted, *self.known.values()]
