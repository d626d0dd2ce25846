"""What ranks tell each other, on one, two and three gloo processes."""

import copy
import datetime
import os
import pickle
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from cover import slow
from rank_pool import everywhere, failures
from torch.testing import assert_close

from tammes.distributed.process_group import RankGroup

SIZES = (1, 2, 3)
TYPES = (torch.double, torch.float, torch.bfloat16, torch.half, torch.long, torch.bool)
ROWS = (2, 0, 5)
"""How many rows each rank has."""


def rows_of(rank, dtype=torch.double, count=None):
    generator = torch.Generator().manual_seed(rank)
    count = ROWS[rank] if count is None else count
    return torch.randint(-8, 9, (count, 3), generator=generator).to(dtype)


def gather_and_sum(group, dtype):
    ranks = RankGroup(group)
    own = rows_of(ranks.rank, dtype, count=4)
    kept = own.clone()
    # A view too, whose numbers do not lie side by side.
    found = ranks.all_gather(own.T), ranks.all_reduce(own), ranks.all_gather(own[0, 0])
    assert torch.equal(own, kept)
    return found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_everybody_gets_all_tensors_and_their_sum(size, dtype):
    each = torch.stack([rows_of(rank, dtype, count=4).T for rank in range(size)])
    for gathered, total, scalars in everywhere(size, gather_and_sum, dtype):
        assert torch.equal(gathered, each)
        assert torch.equal(scalars, each[:, 0, 0])
        assert total.dtype == dtype
        expected = each.any(0) if dtype == torch.bool else each.sum(0).to(dtype)
        assert torch.equal(total, expected.T)


def halves(rank):
    return torch.randn(64, generator=torch.Generator().manual_seed(rank)).bfloat16()


def sum_of_halves(group):
    return RankGroup(group).all_reduce(halves(RankGroup(group).rank))


def test_halves_are_summed_in_single_precision():
    # Rounded once, and not at every step of the sum.
    expected = sum(halves(rank).float() for rank in range(3)).bfloat16()
    for total in everywhere(3, sum_of_halves):
        assert torch.equal(total, expected)


def gather_uneven_rows(group, dtype):
    ranks = RankGroup(group)
    longest = max(ROWS[: ranks.world_size])
    return ranks.all_gather_rows(rows_of(ranks.rank, dtype), longest)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.double, torch.bfloat16], ids=str)
def test_gathered_rows_are_in_order_of_ranks_and_padded_with_zeros(size, dtype):
    expected = torch.zeros(size, max(ROWS[:size]), 3, dtype=dtype)
    for rank in range(size):
        expected[rank, : ROWS[rank]] = rows_of(rank, dtype)
    for found in everywhere(size, gather_uneven_rows, dtype):
        assert torch.equal(found, expected.flatten(0, 1))


def gather_nothing(group):
    own = torch.zeros(0, 3, requires_grad=True)
    together = RankGroup(group).all_gather_rows(own, 0)
    together.sum().backward()
    return together.detach(), own.grad


def test_no_rows_anywhere_are_no_rows():
    for together, gradient in everywhere(2, gather_nothing):
        assert together.shape == gradient.shape == (0, 3)


def too_many_rows(group):
    RankGroup(group).all_gather_rows(torch.zeros(3, 1), 2)


def test_more_rows_than_the_longest_are_refused():
    for message in failures(2, too_many_rows):
        assert message == "ValueError: all_gather_rows expects at most 2 rows on a rank, got 3"


def wanted(rank, together):
    """A loss of all rows that is another one on each rank."""
    weights = torch.arange(together.numel(), dtype=together.dtype).view_as(together) - 3 * rank
    return (weights * together.square()).sum() / 8


