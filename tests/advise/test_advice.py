"""Every number is that of its formula, every caution comes when it is due and not before."""

import functools
import json
import math

import pytest
import torch

import tammes
from tammes.advise import advice as advising
from tammes.advise.feasibility import KINDS, bent
from tammes.advise.warnings import anchors
from tammes.advise.workload import Machine
from tammes.geometry import largest_class_margin, normface_lower_bound
from tammes.lab import Config

advise = functools.partial(advising.advise, machine="h200")
SIZES = [(2, 2), (10, 128), (100, 64), (8, 3), (50, 2), (10_000, 512), (1_000_000, 512)]


def codes(*args, **kwargs):
    return {caution.code for caution in advise(*args, **kwargs).cautions}


# ---------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize(("classes", "dim"), SIZES)
def test_the_class_margin_is_the_largest_there_is(classes, dim):
    advice = advise(classes, dim)
    assert advice.class_margin == largest_class_margin(classes, dim)
    assert advice.sample_margin == pytest.approx(1 - math.cos(advice.class_margin.angle))
    assert advice.sample_margin <= advice.sample_margin_limit + 1e-12


@pytest.mark.parametrize(("classes", "dim"), SIZES)
@pytest.mark.parametrize("posterior", [0.6, 0.95])
def test_scales_are_those_of_their_formulas(classes, dim, posterior):
    advice = advise(classes, dim, posterior=posterior, loss="cosface", margin=0.01)
    scales, angle = advice.scales, advice.class_margin.angle
    odds = math.log((classes - 1) * posterior / (1 - posterior))
    assert scales.least == pytest.approx((classes - 1) / classes * odds)
    assert scales.about == pytest.approx(odds / (1 - math.cos(angle)))
    # Of two classes that of three.
    assert scales.adacos == pytest.approx(math.sqrt(2) * math.log(max(classes, 3) - 1))
    assert scales.least_with_margin == pytest.approx(odds / (classes / (classes - 1) - 0.01))
    assert scales.about_with_margin in (
        math.inf,
        pytest.approx(odds / (0.99 - math.cos(angle))),
    )
    assert scales.least <= scales.about * (1 + 1e-12)


def test_the_two_scales_agree_on_the_simplex_and_only_there():
    inside, outside = advise(10, 9).scales, advise(11, 9).scales
    assert inside.least == pytest.approx(inside.about)
    assert outside.least < outside.about * 0.95


def test_the_margin_and_scale_of_the_user_are_kept():
    advice = advise(1000, 64, loss="arcface", margin=0.123, scale=45.0)
    assert (advice.margin, advice.scale) == (0.123, 45.0)
    expected = advise(1000, 64, loss="arcface", margin=0.2).scales.about_with_margin
    assert advice.scales.about_with_margin < expected


def test_the_loss_before_training_is_that_of_the_margin_asked_for():
    small = advise(10_000, 512, loss="arcface", margin=0.1, scale=64.0).start
    large = advise(10_000, 512, loss="arcface", margin=0.5, scale=64.0).start
    # A random example is at 90 degrees, where the margin costs s sin(m).
    assert large - small == pytest.approx(64 * (math.sin(0.5) - math.sin(0.1)), rel=0.02)
    assert large == pytest.approx(43.8, rel=0.02)


@pytest.mark.parametrize(("classes", "dim"), SIZES)
@pytest.mark.parametrize(
    "loss", ["cosface", "arcface", "normface", "adaface", "ldam", "lm_softmax"]
)
@pytest.mark.parametrize("samples", [None, 3])
def test_what_is_recommended_raises_no_objection(classes, dim, loss, samples):
    advice = advise(classes, dim, loss=loss, samples_per_class=samples)
    # The sizes themselves may be objected to.
    crowded = (classes, dim) == (50, 2) and loss != "lm_softmax"
    assert [caution.code for caution in advice.cautions] == ["no-room"] * crowded
    values = {row.setting: row.value for row in advice.recommendations}
    assert values["scale"] == advice.scale
    if loss in KINDS:
        assert values[KINDS[loss].setting] == advice.margin
        target = bent(0.0, KINDS[loss].place(advice.margin))
        gap = target - math.cos(advice.class_margin.angle)
        # On its prototype, with all others at the class margin, an example has the posterior.
        assert 1 / (1 + (classes - 1) * math.exp(-advice.scale * gap)) >= 0.9 - 1e-9


