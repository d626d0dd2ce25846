"""A head that is spread over ranks is the head that it would be on one."""

import copy
import pickle

import pytest
import torch
from rank_pool import everywhere, failures
from torch import nn
from torch.testing import assert_close

import tammes
from tammes.distributed.process_group import RankGroup
from tammes.distributed.resharding import shard_bounds
from tammes.distributed.sharded_rows import ShardedRows
from tammes.kernels.problem import Problem

KINDS = {
    "cosine": (tammes.CosineHead, {"scale": 8.0}),
    "raw": (tammes.CosineHead, {"scale": 8.0, "normalize_features": False}),
    "subcenters": (tammes.CosineHead, {"scale": 8.0, "subcenters": 3}),
    "linear": (tammes.LinearHead, {}),
    "gaussian": (tammes.GaussianHead, {}),
}
KINDS["learned"] = (tammes.CosineHead, {"scale": "learnable"})
SIZES = (1, 2, 3, 4)
CLASSES = 7
"""On four ranks the last has one, on three too; six are on the others."""


def plain_and_sharded(group, name, classes=CLASSES, **options):
    """A plain head and a sharded one with the same prototypes, on every rank."""
    kind, settings = KINDS[name]
    torch.manual_seed(1)
    plain = kind(5, classes, **settings)
    sharded = tammes.ShardedHead(kind, 5, classes, group=group, **settings, **options)
    sharded.load_state_dict(plain.state_dict())
    return plain, sharded


def batch_of(rows, rank):
    """The batch of a rank, of as many rows as are given for it."""
    generator = torch.Generator().manual_seed(7)
    features = torch.randn(40, 5, generator=generator)
    labels = torch.randint(CLASSES, (40,), generator=generator)
    begin = sum(rows[:rank])
    return features[begin : begin + rows[rank]], labels[begin : begin + rows[rank]]


# -------------------------------------------------------------------------------- who has what


