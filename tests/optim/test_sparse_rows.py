"""An optimizer's step on rows that were taken is its step on those rows alone."""

import copy
import pickle
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from tammes.heads import carry_over
from tammes.optim.sparse_rows import select_rows

CLASSES, SIZE, STEPS = 7, 3, 4
ROWS = torch.tensor([0, 2, 3, 6])
OTHERS = torch.tensor([1, 4, 5])

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd_decay": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.3),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.3),
    "sgd_nesterov": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, weight_decay=0.3, nesterov=True
    ),
    "sgd_foreach": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, weight_decay=0.3, foreach=True
    ),
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.3, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.3),
    "adam_amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adam_fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.3),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.3, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.3, fused=True),
    "adamw_tensor_lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), foreach=False),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1, weight_decay=0.3),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1, weight_decay=0.3),
}
MOMENTUM = OPTIMIZERS["sgd_momentum"]


@pytest.fixture(params=OPTIMIZERS)
def make(request):
    return OPTIMIZERS[request.param]


def table(*, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return nn.Parameter(torch.randn(CLASSES, SIZE, generator=generator).to(dtype))


def loss_of(rows, step):
    """Some function of the rows, another in every step."""
    generator = torch.Generator().manual_seed(step)
    return (rows - torch.randn(CLASSES, SIZE, generator=generator)[: len(rows)]).square().sum()


def train(weight, optimizer, index=ROWS, steps=range(STEPS)):
    for step in steps:
        optimizer.zero_grad()
        loss_of(weight if index is None else select_rows(weight, index), step).backward()
        optimizer.step()


def same(first, second):
    """Whether two states or weights are the same bit for bit."""
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[k], second[k]) for k in first)
    if isinstance(first, list):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, torch.Tensor):
        return first.shape == second.shape and bool((first == second).all())
    return first == second


# ------------------------------------------------------------------------------ what a step does


def test_a_step_on_all_rows_is_that_of_the_plain_optimizer_bit_for_bit(make):
    plain, sampled = table(), table()
    plain_optimizer, optimizer = make([plain]), make([sampled])
    train(plain, plain_optimizer, index=None)
    train(sampled, optimizer, index=torch.arange(CLASSES))
    assert not plain.equal(table())
    assert plain.equal(sampled)
    assert same(plain_optimizer.state_dict(), optimizer.state_dict())


def test_the_rows_taken_move_as_a_parameter_of_their_own_would(make):
    weight, alone = table(), nn.Parameter(table().detach()[ROWS])
    train(weight, make([weight]))
    train(alone, make([alone]), index=None)
    assert weight[ROWS].equal(alone)


def test_rows_that_were_not_taken_keep_every_bit_of_weight_and_state(make):
    weight = table()
    optimizer = make([weight])
    train(weight, optimizer, index=torch.arange(CLASSES), steps=range(2))
    before, state = weight.detach().clone(), copy.deepcopy(optimizer.state[weight])
    train(weight, optimizer, steps=range(2, 5))
    assert weight[OTHERS].equal(before[OTHERS])
    for name, value in optimizer.state[weight].items():
        if torch.is_tensor(value) and value.ndim:
            assert value.shape == weight.shape
            assert value[OTHERS].equal(state[name][OTHERS])
            assert not value[ROWS].equal(state[name][ROWS])
    assert not weight[ROWS].equal(before[ROWS])


def test_momentum_and_decay_of_sampled_rows_follow_the_formula_written_out():
    lr, momentum, decay = 0.1, 0.9, 0.3
    weight = table(dtype=torch.double)
    optimizer = torch.optim.SGD([weight], lr=lr, momentum=momentum, weight_decay=decay)
    expected, velocity = weight.detach().clone(), torch.zeros(CLASSES, SIZE, dtype=torch.double)
    for step, rows in enumerate(([0, 2, 3], [2, 5], [0, 5], [1, 2, 6])):
        optimizer.zero_grad()
        (select_rows(weight, torch.tensor(rows)) * (step + 1.0)).sum().backward()
        optimizer.step()
        for row in rows:
            velocity[row] = momentum * velocity[row] + step + 1.0 + decay * expected[row]
            expected[row] -= lr * velocity[row]
    assert_close(weight.detach(), expected, rtol=1e-14, atol=0)
    assert_close(optimizer.state[weight]["momentum_buffer"], velocity, rtol=1e-14, atol=0)
    assert not velocity[4].any()


