"""A sharded head under a criterion: every kind of term, against one process with all prototypes.

How the split itself comes together over ranks is the matter of kernels/test_sharded_split.py.
"""

import pytest
import torch
from rank_pool import everywhere, failures
from test_ddp import EXACT, examples, gradients, share
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import tammes
from tammes.criterion.stale_weight_warning import UpdateWatch
from tammes.distributed.process_group import RankGroup
from tammes.distributed.sharded_rows import ALL_ROWS_LOCAL, ShardedRows

CLASSES = 7


@tammes.term(on="prototypes", reads="")
def largest_prototype(prototypes):
    """A term that knows nothing of shards."""
    return prototypes.square().sum(1).max()


@tammes.term(reads="rest")
def second_hardest(split):
    """A term that needs all scores of an example."""
    return split.rest.topk(2).values[:, 1]


PLAIN = tammes.softmax()
LOSSES = {
    "zero_centroid": PLAIN + 5.0 * tammes.zero_centroid(),
    "zero_centroid_raw": PLAIN + 5.0 * tammes.zero_centroid(normalize=False),
    "super_symmetry": PLAIN + tammes.super_symmetry(),
    "subcenters": tammes.cosface() + tammes.subcenter_spread() + tammes.zero_centroid(),
    "largest_prototype": PLAIN + largest_prototype(),
    "nca": PLAIN + tammes.nca(),
    "triplet": PLAIN + 0.5 * tammes.triplet(),
    "center": PLAIN + 0.5 * tammes.center(),
    "adaface": tammes.adaface(),
    "per_class": tammes.cosface(margin=[0.1 * c for c in range(CLASSES)]),
    "direct_sum": tammes.direct_sum(PLAIN, tammes.nca()),
    "direct_sum_moving": tammes.direct_sum(PLAIN, tammes.nca(), detach=False),
    "direct_sum_ridge_moving": tammes.direct_sum(PLAIN, tammes.nca(), eps=0.1, detach=False),
    "spectral_sum": tammes.spectral_sum(PLAIN, tammes.nca()),
    "spectral_sum_moving": tammes.spectral_sum(PLAIN, tammes.nca(), detach=False),
    "features_only": tammes.proto(),
    "everything": tammes.cosface(margin=0.2)
    + 0.5 * tammes.sample_margin()
    + 3.0 * tammes.zero_centroid()
    + 0.3 * tammes.nca(normalize=True)
    + 0.1 * tammes.center(),
}
MANY, FEW = 4, 9
"""Numbers of a feature: with fewer than classes the Gram matrix is summed, else rows gathered."""


def fitting(name):
    sizes = [MANY, FEW]
    return sizes[1:] if "direct" in name else sizes


def make(name, size, head=None, **options):
    """A backbone, prototypes of all classes, and a criterion on them or on a given head."""
    torch.manual_seed(0)
    loss = LOSSES[name]
    angular = name in ("adaface", "per_class", "subcenters", "everything")
    kind, settings = (tammes.CosineHead, {"scale": 8.0}) if angular else (tammes.LinearHead, {})
    settings |= {} if angular else {"bias": name == "nca"}
    settings |= {"subcenters": 3} if name == "subcenters" else {}
    whole = kind(size, CLASSES, **settings).double()
    if head is not None:
        sharded = tammes.ShardedHead(
            kind, size, CLASSES, group=head, averaged=options.pop("averaged", True), **settings
        ).double()
        sharded.load_state_dict(whole.state_dict())
        whole = sharded
    criterion = tammes.Criterion(whole, loss, class_weights=[1, 2, 0.5, 0, 1, 1, 3.0], **options)
    torch.manual_seed(1)
    return nn.Linear(5, size).double(), criterion.double()


def batch(seed):
    inputs, labels, weights = examples(seed)
    return inputs, torch.where(labels < 0, labels, labels % CLASSES), weights


def train(group, name, size, averaged, options):
    """Two batches on one rank: losses, terms, memories and gradients, put together."""
    reduction = options.get("reduction", "mean")
    backbone, criterion = make(name, size, head=group, averaged=averaged, **options)
    ranks = RankGroup(group)
    wrapped = DistributedDataParallel(backbone, process_group=group) if averaged else backbone
    losses, terms = [], []
    for seed in (1, 2):
        inputs, labels, weights = share(group, batch(seed))
        loss = criterion(wrapped(inputs), labels, weights=weights)
        (loss.square().sum() if reduction == "none" else loss).backward()
        losses.append(loss.detach())
        terms.append(criterion.terms)
    found = gradients(backbone)
    if not averaged:
        found = {key: ranks.all_reduce(gradient) for key, gradient in found.items()}
    memories = {key: value for key, value in criterion.state_dict().items() if "states" in key}
    return losses, terms, memories, found, gradients(criterion)


def train_alone(name, size, options, divisor):
    reduction = options.get("reduction", "mean")
    backbone, criterion = make(name, size, **options)
    losses, terms = [], []
    for seed in (1, 2):
        inputs, labels, weights = batch(seed)
        loss = criterion(backbone(inputs), labels, weights=weights)
        (loss.square().sum() / divisor if reduction == "none" else loss).backward()
        losses.append(loss.detach())
        terms.append(criterion.terms)
    memories = {key: value for key, value in criterion.state_dict().items() if "states" in key}
    return losses, terms, memories, gradients(backbone), gradients(criterion)


def joined(parts):
    """Gradients of all ranks' prototypes, as those of one head."""
    if any(part is None for part in parts):
        assert all(part is None or not part.any() for part in parts)
        return None
    return torch.cat(parts)


