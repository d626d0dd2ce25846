"""Sampled classes: those of the batch always, others uniformly, sums over them without bias."""

import copy
import functools
import importlib
import itertools
import math
import pickle
from collections import OrderedDict

import pytest
import torch
from catalogue import SPLIT_TERMS, fits
from rank_pool import everywhere
from torch.testing import assert_close

import tammes
from tammes.heads.class_sampling import Sample, Sampler, sample, sample_size
from tammes.optim import sparse_rows

OWN = torch.tensor([4, 1, -1, 4])
"""Classes 1 and 4 are present, one of them twice, and one is elsewhere."""


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.double, generator=generator)


def drawn(chosen, own):
    """The classes that were drawn, as a tuple."""
    return tuple(c for c in chosen.index.tolist() if c not in own.tolist())


# ------------------------------------------------------------------------------------ one sample


@pytest.mark.parametrize(
    ("examples", "classes", "rate", "size"),
    [
        (3, 1000, 0.25, 250),
        (3, 1001, 0.25, 251),
        (64, 1000, 0.01, 65),
        (64, 60, 0.5, 60),
        (0, 10, 0.01, 1),
        (5, 0, 0.5, 0),
        (1, 7, 1.0, 7),
    ],
)
def test_sample_size_follows_the_rate_and_holds_all_present_classes(examples, classes, rate, size):
    assert sample_size(examples, classes, rate) == size
    own = torch.arange(examples) % max(classes, 1) if classes else torch.full((examples,), -1)
    assert len(sample(own, classes, rate, key=0).index) == size


@pytest.mark.parametrize("key", range(20))
def test_sample_is_sorted_without_repeats_and_has_all_classes_of_the_batch(key):
    own = torch.randint(-1, 50, (12,), generator=torch.Generator().manual_seed(key))
    chosen = sample(own, classes=50, rate=0.4, key=key)
    assert (chosen.index.diff() > 0).all()
    assert chosen.index[0] >= 0
    assert chosen.index[-1] < 50
    assert set(own.tolist()) - {-1} <= set(chosen.index.tolist())


@pytest.mark.parametrize("key", range(20))
def test_the_examples_find_their_classes_in_the_sample(key):
    own = torch.randint(-1, 50, (12,), generator=torch.Generator().manual_seed(key))
    chosen = sample(own, classes=50, rate=0.4, key=key)
    here = own >= 0
    assert chosen.index[chosen.own[here]].equal(own[here])
    assert (chosen.own[~here] == -1).all()


def test_weight_of_a_drawn_class_is_its_share_of_the_absent_ones():
    chosen = sample(OWN, classes=10, rate=0.6, key=0)
    expected = [1.0 if c in (1, 4) else (10 - 2) / (6 - 2) for c in chosen.index.tolist()]
    assert chosen.counts.tolist() == expected


@pytest.mark.parametrize(("own", "classes"), [([0, 1, 2], 3), ([], 5), ([-1, -1], 4), ([2], 3)])
def test_counts_add_up_to_the_number_of_classes(own, classes):
    chosen = sample(torch.tensor(own, dtype=torch.long), classes, rate=0.5, key=3)
    assert chosen.counts.sum() == classes


def test_no_class_gives_an_empty_sample():
    chosen = sample(torch.tensor([-1, -1]), classes=0, rate=0.5, key=0)
    assert chosen.index.tolist() == []
    assert chosen.own.tolist() == [-1, -1]


def test_the_batch_is_left_alone():
    own = OWN.clone()
    sample(own, classes=10, rate=0.5, key=0)
    assert own.equal(OWN)


# ---------------------------------------------------------------------------------- without bias


@functools.cache
def every_sample():
    """One sample for every set of classes that can be drawn beside those of the batch, C = 7."""
    found = {}
    for key in range(200):
        chosen = sample(OWN, classes=7, rate=5 / 7, key=key)
        found.setdefault(drawn(chosen, OWN), chosen)
    return found


def test_every_set_of_other_classes_can_be_drawn():
    assert set(every_sample()) == set(itertools.combinations([0, 2, 3, 5, 6], 3))


def test_corrected_sum_averages_to_the_sum_over_all_classes():
    values = normal(7)
    sums = [(chosen.counts * values[chosen.index]).sum() for chosen in every_sample().values()]
    assert len(sums) == math.comb(5, 3)
    assert_close(torch.stack(sums).mean(), values.sum(), rtol=1e-7, atol=0)
    plain = [values[chosen.index].sum() for chosen in every_sample().values()]
    assert abs(torch.stack(plain).mean() - values.sum()) > 0.1


