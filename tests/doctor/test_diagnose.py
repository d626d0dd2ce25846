"""Every illness is found where it is, and not in a healthy twin; looking changes nothing."""

import copy
import json
import math

import pytest
import torch
import torch.nn.functional as F
from catalogue import HEADS, TERMS, fits
from messages import pattern
from torch import nn
from torch.testing import assert_close

import tammes
from tammes.doctor import NAMES, Diagnosis, diagnose
from tammes.schedules import WarmUp

CLASSES, DIM, EXAMPLES = 20, 32, 120
FALLING = [3.0, 2.0, 1.5, 1.2]


def batch(classes=CLASSES, dim=DIM, examples=EXAMPLES, spread=1.0):
    return spread * torch.randn(examples, dim), torch.arange(examples) % classes


def found(criterion, features=None, labels=None, **known):
    if features is None:
        features, labels = batch(criterion.head.num_classes, criterion.head.embedding_size)
    return {each.name: each for each in diagnose(criterion, features, labels, **known).findings}


def cosine(loss, *, scale=16.0, classes=CLASSES, dim=DIM):
    return tammes.Criterion(tammes.CosineHead(dim, classes, scale=scale), loss)


def linear(loss, **options):
    return tammes.Criterion(tammes.LinearHead(DIM, CLASSES, **options), loss)


def with_prototypes(criterion, prototypes):
    with torch.no_grad():
        criterion.head.weight.copy_(prototypes)
    return criterion


def in_one_direction(noise):
    rows = torch.ones(CLASSES, DIM) + noise * torch.randn(CLASSES, DIM)
    return with_prototypes(cosine(tammes.arcface()), rows)


def some_features(change):
    features, labels = batch()
    return change(features), labels


def not_finite(features):
    features[3, 3] = torch.inf
    return features


def zero_rows(share):
    def change(features):
        features = features.relu()
        features[: int(share * len(features))] = 0
        return features

    return change


def live(count):
    return lambda features: features * (torch.arange(DIM) < count)


def at_chance(accuracy):
    """Features and prototypes all in one place, or features at the prototypes of their classes."""
    criterion = cosine(tammes.arcface(margin=0.1), scale=8.0)
    features, labels = batch()
    if accuracy:
        return criterion, criterion.head.weight.detach()[labels], labels
    collapsed = 1 + 0.01 * torch.randn(CLASSES, DIM)
    return with_prototypes(criterion, collapsed), 1 + 0.01 * features, labels


CASES = {
    "not-finite": (
        lambda: found(linear(tammes.softmax()), *some_features(not_finite)),
        lambda: found(linear(tammes.softmax())),
    ),
    "prototypes-not-trained": (
        lambda: (
            c := cosine(tammes.cosface()),
            found(c, optimizer=torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)),
        )[1],
        lambda: (
            c := cosine(tammes.cosface()),
            found(c, optimizer=torch.optim.SGD(c.parameters(), lr=0.1)),
        )[1],
    ),
    "prototypes-collapsed": (
        lambda: found(in_one_direction(0.1)),
        lambda: found(in_one_direction(2.0)),
    ),
    "features-collapsed": (
        lambda: found(
            cosine(tammes.cosface()), *some_features(lambda f: 1 + 0.05 * f), losses=FALLING
        ),
        # A ReLU network has such features before it is trained.
        lambda: found(cosine(tammes.cosface()), *some_features(lambda f: 1 + 0.05 * f)),
    ),
    "features-zero": (
        lambda: found(cosine(tammes.lm_softmax()), *some_features(zero_rows(0.29))),
        lambda: found(cosine(tammes.lm_softmax()), *some_features(zero_rows(0.0))),
    ),
    "features-dead": (
        lambda: found(linear(tammes.softmax()), *some_features(live(8))),
        lambda: found(linear(tammes.softmax()), *some_features(live(20))),
    ),
    "loss-at-chance": (
        lambda: found(*at_chance(False), losses=[3.3, 3.02, 3.0, 3.01]),
        lambda: found(*at_chance(True), losses=[3.3, 2.02, 1.3, 0.7]),
    ),
    "saturated": (
        lambda: found(cosine(tammes.cosface(margin=-1.5), scale=64.0)),
        # Everything is learned, and so nothing is left to learn.
        lambda: (
            c := cosine(tammes.cosface(), scale=64.0),
            found(c, c.head.weight.detach()[batch()[1]], batch()[1], losses=FALLING),
        )[1],
    ),
    "learning-rate": (
        lambda: found(linear(tammes.softmax()), lr=5.0, trial=[3.0, 4.7, 9.0]),
        lambda: found(linear(tammes.softmax()), lr=0.1, trial=[3.0, 2.7, 2.2]),
    ),
    "first-gradient": (
        lambda: found(linear(tammes.nca()), lr=0.1),
        lambda: found(linear(tammes.nca()), lr=0.001),
    ),
    "gradient-ratio": (
        lambda: found(linear(tammes.softmax() + tammes.nca())),
        lambda: found(linear(tammes.softmax() + 0.05 * tammes.nca())),
    ),
    "negative-margin": (
        lambda: found(cosine(tammes.cosface(margin=-0.3), scale=30.0)),
        lambda: found(linear(tammes.softmax(margin=-0.3), scale=10.0, bias=False)),
    ),
    "margin-infeasible": (
        lambda: found(cosine(tammes.cosface(margin=0.5), classes=20, dim=2)),
        lambda: found(cosine(tammes.cosface(margin=0.5), classes=20, dim=32)),
    ),
    "scale-small": (
        lambda: found(cosine(tammes.normface(), scale=2.0)),
        lambda: found(cosine(tammes.normface(), scale=8.0)),
    ),
    "few-examples": (
        lambda: found(cosine(tammes.arcface(), scale=64.0), counts=[3] * CLASSES),
        lambda: found(cosine(tammes.arcface(), scale=64.0), counts=[20] * CLASSES),
    ),
}


