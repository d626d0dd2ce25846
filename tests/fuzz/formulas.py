"""Formulas of every loss and every head, on all N x C scores, differentiated by autograd.

Nothing of the library is imported. The formulas are those of the papers with the conventions of
the library: a vector of length zero has no direction and is at a right angle to everything, and an
angle of 0 or pi has gradient zero.
"""

import math
import statistics
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from fuzz.ranges import COSINE_HEADS

SHORT = 1e-12
"""Length below which a vector has no direction."""


class View(NamedTuple):
    """What a term is evaluated on: the examples that count and the classes that are not masked.

    Attributes:
        features: shape ``(n, D)``.
        own: prototype of each example's class, shape ``(n, D)``.
        labels: class of each example among those that are not masked, shape ``(n,)``.
        classes: class of each example among all, shape ``(n,)``.
        similarity: shape ``(n, C)``.
        cosines: shape ``(n, C)``.
        scale: a scalar.
        length: factor of the cosine in the similarity to the own class, shape ``(n,)``.
        distance: to the own prototype, shape ``(n,)``.
        prototypes: of all classes, shape ``(C, D)``.
        there: which of all classes are not masked, shape ``(C,)``.
        rounding: distance of unit vectors below which their angle has gradient zero.
    """

    features: Tensor
    own: Tensor
    labels: Tensor
    classes: Tensor
    similarity: Tensor
    cosines: Tensor
    scale: Tensor
    length: Tensor
    distance: Tensor
    prototypes: Tensor
    there: Tensor
    rounding: float

    @property
    def target(self):
        return self.similarity.gather(1, self.labels[:, None])[:, 0]

    @property
    def score(self):
        return self.scale * self.target

    @property
    def rest(self):
        """Scores of the other classes, shape ``(n, C - 1)``."""
        return self.scale * _without(self.similarity, self.labels)

    @property
    def others(self):
        return self.rest.logsumexp(1)

    @property
    def hardest(self):
        return self.rest.max(1).values

    @property
    def theta(self):
        return angle(self.features, self.own, self.rounding)


def _without(matrix, labels):
    """The columns of the other classes, shape ``(n, C - 1)``."""
    rows, columns = matrix.shape
    other = torch.arange(columns)[None] != labels[:, None]
    return matrix[other].reshape(rows, columns - 1)


def norm(vectors):
    return torch.linalg.vector_norm(vectors, dim=-1)


def unit(vectors):
    length = norm(vectors)[..., None]
    there = length > SHORT
    return torch.where(there, vectors / torch.where(there, length, 1.0), 0.0)


def angle(left, right, rounding):
    """Angle of paired rows, formula K4."""
    left_unit, right_unit = unit(left), unit(right)
    apart, together = norm(left_unit - right_unit), norm(left_unit + right_unit)
    theta = 2 * torch.atan2(apart, together)
    flat = torch.minimum(apart, together) < rounding
    theta = torch.where(flat, theta.detach(), theta)
    return torch.where((norm(left) > SHORT) & (norm(right) > SHORT), theta, math.pi / 2)


def _column(setting):
    return setting[:, None] if isinstance(setting, Tensor) and setting.ndim else setting


def softplus(value):
    return -logsigmoid(-value)


def cross_entropy(view, score):
    """Loss of a target score against the other classes."""
    return softplus(view.others - score)


# ------------------------------------------------------------------------------ terms on scores


def softmax(view, smoothing, margin):
    score = view.scale * (view.target - margin)
    scores = torch.cat([score[:, None], view.rest], 1)
    logs = scores.log_softmax(1)
    return -(1 - smoothing) * logs[:, 0] - smoothing * logs.mean(1)


def hard_bias(view, margin):
    return softplus(view.hardest - view.score + margin)


def crammer_singer(view, margin):
    return (view.hardest - view.score + margin).relu()


def focal(view, gamma, margin):
    excess = view.others - view.scale * (view.target - margin)
    return torch.exp(gamma * logsigmoid(excess)) * softplus(excess)


def hinge(view, margin):
    over = view.rest - view.score[:, None] + _column(margin)
    return over.relu().mean(1)


def bce(view, average):
    loss = softplus(-view.score) + softplus(view.rest).sum(1)
    return loss / view.similarity.shape[1] if average else loss


