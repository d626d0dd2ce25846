"""The fused kernel gives what the plain one gives: on a GPU, or by Triton's interpreter without."""

import copy
import itertools
import logging

import pytest
import torch
import torch.nn.functional as F
from catalogue import CLASSES, HEADS, SPLIT_TERMS
from cover import kernel_cases
from torch.testing import assert_close

import tammes
from tammes.distributed.process_group import RankGroup
from tammes.kernels import dispatch
from tammes.kernels.problem import Share
from tammes.split import quadratic_above

fused = pytest.importorskip(
    "tammes.kernels.fused.engine", reason="no triton here", exc_type=ImportError
)
from tammes.kernels import tiling  # noqa: E402
from tammes.kernels.fused import launch  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
on_cuda = pytest.mark.gpu
pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(
        DEVICE == "cpu" and not launch.INTERPRETED, reason="neither a GPU nor TRITON_INTERPRET=1"
    ),
    # By design: sums that are infinite are those of rows to be done again.
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]
FUSED = {
    name: term
    for name, term in SPLIT_TERMS.items()
    if term.definition.reads.isdisjoint(("rest", "free_map", "softplus"))
}
EVERYTHING = tammes.softmax(smoothing=0.2) + 0.3 * tammes.logit_divergence() + tammes.hard_bias()


@pytest.fixture(autouse=True)
def _uninitialised_memory_is_nan():
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