def test_every_set_of_other_classes_is_drawn_equally_often():
    keys, sets = 2000, math.comb(5, 3)
    times = dict.fromkeys(itertools.combinations([0, 2, 3, 5, 6], 3), 0)
    sampler = Sampler(5 / 7, seed=1)
    for _ in range(keys):
        times[drawn(sampler(OWN, 7), OWN)] += 1
    expected = keys / sets
    chi_square = sum((count - expected) ** 2 / expected for count in times.values())
    # 99.9 % of chi-square with 9 degrees of freedom.
    assert chi_square < 27.9


def test_corrected_sum_of_exponentials_is_unbiased_and_the_plain_one_is_not():
    classes, rate, steps = 400, 0.1, 1000
    own, scores = torch.tensor([3, 77]), 3 * normal(classes)
    sampler = Sampler(rate, seed=0)
    corrected, plain = [], []
    for _ in range(steps):
        chosen = sampler(own, classes)
        powers = scores[chosen.index].exp()
        corrected.append((chosen.counts * powers).sum())
        plain.append(powers.sum())
    full, corrected, plain = scores.exp().sum(), torch.stack(corrected), torch.stack(plain)
    error = corrected.std() / math.sqrt(steps)
    assert abs(corrected.mean() - full) < 4 * error
    assert plain.mean() < 0.2 * full


def test_the_plain_log_sum_of_equal_scores_is_too_small_by_the_log_of_the_rate():
    chosen = sample(torch.tensor([5]), classes=1000, rate=0.1, key=0)
    scores = torch.zeros(1000)[chosen.index]
    others = torch.arange(100) != chosen.own[0]
    assert_close(scores[others].logsumexp(0), torch.tensor(999 * 0.1).log(), atol=0.01, rtol=0)
    corrected = (scores + chosen.counts.log())[others].logsumexp(0)
    assert_close(corrected, torch.tensor(999.0).log())


# --------------------------------------------------------------------------- one step after another


def indices(sampler, steps, **more):
    return [sampler(OWN, 40, **more).index for _ in range(steps)]


def equal(first, second):
    return all(a.equal(b) for a, b in zip(first, second, strict=True))


def test_every_step_has_a_sample_of_its_own():
    first, second, third = indices(Sampler(0.5, seed=0), 3)
    assert not first.equal(second)
    assert not second.equal(third)


def test_a_resumed_run_draws_what_it_would_have_drawn():
    sampler = Sampler(0.5, seed=3)
    indices(sampler, 2)
    saved = {name: value.clone() for name, value in sampler.state_dict().items()}
    resumed = Sampler(0.5, seed=9)
    resumed.load_state_dict(saved)
    assert equal(indices(sampler, 3), indices(resumed, 3))


def test_another_seed_draws_others():
    assert not equal(indices(Sampler(0.5, seed=0), 3), indices(Sampler(0.5, seed=1), 3))


def test_ranks_with_the_same_seed_draw_apart():
    here, there = (indices(Sampler(0.5, seed=0), 3, start=start) for start in (0, 40))
    assert not any(a.equal(b) for a, b in zip(here, there, strict=True))


def test_neither_torchs_numbers_nor_anybody_elses_matter():
    torch.manual_seed(1)
    first = indices(Sampler(0.5, seed=0), 1)
    torch.manual_seed(2)
    torch.rand(5)
    assert equal(first, indices(Sampler(0.5, seed=0), 1))


def scrambled(word):
    """SplitMix64's finaliser with Python's whole numbers."""
    word %= 1 << 64
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % (1 << 64)
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % (1 << 64)
    return word ^ (word >> 31)


def test_the_sample_is_a_hash_of_seed_step_and_class_and_nothing_else():
    seed, start, classes, golden = 7, 100, 20, 0x9E3779B97F4A7C15
    sampler = Sampler(0.3, seed)
    for step in range(3):
        key = scrambled(scrambled(seed + golden) + step)
        words = {c: scrambled((start + c) * golden + key) % (1 << 63) for c in range(classes)}
        words[2] = -1
        expected = sorted(sorted(words, key=words.get)[:6])
        assert sampler(torch.tensor([2]), classes, start=start).index.tolist() == expected


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.5, float("nan")])
def test_a_rate_that_is_no_share_is_refused(rate):
    with pytest.raises(ValueError, match=f"Sampler expects rate above 0 and at most 1, got {rate}"):
        Sampler(rate, seed=0)