def test_every_illness_has_a_case():
    assert sorted(CASES) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_an_illness_is_found_where_it_is_and_not_in_a_healthy_twin(name):
    ill, healthy = CASES[name]
    finding = ill()[name]
    assert finding.severity == "warning"
    assert all((finding.measured, finding.why, finding.change))
    assert "warning" not in {each.severity for each in healthy().values()}


# ---------------------------------------------------------------------------- one by one


def test_a_gradient_is_that_of_an_example():
    criterion = linear(tammes.softmax() + 2.0 * tammes.bce(), bias=False)
    features, labels = batch()
    terms = diagnose(criterion, features, labels).measured["terms"]
    prototypes = criterion.head.weight.detach()
    scores, own = features @ prototypes.T, F.one_hot(labels, CLASSES)
    softmax = ((scores.softmax(1) - own) @ prototypes).norm(dim=1).mean()
    bce = 2 * ((scores.sigmoid() - own) @ prototypes).norm(dim=1).mean()
    assert_close(terms["softmax"]["gradient"], float(softmax), rtol=1e-5, atol=0)
    assert_close(terms["bce"]["gradient"], float(bce), rtol=1e-5, atol=0)
    assert_close(terms["softmax"]["value"], float(F.cross_entropy(scores, labels)))


def test_the_negative_margin_warning_names_margins_that_train():
    finding = found(cosine(tammes.cosface(margin=-0.3), scale=30.0))["negative-margin"]
    limit = -math.log(CLASSES) / 30
    assert f"above {limit:.2g}" in finding.change
    assert "negative-margin" not in found(cosine(tammes.cosface(margin=0.99 * limit), scale=30.0))
    # An angular margin adds sin m to the cosine of a right angle.
    assert "negative-margin" in found(cosine(tammes.arcface(margin=-0.3), scale=30.0))


def test_the_weight_that_evens_the_gradients_out_is_named():
    finding = found(linear(tammes.softmax() + tammes.nca()))["gradient-ratio"]
    weight = float(finding.change.rsplit(" ", 1)[1])
    assert not found(linear(tammes.softmax() + weight * tammes.nca()))


def test_a_term_that_hardly_counts_is_a_note():
    finding = found(cosine(tammes.cosface() + 0.5 * tammes.sample_margin(), scale=64.0))
    assert finding["gradient-ratio"].severity == "note"
    diagnosis = diagnose(
        cosine(tammes.cosface() + 0.5 * tammes.sample_margin(), scale=64.0), *batch()
    )
    assert diagnosis.healthy
    assert str(diagnosis).startswith("note, gradient-ratio: ")


def test_terms_are_compared_at_the_first_step_only():
    assert "gradient-ratio" not in found(linear(tammes.softmax() + tammes.nca()), losses=FALLING)


def test_a_large_first_gradient_of_distances_is_a_note():
    # Longer features than prototypes, as those of a convolutional network.
    criterion, (features, labels) = tammes.LargeMarginGaussian(DIM, CLASSES), batch()
    finding = found(criterion, 10 * features, labels, lr=0.1)["first-gradient"]
    assert finding.severity == "note"
    assert "may train worse" in str(finding)
    assert "first-gradient" not in found(criterion, 10 * features, labels, lr=0.001)