def uniface(view, margin, negative_weight, state):
    threshold = state["value"]
    own = softplus(threshold - view.scale * (view.target - margin))
    return own + negative_weight * softplus(view.rest - threshold).sum(1)


def sphereface2(view, margin, balance, power, state):
    def sharp(cosine, power):
        bent = 2 * ((cosine.detach() + 1) / 2).clamp_min(0) ** power - 1
        return cosine + (bent - cosine.detach())

    rest, offset = _without(view.similarity, view.labels), state["value"]
    own = softplus(-view.scale * (sharp(view.target, power) - margin) - offset)
    others = view.scale * (sharp(rest, _column(power)) + _column(margin)) + offset
    others = torch.where(rest > -math.inf, softplus(others), 0.0).sum(1)
    return (balance * own + (1 - balance) * others) / view.scale


def cac(view, anchor):
    return cross_entropy(view, view.score) + anchor * view.distance


def arpl(view, bound, margin, state):
    beyond = (view.distance - state["value"] + margin).relu()
    return cross_entropy(view, view.score) + bound * beyond


def large_margin_gaussian(view, margin, likelihood):
    return cross_entropy(view, (1 + margin) * view.score) - likelihood * view.score


def normface(view):
    return cross_entropy(view, view.score)


def cosface(view, margin):
    return cross_entropy(view, view.scale * (view.target - margin))


def ldam(view, counts, max_margin):
    counts = torch.tensor(counts, dtype=view.similarity.dtype)
    margin = max_margin * (counts.min() / counts[view.classes]) ** 0.25
    return cosface(view, margin)


def logit_adjustment(view, counts, tau):
    return vs_softmax(view, counts, 0.0, tau)


def vs_softmax(view, counts, gamma, tau):
    counts = torch.tensor(counts, dtype=view.similarity.dtype)
    counts = counts[view.there]
    scores = view.scale * view.similarity * (counts / counts.max()) ** gamma
    scores = scores + tau * (counts / counts.sum()).log()
    return scores.logsumexp(1) - scores.gather(1, view.labels[:, None])[:, 0]


def _bent(view, m1, m2, extension="monotone"):
    """The continued cosine of ``m1 * theta + m2``."""
    theta = view.theta
    phi = m1 * theta + m2
    if extension == "linear":
        m2 = torch.as_tensor(m2, dtype=theta.dtype)
        return torch.where(phi <= math.pi, phi.cos(), theta.cos() - m2 * m2.sin())
    turns = (phi / math.pi).floor().detach()
    return torch.where(turns % 2 == 0, 1.0, -1.0) * phi.cos() - 2 * turns


def combined_margin(view, m1=1.0, m2=0.0, m3=0.0, extension="monotone", gradient="exact"):
    return cross_entropy(view, _angular_score(view, m1, m2, m3, extension, gradient))


def _angular_score(view, m1, m2, m3, extension, gradient):
    similarity = view.length * _bent(view, m1, m2, extension) - m3
    if gradient == "detached":
        # A vector without direction has no gradient here either.
        plain = view.length * (unit(view.features) * unit(view.own)).sum(1)
        similarity = plain + (similarity - plain).detach()
    return view.scale * similarity


def arcface(view, margin, extension, gradient):
    return combined_margin(view, 1.0, margin, 0.0, extension, gradient)


def l_softmax(view, margin, blend, gradient):
    score = _angular_score(view, margin, 0.0, 0.0, "monotone", gradient)
    return cross_entropy(view, (blend * view.score + score) / (1 + blend))


def gm_softmax(view, alpha1, beta1, alpha2, beta2):
    numerator = view.scale * (alpha1 * view.target + beta1)
    beta2 = torch.as_tensor(beta2, dtype=numerator.dtype).expand_as(numerator)
    there = beta2 > -math.inf
    denominator = view.scale * (alpha2 * view.target + torch.where(there, beta2, 0.0))
    both = torch.logaddexp(denominator, view.others)
    return torch.where(there, both, view.others) - numerator


def lm_softmax(view):
    return view.others / view.scale - view.target


