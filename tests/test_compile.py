"""Criteria under torch.compile, torch.func, double backward, and what saves and copies modules."""

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch
from catalogue import CLASSES, HEADS, SPLIT_TERMS, default_head
from cover import cover, slow
from functorch.compile import make_boxed_func
from safetensors.torch import load_file, save_file
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import functional_call, grad, vmap
from torch.testing import assert_close

import tammes
from tammes.schedules import DeferredReweighting, LambdaAnnealing, Schedule, WarmUp
from tammes.terms import State

SIZE, ROWS = 6, 8


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def batch(dtype=torch.float):
    return torch.randn(ROWS, SIZE, dtype=dtype), torch.randint(CLASSES, (ROWS,))


def run(criterion, call, features, labels):
    """Loss and all gradients of one training step, and what the criterion says of its terms."""
    features = features.clone().requires_grad_()
    loss = call(features, labels)
    loss.backward()
    gradients = {name: p.grad for name, p in criterion.named_parameters()}
    return {"loss": loss.detach(), "features": features.grad, **gradients, **criterion.terms}


def everything():
    """A criterion with all there is to save: a state of each kind, schedules, values per class."""
    loss = (
        tammes.adaface()
        + 0.5 * tammes.cosface(margin=[0.1 * c for c in range(CLASSES)])
        + 0.1 * tammes.center()
        + tammes.zero_centroid()
    )
    head = tammes.CosineHead(SIZE, CLASSES, scale="learnable")
    criterion = tammes.Criterion(head, loss)
    return criterion.schedule(
        concentration=WarmUp(0.0, 1.0, steps=5),
        class_weights=DeferredReweighting(range(1, CLASSES + 1), start=4, beta=0.9),
    )


def train(criterion, steps):
    optimizer = torch.optim.SGD(criterion.parameters(), lr=0.1)
    for _ in range(steps):
        features, labels = batch()
        optimizer.zero_grad()
        criterion(4 * features, labels).backward()
        optimizer.step()


# ------------------------------------------------------------------------------- torch.compile


def assert_compiled_equals_eager(head, term, backend):
    eager, compiled = tammes.Criterion(copy.deepcopy(head), term), tammes.Criterion(head, term)
    call = torch.compile(compiled, fullgraph=True, backend=backend)
    features, labels = batch()
    # Twice: a term that remembers must have remembered the same.
    for step in range(2):
        expected = run(eager, eager, features, labels)
        found = run(compiled, call, features, labels)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert_close(found[name], value, msg=lambda m, n=name, s=step: f"{n}, call {s}: {m}")
    for name, value in eager.state_dict().items():
        assert_close(compiled.state_dict()[name], value)


def compiled_ways(name):
    """Fields of the split that a compiled term reads, its kind of head, and a state of its own."""
    definition = SPLIT_TERMS[name].definition
    return (
        definition.reads
        | {definition.requires}
        | ({definition.name} if definition.state else set())
    )


@pytest.mark.parametrize("name", cover(SPLIT_TERMS, compiled_ways))
def test_a_criterion_compiles_without_a_graph_break(name):
    term = SPLIT_TERMS[name]
    assert_compiled_equals_eager(default_head(term, SIZE, CLASSES), term, "aot_eager")


@pytest.mark.parametrize("name", ["cosine_raw_features", "gaussian", "simplex"])
def test_a_criterion_compiles_on_every_other_head(name):
    # The linear and the cosine head are those of the test above.
    head = HEADS[name](9 if name == "simplex" else SIZE, CLASSES)
    criterion = tammes.Criterion(head, tammes.softmax())
    call = torch.compile(criterion, fullgraph=True, backend="aot_eager")
    features, labels = torch.randn(ROWS, head.embedding_size), torch.randint(CLASSES, (ROWS,))
    assert_close(call(features, labels), criterion(features, labels))


def test_a_compiled_state_changes_in_double_precision():
    # In single precision it is among the terms above.
    features, labels = torch.randn(4, 6, dtype=torch.double), torch.tensor([0, 1, 2, 3])
    losses, means = [], []
    for compiling in (False, True):
        torch.manual_seed(0)
        criterion = tammes.Criterion(tammes.CosineHead(6, 5), tammes.adaface(momentum=0.5))
        call = criterion.double()
        if compiling:
            call = torch.compile(call, backend="aot_eager")
        losses.append(call(features, labels).detach())
        means.append(criterion.states["adaface"].mean)
    assert means[0] != 20
    assert_close(means[1], means[0])
    assert_close(losses[1], losses[0])


