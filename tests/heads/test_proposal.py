"""Classes sampled by a proposal, and the log-q correction."""

import copy
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from rank_pool import everywhere
from torch.testing import assert_close

import tammes
from tammes.heads.class_sampling import sample

CLASSES = 40
CHANCES = torch.arange(1, CLASSES + 1).double() ** 1.5
LABELS = torch.tensor([3, 7, 7, 31])


def batch(dtype=torch.double):
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.double)
    return x.to(dtype).requires_grad_(), LABELS


def head(**options):
    torch.manual_seed(0)
    options = {"sample_rate": 0.4, "proposal": CHANCES, "correct": True, "scale": 8.0} | options
    return tammes.ShardedHead(tammes.CosineHead, 6, CLASSES, **options)


@pytest.mark.parametrize("proposal", [CHANCES, torch.ones(CLASSES)], ids=["given", "alike"])
def test_sums_over_a_sample_are_unbiased(proposal):
    values = torch.rand(CLASSES, generator=torch.Generator().manual_seed(2), dtype=torch.double)
    found = []
    for key in range(3000):
        chosen = sample(LABELS, CLASSES, 0.4, 7919 * key, proposal=proposal)
        found.append(chosen.counts.double() @ values[chosen.index])
    found = torch.stack(found)
    error = found.std() / math.sqrt(len(found))
    assert abs(found.mean() - values.sum()) < 4 * error
    assert error < 0.05 * values.sum()


def test_likely_classes_are_drawn_more_often():
    drawn = torch.zeros(CLASSES)
    for key in range(500):
        drawn[sample(LABELS, CLASSES, 0.4, 7919 * key, proposal=CHANCES).index] += 1
    assert (drawn[LABELS] == 500).all()
    assert drawn[0] < drawn[10] < drawn[20] < drawn[39]


def test_a_sample_has_each_class_once_and_those_of_the_batch_as_one():
    chosen = sample(LABELS, CLASSES, 0.4, 5, proposal=CHANCES)
    assert len(chosen.index) == 16 == len(chosen.index.unique())
    assert torch.equal(chosen.index[chosen.own], LABELS)
    assert (chosen.counts[chosen.own] == 1).all()
    assert (chosen.counts >= 1).all()
    again = sample(LABELS, CLASSES, 0.4, 5, proposal=1000 * CHANCES)
    # Only the ratios of a proposal count.
    assert torch.equal(again.index, chosen.index)
    assert_close(again.counts, chosen.counts)


def test_masked_classes_are_drawn_last_and_count_for_none():
    masked = torch.arange(CLASSES) >= 8
    masked[31] = False
    chosen = sample(LABELS, CLASSES, 0.4, 5, masked=masked, proposal=CHANCES)
    # Of the nine that are not masked all are there, so each stands for itself.
    assert set(range(8)) | {31} <= set(chosen.index.tolist())
    assert_close(chosen.counts, (~masked[chosen.index]).float())


@pytest.mark.parametrize("correct", [False, True])
@pytest.mark.parametrize("dtype", [torch.double, torch.float32])
@pytest.mark.parametrize("implementation", ["dense", "streamed"])
def test_a_loss_is_that_of_scores_with_the_log_q_correction(implementation, dtype, correct):
    made = tammes.Criterion(
        head(correct=correct), tammes.cosface(margin=0.2), implementation=implementation
    ).to(dtype)
    x, y = batch(dtype)
    index, own, counts = sample(y, CLASSES, 0.4, made.head.sampler.key, proposal=CHANCES.float())
    assert counts.max() > 2
    weight = made.head.weight
    scores = 8 * F.normalize(x) @ F.normalize(weight).T - 1.6 * F.one_hot(y, CLASSES).to(dtype)
    corrected = scores[:, index] + (counts.to(dtype).log() if correct else 0.0)
    expected = F.cross_entropy(corrected, own)
    loss = made(x, y)
    close = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-9}
    assert_close(loss, expected, **close)
    found, wanted = (torch.autograd.grad(value, [x, weight]) for value in (loss, expected))
    assert_close([g.to_dense() for g in found], list(wanted), **close)


def test_with_every_class_in_the_sample_it_is_the_plain_loss():
    made = tammes.Criterion(head(sample_rate=0.99), tammes.cosface()).double()
    x, y = batch()
    assert len(sample(y, CLASSES, 0.99, 0, proposal=CHANCES).index) == CLASSES
    loss = made(x, y)
    assert_close(loss, made.eval()(x, y), rtol=1e-12, atol=1e-12)


def test_a_copy_and_a_resumed_head_draw_the_same():
    made = tammes.Criterion(head(), tammes.cosface()).double()
    x, y = batch()
    made(x, y)
    copied, resumed = copy.deepcopy(made), tammes.Criterion(head(), tammes.cosface()).double()
    resumed.load_state_dict(made.state_dict())
    assert "head.sampler.proposal" not in made.state_dict()
    expected = made(x, y)
    assert torch.equal(copied(x, y), expected)
    assert torch.equal(resumed(x, y), expected)
    assert not torch.equal(made(x, y), expected)


def on_ranks(group):
    """Losses of several samples on all ranks, and how often each class of this one was drawn."""
    made = tammes.Criterion(head(group=group), tammes.cosface()).double()
    rank = torch.distributed.get_rank(group)
    x, y = (tensor[2 * rank : 2 * rank + 2] for tensor in batch())
    losses, drawn = [], torch.zeros(len(made.head.weight))
    for _ in range(30):
        made.zero_grad()
        losses.append(made(x, y).item())
        made(x, y).backward()
        drawn[made.head.weight.grad.coalesce().indices()[0]] += 1
    return losses, drawn


def test_each_rank_draws_from_its_own_part_of_the_proposal():
    (losses, first), (others, second) = everywhere(2, on_ranks)
    assert losses == others
    drawn = torch.cat([first, second])
    assert len(drawn) == CLASSES
    for few, many in itertools.pairwise((drawn[:3], drawn[17:20])):
        assert few.sum() < many.sum()
    assert drawn[20:24].sum() < drawn[36:].sum()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: head(proposal=[1.0, 2.0]), r"a proposal of 40 positive numbers.*shape \(2,\)"),
        (lambda: head(proposal=CHANCES - 1), "positive numbers.*smallest 0"),
        (lambda: head(sample_rate=1.0), "a sample_rate below 1 with a proposal, got 1"),
        (lambda: head().add_classes(1), "the same classes as long as it has a proposal"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call()
