"""Kernels of the dense split on a GPU, there or by Triton's interpreter, against the reference."""

import copy
import itertools
import types

import pytest
import torch
from catalogue import CLASSES, HEADS, SPLIT_TERMS, fits
from cover import cover, slow
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import tammes
from tammes.criterion import criterion as criterion_module
from tammes.kernels import compiled_split, dense, dense_gpu, dispatch
from tammes.kernels.dense import dense_split
from tammes.kernels.problem import Margin, Problem
from tammes.kernels.reference import reference_split
from tammes.similarity import Cosine, InnerProduct
from tammes.split import cross_entropy

launch = pytest.importorskip(
    "tammes.kernels.fused.launch", reason="no triton", exc_type=ImportError
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(
        DEVICE == "cpu" and not launch.INTERPRETED, reason="neither a GPU nor TRITON_INTERPRET=1"
    ),
    # By design: a row without other classes, and numbers beyond half precision.
    pytest.mark.filterwarnings("ignore:(divide by zero|overflow|invalid value):RuntimeWarning"),
]
LEAN = {
    name: term
    for name, term in SPLIT_TERMS.items()
    if "others" in term.definition.reads and dense_gpu._OTHERWISE.isdisjoint(term.definition.reads)
}


@pytest.fixture(autouse=True)
def used(monkeypatch):
    """Names of the numbers that the kernels were asked for, or ``"loss"``."""
    seen = []
    split, loss = dense.split_on_gpu, dense.cross_entropy_on_gpu

    def spy(problem, labels, names, low):
        seen.append(names)
        return split(problem, labels, names, low)

    def spy_on_loss(*arguments, **settings):
        seen.append("loss")
        return loss(*arguments, **settings)

    monkeypatch.setattr(dense, "split_on_gpu", spy)
    monkeypatch.setattr(dense, "cross_entropy_on_gpu", spy_on_loss)
    monkeypatch.setattr(dense_gpu, "ANYWHERE", True)
    return seen


def results(criterion, features, labels):
    """Loss, terms and gradients of one call, in double precision on the CPU."""
    criterion = copy.deepcopy(criterion).to(DEVICE)
    features = features.to(DEVICE).clone().requires_grad_()
    loss = criterion(features, labels.to(DEVICE))
    (1.5 * loss.sum()).backward()
    found = {"loss": loss.detach(), "features": features.grad, **criterion.terms}
    found |= {name: parameter.grad for name, parameter in criterion.named_parameters()}
    return {name: tensor.double().cpu() for name, tensor in found.items()}


def exact(criterion, features, labels):
    """The same in double precision, which these kernels leave to others."""
    return results(copy.deepcopy(criterion).double(), features.double(), labels)


@pytest.mark.parametrize(
    ("reduction", "head", "name"),
    cover(
        [
            (reduction, head, name)
            for reduction, head, name in itertools.product(
                ("none", "mean"), ("cosine", "linear"), LEAN
            )
            if fits(LEAN[name], HEADS[head](6, CLASSES))
        ],
        lambda reduction, head, name: [reduction, (name, head)],
    ),
)
def test_values_and_gradients_are_those_of_double_precision(reduction, head, name, used):
    head = HEADS[head](6, CLASSES, scale=3.0)
    criterion = tammes.Criterion(head, LEAN[name], reduction=reduction)
    features, labels = torch.randn(13, 6), torch.randint(CLASSES, (13,))
    found = results(criterion, features, labels)
    # An offset of the scores is a bias, which on cosines is left to the plain form.
    left = name == "logit_adjustment" and head.similarity.is_cosine
    assert len(used) == (0 if left else 1)
    assert_close(found, exact(criterion, features, labels), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        *(
            (make, shape)
            for make in (tammes.Softmax, tammes.ArcFace)
            for shape in ((1, 3, 2), (5, 64, 70))
        ),
        # More classes than a block; a program for each prototype would take the interpreter long.
        (tammes.Softmax, (2, 9, 4100)),
        (tammes.LMSoftmax, (3, 40, 33)),
    ],
)
def test_any_shape_will_do(make, shape, used):
    count, size, classes = shape
    criterion = make(size, classes)
    features, labels = torch.randn(count, size), torch.randint(classes, (count,))
    found = results(criterion, features, labels)
    assert used
    assert_close(found, exact(criterion, features, labels), rtol=1e-4, atol=1e-5)


def test_rows_without_a_direction_and_rows_that_are_huge(used):
    criterion = tammes.ArcFace(5, 4, scale=8.0)
    with torch.no_grad():
        criterion.head.weight[2] = 0
    features, labels = torch.randn(6, 5), torch.tensor([0, 1, 2, 3, 0, 1])
    features[0], features[1] = 0, features[1] * 1e30
    assert_close(
        results(criterion, features, labels),
        exact(criterion, features, labels),
        rtol=1e-4,
        atol=1e-5,
    )
    assert used