def test_a_margin_is_recommended_that_the_given_scale_can_serve():
    advice = advise(10_000, 512, scale=14.0)
    assert 0.1 < advice.margin < 0.35
    assert advice.scales.about_with_margin == pytest.approx(14.0, rel=0.01)
    assert advise(10_000, 512, scale=64.0).margin == 0.35


def test_few_examples_per_class_halve_the_margin():
    assert advise(10_000, 512, samples_per_class=3).margin == pytest.approx(0.175)
    assert advise(10_000, 512, samples_per_class=50).margin == 0.35


def test_a_margin_is_said_to_be_usual_only_where_it_is():
    def reason(classes, dim, **kwargs):
        rows = advise(classes, dim, **kwargs).recommendations
        return next(row.reason for row in rows if row.setting == "margin")

    assert "usual value" in reason(10, 64)
    assert "usual value" in reason(10_000, 512)
    assert "the paper's 0.35 loses" in reason(1000, 64)
    assert "half of 0.35" in reason(10, 64, samples_per_class=2)
    assert "half of 0.1" in reason(1000, 64, samples_per_class=2)
    assert "room for" in reason(50, 2)
    assert "room for" in reason(10_000, 512, scale=14.0)


def test_every_recommendation_has_a_reason_and_a_basis():
    for row in advise(1000, 64, imbalance=10, loss="lm_softmax+nca").recommendations:
        assert row.reason
        assert row.basis in ("formula", "measured", "literature", "reports", "rule of thumb")


@pytest.mark.parametrize(
    ("loss", "weight"),
    [("lm_softmax", 10.0), ("lm_softmax+zero_centroid", None), ("cosface", None)],
)
def test_only_the_loss_whose_optimum_needs_it_gets_a_regularizer_of_the_centroid(loss, weight):
    # It costs five losses accuracy on long-tailed CIFAR-100.
    advice = advise(100, 64, imbalance=10.0, loss=loss)
    rows = {row.setting: row.value for row in advice.recommendations}
    assert rows.get("weight of zero_centroid()") == weight
    assert ("10*zero_centroid()" in advice.command) == (weight == 10.0)


def recommended(setting, **kwargs):
    rows = advise(1_000_000, 512, batch=4096, **kwargs).recommendations
    return next((row for row in rows if row.setting == setting), None)


def test_the_implementation_recommended_is_the_one_a_head_takes_if_it_fits():
    def mode(**kwargs):
        return recommended("implementation", **kwargs).value

    assert mode() == "streamed"
    assert mode(autocast="bfloat16") == "fused"
    assert mode(autocast="bfloat16", loss="bce") == "streamed"
    # 8.6 GiB fused, 7.7 streamed, 5.1 sampled.
    assert mode(autocast="bfloat16", machine=Machine(memory=8 * 2**30)) == "streamed"
    assert mode(autocast="bfloat16", machine=Machine(memory=6 * 2**30)) == "sampled"
    assert mode(machine=Machine(memory=2**20)) == "none"


def test_the_reason_says_why_auto_takes_what_it_takes():
    def reason(**kwargs):
        return recommended("implementation", **kwargs).reason

    assert "faster only under autocast" in reason()
    assert "products are in bfloat16" in reason(autocast="bfloat16")
    assert "do not compute softplus" in reason(autocast="bfloat16", loss="bce")
    assert "for CUDA" in reason(device="cpu")
    assert "sample_rate=0.1" in reason(machine=Machine(memory=6 * 2**30), autocast="bfloat16")
    few = advise(100, 8).recommendations
    assert "25,600 scores fit in memory" in few[-1].reason


def test_several_ranks_share_the_classes_where_that_is_faster_or_all_that_fits():
    head = recommended("head", gpus=8, autocast="bfloat16")
    assert head.value == "ShardedHead"
    assert "125,000 classes on each of 8 ranks" in head.reason
    assert recommended("implementation", gpus=8, autocast="bfloat16").value == "fused"
    assert recommended("head") is None
    share = {"gpus": 8, "autocast": "bfloat16", "machine": Machine(memory=4 * 2**30)}
    assert recommended("head", **share).value == "ShardedHead"
    small = {"gpus": 8, "autocast": "bfloat16", "machine": Machine(memory=2**30)}
    assert recommended("head", **small).value == "ShardedHead, sample_rate=0.1"
    assert "approximate" in recommended("head", **small).reason
    none = {**small, "machine": Machine(memory=2**20)}
    assert recommended("head", **none).value == recommended("implementation", **none).value
    rows = advise(1000, 64, gpus=8).recommendations
    assert [row.value for row in rows if row.setting == "head"] == ["the same on every rank"]