def logit_divergence(view, kind):
    logs, count = view.rest.log_softmax(1), view.rest.shape[1]
    to_uniform = (logs.exp() * (logs + math.log(count))).sum(1)
    from_uniform = -(logs + math.log(count)).mean(1)
    both = (to_uniform + from_uniform) / 2
    return {"q_u": to_uniform, "u_q": from_uniform, "symmetric": both}[kind]


def sample_margin(view):
    own = view.cosines.gather(1, view.labels[:, None])[:, 0]
    return _without(view.cosines, view.labels).max(1).values - own


def adaface(view, margin, concentration, momentum, state):
    norms = norm(view.features).detach().clamp(1e-3, 100.0)
    quality = ((norms - state["mean"]) / (state["std"] + 1e-3) * concentration).clamp(-1, 1)
    bent = view.length * _bent(view, 1.0, -margin * quality)
    return cross_entropy(view, view.scale * (bent - margin * (1 + quality)))


def magface(view, min_margin, max_margin, min_norm, max_norm, norm_weight, extension):
    size = norm(view.features).clamp_min(min_norm).clamp_max(max_norm)
    margin = min_margin + (max_margin - min_margin) * (size - min_norm) / (max_norm - min_norm)
    score = view.scale * view.length * _bent(view, 1.0, margin, extension)
    return cross_entropy(view, score) + norm_weight * (1 / size + size / max_norm**2)


def elasticface(view, margin, std, kind, seed, state):
    if state["training"]:
        steps = int(state["steps"])
        drawn = [_normal(seed, steps, 1 + place) for place in range(len(view.features))]
        margin = margin + std * torch.tensor(drawn, dtype=view.features.dtype)
    if kind == "arc":
        return arcface(view, margin, "monotone", "exact")
    return combined_margin(view, m3=margin)


def _raised_entropy(view, similarity, raised):
    """Loss of a target similarity against mapped ones, where they are larger than it."""
    rest = _without(view.similarity, view.labels)
    mapped = torch.where(rest > similarity[:, None], raised(rest), rest)
    return _mapped_entropy(view, similarity, mapped)


def _margin_target(view, margin, kind):
    if kind == "arc":
        return view.length * _bent(view, 1.0, margin)
    return view.target - margin


def mv_softmax(view, margin, emphasis, kind, adaptive):
    emphasis = _column(emphasis)
    return _raised_entropy(
        view,
        _margin_target(view, margin, kind),
        lambda a: (1 + emphasis * adaptive) * a + emphasis,
    )


def curricularface(view, margin, momentum, state):
    target = _margin_target(view, margin, "arc")
    return _raised_entropy(view, target, lambda a: a * (state["mean"] + a))


def _mapped_entropy(view, similarity, mapped):
    return softplus((view.scale * mapped).logsumexp(1) - view.scale * similarity)


def inter_topk(view, margin, top_k, penalty):
    rest = _without(view.similarity, view.labels)
    kth = rest.topk(min(top_k, rest.shape[1])).values[:, -1:]
    theta = 2 * torch.atan2((1 - rest).clamp_min(1e-30).sqrt(), (1 + rest).clamp_min(1e-30).sqrt())
    nearer = (theta - _column(penalty)).cos()
    return _mapped_entropy(
        view, _margin_target(view, margin, "arc"), torch.where(rest >= kth, nearer, rest)
    )


def circle(view, margin):
    rest, target = _without(view.similarity, view.labels), view.target
    weight = (1 + margin - target.detach()).relu()
    column = _column(margin)
    mapped = (rest.detach() + column).relu() * (rest - column)
    return _mapped_entropy(view, weight * (target - 1 + margin), mapped)


def sface(view, own_angle, other_angle, steepness):
    rest = _without(view.similarity, view.labels)
    pull = torch.sigmoid(steepness * (view.theta.detach() - own_angle))
    away = _column(other_angle) - rest.detach().clamp(-1, 1).acos()
    push = torch.sigmoid(_column(steepness) * away)
    return view.scale * ((push * rest).sum(1) - pull * view.target)


def interclass_filter(
    view, threshold, m1=1.0, m2=0.0, m3=0.0, extension="monotone", gradient="exact"
):
    rest = _without(view.similarity, view.labels)
    mapped = torch.where(rest > _column(threshold), 0.0, rest)
    score = _angular_score(view, m1, m2, m3, extension, gradient)
    return softplus((view.scale * mapped).logsumexp(1) - score)


