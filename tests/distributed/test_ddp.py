"""A criterion with a group: on several ranks every loss and gradient is that of one process.

Each rank has its own rows of one batch; its model is wrapped as a user wraps it. Held against it
is one process with the whole batch and no group.
"""

import copy
from contextlib import nullcontext

import pytest
import torch
from catalogue import CLASSES, TERMS, default_head
from cover import slow
from rank_pool import everywhere, failures
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import tammes
from tammes.distributed.process_group import RankGroup

COUNTS = {1: (11,), 2: (7, 4), 3: (4, 7, 0), 4: (2, 5, 3, 1)}
"""How many examples of a batch each rank has: never equally many, and once none."""
SIZE = 12
"""Numbers of a feature: more than there are classes, so that a direct sum is possible."""

SUMS = {
    "everything": tammes.cosface(margin=0.2)
    + 0.5 * tammes.sample_margin()
    + 3.0 * tammes.zero_centroid()
    + 0.3 * tammes.nca(normalize=True)
    + 0.1 * tammes.center(),
    "direct_sum": tammes.direct_sum(tammes.softmax(), tammes.nca()),
    "direct_sum_ridge": tammes.direct_sum(tammes.softmax(), tammes.triplet(), eps=0.1),
    "direct_sum_moving": tammes.direct_sum(tammes.softmax(), tammes.proto(), detach=False),
    "spectral_sum": tammes.spectral_sum(tammes.cosface(), 0.5 * tammes.proto()),
    "spectral_sum_moving": tammes.spectral_sum(tammes.softmax(), tammes.nca(), detach=False),
}
LOSSES = {**TERMS, **SUMS}


def head_for(loss, **options):
    heads = [default_head(term, size=SIZE, **options) for _, term in loss.leaves()]
    # The one that fits on the most particular head.
    return max(heads, key=lambda head: ("Cosine" in repr(head), head.bias is None))


class Model(nn.Module):
    """A small backbone and a criterion, as one module."""

    def __init__(self, criterion):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, SIZE))
        self.criterion = criterion

    def forward(self, inputs, labels, **options):
        return self.criterion(self.backbone(inputs), labels, **options)


def make(loss, dtype=torch.double, *, scale=None, **options):
    """The same model on every rank."""
    torch.manual_seed(0)
    head = head_for(loss, **({} if scale is None else {"scale": scale}))
    return Model(tammes.Criterion(head, loss, **options)).to(dtype)