@pytest.mark.parametrize("make", [tammes.Softmax, tammes.CosFace])
def test_ignored_examples_may_hold_anything(make, used):
    criterion = make(5, 4, validate=None)
    features, labels = torch.randn(6, 5), torch.tensor([0, 1, -100, 3, 0, -100])
    expected = exact(criterion, features, labels)
    features[2], features[5] = torch.nan, torch.inf
    assert_close(results(criterion, features, labels), expected, rtol=1e-4, atol=1e-6)
    assert used


def test_masked_classes_are_not_there(used):
    criterion = tammes.Softmax(5, 6, validate=None)
    with torch.no_grad():
        criterion.head.bias.copy_(torch.tensor([-torch.inf, 0.3, 0.1, -torch.inf, -0.2, 0.0]))
    features, labels = torch.randn(5, 5), torch.tensor([1, 2, 4, 5, -100])
    found = results(criterion, features, labels)
    assert used
    assert_close(found, exact(criterion, features, labels), rtol=1e-5, atol=1e-6)
    assert found["head.bias"][0] == found["head.bias"][3] == 0
    split = dense_split(
        Problem(
            features.to(DEVICE),
            criterion.head.weight.detach().to(DEVICE),
            criterion.head.bias.detach().to(DEVICE),
            1.0,
            InnerProduct(),
            valid=(labels >= 0).to(DEVICE),
        ),
        labels.clamp_min(1).to(DEVICE),
        frozenset(("target", "others")),
    )
    assert split.rivals.tolist() == [3.0] * 5


def test_an_example_of_a_masked_class_shows(used):
    criterion = tammes.Softmax(5, 3, validate=None).to(DEVICE)
    with torch.no_grad():
        criterion.head.bias[1] = -torch.inf
    features = torch.randn(2, 5, device=DEVICE)
    assert criterion(features, torch.tensor([0, 1], device=DEVICE)).isnan()
    assert criterion(features, torch.tensor([0, 2], device=DEVICE)).isfinite()
    assert used


@pytest.mark.parametrize("similarity", [InnerProduct(), Cosine()])
@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
def test_products_in_half_precision_lose_no_more_than_their_inputs(similarity, low):
    # Gradients as small as in a batch of thousands.
    features = torch.randn(9, 32, device=DEVICE, requires_grad=True)
    prototypes = torch.randn(50, 32, device=DEVICE)
    if DEVICE == "cpu" and low is torch.bfloat16:
        # Triton's interpreter truncates, where a GPU rounds.
        prototypes = prototypes.to(low).float()
    prototypes.requires_grad_()
    labels = torch.randint(50, (9,), device=DEVICE)
    found = []
    for dtype, half in ((torch.float64, None), (torch.float32, low)):
        problem = Problem(
            features.to(dtype), prototypes.to(dtype), None, 4.0, similarity, None, None, None
        )
        split = dense_split(problem, labels, frozenset(("target", "others")), low=half)
        loss = 1e-6 * (split.others - 4.0 * split.target).exp().log1p().sum()
        found.append((loss, *torch.autograd.grad(loss, (features, prototypes))))
    for expected, value in zip(*found, strict=True):
        apart = (value - expected).norm() / expected.norm()
        assert apart < (2e-3 if low is torch.float16 else 1.5e-2)


@pytest.mark.parametrize("loss", [tammes.softmax(), tammes.focal()])
@pytest.mark.parametrize("low", [None, torch.float16])
def test_gradients_of_a_bias_are_summed_in_chunks_of_the_batch(loss, low, used, monkeypatch):
    # 3 chunks and 3 tiles of classes, the last ones not full.
    monkeypatch.setattr(dense_gpu, "_CHUNK", 32)
    monkeypatch.setattr(dense_gpu, "_TILE", 16)
    monkeypatch.setattr(criterion_module, "product_dtype", lambda device: low)
    criterion = tammes.Criterion(tammes.LinearHead(8, 41), loss)
    features, labels = torch.randn(70, 8), torch.randint(41, (70,))
    labels[3] = labels[66] = -100
    found = results(criterion, features, labels)["head.bias"]
    assert used
    expected = exact(criterion, features, labels)["head.bias"]
    # Of all that enters the sums, only the softmax is in half precision.
    assert (found - expected).norm() < (1e-6 if low is None else 1e-3) * expected.norm()


def _level(level):
    return torch.as_tensor(level), None


@tammes.term(reads="target others", fixed="level", adjust=_level)
def raised(split, level):
    """Cross entropy of scores that are all raised by one number."""
    return cross_entropy(split, split.target, 0.0)