def everything(head, loss, features, labels, implementation, autocast=None, reduction="mean"):
    """Loss, terms and every gradient of one call, in double precision on the CPU."""
    head = copy.deepcopy(head).to(DEVICE)
    head.implementation = implementation
    criterion = tammes.Criterion(head, loss, reduction=reduction).to(DEVICE)
    features = features.to(DEVICE, copy=True).requires_grad_()
    with torch.autocast(DEVICE, dtype=autocast, enabled=autocast is not None):
        value = criterion(features, labels.to(DEVICE))
    (1.5 * value.sum()).backward()
    found = {"loss": value.detach(), "features": features.grad, **criterion.terms}
    for name, parameter in criterion.named_parameters():
        found[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return {name: tensor.double().cpu() for name, tensor in found.items()}


def agree(head, loss, features, labels, rtol=5e-5, atol=2e-5):
    mine = everything(head, loss, features, labels, "fused")
    assert_close(mine, everything(head, loss, features, labels, "dense"), rtol=rtol, atol=atol)
    return mine


@pytest.mark.parametrize(("scale", "head", "term"), kernel_cases(FUSED))
def test_fused_is_dense_in_value_and_all_gradients(scale, head, term):
    head, loss = HEADS[head](6, CLASSES, scale=scale), FUSED[term]
    agree(head, loss, torch.randn(13, 6), torch.randint(CLASSES, (13,)))


@pytest.mark.parametrize("shape", [(1, 3, 2), (64, 32, 64), (65, 33, 65), (130, 40, 200)])
@pytest.mark.parametrize("head", ["linear", "cosine", "gaussian"])
def test_any_shape_will_do(shape, head):
    count, size, classes = shape
    head = HEADS[head](size, classes, scale=2.0)
    agree(head, EVERYTHING, torch.randn(count, size), torch.randint(classes, (count,)))


def test_rows_are_cut_where_the_scratch_is_small(monkeypatch):
    seen = []
    original = fused.FusedRows.forward

    def forward(self, rows):
        seen.append(len(rows.own))
        return original(self, rows)

    monkeypatch.setattr(fused.FusedRows, "forward", forward)
    monkeypatch.setattr(tiling, "EXPONENTIALS", 2 * 5 * 64 * 4)
    head = HEADS["linear"](4, 40, scale="learnable")
    agree(head, EVERYTHING, torch.randn(13, 4), torch.randint(40, (13,)))
    assert seen == [5, 5, 3]


def test_row_blocks_are_whole_tiles_below_two_gibibytes():
    def lengths(*shape):
        return [block.stop - block.start for block in tiling.fused_blocks(*shape, 2)]

    assert lengths(4096, 1_000_000, 512) == [896, 896, 896, 896, 512]
    assert lengths(1024, 1_000_000, 512) == [1024]
    assert lengths(1024, 10_000_000, 512) == [512, 512]
    assert lengths(100_000, 2, 512) == [100_000]
    assert lengths(7, 0, 512) == [7]


def test_a_row_of_several_prototypes_per_class_has_as_much_room_for_each():
    blocks = tiling.fused_blocks(4096, 1_000_000, 512, 2, centers=3)
    assert [block.stop - block.start for block in blocks] == [1024] * 4


@pytest.mark.parametrize("scale", [1.0, 64.0, 65.0, 300.0])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_all_other_classes_at_one_end_of_the_range(scale, sign):
    # The log-sum-exp is +-scale, where an exponential without a shift is infinite or zero.
    head = tammes.CosineHead(4, 70, scale=scale)
    with torch.no_grad():
        head.weight.zero_()[:, 0] = sign
        head.weight[:, 1] = 1e-3 * torch.randn(70)
    features = torch.zeros(5, 4)
    features[:, 0] = 1.0
    found = agree(head, tammes.lm_softmax(), features, torch.arange(5), atol=1e-4)
    assert found["loss"].isfinite()


@pytest.mark.parametrize("reach", [40.0, 90.0, 400.0])
def test_a_shift_that_was_taken_from_the_wrong_classes_is_mended(reach):
    # Class 1 is not among those the shift is estimated from, nor are its rows alone in a block.
    head = tammes.LinearHead(3, 600, bias=False)
    with torch.no_grad():
        # In a plane, as cosines of parallel prototypes would be equal, and any of them the hardest.
        head.weight.zero_()[:, 1:] = 0.1 * torch.randn(600, 2)
        head.weight[1, 0] = reach
        head.weight[2, 0] = -reach
    features = torch.randn(70, 3)
    features[:, 0] = torch.tensor([1.0, -1.0, 0.0]).repeat(24)[:70]
    labels = torch.randint(3, 600, (70,))
    agree(head, tammes.softmax() + tammes.sample_margin(), features, labels)


def test_scores_far_below_those_of_the_sample_are_not_lost():
    # Everybody's own class is in the sample and masked; all others are 500 below zero.
    head = tammes.LinearHead(2, 600)
    with torch.no_grad():
        head.weight.mul_(0.01)
        head.bias.fill_(-500.0)
    agree(head, tammes.softmax(), torch.randn(9, 2), torch.zeros(9, dtype=torch.long))


def with_share(head, own, **options):
    """A head whose prototypes are not all there are."""
    head.problem = lambda features, labels=None: (
        type(head)
        .problem(head, features)
        ._replace(share=Share(own, **{"classes": 20, "group": RankGroup(), **options}))
    )
    return head


@pytest.mark.parametrize("implementation", ["streamed", "fused"])
@pytest.mark.parametrize("name", ["cosine", "linear", "gaussian"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_class_that_stands_for_three_is_three_classes(implementation, name, reduction):
    head = HEADS[name](6, 7, scale="learnable")
    labels, features = torch.randint(3, (11,)), torch.randn(11, 6)
    counts = torch.tensor([1.0, 1.0, 1.0, 3.0, 3.0, 1.0, 2.0])
    many = counts.long()
    repeated = HEADS[name](6, int(many.sum()), scale="learnable")
    with torch.no_grad():
        for key, value in head.named_parameters():
            target = dict(repeated.named_parameters())[key]
            target.copy_(value if key == "log_scale" else value.repeat_interleave(many, 0))
    loss = EVERYTHING - tammes.hard_bias()
    whole = everything(repeated, loss, features, labels, "dense", reduction=reduction)
    few = with_share(head.to(DEVICE), labels.to(DEVICE), classes=12, counts=counts.to(DEVICE))
    few.implementation = implementation
    criterion = tammes.Criterion(few, loss, reduction=reduction)
    x = features.to(DEVICE).requires_grad_()
    value = criterion(x, labels.to(DEVICE))
    (1.5 * value.sum()).backward()
    assert_close(value.detach().double().cpu(), whole["loss"], rtol=5e-5, atol=2e-5)
    assert_close(x.grad.double().cpu(), whole["features"], rtol=5e-5, atol=2e-5)
    for key, parameter in few.named_parameters():
        total = whole[f"head.{key}"]
        if key != "log_scale":
            pieces = total.split(many.tolist())
            total = torch.stack([piece.sum(0) for piece in pieces])
        assert_close(parameter.grad.double().cpu(), total, rtol=5e-5, atol=2e-5)


@pytest.mark.parametrize("implementation", ["streamed", "fused"])
@pytest.mark.parametrize("here", [0, 1, 4])
def test_a_part_of_the_classes_without_anybodys_own_has_numbers_too(implementation, here):
    head = tammes.CosineHead(5, 4, scale=9.0).to(DEVICE)
    head.weight.data = head.weight.data[:here]
    own = torch.full((3,), -1, device=DEVICE)
    with_share(head, own, classes=9).implementation = implementation
    criterion = tammes.Criterion(head, tammes.lm_softmax(), validate=None)
    features = torch.randn(3, 5, device=DEVICE, requires_grad=True)
    loss = criterion(features, torch.zeros(3, dtype=torch.long, device=DEVICE))
    scores = 9.0 * F.normalize(features.detach()) @ F.normalize(head.weight.detach()).T
    expected = scores.logsumexp(1).mean() / 9.0 if here else torch.tensor(-float("inf"))
    assert_close(loss.detach(), expected.to(DEVICE))


HALVES = {name: SPLIT_TERMS[name] for name in ("cosface", "arcface", "lm_softmax")} | {
    "divergence": tammes.logit_divergence(),
    # Here what is asked of the largest exponential is a difference of large numbers.
    "softmax_and_divergence": tammes.softmax() + 0.3 * tammes.logit_divergence(),
}


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=on_cuda)])
def test_half_precision_inputs_stay_within_the_sheet(name, dtype):
    # formulas 7.7: relative error of the gradient, products in half precision, sums in single.
    head, loss = tammes.CosineHead(40, 300, scale=64.0), HALVES[name]
    features, labels = torch.randn(70, 40).to(dtype), torch.randint(300, (70,))
    head = head.to(dtype)
    half = everything(head, loss, features, labels, "fused")
    exact = everything(head.double(), loss, features.double(), labels, "dense")
    bound = {torch.bfloat16: 2e-2, torch.float16: 5e-3}[dtype]
    for key, truth in exact.items():
        assert (half[key] - truth).norm() <= bound * truth.norm(), key