# --------------------------------------------------------------------------------- cautions

CASES = [
    # due, and what makes it go away
    ("few-samples", {"loss": "arcface", "scale": 64, "margin": 0.5, "samples_per_class": 3},
     {"samples_per_class": 50}),
    ("few-samples", {"loss": "cosface", "scale": 64, "margin": 0.35, "samples_per_class": 3},
     {"margin": 0.1}),
    ("learning-rate", {"loss": "arcface", "lr": 0.3}, {"lr": 0.1}),
    ("learning-rate", {"loss": "arcface", "lr": 0.01, "optimizer": "adam"}, {"lr": 1e-3}),
    ("half-precision-weights", {"dtype": "float16"}, {"dtype": "float32", "autocast": "float16"}),
    ("half-precision-weights", {"dtype": "bfloat16"}, {"dtype": "float64"}),
    ("margin-infeasible", {"loss": "cosface", "margin": 1.01}, {"margin": 0.9}),
    ("margin-infeasible", {"loss": "arcface", "margin": 1.6}, {"margin": 1.5}),
    ("margin-infeasible", {"loss": "triplet", "margin": 1.5}, {"margin": 0.3}),
    ("loss-without-accuracy", {"loss": "cosface", "margin": -1.2}, {"margin": -0.3}),
    ("scale-too-small", {"loss": "normface", "scale": 1.0}, {"scale": 20.0}),
    ("scale-small", {"loss": "normface", "scale": 11.5}, {"scale": 12.0}),
    ("annealing", {"loss": "l_softmax"}, {"annealing": True}),
    ("annealing", {"loss": "sphereface", "margin": 4.0}, {"margin": 1.0}),
    ("imbalance", {"loss": "lm_softmax", "imbalance": 100.0}, {"imbalance": 1.0}),
    ("imbalance", {"loss": "lm_softmax", "imbalance": 100.0}, {"loss": "lm_softmax+zero_centroid"}),
    ("no-company", {"loss": "softmax+nca"}, {"loss": "softmax"}),
    ("no-company", {"loss": "proto", "batch": 64}, {"batch": 20_000}),
    ("no-company", {"loss": "triplet", "batch": 20_000, "samples_per_class": 1},
     {"samples_per_class": 100}),
    ("batch-too-small", {"loss": "softmax+proto", "batch": 12, "gpus": 4}, {"gpus": 1}),
    ("direct-sum", {"loss": "direct_sum+softmax+nca"}, {"loss": "spectral_sum+softmax+nca"}),
    ("super-symmetry", {"loss": "softmax+super_symmetry"}, {"loss": "softmax+zero_centroid"}),
]  # fmt: skip


@pytest.mark.parametrize(("code", "due", "change"), CASES)
def test_a_caution_comes_when_it_is_due_and_goes_with_its_cause(code, due, change):
    assert code in codes(10_000, 512, **due)
    assert code not in codes(10_000, 512, **{**due, **change})


def test_every_caution_there_is_has_a_case_here():
    import inspect
    import re

    from tammes.advise import warnings

    written = re.findall(
        r'"(?:cannot|risk|note)"[^,]*,\n\s+"([a-z-]+)"', inspect.getsource(warnings)
    )
    assert len(written) > 12
    # That of the sizes is below: the cases here have others.
    assert set(written) - {"no-room"} == {code for code, _, _ in CASES}


def test_direct_sum_and_super_symmetry_are_fine_with_few_classes():
    assert not codes(10, 512, loss="direct_sum+softmax+nca") & {"direct-sum"}
    assert not codes(10, 9, loss="softmax+super_symmetry")


def test_the_worst_comes_first():
    advice = advise(10_000, 512, loss="arcface", margin=1.6, optimizer="adam", lr=1.0)
    levels = [caution.level for caution in advice.cautions]
    assert levels == sorted(levels, key=("cannot", "risk", "note").index)
    assert {"cannot", "risk"} <= set(levels)