def _normal(seed, steps, place):
    """The standard normal number of an example, counted from one, in a step."""
    golden = 0x9E3779B97F4A7C15
    key = _mix(_mix(seed + golden) + steps)
    bits = _mix(place * golden + key) >> 41
    return statistics.NormalDist().inv_cdf((bits + 0.5) / 2**23)


def _mix(word):
    """The finaliser of SplitMix64 in whole numbers."""
    word &= 2**64 - 1
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
    return word ^ (word >> 31)


# -------------------------------------------------------------------------- terms on prototypes


def zero_centroid(prototypes, normalize):
    prototypes = prototypes.flatten(0, -2)
    return (unit(prototypes) if normalize else prototypes).mean(0).square().sum()


def subcenter_spread(prototypes):
    if prototypes.ndim == 2:
        return 0 * prototypes.sum()
    classes, centers, _ = prototypes.shape
    total = 0
    for own in unit(prototypes):
        for t in range(centers):
            for u in range(t):
                total = total + norm(own[t] - own[u])
    return total / (classes * centers * (centers - 1))


def super_symmetry(prototypes):
    prototypes = prototypes.flatten(0, -2)
    count = len(prototypes)
    power = prototypes.square().sum(1).mean()
    simplex = torch.eye(count, dtype=prototypes.dtype) - 1 / count
    gram = prototypes @ prototypes.T
    return (gram - power * count / (count - 1) * simplex).square().sum()


def proxy_anchor(view, scale, margin):
    cosine = view.cosines
    pulled, pushed, present = 0.0, 0.0, 0
    for c in range(cosine.shape[1]):
        own = view.labels == c
        pulled = pulled + (1 + (-scale * (cosine[own, c] - margin)).exp().sum()).log()
        pushed = pushed + (1 + (scale * (cosine[~own, c] + margin)).exp().sum()).log()
        present += bool(own.any())
    return pulled / max(present, 1) + pushed / view.there.sum()


def multi_positive(view, scale, margin, kind, form):
    others = scale * _without(view.cosines, view.labels)
    if kind == "arc":
        phi = view.theta + margin
        turns = (phi / math.pi).floor().detach()
        target = torch.where(turns % 2 == 0, 1.0, -1.0) * phi.cos() - 2 * turns
    else:
        target = view.theta.cos() - margin
    others = others.logsumexp(1)
    if form == "apart":
        return softplus(others) + softplus(-scale * target)
    return softplus(others - scale * target)


# ---------------------------------------------------------------------------- terms on features


def _relations(labels):
    """Which pairs of different examples share a class, and which pairs do not."""
    same = labels[:, None] == labels[None]
    return same & ~torch.eye(len(labels), dtype=torch.bool), ~same


def nca(features, labels, scale, normalize):
    features = unit(features) if normalize else features
    same, other = _relations(labels)
    scores = -scale * (features[:, None] - features[None]).square().sum(2)
    rows = []
    for i in range(len(labels)):
        near, far = scores[i][same[i]], scores[i][other[i]]
        every = torch.cat([near, far])
        rows.append(every.logsumexp(0) - near.logsumexp(0) if len(near) else scores[i].sum() * 0)
    return rows, same.any(1)


def proto(features, labels, scale, normalize):
    features = unit(features) if normalize else features
    same, _ = _relations(labels)
    present = labels.unique()
    rows = []
    for i in range(len(labels)):
        if not same[i].any():
            rows.append(features[i].sum() * 0)
            continue
        means = [
            features[same[i] if c == labels[i] else labels == c].mean(0).reshape(1, -1)
            for c in present
        ]
        scores = -scale * (features[i] - torch.cat(means)).square().sum(1)
        own = (present == labels[i]).nonzero()[0, 0]
        rows.append(scores.logsumexp(0) - scores[own])
    return rows, same.any(1)


def _hardest_pairs(features, labels, normalize):
    """Index and distances of the farthest of the own class and the nearest of another."""
    features = unit(features) if normalize else features
    same, other = _relations(labels)
    for i in range(len(labels)):
        if not (same[i].any() and other[i].any()):
            yield None
            continue
        distance = norm(features[i] - features)
        yield distance[same[i]].max(0).values, distance[other[i]].min(0).values