def test_distances_do_not_hide_a_warning_about_a_metric_loss():
    loss = tammes.large_margin_gaussian() + 0.05 * tammes.nca()
    criterion, (features, labels) = (
        tammes.Criterion(tammes.GaussianHead(DIM, CLASSES), loss),
        batch(),
    )
    alone = tammes.Criterion(criterion.head, 0.05 * tammes.nca())
    for each in (criterion, alone):
        finding = found(each, 10 * features, labels, lr=0.1)["first-gradient"]
        assert finding.severity == "warning"
        assert "gradient of nca" in str(finding)


def test_adaptive_optimizers_have_no_first_gradient():
    criterion = linear(tammes.nca())
    for kind, expected in ((torch.optim.SGD, True), (torch.optim.Adam, False)):
        optimizer = kind(criterion.parameters(), lr=0.1)
        assert ("first-gradient" in found(criterion, optimizer=optimizer)) == expected


def test_metric_losses_need_company():
    criterion = linear(0.001 * tammes.nca())
    alone = torch.randn(CLASSES, DIM), torch.arange(CLASSES)
    assert "few-examples" in found(criterion, *alone)
    assert "few-examples" not in found(criterion)
    assert "few-examples" not in found(linear(tammes.softmax()), *alone)


def test_a_metric_loss_has_no_accuracy_and_no_prototypes_to_judge():
    for loss in (tammes.nca(), 0.1 * tammes.nca() + tammes.zero_centroid()):
        criterion = with_prototypes(cosine(loss), torch.ones(CLASSES, DIM))
        # Satisfied examples, far apart.
        labels = torch.arange(EXAMPLES) % CLASSES
        features = 100 * F.one_hot(labels, DIM).float()
        diagnosis = diagnose(criterion, features, labels, losses=FALLING)
        assert not {"accuracy", "prototype_cosine"} & set(diagnosis.measured)
        assert diagnosis.healthy


def test_infeasible_margins_say_the_largest():
    finding = found(cosine(tammes.cosface(margin=0.5), classes=20, dim=2))["margin-infeasible"]
    assert f"at most {1 - math.cos(2 * math.pi / 20):.3g}" in finding.change
    mixed = found(cosine(tammes.combined_margin(1.0, 0.3, 0.5), classes=20, dim=2))
    assert "a smaller margin" in mixed["margin-infeasible"].change


def test_the_wanted_posterior_decides_the_scale():
    criterion = cosine(tammes.normface(), scale=5.0)
    assert "scale-small" not in found(criterion, posterior=0.9)
    assert "scale-small" in found(criterion, posterior=0.999)
    learned = tammes.Criterion(tammes.CosineHead(DIM, CLASSES, scale="learnable"), tammes.softmax())
    assert "scale-small" not in found(learned, posterior=0.999999)


def test_a_scheduled_margin_counts_with_its_value_of_now():
    criterion = cosine(tammes.cosface(margin=0.2) + tammes.cosface(margin=0.2), scale=30.0)
    criterion.schedule(**{"cosface_2.margin": WarmUp(-0.5, 0.35, steps=4)})
    assert "of cosface_2 adds 15" in found(criterion)["negative-margin"].measured
    for _ in range(4):
        criterion.step()
    assert "negative-margin" not in found(criterion)


def test_a_loss_that_a_schedule_raises_is_no_jump():
    criterion, rising = cosine(tammes.cosface()), [2.0, 4.0, 6.0]
    assert "learning-rate" in found(criterion, losses=rising)
    criterion.schedule(margin=WarmUp(0.0, 0.35, steps=4))
    assert "learning-rate" not in found(criterion, losses=rising)


def test_a_loss_may_rest_in_the_first_steps():
    case = at_chance(False)
    for steps, expected in ((46, False), (400, True)):
        assert (
            "loss-at-chance" in found(*case, losses=[3.04, 3.03, 3.02], steps=steps)
        ) == expected
    assert "loss-at-chance" not in found(*case, losses=[3.6, 3.4, 3.04])


def test_ignored_examples_do_not_count():
    criterion = cosine(tammes.cosface())
    features, labels = batch()
    ignored = torch.cat([labels, torch.full((40,), -100)])
    more = torch.cat([features, torch.zeros(40, DIM)])
    seen = diagnose(criterion, more, ignored).measured
    assert seen == diagnose(criterion, features, labels).measured


# ---------------------------------------------------------------- what a call leaves alone


