"""Heads: what they compare, what they keep, and classes that come and go."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from catalogue import HEADS
from cover import slow
from torch import nn
from torch.testing import assert_close

import tammes
from tammes.heads import carry_over


def test_linear_scores_are_those_of_a_linear_layer():
    layer, head = nn.Linear(4, 3), tammes.LinearHead(4, 3)
    head.load_state_dict(layer.state_dict())
    features = torch.randn(5, 4)
    assert_close(head.logits(features), layer(features))


def test_linear_scale_multiplies_bias_too():
    head = tammes.LinearHead(4, 3, scale=5.0)
    features = torch.randn(5, 4)
    assert_close(head.logits(features), 5 * F.linear(features, head.weight, head.bias))


def test_cosine_scores_are_scaled_cosines_whatever_the_norms():
    head = tammes.CosineHead(4, 3, scale=7.0)
    features = torch.randn(5, 4)
    expected = 7 * F.cosine_similarity(features[:, None], head.weight, dim=2)
    assert_close(head.logits(features), expected)
    with torch.no_grad():
        head.weight *= torch.tensor([[0.1], [1.0], [10.0]])
    assert_close(head.logits(3 * features), expected)


def test_cosine_with_raw_features_keeps_their_length():
    head = tammes.CosineHead(4, 3, scale=1.0, normalize_features=False)
    features = torch.randn(5, 4)
    assert_close(head.logits(features), features @ F.normalize(head.weight).T)


def test_gaussian_scores_are_negative_half_squared_distances():
    head = tammes.GaussianHead(4, 3)
    features = torch.randn(5, 4)
    assert_close(head.logits(features), -torch.cdist(features, head.weight).square() / 2)


def test_gaussian_scores_keep_their_digits_far_from_the_origin():
    head = tammes.GaussianHead(512, 10)
    with torch.no_grad():
        head.weight.mul_(0.05).add_(3.0)
    features = torch.randn(8, 512) * 0.05 + 3.0
    exact = -torch.cdist(features.double(), head.weight.double()).square() / 2
    assert_close(head.logits(features).double(), exact, atol=2e-6, rtol=1e-5)


def test_simplex_prototypes_are_fixed_and_saved():
    head = tammes.SimplexHead(5, 4)
    assert list(head.parameters()) == []
    assert list(head.state_dict()) == ["weight"]
    assert_close(head.prototypes @ head.prototypes.T, torch.eye(4) * 4 / 3 - 1 / 3)


@pytest.mark.parametrize(("size", "classes", "degrees"), [(4, 8, 90.0), (3, 8, 74.8585)])
def test_more_classes_than_corners_stand_as_far_apart_as_they_can(size, classes, degrees):
    prototypes = tammes.SimplexHead(size, classes).prototypes
    largest = (prototypes @ prototypes.T - 2 * torch.eye(classes)).max()
    assert_close(largest.acos().rad2deg(), torch.tensor(degrees), atol=0.02, rtol=0)


@pytest.mark.parametrize("name", HEADS)
def test_the_split_of_a_head_is_that_of_its_similarities(name):
    head = HEADS[name](6, 5, scale=3.0).double()
    features, labels = torch.randn(7, 6, dtype=torch.double), torch.randint(5, (7,))
    got = head.split(features, labels)
    expected = tammes.split(head.logits(features) / head.scale, labels)
    for field in ("target", "hardest"):
        assert_close(getattr(got, field), getattr(expected, field))
    scaled = tammes.split(head.logits(features), labels)
    for field in ("others", "expected", "mean"):
        assert_close(getattr(got, field), getattr(scaled, field))
    assert_close(got.norm, features.norm(dim=1))
    centers = head.weight.view(5, -1, 6)[labels]
    cosine = F.cosine_similarity(features[:, None], centers, dim=-1).amax(1)
    assert_close(got.cosine, cosine)
    if head.has_angle:
        assert_close(got.length * got.cosine, got.target)


@pytest.mark.parametrize("name", HEADS)
def test_a_head_without_labels_gives_scores(name):
    head = HEADS[name](6, 5)
    features = torch.randn(7, 6)
    assert_close(head(features), head.logits(features))


@pytest.mark.parametrize("implementation", ["dense", "streamed"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_labels_of_any_integer_type_split_the_same(dtype, implementation):
    head = tammes.LinearHead(4, 3, implementation=implementation)
    with torch.no_grad():
        head.bias[1] = -torch.inf
    features, labels = torch.randn(5, 4), torch.tensor([0, 2, 0, 0, 2])
    found, expected = head.split(features, labels.to(dtype)), head.split(features, labels)
    for name in ("target", "others", "labels"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


def test_a_learnable_scale_stays_positive_and_starts_where_adacos_does():
    head = tammes.CosineHead(4, 101, scale="learnable")
    assert_close(head.scale.item(), 2**0.5 * torch.tensor(100.0).log().item())
    with torch.no_grad():
        head.log_scale -= 100
    assert head.scale > 0


@pytest.mark.parametrize("implementation", ["dense", "streamed"])
def test_the_gradient_of_a_learnable_scale_is_formula_7_4(implementation):
    # s dl/ds = (1 - p) E_q f + p f_y - f_y for the softmax.
    head = tammes.CosineHead(4, 6, scale="learnable", implementation=implementation).double()
    features, labels = torch.randn(8, 4, dtype=torch.double), torch.randint(6, (8,))
    tammes.Criterion(head, tammes.softmax())(features, labels).backward()
    split = head.split(features, labels)
    score = split.scale * split.target
    miss = torch.sigmoid(split.others - score)
    expected = (miss * (split.expected - score)).mean()
    assert_close(head.log_scale.grad, expected.detach().view(1))


@pytest.mark.parametrize(
    "kind", [tammes.CosineHead, partial(tammes.ShardedHead, tammes.CosineHead)]
)
@pytest.mark.parametrize("assign", [True, False])
def test_a_learned_scale_is_loaded_with_a_dimension_or_without(kind, assign):
    head = kind(4, 6, scale="learnable")
    for older in (torch.tensor(0.5), torch.tensor([0.5])):
        head.load_state_dict({**head.state_dict(), "log_scale": older}, assign=assign)
        assert head.log_scale.shape == (1,)
        assert_close(head.scale, torch.tensor(0.5).exp())
    with pytest.raises(RuntimeError, match="size mismatch for log_scale"):
        head.load_state_dict({**head.state_dict(), "log_scale": torch.zeros(2)})


# --------------------------------------------------------------------- classes come and go


@pytest.mark.parametrize("name", HEADS)
def test_added_classes_leave_the_others_bit_for_bit(name):
    head = HEADS[name](6, 5)
    before, features = copy.deepcopy(head), torch.randn(7, 6)
    head.add_classes(2)
    assert head.num_classes == 7
    assert torch.equal(head.weight[:5], before.weight)
    assert_close(head.logits(features)[:, :5], before.logits(features), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", HEADS)
def test_removed_classes_leave_the_others_bit_for_bit(name):
    head = HEADS[name](6, 5)
    before = copy.deepcopy(head)
    head.remove_classes([3, 0])
    assert torch.equal(head.weight, before.weight[[1, 2, 4]])
    if head.bias is not None:
        assert torch.equal(head.bias, before.bias[[1, 2, 4]])


@pytest.mark.parametrize(
    "name", ["linear", "cosine", "cosine_raw_features", "cosine_subcenters", "simplex"]
)
def test_new_prototypes_point_where_their_features_do(name):
    head = HEADS[name](6, 5)
    features = torch.randn(2, 10, 6) * 0.1 + torch.randn(2, 1, 6)
    length = head.weight.detach().norm(dim=-1).mean()
    head.add_classes(2, from_features=features)
    first = head.weight[5:].view(2, -1, 6)[:, 0]
    assert_close(F.cosine_similarity(first, features.mean(1)), torch.ones(2))
    assert_close(first.norm(dim=1), length.expand(2))


def test_new_gaussians_stand_on_the_mean_of_their_features():
    head = tammes.GaussianHead(6, 5)
    features = torch.randn(2, 10, 6)
    head.add_classes(2, from_features=features)
    assert_close(head.weight[5:].detach(), features.mean(1))


def test_new_simplex_prototypes_stand_in_the_gaps():
    # Two of four corners of a square: the new ones belong at the other two.
    head = tammes.SimplexHead(3, 4)
    head.remove_classes([3])
    head.add_classes(1)
    cosine = head.prototypes @ head.prototypes.T
    assert_close(cosine[3, :3], torch.full((3,), -1 / 3), atol=5e-3, rtol=0)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimizer_goes_on_as_if_the_classes_had_always_been_there(optimizer):
    options = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}
    head = tammes.LinearHead(6, 5)
    opt = optimizer(head.parameters(), lr=0.1, **options)

    def train(labels):
        opt.zero_grad()
        tammes.Criterion(head, tammes.softmax())(torch.ones(4, 6), labels).backward()
        opt.step()

    train(torch.tensor([0, 1, 2, 3]))
    key = "momentum_buffer" if optimizer is torch.optim.SGD else "exp_avg"
    old = opt.state[head.weight][key].clone()
    head.add_classes(2, optimizer=opt)
    held = opt.param_groups[0]["params"]
    assert held[0] is head.weight
    assert held[1] is head.bias
    assert torch.equal(opt.state[head.weight][key][:5], old)
    assert torch.equal(opt.state[head.weight][key][5:], torch.zeros(2, 6))
    head.remove_classes([0, 6], optimizer=opt)
    assert torch.equal(opt.state[head.weight][key][:4], old[1:])
    before = head.weight.detach().clone()
    train(torch.tensor([0, 1, 4, 4]))
    assert not torch.equal(head.weight, before)
    assert len(opt.state) == 2


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "maximize": lambda p: torch.optim.Adam(p, lr=0.01, maximize=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.0),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.5),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01, t0=0.0),
}


def moves(parameter, optimizer, gradients):
    """How far each row goes in each step."""
    found = []
    for gradient in gradients:
        before = parameter.detach().clone()
        parameter.grad = gradient.expand_as(parameter).clone()
        optimizer.step()
        found.append((parameter.detach() - before).abs().amax(1))
    return torch.stack(found)


@pytest.mark.parametrize("small", [1.0, slow(0.3), 1e-3], ids=["alike", "smaller", "converged"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_new_classes_first_move_no_further_than_those_of_a_new_head(name, small):
    head = tammes.CosineHead(6, 5)
    optimizer = OPTIMIZERS[name](head.parameters())
    # Gradients of old classes, small in the end.
    moves(head.weight, optimizer, small * torch.ones(1500, 1, 1))
    head.add_classes(2, optimizer=optimizer)
    new = head.weight.detach()[5:].clone()
    later = torch.tensor([0.3, 0.2, -0.3, 0.1, 0.3, 0.2, 0.3, -0.1, 0.3, 0.3]).view(-1, 1, 1)
    found = moves(head.weight, optimizer, later)[:, 5:]
    fresh_weight = nn.Parameter(new)
    fresh = moves(fresh_weight, OPTIMIZERS[name]([fresh_weight]), later)
    if name == "radam":
        # A new one first goes by the gradient itself, and later as Adam does.
        fresh = torch.full_like(fresh, 0.01)
    assert (found[0] <= 1.05 * fresh[0]).all()
    assert found.max() <= 1.05 * fresh.max()
    if small < 0.3 and name not in ("adadelta", "rmsprop", "asgd", "nadam", "radam"):
        assert_close(found[0], fresh[0], rtol=0.01, atol=0)
    if small < 0.3 and name in ("nadam", "radam"):
        # They count the steps in ways of their own.
        assert (found[0] > 0.7 * fresh[0]).all()
    if name == "asgd":
        assert_close(optimizer.state[head.weight]["ax"][5:], new, rtol=0, atol=0.05)


def test_missing_gradient_is_waited_for_and_others_are_not_touched():
    head = tammes.CosineHead(6, 5)
    optimizer = torch.optim.Adam(head.parameters(), lr=0.01)
    moves(head.weight, optimizer, torch.ones(100, 1, 1))
    head.add_classes(2, optimizer=optimizer)
    optimizer.zero_grad()
    optimizer.step()
    twin = copy.deepcopy(optimizer.state[head.weight])
    found = moves(head.weight, optimizer, torch.full((1, 1, 1), 5.0))[0]
    assert_close(found[5:], torch.full((2,), 0.01), rtol=0.05, atol=0)
    assert_close(optimizer.state[head.weight]["exp_avg"][:5], 0.9 * twin["exp_avg"][:5] + 0.5)
    # Only the first gradient counts as if it had always been there.
    moves(head.weight, optimizer, torch.zeros(1, 1, 1))
    assert_close(
        optimizer.state[head.weight]["exp_avg"][5:], torch.full((2, 6), 4.5 * (1 - 0.9**101))
    )


def test_state_with_one_number_per_class_is_carried_too():
    head = tammes.CosineHead(6, 5)
    optimizer = torch.optim.Adafactor(head.parameters(), lr=0.1)
    tammes.Criterion(head, tammes.cosface())(torch.ones(2, 6), torch.tensor([0, 1])).backward()
    optimizer.step()
    head.add_classes(2, optimizer=optimizer)
    optimizer.zero_grad()
    tammes.Criterion(head, tammes.cosface())(torch.ones(2, 6), torch.tensor([5, 6])).backward()
    optimizer.step()


@pytest.mark.parametrize("head", [tammes.SimplexHead(6, 5), tammes.CosineHead(6, 5)])
def test_prototypes_that_are_not_trained_need_no_optimizer(head):
    head.requires_grad_(False)
    head.add_classes(1, optimizer=torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1))
    assert head.num_classes == 6


def test_an_optimizer_that_never_held_the_parameter_is_refused():
    stranger = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    old, new = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(3, 3))
    with pytest.raises(
        ValueError, match="an optimizer that holds the parameter, got SGD that does not"
    ):
        carry_over(stranger, old, new, torch.arange(2))


def test_a_refused_change_of_classes_changes_nothing():
    head = tammes.LinearHead(6, 5)
    before = copy.deepcopy(head.state_dict())
    stranger = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    for change in (
        lambda: head.add_classes(2, torch.zeros(3, 6)),
        lambda: head.add_classes(0),
        lambda: head.add_classes(1, optimizer=stranger),
        lambda: head.add_classes(1, optimizer=torch.optim.SGD([head.weight], lr=0.1)),
        lambda: head.remove_classes([5]),
        lambda: head.remove_classes([0, 1, 2, 3]),
    ):
        with pytest.raises(ValueError, match="expects"):
            change()
        assert_close(dict(head.state_dict()), dict(before), rtol=0, atol=0)