def check(found, expected):
    for losses, terms, memories, backbone, _ in found:
        assert_close(terms, expected[1], **EXACT)
        assert_close(memories, expected[2], **EXACT)
        assert_close(backbone, expected[3], **EXACT)
        if losses[0].ndim == 0:
            assert_close(losses, expected[0], **EXACT)
    for key, whole in expected[4].items():
        parts = [rank[4][key] for rank in found]
        if whole is None:
            assert joined(parts) is None
        else:
            assert_close(joined(parts), whole, **EXACT)


CASES = [(name, size) for name in LOSSES for size in fitting(name)]


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize(("name", "size"), CASES)
def test_every_kind_of_term_is_on_a_sharded_head_what_it_is_on_a_whole_one(name, size, ranks):
    found = everywhere(ranks, train, name, size, True, {})
    check(found, train_alone(name, size, {}, 1))


@pytest.mark.parametrize("name", ["nca", "spectral_sum_moving", "direct_sum_moving", "everything"])
def test_so_it_is_where_gradients_are_summed_and_not_averaged(name):
    found = everywhere(3, train, name, FEW, False, {})
    check(found, train_alone(name, FEW, {}, 1))


@pytest.mark.parametrize("averaged", [True, False])
@pytest.mark.parametrize("name", ["nca", "spectral_sum_moving", "everything"])
def test_unreduced_rows_stay_on_their_rank_and_gradients_reach_all(name, averaged):
    options = {"reduction": "none"}
    found = everywhere(3, train, name, MANY, averaged, options)
    expected = train_alone(name, MANY, options, 3 if averaged else 1)
    check(found, expected)
    for step in range(2):
        rows = torch.cat([rank[0][step] for rank in found])
        assert_close(rows, expected[0][step], **EXACT)


def learn_settings(group, averaged):
    """A margin and a weight of each example that take a gradient themselves."""
    backbone, criterion = make("per_class", MANY, head=group, averaged=averaged)
    inputs, labels, weights = share(group, batch(1))
    margins = (0.3 * inputs[:, 0]).requires_grad_()
    weights.requires_grad_()
    loss = criterion(backbone(inputs).detach(), labels, weights=weights, margin=margins)
    loss.backward()
    return loss.detach(), margins.grad, weights.grad


@pytest.mark.parametrize("averaged", [True, False])
def test_settings_and_weights_of_each_example_go_with_it_and_get_their_gradient(averaged):
    backbone, criterion = make("per_class", MANY)
    inputs, labels, weights = batch(1)
    margins = (0.3 * inputs[:, 0]).requires_grad_()
    weights.requires_grad_()
    expected = criterion(backbone(inputs).detach(), labels, weights=weights, margin=margins)
    expected.backward()
    # Nobody has averaged them, where somebody would have.
    factor = 3 if averaged else 1
    found = everywhere(3, learn_settings, averaged)
    for loss, _, _ in found:
        assert_close(loss, expected.detach(), **EXACT)
    for place, whole in ((1, margins.grad), (2, weights.grad)):
        assert_close(torch.cat([rank[place] for rank in found]) / factor, whole, **EXACT)


def refused(group, case):
    head = tammes.ShardedHead(tammes.CosineHead, 4, CLASSES, group=group)
    if case == "rest":
        tammes.Criterion(head, second_hardest())
    else:
        tammes.Criterion(head, tammes.cosface(), group=torch.distributed.group.WORLD)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "rest",
            "second_hardest expects a head that has all classes, since it reads rest, "
            "got ShardedHead over the group of ranks 0, 1",
        ),
        (
            "group",
            "Criterion expects the group of its head, the group of ranks 0, 1, "
            "got the default group of ranks 0, 1, 2, 3",
        ),
    ],
)
def test_what_a_sharded_head_cannot_do_is_refused_in_one_sentence(case, message):
    for found in failures(2, refused, case):
        assert found == f"ValueError: {message}"


def own_rows(group):
    """Rank 1 of three has no prototype."""
    ranks = RankGroup(group)
    everything = torch.arange(10.0).view(5, 2).double()
    rows = everything[[slice(0, 2), slice(2, 2), slice(2, 5)][ranks.rank]].clone().requires_grad_()
    shards = ShardedRows(ranks, classes=5)
    whole = shards.all_gather(rows)
    mean = shards.all_reduce(rows.sum(0)) / shards.count(rows)
    (whole.square().sum() + mean.pow(3).sum()).backward()
    return whole.detach(), mean.detach(), rows.grad


def test_shards_give_sums_and_rows_with_the_gradient_of_one_process():
    everything = torch.arange(10.0).view(5, 2).double().requires_grad_()
    mean = everything.mean(0)
    (everything.square().sum() + mean.pow(3).sum()).backward()
    found = everywhere(3, own_rows)
    for whole, centre, _ in found:
        assert torch.equal(whole, everything.detach())
        assert_close(centre, mean.detach(), **EXACT)
    assert_close(torch.cat([rank[2] for rank in found]), everything.grad, **EXACT)


def test_where_all_prototypes_are_here_nothing_is_asked_of_anybody():
    rows = torch.ones(3, 2)
    assert ALL_ROWS_LOCAL.all_gather(rows) is rows
    assert ALL_ROWS_LOCAL.all_reduce(rows) is rows
    assert ALL_ROWS_LOCAL.count(rows) == 3
    assert ShardedRows.of_head(tammes.CosineHead(2, 3)) is ALL_ROWS_LOCAL


def test_a_rank_that_has_no_prototypes_is_not_told_that_they_never_change(recwarn):
    none, features = nn.Parameter(torch.zeros(0, 2)), torch.ones(1, 2, requires_grad=True)
    optimizer = torch.optim.SGD([features], lr=0.0)
    features.grad = torch.zeros_like(features)
    watch = UpdateWatch()
    for _ in range(watch.patience + 2):
        watch.notice(none, features)
        optimizer.step()
    assert not recwarn.list