def everything(criterion):
    """Criterion that has all that could change: states, schedules, logged terms, gradients."""
    schedule = WarmUp(0.0, 0.35, steps=10)
    criterion.schedule(**{"cosface.margin": schedule})
    features, labels = batch()
    criterion(features.requires_grad_(), labels).backward()
    return criterion, features, labels


@pytest.mark.parametrize("training", [True, False])
def test_looking_changes_nothing(training):
    loss = tammes.cosface() + tammes.adaface() + 0.1 * tammes.center() + 0.1 * tammes.nca()
    criterion, features, labels = everything(cosine(loss))
    criterion.train(training)
    before = copy.deepcopy(criterion)
    gradients = [p.grad.clone() for p in criterion.parameters()]
    feature_gradient, terms = features.grad.clone(), criterion.terms
    torch.manual_seed(1)
    diagnose(criterion, features, labels, losses=[2.0, 1.0])
    after = torch.rand(3)
    torch.manual_seed(1)
    assert after.equal(torch.rand(3))
    assert [m.training for m in criterion.modules()] == [m.training for m in before.modules()]
    for name, value in before.state_dict().items():
        assert criterion.state_dict()[name].equal(value), name
    assert all(p.grad.equal(g) for p, g in zip(criterion.parameters(), gradients, strict=True))
    assert features.grad.equal(feature_gradient)
    assert criterion.terms == terms
    assert_close(criterion(features, labels), before(features, labels), rtol=0, atol=0)


def test_margins_that_are_drawn_in_training_are_not_drawn():
    criterion, (features, labels) = cosine(tammes.elasticface(std=0.2)), batch()
    criterion(features, labels)
    seen = diagnose(criterion, features, labels).measured
    assert criterion.training
    assert criterion.states["elasticface"].training
    assert criterion.states["elasticface"].steps.item() == 1
    assert seen == diagnose(criterion.eval(), features, labels).measured
    assert seen["loss"] == pytest.approx(criterion(features, labels).item(), rel=1e-6)


class Restless(tammes.states.State):
    """State that draws and counts whenever it is read, and draws when it is made."""

    reads_features = False

    def __init__(self):
        super().__init__()
        self.register_buffer("readings", torch.rand(1))

    def reading(self, batch):
        self.readings += 1
        return torch.rand_like(self.readings)


@tammes.term(reads="target", state=lambda term, head: Restless().to(head.weight.device))
def restless(split, *, state=None):
    return split.target * state + 0 * torch.rand_like(split.target)


def test_states_that_change_when_read_stay_as_they_are():
    criterion, (features, labels) = cosine(restless()), batch()
    before, random = copy.deepcopy(criterion.state_dict()), torch.get_rng_state()
    diagnose(criterion, features, labels)
    assert torch.get_rng_state().equal(random)
    assert criterion.state_dict()["states.restless.readings"].equal(
        before["states.restless.readings"]
    )


def test_a_head_that_samples_classes_does_not_draw():
    head = tammes.ShardedHead(tammes.CosineHead, DIM, CLASSES, scale=16.0, sample_rate=0.3)
    criterion = tammes.Criterion(head, tammes.cosface())
    before = {name: value.clone() for name, value in criterion.state_dict().items()}
    assert diagnose(criterion, *batch()).healthy
    assert all(value.equal(before[name]) for name, value in criterion.state_dict().items())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_it_works_where_gradients_are_off(mode):
    criterion, (features, labels) = cosine(tammes.cosface()), batch()
    expected = diagnose(criterion, features, labels).measured
    with mode():
        assert diagnose(criterion, features * 1, labels).measured == expected


def test_half_precision_features_are_measured_in_full():
    criterion, (features, labels) = linear(tammes.softmax()), batch()
    seen = diagnose(criterion, features.bfloat16(), labels).measured
    assert_close(seen["loss"], diagnose(criterion, features, labels).measured["loss"], rtol=1e-2,
                 atol=0)  # fmt: skip


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", TERMS)
def test_every_term_on_every_head_is_read(name, head):
    """The value of a term is that of the criterion itself, and a diagnosis never fails."""
    head = HEADS[head](6, 9)
    if not fits(TERMS[name], head):
        return
    criterion = tammes.Criterion(head, 2.0 * TERMS[name]).eval()
    features, labels = torch.randn(20, 6), torch.arange(20) % 9
    diagnosis = diagnose(criterion, features, labels, losses=FALLING)
    assert_close(
        diagnosis.measured["loss"], criterion(features, labels).item(), rtol=1e-5, atol=1e-6
    )
    assert [*diagnosis.measured["terms"]] == [*criterion.terms]
    json.dumps(diagnosis.to_dict(), allow_nan=False)


