"""Where parts of the kernels meet: weights, counts, ties, half precision, classes elsewhere."""

import copy

import pytest
import torch
from blocks import cut
from catalogue import HEADS
from torch.testing import assert_close

import tammes
from tammes.criterion import evaluate_terms
from tammes.distributed.process_group import RankGroup
from tammes.kernels import dispatch, tiling
from tammes.kernels.problem import Problem, Share, adjusted
from tammes.kernels.score_map import MappedRows
from tammes.kernels.streamed.score_blocks import Block
from tammes.kernels.tiling import Plan
from tammes.similarity import InnerProduct

try:
    from tammes.kernels.fused import launch as tiles
except ImportError:
    tiles = None

FUSED_HERE = tiles is not None and (tiles.INTERPRETED or torch.cuda.is_available())
needs_fused = pytest.mark.skipif(not FUSED_HERE, reason="neither a GPU nor TRITON_INTERPRET=1")
pytestmark = [
    pytest.mark.kernel,
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WAYS = ["streamed", pytest.param("fused", marks=needs_fused)]
SMOOTHED = tammes.softmax(smoothing=0.2) + 0.3 * tammes.logit_divergence()
EVERYTHING = SMOOTHED + tammes.hard_bias()
SUMS = tammes.hinge(margin=0.5) + 0.7 * tammes.bce()
ALL = frozenset(("others", "expected", "mean", "softplus"))


def everything(head, loss, features, labels, implementation, weights=None, **options):
    """Loss, terms and every gradient of one call, in double precision on the CPU."""
    # Not a copy of the module alone: a problem of its own stays with it.
    head, problem = copy.deepcopy(head).to(DEVICE), head.__dict__.get("problem")
    if problem is not None:
        head.problem = problem(head)
    head.implementation = implementation
    criterion = tammes.Criterion(head, loss, **options)
    x = features.to(DEVICE, copy=True).requires_grad_()
    weights = None if weights is None else weights.to(DEVICE)
    value = criterion(x, labels.to(DEVICE), weights=weights)
    (
        1.5 * value * torch.arange(1, value.numel() + 1, device=DEVICE).view_as(value)
    ).sum().backward()
    found = {"loss": value.detach(), "features": x.grad, **criterion.terms}
    for name, parameter in criterion.named_parameters():
        found[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return {name: tensor.double().cpu() for name, tensor in found.items()}


def plain_numbers(scores, own, counts):
    """The numbers of a block by their definitions."""
    other = torch.ones_like(scores).scatter(1, own.clamp_min(0)[:, None], 0.0)
    other = torch.where((own >= 0)[:, None], other, 1.0) * counts
    others = (scores + other.log()).logsumexp(1)
    softmax = other * (scores - others[:, None]).exp()
    return {
        "others": others,
        "expected": (softmax * scores).sum(1),
        "mean": (other * scores).sum(1),
        "softplus": (other * (1 + scores.exp()).log()).sum(1),
    }


@pytest.mark.parametrize("wanted", [*([name] for name in sorted(ALL)), sorted(ALL)])
@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("maps", [False, True])
def test_the_gradient_of_a_block_is_that_of_its_numbers(wanted, counted, maps):
    scores = torch.randn(4, 5, dtype=torch.double)
    own = torch.tensor([0, 3, -1, -1])
    counts = torch.tensor([1.0, 2.5, 4.0, 1.0, 3.0], dtype=torch.double)
    counts = counts if counted else torch.ones_like(counts)
    leaf = scores.clone().requires_grad_()
    of_rows = (2 + torch.rand(2, 4, dtype=torch.double)).requires_grad_().unbind()
    mapped = MappedRows(lambda a, factor: a * (factor + a), of_rows) if maps else None
    numbers = plain_numbers(mapped(leaf) if maps else leaf, own, counts)
    d_numbers = {name: torch.randn(4, dtype=torch.double) for name in wanted}
    total = sum((numbers[n] * d).sum() for n, d in d_numbers.items())
    d_scores, *d_rows = torch.autograd.grad(total, [leaf, *(of_rows if maps else ())])
    block = Block(scores.clone(), own, frozenset(wanted), counts if counted else None, mapped)
    for name in wanted:
        assert_close(block.numbers[name], numbers[name].detach())
    factor = block.overwrite_with_gradient(d_numbers)
    assert_close(block.scores * factor[:, None], d_scores)
    assert_close(block.d_numbers, d_rows)


def test_a_block_of_which_nobody_wants_anything_gives_nothing():
    scores, own = torch.randn(3, 4), torch.tensor([0, 1, -1])
    for reads in (("others",), ("expected",), ("mean",), ("hardest",)):
        block = Block(scores.clone(), own, frozenset(reads))
        factor = block.overwrite_with_gradient(dict.fromkeys(reads))
        assert_close(block.scores * factor[:, None], torch.zeros(3, 4))


@pytest.mark.parametrize("number", ["others", "expected", "mean", "softplus"])
def test_a_block_of_the_own_class_alone_gives_no_gradient(number):
    block = Block(torch.randn(2, 1), torch.tensor([0, 0]), frozenset((number,)))
    factor = block.overwrite_with_gradient({number: torch.ones(2)})
    assert_close(block.scores * factor[:, None], torch.zeros(2, 1))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("thin", [False, True])
@pytest.mark.parametrize("name", ["linear", "cosine", "gaussian"])
def test_every_gradient_has_the_weight_of_its_row(monkeypatch, way, thin, name):
    cut(monkeypatch, 4, 3, thin=thin)
    dtype = torch.double if way == "streamed" else torch.float
    head = HEADS[name](6, 9, scale="learnable").to(dtype)
    features, labels = torch.randn(11, 6, dtype=dtype), torch.randint(9, (11,))
    weights = torch.linspace(0.0, 3.0, 11, dtype=dtype)
    loss = EVERYTHING if way == "fused" else EVERYTHING + SUMS
    arguments = head, loss, features, labels
    tolerance = {"rtol": 5e-5, "atol": 5e-5} if way == "fused" else {}
    found = everything(*arguments, way, weights)
    assert_close(found, everything(*arguments, "dense", weights), **tolerance)


def shared(head, own, **options):
    """A head whose prototypes are not all there are; lives through a copy."""
    share = Share(own.to(DEVICE), **{"classes": 20, "group": RankGroup(), **options})
    head.problem = lambda copied: (
        lambda features, labels=None: type(copied).problem(copied, features)._replace(share=share)
    )
    return head


@pytest.mark.parametrize("name", ["cosine", "linear", "gaussian"])
@pytest.mark.parametrize("thin", [False, True])
def test_sums_over_classes_count_each_as_often_as_it_stands_for(monkeypatch, name, thin):
    counts = torch.tensor([1.0, 1.0, 1.0, 3.0, 3.0, 1.0, 2.0], dtype=torch.double)
    many = counts.long()
    head = HEADS[name](6, 7, scale="learnable").double()
    whole = HEADS[name](6, int(many.sum()), scale="learnable").double()
    with torch.no_grad():
        for key, value in head.named_parameters():
            target = dict(whole.named_parameters())[key]
            target.copy_(value if key == "log_scale" else value.repeat_interleave(many, 0))
    features, labels = torch.randn(11, 6, dtype=torch.double), torch.randint(3, (11,))
    expected = everything(whole, SMOOTHED + SUMS, features, labels, "dense")
    cut(monkeypatch, 4, 2, thin=thin)
    few = shared(head, labels, classes=12, counts=counts.to(DEVICE))
    found = everything(few, SMOOTHED + SUMS, features, labels, "streamed")
    for key, value in found.items():
        truth = expected[key]
        if truth.ndim and truth.shape != value.shape:
            truth = torch.stack([piece.sum(0) for piece in truth.split(many.tolist())])
        assert_close(value, truth)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("thin", [False, True])
def test_classes_that_are_left_out_are_not_there(monkeypatch, way, thin):
    # As with negative sampling: 9 of 20 classes, and those of the batch are among them.
    head, labels = HEADS["linear"](6, 9, scale="learnable"), torch.randint(9, (11,))
    features = torch.randn(11, 6)
    loss = EVERYTHING if way == "fused" else EVERYTHING + SUMS
    truth = everything(head.double(), loss, features.double(), labels, "dense")
    cut(monkeypatch, 4, 2, thin=thin)
    some = shared(head.float(), labels, classes=20)
    assert_close(everything(some, loss, features, labels, way), truth, rtol=5e-5, atol=5e-5)


@needs_fused
@pytest.mark.parametrize("name", ["cosine", "linear", "gaussian"])
@pytest.mark.parametrize("counted", [False, True])
def test_fused_is_streamed_where_some_have_their_class_elsewhere(name, counted):
    counts = torch.tensor([1.0, 1.0, 2.0, 3.0, 1.0], device=DEVICE) if counted else None
    own = torch.tensor([0, -1, 1, -1, 4, 4, -1])
    head = shared(HEADS[name](6, 5, scale="learnable"), own, counts=counts)
    features, labels = torch.randn(7, 6), torch.zeros(7, dtype=torch.long)
    weights = torch.linspace(0.5, 2.0, 7)
    found = everything(head, EVERYTHING, features, labels, "fused", weights)
    double = shared(
        copy.deepcopy(head).double(), own, counts=counts if counts is None else counts.double()
    )
    truth = everything(double, EVERYTHING, features.double(), labels, "streamed", weights.double())
    assert_close(found, truth, rtol=5e-5, atol=5e-5)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("thin", [False, True])
def test_a_row_whose_own_class_is_the_only_one_here_has_no_rivals(monkeypatch, way, thin):
    cut(monkeypatch, 4, 3, thin=thin)
    head = shared(HEADS["cosine"](6, 2, scale="learnable"), torch.tensor([0, -1]))
    with torch.no_grad():
        head.weight = torch.nn.Parameter(head.weight[:1])
    features, labels = torch.randn(2, 6), torch.tensor([0, 0])
    loss = tammes.softmax()
    found = everything(head, loss, features, labels, way, reduction="sum")
    assert all(value.isfinite().all() for value in found.values())
    # The first example is alone with its class; the second has one rival, and no class.
    assert_close(found["features"][0], torch.zeros(6, dtype=torch.double))
    assert found["features"][1].norm() > 0


def test_a_row_without_rivals_here_has_no_hardest_class_here():
    # Else its own class, the only one here, would be the hardest one of all ranks.
    head = tammes.LinearHead(6, 2, bias=False)
    problem = head.problem(torch.randn(2, 6))
    share = Share(torch.tensor([0, -1]), classes=9, group=RankGroup())
    problem = problem._replace(prototypes=head.weight[:1], share=share)
    found = dispatch.split(problem, torch.zeros(2, dtype=torch.long), ["hardest"], "streamed")
    assert found.hardest[0].item() == float("-inf")
    assert_close(found.hardest[1], problem.features[1] @ head.weight[0])


@pytest.mark.parametrize("scale", [2.0, torch.tensor(2.0, device="meta")])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_an_adjustment_follows_the_features_to_their_device(shape, scale):
    features, prototypes = torch.empty(2, 4, device="meta"), torch.empty(3, 4, device="meta")
    problem = Problem(features, prototypes, None, scale, InnerProduct())
    assert adjusted(problem, torch.ones(shape)).bias.device == features.device


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("thin", [False, True])
def test_of_several_hardest_classes_the_first_gets_the_gradient(monkeypatch, way, thin):
    cut(monkeypatch, 3, 2, thin=thin)
    head = tammes.LinearHead(3, 70, bias=False)
    with torch.no_grad():
        # Equal to the last bit, in one block, in the next, and in another tile.
        head.weight.zero_()[[1, 2, 5, 68]] = torch.tensor([1.0, 0.5, -2.0])
    features, labels = torch.tensor([[4.0, 2.0, -1.0]]), torch.tensor([7])
    gradient = everything(head, tammes.crammer_singer(), features, labels, way)["head.weight"]
    assert gradient.abs().sum(1).nonzero().flatten().tolist() == [1, 7]


@needs_fused
def test_a_shift_is_mended_where_only_products_would_be_infinite():
    # 2^125 has a finite sum, but not times a prototype of 87; class 1 is not in the sample.
    head = tammes.LinearHead(3, 600, bias=False)
    with torch.no_grad():
        head.weight.zero_()[:, 1] = 0.1 * torch.randn(600)
        head.weight[1, 0] = 87.0
    features, labels = torch.randn(5, 3), torch.randint(3, 600, (5,))
    features[:, 0] = 1.0
    found = everything(head, tammes.softmax(), features, labels, "fused")
    truth = everything(head.double(), tammes.softmax(), features.double(), labels, "dense")
    assert_close(found, truth, rtol=5e-5, atol=5e-5)


@needs_fused
@pytest.mark.parametrize("scale", [30.0, 64.0, "learnable"])
@pytest.mark.parametrize("weight", [0.0, 0.05, 0.2, 0.3, 2.0])
def test_float16_is_finite_and_right_where_one_class_stands_out(scale, weight):
    head = tammes.CosineHead(16, 150, scale=scale).half()
    features, labels = torch.randn(40, 16).half(), torch.randint(150, (40,))
    loss = tammes.softmax(smoothing=0.1) + weight * tammes.logit_divergence()
    found = everything(head, loss, features, labels, "fused")
    truth = everything(head.double(), loss, features.double(), labels, "dense")
    for key, value in truth.items():
        assert (found[key] - value).norm() <= 1e-2 * value.norm(), key


@pytest.mark.parametrize(
    ("way", "low"),
    [
        ("streamed", torch.float16),
        ("streamed", torch.bfloat16),
        ("thin", torch.float16),
        pytest.param("fused", torch.float16, marks=needs_fused),
    ],
)
@pytest.mark.parametrize("name", ["linear", "cosine", "gaussian"])
@pytest.mark.parametrize("loss", [SMOOTHED, tammes.softmax()], ids=["smoothed", "softmax"])
def test_products_in_half_precision_keep_small_gradients(monkeypatch, way, low, name, loss):
    # As under autocast on a GPU; weights as of a batch of a million.
    cut(monkeypatch, 16, 70, thin=way == "thin")
    head = HEADS[name](16, 200, scale="learnable")
    features, labels = 0.5 * torch.randn(40, 16), torch.randint(200, (40,))
    weights = 1e-6 * torch.linspace(0.5, 1.5, 40)
    options = {"weights": weights, "reduction": "sum"}
    truth = everything(head.double(), loss, features.double(), labels, "dense", **options)
    monkeypatch.setattr(evaluate_terms, "product_dtype", lambda device: low)
    way = "streamed" if way == "thin" else way
    found = everything(head.float(), loss, features, labels, way, **options)
    bound = {torch.bfloat16: 2e-2, torch.float16: 5e-3}[low]
    for key, value in truth.items():
        assert (found[key] - value).norm() <= bound * value.norm(), key


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("loss", [EVERYTHING, SUMS], ids=["numbers", "sums"])
def test_an_empty_batch_is_nothing_on_any_way(way, reduction, loss):
    head = tammes.LinearHead(3, 5)
    features, labels = torch.empty(0, 3), torch.empty(0, dtype=torch.long)
    found = everything(head, loss, features, labels, way, reduction=reduction)
    assert_close(found, everything(head, loss, features, labels, "dense", reduction=reduction))
    assert found["head.weight"].abs().sum() == 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["linear", "cosine", "gaussian"])
def test_prototypes_without_direction_have_no_gradient_of_their_own(way, name):
    head = HEADS[name](5, 9, scale=3.0)
    with torch.no_grad():
        head.weight[4] = 0.0
    features, labels = torch.randn(6, 5), torch.tensor([4, 4, 0, 1, 2, 3])
    features[0] = 0.0
    found = everything(head, EVERYTHING, features, labels, way)
    truth = everything(head.double(), EVERYTHING, features.double(), labels, "dense")
    assert_close(found, truth, rtol=5e-5, atol=2e-5)


@needs_fused
def test_fused_blocks_of_few_rows_stay_fused(monkeypatch):
    from tammes.kernels.fused import engine

    monkeypatch.setitem(tiling.SCORES, DEVICE, 4 * 50 * 3)
    seen = []
    original = engine.FusedRows.forward

    def forward(self, rows):
        seen.append(len(rows.own))
        return original(self, rows)

    monkeypatch.setattr(engine.FusedRows, "forward", forward)
    everything(tammes.CosineHead(3, 50), SMOOTHED, torch.randn(9, 3), torch.arange(9), "fused")
    assert sum(seen) == 9


def test_scratch_for_what_is_read_twice_is_counted_twice():
    problem = tammes.CosineHead(4, 1000).problem(torch.randn(10**5, 4))
    one, two = (
        Plan(frozenset(reads.split()), None, ()) for reads in ("target others", "target softplus")
    )
    assert tiling.longest(one.blocks(problem)[0]) > 1.9 * tiling.longest(two.blocks(problem)[0])


@needs_fused
@pytest.mark.parametrize("label", [0, 63, 64, 127])
def test_an_own_class_at_the_edge_of_a_full_tile_is_masked(label):
    # Tiles hold 64 classes in single precision; nobody else's class makes this one look.
    head, labels = tammes.CosineHead(5, 128, scale=4.0), torch.tensor([label])
    features = head.weight[label : label + 1].detach().clone()
    found = everything(head, tammes.lm_softmax(), features, labels, "fused")
    truth = everything(head.double(), tammes.lm_softmax(), features.double(), labels, "dense")
    assert_close(found, truth, rtol=5e-5, atol=2e-5)