def test_fault_g_a_dense_gradient_of_zeros_would_have_moved_the_other_rows():
    moved = {}
    for kind in ("dense", "sampled"):
        weight = table()
        optimizer = MOMENTUM([weight])
        train(weight, optimizer, index=torch.arange(CLASSES), steps=range(1))
        before = weight.detach().clone()
        optimizer.zero_grad()
        rows = weight[ROWS] if kind == "dense" else select_rows(weight, ROWS)
        loss_of(rows, 1).backward()
        optimizer.step()
        moved[kind] = (weight.detach() - before)[OTHERS].abs().max().item()
    assert moved["dense"] > 0.01
    assert moved["sampled"] == 0


def test_values_for_each_class_without_further_dimension_are_rows_too():
    bias = nn.Parameter(torch.zeros(CLASSES))
    optimizer = torch.optim.AdamW([bias], lr=0.5)
    select_rows(bias, ROWS).sum().backward()
    optimizer.step()
    assert_close(bias.detach(), torch.zeros(CLASSES).index_fill(0, ROWS, -0.5))


def test_the_master_weights_keep_their_type():
    weight = table(dtype=torch.bfloat16)
    optimizer = MOMENTUM([weight])
    train(weight, optimizer)
    assert weight.dtype == optimizer.state[weight]["momentum_buffer"].dtype == torch.bfloat16


def test_without_gradient_rows_are_just_rows():
    weight = table()
    with torch.no_grad():
        assert select_rows(weight, ROWS).equal(weight[ROWS])
    assert select_rows(weight.detach(), ROWS).equal(weight[ROWS])


# ---------------------------------------------------------------------------------- the gradient


def test_the_gradient_holds_the_rows_taken_and_nothing_else():
    weight = table()
    loss_of(select_rows(weight, ROWS), 0).backward()
    plain = table()
    loss_of(plain[ROWS], 0).backward()
    assert weight.grad.is_sparse
    assert weight.grad._values().shape == (len(ROWS), SIZE)
    assert weight.grad.to_dense().equal(plain.grad)