@pytest.mark.gpu
def test_a_gpu_draws_the_same_and_is_not_waited_for(unwaited):
    sampler, own = Sampler(0.5, seed=0).cuda(), OWN.cuda()
    sampler(own, 40)
    with unwaited():
        chosen = sampler(own, 40)
    expected = Sampler(0.5, seed=0)
    indices(expected, 1)
    assert equal(Sample(*(field.cpu() for field in chosen)), expected(OWN, 40))


# ---------------------------------------------------------------------------- heads that sample
#
# Counts are whole numbers here: 20 classes are absent, and a drawn one stands for 2 or 4 of them.
# So the corrected loss is the plain one of a head that has each drawn prototype as many times.

SIZE, CLASSES = 6, 23
LABELS = torch.tensor([3, 8, 3, 21])
KINDS = {
    "cosine": (tammes.CosineHead, {"scale": 8.0}),
    "cosine_learned_scale": (tammes.CosineHead, {"scale": "learnable"}),
    "linear": (tammes.LinearHead, {"scale": 1.5}),
    "gaussian": (tammes.GaussianHead, {}),
}
LOSSES = {
    "cosface": tammes.cosface(),
    "arcface": tammes.arcface(),
    "sum": tammes.cosface() + 0.5 * tammes.sample_margin(),
    "adaface": tammes.adaface(),
    "divergence": tammes.softmax(smoothing=0.1) + 0.3 * tammes.logit_divergence(),
}
TERMS = {
    name: term
    for name, term in SPLIT_TERMS.items()
    if not any(isinstance(value, tuple) for _, value in term.values)
}
"""Those without a value for each class."""


def sampling(kind="cosine", *, drawn_per_step=5, correct=True, **more):
    """A head that draws some classes beside the three of ``LABELS``."""
    kind, options = KINDS[kind]
    rate = (3 + drawn_per_step - 0.5) / CLASSES
    head = tammes.ShardedHead(
        kind, SIZE, CLASSES, sample_rate=rate, correct=correct, **options, **more
    )
    return head.double()


def plain(head, index, counts):
    """A head that has each of some prototypes as often as it counts."""
    repeated = index.repeat_interleave(counts)
    whole = head.kind(SIZE, len(repeated), **head.options).double()
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            whole.get_parameter(name).copy_(
                parameter if name == "log_scale" else parameter[repeated]
            )
    return whole


def counts_of(index, labels, classes=CLASSES):
    present = labels.unique()
    share = (classes - len(present)) / (len(index) - len(present))
    assert share == int(share)
    return torch.where(torch.isin(index, present), 1, int(share))


def places(labels, index, counts):
    """The first place of each class among the repeated ones."""
    return (counts.cumsum(0) - counts)[torch.searchsorted(index, labels)]


def compare_with_plain(head, loss, **settings):
    """Loss and gradients of a sampled head are those of a plain one with the sampled classes."""
    features = (2 * normal(len(LABELS), SIZE)).requires_grad_()
    criterion = tammes.Criterion(head, loss)
    value = criterion(features, LABELS, **settings)
    value.backward()

    index = head.weight.grad.coalesce().indices()[0]
    ones = torch.ones_like(index)
    counts = counts_of(index, LABELS) if head.correct else ones
    whole = plain(head, index, counts)
    expected_features = features.detach().clone().requires_grad_()
    with_all = tammes.Criterion(whole, loss, implementation="dense")
    # A number that is learned may start at one that depends on the number of classes.
    with_all.load_state_dict(dict(criterion.states.named_parameters(prefix="states")), strict=False)
    expected = with_all(expected_features, places(LABELS, index, counts), **settings)
    expected.backward()
    for name, parameter in criterion.states.named_parameters():
        assert_close(parameter.grad, with_all.states.get_parameter(name).grad)
    assert_close(value, expected, rtol=1e-10, atol=1e-12)
    assert_close(features.grad, expected_features.grad, rtol=1e-9, atol=1e-12)
    for name, parameter in head.named_parameters():
        gradient = whole.get_parameter(name).grad
        if gradient is None:
            assert parameter.grad is None or not parameter.grad.to_dense().any()
            continue
        if name != "log_scale":
            place = torch.arange(len(index)).repeat_interleave(counts)
            gradient = torch.zeros_like(parameter).index_add_(0, index[place], gradient)
        assert_close(parameter.grad.to_dense(), gradient, rtol=1e-9, atol=1e-12)
    return value