@pytest.mark.parametrize("name", [slow("linear"), "cosine"])
def test_a_compiled_criterion_takes_a_batch_without_examples(name):
    head = {"linear": tammes.LinearHead, "cosine": tammes.CosineHead}[name](6, 5)
    criterion = tammes.Criterion(head, tammes.softmax() + tammes.sample_margin())
    compiled = torch.compile(criterion, backend="aot_eager", fullgraph=True)
    loss = compiled(torch.zeros(0, 6), torch.zeros(0, dtype=torch.long))
    assert loss == 0


def test_a_streamed_head_compiles_too():
    # The compiler has to see the plain form, whatever the head is told.
    head = HEADS["cosine"](SIZE, CLASSES, implementation="streamed")
    assert_compiled_equals_eager(head, tammes.cosface(), "aot_eager")


@pytest.mark.parametrize(
    "again",
    [slow(copy.deepcopy), lambda criterion: pickle.loads(pickle.dumps(criterion))],
    ids=["deepcopy", "pickle"],
)
def test_a_copied_criterion_compiles_too(again):
    # A copy has nothing cached that the original had.
    criterion = again(tammes.CosFace(SIZE, CLASSES, scale=8.0))
    call = torch.compile(criterion, fullgraph=True, backend="aot_eager")
    features, labels = batch()
    assert_close(call(features, labels), criterion(features, labels))


def traced_operations(criterion):
    """Names of the operations that a compiler is given, in the forward and the backward pass."""
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    features, labels = batch()
    call = torch.compile(criterion, fullgraph=True, backend=backend)
    call(features.requires_grad_(), labels).backward()
    nodes = [[n for n in graph.graph.nodes if n.op == "call_function"] for graph in graphs]
    return [{n.target.overloadpacket.__name__ for n in some} for some in nodes]


@pytest.mark.parametrize("name", ["softmax", "cosface", "arcface", "lm_softmax"])
def test_a_compiler_is_given_no_operation_that_writes_the_scores_again(name):
    term = SPLIT_TERMS[name]
    forward, backward = traced_operations(tammes.Criterion(default_head(term, SIZE, CLASSES), term))
    assert "mm" in forward
    assert forward.isdisjoint({"scatter", "gather"})
    assert backward.isdisjoint({"scatter", "scatter_add", "gather"})
    # The own rows of an angular margin have a gradient of their own.
    assert ("index_add" in backward) == (name == "arcface")


@pytest.mark.parametrize("name", ["softmax", "cosface"])
def test_a_compiled_own_class_is_apart_where_products_are_not_exact(name):
    term, before = SPLIT_TERMS[name], torch.get_float32_matmul_precision()
    criterion = tammes.Criterion(default_head(term, SIZE, CLASSES), term)
    try:
        torch.set_float32_matmul_precision("high")
        _, backward = traced_operations(criterion)
    finally:
        torch.set_float32_matmul_precision(before)
    assert "index_add" in backward


@pytest.mark.parametrize("bias", [False, True])
def test_a_label_that_names_no_class_shows_in_compiled_code(bias):
    head = tammes.LinearHead(SIZE, CLASSES, bias=bias)
    call = torch.compile(tammes.Criterion(head, tammes.softmax()), backend="aot_eager")
    features, labels = batch()
    labels[0] = -1
    assert call(features, labels).isnan()


