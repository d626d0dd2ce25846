"""The split, and that it is all a loss needs: every term against its plain formula."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from catalogue import CLASSES, DETACHED, HEADS, SPLIT_TERMS, fits, numbers_read
from cover import cover
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import functional_call
from torch.testing import assert_close

import tammes
from tammes.split import ALONGSIDE, REDUCED

ALL = (*REDUCED, *ALONGSIDE, "rest")


# ------------------------------------------------------------------------------ the five numbers


def test_the_five_numbers_by_hand():
    # Scores of the others are ln 2 and ln 6: log-sum ln 8, softmax (1/4, 3/4).
    log2, log6 = math.log(2), math.log(6)
    s = tammes.split(torch.tensor([[0.5, log2, log6]]) / 2, torch.tensor([0]), scale=2.0)
    expected = {
        "target": 0.25,
        "others": math.log(8),
        "hardest": log6 / 2,
        "expected": (log2 + 3 * log6) / 4,
        "mean": (log2 + log6) / 2,
        "length": 1.0,
        "norm": 1.0,
        "gap": 0.75,
    }
    for name, value in expected.items():
        assert_close(getattr(s, name), torch.tensor([value]), msg=name)
    assert_close(s.cosine, s.target)
    assert s.classes == 3


@settings(max_examples=25, deadline=None, derandomize=True)
@given(n=st.integers(1, 5), c=st.integers(2, 9), seed=st.integers(0, 999))
def test_the_numbers_are_those_of_the_row_without_its_target(n, c, seed):
    draw = torch.Generator().manual_seed(seed)
    similarity = torch.randn(n, c, dtype=torch.double, generator=draw)
    labels = torch.randint(c, (n,), generator=draw)
    s = tammes.split(similarity, labels, scale=3.0, reads=ALL)
    for i, y in enumerate(labels.tolist()):
        rest = torch.cat([similarity[i, :y], similarity[i, y + 1 :]])
        assert_close(s.target[i], similarity[i, y])
        assert_close(s.others[i], (3 * rest).exp().sum().log())
        assert_close(s.hardest[i], rest.max())
        assert_close(s.expected[i], ((3 * rest).softmax(0) * 3 * rest).sum())
        assert_close(s.mean[i], 3 * rest.mean())
        assert s.rest[i, y] == -math.inf


def test_with_two_classes_the_four_numbers_of_the_others_are_one():
    similarity, labels = torch.randn(6, 2, dtype=torch.double), torch.tensor([0, 1, 1, 0, 1, 0])
    s = tammes.split(similarity, labels, scale=5.0)
    other = 5 * similarity.gather(1, 1 - labels[:, None]).squeeze(1)
    for value in (s.others, 5 * s.hardest, s.expected, s.mean):
        assert_close(value, other)


def test_others_keep_their_digits_where_the_target_leads_by_forty():
    # log(sum over all - exp(target)) would be off by tens of nats here.
    similarity = torch.tensor([[40.0, 0.3, -0.2, 0.1]])
    s = tammes.split(similarity, torch.tensor([0]))
    exact = similarity[:, 1:].double().logsumexp(1)
    assert_close(s.others.double(), exact, rtol=1e-6, atol=0)


def test_of_equal_hardest_classes_the_first_has_the_whole_gradient():
    similarity = torch.tensor([[0.9, 0.4, 0.4, 0.1]], requires_grad=True)
    tammes.split(similarity, torch.tensor([0])).hardest.sum().backward()
    assert similarity.grad.tolist() == [[0.0, 1.0, 0.0, 0.0]]


def test_the_numbers_are_twice_differentiable():
    labels = torch.tensor([0, 2, 3])

    def numbers(similarity):
        s = tammes.split(similarity, labels, scale=2.0)
        return s.target, s.others, s.hardest, s.expected, s.mean

    similarity = torch.randn(3, 4, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(numbers, similarity)
    assert torch.autograd.gradgradcheck(numbers, similarity)


@pytest.mark.parametrize(
    "term", [tammes.softmax(), tammes.sample_margin(), tammes.logit_divergence(kind="u_q")], ids=str
)
def test_a_class_masked_with_minus_infinity_is_not_there(term):
    similarity = torch.randn(4, 5, dtype=torch.double)
    labels = torch.tensor([0, 1, 2, 3])
    masked = similarity.clone()
    masked[:, 4] = -math.inf
    masked.requires_grad_()
    loss = term(tammes.split(masked, labels))
    assert_close(loss, term(tammes.split(similarity[:, :4], labels)))
    (grad,) = torch.autograd.grad(loss.sum(), masked)
    assert grad.isfinite().all()


def test_a_similarity_that_is_not_a_number_is_not_masked_but_shows():
    similarity = torch.tensor([[0.5, math.nan, 0.1], [math.nan, 0.2, 0.3], [0.1, 0.2, 0.3]])
    loss = tammes.softmax()(tammes.split(similarity, torch.tensor([0, 0, 0])))
    assert loss.isnan().tolist() == [True, True, False]


def test_what_is_not_read_is_not_a_number():
    s = tammes.split(torch.randn(2, 3), torch.tensor([0, 1]), reads=["target", "hardest"])
    assert s.rest is None
    for name in ("others", "expected", "mean"):
        assert getattr(s, name).isnan().all(), name
    assert s.hardest.isfinite().all()


def test_what_the_caller_knows_better_replaces_what_the_matrix_says():
    own = {name: torch.full((2,), 0.1 * k) for k, name in enumerate(("target", *ALONGSIDE))}
    s = tammes.split(torch.randn(2, 3), torch.tensor([0, 1]), own=own)
    for name, value in own.items():
        assert getattr(s, name) is value


@pytest.mark.parametrize(
    ("shape", "count", "message"),
    [
        ((3,), 3, r"\(N, C\).*got \(3,\) and \(3,\)"),
        ((3, 4), 2, r"got \(3, 4\) and \(2,\)"),
        ((3, 1), 3, "at least 2 classes, got C=1"),
    ],
)
def test_split_refuses_shapes_it_cannot_split(shape, count, message):
    with pytest.raises(ValueError, match=message):
        tammes.split(torch.zeros(shape), torch.zeros(count, dtype=torch.long))


SIMILARITY, OWN = torch.randn(4, 4), torch.tensor([0, 1, 2, 1])
MISFITS = {
    "a scale for each row": (
        lambda: tammes.split(SIMILARITY, OWN, scale=torch.ones(4)),
        r"split expects one scale for all rows, got shape \(4,\)",
    ),
    "an unknown field": (
        lambda: tammes.split(SIMILARITY, OWN, reads=["hardset"]),
        "split expects reads among target, .* got 'hardset'",
    ),
    "an unknown field of a head": (
        lambda: tammes.CosineHead(3, 4).split(torch.randn(4, 3), OWN, "target cosine"),
        "CosineHead expects reads among target, .* got 'cosine'",
    ),
    "an unknown own number": (
        lambda: tammes.split(SIMILARITY, OWN, own={"others": torch.ones(4)}),
        r"split expects own numbers among target, .* got others of shape \(4,\)",
    ),
    "own numbers in a column": (
        lambda: tammes.split(SIMILARITY, OWN, own={"target": torch.ones(4, 1)}),
        r"split expects own numbers .* shape \(4,\), got target of shape \(4, 1\)",
    ),
    "margins in a column": (
        lambda: tammes.cosface()(tammes.split(SIMILARITY, OWN), margin=torch.ones(4, 1)),
        r"cosface expects margin to be a number or of shape \(4,\), got \(4, 1\)",
    ),
    "margins of other classes": (
        lambda: tammes.cosface(margin=[0.1] * 5)(tammes.split(SIMILARITY, OWN)),
        "cosface expects one margin for each of 4 classes, got 5",
    ),
    "counts of other classes": (
        lambda: tammes.ldam([9, 8, 7, 6, 5])(tammes.split(SIMILARITY, OWN)),
        "ldam expects one counts for each of 4 classes, got 5",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_a_split_is_refused(name):
    do, message = MISFITS[name]
    with pytest.raises(ValueError, match=message):
        do()


@pytest.mark.parametrize("given", [{"counts": (1, 2, 3, 4)}, {"tau": 0.5}])
def test_a_term_called_with_a_split_does_not_ignore_another_fixed_setting(given):
    term, rows = tammes.logit_adjustment([4, 3, 2, 1]), tammes.split(SIMILARITY, OWN, reads=ALL)
    with pytest.raises(TypeError, match=r"logit_adjustment expects \w+ from the beginning, got"):
        term(rows, **given)


def test_fields_to_read_may_be_one_string():
    head, features = tammes.CosineHead(3, 4), torch.randn(4, 3)
    for rows in (
        tammes.split(SIMILARITY, OWN, reads="hardest others"),
        head.split(features, OWN, "hardest others"),
    ):
        assert rows.hardest.isfinite().all()
        assert rows.others.isfinite().all()
        assert rows.mean.isnan().all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_labels_of_any_integer_type_split_the_same(dtype):
    similarity, labels = torch.randn(4, 3), torch.tensor([0, 2, 1, 2])
    expected = tammes.split(similarity, labels)
    found = tammes.split(similarity, labels.to(dtype))
    for name in ("target", "others", "labels"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


def test_split_refuses_labels_of_other_types():
    with pytest.raises(TypeError, match=r"split expects labels of an integer type, got .*bool"):
        tammes.split(torch.zeros(2, 2), torch.tensor([True, False]))


# --------------------------------------- every term on every head against the plain formula


def plain_problem(name, head, x, w, b, y):
    """Scores, and angle and length to the own prototype, as a textbook has them."""
    if name == "gaussian":
        similarity = -(x[:, None] - w).square().sum(-1) / 2
    elif name == "distance":
        similarity = -(x[:, None] - w).square().sum(-1).sqrt()
    elif name == "reciprocal":
        similarity = (x[:, None] - w).square().mean(-1) - x @ w.T
    elif name.startswith("linear"):
        similarity = x @ w.T + (0 if b is None else b)
    elif name == "cosine_subcenters":
        each = torch.einsum("nd,ckd->nck", F.normalize(x), F.normalize(w, dim=-1))
        similarity, winners = each.max(-1)
    else:
        query = x if name == "cosine_raw_features" else F.normalize(x)
        similarity = query @ F.normalize(w).T
    # Of several prototypes of a class the nearest stands for it.
    own_w = w[y] if w.ndim == 2 else w[y, winners[torch.arange(len(y)), y]]
    lengths = {
        "linear_no_bias": x.norm(dim=1) * own_w.norm(dim=-1),
        "cosine_raw_features": x.norm(dim=1),
    }
    column = y[:, None]
    own = torch.zeros_like(similarity, dtype=torch.bool).scatter(1, column, True)
    f = head.scale * similarity
    return SimpleNamespace(
        f=f,
        f_y=f.gather(1, column).squeeze(1),
        rest=f[~own].view(len(f), -1),
        y=y,
        s=float(head.scale),
        cosines=F.normalize(x) @ F.normalize(w).T if w.ndim == 2 else similarity,
        theta=F.cosine_similarity(x, own_w).acos(),
        r=lengths.get(name, torch.ones(len(x), dtype=x.dtype)),
        norm=x.norm(dim=1),
        distance=distance(name, x, own_w),
    )


def distance(name, x, w):
    """Distance to the own prototype, as the head compares them."""
    if name == "reciprocal":
        return (x - w).square().mean(1)
    both = ("cosine", "cosine_adaptive", "cosine_subcenters", "simplex")
    w = F.normalize(w) if name in (*both, "cosine_raw_features") else w
    return ((F.normalize(x) if name in both else x) - w).norm(dim=1)


def cross_entropy(e, score, **options):
    """Cross entropy with another score of the own class."""
    scores = e.f.scatter(1, e.y[:, None], score[:, None])
    return F.cross_entropy(scores, e.y, reduction="none", **options)


def bent(angle):
    """The cosine up to pi, then arcs that go on falling, up to three half turns."""
    second = torch.where(angle <= 2 * math.pi, -angle.cos() - 2, angle.cos() - 4)
    return torch.where(angle <= math.pi, angle.cos(), second)


def arcface_linear(e):
    past = e.theta + 0.5 > math.pi
    value = torch.where(past, e.theta.cos() - 0.5 * math.sin(0.5), (e.theta + 0.5).cos())
    return cross_entropy(e, e.s * e.r * value)


def arcface_detached(e):
    plain = e.s * e.r * e.theta.cos()
    return cross_entropy(e, plain + (e.s * e.r * bent(e.theta + 0.5) - plain).detach())


def adaface(e):
    quality = (0.333 * (e.norm - 20) / (100 + 1e-3)).clamp(-1, 1).detach()
    # Past pi it falls on, and below zero it rises on: the angle here is never below.
    score = e.r * bent(e.theta - 0.4 * quality) - 0.4 * (1 + quality)
    return cross_entropy(e, e.s * score)


def magface(e, lowest, highest, weight, extend):
    a = e.norm.clamp(lowest, highest)
    m = 0.45 + (0.8 - 0.45) * (a - lowest) / (highest - lowest)
    if extend == "linear":
        past = e.theta + m > math.pi
        value = torch.where(past, e.theta.cos() - m * m.sin(), (e.theta + m).cos())
    else:
        value = bent(e.theta + m)
    return cross_entropy(e, e.s * e.r * value) + weight * (1 / a + a / highest**2)


def uniface(e, threshold):
    own = (1 + (threshold - e.f_y + 0.4 * e.s).exp()).log()
    return own + (1 + (e.rest - threshold).exp()).log().sum(1)


def sphereface2_offset(scale):
    """Where it begins, in single precision, with a ratio of the weights below 1."""
    z, away = 0.7 / (0.3 * (CLASSES - 1)), scale * (2 * 0.5**3 - 1 + 0.4)
    root = math.sqrt((1 - z) ** 2 + 4 * z * math.exp(-0.8 * scale))
    return torch.tensor(round(math.log(2 * z) - away - math.log(1 - z + root), 3)).item()


def sphereface2(e, offset):
    def sharp(cosine):
        return cosine + (2 * ((cosine + 1) / 2) ** 3 - 1 - cosine).detach()

    own = (1 + (-e.s * (sharp(e.f_y / e.s) - 0.4) - offset).exp()).log()
    others = (1 + (e.s * (sharp(e.rest / e.s) + 0.4) + offset).exp()).log().sum(1)
    return (0.7 * own + 0.3 * others) / e.s


def sample_margin(e):
    """Of the cosines, whatever the scores are."""
    own = F.one_hot(e.y, CLASSES).bool()
    return e.cosines.masked_fill(own, -1).amax(1) - e.cosines[own]


def kl(p, q):
    return (p * (p / q).log()).sum(1)


def divergences(e):
    q = e.rest.softmax(1)
    u = torch.full_like(q, 1 / q.shape[1])
    return kl(q, u), kl(u, q)


def lm_softmax(e):
    return e.rest.exp().sum(1).log() / e.s - e.f_y / e.s


def gm_softmax(e):
    numerator, denominator = 0.9 * e.f_y - 0.1 * e.s, 0.6 * e.f_y + 0.2 * e.s
    return (denominator.exp() + e.rest.exp().sum(1)).log() - numerator


COUNTS = torch.tensor([50, 40, 30, 20, 10, 5, 4, 3, 2], dtype=torch.double)


def against(e, score, mapped):
    """Cross entropy of a target score against mapped similarities, shape ``(N, C - 1)``."""
    return torch.logaddexp(score, (e.s * mapped).logsumexp(1)) - score


def raised(e, similarity, change):
    """The same where those above the target similarity are changed."""
    a = e.rest / e.s
    mapped = torch.where(a > similarity[:, None], change(a), a)
    return against(e, e.s * similarity, mapped)


def inter_topk(e):
    a = e.rest / e.s
    places = a.topk(2).indices
    nearer = (a.gather(1, places).acos() - 0.3).cos()
    return against(e, e.s * bent(e.theta + 0.2), a.scatter(1, places, nearer))


def circle(e):
    a, own = e.rest / e.s, e.f_y / e.s
    weight = (1.25 - own.detach()).clamp_min(0)
    score = e.s * weight * (own - 0.75)
    return against(e, score, (a.detach() + 0.25).clamp_min(0) * (a - 0.25))


def sface(e):
    a = e.rest / e.s
    pull = 1 / (1 + (-8 * (e.theta.detach() - 0.8)).exp())
    push = 1 / (1 + (8 * (a.detach().acos() - 1.23)).exp())
    return e.s * ((push * a).sum(1) - pull * e.theta.cos())


PLAIN = {
    "softmax": lambda e: F.cross_entropy(e.f, e.y, reduction="none"),
    "softmax_smoothed_margin": lambda e: cross_entropy(e, e.f_y - 0.2 * e.s, label_smoothing=0.1),
    "hard_bias": lambda e: (1 + (e.rest.amax(1) - e.f_y + 1).exp()).log(),
    "crammer_singer": lambda e: (e.rest.amax(1) - e.f_y + 1).clamp_min(0),
    "focal": lambda e: (1 - (-cross_entropy(e, e.f_y)).exp()) ** 2 * cross_entropy(e, e.f_y),
    "large_margin_gaussian": lambda e: cross_entropy(e, 1.3 * e.f_y) - 0.1 * e.f_y,
    "normface": lambda e: cross_entropy(e, e.f_y),
    "cosface": lambda e: cross_entropy(e, e.f_y - 0.35 * e.s),
    "cosface_negative": lambda e: cross_entropy(e, e.f_y + 0.3 * e.s),
    "cosface_per_class": lambda e: cross_entropy(e, e.f_y - (0.1 * e.y).double() * e.s),
    "arcface": lambda e: cross_entropy(e, e.s * e.r * bent(e.theta + 0.5)),
    "arcface_linear": arcface_linear,
    "arcface_detached": arcface_detached,
    "combined_margin": lambda e: cross_entropy(e, e.s * (e.r * bent(1.5 * e.theta + 0.3) - 0.2)),
    "l_softmax": lambda e: cross_entropy(e, e.s * e.r * bent(3 * e.theta)),
    "l_softmax_real_blend": lambda e: cross_entropy(
        e, e.s * e.r * (0.5 * e.theta.cos() + bent(2.5 * e.theta)) / 1.5
    ),
    "sphereface": lambda e: cross_entropy(e, e.s * e.r * bent(1.7 * e.theta)),
    "gm_softmax": gm_softmax,
    "gm_softmax_without_target": lambda e: e.s * lm_softmax(e),
    "lm_softmax": lm_softmax,
    "ldam": lambda e: cross_entropy(e, e.f_y - 0.5 * e.s * (2 / COUNTS[e.y]) ** 0.25),
    "logit_adjustment": lambda e: F.cross_entropy(
        e.f + 1.5 * (COUNTS / 164).log(), e.y, reduction="none"
    ),
    "vs_softmax": lambda e: F.cross_entropy(
        e.f / (50 / COUNTS) ** 0.3 + (COUNTS / 164).log(), e.y, reduction="none"
    ),
    "logit_divergence": lambda e: sum(divergences(e)) / 2,
    "logit_divergence_q_u": lambda e: divergences(e)[0],
    "logit_divergence_u_q": lambda e: divergences(e)[1],
    "sample_margin": sample_margin,
    # In evaluation mode its scale is what it was.
    "adacos": lambda e: cross_entropy(e, e.f_y),
    "adaface": adaface,
    "magface": lambda e: magface(e, 0.5, 2.0, 0.5, "monotone"),
    "magface_linear": lambda e: magface(e, 1.0, 9.0, 35.0, "linear"),
    # In evaluation mode nothing is drawn.
    "elasticface": lambda e: cross_entropy(e, e.s * e.r * bent(e.theta + 0.5)),
    "elasticface_cos": lambda e: cross_entropy(e, e.s * (e.r * e.theta.cos() - 0.35)),
    "cac": lambda e: cross_entropy(e, e.f_y) + 0.1 * e.distance,
    "arpl": lambda e: cross_entropy(e, e.f_y) + 0.1 * (e.distance + 1).clamp_min(0),
    # The threshold is a parameter in single precision.
    "uniface": lambda e: uniface(e, torch.tensor(math.log(10 * CLASSES)).item()),
    "sphereface2": lambda e: sphereface2(e, sphereface2_offset(e.s)),
    "mv_softmax": lambda e: raised(e, e.f_y / e.s - 0.35, lambda a: 1.2 * a + 0.2),
    "mv_softmax_arc_fixed": lambda e: raised(e, bent(e.theta + 0.3), lambda a: a + 0.4),
    # In evaluation mode its mean is where it began.
    "curricularface": lambda e: raised(e, bent(e.theta + 0.5), lambda a: a * (0.0 + a)),
    "inter_topk": inter_topk,
    "circle": circle,
    "sface": sface,
    "interclass_filter": lambda e: against(
        e, e.s * bent(e.theta + 0.5), (e.rest / e.s) * (e.rest / e.s <= 0.3)
    ),
    "hinge": lambda e: (e.rest - e.f_y[:, None] + 1).clamp_min(0).mean(1),
    "bce": lambda e: F.binary_cross_entropy_with_logits(
        e.f, F.one_hot(e.y, CLASSES).to(e.f), reduction="none"
    ).sum(1),
}

PAIRS = [
    pytest.param(term, head, id=f"{term}-{head}")
    for term in SPLIT_TERMS
    for head in HEADS
    if fits(SPLIT_TERMS[term], HEADS[head](CLASSES, CLASSES))
]


def problem(term, name, n, size):
    """A criterion in double precision, and features from near the own prototype to behind it."""
    head = HEADS[name](max(size, CLASSES - 1) if name == "simplex" else size, CLASSES)
    criterion = tammes.Criterion(head, SPLIT_TERMS[term], reduction="none").double().eval()
    head.weight.requires_grad_()
    labels = torch.arange(n) * 4 % CLASSES
    toward = torch.linspace(2.5, -2.5, n, dtype=torch.double)[:, None]
    first = head.weight.detach().view(CLASSES, -1, head.embedding_size)[labels, 0]
    features = toward * F.normalize(first)
    features = features + 0.3 * torch.randn_like(features)
    return criterion, features.requires_grad_(), labels


def test_the_table_has_a_plain_formula_for_every_term():
    assert PLAIN.keys() == SPLIT_TERMS.keys()


@pytest.mark.parametrize(("term", "name"), PAIRS)
def test_a_term_on_a_head_has_the_value_and_the_gradients_of_its_plain_formula(term, name):
    criterion, features, labels = problem(term, name, n=8, size=6)
    head = criterion.head
    inputs = [features, head.weight] + ([] if head.bias is None else [head.bias])
    loss = criterion(features, labels)
    plain = PLAIN[term](plain_problem(name, head, features, head.weight, head.bias, labels))
    assert_close(loss, plain, rtol=1e-9, atol=1e-10)
    weights = torch.linspace(0.5, 2, 8, dtype=torch.double)
    for got, want in zip(
        torch.autograd.grad(loss @ weights, inputs, allow_unused=True),
        torch.autograd.grad(plain @ weights, inputs, allow_unused=True),
        strict=True,
    ):
        assert_close(got, want, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    ("term", "name"),
    cover(
        [pair.values for pair in PAIRS if pair.values[0] not in DETACHED],
        lambda term, name: numbers_read(SPLIT_TERMS[term], name),
    ),
)
def test_the_gradients_of_a_term_on_a_head_are_those_of_finite_differences(term, name):
    criterion, features, labels = problem(term, name, n=3, size=3)
    if term == "adaface":
        # Far below the average norm the quality is clipped, so no gradient is left out.
        criterion.states["adaface"].mean.fill_(1e4)
    head = criterion.head
    tensors = [head.weight] + ([] if head.bias is None else [head.bias])

    def call(features, *tensors):
        replaced = dict(zip(("head.weight", "head.bias"), tensors, strict=False))
        return functional_call(criterion, replaced, (features, labels))

    assert torch.autograd.gradcheck(call, (features, *tensors), atol=1e-6, rtol=1e-4)