PAIRS = [
    (name, kind)
    for kind, (head, options) in KINDS.items()
    for name, term in TERMS.items()
    if fits(term, head(SIZE, CLASSES, **options))
]


@pytest.mark.parametrize("correct", [False, True])
@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_a_sampled_loss_is_that_of_a_plain_head_with_the_sampled_classes(name, kind, correct):
    compare_with_plain(sampling(kind, correct=correct), TERMS[name])


@pytest.mark.parametrize("correct", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_sums_of_terms_are_sampled_once(name, correct):
    compare_with_plain(sampling(correct=correct), LOSSES[name])


def test_two_terms_with_thresholds_of_their_own_share_a_sample():
    compare_with_plain(sampling("linear"), tammes.hinge(margin=1.0) + tammes.hinge(margin=0.3))


def test_the_correction_changes_the_loss():
    losses = []
    for correct in (False, True):
        torch.manual_seed(0)
        losses.append(compare_with_plain(sampling(correct=correct), tammes.softmax()).item())
    assert losses[1] > losses[0] + 0.1


def test_a_margin_of_each_class_follows_the_class_not_its_place_in_the_sample():
    margins = [0.01 * c for c in range(CLASSES)]
    head = sampling()
    features = normal(len(LABELS), SIZE)
    torch.manual_seed(0)
    by_class = tammes.Criterion(copy.deepcopy(head), tammes.cosface(margin=margins))
    by_example = tammes.Criterion(head, tammes.cosface())
    own = torch.tensor(margins, dtype=torch.double)[LABELS]
    assert_close(by_class(features, LABELS), by_example(features, LABELS, margin=own))


@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_other_reductions_are_sampled_too(reduction):
    head, features = sampling(), normal(len(LABELS), SIZE)
    same_draws = copy.deepcopy(head)
    reduced = tammes.Criterion(head, tammes.cosface(), reduction=reduction)(features, LABELS)
    mean = tammes.Criterion(same_draws, tammes.cosface())(features, LABELS)
    reduced.sum().backward()
    mean.backward()
    assert_close(reduced.sum() / len(LABELS), mean)
    assert_close(head.weight.grad.to_dense() / len(LABELS), same_draws.weight.grad.to_dense())


def splits(correct, fields, draws=400):
    """What a head sees of all classes, and in each of many samples."""
    torch.manual_seed(1)
    head = sampling(drawn_per_step=5, correct=correct)
    whole = plain(head, torch.arange(CLASSES), torch.ones(CLASSES).long())
    features = normal(len(LABELS), SIZE)
    with torch.no_grad():
        full = whole.split(features, LABELS, fields)
        sampled = [head.split(features, LABELS, fields) for _ in range(draws)]
    return full, {name: torch.stack([getattr(s, name) for s in sampled]) for name in fields}


def test_the_corrected_sums_of_a_split_are_those_of_all_classes_on_average():
    full, found = splits(True, ("others", "mean", "target"))
    for values, expected in (
        (found["others"].exp(), full.others.exp()),
        (found["mean"], full.mean),
    ):
        error = values.std(0) / math.sqrt(len(values))
        assert ((values.mean(0) - expected).abs() < 4 * error).all()
        assert (error < 0.05 * expected.abs() + 0.05).all()
    # The own class is in every sample, so no draw changes its score. The whole head runs on another
    # kernel, so that its last bit depends on the processor.
    assert found["target"].eq(found["target"][0]).all()
    assert_close(found["target"][0], full.target, rtol=0, atol=1e-15)


def test_uncorrected_others_are_too_small_by_the_log_of_the_rate():
    full, found = splits(False, ("others",))
    # Of 20 absent classes 5 are drawn; the 3 that are present are never left out, and count more
    # the higher their scores are.
    short = full.others - found["others"].mean(0)
    assert (short > 0).all()
    assert 0.7 * math.log(4) < short.mean() < 1.3 * math.log(4)
    _, corrected = splits(True, ("others",))
    assert (full.others - corrected["others"].mean(0)).abs().mean() < 0.5 * short.mean()


def test_in_evaluation_all_classes_are_compared():
    head, features = sampling(), normal(len(LABELS), SIZE)
    criterion = tammes.Criterion(head, tammes.cosface()).eval()
    whole = plain(head, torch.arange(CLASSES), torch.ones(CLASSES).long())
    expected = tammes.Criterion(whole, tammes.cosface())(features, LABELS)
    assert_close(criterion(features, LABELS), expected)
    assert head.sampler.steps == 0


def test_at_rate_one_nothing_is_sampled():
    head = tammes.ShardedHead(tammes.CosineHead, SIZE, CLASSES)
    tammes.Criterion(head, tammes.cosface())(torch.randn(4, SIZE), LABELS).backward()
    assert not head.weight.grad.is_sparse
    assert "sampler.steps" not in head.state_dict()


# ------------------------------------------------------------------------------------- training


def train(criterion, optimizer, steps):
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        features = torch.randn(4, SIZE, dtype=torch.double, generator=generator)
        labels = torch.randint(criterion.head.num_classes, (4,), generator=generator)
        optimizer.zero_grad()
        loss = criterion(features, labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def in_training():
    torch.manual_seed(0)
    criterion = tammes.Criterion(sampling("linear"), tammes.softmax())
    return criterion, torch.optim.AdamW(criterion.parameters(), lr=0.1, weight_decay=0.3)


def test_only_sampled_classes_move():
    criterion, optimizer = in_training()
    head = criterion.head
    before = {name: value.detach().clone() for name, value in head.named_parameters()}
    train(criterion, optimizer, range(1))
    sampled = head.weight.grad.coalesce().indices()[0]
    left = torch.tensor([c for c in range(CLASSES) if c not in sampled.tolist()])
    assert len(left) == CLASSES - 8
    for name, value in head.named_parameters():
        assert value[left].equal(before[name][left])
        assert not (value[sampled] == before[name][sampled]).any()
        assert not optimizer.state[value]["exp_avg"][left].any()


def test_a_sampled_run_resumes_bit_for_bit():
    criterion, optimizer = in_training()
    train(criterion, optimizer, range(3))
    saved = copy.deepcopy((criterion.state_dict(), optimizer.state_dict()))
    losses = train(criterion, optimizer, range(3, 6))
    torch.manual_seed(5)
    resumed = tammes.Criterion(sampling("linear"), tammes.softmax())
    optimizer = torch.optim.AdamW(resumed.parameters(), lr=0.1, weight_decay=0.3)
    resumed.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert train(resumed, optimizer, range(3, 6)) == losses
    assert resumed.head.weight.equal(criterion.head.weight)


@pytest.fixture
def fresh_process(monkeypatch):
    """As if nobody had listened to optimizers yet."""
    # torch.optim takes the name of this module away.
    module = importlib.import_module("torch.optim.optimizer")

    def forget():
        monkeypatch.setattr(sparse_rows, "_hooks_registered", False)
        for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"):
            monkeypatch.setattr(module, name, OrderedDict())

    forget()
    return forget


@pytest.mark.parametrize("unpickled", [False, True])
def test_the_first_step_of_a_process_may_be_one_with_a_closure(unpickled, fresh_process):
    criterion, optimizer = in_training()
    if unpickled:
        stored = pickle.dumps((criterion, optimizer))
        fresh_process()
        criterion, optimizer = pickle.loads(stored)

    def closure():
        loss = criterion(normal(4, SIZE), LABELS)
        loss.backward()
        return loss

    before = criterion.head.weight.detach().clone()
    optimizer.step(closure)
    assert (criterion.head.weight != before).any(1).sum() == 8


def test_classes_that_are_added_are_sampled_and_trained():
    criterion, optimizer = in_training()
    train(criterion, optimizer, range(3))
    moments = optimizer.state[criterion.head.weight]["exp_avg"].clone()
    criterion.add_classes(4, optimizer=optimizer)
    assert optimizer.state[criterion.head.weight]["exp_avg"][:CLASSES].equal(moments)
    before = criterion.head.weight.detach().clone()
    train(criterion, optimizer, range(20))
    assert (criterion.head.weight[CLASSES:] != before[CLASSES:]).any(1).all()


def test_gradients_add_up_over_batches():
    criterion, optimizer = in_training()
    head, features = criterion.head, normal(4, SIZE)
    sums = torch.zeros_like(head.weight)
    for seed in range(2):
        labels = torch.randint(CLASSES, (4,), generator=torch.Generator().manual_seed(seed))
        twin = copy.deepcopy(criterion)
        twin.zero_grad()
        twin(features, labels).backward()
        sums += twin.head.weight.grad.to_dense()
        criterion(features, labels).backward()
    assert_close(head.weight.grad.to_dense(), sums)
    untouched = (sums == 0).all(1)
    before = head.weight.detach().clone()
    optimizer.step()
    assert untouched.any()
    assert head.weight[untouched].equal(before[untouched])
    assert (head.weight[~untouched] != before[~untouched]).all()


def test_a_term_on_the_prototypes_moves_them_all():
    torch.manual_seed(0)
    criterion = tammes.Criterion(sampling(), tammes.cosface() + 0.1 * tammes.zero_centroid())
    optimizer = torch.optim.SGD(criterion.parameters(), lr=0.1)
    before = criterion.head.weight.detach().clone()
    train(criterion, optimizer, range(1))
    assert not criterion.head.weight.grad.is_sparse
    assert (criterion.head.weight != before).any(1).all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
def test_a_compiled_criterion_samples_and_trains_alike():
    criterion, optimizer = in_training()
    twin, twin_optimizer = in_training()
    torch._dynamo.reset()
    compiled = torch.compile(criterion)
    for seed in range(2):
        features = normal(4, SIZE, seed=seed)
        loss, expected = compiled(features, LABELS), twin(features, LABELS)
        assert_close(loss, expected)
        loss.backward()
        expected.backward()
        optimizer.step()
        twin_optimizer.step()
        assert_close(criterion.head.weight, twin.head.weight)


# ---------------------------------------------------------------------------------- several ranks

BATCHES = (torch.tensor([0, 3, 8, 3, 0]), torch.tensor([25, 30, 41]))
"""Labels of two ranks with 23 classes each; the second one's batch is filled up with class 0."""


def features_of(rank):
    return normal(len(BATCHES[rank]), SIZE, seed=rank)


def on_two_ranks(group, name, correct, averaged):
    torch.manual_seed(7)
    head = tammes.ShardedHead(
        tammes.CosineHead,
        SIZE,
        2 * CLASSES,
        group=group,
        scale=8.0,
        sample_rate=12.5 / CLASSES,
        correct=correct,
        averaged=averaged,
    ).double()
    criterion = tammes.Criterion(head, LOSSES[name])
    features = features_of(head.group.rank).requires_grad_()
    loss = criterion(features, BATCHES[head.group.rank])
    loss.backward()
    gradient = head.weight.grad.coalesce()
    rows = gradient.indices()[0] + head.start
    return head.weight.detach(), loss.item(), features.grad, rows, gradient.values()


@pytest.mark.parametrize("averaged", [True, False])
@pytest.mark.parametrize("correct", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_two_ranks_sample_their_own_classes_for_everybodys_examples(name, correct, averaged):
    results = everywhere(2, on_two_ranks, name, correct, averaged)
    weights, losses, features, rows, gradients = zip(*results, strict=True)
    assert losses[0] == losses[1]
    assert [len(index) for index in rows] == [13, 13]

    index, labels = torch.cat(rows), torch.cat(BATCHES)
    counts = torch.ones_like(index)
    if correct:
        halves = [counts_of(part, batch) for part, batch in zip(rows, BATCHES, strict=True)]
        counts = torch.cat(halves)
        assert sorted(set(counts.tolist())) == [1, 2]
    whole = tammes.CosineHead(SIZE, int(counts.sum()), scale=8.0).double()
    with torch.no_grad():
        whole.weight.copy_(torch.cat(weights)[index.repeat_interleave(counts)])
    everything = torch.cat([features_of(0), features_of(1)]).requires_grad_()
    expected = tammes.Criterion(whole, LOSSES[name])(everything, places(labels, index, counts))
    expected.backward()

    assert losses[0] == pytest.approx(expected.item(), rel=1e-10)
    factor = 2 if averaged else 1
    assert_close(torch.cat(features), factor * everything.grad, rtol=1e-9, atol=1e-12)
    place = torch.arange(len(index)).repeat_interleave(counts)
    gradient = torch.zeros(len(index), SIZE, dtype=torch.double)
    gradient.index_add_(0, place, whole.weight.grad)
    assert_close(torch.cat(gradients), gradient, rtol=1e-9, atol=1e-12)