def by_hand(features, weight, labels, margin):
    cosine = F.linear(F.normalize(features), F.normalize(weight))
    shifted = cosine - margin * F.one_hot(labels, len(weight))
    return F.cross_entropy(64.0 * shifted, labels)


@on_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_no_worse_than_plain_torch(dtype):
    squares = torch.zeros(2, 3, dtype=torch.double)
    for seed in range(8):
        torch.manual_seed(seed)
        head = tammes.CosineHead(128, 4096, scale=64.0)
        features, labels = torch.randn(256, 128), torch.randint(4096, (256,))
        exact = everything(head.double(), tammes.cosface(), features.double(), labels, "dense")
        mine = everything(head.float(), tammes.cosface(), features, labels, "fused", dtype)
        x = features.cuda().requires_grad_()
        weight = head.weight.detach().cuda().requires_grad_()
        with torch.autocast("cuda", dtype=dtype):
            value = by_hand(x, weight, labels.cuda(), 0.35)
        (1.5 * value).backward()
        plain = {"loss": value, "features": x.grad, "head.weight": weight.grad}
        for i, (key, other) in enumerate(plain.items()):
            theirs = other.detach().double().cpu()
            squares[:, i] += torch.stack(
                [(found - exact[key]).square().sum() for found in (mine[key], theirs)]
            )
    assert (squares[0] <= squares[1]).all(), squares