def test_an_optimizer_gets_the_memory_of_the_gradient_and_no_copy():
    seen = []

    class Spy(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

        def step(self):
            (parameter,) = self.param_groups[0]["params"]
            seen.append((parameter.shape, parameter.grad.layout, parameter.grad.data_ptr()))

    weight = table()
    optimizer = Spy([weight])
    loss_of(select_rows(weight, ROWS), 0).backward()
    optimizer.step()
    assert seen == [((len(ROWS), SIZE), torch.strided, weight.grad._values().data_ptr())]


def test_gradients_of_several_samples_add_up(make):
    weight, plain = table(), table()
    optimizer = make([weight])
    samples = [torch.tensor(rows) for rows in ([0, 2, 3], [2, 3, 6], [0, 2])]
    for step, rows in enumerate(samples):
        loss_of(select_rows(weight, rows), step).backward()
        loss_of(plain[rows], step).backward()
    assert_close(weight.grad.to_dense(), plain.grad)
    alone = nn.Parameter(plain.detach()[ROWS])
    alone.grad = plain.grad[ROWS]
    optimizer.step()
    make([alone]).step()
    assert_close(weight[ROWS], alone)
    assert weight[OTHERS].equal(plain[OTHERS])


def test_the_same_rows_twice_in_one_graph_add_up():
    weight, plain = table(), table()
    optimizer, plain_optimizer = MOMENTUM([weight]), MOMENTUM([plain])
    every = torch.arange(CLASSES)
    (loss_of(select_rows(weight, every), 0) + loss_of(select_rows(weight, every), 1)).backward()
    (loss_of(plain, 0) + loss_of(plain, 1)).backward()
    optimizer.step()
    plain_optimizer.step()
    assert_close(weight, plain)


def test_a_row_that_is_in_a_gradient_twice_gets_the_sum():
    # So a GPU adds sparse gradients up.
    weight, plain = table(), table()
    optimizer, plain_optimizer = MOMENTUM([weight]), MOMENTUM([plain])
    every = torch.arange(CLASSES)
    loss_of(select_rows(weight, every), 0).backward()
    half = weight.grad.to_dense() / 2
    twice = torch.cat([every, every.flip(0)])[None]
    weight.grad = torch.sparse_coo_tensor(
        twice, torch.cat([half, half.flip(0)]), weight.shape, check_invariants=True
    )
    loss_of(plain, 0).backward()
    optimizer.step()
    plain_optimizer.step()
    assert weight.equal(plain)


def test_a_dense_gradient_on_top_makes_it_a_plain_step():
    weight, plain = table(), table()
    optimizer, plain_optimizer = MOMENTUM([weight]), MOMENTUM([plain])
    (loss_of(select_rows(weight, ROWS), 0) + weight.square().sum()).backward()
    (loss_of(plain[ROWS], 0) + plain.square().sum()).backward()
    optimizer.step()
    plain_optimizer.step()
    assert_close(weight, plain)


def test_a_gradient_of_the_gradient_is_refused():
    weight = table()
    (gradient,) = torch.autograd.grad(
        loss_of(select_rows(weight, ROWS), 0), weight, create_graph=True
    )
    with pytest.raises(RuntimeError, match="twice"):
        gradient.to_dense().sum().backward()


# ------------------------------------------------------------------------------ around the step


def test_training_goes_on_from_a_saved_state_bit_for_bit(make):
    weight = table()
    optimizer = make([weight])
    train(weight, optimizer, steps=range(2))
    saved = copy.deepcopy((weight.detach(), optimizer.state_dict()))
    train(weight, optimizer, steps=range(2, 4))

    resumed = nn.Parameter(saved[0].clone())
    resumed_optimizer = make([resumed])
    resumed_optimizer.load_state_dict(saved[1])
    train(resumed, resumed_optimizer, steps=range(2, 4))
    assert resumed.equal(weight)
    assert same(resumed_optimizer.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copied_optimizer_goes_on_alike(copier):
    weight = table()
    optimizer = MOMENTUM([weight])
    train(weight, optimizer, steps=range(2))
    other_weight, other = copier((weight, optimizer))
    train(weight, optimizer, steps=range(2, 4))
    train(other_weight, other, steps=range(2, 4))
    assert other.param_groups[0]["params"][0] is other_weight
    assert other_weight.equal(weight)


def test_each_parameter_group_keeps_its_settings():
    backbone, weight, bias = nn.Parameter(torch.ones(2)), table(), nn.Parameter(torch.ones(CLASSES))
    before = weight.detach().clone()
    groups = [
        {"params": [backbone], "lr": 1.0},
        {"params": [weight, bias], "lr": 0.5, "weight_decay": 0.2},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.0)
    loss = backbone.sum() + select_rows(weight, ROWS).sum() + select_rows(bias, ROWS).sum()
    loss.backward()
    optimizer.step()
    assert backbone.detach().equal(torch.zeros(2))
    assert_close(weight[ROWS].detach(), before[ROWS] - 0.5 * (1 + 0.2 * before[ROWS]))
    assert_close(bias.detach(), torch.ones(CLASSES).index_fill(0, ROWS, 1 - 0.5 * 1.2))
    held = [group["params"] for group in optimizer.param_groups]
    assert held[0][0] is backbone
    assert held[1][0] is weight
    assert held[1][1] is bias


def test_a_learning_rate_schedule_is_followed():
    weight = nn.Parameter(torch.zeros(CLASSES, SIZE))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        select_rows(weight, ROWS).sum().backward()
        optimizer.step()
        scheduler.step()
    assert_close(weight[ROWS].detach(), torch.full((len(ROWS), SIZE), -1.11))
    assert not weight[OTHERS].any()


@pytest.mark.parametrize("name", ["sgd_momentum", "adamw_fused"])
def test_a_gradient_scaler_unscales_the_rows(name):
    weight, plain = table(), table()
    optimizer, plain_optimizer = OPTIMIZERS[name]([weight]), OPTIMIZERS[name]([plain])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        optimizer.zero_grad()
        plain_optimizer.zero_grad()
        scaler.scale(loss_of(select_rows(weight, torch.arange(CLASSES)), step)).backward()
        scaler.step(optimizer)
        scaler.update()
        loss_of(plain, step).backward()
        plain_optimizer.step()
    assert weight.equal(plain)


def test_a_gradient_scaler_skips_a_step_that_overflowed():
    weight = table()
    optimizer = MOMENTUM([weight])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(loss_of(select_rows(weight, ROWS), 0) * float("inf")).backward()
    scaler.step(optimizer)
    assert weight.equal(table())
    assert scaler.state_dict()["scale"] == 1024.0
    scaler.update()
    assert scaler.get_scale() == 512.0


@pytest.mark.parametrize("to_none", [True, False])
def test_forgotten_gradients_leave_nothing_behind(to_none):
    weight, plain = table(), table()
    optimizer, plain_optimizer = MOMENTUM([weight]), MOMENTUM([plain])
    for step in range(3):
        optimizer.zero_grad(set_to_none=to_none)
        loss_of(select_rows(weight, torch.arange(CLASSES)), step).backward()
        optimizer.step()
    train(plain, plain_optimizer, index=None, steps=range(3))
    assert weight.equal(plain)


@pytest.mark.parametrize("to_none", [True, False])
def test_a_step_without_gradient_moves_no_row(to_none, make):
    weight = table()
    optimizer = make([weight])
    train(weight, optimizer)
    before = weight.detach().clone()
    optimizer.zero_grad(set_to_none=to_none)
    optimizer.step()
    assert weight.equal(before)


@pytest.mark.parametrize("style", ["positional", "keyword"])
def test_a_closure_makes_the_gradient_within_the_step(style):
    weight, plain = table(), table()
    optimizer, plain_optimizer = MOMENTUM([weight]), MOMENTUM([plain])
    every = torch.arange(CLASSES)
    for step in range(3):

        def closure(step=step):
            optimizer.zero_grad()
            loss = loss_of(select_rows(weight, every), step)
            loss.backward()
            return loss

        before = loss_of(weight, step).item()
        loss = optimizer.step(closure) if style == "positional" else optimizer.step(closure=closure)
        assert loss.item() == before
    train(plain, plain_optimizer, index=None, steps=range(3))
    assert weight.equal(plain)


def test_a_closure_that_is_called_twice_in_a_step_sees_the_rows_that_moved():
    losses = []

    class Twice(torch.optim.SGD):
        """Two steps in one."""

        def step(self, closure):
            with torch.enable_grad():
                closure()
            super().step()
            with torch.enable_grad():
                losses.append(closure().item())

    weight = table()
    optimizer = Twice([weight], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(select_rows(weight, ROWS), 0)
        loss.backward()
        return loss

    start = closure().item()
    optimizer.step(closure)
    # The gradient of a square goes four fifths of the way to the target with this rate.
    assert losses == pytest.approx([0.64 * start])
    assert optimizer.param_groups[0]["params"][0] is weight


@pytest.mark.parametrize("with_closure", [False, True])
def test_a_step_that_calls_that_of_its_base_class_is_one_step(with_closure):
    seen = []

    class Derived(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            (rows,) = self.param_groups[0]["params"]
            seen.append(rows.shape)

    # Once there is one of them, torch calls the hooks for the base class too.
    torch.optim.SGD([table()], lr=0.1)
    weight, plain = table(), table()
    optimizer = Derived([weight], lr=0.1)

    def closure():
        loss_of(select_rows(weight, ROWS), 0).backward()

    if with_closure:
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()
    assert seen == [(len(ROWS), SIZE)]
    assert optimizer.param_groups[0]["params"][0] is weight
    train(plain, torch.optim.SGD([plain], lr=0.1), steps=range(1))
    assert weight.equal(plain)


class Failing(torch.optim.SGD):
    """Writes over rows and state and then fails, as long as it is told to."""

    fails = True

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.fill_(7)
            self.state[parameter]["momentum_buffer"].fill_(7)
            self.state[parameter]["steps"] += 1
        if self.fails:
            raise KeyboardInterrupt
        # Hooks are called for the step of the base class too.
        super().step()


@pytest.fixture
def failing():
    weight = table()
    optimizer = Failing([weight], lr=0.1, momentum=0.5)
    optimizer.state[weight]["momentum_buffer"] = torch.ones(CLASSES, SIZE)
    optimizer.state[weight]["steps"] = torch.zeros(())
    return weight, optimizer


def test_what_is_saved_after_an_error_within_a_step_is_as_it_was_before(failing):
    weight, optimizer = failing
    before = copy.deepcopy((weight, optimizer.state_dict()))
    loss_of(select_rows(weight, ROWS), 0).backward()
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert same(optimizer.state_dict(), before[1])
    assert weight.equal(before[0])
    assert optimizer.param_groups[0]["params"][0] is weight


def test_a_step_that_failed_can_be_taken_again(failing):
    weight, optimizer = failing
    before = weight.detach().clone()
    loss_of(select_rows(weight, ROWS), 0).backward()
    try:
        optimizer.step()
    except KeyboardInterrupt:
        # Here the frames of the step that failed are still there.
        optimizer.fails = False
        optimizer.step()
    velocity = 3.5 + weight.grad.to_dense()[ROWS]
    assert_close(weight[ROWS].detach(), 7 - 0.1 * velocity)
    assert_close(optimizer.state[weight]["momentum_buffer"][ROWS], velocity)
    assert weight[OTHERS].equal(before[OTHERS])
    assert (optimizer.state[weight]["momentum_buffer"][OTHERS] == 1).all()
    assert optimizer.state[weight]["steps"] == 1
    assert optimizer.param_groups[0]["params"][0] is weight


@pytest.mark.parametrize("to_none", [True, False])
def test_a_gradient_cleared_after_a_step_that_failed_is_gone(failing, to_none):
    weight, optimizer = failing
    loss_of(select_rows(weight, ROWS), 0).backward()
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    optimizer.zero_grad(set_to_none=to_none)
    other = torch.tensor([0, CLASSES - 1])
    select_rows(weight, other).sum().backward()
    assert weight.grad._indices()[0].equal(other)
    assert (weight.grad._values() == 1).all()
    optimizer.fails = False
    before = weight.detach().clone()
    optimizer.step()
    assert (weight.detach() != before).any(1).nonzero().flatten().equal(other)


def test_a_gradient_not_cleared_after_a_step_that_failed_is_added_to(failing):
    weight, optimizer = failing
    select_rows(weight, ROWS).sum().backward()
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    select_rows(weight, ROWS).sum().backward()
    assert (weight.grad.to_dense()[ROWS] == 2).all()


def test_a_step_that_another_thread_is_at_is_left_alone():
    weight, other, seen = table(), table(), []

    class Waiting(torch.optim.SGD):
        def step(self, closure=None):
            # As if the other thread came to take rows in the middle of the step.
            thread = threading.Thread(target=select_rows, args=(other, ROWS))
            thread.start()
            thread.join()
            seen.append(self.param_groups[0]["params"][0].shape)
            return super().step(closure)

    optimizer = Waiting([weight], lr=0.1)
    train(weight, optimizer)
    assert seen == [(len(ROWS), SIZE)] * STEPS


def test_a_parameter_that_replaces_another_takes_its_state_along():
    weight = table()
    optimizer = MOMENTUM([weight])
    train(weight, optimizer)
    velocity = optimizer.state[weight]["momentum_buffer"].clone()
    larger = nn.Parameter(torch.cat([weight.detach(), torch.zeros(2, SIZE)]))
    carry_over(optimizer, weight, larger, torch.arange(CLASSES))
    assert optimizer.state[larger]["momentum_buffer"][:CLASSES].equal(velocity)
    select_rows(larger, torch.tensor([0, 8])).sum().backward()
    optimizer.step()
    assert optimizer.state[larger]["momentum_buffer"][1:CLASSES].equal(velocity[1:])
    assert_close(larger[8].detach(), torch.full((SIZE,), -0.1))


# ------------------------------------------------------------------------------ other optimizers


def test_an_optimizer_made_for_sparse_gradients_gets_them():
    weight, plain = table(), table()
    optimizer = torch.optim.SparseAdam([weight], lr=0.1)
    train(weight, optimizer)
    train(plain, torch.optim.Adam([plain], lr=0.1))
    assert_close(weight, plain)


def test_an_optimizer_that_cannot_work_on_rows_is_refused_in_one_sentence():
    weight = table()
    optimizer = torch.optim.LBFGS([weight])

    def closure():
        optimizer.zero_grad()
        loss = loss_of(select_rows(weight, ROWS), 0)
        loss.backward()
        return loss

    with pytest.raises(ValueError, match=r"sampled classes expect an optimizer .*, got LBFGS"):
        optimizer.step(closure)


@pytest.mark.parametrize("name", ["Adafactor", "Muon", "Rprop"])
def test_optimizer_with_coupled_rows_or_other_start_is_refused(name):
    kind = getattr(torch.optim, name, None)
    if kind is None:
        pytest.skip(f"this torch has no {name}")
    weight = table()
    optimizer = kind([weight], lr=0.1)
    select_rows(weight, ROWS).sum().backward()
    with pytest.raises(ValueError, match=f"sampled classes expect an optimizer .*, got {name}"):
        optimizer.step()
    weight.grad = torch.ones_like(weight)
    optimizer.step()


def test_sparse_gradients_of_others_are_left_to_torch():
    weight, embedding = table(), nn.Embedding(CLASSES, SIZE, sparse=True)
    optimizer = torch.optim.AdamW([weight, embedding.weight])
    loss_of(select_rows(weight, ROWS), 0).backward()
    embedding(ROWS).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()


UNCHECKED = """
import torch
from tammes.optim.sparse_rows import select_rows
weight = torch.nn.Parameter(torch.ones(4, 2))
select_rows(weight, torch.tensor([0, 2])).sum().backward()
# Torch warns here, unless somebody has said that nothing is to be checked; up to 2.12 before, too.
torch.sparse_coo_tensor([[0]], [1.0], (2,))
"""


def test_a_sparse_gradient_brings_no_warning_about_checks():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", UNCHECKED], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