def triplet(features, labels, margin, normalize):
    pairs = [*_hardest_pairs(features, labels, normalize)]
    rows = [features.sum() * 0 if p is None else (p[0] - p[1] + margin).relu() for p in pairs]
    return rows, torch.tensor([p is not None for p in pairs], dtype=torch.bool)


def contrastive(features, labels, margin, normalize):
    pairs = [*_hardest_pairs(features, labels, normalize)]
    rows = [
        features.sum() * 0
        if pair is None
        else (pair[0].square() + (margin - pair[1]).relu().square()) / 2
        for pair in pairs
    ]
    return rows, torch.tensor([p is not None for p in pairs], dtype=torch.bool)


def center(features, labels, rate, state):
    rows = (features - state["centers"][labels]).square().sum(1) / 2
    return [*rows], torch.ones(len(labels), dtype=torch.bool)


ON_SCORES = {
    f.__name__: f
    for f in (
        *(softmax, hard_bias, crammer_singer, focal, hinge, bce, large_margin_gaussian, normface),
        *(
            cosface,
            ldam,
            logit_adjustment,
            vs_softmax,
            arcface,
            combined_margin,
            l_softmax,
            gm_softmax,
            lm_softmax,
        ),
        *(logit_divergence, sample_margin, adaface, magface, elasticface, uniface, cac, arpl),
        sphereface2,
        *(mv_softmax, curricularface, inter_topk, circle, sface, interclass_filter),
    )
} | {"sphereface": l_softmax, "adacos": normface}
ON_PROTOTYPES = {f.__name__: f for f in (zero_centroid, super_symmetry, subcenter_spread)}
ON_PROXIES = {"proxy_anchor": proxy_anchor, "multi_positive": multi_positive}
ON_FEATURES = {f.__name__: f for f in (nca, proto, triplet, contrastive, center)}
TERMS = {**ON_SCORES, **ON_PROTOTYPES, **ON_PROXIES, **ON_FEATURES}
"""Every term of the library by name."""


# ------------------------------------------------------------------------------------- heads


def similarity(head, features, weight, bias):
    """Similarity of every example to every class, and the length beside the cosine."""
    if head in ("linear", "linear_no_bias"):
        scores = features @ weight.T
        return scores if bias is None else scores + bias
    if head == "gaussian":
        return (features[:, None] - weight[None]).square().sum(2) / -2
    if head == "distance":
        return -norm(features[:, None] - weight[None])
    if head == "reciprocal":
        return (features[:, None] - weight[None]).square().mean(2) - features @ weight.T
    if weight.ndim == 3:
        return torch.einsum("nd,ckd->nck", unit(features), unit(weight)).max(2).values
    return (features if head == "cosine_raw" else unit(features)) @ unit(weight).T


def length(head, features, own):
    """Factor of the cosine in the similarity to the own class."""
    if head == "linear_no_bias":
        return norm(features) * norm(own)
    return norm(features) if head == "cosine_raw" else torch.ones_like(norm(features))


def distance(head, features, own):
    """Distance to the own prototype, of what the head compares."""
    if head == "reciprocal":
        return (features - own).square().mean(1)
    own = unit(own) if head in (*COSINE_HEADS, "cosine_raw") else own
    return norm((unit(features) if head in COSINE_HEADS else features) - own)


def project(features, prototypes, within):
    """Features on the complement of the prototypes, formulas 6.4 and 6.5."""
    kind, number, detach = within
    prototypes = (prototypes.detach() if detach else prototypes).flatten(0, -2)
    if kind == "direct_sum":
        if number is None:
            return features - features @ torch.linalg.pinv(prototypes) @ prototypes
        gram = prototypes @ prototypes.T
        gram = gram + number * torch.eye(len(gram), dtype=gram.dtype)
        return features - features @ prototypes.T @ torch.linalg.solve(gram, prototypes)
    _, values, directions = torch.linalg.svd(prototypes, full_matrices=False)
    ratio = values / values.max()
    there = ratio > max(prototypes.shape) * torch.finfo(prototypes.dtype).eps
    powers = torch.where(there, torch.where(there, ratio, 1.0) ** number, 0.0)
    return features - (features @ directions.T * powers) @ directions