@on_cuda
def test_two_calls_give_the_same_bits():
    head = tammes.CosineHead(128, 20_000, scale=64.0)
    arguments = (head, tammes.arcface() + tammes.sample_margin(), torch.randn(300, 128))
    labels = torch.randint(20_000, (300,))
    first = everything(*arguments, labels, "fused", autocast=torch.bfloat16)
    second = everything(*arguments, labels, "fused", autocast=torch.bfloat16)
    assert_close(first, second, rtol=0, atol=0)


@on_cuda
def test_classes_beyond_two_to_the_31_numbers():
    classes, size = 4_300_000, 512
    head = tammes.CosineHead(size, 2, scale=30.0).to(DEVICE)
    head.weight.data = torch.randn(classes, size, device=DEVICE, dtype=torch.bfloat16)
    last = head.weight.data[-1].float()
    criterion = tammes.Criterion(head, tammes.cosface() + tammes.sample_margin(), validate=None)
    head.implementation = "fused"
    features = torch.stack([last, -last]).requires_grad_()
    labels = torch.tensor([0, classes - 1], device=DEVICE)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = criterion(features, labels)
    loss.backward()
    # The first feature's hardest class is the last one; the second is opposite to its own.
    assert_close(criterion.terms["sample_margin"], torch.tensor(1.06).cuda(), rtol=0, atol=0.1)
    assert head.weight.grad[-1].norm() > 100 * head.weight.grad[1:-1].norm(dim=1).mean()


@on_cuda
def test_a_fused_call_does_not_wait_for_the_device(unwaited):
    criterion = tammes.CosFace(64, 20_000, implementation="fused").cuda()
    features, labels = torch.randn(128, 64).cuda(), torch.randint(20_000, (128,)).cuda()
    torch.use_deterministic_algorithms(False)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        criterion(features.requires_grad_(), labels).backward()
        with unwaited():
            criterion(features, labels).backward()


@tammes.term(
    reads="target others",
    map_others=quadratic_above,
    row_numbers=lambda split, slope: (
        split.target - 0.1,
        (1 - slope) * (split.target - 0.1),
        slope,
        0.3 * split.target,
    ),
)
def bent_above(split, *, slope=0.5):
    """A map whose coefficients have a gradient of their own."""
    return split.others - split.scale * split.target


MAPS = {
    "mv": tammes.mv_softmax(margin=0.1),
    "curricular": tammes.curricularface(momentum=0.5),
    "filter": tammes.interclass_filter(threshold=0.1),
    "gradients of coefficients": bent_above(),
}


@pytest.mark.parametrize("scale", [4.0, 200.0, "learnable"])
@pytest.mark.parametrize("name", MAPS)
def test_a_quadratic_map_is_fused(name, scale):
    # With a scale of 200 the shift that was guessed is wrong, and rows are done again.
    head = tammes.CosineHead(6, 70, scale=scale)
    features, labels = torch.randn(13, 6), torch.randint(70, (13,))
    problem = head.problem(features.to(DEVICE))._replace(prototypes=head.weight.to(DEVICE))
    reads = MAPS[name].definition.reads
    assert dispatch.choose_kernel("fused", problem, reads) == "fused"
    agree(head, MAPS[name], features, labels, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=on_cuda)])
@pytest.mark.parametrize("name", ["curricular", "gradients of coefficients"])
def test_a_quadratic_map_is_fused_in_half_precision(name, dtype):
    head = tammes.CosineHead(16, 70, scale=8.0).to(dtype)
    features, labels = torch.randn(13, 16).to(dtype), torch.randint(70, (13,))
    found = everything(head, MAPS[name], features, labels, "fused")
    exact = everything(head.double(), MAPS[name], features.double(), labels, "dense")
    for key, value in found.items():
        assert (value - exact[key]).norm() <= 0.02 * exact[key].norm(), key


POOLED = [
    (2, "max", 8.0),
    (3, "max", "learnable"),
    (5, "max", 200.0),
    (2, "soft", 200.0),
    (3, "soft", "learnable"),
    pytest.param(12, "soft", 8.0, marks=pytest.mark.slow),
]
"""Centres of a class, how they are pooled, and a scale: with one of 200 rows are done again."""