@pytest.mark.parametrize("mix", [tammes.direct_sum, tammes.spectral_sum])
def test_sums_of_subspaces_are_read(mix):
    criterion = linear(mix(tammes.softmax(), 0.5 * tammes.nca()), bias=False)
    features, labels = batch()
    measured = diagnose(criterion, features, labels).measured
    assert_close(measured["loss"], criterion(features, labels).item(), rtol=1e-5, atol=0)


# ------------------------------------------------------------------------------ the result


def test_findings_are_muted_by_name():
    criterion = cosine(tammes.cosface(margin=-0.3), scale=30.0)
    assert "negative-margin" not in found(criterion, mute=["negative-margin"])
    assert "negative-margin" not in found(criterion, mute="negative-margin")


def test_the_result_is_a_dict_and_a_text():
    diagnosis = diagnose(cosine(tammes.cosface(margin=-0.3), scale=30.0), *batch())
    plain = json.loads(json.dumps(diagnosis.to_dict(), allow_nan=False))
    assert plain["healthy"] is False
    assert [each["name"] for each in plain["findings"]] == ["negative-margin"]
    assert str(diagnosis).startswith("negative-margin: the negative margin of cosface adds 9")
    assert str(Diagnosis((), {})) == "healthy"
    broken = diagnose(linear(tammes.softmax()), *some_features(not_finite))
    json.dumps(broken.to_dict(), allow_nan=False)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: diagnose(linear(tammes.softmax()), *batch(), mute=["colapse"]),
            "diagnose expects names among not-finite, ... got 'colapse'",
        ),
        (
            lambda: diagnose(
                linear(tammes.softmax()), torch.randn(2, DIM), torch.tensor([-100] * 2)
            ),
            "diagnose expects a batch with at least one label that counts, got 0",
        ),
        (
            lambda: diagnose(linear(tammes.softmax()), torch.randn(2, 3), torch.tensor([0, 1])),
            "LinearHead expects features of shape (N, 32) ... got (2, 3)",
        ),
    ],
)
def test_bad_input_is_refused_in_a_sentence(call, sentence):
    with pytest.raises(ValueError, match=pattern(sentence)):
        call()


def test_a_head_on_several_processes_is_refused(monkeypatch):
    criterion = linear(tammes.softmax())
    monkeypatch.setattr(type(criterion.head), "is_sharded", True)
    with pytest.raises(ValueError, match=pattern("diagnose expects ... sharded over several")):
        diagnose(criterion, *batch())


# ------------------------------------------------------------------------- real trainings


def train_small(loss, *, lr, steps=300, scale=64.0, classes=200, noise=2.0):
    """Train a small network on overlapping clusters and return the last diagnosis."""
    torch.manual_seed(0)
    means = torch.randn(classes, 32)
    layers: list[nn.Module] = []
    for width in (256, 256):
        layers += [nn.LazyLinear(width), nn.LazyBatchNorm1d(), nn.ReLU()]
    net = nn.Sequential(*layers, nn.LazyLinear(64), nn.LazyBatchNorm1d(), nn.ReLU())
    net(means)
    criterion = tammes.Criterion(tammes.CosineHead(64, classes, scale=scale), loss)
    groups = criterion.param_groups(net, lr=lr, weight_decay=5e-4)
    optimizer, losses = torch.optim.SGD(groups, momentum=0.9), []
    for _ in range(steps):
        labels = torch.randint(classes, (128,))
        features = net(means[labels] + noise * torch.randn(128, 32))
        value = criterion(features, labels)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return diagnose(criterion, features, labels, optimizer=optimizer, losses=losses)


@pytest.mark.slow
def test_arcface_with_a_large_scale_collapses_and_cosface_does_not():
    """On a GPU it is ResNet-18 on CIFAR-100 at lr 0.1; here a small network at lr 0.5."""
    collapsed = train_small(tammes.arcface(margin=0.5), lr=0.5)
    findings = {each.name: each for each in collapsed.findings}
    assert "cosface" in findings["prototypes-collapsed"].change
    assert "s(1 - cos m)" in findings["prototypes-collapsed"].why
    for loss, lr in ((tammes.cosface(margin=0.5), 0.5), (tammes.arcface(margin=0.1), 0.02)):
        names = {each.name for each in train_small(loss, lr=lr).findings}
        assert "prototypes-collapsed" not in names


def test_healthy_training_has_no_findings():
    assert str(train_small(tammes.cosface(), lr=0.02, steps=60, classes=20, noise=0.5)) == "healthy"