@pytest.mark.parametrize("name", ["softmax", "cosface"])
def test_a_criterion_compiles_where_a_precision_is_set_for_one_backend(name):
    # In a process of its own, since torch has no way back.
    code = f"""
import torch, tammes
torch.backends.cuda.matmul.fp32_precision = "tf32"
features, labels = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
criterion = tammes.Criterion(tammes.CosineHead(4, 3), tammes.{name}())
call = torch.compile(criterion, fullgraph=True, backend="aot_eager")
torch.testing.assert_close(call(features, labels), criterion(features, labels))
from tammes.kernels.fused import launch
assert launch._precision(torch.float32) == "tf32"
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


# Importing inductor makes torch warn of its own use of torch.jit.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["softmax", "arcface", "logit_divergence"])
def test_a_criterion_compiles_with_inductor(name):
    term = SPLIT_TERMS[name]
    assert_compiled_equals_eager(default_head(term, SIZE, CLASSES), term, "inductor")


# Sums over up to eight dimensions are unrolled, after which inductor mixed up writes and reads.
@pytest.mark.slow
@pytest.mark.parametrize(("classes", "size", "count"), [(2, 4, 5), (3, 3, 9), (10, 4, 20)])
def test_inductor_keeps_the_gradient_of_few_dimensions(classes, size, count):
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(count, size, generator=generator)
    labels = torch.randint(classes, (count,), generator=generator)
    head = tammes.CosineHead(size, classes, scale=8.0)
    criterion = tammes.Criterion(head, tammes.cosface() + tammes.zero_centroid())
    criterion(features, labels).backward()
    expected, head.weight.grad = head.weight.grad, None
    torch.compile(criterion)(features, labels).backward()
    assert_close(head.weight.grad, expected, rtol=1e-4, atol=1e-5)


# Forward mode loads decompositions that torch still scripts.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("size", [4, 12])
def test_a_compiled_derivative_in_forward_mode_is_that_of_eager(size):
    criterion = tammes.CosFace(size, 5, scale=8.0)
    features, labels = torch.randn(6, size), torch.randint(5, (6,))
    weight, tangent = criterion.head.weight.detach(), torch.randn(5, size)

    def derivative(weight, tangent):
        def loss(weight):
            return torch.func.functional_call(
                criterion, {"head.weight": weight}, (features, labels)
            )

        return torch.func.jvp(loss, (weight,), (tangent,))[1]

    compiled = torch.compile(derivative, backend="eager")
    assert_close(compiled(weight, tangent), derivative(weight, tangent))


def test_an_exported_criterion_of_few_dimensions_has_no_operator_of_ours():
    criterion = tammes.CosFace(4, 5, scale=8.0)
    program = torch.export.export(criterion, (torch.randn(6, 4), torch.randint(5, (6,))))
    assert "tammes" not in str(program.graph)


def test_a_scheduled_margin_does_not_recompile():
    counter = CompileCounterWithBackend("aot_eager")
    eager, compiled = (
        tammes.CosFace(SIZE, CLASSES, scale=8.0).schedule(margin=WarmUp(0.0, 0.8, steps=8))
        for _ in range(2)
    )
    compiled.load_state_dict(eager.state_dict())
    call = torch.compile(compiled, fullgraph=True, backend=counter)
    features, labels = batch()
    losses = []
    for _ in range(8):
        losses.append(call(features, labels).item())
        assert losses[-1] == pytest.approx(eager(features, labels).item(), rel=1e-5)
    assert counter.frame_count == 1
    assert losses == sorted(losses)
    assert losses[0] < losses[-1]  # the margin did grow
    assert compiled.schedules["margin"].steps == 8


def test_a_margin_for_each_example_does_not_recompile():
    counter = CompileCounterWithBackend("aot_eager")
    criterion = tammes.CosFace(SIZE, CLASSES, scale=8.0)
    call = torch.compile(criterion, fullgraph=True, backend=counter)
    features, labels = batch()
    for _ in range(4):
        margin = torch.rand(ROWS)
        expected = criterion(features, labels, margin=margin)
        assert_close(call(features, labels, margin=margin), expected)
    assert counter.frame_count == 1


# ------------------------------------------------ torch.compile and what changes between calls


class Running(State):
    """Somebody's own: a mean that is written in place, and one that is bound anew."""

    def __init__(self):
        super().__init__()
        self.register_buffer("inside", torch.ones(SIZE))
        self.register_buffer("anew", torch.ones(SIZE))

    def pulled(self, features):
        return (features * self.inside).sin().sum(1) + (features * self.anew).cos().sum(1)

    def before(self, batch):
        self.anew = 0.5 * self.anew + batch.features.mean(0)

    def after(self, batch):
        self.inside.mul_(0.5).add_(batch.features.mean(0))


@tammes.term(on="features", reads="", state=lambda term, head: Running())
def running(batch, *, state=None):
    return state.pulled(batch.features), batch.valid