@tammes.term(reads="target others expected")
def pulled(split):
    """Reads the expectation of scores, but not their mean."""
    return split.others + 0.3 * split.expected - split.scale * split.target


def pooled_head(centers, pooling, scale, size=6, classes=40):
    """A head with a masked class, one without directions, and offsets of the others."""
    head = tammes.CosineHead(size, classes, scale=scale, subcenters=centers, pooling=pooling)
    head.bias = torch.nn.Parameter(0.1 * torch.randn(classes))
    with torch.no_grad():
        head.bias[5] = -torch.inf
        head.weight[6], head.weight[7, 0] = 0.0, 0.0
    return head


def counted(monkeypatch):
    """Centres of a class, for each fused call to come."""
    called, original = [], fused.FusedRows.finish

    def finish(self, factor):
        called.append(self.centers)
        return original(self, factor)

    monkeypatch.setattr(fused.FusedRows, "finish", finish)
    return called


@pytest.mark.parametrize(("centers", "pooling", "scale"), POOLED)
def test_several_prototypes_per_class_are_fused(centers, pooling, scale, monkeypatch):
    # In two blocks of rows, the second of which adds to the gradient of the first.
    monkeypatch.setattr(tiling, "EXPONENTIALS", 64 * 64 * 4)
    head = pooled_head(centers, pooling, scale)
    features, labels = torch.randn(67, 6), torch.randint(8, 40, (67,))
    features[3], labels[:2] = 0.0, torch.tensor([6, 7])
    more = pulled() + tammes.hard_bias()
    called = counted(monkeypatch)
    for loss in (tammes.cosface(), more, MAPS["gradients of coefficients"]):
        agree(head, loss, features, labels, rtol=2e-4, atol=5e-5)
    assert called == [centers] * 3


@pytest.mark.parametrize("pooling", ["max", "soft"])
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=on_cuda)])
def test_several_prototypes_per_class_in_half_precision_stay_within_the_sheet(pooling, dtype):
    head = tammes.CosineHead(40, 300, scale=64.0, subcenters=3, pooling=pooling)
    features, labels = torch.randn(70, 40).to(dtype), torch.randint(300, (70,))
    head, loss = head.to(dtype), tammes.arcface() + pulled()
    half = everything(head, loss, features, labels, "fused")
    exact = everything(head.double(), loss, features.double(), labels, "dense")
    bound = {torch.bfloat16: 2e-2, torch.float16: 5e-3}[dtype]
    for key, truth in exact.items():
        assert (half[key] - truth).norm() <= bound * truth.norm(), key


def test_of_equally_near_centres_the_first_has_the_whole_gradient():
    head = tammes.CosineHead(6, 7, subcenters=3, scale=16.0)
    with torch.no_grad():
        head.weight.copy_(torch.randn(7, 1, 6))
    features, labels = torch.randn(5, 6), torch.arange(5)
    found = everything(head, tammes.cosface(), features, labels, "fused")["head.weight"]
    assert (found[:, 1:] == 0).all()
    assert (found[:, 0] != 0).any(1).all()


@on_cuda
@pytest.mark.parametrize("pooling", ["max", "soft"])
@pytest.mark.parametrize("centers", [2, 3, 5, 12])
def test_several_prototypes_per_class_are_chosen_under_autocast(pooling, centers, monkeypatch):
    head = tammes.CosineHead(128, 5003, scale=30.0, subcenters=centers, pooling=pooling)
    features, labels = torch.randn(300, 128), torch.randint(5003, (300,))
    exact = everything(head.double(), tammes.arcface(), features.double(), labels, "dense")
    called = counted(monkeypatch)
    half = everything(head.float(), tammes.arcface(), features, labels, "auto", torch.bfloat16)
    assert called == [centers]
    for key, truth in exact.items():
        assert (half[key] - truth).norm() <= 2e-2 * truth.norm(), key


