"""Criteria, lab and advice have one table of defaults, and it holds to its trainings."""

import json
import math
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

import tammes
from tammes.advise import defaults, evidence, workload
from tammes.advise.advice import advise, defaults_of
from tammes.advise.defaults import FEW_CLASSES_SCALE, MANY_CLASSES_SCALE
from tammes.lab.config import parse_head, parse_loss, parse_schedules
from tammes.lab.config.schema import Config

ROOT = Path(tammes.__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import advice_evidence  # noqa: E402
from update_docs import DOCS, with_outputs  # noqa: E402

READY = {
    "normface": tammes.NormFace,
    "cosface": tammes.CosFace,
    "arcface": tammes.ArcFace,
    "combined_margin": tammes.CombinedMargin,
    "lm_softmax": tammes.LMSoftmax,
}
SIZES = [(10, 128), (10, 3), (100, 64), (1623, 64), (50_000, 512)]
GRIDS = evidence.grids()
LOSSES = ("cosface", "arcface")

# ------------------------------------------------------------------------------- one table


@pytest.mark.parametrize(("classes", "dim"), SIZES)
@pytest.mark.parametrize("loss", READY)
def test_criterion_lab_and_advice_have_the_same_scale(loss, classes, dim):
    with torch.device("meta"):
        criterion = READY[loss](dim, classes)
        head = parse_head("auto", criterion.loss, dim, classes)
    margin = None
    if loss != "combined_margin" and "margin" in criterion.loss.settings:
        margin = criterion.loss.settings["margin"]
    elif loss == "combined_margin":
        margin = criterion.loss.settings["m3"]
    assert (
        criterion.head.scale == head.scale == advise(classes, dim, loss=loss, margin=margin).scale
    )


@pytest.mark.parametrize("loss", LOSSES)
def test_the_margins_of_criteria_are_those_of_their_losses(loss):
    with torch.device("meta"):
        assert READY[loss](8, 3).loss == getattr(tammes, loss)()


def test_many_classes_take_the_scale_of_the_papers_and_few_the_one_measured():
    assert advise(50_000, 512, loss="arcface").scale == MANY_CLASSES_SCALE.value
    assert advise(1000, 512, loss="arcface").scale == FEW_CLASSES_SCALE.value


def test_a_crowded_sphere_takes_a_larger_scale_and_the_advice_says_why():
    advice = advise(100, 3, loss="cosface", margin=0.01)
    row = next(row for row in advice.recommendations if row.setting == "scale")
    assert advice.scale > FEW_CLASSES_SCALE.value
    assert "too small here" in row.reason


def test_the_lab_begins_with_the_advised_optimizer_and_rates():
    config, code = Config(), advise(1000, 64).code
    assert config.optimizer == defaults.OPTIMIZER
    assert f"lr={config.lr:g}, weight_decay={config.weight_decay:g})" in code
    assert f"torch.optim.SGD(groups, momentum={config.momentum:g})" in code
    assert config.head_lr is None


def test_adam_at_its_usual_rate_is_no_risk_and_the_head_has_one_rate():
    advice = advise(1000, 64, loss="arcface", optimizer="adamw", lr=1e-3)
    assert not advice.cautions
    said = str(advice)
    assert "10 times" not in said
    assert "smaller learning rate" not in said


# -------------------------------------------------------------------------------- evidence


def loses(trial, best):
    """Whether a trial is worse than the best one by more than a point and a standard error."""
    return best.mean - trial.mean > max(1.0, math.hypot(trial.error, best.error))


def test_the_evidence_is_what_comes_out_of_the_ledgers():
    collected = [*advice_evidence.collect(ROOT / "results")]
    assert json.loads(evidence.FILE.read_text(encoding="utf-8")) == collected


def test_the_table_of_the_page_is_that_of_the_evidence():
    page = (DOCS / "choosing.md").read_text(encoding="utf-8")
    assert with_outputs(page) == page


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: grid.data)
def test_the_advice_is_within_a_point_of_the_best_of_every_grid(grid):
    assert len(grid.trials) * grid.seeds <= 24
    loss = advise(grid.classes, grid.dim).loss
    trial = grid.find(loss, *defaults_of(loss, grid))
    assert trial is not None
    assert not loses(trial, grid.best)


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: grid.data)
def test_the_advice_for_arcface_is_within_a_point_of_its_best(grid):
    trial = grid.find("arcface", *defaults_of("arcface", grid))
    assert trial is not None
    own = (each for each in grid.trials if each.loss == "arcface")
    assert not loses(trial, max(own, key=lambda each: each.mean))


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: grid.data)
@pytest.mark.parametrize("loss", LOSSES)
def test_the_advice_takes_the_settings_that_were_trained(grid, loss):
    advice = advise(
        *(grid.classes, grid.dim),
        loss=loss,
        samples_per_class=grid.images,
        identities=grid.identities,
    )
    assert (advice.scale, advice.margin) == defaults_of(loss, grid)
    assert "WarmUp" not in advice.code
    trial = grid.find(loss, advice.scale, advice.margin)
    assert any(each.advised == trial for each in advice.evidence)