def test_the_mean_loss_a_small_scale_leaves_is_the_least_risk():
    (caution,) = advise(1000, 64, loss="normface", scale=3.0).cautions
    assert f"under {normface_lower_bound(1000, 3.0):.3g}," in caution.text
    assert caution.level == "cannot"


def test_a_margin_that_is_too_negative_lets_the_loss_vanish_without_accuracy():
    prototypes = tammes.geometry.orthoplex(8, 4)
    head = tammes.CosineHead(4, 8, scale=100.0)
    with torch.no_grad():
        head.weight.copy_(prototypes)
    # Every example sits on a neighbour's prototype, at 90 degrees to its own.
    labels = torch.arange(8)
    features = prototypes[(labels + 1) % 8]
    for margin, vanishes in ((-1.1, True), (-0.9, False)):
        assert ("loss-without-accuracy" in codes(8, 4, margin=margin)) is vanishes
        loss = tammes.Criterion(head, tammes.cosface(margin=margin))(features, labels)
        accuracy = (head.logits(features).argmax(1) == labels).float().mean()
        assert accuracy == 0
        assert bool(loss < 1e-3) is vanishes


@pytest.mark.parametrize(("classes", "batch", "samples"), [(10, 8, None), (50, 64, 3), (50, 40, 1)])
def test_the_share_of_examples_with_company_is_that_of_random_batches(classes, batch, samples):
    total, rounds = 0, 400
    for _ in range(rounds):
        if samples is None:
            labels = torch.randint(classes, (batch,))
        else:
            labels = torch.randperm(classes * samples)[:batch] // samples
        count = labels.bincount(minlength=classes)[labels]
        total += int((count > 1).sum())
    assert anchors(classes, batch, samples) == pytest.approx(total / (rounds * batch), abs=0.02)


def test_a_batch_of_everything_has_company_unless_classes_have_one_example():
    assert anchors(50, 150, 3) == 1
    assert anchors(50, 1000, 3) == 1
    assert anchors(50, 50, 1) == 0
    assert anchors(1_000_000, 4096, 80) == pytest.approx(anchors(1_000_000, 4096), rel=0.02)


# ------------------------------------------------------------------------------ form, errors


@pytest.mark.parametrize(("classes", "dim"), SIZES)
def test_advice_is_plain_json(classes, dim):
    advice = advise(classes, dim, loss="arcface", margin=3.0)
    found = json.loads(json.dumps(advice.to_dict(), allow_nan=False))
    assert found["class_margin"]["degrees"] == pytest.approx(advice.class_margin.degrees)
    assert found["scales"]["about_with_margin"] is None or classes == 2
    assert found["costs"][0]["total"] == advice.costs[0].total
    assert len(found["margins"]) == len(advice.margins)
    assert found["work"]["classes"] == classes


def test_the_text_has_every_block_and_fits_a_terminal():
    text = str(advise(1_000_000, 512, batch=4096, gpus=8))
    parts = (
        "86.96°",
        "Margins",
        "16.01",
        "19.54",
        "Recommended settings",
        "Cautions",
        "ShardedHead",
    )
    for part in parts:
        assert part in text
    assert text.split("Cost on")[1].count("chosen automatically") == 1
    assert max(map(len, text.splitlines())) <= 120


def test_a_default_that_cannot_be_met_is_marked_in_the_text():
    assert "0.5 (too large)" in str(advise(50, 2))


def test_losses_between_examples_need_no_head():
    advice = advise(100, 8, loss="nca", batch=1000)
    assert advice.costs == ()
    assert "no head is used" in str(advice)


def test_a_caution_is_in_the_text():
    assert "reported not to train" in str(
        advise(10_000, 512, loss="arcface", scale=64, margin=0.5, samples_per_class=3)
    )