def gradients_of_rows(group, dtype):
    ranks = RankGroup(group)
    own = rows_of(ranks.rank, dtype).requires_grad_()
    longest = max(ROWS[: ranks.world_size])
    loss = wanted(ranks.rank, ranks.all_gather_rows(own, longest))
    (first,) = torch.autograd.grad(loss, own, create_graph=True)
    (second,) = torch.autograd.grad(first.pow(3).sum(), own)
    return first.detach(), second


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.double, torch.bfloat16], ids=str)
def test_the_gradient_of_a_row_is_the_sum_of_what_all_ranks_want_of_it(size, dtype):
    # In one process: the sum of all ranks' losses, differentiated once and twice.
    longest = max(ROWS[:size])
    own = [rows_of(rank).requires_grad_() for rank in range(size)]
    filled = [torch.cat([rows, torch.zeros(longest - len(rows), 3)]) for rows in own]
    together = torch.cat(filled)
    first = torch.autograd.grad(
        sum(wanted(rank, together) for rank in range(size)), own, create_graph=True
    )
    second = torch.autograd.grad(sum(part.pow(3).sum() for part in first), own)
    tolerance = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.double else {}
    for rank, found in enumerate(everywhere(size, gradients_of_rows, dtype)):
        assert_close(found[0], first[rank].detach().to(dtype), **tolerance)
        if dtype == torch.double:
            assert_close(found[1], second[rank], **tolerance)


def disagree(group, **numbers):
    rank = RankGroup(group).rank
    RankGroup(group).check_equal(
        "ArcFace", **{name: values[rank] for name, values in numbers.items()}
    )


def disagree_on_size(group):
    disagree(group, num_classes=(5, 5, 5), embedding_size=(8, 8, 4))


def disagree_on_classes(group):
    disagree(group, num_classes=(8, 8, 4), embedding_size=(5, 5, 5))


DISAGREEMENTS = {"embedding_size": disagree_on_size, "num_classes": disagree_on_classes}


@pytest.mark.parametrize("what", [*DISAGREEMENTS])
def test_ranks_that_disagree_are_named_with_what_they_have(what):
    for message in failures(3, DISAGREEMENTS[what]):
        assert message == (
            f"ValueError: ArcFace expects the same {what.replace('_', ' ')} on all of the group "
            "of ranks 0, 1, 2, got 8 on rank 0, 8 on rank 1, 4 on rank 2"
        )


def agree(group):
    RankGroup(group).check_equal("ArcFace", embedding_size=8, num_classes=4)
    return RankGroup(group).all_gather_ints(rank=RankGroup(group).rank, twice=2)


def test_ranks_that_agree_go_on():
    assert everywhere(3, agree) == 3 * [{"rank": [0, 1, 2], "twice": [2, 2, 2]}]


def names(group):
    ranks = RankGroup(group)
    apart = copy.deepcopy(ranks)
    assert apart == ranks
    assert apart.process_group is group
    default = pickle.loads(pickle.dumps(ranks))
    assert default == RankGroup()
    return ranks.name, ranks.world_size, ranks.rank, RankGroup(apart).name, default.name


def test_a_copy_keeps_the_group_and_what_is_unpickled_has_the_default_one():
    for rank, found in enumerate(everywhere(2, names)):
        own = "the group of ranks 0, 1"
        assert found == (own, 2, rank, own, "the default group of ranks 0, 1, 2, 3")
    assert everywhere(1, names)[0][0] == "the group of rank 0"


def test_a_group_that_this_process_is_not_in_is_refused():
    with pytest.raises(TypeError, match="expects a process group that this process is in, got"):
        RankGroup(dist.GroupMember.NON_GROUP_MEMBER)


def test_the_name_of_many_ranks_stays_short(monkeypatch):
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [*range(4, 68)])
    monkeypatch.setattr(RankGroup, "process_group", object())
    assert RankGroup().name == "the group of 64 ranks from 4 to 67"