def test_points_that_the_reasons_name_are_those_of_the_grids():
    """Sentences of the table of defaults, with the differences they name."""
    by_name = {grid.data: grid for grid in GRIDS}
    names = {"Omniglot": "omniglot", "CIFAR-100": "cifar100", "chimpanzee faces": "chimpanzees"}
    for loss, default in defaults.MARGINS.items():
        usual = getattr(tammes, loss)().settings["margin"]
        for points, name in re.findall(
            r"(\d+)(?: points?)? on ([A-Z][\w-]+|chimp\w+ faces)", default.evidence
        ):
            grid = by_name[names[name]]
            scale, margin = defaults_of(loss, grid)
            gap = grid.find(loss, scale, margin).mean - grid.find(loss, scale, usual).mean
            assert round(gap) == int(points), (loss, name, gap)


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: grid.data)
@pytest.mark.parametrize("loss", LOSSES)
def test_the_advice_is_never_below_the_default_of_the_criterion(grid, loss):
    with torch.device("meta"):
        criterion = READY[loss](grid.dim, grid.classes)
    margin = criterion.loss.settings["margin"]
    advised = grid.find(loss, *defaults_of(loss, grid))
    ready_made = grid.find(loss, criterion.head.scale, margin)
    assert advised.mean >= ready_made.mean


def test_a_setting_loses_by_more_than_a_point_and_more_than_the_error():
    def grid(mean, error):
        trials = [evidence.GridTrial("cosface", 30, 0.35, 90.0, error)]
        trials.append(evidence.GridTrial("cosface", 16, 0.35, mean, error))
        return evidence.Grid("made", 10, 8, 5, "accuracy", 2, "CPU", tuple(trials))

    for mean, error, clear in ((89.1, 0.1, False), (88.5, 0.1, True), (88.5, 1.5, False)):
        made = grid(mean, error)
        assert made.best.scale == 30
        assert loses(made.trials[1], made.best) is clear


def test_what_a_change_did_is_said_with_the_number_of_data_sets():
    said = evidence.effect(", adamw")
    assert said.endswith(f"on {len(GRIDS)} data sets")
    assert said in {row.setting: row.reason for row in advise(10, 64).recommendations}["optimizer"]
    assert evidence.effect(", lion") == "not measured"


def test_the_advice_says_on_how_much_it_stands():
    said = str(advise(50_000, 512, loss="arcface"))
    most = max(grid.classes for grid in GRIDS)
    for grid in GRIDS:
        assert grid.data in said
    assert most < 50_000
    assert "50,000 classes, more than any of these" in said
    assert "no training of ours" in str(advise(100, 64, loss="ldam"))


# ------------------------------------------------------------------------------ to be copied

WRITTEN = [
    *("softmax", "cosface", "arcface", "sphereface", "l_softmax", "combined_margin", "gm_softmax"),
    *("lm_softmax", "ldam", "adaface", "large_margin_gaussian", "hinge", "nca"),
    *("softmax+nca", "direct_sum+softmax+nca", "spectral_sum+softmax+proto+zero_centroid"),
    *("cosface+adacos", "softmax+adacos", "balanced_softmax", "lm_softmax+softmax"),
]


