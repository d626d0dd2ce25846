"""The criterion notices when nobody trains its prototypes, and only then."""

import copy
import warnings

import pytest
import torch
from torch import nn

import tammes


def train(steps, *, hold_criterion, accumulate=1, write=None):
    """Warnings of a short training of a backbone with a criterion."""
    backbone, criterion = nn.Linear(4, 4), tammes.CosFace(4, 3)
    params = [*backbone.parameters(), *(criterion.parameters() if hold_criterion else [])]
    optimizer = torch.optim.SGD(params, lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(steps):
            criterion(backbone(torch.randn(6, 4)), torch.randint(3, (6,))).backward()
            if (step + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
                if write is not None:
                    write(criterion)
    assert {w.filename for w in caught} <= {__file__}
    return [str(w.message) for w in caught]


def test_it_warns_once_when_the_optimizer_does_not_hold_the_prototypes():
    messages = train(20, hold_criterion=False)
    assert len(messages) == 1
    assert "did not change in 3 steps" in messages[0]
    assert "param_groups" in messages[0]


def test_it_says_nothing_when_the_prototypes_are_trained():
    assert train(20, hold_criterion=True) == []


def test_accumulating_gradients_is_no_neglect():
    assert train(20, hold_criterion=True, accumulate=10) == []
    assert train(20, hold_criterion=False, accumulate=20) == []


def train_in_turns(every, *, hold_criterion):
    """Warnings where the prototypes have an optimizer of their own, which steps now and then."""
    backbone, criterion = nn.Linear(4, 4), tammes.CosFace(4, 3)
    often = torch.optim.SGD(backbone.parameters(), lr=0.1)
    held = criterion.parameters() if hold_criterion else [nn.Parameter(torch.zeros(1))]
    seldom = torch.optim.SGD(held, lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(20):
            criterion(backbone(torch.randn(6, 4)), torch.randint(3, (6,))).backward()
            often.step()
            often.zero_grad()
            if (step + 1) % every == 0:
                seldom.step()
                seldom.zero_grad()
    return [str(w.message) for w in caught]


@pytest.mark.parametrize("every", [1, 3, 5, 100])
def test_an_optimizer_that_holds_the_prototypes_and_steps_seldom_is_no_neglect(every):
    assert train_in_turns(every, hold_criterion=True) == []
    assert len(train_in_turns(every, hold_criterion=False)) == 1


def test_an_optimizer_that_writes_past_the_version_number_is_no_neglect():
    def write(criterion):
        criterion.head.weight.data += 0.1

    assert train(20, hold_criterion=False, write=write) == []


@pytest.mark.parametrize("frozen", ["prototypes", "backbone", "evaluation"])
def test_what_is_frozen_on_purpose_is_no_neglect(frozen):
    backbone, criterion = nn.Linear(4, 4), tammes.CosFace(4, 3)
    other = nn.Parameter(torch.zeros(1))
    criterion.requires_grad_(frozen != "prototypes")
    backbone.requires_grad_(frozen != "backbone")
    criterion.train(frozen != "evaluation")
    optimizer = torch.optim.SGD([other], lr=0.1)
    for _ in range(10):
        loss = criterion(backbone(torch.randn(6, 4)), torch.randint(3, (6,))) + other.sum()
        loss.backward()
        optimizer.step()


def test_prototypes_that_no_term_uses_are_no_neglect():
    backbone, criterion = nn.Linear(4, 4), tammes.Criterion(tammes.CosineHead(4, 3), tammes.nca())
    optimizer = torch.optim.SGD([*backbone.parameters(), *criterion.parameters()], lr=0.1)
    for _ in range(10):
        criterion(backbone(torch.randn(6, 4)), torch.randint(3, (6,))).backward()
        optimizer.step()


def test_a_watched_criterion_copies_and_a_copy_is_watched_for_itself():
    criterion = tammes.CosFace(4, 3)
    criterion(torch.randn(2, 4, requires_grad=True), torch.tensor([0, 1]))
    copy.deepcopy(criterion)(torch.randn(2, 4, requires_grad=True), torch.tensor([0, 1]))