@pytest.mark.parametrize("classes", [1, 2, 5, 7, 8, 1000])
@pytest.mark.parametrize("ranks", SIZES)
def test_every_class_is_on_one_rank_in_order_and_no_rank_has_more_than_it_must(classes, ranks):
    shares = [range(*shard_bounds(classes, ranks, rank)) for rank in range(ranks)]
    assert [c for share in shares for c in share] == list(range(classes))
    assert max(map(len, shares)) == -(-classes // ranks)


def test_shares_are_those_of_a_sharded_dtensor():
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
    from torch.distributed.tensor.placement_types import Shard

    for classes in (2, 5, 7, 9, 64):
        for ranks in SIZES:
            for rank in range(ranks):
                start, stop = shard_bounds(classes, ranks, rank)
                shape, offset = _compute_local_shape_and_global_offset(
                    (classes, 3), (ranks,), [rank], [Shard(0)]
                )
                assert (tuple(shape), offset[0]) == ((stop - start, 3), start)


def fresh(group, name, classes):
    kind, settings = KINDS[name]
    head = tammes.ShardedHead(kind, 3, classes, group=group, **settings)
    bias = None if head.bias is None else head.bias.detach().numpy()
    return head.weight.detach().numpy(), bias, torch.rand(()).item()


@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_it_starts_with_the_same_prototypes_on_any_number_of_ranks(name):
    # More classes than are drawn at once; every rank has another seed, and the first one's counts.
    found = [everywhere(size, fresh, name, 2500) for size in SIZES]
    whole, bias, following = found[0][0]
    assert len(whole) == 2500
    assert whole[:1024].std() == pytest.approx(whole[1024:2048].std(), rel=0.1)
    assert (whole[:1024] != whole[1024:2048]).all()
    for ranks in found[1:]:
        parts = torch.cat([torch.from_numpy(rows) for rows, _, _ in ranks])
        assert torch.equal(parts, torch.from_numpy(whole))
        if bias is not None:
            parts = torch.cat([torch.from_numpy(rows) for _, rows, _ in ranks])
            assert torch.equal(parts, torch.from_numpy(bias))
        # And whatever the first rank draws afterwards does not depend on them either.
        assert ranks[0][2] == following


def test_prototypes_follow_torchs_seed_and_the_plain_heads_distribution():
    def weight(seed):
        torch.manual_seed(seed)
        return tammes.ShardedHead(tammes.CosineHead, 64, 2000).weight.detach()

    assert torch.equal(weight(0), weight(0))
    assert not torch.equal(weight(0), weight(1))
    assert_close(weight(0).norm(dim=1).mean(), torch.tensor(1.0), atol=0.01, rtol=0)


def scale_of(group):
    head = tammes.ShardedHead(tammes.CosineHead, 3, 101, group=group, scale="learnable")
    return head.scale.item(), head.num_classes, len(head.weight)


def test_a_learnable_scale_starts_from_the_classes_of_all_ranks():
    expected = tammes.CosineHead(3, 101, scale="learnable").scale.item()
    assert everywhere(3, scale_of) == [
        (expected, 101, 34),
        (expected, 101, 34),
        (expected, 101, 33),
    ]


def shares(group, averaged):
    _, head = plain_and_sharded(group, "linear", averaged=averaged)
    labels = torch.arange(CLASSES)
    problem = head.problem(torch.randn(CLASSES, 5), labels)
    assert isinstance(problem, Problem)
    share = problem.share
    assert share.classes == CLASSES
    assert share.counts is None
    assert share.group is head.group
    assert problem.prototypes is head.weight
    assert problem.bias is head.bias
    return share.own.tolist(), share.factor


def test_a_problem_says_where_each_examples_class_is():
    first, second, third = everywhere(3, shares, True)
    assert first == ([0, 1, 2, -1, -1, -1, -1], 3.0)
    assert second == ([-1, -1, -1, 0, 1, 2, -1], 3.0)
    assert third == ([-1, -1, -1, -1, -1, -1, 0], 3.0)
    assert everywhere(2, shares, False)[0][1] == 1.0


def test_class_sample_is_of_training_steps_and_tests_have_all_classes():
    head = tammes.ShardedHead(tammes.LinearHead, 3, 100, sample_rate=0.2, correct=True)
    features, labels = torch.randn(4, 3), torch.tensor([5, 50, 99, 5])
    problem = head.problem(features, labels)
    assert problem.prototypes.shape == (20, 3)
    assert problem.bias.shape == (20,)
    assert torch.equal(problem.prototypes[problem.share.own], head.weight[labels])
    assert torch.equal(problem.bias[problem.share.own], head.bias[labels])
    assert_close(problem.share.counts.sum(), torch.tensor(100.0))
    head.correct = False
    assert head.problem(features, labels).share.counts is None
    tested = head.eval().problem(features, labels)
    assert tested.prototypes is head.weight
    # There are no other ranks: it is a plain problem.
    assert tested.share is None


# ------------------------------------------------------------------------------------- scores


def scores(group, name, rows, classes):
    plain, head = plain_and_sharded(group, name, classes)
    features, _ = batch_of(rows, torch.distributed.get_rank(group))
    expected = plain.logits(features)
    got = head.logits(features)
    assert got.shape == expected.shape
    assert_close(got, expected.detach(), rtol=1e-5, atol=1e-5)
    everyones = torch.ones(2, 5)
    shared = head.top(everyones, 2, shared=True)
    assert torch.equal(shared.classes, plain.logits(everyones).topk(2, 1).indices)
    for k in (1, classes):
        top = head.top(features, k)
        values, order = expected.topk(k, 1)
        assert torch.equal(top.classes, order)
        assert_close(top.scores, values.detach(), rtol=1e-5, atol=1e-5)
    assert not got.requires_grad
    return len(head.weight)


@pytest.mark.parametrize("name", KINDS)
def test_scores_and_best_classes_are_those_of_a_plain_head_for_any_batches(name):
    assert everywhere(1, scores, name, [5], CLASSES) == [7]
    assert everywhere(3, scores, name, [5, 0, 2], CLASSES) == [3, 3, 1]
    # More ranks than classes: some have none.
    assert everywhere(4, scores, name, [0, 1, 2, 3], 3) == [1, 1, 1, 0]


def test_without_ranks_it_is_a_plain_head():
    torch.manual_seed(0)
    plain, head = tammes.LinearHead(5, 7), tammes.ShardedHead(tammes.LinearHead, 5, 7)
    head.load_state_dict(plain.state_dict())
    features = torch.randn(4, 5)
    assert_close(head.logits(features), plain.logits(features).detach())
    assert torch.equal(head.top(features, 2).classes, plain.logits(features).topk(2).indices)
    assert head.state_dict().keys() == plain.state_dict().keys()
    assert head.num_classes == 7
    assert (head.start, head.stop) == (0, 7)


def rows_of_split(group, name, rows, averaged, implementation):
    """A loss of one's own on the rows of a split, beside that of a plain head."""
    plain, head = plain_and_sharded(group, name, averaged=averaged, implementation=implementation)
    plain, head = plain.double(), head.double()
    size, rank, wanted = len(rows), torch.distributed.get_rank(group), {}

    def value(split, whose):
        own = split.others - split.scale * split.target + split.hardest * split.expected
        return (whose + 1) * (own + split.mean * split.norm * split.rivals + split.gap).sum()

    for other in range(size):
        features, labels = batch_of(rows, other)
        features = features.double().requires_grad_()
        split = plain(features, labels)
        value(split, other).backward()
        if other == rank:
            wanted, expected = {"features": features.grad}, split
    features, labels = batch_of(rows, rank)
    features = features.double().requires_grad_()
    got = head(features, labels)
    assert got.labels is labels
    assert got.classes == expected.classes
    for field in ("target", "others", "hardest", "expected", "mean", "length", "norm", "gap"):
        assert_close(getattr(got, field), getattr(expected, field), msg=field)
    value(got, rank).backward()
    assert_close(features.grad, wanted["features"])
    # Every rank has all of it, and the mean over the ranks is theirs to be taken or not.
    factor = 1 / size if averaged else 1
    for key, parameter in head.named_parameters():
        whole = factor * plain.get_parameter(key).grad
        mine = whole if key == "log_scale" else whole[head.start : head.stop]
        assert_close(parameter.grad, mine, msg=key)


@pytest.mark.parametrize("implementation", ["auto", "streamed"])
@pytest.mark.parametrize("averaged", [True, False])
@pytest.mark.parametrize("name", KINDS)
def test_a_split_and_its_gradient_are_those_of_a_plain_head_for_any_batches(
    name, averaged, implementation
):
    everywhere(3, rows_of_split, name, [5, 0, 2], averaged, implementation)
    everywhere(2, rows_of_split, name, [2, 2], averaged, implementation)


def weights_after_new_classes(group):
    """Prototypes of a head that gets classes between steps of Adam, and their second moments."""
    head = tammes.ShardedHead(tammes.CosineHead, 5, CLASSES, group=group).double()
    optimizer = torch.optim.Adam(head.parameters(), lr=0.01)
    with torch.no_grad():
        head.weight.fill_(1.0)

    def step(size):
        whole = size * (1 + torch.arange(head.num_classes * 5.0).view(-1, 5).sin().abs())
        head.weight.grad = whole[head.start : head.stop].double()
        optimizer.step()

    for _ in range(3):
        step(0.1)
    head.add_classes(4, from_features=torch.eye(5)[:4], optimizer=optimizer)
    step(2.0)
    step(0.5)
    shards = ShardedRows.of_head(head)
    state = optimizer.state[head.weight]
    return [shards.all_gather(rows).detach() for rows in (head.weight, state["exp_avg_sq"])]


def test_new_classes_start_in_an_optimizer_as_they_do_on_one_rank():
    expected = weights_after_new_classes(None)
    assert len(expected[0]) == CLASSES + 4
    # From far below: started at zero, this would be a thousandth of the squared gradient.
    assert (expected[1][CLASSES:] > 0.01).all()
    for found in everywhere(3, weights_after_new_classes):
        assert_close(found, expected)


def split_refused(group):
    rank = torch.distributed.get_rank(group)
    head = tammes.ShardedHead(tammes.CosineHead, 5, CLASSES, group=group)
    head.split(torch.ones(1, 5), torch.tensor([CLASSES * rank]))


def test_a_split_of_which_one_rank_is_refused_is_refused_on_all():
    other, wrong = failures(2, split_refused)
    assert "rank 1 rejected its batch" in other
    assert "labels" in wrong


def masked_class(group, split):
    head = tammes.ShardedHead(tammes.LinearHead, 5, CLASSES, group=group)
    with torch.no_grad():
        head.bias[-1] = -torch.inf
    # Of the last class of the first rank, which only that rank has.
    features, labels = torch.ones(1, 5), torch.tensor([(head.group.rank) * (-(-CLASSES // 2) - 1)])
    if split:
        head.split(features, labels)
    tammes.Criterion(head, tammes.softmax())(features, labels)


@pytest.mark.parametrize("split", [False, True])
def test_a_class_that_another_rank_has_masked_is_refused_on_all(split):
    other, wrong = failures(2, masked_class, split)
    assert "rank 1 rejected its batch" in other
    assert "classes that are not masked, got class" in wrong


def unknown_class(group, rate):
    head = tammes.ShardedHead(tammes.CosineHead, 5, CLASSES, group=group, sample_rate=rate)
    loss = tammes.arcface() + tammes.sample_margin()
    criterion = tammes.Criterion(head, loss, validate=None, reduction="none")
    features = torch.arange(15.0).view(3, 5).sin()
    rows = [criterion(features, torch.tensor([0, 1, label])) for label in (6, 7, 77, -1)]
    return torch.stack(rows).isnan().tolist()


@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_unchecked_label_of_no_rank_shows_in_the_loss_of_its_example(rate):
    fine, wrong = [False] * 3, [False, False, True]
    assert everywhere(2, unknown_class, rate) == [[fine, wrong, wrong, wrong]] * 2
    if rate < 1:
        assert everywhere(1, unknown_class, rate) == [[fine, wrong, wrong, wrong]]


def test_more_best_classes_than_there_are_is_refused():
    head = tammes.ShardedHead(tammes.LinearHead, 5, 7)
    with pytest.raises(ValueError, match="k from 1 to 7 classes, got 8"):
        head.top(torch.randn(2, 5), 8)


# ----------------------------------------------------------------------------------- training


def training(group, name, sizes):
    """Steps on batches of other sizes each time, beside a plain head on the whole batches."""
    plain, head = plain_and_sharded(group, name)
    one, several = (tammes.Criterion(each, tammes.softmax()) for each in (plain, head))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (plain, head)]
    rank = torch.distributed.get_rank(group)
    for rows in sizes:
        whole = torch.cat([batch_of(rows, other)[0] for other in range(len(rows))])
        labels = torch.cat([batch_of(rows, other)[1] for other in range(len(rows))])
        features, own = batch_of(rows, rank)
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected, got = one(whole, labels), several(features, own)
        assert_close(got, expected)
        expected.backward()
        got.backward()
        for optimizer in optimizers:
            optimizer.step()
        assert_close(head.weight, plain.weight[head.start : head.stop], rtol=1e-4, atol=1e-6)
    return len(sizes)


@pytest.mark.parametrize("name", KINDS)
def test_fault_g_every_batch_of_every_rank_may_have_another_size(name):
    # peers.md 1.6 g: a batch of another size than the first, or than another rank's, was an error.
    sizes = [[4, 4, 4], [1, 0, 6], [0, 0, 2], [5, 3, 1]]
    assert everywhere(3, training, name, sizes) == [4, 4, 4]


def cut(group, rate, scores):
    import tammes.kernels.tiling as plan

    before = plan.SCORES
    head = plain_and_sharded(group, "cosine", sample_rate=rate, implementation="streamed")[1]
    criterion = tammes.Criterion(head.double(), tammes.cosface())
    features, labels = batch_of([10] * 4, torch.distributed.get_rank(group))
    features = features.double().requires_grad_()
    try:
        plan.SCORES = {key: scores or value for key, value in before.items()}
        head.sampler = head.sampler and tammes.heads.class_sampling.Sampler(rate, seed=3)
        loss = criterion(features, labels)
        loss.backward()
    finally:
        plan.SCORES = before
    gradient = head.weight.grad.to_dense()
    return loss.item(), features.grad.norm().item(), gradient.norm().item()


@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_rows_are_cut_alike_on_ranks_with_fewer_classes(rate):
    # Each block is a message: a rank that cut its rows otherwise would wait for ever.
    for whole, blocks in zip(
        everywhere(4, cut, rate, None), everywhere(4, cut, rate, 160), strict=True
    ):
        assert blocks == pytest.approx(whole, rel=1e-12)


# --------------------------------------------------------------------- classes come and go


def state_rows(optimizer, head):
    """What an optimizer has for the prototypes here, and for the bias."""
    return [
        value.detach().numpy()
        for name in ("weight", "bias")
        for key, value in sorted(optimizer.state[getattr(head, name)].items())
        if value.ndim
    ]


def surgery(group, kind, change):
    """Change classes of a head that was trained a little; its rows and the optimizer's after it."""
    _, head = plain_and_sharded(group, "linear")
    generator = torch.Generator().manual_seed(3)
    table = torch.randn(2, CLASSES, 6, generator=generator)
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind(head.parameters(), lr=0.1, **options)
    for step in table[:, head.start : head.stop]:
        # One number of each row goes to the bias.
        head.weight.grad, head.bias.grad = step[:, :5].clone(), step[:, 5].clone()
        optimizer.step()
    with torch.no_grad():
        for values in [head.weight, *optimizer.state[head.weight].values()]:
            if values.ndim and head.start <= 2 < head.stop:
                # A sum with anything else would lose its sign.
                values[2 - head.start] = -0.0
    change(head, optimizer)
    held = [p for g in optimizer.param_groups for p in g["params"]]
    assert held[0] is head.weight
    assert held[1] is head.bias
    assert len(optimizer.state) == 2
    rows = [head.weight.detach().numpy(), head.bias.detach().numpy(), *state_rows(optimizer, head)]
    start, stop = shard_bounds(head.num_classes, head.group.world_size, head.group.rank)
    assert (head.start, head.stop) == (start, stop)
    assert all(len(row) == stop - start for row in rows)
    features = torch.ones(2, 5)
    assert head.logits(features).shape == (2, head.num_classes)
    return rows


def add_three(head, optimizer):
    features = torch.arange(3 * 4 * 5).reshape(3, 4, 5) / 60
    head.add_classes(3, from_features=features, optimizer=optimizer)


def drop_some(head, optimizer):
    head.remove_classes([0, 4, 5], optimizer=optimizer)


def drop_and_add(head, optimizer):
    drop_some(head, optimizer)
    add_three(head, optimizer)


@pytest.mark.parametrize("change", [add_three, drop_some, drop_and_add])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_classes_come_and_go_on_any_number_of_ranks_and_take_their_state_along(kind, change):
    whole = everywhere(1, surgery, kind, change)[0]
    kept = 7 if change is add_three else 4
    for size in SIZES[1:]:
        parts = everywhere(size, surgery, kind, change)
        for number, expected in enumerate(whole):
            got = torch.cat([torch.from_numpy(rows[number]) for rows in parts])
            expected = torch.from_numpy(expected)
            # Bit for bit, the sign of a zero included.
            assert torch.equal(got[:kept].view(torch.int32), expected[:kept].view(torch.int32))
            assert_close(got[kept:], expected[kept:])


def compare_with_plain(group, name):
    plain, head = plain_and_sharded(group, name)
    features = torch.arange(3 * 4 * 5).reshape(3, 4, 5) / 60
    for each in (plain, head):
        each.remove_classes([1, 6])
        each.add_classes(3, from_features=features)
    weight, whole = head.weight, plain.weight
    if name == "subcenters":
        # Those beyond the first are drawn.
        assert (weight != 0).any(2).all()
        weight, whole = weight[:, 0], whole[:, 0]
    assert_close(weight, whole[head.start : head.stop])
    if plain.bias is not None:
        assert_close(head.bias, plain.bias[head.start : head.stop])


@pytest.mark.parametrize("name", KINDS)
def test_new_prototypes_stand_where_those_of_a_plain_head_would(name):
    everywhere(3, compare_with_plain, name)


def grown(group, subcenters):
    torch.manual_seed(5)
    head = tammes.ShardedHead(tammes.CosineHead, 3, 4, group=group, subcenters=subcenters)
    head.add_classes(5, from_features=None if subcenters == 1 else torch.ones(5, 3))
    return head.weight.detach().numpy()


@pytest.mark.parametrize("subcenters", [1, 2])
def test_new_prototypes_at_random_are_the_same_on_any_number_of_ranks(subcenters):
    (whole,) = everywhere(1, grown, subcenters)
    rows = {tuple(row) for row in torch.from_numpy(whole).view(9, -1, 3)[:, -1].tolist()}
    assert len(rows) == 9
    for size in SIZES[1:]:
        parts = everywhere(size, grown, subcenters)
        parts = torch.cat([torch.from_numpy(rows) for rows in parts])
        assert torch.equal(parts, torch.from_numpy(whole))


def criterion_surgery(group):
    head = tammes.ShardedHead(tammes.CosineHead, 3, 4, group=group, scale=8.0)
    loss = tammes.ldam(counts=[5, 6, 7, 8])
    criterion = tammes.Criterion(head, loss, class_weights=[1.0, 2.0, 3.0, 4.0])
    criterion.add_classes(2, counts=[9, 10], class_weights=[5.0, 6.0])
    criterion.remove_classes([0])
    return criterion.head.num_classes, criterion.class_weights.tolist(), str(criterion.loss)


def test_criterion_changes_classes_of_its_sharded_head_and_per_class_values():
    for count, weights, loss in everywhere(3, criterion_surgery):
        assert count == 5
        assert weights == [2.0, 3.0, 4.0, 5.0, 6.0]
        assert "counts=(6, 7, 8, 9, 10)" in loss


def disagreeing_surgery(group):
    head = tammes.ShardedHead(tammes.CosineHead, 3, 4, group=group)
    head.add_classes(1 + torch.distributed.get_rank(group))


def test_ranks_that_add_different_numbers_of_classes_are_told_so():
    for said in failures(2, disagreeing_surgery):
        assert "expects the same new classes on all of the group of ranks 0, 1" in said
        assert "1 on rank 0, 2 on rank 1" in said


def dropping_others(group):
    head = tammes.ShardedHead(tammes.CosineHead, 3, 10, group=group)
    before = head.weight.detach().clone()
    try:
        head.remove_classes([9 * torch.distributed.get_rank(group)])
    finally:
        assert torch.equal(head.weight, before)


def test_ranks_that_drop_as_many_but_different_classes_are_told_so():
    for said in failures(2, dropping_others):
        assert "a change of classes expects the same checksum of the classes kept" in said


# ----------------------------------------------------------------------------------- loading


def load_plain(group, rows):
    head = tammes.ShardedHead(tammes.LinearHead, 5, CLASSES, group=group)
    before = head.weight.detach().clone()
    state = {"weight": torch.arange(5.0 * rows).view(rows, 5), "bias": torch.arange(1.0 * rows)}
    try:
        head.load_state_dict(state)
    except RuntimeError as error:
        assert torch.equal(head.weight, before)
        return str(error)
    assert torch.equal(head.weight, state["weight"][head.start : head.stop])
    assert torch.equal(head.bias, state["bias"][head.start : head.stop])
    # And its own again.
    head.load_state_dict(copy.deepcopy(head.state_dict()))
    return None


def test_each_rank_takes_its_rows_of_a_plain_heads_state():
    assert everywhere(3, load_plain, CLASSES) == [None] * 3


def test_a_state_of_another_number_of_classes_is_refused():
    for said, own in zip(everywhere(3, load_plain, 8), (3, 3, 1), strict=True):
        assert f"weight of all 7 classes or of the {own} of this rank from class" in said
        assert "got 8 rows;" in said
        assert "size mismatch" not in said


def load_of_first(group, classes, more):
    """Load what the first rank has saved, everywhere."""
    head = tammes.ShardedHead(tammes.LinearHead, 5, classes, group=group)
    before = head.weight.detach().clone()
    state = [tammes.Criterion(head, tammes.softmax()).state_dict()]
    torch.distributed.broadcast_object_list(state, 0, group=group)
    if more:
        # As many rows on each rank, and some of them of other classes.
        head = tammes.ShardedHead(tammes.LinearHead, 5, classes + more, group=group)
        before = head.weight.detach().clone()
    try:
        tammes.Criterion(head, tammes.softmax()).load_state_dict(state[0])
    except RuntimeError as error:
        assert torch.equal(head.weight, before)
        return str(error)
    return None


def test_a_state_of_another_rank_is_refused_though_it_has_as_many_rows():
    first, second = everywhere(2, load_of_first, 8, 0)
    assert first is None
    assert "4 of this rank from class 4 on, got 4 rows from class 0 on of 8" in second
    assert "tammes.checkpoint" in second


def test_a_state_of_one_rank_of_a_head_with_other_classes_is_refused():
    first, _ = everywhere(2, load_of_first, 7, 1)
    assert "all 8 classes or of the 4 of this rank from class 0 on, got 4 rows" in first
    assert "from class 0 on of 7" in first


def load_from_meta(group):
    plain, _ = plain_and_sharded(group, "linear")
    with torch.device("meta"):
        head = tammes.ShardedHead(tammes.LinearHead, 5, CLASSES, group=group)
    head.to_empty(device="cpu")
    head.place.fill_(-1)
    head.load_state_dict(plain.state_dict())
    features = torch.arange(10.0).view(2, 5)
    assert_close(head.logits(features), plain.logits(features).detach())


def test_head_made_on_meta_loads_and_is_not_taken_for_a_wrapped_one():
    everywhere(2, load_from_meta)


def load_without_place(group):
    head = tammes.ShardedHead(tammes.CosineHead, 5, 8, group=group)
    head.load_state_dict({"weight": head.weight.detach()})


def test_rows_that_do_not_say_whose_they_are_have_to_be_all():
    for said in failures(2, load_without_place):
        assert "of all 8 classes or of the 4 of this rank" in said


def load_into_sampling(group):
    plain, head = plain_and_sharded(group, "linear", sample_rate=0.5)
    assert torch.equal(head.weight, plain.weight[head.start : head.stop])
    seed = head.sampler.seed.clone()
    head.load_state_dict(head.state_dict())
    head.load_state_dict(plain.state_dict())
    assert torch.equal(head.sampler.seed, seed)
    partly = {**plain.state_dict(), "sampler.seed": seed}
    with pytest.raises(RuntimeError, match=r'Missing key.*"sampler.steps"'):
        head.load_state_dict(partly)


def test_a_plain_heads_state_loads_into_one_that_samples_and_leaves_its_draws():
    everywhere(1, load_into_sampling)
    everywhere(2, load_into_sampling)


def copies(group):
    head = tammes.ShardedHead(tammes.LinearHead, 5, CLASSES, group=group, sample_rate=0.5)
    twin = copy.deepcopy(head)
    assert twin.group.world_size == head.group.world_size
    assert torch.equal(twin.weight, head.weight)
    twin.add_classes(1)
    assert (head.num_classes, twin.num_classes) == (CLASSES, CLASSES + 1)
    return twin.logits(torch.ones(1, 5)).shape[1]


def test_a_copy_has_the_same_ranks_and_classes_of_its_own():
    assert everywhere(2, copies) == [8, 8]


def test_a_pickled_head_comes_back():
    head = tammes.ShardedHead(tammes.LinearHead, 5, CLASSES)
    again = pickle.loads(pickle.dumps(head))
    assert torch.equal(again.weight, head.weight)
    assert repr(again) == repr(head)


# -------------------------------------------------------------------------------- bad input


def wrapped(group, whole):
    # Four classes on two ranks: shards of the same shape, which nothing else would notice.
    head = tammes.ShardedHead(tammes.CosineHead, 3, 4, group=group)
    backbone = nn.Linear(2, 3)
    labels = torch.tensor([0, 3])
    if whole:
        model = nn.ModuleDict({"backbone": backbone, "head": head})
        nn.parallel.DistributedDataParallel(model, process_group=group)
    else:
        backbone = nn.parallel.DistributedDataParallel(backbone, process_group=group)
    features = backbone(torch.ones(2, 2))
    head.problem(features, labels)
    head.logits(features)


def test_a_head_within_distributed_data_parallel_is_refused_on_all_ranks():
    for said in failures(2, wrapped, True):
        assert said.startswith("RuntimeError: ShardedHead was wrapped in DistributedDataParallel")
        assert "wrap the backbone only" in said
    assert everywhere(2, wrapped, False) == [None, None]


def fully_sharded(group, whole):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    head = tammes.ShardedHead(tammes.CosineHead, 3, 4, group=group)
    criterion, backbone = tammes.Criterion(head, tammes.softmax()), nn.Linear(2, 3)
    fully_shard(criterion if whole else backbone, mesh=DeviceMesh.from_group(group, "cpu"))
    criterion(backbone(torch.ones(2, 2)), torch.tensor([0, 3])).backward()


def test_a_head_within_fully_shard_is_refused_and_a_backbone_is_not():
    for said in failures(2, fully_sharded, True):
        assert said.startswith("RuntimeError: ShardedHead was given to fully_shard")
        assert "shard the backbone only" in said
    assert everywhere(2, fully_sharded, False) == [None, None]


def wrapped_late(group):
    head = tammes.ShardedHead(tammes.CosineHead, 3, 4, group=group)
    head.logits(torch.ones(1, 3))
    nn.parallel.DistributedDataParallel(head, process_group=group)
    try:
        head.problem(torch.ones(1, 3), torch.tensor([0]))
    except RuntimeError as error:
        return "wrap the backbone only" in str(error)
    return False


def test_head_wrapped_after_use_is_noticed_where_it_was_overwritten():
    assert everywhere(2, wrapped_late) == [False, True]


def made_before(group):
    head = tammes.ShardedHead(tammes.CosineHead, 3, 4, group=None)
    head._size = 1
    head.logits(torch.ones(1, 3))


def test_a_head_made_before_the_ranks_were_there_is_refused():
    for said in failures(4, made_before):
        assert "made on 1 ranks and is used on 4" in said
        assert "make it after torch.distributed has started" in said


def disagreeing(group, what):
    rank = torch.distributed.get_rank(group)
    sizes = {"embedding_size": 3, "num_classes": 10}
    tammes.ShardedHead(tammes.CosineHead, **{**sizes, what: sizes[what] + rank}, group=group)


def disagreeing_kinds(group, settings):
    kind, options = settings[torch.distributed.get_rank(group)]
    tammes.ShardedHead(kind, 3, 10, group=group, **options)


@pytest.mark.parametrize(
    "settings",
    [
        [(tammes.CosineHead, {}), (tammes.LinearHead, {})],
        [(tammes.CosineHead, {"scale": 8.0}), (tammes.CosineHead, {"scale": 9.0})],
        [(tammes.CosineHead, {"sample_rate": 0.5}), (tammes.CosineHead, {})],
        [(tammes.CosineHead, {"averaged": False}), (tammes.CosineHead, {})],
    ],
)
def test_ranks_that_disagree_on_the_kind_of_head_or_its_settings_are_told_so(settings):
    for said in failures(2, disagreeing_kinds, settings):
        assert "ShardedHead expects the same checksum of the settings on all" in said


@pytest.mark.parametrize("what", ["embedding_size", "num_classes"])
def test_ranks_that_disagree_on_a_size_are_told_which_has_what(what):
    words = what.replace("_", " ")
    for said in failures(2, disagreeing, what):
        assert f"ShardedHead expects the same {words} on all of the group of ranks 0, 1" in said


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((tammes.SimplexHead, 3, 4), {}, TypeError, "CosineHead, LinearHead, GaussianHead, got Si"),
        (("cosine", 3, 4), {}, TypeError, "one of the heads .* got 'cosine'"),
        ((tammes.CosineHead, 3, 1), {}, ValueError, "at least 2 classes, got num_classes=1"),
        ((tammes.CosineHead, 3, 4), {"sample_rate": 0.0}, ValueError, "above 0 and at most 1"),
        ((tammes.CosineHead, 3, 4), {"sample_rate": 1.5}, ValueError, "at most 1, got 1.5"),
        ((tammes.CosineHead, 3, 4), {"scale": -1.0}, ValueError, "scale above 0, got -1.0"),
        ((tammes.CosineHead, 3, 4), {"bias": True}, TypeError, "bias"),
        ((tammes.CosineHead, 3, 4), {"implementation": "fast"}, ValueError, "got 'fast'"),
    ],
)
def test_a_sharded_head_says_what_is_wrong(arguments, options, error, message):
    with pytest.raises(error, match=message):
        tammes.ShardedHead(*arguments, **options)


def test_ranks_may_be_given_as_such():
    ranks = RankGroup()
    assert tammes.ShardedHead(tammes.CosineHead, 3, 4, group=ranks).group == ranks