@pytest.mark.parametrize("loss", WRITTEN)
@pytest.mark.parametrize("samples", [None, 3])
def test_code_and_command_can_be_copied(loss, samples):
    advice = advise(10, 64, loss=loss, samples_per_class=samples, imbalance=10.0)
    names = {"tammes": tammes, "torch": torch, "counts": [20] * 10, "total_steps": 100}
    exec(advice.code, names := {**names, "backbone": torch.nn.Linear(4, 64)})
    loss_value = names["criterion"](torch.randn(40, 64), torch.arange(40) % 10)
    assert math.isfinite(loss_value.item())
    words = shlex.split(advice.command)
    given = dict(zip(words[2::2], words[3::2], strict=True))
    parsed = parse_loss(given["--loss"], counts=[20] * 10)
    head = parse_head(given["--head"], parsed, 64, 10)
    assert type(head) is type(names["criterion"].head)
    assert str(head) == str(names["criterion"].head)
    assert parsed == names["criterion"].loss
    parse_schedules(given.get("--schedules", ""), steps_per_epoch=10)


@pytest.mark.parametrize("loss", ["mlcd", "proxy_nca", "sphereface_r", "am_softmax"])
def test_a_loss_known_by_another_name_keeps_its_settings(loss):
    advice = advise(10, 64, loss=loss)
    exec(advice.code.splitlines()[0], names := {"tammes": tammes})
    exec(advice.code.splitlines()[1], names)
    found, expected = names["criterion"].loss, getattr(tammes, loss)()
    kept = {"form", "beta2", "gradient"} & set(expected.settings)
    assert found.name == expected.name
    assert all(found.settings[key] == expected.settings[key] for key in kept)
    if loss == "mlcd":
        assert found == expected


def test_a_margin_that_is_given_is_in_the_code():
    assert "tammes.mlcd(margin=0.2)" in advise(10, 64, loss="mlcd", margin=0.2).code
    with pytest.raises(ValueError, match="no margin for proxy_nca, which has none"):
        advise(10, 64, loss="proxy_nca", margin=0.2)


def test_code_for_several_gpus_has_a_sharded_head():
    assert "tammes.ShardedHead(tammes.CosineHead, 512, 1000000, scale=64)" in (
        advise(1_000_000, 512, batch=4096, gpus=8).code
    )


def test_what_cannot_work_is_not_copied():
    advice = advise(10, 64, loss="arcface", margin=2.0)
    assert advice.cautions[0].level == "cannot"
    assert "arcface(margin=0.5)" in advice.code


# --------------------------------------------------------------------------------- machines


def test_the_machine_at_hand_is_planned_for(monkeypatch):
    class Card:
        name, total_memory = "NVIDIA A100-SXM4-40GB", 40 * 2**30

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Card)
    found = advise(100, 8).machine
    assert (found.name, found.memory) == (Card.name, Card.total_memory)
    assert found.flops == workload.MACHINES["a100"].flops
    assert advise(100, 8, device="cpu").machine == workload.CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert advise(100, 8).work.device == "cpu"
    assert advise(100, 8, gpus=8).machine == workload.H200
    assert advise(100, 8, device="cuda").machine == workload.H200
    assert advise(100, 8, machine="t4").machine.name == "T4"
    with pytest.raises(ValueError, match=r"machine to be one of h200, .*, got z80"):
        advise(100, 8, machine="z80")


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA L40S", None),
    ],
)
def test_a_gpu_is_known_by_its_name(name, known):
    found = workload.gpu_named(name, 1e9)
    assert found.memory == 1e9
    assert found.flops == workload.MACHINES[known or "l4"].flops
    assert ("rates of an L4" in found.name) is (known is None)


def test_times_are_told_apart_though_a_step_takes_its_calls():
    advice = advise(10_000, 512, machine="h200")
    assert all(cost.work < cost.seconds for cost in advice.costs)
    shown = str(advice).split("Cost on")[1].split("Evidence")[0]
    assert len({f"{cost.work * 1e3:.3g}" for cost in advice.costs}) >= 3
    assert all(f"{cost.work * 1e3:.3g}" in shown for cost in advice.costs)


def test_two_losses_on_one_data_set_are_one_data_set(monkeypatch):
    trials = [
        evidence.GridTrial(loss, 30, 0.35, mean, 0.1, optimizer)
        for loss in ("cosface", "arcface")
        for optimizer, mean in (("sgd", 90.0), ("adamw", 88.0))
    ]
    made = evidence.Grid("made", 10, 8, 5, "accuracy", 2, "CPU", tuple(trials))
    monkeypatch.setattr(evidence, "grids", lambda: (made,))
    assert evidence.effect(", adamw") == "-2.0 points on 1 data set"