def examples(seed=0, dtype=torch.double, count=11):
    """A batch with ignored examples and weights."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    inputs = torch.randn(count, 5, generator=generator, dtype=torch.double)
    weights = torch.rand(count, generator=generator, dtype=torch.double)
    labels[1::5] = -100
    labels[5:8] = labels[:1].sum()
    return inputs.to(dtype), labels, weights.to(dtype)


def share(group, whole):
    """Rows of this rank."""
    counts = COUNTS[torch.distributed.get_world_size(group)]
    start = sum(counts[: torch.distributed.get_rank(group)])
    stop = start + counts[torch.distributed.get_rank(group)]
    return [tensor[start:stop] for tensor in whole]


def gradients(model):
    """Gradient of every parameter, whole; none where there is none."""
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        found[name.replace("module.", "")] = gradient
    return found


def states(model):
    """What terms remember, and prototypes after all."""
    return {
        name.replace("module.", ""): buffer.clone()
        for name, buffer in model.named_buffers()
        if "states" in name
    }


CLASS_WEIGHTS = [1.0, 0.5, 2.0, 1.0, 3.0, 0.0, 1.0, 1.0, 0.25]


def together(group, model):
    return DistributedDataParallel(model, process_group=group, find_unused_parameters=True)


def apart(group, model):
    """Backbone and criterion each in a wrapper of its own."""
    model.backbone = DistributedDataParallel(model.backbone, process_group=group)
    model.criterion = DistributedDataParallel(model.criterion, process_group=group)
    return model


def sharded(group, model):
    mesh = DeviceMesh.from_group(group, "cpu")
    fully_shard(model.backbone, mesh=mesh)
    fully_shard(model.criterion, mesh=mesh)
    return model


def sharded_as_one(group, model):
    return fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))


WRAPPERS = {"ddp": together, "ddp_apart": apart, "fsdp": sharded, "fsdp_as_one": sharded_as_one}


def train(group, name, wrapper, options):
    """Loss, terms, gradients and memories of two batches, on one rank."""
    with_weights = options.pop("weights", True)
    model = make(LOSSES[name], group=group, class_weights=CLASS_WEIGHTS, **options)
    criterion, wrapped = model.criterion, WRAPPERS[wrapper](group, model)
    losses, terms = [], []
    for seed in (1, 2):
        inputs, labels, weights = share(group, examples(seed))
        loss = wrapped(inputs, labels, **({"weights": weights} if with_weights else {}))
        loss.backward()
        losses.append(loss.detach())
        terms.append(criterion.terms)
    return losses, terms, gradients(model), states(model)


def train_alone(name, options):
    """The same in one process that has the whole batch."""
    with_weights = options.pop("weights", True)
    model = make(LOSSES[name], class_weights=CLASS_WEIGHTS, **options)
    losses, terms = [], []
    for seed in (1, 2):
        inputs, labels, weights = examples(seed)
        loss = model(inputs, labels, **({"weights": weights} if with_weights else {}))
        loss.backward()
        losses.append(loss.detach())
        terms.append(model.criterion.terms)
    return losses, terms, gradients(model), states(model)


EXACT = {"rtol": 1e-11, "atol": 1e-12}


def check(found, expected, tolerance=EXACT):
    for mine, whole in zip(found[:2], expected[:2], strict=True):
        assert_close(mine, whole, **tolerance)
    gradient = {name: g for name, g in expected[2].items() if g is not None}
    moved = {name: g for name, g in found[2].items() if g is not None}
    # A wrapper may give what has no gradient one of zeros.
    assert all(not moved.pop(name).any() for name in moved.keys() - gradient.keys())
    assert_close(moved, gradient, **tolerance)
    assert_close(found[3], expected[3], **tolerance)


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("name", LOSSES)
def test_a_wrapped_model_has_the_loss_and_the_gradients_of_one_process(name, size):
    expected = train_alone(name, {})
    for found in everywhere(size, train, name, "ddp", {}):
        check(found, expected)


FEW = (
    *("softmax", "cosface_per_class", "arcface", "adaface", "uniface"),
    *("everything", "spectral_sum_moving"),
)


@pytest.mark.parametrize("wrapper", ["ddp_apart", "fsdp", "fsdp_as_one"])
@pytest.mark.parametrize("name", FEW)
def test_so_have_a_backbone_and_a_criterion_that_are_wrapped_in_another_way(name, wrapper):
    expected = train_alone(name, {})
    for found in everywhere(3, train, name, wrapper, {}):
        check(found, expected)


@pytest.mark.parametrize(
    "options",
    [
        {"reduction": "sum"},
        {"scale": "learnable"},
        {"implementation": "streamed"},
        {"weights": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["arcface", "everything"])
def test_so_has_a_criterion_with_options(name, options):
    expected = train_alone(name, dict(options))
    for found in everywhere(2, train, name, "ddp", options):
        check(found, expected)


@pytest.mark.parametrize("wrapper", ["fsdp", "fsdp_as_one"])
def test_a_learned_scale_can_be_fully_sharded(wrapper):
    expected = train_alone("arcface", {"scale": "learnable"})
    assert expected[2]["criterion.head.log_scale"].any()
    for found in everywhere(3, train, "arcface", wrapper, {"scale": "learnable"}):
        check(found, expected)


def train_evenly(group, promise):
    model = make(LOSSES["everything"], group=group, even=promise)
    wrapped = together(group, model)
    whole = examples(1, count=10)
    rank = torch.distributed.get_rank(group)
    inputs, labels, weights = (tensor[5 * rank :][:5] for tensor in whole)
    losses = [wrapped(inputs, labels, weights=weights) for _ in range(2)]
    sum(losses).backward()
    return [loss.detach() for loss in losses], gradients(model)


def test_a_promise_of_equal_shares_changes_nothing():
    assert_close(
        everywhere(2, train_evenly, True), everywhere(2, train_evenly, False), rtol=0, atol=0
    )


def break_the_promise(group):
    train_options = share(group, examples(1))
    make(LOSSES["softmax"], group=group, even=True)(*train_options[:2])


def test_a_promise_that_is_broken_at_once_is_noticed():
    for message in failures(2, break_the_promise):
        assert message == (
            "ValueError: Criterion expects the same number of examples on all of the group of "
            "ranks 0, 1, got 7 on rank 0, 4 on rank 1"
        )


def sum_of_gradients(group, name):
    """Gradients that are summed by hand; nobody averages them."""
    model = make(LOSSES[name], group=group, averaged=False)
    inputs, labels, weights = share(group, examples(1))
    loss = model(inputs, labels, weights=weights)
    loss.backward()
    found = gradients(model)
    total = {name: RankGroup(group).all_reduce(g) for name, g in found.items() if g is not None}
    return loss.detach(), total


@pytest.mark.parametrize("name", ["cosface", "everything", "direct_sum_moving"])
def test_gradients_that_are_summed_and_not_averaged_are_right_too(name):
    model = make(LOSSES[name])
    inputs, labels, weights = examples(1)
    expected = model(inputs, labels, weights=weights)
    expected.backward()
    for loss, found in everywhere(3, sum_of_gradients, name):
        assert_close(loss, expected.detach(), **EXACT)
        assert_close(found, gradients(model), **EXACT)


def rows_of_each(group, name):
    model = make(LOSSES[name], group=group, reduction="none", class_weights=CLASS_WEIGHTS)
    wrapped = together(group, model)
    inputs, labels, weights = share(group, examples(1))
    rows = wrapped(inputs, labels, weights=weights)
    rows.square().sum().backward()
    return rows.detach(), model.criterion.terms, gradients(model)


@pytest.mark.parametrize("name", ["arcface", "everything"])
def test_without_reduction_each_rank_has_the_rows_of_its_examples(name):
    model = make(LOSSES[name], reduction="none", class_weights=CLASS_WEIGHTS)
    inputs, labels, weights = examples(1)
    rows = model(inputs, labels, weights=weights)
    # What a wrapper makes of three ranks' losses: their mean.
    (rows.square().sum() / 3).backward()
    found = everywhere(3, rows_of_each, name)
    assert [len(own) for own, _, _ in found] == list(COUNTS[3])
    assert_close(torch.cat([own for own, _, _ in found]), rows.detach(), **EXACT)
    for _, terms, gradient in found:
        assert_close(terms, model.criterion.terms, **EXACT)
        assert_close(gradient, gradients(model), **EXACT)


def per_example_margins(group):
    model = make(LOSSES["cosface"], group=group)
    inputs, labels, weights = share(group, examples(1))
    wrapped = together(group, model)
    loss = wrapped(inputs, labels, margin=weights)
    loss.backward()
    return loss.detach(), gradients(model)


def test_a_setting_of_one_value_per_example_goes_with_its_example():
    model = make(LOSSES["cosface"])
    inputs, labels, weights = examples(1)
    loss = model(inputs, labels, margin=weights)
    loss.backward()
    for found, gradient in everywhere(2, per_example_margins):
        assert_close(found, loss.detach(), **EXACT)
        assert_close(gradient, gradients(model), **EXACT)


def learn_weights(group):
    """Weights of the examples that are learned themselves."""
    model = make(LOSSES["everything"], group=group)
    inputs, labels, weights = share(group, examples(1))
    weights.requires_grad_()
    model(inputs, labels, weights=weights).backward()
    return weights.grad


def test_weights_that_take_a_gradient_get_it():
    model = make(LOSSES["everything"])
    inputs, labels, weights = examples(1)
    weights.requires_grad_()
    model(inputs, labels, weights=weights).backward()
    # Nobody has averaged them: each rank has three times its part.
    found = torch.cat(everywhere(3, learn_weights)) / 3
    assert_close(found, weights.grad, **EXACT)


def accumulate(group, name):
    model = make(LOSSES[name], group=group)
    wrapped = together(group, model)
    for seed in (1, 2, 3):
        inputs, labels, weights = share(group, examples(seed))
        with wrapped.no_sync() if seed < 3 else nullcontext():
            wrapped(inputs, labels, weights=weights).backward()
    return gradients(model)


@pytest.mark.parametrize("name", ["arcface", "everything"])
def test_gradients_that_accumulate_over_batches_are_those_of_one_process(name):
    model = make(LOSSES[name])
    for seed in (1, 2, 3):
        inputs, labels, weights = examples(seed)
        model(inputs, labels, weights=weights).backward()
    for found in everywhere(2, accumulate, name):
        assert_close(found, gradients(model), **EXACT)


def ratio_of_gradients(group, wrapped):
    """Prototype gradient over that of one process."""
    alone = make(LOSSES["arcface"])
    inputs, labels, _ = examples(1)
    alone(inputs, labels).backward()
    model = make(LOSSES["arcface"], group=group)
    inputs, labels, _ = share(group, (inputs, labels, labels))
    module = together(group, model) if wrapped else model
    module(inputs, labels).backward()
    gradient = model.criterion.head.weight.grad
    if not wrapped:
        gradient = RankGroup(group).all_reduce(gradient) / RankGroup(group).world_size
    expected = alone.criterion.head.weight.grad
    return (gradient * expected).sum() / expected.square().sum()


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("size", [2, 4])
def test_fault_f_prototype_gradient_is_not_multiplied_by_world_size(size, wrapped):
    # peers.md 1.6 f: with another library's wrapper the ratio is 2 on two ranks and 4 on four.
    for ratio in everywhere(size, ratio_of_gradients, wrapped):
        assert ratio.item() == pytest.approx(1, abs=1e-12)


def varying_batches(group):
    """Three batches of other sizes each, also on the same rank; the last is empty everywhere."""
    model = make(LOSSES["everything"], group=group)
    wrapped, rank = together(group, model), torch.distributed.get_rank(group)
    losses = []
    for counts in ((3, 8), (9, 0), (0, 4), (0, 0)):
        whole = examples(1, count=sum(counts))
        start = sum(counts[:rank])
        inputs, labels, _ = (tensor[start : start + counts[rank]] for tensor in whole)
        loss = wrapped(inputs, labels)
        loss.backward()
        losses.append(loss.detach())
    return losses, gradients(model)


def test_fault_g_batches_may_have_any_size_on_any_rank():
    # peers.md 1.6 g: another library asserts that the size never changes.
    model, losses = make(LOSSES["everything"]), []
    for count in (11, 9, 4, 0):
        inputs, labels, _ = examples(1, count=count)
        loss = model(inputs, labels)
        loss.backward()
        losses.append(loss.detach())
    for found, gradient in everywhere(2, varying_batches):
        assert_close(found, losses, **EXACT)
        assert_close(gradient, gradients(model), **EXACT)


def nothing_counts(group):
    model = make(LOSSES["everything"], group=group)
    inputs, labels, _ = share(group, examples(1))
    wrapped = together(group, model)
    loss = wrapped(inputs, torch.full_like(labels, -100))
    loss.backward()
    return loss.detach(), model.criterion.terms, gradients(model)


def test_a_batch_in_which_nothing_counts_on_any_rank_has_loss_zero():
    for loss, terms, gradient in everywhere(3, nothing_counts):
        assert loss == 0
        assert not any(value for value in terms.values())
        assert not any(g.any() for g in gradient.values())


def in_half_precision(group):
    model = make(LOSSES["everything"], torch.float, group=group)
    wrapped = together(group, model)
    inputs, labels, weights = share(group, examples(1, torch.float))
    with torch.autocast("cpu", torch.bfloat16):
        loss = wrapped(inputs, labels, weights=weights)
    loss.backward()
    return loss.detach(), gradients(model)


def test_under_autocast_losses_and_gradients_stay_single_and_near():
    model = make(LOSSES["everything"], torch.float)
    inputs, labels, weights = examples(1, torch.float)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(inputs, labels, weights=weights)
    loss.backward()
    for found, gradient in everywhere(2, in_half_precision):
        # The very same features: only the order of the sums differs, and what the backbone's
        # own backward rounds to half precision.
        assert_close(found, loss.detach(), rtol=1e-5, atol=1e-6)
        expected = gradients(model)
        assert all(g.dtype == torch.float for g in gradient.values())
        prototypes = "criterion.head.weight"
        assert_close(gradient.pop(prototypes), expected.pop(prototypes), rtol=1e-4, atol=1e-5)
        for name, g in gradient.items():
            assert (g - expected[name]).norm() <= 0.02 * expected[name].norm()


def compiled(group, name):
    model = make(LOSSES[name], group=group)
    inputs, labels, weights = share(group, examples(1))
    # What it returns is looked at, not how fast it is.
    wrapped = together(group, model)
    loss = torch.compile(wrapped, backend="eager")(inputs, labels, weights=weights)
    loss.backward()
    return loss.detach(), gradients(model)


@pytest.mark.parametrize("name", ["cosface", slow("everything")])
@pytest.mark.torch_version
def test_a_compiled_model_has_the_loss_and_the_gradients_of_one_process(name):
    model = make(LOSSES[name])
    inputs, labels, weights = examples(1)
    loss = model(inputs, labels, weights=weights)
    loss.backward()
    for found, gradient in everywhere(2, compiled, name):
        assert_close(found, loss.detach(), **EXACT)
        assert_close(gradient, gradients(model), **EXACT)


def scheduled(group):
    schedule = tammes.schedules.WarmUp(0.0, 0.4, steps=4)
    model = make(tammes.cosface(), group=group)
    model.criterion.schedule(margin=schedule)
    inputs, labels, _ = share(group, examples(1))
    return [model(inputs, labels).detach() for _ in range(3)]


def test_schedules_step_once_for_the_whole_batch():
    model = make(tammes.cosface())
    model.criterion.schedule(margin=tammes.schedules.WarmUp(0.0, 0.4, steps=4))
    inputs, labels, _ = examples(1)
    expected = [model(inputs, labels).detach() for _ in range(3)]
    for found in everywhere(3, scheduled):
        assert_close(found, expected, **EXACT)


def evaluated(group):
    model = make(LOSSES["everything"], group=group).eval()
    inputs, labels, weights = share(group, examples(1))
    with torch.no_grad():
        return model(inputs, labels, weights=weights), model.criterion.terms


def test_without_gradient_the_loss_is_that_of_all_ranks():
    model = make(LOSSES["everything"]).eval()
    inputs, labels, weights = examples(1)
    expected = model(inputs, labels, weights=weights).detach()
    for loss, terms in everywhere(3, evaluated):
        assert_close(loss, expected, **EXACT)
        assert_close(terms, model.criterion.terms, **EXACT)


WHERE = "on all of the group of ranks 0, 1, got"


def wrong(group, case):
    rank = torch.distributed.get_rank(group)
    _, labels, weights = share(group, examples(1))
    features = torch.zeros(len(labels), 4 + rank if case == "size" else 4)
    classes = CLASSES + rank if case == "classes" else CLASSES
    criterion = tammes.CosFace(features.shape[1], classes, group=group)
    options = {}
    if case == "weights" and rank:
        options["weights"] = weights.float()
    if case == "gradient" and rank:
        features.requires_grad_()
    if case == "type" and rank:
        features = features.double()
    if case == "label" and rank:
        labels[0] = CLASSES
    if case == "setting" and rank:
        options["margin"] = torch.zeros(3)
    if case == "unknown" and rank:
        options["bargain"] = 0.5
    criterion(features, labels, **options)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("size", f"the same embedding size {WHERE} 4 on rank 0, 5 on rank 1"),
        ("classes", f"the same num classes {WHERE} 9 on rank 0, 10 on rank 1"),
        ("weights", f"the same values per example {WHERE} 0 on rank 0, 1 on rank 1"),
        ("gradient", f"the same features with gradient {WHERE} 0 on rank 0, 1 on rank 1"),
        ("type", f"the same bits of a feature {WHERE} 32 on rank 0, 64 on rank 1"),
    ],
)
def test_ranks_that_disagree_are_named(case, message):
    for found in failures(2, wrong, case):
        assert found == f"ValueError: CosFace expects {message}"


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("label", "ValueError: CosFace expects labels from 0 to 8 or ignore_index=-100, got"),
        ("setting", "ValueError: the criterion expects margin to be a number or a tensor of shape"),
        ("unknown", "TypeError: the criterion has no setting 'bargain'"),
    ],
)
def test_a_rank_that_refuses_its_batch_stops_the_others_at_once(case, reason):
    first, second = failures(2, wrong, case)
    assert first == (
        "RuntimeError: CosFace cannot continue in the group of ranks 0, 1: rank 1 rejected its "
        "batch; see the error on that rank"
    )
    assert second.startswith(reason)


def copies(group):
    criterion = tammes.CosFace(4, CLASSES, group=group)
    apart = copy.deepcopy(criterion)
    assert apart.global_batch.group == RankGroup(group)
    return repr(criterion)


def test_a_criterion_says_its_group_and_a_copy_keeps_it():
    for text in everywhere(2, copies):
        assert "group='the group of ranks 0, 1'" in text


def test_a_group_of_one_process_is_no_group_and_ends_no_graph():
    inputs, labels, weights = examples(1)
    expected = make(LOSSES["everything"])(inputs, labels, weights=weights)
    model = make(LOSSES["everything"], group=True)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_close(compiled(inputs, labels, weights=weights), expected, **EXACT)


GPU = pytest.mark.gpu


@pytest.mark.parametrize(
    ("backend", "device"), [("gloo", "cpu"), pytest.param("nccl", "cuda", marks=GPU)]
)
def test_the_collectives_of_a_group_of_one_change_nothing(backend, device, tmp_path, monkeypatch):
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group(backend, init_method=store, rank=0, world_size=1)
    try:
        found = []
        for group in (None, True):
            model = make(LOSSES["everything"], group=group).to(device)
            if group:
                # Alone it would not ask anybody.
                monkeypatch.setattr(
                    model.criterion, "_scope", lambda c=model.criterion: c.global_batch
                )
            inputs, labels, weights = (tensor.to(device) for tensor in examples(1))
            loss = model(inputs, labels, weights=weights)
            loss.backward()
            found.append((loss.detach(), model.criterion.terms, gradients(model), states(model)))
        assert_close(found[1], found[0], **EXACT)
    finally:
        torch.distributed.destroy_process_group()
