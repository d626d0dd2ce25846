"""What only an accelerator shows; skipped, and said so, where there is none."""

import copy
import subprocess
import sys

import pytest
import torch
from catalogue import CLASSES, HEADS, KERNEL_HEADS, SPLIT_TERMS, fits
from torch.testing import assert_close

import tammes
from tammes.losses.subspace import OrthogonalComplement, SpectralComplement
from tammes.schedules import DeferredReweighting, WarmUp

pytestmark = pytest.mark.gpu
STREAMABLE = {n: t for n, t in SPLIT_TERMS.items() if "rest" not in t.definition.reads}


def gradients(head, loss, features, labels, implementation, autocast=None):
    head = copy.deepcopy(head)
    head.implementation = implementation
    criterion = tammes.Criterion(head, loss).to(features.device)
    features = features.clone().requires_grad_()
    with torch.autocast("cuda", dtype=autocast, enabled=autocast is not None):
        value = criterion(features, labels)
    value.backward()
    found = [value.detach(), features.grad, *(p.grad for p in criterion.parameters())]
    return [torch.zeros(()) if g is None else g.double().cpu() for g in found]


@pytest.mark.parametrize("name", STREAMABLE)
@pytest.mark.parametrize("head", KERNEL_HEADS)
def test_streamed_is_dense_on_the_device(head, name):
    head, loss = HEADS[head](16, CLASSES), STREAMABLE[name]
    if not fits(loss, head):
        pytest.skip("the term does not fit this head")
    features, labels = torch.randn(37, 16).cuda(), torch.randint(CLASSES, (37,)).cuda()
    dense = gradients(head, loss, features, labels, "dense")
    streamed = gradients(head, loss, features, labels, "streamed")
    assert_close(streamed, dense, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["cosface", "arcface", "lm_softmax", "softmax"])
def test_half_precision_products_stay_within_the_sheet(dtype, name):
    # formulas 7.7: relative error of the gradient, products in half precision, sums in single.
    head, loss = tammes.CosineHead(128, 4096, scale=64.0), SPLIT_TERMS[name]
    features, labels = torch.randn(64, 128).cuda(), torch.randint(4096, (64,)).cuda()
    exact = gradients(head.double(), loss, features.double(), labels, "dense")
    half = gradients(head.float(), loss, features, labels, "streamed", autocast=dtype)
    bound = 2e-2 if dtype == torch.bfloat16 else 5e-3
    for mine, truth in zip(half, exact, strict=True):
        assert (mine - truth).norm() <= bound * truth.norm()
    assert head.weight.dtype == torch.float32


@pytest.mark.parametrize("name", ["Softmax", "CosFace", "LMSoftmax"])
def test_the_first_backward_of_a_process_warns_of_nothing(name):
    # Nothing else may have launched a kernel in autograd's thread.
    code = f"""
import torch, tammes
criterion = tammes.{name}(16, 10).cuda()
features = torch.randn(8, 16, device="cuda", requires_grad=True)
criterion(features, torch.arange(8, device="cuda")).backward()
assert features.grad.isfinite().all()
"""
    subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", code], check=True)


def test_a_call_does_not_wait_for_the_device(unwaited):
    criterion = tammes.CosFace(64, 20_000).cuda()
    features, labels = torch.randn(128, 64).cuda(), torch.randint(20_000, (128,)).cuda()
    criterion(features.requires_grad_(), labels).backward()
    with unwaited():
        criterion(features, labels).backward()


def test_values_are_checked_only_when_asked():
    features, labels = torch.randn(4, 8).cuda(), torch.tensor([0, 1, 2, 7]).cuda()
    with pytest.raises(ValueError, match="expects labels from 0 to 2"):
        tammes.CosFace(8, 3, validate=True).cuda()(features, labels)


def test_a_criterion_left_on_the_cpu_says_so():
    with pytest.raises(ValueError, match="expects features on cpu, where its prototypes are"):
        tammes.CosFace(8, 3)(torch.randn(4, 8).cuda(), torch.zeros(4, dtype=torch.long).cuda())


def test_scaled_losses_give_scaled_gradients():
    criterion = tammes.CosFace(64, 20_000).cuda()
    features, labels = torch.randn(64, 64).cuda(), torch.randint(20_000, (64,)).cuda()
    criterion(features, labels).backward()
    plain = criterion.head.weight.grad.clone()
    criterion.zero_grad()
    (1024 * criterion(features, labels)).backward()
    assert_close(criterion.head.weight.grad, 1024 * plain)