@pytest.mark.parametrize("loss", [tammes.softmax(), tammes.focal(), raised(level=0.7)])
def test_a_bias_of_any_layout(loss, used):
    head = tammes.LinearHead(5, 6, bias=loss.name != "raised")
    features, labels = torch.randn(8, 5), torch.randint(6, (8,))
    expected = exact(tammes.Criterion(head, loss), features, labels)["loss"]
    criterion = tammes.Criterion(head.to(DEVICE), loss)
    if head.bias is not None:
        # Not by a copy, which would be contiguous.
        spread = torch.randn(6, 3, device=DEVICE)
        spread[:, 1] = head.bias.detach()
        head.bias = torch.nn.Parameter(spread[:, 1])
    used.clear()
    found = criterion(features.to(DEVICE), labels.to(DEVICE))
    assert used
    assert_close(found.double().cpu(), expected, rtol=1e-5, atol=1e-6)


def test_labels_of_any_dtype_share_kernels(monkeypatch):
    seen = []
    launch_kernel = dense_gpu._launch

    def spy(name, key, programs, arguments, *rest):
        dtypes = tuple(each.dtype for each in arguments if isinstance(each, torch.Tensor))
        seen.append(((name, key), dtypes))
        return launch_kernel(name, key, programs, arguments, *rest)

    monkeypatch.setattr(dense_gpu, "_launch", spy)
    head, features = tammes.LinearHead(16, 4).to(DEVICE), torch.randn(3, 16, device=DEVICE)
    reads, found = frozenset(("target", "others")), []
    for dtype in (torch.int64, torch.int32, torch.uint8):
        labels = torch.tensor([0, 3, 1], dtype=dtype, device=DEVICE)
        found.append(head.split(features, labels, reads).others)
    assert seen
    # A kernel is compiled for the dtypes of its arguments.
    assert len(set(seen)) == len({place for place, _ in seen})
    assert_close(found[1], found[0])
    assert_close(found[2], found[0])


@pytest.mark.parametrize("frozen", ["features", "prototypes"])
def test_only_gradients_that_are_needed(frozen, used):
    criterion = tammes.CosFace(5, 4).to(DEVICE)
    features = torch.randn(3, 5, device=DEVICE, requires_grad=frozen != "features")
    criterion.head.weight.requires_grad_(frozen != "prototypes")
    labels = torch.tensor([0, 1, 2], device=DEVICE)
    criterion(features, labels).backward()
    other = copy.deepcopy(criterion).double()
    expected = features.detach().double().requires_grad_(frozen != "features")
    other.zero_grad()
    other(expected, labels).backward()
    for mine, theirs in ((features, expected), (criterion.head.weight, other.head.weight)):
        assert (mine.grad is None) == (theirs.grad is None)
        if mine.grad is not None:
            assert_close(mine.grad.double(), theirs.grad, rtol=1e-5, atol=1e-6)
    assert used


def test_a_second_backward_pass_and_a_second_derivative(used):
    criterion = tammes.ArcFace(5, 4, scale=4.0).to(DEVICE)
    features = torch.randn(3, 5, device=DEVICE, requires_grad=True)
    labels = torch.tensor([0, 1, 2], device=DEVICE)
    loss = criterion(features, labels)
    (first,) = torch.autograd.grad(loss, features, retain_graph=True)
    (second,) = torch.autograd.grad(loss, features, create_graph=True)
    assert_close(second, first, rtol=1e-4, atol=1e-6)
    (curved,) = torch.autograd.grad(second.square().sum(), features)
    exactly = features.detach().double().requires_grad_()
    other = copy.deepcopy(criterion).double()
    (slope,) = torch.autograd.grad(other(exactly, labels), exactly, create_graph=True)
    (expected,) = torch.autograd.grad(slope.square().sum(), exactly)
    assert_close(curved.double(), expected, rtol=1e-3, atol=1e-5)
    assert used


def masked_first(criterion):
    """The criterion with its first class masked, which ignored examples stand for."""
    with torch.no_grad():
        criterion.head.bias[0] = -torch.inf
    return criterion


@pytest.mark.parametrize(
    "make",
    [
        lambda: tammes.Softmax(5, 3, validate=None),
        lambda: tammes.Criterion(
            tammes.LinearHead(5, 3), tammes.softmax() + 0.1 * tammes.center(), validate=None
        ),
        lambda: tammes.Softmax(5, 3, validate=None).schedule(
            margin=tammes.schedules.WarmUp(0.0, 0.2, steps=4)
        ),
        lambda: tammes.Criterion(
            tammes.LinearHead(5, 3), tammes.vs_softmax(counts=[200, 5, 1]), validate=None
        ),
    ],
    ids=["alone", "with a state", "scheduled", "adjusted"],
)
def test_an_ignored_example_may_stand_for_a_masked_class(make):
    criterion = masked_first(make())
    features, labels = torch.randn(4, 5), torch.tensor([1, 2, -100, 1])
    found = results(criterion, features, labels)
    expected = exact(criterion, features, labels)
    assert found["loss"].isfinite()
    assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "loss", [tammes.logit_adjustment(counts=[9, 3, 1]), tammes.vs_softmax(counts=[9, 3, 1])]
)
def test_adjusted_scores_of_ignored_examples(loss):
    criterion = tammes.Criterion(tammes.CosineHead(5, 3, scale=4.0), loss, validate=None)
    features, labels = torch.randn(4, 5), torch.tensor([1, 2, -100, 1])
    expected = exact(criterion, features, labels)
    features[2] = torch.nan
    assert_close(results(criterion, features, labels), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [tammes.Softmax, tammes.CosFace])