class Turning(Schedule):
    """Somebody's own: its value is a buffer, which a step changes in place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("level", torch.tensor(0.1))

    def at(self, step):
        return self.level

    def step(self):
        super().step()
        self.level.mul_(2)


def with_blend():
    blend = LambdaAnnealing(base=10.0, gamma=1.0, power=2.0)
    return tammes.LSoftmax(SIZE, CLASSES, margin=2).schedule(blend=blend)


def with_nca_scale():
    head = tammes.LinearHead(SIZE, CLASSES)
    loss = tammes.softmax() + tammes.nca()
    return tammes.Criterion(head, loss).schedule(scale=WarmUp(0.1, 2.0, steps=3))


def with_deferred_weights():
    weights = DeferredReweighting(range(1, CLASSES + 1), start=1, beta=0.9)
    return tammes.Criterion(tammes.LinearHead(SIZE, CLASSES), tammes.softmax()).schedule(
        class_weights=weights
    )


CHANGING = {
    "arcface margin": lambda: tammes.ArcFace(SIZE, CLASSES, scale=8.0).schedule(
        margin=WarmUp(0.0, 0.6, steps=3)
    ),
    "l_softmax blend": with_blend,
    "focal gamma": lambda: tammes.Criterion(
        tammes.LinearHead(SIZE, CLASSES), tammes.focal()
    ).schedule(gamma=WarmUp(0.0, 4.0, steps=3)),
    "nca scale": with_nca_scale,
    "deferred weights": with_deferred_weights,
    "own schedule": lambda: tammes.ArcFace(SIZE, CLASSES, scale=8.0).schedule(margin=Turning()),
    "center": lambda: tammes.Criterion(tammes.LinearHead(SIZE, CLASSES), tammes.center()),
    "adaface": lambda: tammes.Criterion(
        tammes.CosineHead(SIZE, CLASSES, scale=8.0), tammes.adaface(momentum=0.5)
    ),
    "own state": lambda: tammes.Criterion(tammes.LinearHead(SIZE, CLASSES), running()),
}


def assert_compiled_changes_as_eager_does(name, backend):
    if name == "own state" and torch.__version__.startswith("2.11."):
        pytest.skip("torch 2.11 cannot trace the copy of a whole module (State.reading says so)")
    eager = CHANGING[name]()
    compiled = copy.deepcopy(eager)
    call = torch.compile(compiled, fullgraph=True, backend=backend)
    held = {key: tensor.data_ptr() for key, tensor in compiled.state_dict().items()}
    for step in range(3):
        features, labels = batch()
        expected = run(eager, eager, features, labels)
        found = run(compiled, call, features, labels)
        for name, value in expected.items():
            assert_close(found[name], value, msg=lambda m, n=name, s=step: f"{n}, call {s}: {m}")
        eager.zero_grad()
        compiled.zero_grad()
    # Two calls, and then one backward pass through both.
    both = [batch(), batch()]
    gradients = []
    for criterion, each in ((eager, eager), (compiled, call)):
        inputs = [features.clone().requires_grad_() for features, _ in both]
        losses = [each(x, labels) for x, (_, labels) in zip(inputs, both, strict=True)]
        sum(losses).backward()
        gradients.append([*(x.grad for x in inputs), *(p.grad for p in criterion.parameters())])
    assert_close(gradients[1], gradients[0])
    for name, value in eager.state_dict().items():
        assert_close(compiled.state_dict()[name], value)
        # Where a CUDA graph, DistributedDataParallel or an exponential average would look.
        assert compiled.state_dict()[name].data_ptr() == held[name], name


@pytest.mark.torch_version
@pytest.mark.parametrize(
    "name",
    [slow(n) if n in ("l_softmax blend", "focal gamma", "adaface") else n for n in CHANGING],
)
def test_a_compiled_criterion_has_the_gradient_of_the_state_it_read(name):
    assert_compiled_changes_as_eager_does(name, "aot_eager")


# Importing inductor makes torch warn of its own use of torch.jit.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["arcface margin", "deferred weights", "center", "own state"])
def test_inductor_gradient_is_that_of_the_state_the_criterion_read(name):
    assert_compiled_changes_as_eager_does(name, "inductor")


def test_a_state_keeps_its_storage_where_its_hook_binds_new_tensors():
    criterion = CHANGING["own state"]()
    held = {name: tensor.data_ptr() for name, tensor in criterion.states.named_buffers()}
    features, labels = batch()
    criterion(features, labels)
    state = criterion.states["running"]
    assert_close(state.anew, 0.5 + features.mean(0))
    assert {name: t.data_ptr() for name, t in criterion.states.named_buffers()} == held


# --------------------------------------------------------------------------------- torch.func


@pytest.mark.parametrize("implementation", ["dense", "streamed"])
@pytest.mark.parametrize("name", ["softmax", "arcface", "lm_softmax", "logit_divergence"])
def test_vmap_over_a_criterion_is_a_loop_over_batches(name, implementation):
    term = SPLIT_TERMS[name]
    head = default_head(term, SIZE, CLASSES, implementation=implementation)
    criterion = tammes.Criterion(head, term)
    features, labels = torch.randn(3, ROWS, SIZE), torch.randint(CLASSES, (3, ROWS))
    expected = torch.stack([criterion(f, y) for f, y in zip(features, labels, strict=True)])
    assert_close(vmap(criterion)(features, labels), expected)


@pytest.mark.parametrize("implementation", ["dense", "streamed"])
@pytest.mark.parametrize("name", ["softmax", "arcface", "lm_softmax", "logit_divergence"])
def test_grad_of_a_criterion_is_its_backward(name, implementation):
    term = SPLIT_TERMS[name]
    head = default_head(term, SIZE, CLASSES, implementation=implementation)
    criterion = tammes.Criterion(head, term)
    features, labels = batch()
    parameters = {key: p.detach() for key, p in criterion.named_parameters()}

    def loss(features, parameters):
        return functional_call(criterion, parameters, (features, labels))

    by_func = grad(loss, argnums=(0, 1))(features, parameters)
    expected = run(criterion, criterion, features, labels)
    assert_close(by_func[0], expected["features"])
    for key in parameters:
        assert_close(by_func[1][key], expected[key])


def test_vmap_of_grad_gives_the_gradient_of_every_example():
    criterion = tammes.CosFace(SIZE, CLASSES, scale=8.0)
    features, labels = batch()
    parameters = {key: p.detach() for key, p in criterion.named_parameters()}

    def loss(parameters, feature, label):
        return functional_call(criterion, parameters, (feature[None], label[None]))

    by_example = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, features, labels)
    criterion(features, labels).backward()
    assert by_example["head.weight"].shape == (ROWS, CLASSES, SIZE)
    assert_close(by_example["head.weight"].mean(0), criterion.head.weight.grad)


def test_an_ensemble_of_criteria_is_one_functional_call():
    criteria = [tammes.ArcFace(SIZE, CLASSES, scale=8.0) for _ in range(3)]
    features, labels = batch()
    stacked, _ = torch.func.stack_module_state(criteria)
    found = vmap(lambda p: functional_call(criteria[0], p, (features, labels)))(stacked)
    assert_close(found, torch.stack([c(features, labels) for c in criteria]))


# -------------------------------------------------------------------------------- double backward


TWICE = [
    ("cosine", "cosface"),
    ("linear", "softmax_smoothed_margin"),
    ("linear", "focal"),
    ("cosine", "arcface"),
    ("cosine", "lm_softmax"),
    ("linear_no_bias", "l_softmax_real_blend"),
    ("cosine_raw_features", "sphereface"),
    ("gaussian", "large_margin_gaussian"),
    ("linear", "logit_divergence"),
]


@pytest.mark.parametrize(
    ("reduction", "head_name", "name"),
    cover(
        [(reduction, *pair) for reduction in ("mean", "none") for pair in TWICE],
        lambda reduction, *pair: [reduction, pair],
    ),
)
def test_the_streamed_loss_can_be_differentiated_once_and_the_dense_one_twice(
    reduction, head_name, name
):
    head = HEADS[head_name](3, 4, scale="learnable", implementation="streamed").double()
    criterion = tammes.Criterion(head, SPLIT_TERMS[name], reduction=reduction)
    names = [key for key, _ in criterion.named_parameters()]
    values = [p.detach().clone().requires_grad_() for p in criterion.parameters()]
    features = torch.randn(2, 3, dtype=torch.double, requires_grad=True)
    labels = torch.tensor([0, 3])

    def loss(features, *values):
        return functional_call(criterion, dict(zip(names, values, strict=True)), (features, labels))

    torch.autograd.gradcheck(loss, (features, *values))
    with pytest.raises(RuntimeError, match="expects to be differentiated once"):
        torch.autograd.gradgradcheck(loss, (features, *values))
    head.implementation = "dense"
    torch.autograd.gradgradcheck(loss, (features, *values))


# ------------------------------------------------------------------- pickle, copy, move, save


def same_next_step(left, right):
    """Whether two criteria give the same, bit for bit, now and after what they remember of it."""
    for _ in range(2):
        features, labels = batch()
        if not torch.equal(left(features, labels), right(features, labels)):
            return False
    return all(torch.equal(left.state_dict()[k], v) for k, v in right.state_dict().items())


def test_a_pickled_criterion_goes_on_as_the_original():
    criterion = everything()
    train(criterion, 3)
    again = pickle.loads(pickle.dumps(criterion))
    assert repr(again) == repr(criterion)
    assert again.loss == criterion.loss
    assert same_next_step(criterion, again)


def test_a_criterion_saved_whole_by_torch_goes_on_as_the_original():
    criterion = everything()
    train(criterion, 3)
    file = io.BytesIO()
    torch.save(criterion, file)
    file.seek(0)
    assert same_next_step(criterion, torch.load(file, weights_only=False))


def test_a_deep_copy_trains_by_itself():
    criterion = everything()
    train(criterion, 2)
    before = {key: value.clone() for key, value in criterion.state_dict().items()}
    again = copy.deepcopy(criterion)
    train(again, 3)
    for key, value in criterion.state_dict().items():
        assert torch.equal(value, before[key]), key
        assert not torch.equal(again.state_dict()[key], value), key


@pytest.mark.parametrize("name", SPLIT_TERMS)
def test_every_term_pickles_and_copies_to_an_equal_one(name):
    term = SPLIT_TERMS[name]
    assert pickle.loads(pickle.dumps(term)) == term
    assert copy.deepcopy(2.0 * term) == 2.0 * term


def test_a_criterion_moves_to_double_precision():
    criterion = everything()
    features, labels = batch()
    before = copy.deepcopy(criterion)(features, labels)
    criterion.double()
    loss = criterion(features.double(), labels)
    loss.backward()
    assert loss.dtype == torch.double
    assert_close(loss.float(), before)
    for name, tensor in criterion.state_dict().items():
        assert tensor.dtype == (torch.long if name.endswith("steps") else torch.double), name
    assert all(p.grad.dtype == torch.double for p in criterion.parameters())


@pytest.mark.parametrize("implementation", ["dense", "streamed"])
def test_a_criterion_in_half_precision_computes_in_single(implementation):
    head = tammes.CosineHead(SIZE, CLASSES, scale=8.0, implementation=implementation)
    criterion = tammes.Criterion(head.bfloat16(), tammes.arcface())
    features, labels = batch(torch.bfloat16)
    loss = criterion(features, labels)
    loss.backward()
    assert loss.dtype == torch.float
    assert head.weight.grad.dtype == torch.bfloat16
    assert_close(loss, criterion.float()(features.float(), labels))


def test_a_criterion_moves_to_another_device():
    # `meta` holds shapes alone: whatever stayed behind would collide with it.
    criterion = everything().to("meta")
    features, labels = batch()
    loss = criterion(features.to("meta").requires_grad_(), labels.to("meta"))
    loss.backward()
    assert loss.device.type == "meta"
    assert all(p.grad.device.type == "meta" for p in criterion.parameters())
    assert {tensor.device.type for tensor in criterion.state_dict().values()} == {"meta"}


@pytest.mark.parametrize("name", SPLIT_TERMS)
def test_every_term_follows_its_criterion_to_another_device(name):
    term = SPLIT_TERMS[name]
    criterion = tammes.Criterion(default_head(term, SIZE, CLASSES), term).to("meta")
    features, labels = batch()
    assert criterion(features.to("meta"), labels.to("meta")).device.type == "meta"


def test_a_state_dict_goes_through_safetensors_and_back(tmp_path):
    criterion = everything()
    train(criterion, 3)
    save_file(criterion.state_dict(), tmp_path / "criterion.safetensors")
    resumed = everything()
    resumed.load_state_dict(load_file(tmp_path / "criterion.safetensors"))
    assert set(criterion.state_dict()) == {
        "head.weight",
        "head.log_scale",
        "states.adaface.mean",
        "states.adaface.std",
        "states.center.centers",
        "schedules.concentration.steps",
        "schedules.class_weights.steps",
    }
    assert same_next_step(criterion, resumed)


def test_a_state_dict_of_lambda_annealing_goes_through_safetensors_and_back(tmp_path):
    def make():
        annealing = LambdaAnnealing(base=10.0, gamma=1.0, power=1.0)
        return tammes.LSoftmax(SIZE, CLASSES, margin=2).schedule(blend=annealing)

    criterion, resumed = make(), make()
    train(criterion, 4)
    save_file(criterion.state_dict(), tmp_path / "criterion.safetensors")
    resumed.load_state_dict(load_file(tmp_path / "criterion.safetensors"))
    assert resumed.schedules["blend"].value.item() == pytest.approx(2.0)
    assert same_next_step(criterion, resumed)