@pytest.mark.filterwarnings("ignore")  # what the compiler has to say of itself
@pytest.mark.parametrize("name", ["cosface", "arcface", "softmax_smoothed_margin"])
def test_compiled_is_eager_on_the_device(name):
    criterion = tammes.Criterion(tammes.CosineHead(16, CLASSES), SPLIT_TERMS[name]).cuda()
    features, labels = torch.randn(37, 16).cuda(), torch.randint(CLASSES, (37,)).cuda()
    compiled = torch.compile(criterion, fullgraph=True)
    assert_close(compiled(features, labels), criterion(features, labels))


@pytest.mark.parametrize("dtype", [torch.float, torch.double])
# Eigenvalues of the second are found on the GPU, those of the first on the CPU.
@pytest.mark.parametrize(("classes", "size"), [(20, 96), (200, 300), (60, 20)])
@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("complement", [OrthogonalComplement, SpectralComplement])
def test_a_projection_on_the_device_is_that_on_the_cpu(complement, detach, classes, size, dtype):
    found = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        features, prototypes = torch.randn(5, size).to(dtype), torch.randn(classes, size).to(dtype)
        features, prototypes = features.to(device), prototypes.to(device).requires_grad_()
        left = complement(detach=detach).project(features, prototypes)
        grads = [] if detach else torch.autograd.grad(left.square().sum(), prototypes)
        found.append([left.detach().cpu(), *(grad.cpu() for grad in grads)])
    near = {"rtol": 0, "atol": 1e-4} if dtype == torch.float else {"rtol": 1e-7, "atol": 1e-9}
    assert_close(found[1], found[0], **near)


CHANGING = {
    "center": lambda: tammes.Criterion(
        tammes.LinearHead(16, CLASSES), tammes.softmax() + tammes.center()
    ),
    "adaface": lambda: tammes.Criterion(
        tammes.CosineHead(16, CLASSES, scale=8.0), tammes.adaface(momentum=0.5)
    ),
    "schedules": lambda: tammes.ArcFace(16, CLASSES, scale=8.0).schedule(
        margin=WarmUp(0.0, 0.6, steps=8),
        class_weights=DeferredReweighting(range(1, CLASSES + 1), start=2, beta=0.9),
    ),
}
"""Criteria with states or schedules, which a step reads and then changes."""


@pytest.mark.filterwarnings("ignore")  # what the compiler has to say of itself
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", CHANGING)
def test_a_recorded_step_reads_and_changes_states_as_an_eager_one(name, compiled):
    torch._dynamo.reset()
    eager = CHANGING[name]().cuda()
    recorded = copy.deepcopy(eager)
    call = torch.compile(recorded, fullgraph=True) if compiled else recorded
    features = torch.zeros(32, 16, device="cuda", requires_grad=True)
    labels = torch.zeros(32, dtype=torch.long, device="cuda")

    def step():
        (grad,) = torch.autograd.grad(call(features, labels), features)
        return grad

    side, graph, found = torch.cuda.Stream(), torch.cuda.CUDAGraph(), None
    for number in range(8):
        x, y = torch.randn(32, 16).cuda(), torch.randint(CLASSES, (32,)).cuda()
        with torch.no_grad():
            features.copy_(x)
            labels.copy_(y)
        torch.cuda.synchronize()
        if number < 3:
            with torch.cuda.stream(side):
                found = step()
        else:
            if number == 3:
                with torch.cuda.graph(graph):
                    found = step()
            graph.replay()
        torch.cuda.synchronize()
        x.requires_grad_()
        (expected,) = torch.autograd.grad(eager(x, y), x)
        assert_close(found, expected, msg=lambda m, n=number: f"step {n}: {m}")
    assert_close(recorded.state_dict(), eager.state_dict())


@tammes.term(reads="target")
def drawn(split):
    return split.target * torch.rand_like(split.target)


def test_the_doctor_leaves_the_random_numbers_of_the_device_alone():
    criterion = tammes.Criterion(tammes.CosineHead(8, 5), drawn()).cuda()
    features, labels = torch.randn(10, 8).cuda(), torch.arange(10).cuda() % 5
    before = torch.cuda.get_rng_state()
    tammes.diagnose(criterion, features, labels)
    assert torch.cuda.get_rng_state().equal(before)