def test_features_that_are_not_contiguous_are_differentiated_again(make, used):
    criterion = make(5, 4).to(DEVICE)
    wide = torch.randn(3, 10, device=DEVICE, requires_grad=True)
    labels = torch.tensor([0, 1, 2], device=DEVICE)
    (slope,) = torch.autograd.grad(criterion(wide[:, ::2], labels), wide, create_graph=True)
    (curved,) = torch.autograd.grad(slope.square().sum(), wide)
    assert used
    assert curved.abs().sum() > 0
    assert_close(curved[:, 1::2], torch.zeros_like(curved[:, 1::2]))


def test_many_gradients_at_once():
    criterion = tammes.Softmax(5, 4, reduction="none", validate=None).to(DEVICE)
    features = torch.randn(3, 5, device=DEVICE, requires_grad=True)
    labels = torch.tensor([0, -100, 2], device=DEVICE)
    inputs = (features, criterion.head.weight, criterion.head.bias)
    rows = criterion(features, labels)
    each = [torch.autograd.grad(row, inputs, retain_graph=True) for row in rows]
    at_once = torch.autograd.grad(rows, inputs, torch.eye(3, device=DEVICE), is_grads_batched=True)
    expected = [torch.stack(some) for some in zip(*each, strict=True)]
    assert_close([*at_once], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("make", [tammes.Softmax, tammes.ArcFace])
@pytest.mark.parametrize("wrong", [4, -1])
def test_a_label_that_names_no_class_shows(make, wrong, used):
    criterion = make(5, 4, validate=None).to(DEVICE)
    features = torch.randn(2, 5, device=DEVICE, requires_grad=True)
    loss = criterion(features, torch.tensor([0, wrong], device=DEVICE))
    assert loss.isnan()
    loss.backward()
    assert features.grad[1].isnan().all()
    assert used


@pytest.mark.parametrize("shape", [(5,), ()])
def test_features_without_rows_are_refused_in_a_sentence(shape):
    with pytest.raises(ValueError, match="expects features of shape"):
        tammes.Softmax(5, 4)(torch.randn(shape), torch.tensor(0))


def test_what_it_does_not_take_is_left_to_others(used):
    size, labels = 5, torch.tensor([0, 1, 2], device=DEVICE)
    features = torch.randn(3, size, device=DEVICE)
    for criterion in (
        tammes.CosFace(size, 4, scale="learnable"),
        tammes.CosFace(size, 4).double(),
        tammes.Criterion(tammes.GaussianHead(size, 4), tammes.softmax()),
        tammes.Criterion(tammes.CosineHead(size, 4), tammes.softmax(smoothing=0.1)),
    ):
        criterion = criterion.to(DEVICE)
        criterion(features.to(criterion.head.weight.dtype), labels).backward()
    assert not used


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
@pytest.mark.parametrize(("make", "most"), [(tammes.Softmax, 30), (tammes.CosFace, 30)])
def test_a_step_takes_few_launches(make, most):
    criterion = make(512, 100).cuda()
    features = torch.randn(128, 512, device="cuda", requires_grad=True)
    labels = torch.randint(100, (128,), device="cuda")
    for _ in range(3):
        criterion(features, labels).backward()
    features.grad = None
    criterion.zero_grad()
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        criterion(features, labels).backward()
        torch.cuda.synchronize()
    launches = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(launches) <= most, launches


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("count", [1, 5, 1024, 1500])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_examples_that_count_are_weighed_alike(count, share, mean):
    labels = torch.randint(7, (2 * count,), device=DEVICE)[::2]
    ignored = torch.rand(count, device=DEVICE) < share
    labels = labels.masked_fill(ignored, -100)
    kept, valid, weights, total = dense_gpu.weigh_examples(labels, -100, mean=mean)
    assert torch.equal(valid, ~ignored)
    assert torch.equal(kept, labels.masked_fill(ignored, 0))
    assert total.item() == max(1, valid.sum().item())
    assert_close(weights, valid / total if mean else valid.float(), rtol=1e-7, atol=0)


def test_more_examples_than_one_program_weighs_are_left_to_torch(monkeypatch, used):
    # One example per class: a GPU adds up those of a class in any order.
    criterion = tammes.LMSoftmax(5, 20)
    features, labels = torch.randn(20, 5), torch.randperm(20)
    labels[3], features[3] = -100, torch.nan
    found = results(criterion, features, labels)
    monkeypatch.setattr(dense_gpu, "AT_ONCE", 19)
    assert dense_gpu.weigh_examples(labels.to(DEVICE), -100, mean=True) is None
    assert_close(results(criterion, features, labels), found, rtol=1e-6, atol=1e-7)
    assert len(used) == 2


class Compiled:
    """A compiled kernel that notes its launches."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, launches):
        self.launches = launches

    def run(self, x, y, z, stream, function, metadata, *rest):
        assert (function, metadata) == (self.function, self.packed_metadata)
        assert rest[:3] == (None, None, None)
        self.launches.append(("direct", (x, y, z), stream, rest[3:]))


class Searching:
    """A kernel that Triton searches for at every launch."""

    def __init__(self, launches):
        self.launches = launches

    def __getitem__(self, grid):
        def launch(*arguments, **constants):
            self.launches.append(("search", grid, arguments, constants))
            return Compiled(self.launches)

        return launch


@pytest.fixture
def launches(monkeypatch):
    seen = []
    kernels = types.SimpleNamespace(pair=Searching(seen))
    monkeypatch.setattr(dense_gpu, "_kernels", lambda: kernels)
    monkeypatch.setattr(dense_gpu, "_compiled", {})
    monkeypatch.setattr(dense_gpu, "_launches_directly", lambda: True)
    streams = "_cuda_getCurrentRawStream"
    monkeypatch.setattr(torch._C, streams, lambda device: f"stream of {device}", raising=False)
    return seen


def test_a_kernel_is_searched_for_once(launches):
    for _ in range(2):
        dense_gpu._launch("pair", (1, 2), 7, ("a", 3), {"FLAG": True, "BLOCK": 16}, 8)
    first, second = launches
    constants = {"FLAG": True, "BLOCK": 16, "num_warps": 8, "enable_fp_fusion": True}
    assert first == ("search", (7,), ("a", 3), constants)
    assert second == ("direct", (7, 1, 1), "stream of 1", ("a", 3, True, 16))


def test_a_triton_that_launches_otherwise_searches_at_every_launch(launches, monkeypatch):
    monkeypatch.setattr(dense_gpu, "_launches_directly", lambda: False)
    for _ in range(2):
        dense_gpu._launch("pair", (1, 2), 7, (), {})
    assert [kind for kind, *_ in launches] == ["search"] * 2


@pytest.mark.gpu
def test_this_triton_launches_compiled_kernels():
    assert dense_gpu._launches_directly()
    criterion = tammes.CosFace(16, 5).cuda()
    x = torch.randn(4, 16, device="cuda", requires_grad=True)
    dense_gpu._compiled.clear()
    criterion(x, torch.tensor([0, 1, 2, 3], device="cuda")).backward()
    names = {name for name, *_ in dense_gpu._compiled}
    assert names == {"pair", "softmax_of_others", "reduce_rows", "pair_back", "through_lengths"}


def test_a_kernel_without_a_key_is_always_searched_for(launches):
    for key in (None, (1,), (2,), None):
        dense_gpu._launch("pair", key, 1, (), {})
    assert [kind for kind, *_ in launches] == ["search"] * 4


def test_kernels_of_many_sizes_do_not_pile_up(launches, monkeypatch):
    monkeypatch.setattr(dense_gpu, "_MOST", 3)
    for size in (*range(5), 4):
        dense_gpu._launch("pair", (size,), 1, (), {})
    assert [kind for kind, *_ in launches] == ["search"] * 5 + ["direct"]
    assert len(dense_gpu._compiled) <= 3


def test_tensors_that_a_compiler_traces_have_no_address():
    rows, found = torch.ones(4), []

    def noted(vector):
        found.append(dense_gpu._aligned(vector))
        return vector + 1

    assert dense_gpu._aligned(rows)
    torch.compile(noted, backend="eager")(rows)
    assert found == [False]


@pytest.mark.parametrize("make", [tammes.Softmax, tammes.CosFace])
def test_a_scale_that_is_a_whole_number_takes_the_kernels_of_any(make, monkeypatch):
    launched = {}

    def launch(name, key, programs, arguments, constants, warps=4):
        launched[name] = arguments
        return original(name, key, programs, arguments, constants, warps)

    original = dense_gpu._launch
    monkeypatch.setattr(dense_gpu, "_launch", launch)
    head = make(6, 5).to(DEVICE).head
    problem = Problem(torch.randn(4, 6, device=DEVICE), head.weight, head.bias, 1, head.similarity)
    labels = torch.tensor([0, 1, 2, 3], device=DEVICE)
    loss, *_ = dense_gpu.cross_entropy_on_gpu(problem, labels, Margin(), -100, None, mean=True)
    loss.backward()
    # Triton compiles a whole number 1 as a constant, a float never.
    plain = [a for name in ("softmax_of_others", "pair_back") for a in launched[name]]
    assert 1.0 in [a for a in plain if type(a) is float]
    assert 1 not in [a for a in plain if type(a) is int]


def displaced(tensor, places):
    """A copy whose address is so many places behind that of an allocation."""
    room = torch.empty(tensor.numel() + places, dtype=tensor.dtype, device=DEVICE)
    return room[places:].view_as(tensor).copy_(tensor)


@pytest.mark.parametrize("make", [tammes.Softmax, tammes.ArcFace, tammes.LMSoftmax])
def test_tensors_at_odd_addresses_do_not_take_kernels_for_even_ones(make, used):
    criterion = make(16, 5)
    features, labels = torch.randn(12, 16), torch.randint(5, (12,))
    expected = exact(criterion, features, labels)
    criterion.to(DEVICE)
    weight = criterion.head.weight.detach()
    # Twice without, so that the kernels are those of the first call.
    for places in (0, 0, 1, 3, 0):
        x = displaced(features, places).requires_grad_()
        criterion.head.weight = torch.nn.Parameter(displaced(weight, places))
        assert (x.data_ptr() % 16 == 0) == (places == 0)
        loss = criterion(x, displaced(labels, places))
        # The gradient of the loss is at an odd address too.
        factors = displaced(torch.tensor(1.5), places)
        gradients = torch.autograd.grad(loss, (x, criterion.head.weight), factors)
        found = dict(zip(("features", "head.weight"), gradients, strict=True))
        for name, value in found.items():
            assert_close(value.double().cpu(), expected[name], rtol=2e-5, atol=2e-6)


ENTROPIES = {
    "softmax": lambda **more: tammes.Softmax(6, 5, scale=3.0, **more),
    "margin": lambda **more: tammes.Criterion(
        tammes.LinearHead(6, 5, scale=3.0), tammes.softmax(margin=-0.3), **more
    ),
    "normface": lambda **more: tammes.NormFace(6, 5, scale=3.0, **more),
    "cosface": lambda **more: tammes.CosFace(6, 5, margin=0.35, scale=3.0, **more),
    "arcface": lambda **more: tammes.ArcFace(6, 5, margin=0.5, scale=3.0, **more),
    # Most angles are past pi, or below 0.
    "far": lambda **more: tammes.CombinedMargin(6, 5, m2=2.8, m3=0.1, scale=3.0, **more),
    "back": lambda **more: tammes.ArcFace(6, 5, margin=-1.8, scale=3.0, **more),
}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("name", ENTROPIES)
def test_a_cross_entropy_is_one_function_of_the_batch(name, share, reduction, used):
    criterion = ENTROPIES[name](reduction=reduction)
    features, labels = torch.randn(12, 6), torch.randint(5, (12,))
    ignored = torch.rand(12) < share
    labels = labels.masked_fill(ignored, -100)
    expected = exact(criterion, features, labels)
    features[ignored] = torch.nan
    found = results(criterion, features, labels)
    assert used[0] == "loss"
    assert_close(found, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("count", [1, 1024, 1500])
def test_losses_are_reduced_by_one_program(count, mean):
    rows = torch.rand(count, device=DEVICE)
    labels = torch.arange(count, device=DEVICE) % 3 - 1
    rows = torch.where(labels == -1, 0.0, rows)
    loss, numbers = rows.new_empty(()), rows.new_empty(2)
    kernels = dense_gpu._kernels()
    kernels.reduce_rows[(1,)](rows, labels, loss, numbers, -1, count, MEAN=mean, BLOCK=1024)
    valid = max(1, (labels != -1).sum().item())
    assert numbers.tolist() == [loss.item(), valid]
    assert_close(
        loss.item(), rows.double().sum().item() / (valid if mean else 1), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("distance", [-60.0, -12.0, -3.0, 0.0, 3.0, 12.0, 60.0])
def test_a_cross_entropy_keeps_its_digits_in_both_tails(distance, used):
    criterion = tammes.Softmax(1, 2, bias=False)
    with torch.no_grad():
        criterion.head.weight.copy_(torch.tensor([[1.0], [0.0]]))
    features, labels = torch.tensor([[distance]]), torch.tensor([0])
    found, expected = results(criterion, features, labels), exact(criterion, features, labels)
    assert used[0] == "loss"
    # A GPU rounds the exponent, to base 2, before it takes the power: half an ulp of it.
    rounding = abs(distance) * torch.finfo(torch.float32).eps / 2 if DEVICE == "cuda" else 0.0
    assert_close(found, expected, rtol=max(2e-6, rounding), atol=0)


def test_a_cross_entropy_beside_a_masked_class(used):
    criterion = ENTROPIES["softmax"]()
    with torch.no_grad():
        criterion.head.bias[0] = -torch.inf
    features, labels = torch.randn(7, 6), torch.tensor([1, 2, -100, 4, 3, 3, 1])
    found, expected = results(criterion, features, labels), exact(criterion, features, labels)
    assert used[0] == "loss"
    assert found["head.bias"][0] == 0
    assert_close(found, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", ENTROPIES)
def test_a_cross_entropy_is_differentiated_again_and_many_times_at_once(name, used):
    criterion = ENTROPIES[name]().to(DEVICE)
    features, labels = torch.randn(4, 6, device=DEVICE), torch.tensor([0, 1, -100, 3])
    labels, gradients = labels.to(DEVICE), {}
    for kind in (torch.float32, torch.float64):
        other = copy.deepcopy(criterion).to(kind)
        x = features.to(kind).requires_grad_()
        loss = other(x, labels)
        inputs = (x, other.head.weight)
        twice = torch.autograd.grad(2 * loss, inputs, retain_graph=True)
        once = torch.autograd.grad(loss, inputs, retain_graph=True)
        assert_close([*twice], [2 * gradient for gradient in once])
        factors = torch.tensor([1.0, 2.0], dtype=kind, device=DEVICE)
        at_once = torch.autograd.grad(
            loss, inputs, factors, is_grads_batched=True, retain_graph=True
        )
        assert_close([row[1] for row in at_once], [*twice], rtol=1e-4, atol=1e-6)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        gradients[kind] = torch.autograd.grad(slope.square().sum(), inputs)
    found = [gradient.double() for gradient in gradients[torch.float32]]
    assert_close(found, [*gradients[torch.float64]], rtol=1e-3, atol=1e-5)
    assert used[0] == "loss"


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_cross_entropy_that_is_changed_in_place_leaves_its_terms_alone(reduction, used):
    criterion = ENTROPIES["cosface"](reduction=reduction).to(DEVICE)
    labels = torch.tensor([0, 4, -100, 3], device=DEVICE)
    loss = criterion(torch.randn(4, 6, device=DEVICE), labels)
    expected = loss.item() / (3 if reduction == "sum" else 1)
    loss /= 8
    assert_close(criterion.terms["cosface"].item(), expected)
    assert used == ["loss"]


class SecondOnly(torch.autograd.Function):
    """Sum of two numbers that has no gradient for the first."""

    @staticmethod
    def forward(ctx, first, second):
        return first + second

    @staticmethod
    def backward(ctx, gradient):
        return None, gradient


@pytest.mark.parametrize("again", [False, True])
def test_a_cross_entropy_that_is_not_asked_for_has_no_gradient(again, used):
    criterion = ENTROPIES["softmax"]().to(DEVICE)
    features = torch.randn(3, 6, device=DEVICE, requires_grad=True)
    loss = criterion(features, torch.tensor([0, 1, 2], device=DEVICE))
    result = SecondOnly.apply(loss, features.sum())
    inputs = (features, criterion.head.weight)
    of_features, of_weight = torch.autograd.grad(
        result, inputs, create_graph=again, allow_unused=True
    )
    assert_close(of_features, torch.ones_like(features))
    assert of_weight is None or not of_weight.any()
    assert used == ["loss"]


@pytest.mark.parametrize("again", [False, True])
def test_an_example_of_a_masked_class_shows_in_the_gradient(again, used):
    criterion = ENTROPIES["softmax"]().to(DEVICE)
    with torch.no_grad():
        criterion.head.bias[1] = -torch.inf
    features = torch.randn(2, 6, device=DEVICE, requires_grad=True)
    loss = criterion(features, torch.tensor([0, 1], device=DEVICE))
    (gradient,) = torch.autograd.grad(loss, features, create_graph=again)
    assert gradient[1].isnan().all()
    assert used == ["loss"]


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize(
    ("similarity", "margin"),
    [(InnerProduct(), Margin(0.0, 0.2)), (Cosine(), Margin(0.0, 0.2)), (Cosine(), Margin(0.5))],
)
@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
def test_a_cross_entropy_in_half_precision(low, similarity, margin, mean):
    # A gradient as a scaler of float16 has it.
    bias = None if similarity.is_cosine else torch.randn(50, device=DEVICE, requires_grad=True)
    features = torch.randn(9, 32, device=DEVICE, requires_grad=True)
    prototypes = torch.randn(50, 32, device=DEVICE, requires_grad=True)
    labels = torch.randint(50, (9,), device=DEVICE)
    labels[4] = -100
    inputs = [tensor for tensor in (features, prototypes, bias) if tensor is not None]
    found = dense.dense_cross_entropy(
        Problem(features, prototypes, bias, 4.0, similarity), labels, margin, -100, low, mean=mean
    )[0]
    kept = labels != -100
    exact = [None if t is None else t.double() for t in (features[kept], prototypes, bias)]
    split = reference_split(
        Problem(*exact, 4.0, similarity), labels[kept], frozenset(("target", "others"))
    )
    target = (split.target.acos() + margin.angle).cos() if margin.angle else split.target
    losses = cross_entropy(split, target, margin.similarity)
    expected = losses.mean() if mean else losses.sum()
    pairs = [(found, expected)]
    pairs += zip(
        torch.autograd.grad(65536 * found, inputs),
        torch.autograd.grad(65536 * expected, inputs),
        strict=True,
    )
    for value, wanted in pairs:
        assert (value - wanted).norm() / wanted.norm() < (2e-3 if low is torch.float16 else 1.5e-2)


@pytest.fixture
def operator(monkeypatch):
    """Shapes of the batches that the operator was called with."""
    seen, forward_pass = [], compiled_split.forward_pass

    def spy(features, *arguments):
        seen.append(tuple(features.shape))
        return forward_pass(features, *arguments)

    monkeypatch.setattr(compiled_split, "forward_pass", spy)
    monkeypatch.setattr(dispatch, "_OPERATOR", 0)
    torch._dynamo.reset()
    yield seen
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("make", "reduction"),
    [
        (tammes.Softmax, "mean"),
        slow(tammes.CosFace, "mean"),
        (tammes.ArcFace, "none"),
        slow(tammes.LMSoftmax, "none"),
    ],
)
def test_a_compiler_calls_the_same_kernels(make, reduction, operator):
    criterion = make(6, 5, reduction=reduction)
    features, labels = torch.randn(7, 6), torch.tensor([0, 4, 2, -100, 1, 3, 3])
    if criterion.head.bias is not None:
        with torch.no_grad():
            criterion.head.bias.normal_()
            # Masked: no example is of it.
            criterion.head.bias[2], labels[2] = -torch.inf, 0
    features[3] = 0

    def compiled(criterion, features, labels):
        backend = "inductor" if DEVICE == "cuda" else "aot_eager"
        call = torch.compile(criterion, backend=backend, fullgraph=True)
        features = features.to(DEVICE).requires_grad_()
        loss = call(features, labels.to(DEVICE))
        (1.5 * loss.sum()).backward()
        found = {"loss": loss.detach(), "features": features.grad, **criterion.terms}
        found |= {name: parameter.grad for name, parameter in criterion.named_parameters()}
        return {name: tensor.double().cpu() for name, tensor in found.items()}

    found = compiled(copy.deepcopy(criterion).to(DEVICE), features.clone(), labels)
    assert operator == [(7, 6)]
    assert_close(found, exact(criterion, features, labels), rtol=1e-4, atol=1e-5)


def test_a_compiler_traces_what_the_kernels_do_not_take(operator):
    head = tammes.CosineHead(6, 5, scale="learnable").to(DEVICE)
    for term in (tammes.cosface(), tammes.softmax() + tammes.logit_divergence()):
        criterion = tammes.Criterion(head, term)
        features, labels = torch.randn(4, 6).to(DEVICE), torch.tensor([0, 1, 2, 3]).to(DEVICE)
        loss = torch.compile(criterion, backend="eager", fullgraph=True)(features, labels)
        assert_close(loss, criterion(features, labels))
    assert not operator


@pytest.mark.gpu
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [tammes.Softmax, tammes.CosFace])
def test_compiled_products_take_half_precision(make, low, operator):
    criterion = make(64, 300).cuda()
    features, labels = torch.randn(96, 64).cuda(), torch.randint(300, (96,)).cuda()
    gradients = {}
    for name, call in {"eager": criterion, "compiled": torch.compile(criterion)}.items():
        own = features.clone().requires_grad_()
        with torch.autocast("cuda", low):
            loss = call(own, labels)
        loss.backward()
        gradients[name] = {
            "loss": loss.detach(),
            "features": own.grad,
            "weight": criterion.head.weight.grad,
        }
        criterion.zero_grad()
    assert operator
    for name, expected in gradients["eager"].items():
        error = (gradients["compiled"][name] - expected).norm() / expected.norm()
        assert error < 5e-3, name


def test_a_recomputed_call_takes_the_same_kernels(used):
    criterion = tammes.CosFace(6, 5).to(DEVICE)
    features = torch.randn(7, 6, device=DEVICE, requires_grad=True)
    labels = torch.tensor([0, 4, 2, -100, 1, 3, 3], device=DEVICE)
    (expected,) = torch.autograd.grad(criterion(features, labels), features)
    noted = criterion.terms["cosface"]
    loss = checkpoint(criterion, features, labels, use_reentrant=False)
    (found,) = torch.autograd.grad(loss, features)
    assert len(used) == 3
    assert_close(found, expected)
    assert_close(criterion.terms["cosface"], noted)