@on_cuda
def test_several_prototypes_per_class_take_no_matrix_of_all_scores():
    head = tammes.CosineHead(64, 200_000, scale=30.0, subcenters=3)
    criterion = tammes.Criterion(head, tammes.arcface()).cuda()
    features = torch.randn(16_384, 64, device="cuda", requires_grad=True)
    labels = torch.randint(200_000, (16_384,), device="cuda")
    torch.use_deterministic_algorithms(False)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        criterion(features, labels).backward()
    beyond = torch.cuda.max_memory_allocated() - before
    # A matrix of all scores in half precision has 6.5 GB; of those with each centre, 19.7.
    assert beyond <= 3 * tiling.EXPONENTIALS + 3 * 200_000 * 64 * 6 + (100 << 20)


def test_a_tile_of_several_prototypes_per_class_fits_into_shared_memory():
    """227 KiB on an H200, 163 on an A100, 99 on smaller machines."""
    for centers, shared in itertools.product((2, 3), (232_448, 166_912, 101_376)):
        tile = launch.tile_of(torch.bfloat16, centers, shared=shared)
        taken = 2 * tile.stages * tile.depth * (tile.rows + centers * tile.classes)
        assert taken <= shared, (centers, shared)
    assert launch.tile_of(torch.bfloat16, 3, shared=232_448).classes == 128


def a_problem(size=8, dtype=torch.float32, centers=1):
    head = tammes.CosineHead(size, 5, subcenters=centers).to(DEVICE, dtype)
    return head.problem(torch.randn(3, size, dtype=dtype, device=DEVICE))


@pytest.mark.parametrize(
    ("problem", "reads", "reason"),
    [
        ({}, "target others mapped free_map", "but by quadratic_above, are streamed"),
        ({}, "target mean mapped", "the log-sum-exp alone"),
        ({}, "target softplus", "such as bce"),
        ({"dtype": torch.double}, "target others", "double"),
        ({"size": 4104}, "target others", "up to 4096 numbers"),
        ({"centers": 2}, "target mean", "means over scores of classes of several prototypes"),
        ({"centers": 13}, "target others", "up to 12 prototypes per class, and these have 13"),
    ],
)
def test_what_does_not_fit_is_streamed_and_said_once(problem, reads, reason, caplog):
    dispatch._tell.cache_clear()
    problem, reads = a_problem(**problem), frozenset(reads.split())
    with caplog.at_level(logging.WARNING, logger="tammes"):
        assert dispatch.choose_kernel("fused", problem, reads) == "streamed"
        assert dispatch.choose_kernel("fused", problem, reads) == "streamed"
    assert len(caplog.records) == 1
    assert reason in caplog.text


def test_a_cpu_without_interpreter_is_streamed(monkeypatch, caplog):
    dispatch._tell.cache_clear()
    monkeypatch.setattr(launch, "INTERPRETED", False)
    with caplog.at_level(logging.WARNING, logger="tammes"):
        problem = tammes.CosineHead(8, 5).problem(torch.randn(3, 8))
        assert dispatch.choose_kernel("fused", problem, frozenset(("others",))) == "streamed"
    assert "runs on CUDA, and the features are on cpu" in caplog.text


@on_cuda
def test_auto_is_dense_where_that_is_faster_and_fused_under_autocast_where_it_is_large(monkeypatch):
    head = tammes.CosineHead(8, 5000).cuda()
    features, reads = torch.randn(300, 8).cuda(), frozenset(("target", "others"))
    problem, more = head.problem(features), reads | {"mean"}
    assert dispatch.choose_kernel("auto", problem, reads) == "dense"
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert dispatch.choose_kernel("auto", problem, reads) == "dense"
        # Kernels of the dense split do not make a mean.
        assert dispatch.choose_kernel("auto", problem, more) == "fused"
        monkeypatch.setattr(dispatch, "_FUSED", 1_000_000)
        assert dispatch.choose_kernel("auto", problem, reads) == "fused"
    monkeypatch.setattr(dispatch, "_room", lambda device: 1_000_000)
    assert dispatch.choose_kernel("auto", problem, reads) == "streamed"