def test_advice_for_the_cpu_plans_with_its_blocks():
    on_cpu = advise(1_000_000, 64, device="cpu")
    assert "on the CPU" in str(on_cpu)
    assert on_cpu.costs[1].scores < advise(1_000_000, 64).costs[1].scores


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"classes": 1}, "classes to be a whole number from 2"),
        ({"loss": "cosfase"}, "did you mean cosface"),
        ({"loss": "direct_sum"}, "expects the losses that direct_sum combines"),
        ({"loss": "normface", "margin": 0.3}, "no margin for normface"),
        ({"loss": "arcface", "margin": 28.6}, "got 28.6; 28.6 degrees are 0.4992"),
        ({"loss": "sphereface", "margin": 0.5}, "1 or more, got 0.5"),
        ({"loss": "l_softmax", "margin": 0.5}, "1 or more, got 0.5"),
        ({"posterior": 1.0}, "posterior between 0 and 1, got 1.0"),
        ({"scale": -1.0}, "scale above 0, got -1"),
        ({"scale": math.nan}, "scale above 0, got nan"),
        ({"margin": math.inf}, "a finite margin, got inf"),
        ({"samples_per_class": 0}, "samples_per_class of 1 or more, got 0"),
        ({"imbalance": 0.5}, "imbalance of 1 or more, got 0.5"),
        ({"lr": 0.0}, "lr above 0, got 0"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_a_sentence(change, message):
    with pytest.raises(ValueError, match=message) as error:
        advise(**{"classes": 10, "dim": 4, **change})
    assert "\n" not in str(error.value)


def test_several_prototypes_of_a_class_are_planned_and_written():
    one, three = (advise(10_000, 64, subcenters=count) for count in (1, 3))
    for plain, several in zip(one.costs, three.costs, strict=True):
        assert several.weights == 3 * plain.weights
        assert several.products == pytest.approx(3 * plain.products)
    assert three.to_dict()["work"]["subcenters"] == 3
    assert "tammes.CosineHead(64, 10000, scale=64, subcenters=3)" in three.code
    assert "subcenters=3" in three.command
    assert "10,000 classes of 3 prototypes each in 64 dimensions" in str(three)
    with pytest.raises(ValueError, match="subcenters with losses of cosines only, got softmax"):
        advise(100, 64, loss="softmax", subcenters=2)
    with pytest.raises(ValueError, match="advise expects subcenters from 1 to 255, got 0"):
        advise(100, 64, subcenters=0)


@pytest.mark.parametrize("loss", ["proxy_anchor", "multi_positive", "subcenter_spread"])
def test_losses_on_prototypes_have_a_head_of_several_of_a_class(loss):
    code = advise(1000, 64, loss=loss, subcenters=3).code
    assert "tammes.CosineHead(64, 1000, subcenters=3)" in code


@pytest.mark.parametrize("loss", ["triplet", "center", "nca"])
def test_losses_between_features_have_no_prototypes_of_a_class(loss):
    with pytest.raises(ValueError, match=f"subcenters with losses on prototypes only, got {loss}"):
        advise(1000, 64, loss=loss, subcenters=3)


def test_classes_that_the_dimensions_have_no_room_for_get_a_caution_with_a_remedy():
    (crowded,) = advise(59, 2).cautions
    assert (crowded.level, crowded.code) == ("risk", "no-room")
    assert "59 classes in 2 dimensions are at most 6.1° apart" in crowded.text
    assert "use 4 dimensions or more" in crowded.text
    assert not advise(59, 4).cautions
    (shared,) = advise(10, 1).cautions
    assert (shared.level, shared.code) == ("cannot", "no-room")
    # More dimensions do not help a posterior that is too much to ask.
    assert "no-room" not in codes(100, 3, posterior=1 - 1e-15)
    # What the demo draws, and the usual sizes.
    for classes, dim in ((10, 2), (10, 3), (100, 64), (1623, 128), (1_000_000, 512)):
        assert "no-room" not in codes(classes, dim)


def test_the_command_trains_what_was_planned():
    given = {"batch": 512, "autocast": "float16", "lr": 0.02, "optimizer": "adamw"}
    advice = advise(100, 64, machine="t4", **given)
    assert "--lr 0.001 --head-lr 0.02 --batch-size 512 --precision fp16" in advice.command
    assert "lr=0.001, head_lr=0.02, weight_decay" in advice.code
    plain = advise(100, 64, batch=Config().batch_size)
    assert not {"--batch-size", "--precision", "--head-lr"} & {*plain.command.split()}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"classes": 100}, "softmax did as well"),
        ({"classes": 59, "identities": True}, "softmax was better on three data sets"),
        ({"classes": 100, "imbalance": 50.0}, "compare logit_adjustment and vs_softmax"),
        ({"classes": 50_000}, "trains where arcface is reported not to"),
    ],
)
def test_the_loss_is_recommended_with_what_was_better_on_such_data(settings, said):
    first = advise(dim=128, **settings).recommendations[0]
    assert (first.setting, first.value) == ("loss", "cosface")
    assert said in first.reason