def test_a_process_alone_has_everything():
    ranks, own = RankGroup(), torch.ones(2, 3, requires_grad=True)
    assert (ranks.world_size, ranks.rank, ranks.name, repr(ranks)) == (
        1,
        0,
        "alone",
        "RankGroup(alone)",
    )
    assert torch.equal(ranks.all_gather(own), torch.ones(1, 2, 3))
    assert not ranks.all_gather(own).requires_grad
    total = ranks.all_reduce(own)
    total += 1
    assert torch.equal(own, torch.ones(2, 3))
    rows = ranks.all_gather_rows(own, 3)
    rows.sum().backward()
    assert torch.equal(rows.detach(), torch.cat([torch.ones(2, 3), torch.zeros(1, 3)]))
    assert torch.equal(own.grad, torch.ones(2, 3))
    ranks.check_equal("nobody", classes=3)
    assert ranks == copy.copy(ranks) == pickle.loads(pickle.dumps(ranks))
    assert hash(ranks) == hash(RankGroup())


def met_by_a_compiler(group):
    """Whether each collective was traced, in a compiled function that has some."""
    traced, run = [], RankGroup._run

    def spy(self, what, *args, **kwargs):
        traced.append((what, torch.compiler.is_compiling()))
        return run(self, what, *args, **kwargs)

    def work(rows):
        ranks = RankGroup(group)
        together = ranks.all_gather_rows(rows.sin(), 2).cos()
        return (
            together.sum() + ranks.all_reduce(rows).sum() + ranks.all_gather_ints(rows=3)["rows"][0]
        )

    rows = torch.arange(2.0).view(2, 1) + RankGroup(group).rank
    own, again = rows.clone().requires_grad_(), rows.clone().requires_grad_()
    RankGroup._run = spy
    try:
        found = torch.compile(work, backend="aot_eager")(own)
        found.backward()
    finally:
        RankGroup._run = run
    expected = work(again)
    expected.backward()
    assert torch.equal(found, expected)
    assert torch.equal(own.grad, again.grad)
    return traced


def test_a_compiler_leaves_collectives_as_they_are():
    for traced in everywhere(2, met_by_a_compiler):
        names = ["gather", "sum", "gather", "sum of rows"]
        assert traced == [(name, False) for name in names]


SECONDS = 4
"""A rank that hangs is waited for so long."""
LONG = 60
"""What starting may take on a busy machine."""


def lose_a_rank(rank, how, store, results):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=3,
        timeout=datetime.timedelta(seconds=LONG),
    )
    dist.barrier()
    # Of a rank that dies everybody hears at once.
    short = dist.new_group(timeout=datetime.timedelta(seconds=SECONDS)) if how == "hangs" else None
    ranks = RankGroup(short)
    own = torch.ones(2, 2, requires_grad=True)
    together = ranks.all_gather_rows(own, 2)
    if rank == 2 and how == "dies":
        # As a process that is killed: without a word.
        os._exit(1)
    if rank == 2:
        results.get(timeout=LONG)
        return
    began = time.monotonic()
    collective = {"dies": lambda: ranks.all_gather(own), "hangs": together.sum().backward}[how]
    try:
        collective()
    except RuntimeError as error:
        results.put((rank, str(error), time.monotonic() - began))


@pytest.mark.parametrize(
    ("how", "what"),
    [slow("dies", "gather over the default group"), ("hangs", "sum of rows over the group")],
)
def test_the_others_of_a_rank_that_is_lost_end_in_time_and_name_the_group(how, what, tmp_path):
    context = mp.get_context("spawn")
    results, lost = context.Queue(), context.Queue()
    args = [(how, tmp_path / "store", lost if rank == 2 else results) for rank in range(3)]
    processes = [
        context.Process(target=lose_a_rank, args=(rank, *args[rank]), daemon=True)
        for rank in range(3)
    ]
    for process in processes:
        process.start()
    try:
        told = [results.get(timeout=2 * LONG) for _ in range(2)]
    finally:
        lost.put("go home")
        for process in processes:
            process.join(timeout=5)
            process.kill()
    assert {rank for rank, _, _ in told} == {0, 1}
    for _, message, seconds in told:
        start = f"a {what} of ranks 0, 1, 2 failed: "
        assert message.startswith(start)
        assert "\n" not in message
        assert len(message) > len(start)
        assert seconds < LONG / 2
