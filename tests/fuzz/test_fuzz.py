"""Every path agrees with an independent float64 reference on random cases.

A failure prints the simplified case as code, and the command that runs it alone. The long form is
``python tests/fuzz/run.py --minutes 60``.
"""

import ast
import dataclasses
from pathlib import Path

import pytest
import torch

import tammes
from fuzz import campaign, formulas, paths, reference, shrink
from fuzz.case import Case
from fuzz.compare import Reference, differences
from fuzz.draw import draw
from fuzz.ranges import SETTINGS
from tammes import similarity
from tammes.criterion import general_call
from tammes.criterion.hyperparameters import Settings
from tammes.kernels.fused import engine as fused_kernels

pytestmark = [
    # By design: sums that are infinite are those of rows to be done again.
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]
CASES = {
    "dense": 120,
    "streamed": 100,
    "pickled": 40,
    "resumed": 40,
    "checkpointed": 40,
    "fused": 100,
    "sharded": 30,
    "grouped": 20,
    "compiled": 3,
}
"""Number of cases of each path, for a minute in all; a long run has other seeds."""


@pytest.mark.parametrize("path", CASES)
def test_a_path_agrees_with_the_reference(path):
    torch._dynamo.reset()
    summary = campaign.run(
        [path], first=1000 * list(CASES).index(path), cases=CASES[path], every={}, most=3
    )
    assert not summary.failures, "\n\n".join(failure.report for failure in summary.failures[:3])
    # Enough of them were taken for it to mean anything.
    assert summary.by_path[path]["cases"] >= CASES[path] / 8


FOUND = {
    "terms under autocast": Case(
        1, ((1.0, "cosface", {"margin": 0.25}),), "cosine", 8.0, rows=7, dtype="float32",
        parameter_dtype="float32", autocast=True,
    ),
    "prototypes of a half precision head": Case(
        1, ((1.0, "zero_centroid", {"normalize": False}),), "cosine", 8.0, dtype="bfloat16",
        parameter_dtype="bfloat16", classes=5, size=4,
    ),
    "learned scale of a half precision head": Case(
        3, ((1.0, "normface", {}),), "cosine", 30.0, learnable=True, dtype="bfloat16",
        parameter_dtype="bfloat16",
    ),
    "centers of a half precision head": Case(
        4, ((1.0, "center", {"rate": 0.5}),), "cosine", 8.0, steps=3, dtype="bfloat16",
        parameter_dtype="bfloat16",
    ),
    "an angle of zero": Case(
        5, ((1.0, "arcface", {"margin": 0.5, "extension": "monotone", "gradient": "exact"}),),
        "cosine", 8.0, size=1,
    ),
    "an angle of 1e-8 in float64": Case(
        20728, ((1.0, "arcface", {"margin": 0.5, "extension": "monotone", "gradient": "exact"}),),
        "linear_no_bias", rows=1, classes=2, dtype="float32", special=("aligned",),
    ),
    "a scheduled setting in float64": Case(
        20810, ((1.0, "softmax", {"smoothing": 0.0, "margin": 0.0}),), rows=1, size=1,
        schedules={"smoothing": ("WarmUp", (0.859375, 0.171875), {"steps": 2, "shape": "linear",
        "delay": 0})},
    ),
    "ignored rows and a masked first class": Case(
        2, ((1.0, "softmax", {"smoothing": 0.0, "margin": 0.0}),), rows=4, classes=4, masked=1,
        ignored=2,
    ),
}  # fmt: skip
"""Cases that the fuzz has found, simplified; each was wrong once."""


@pytest.mark.parametrize("path", ["dense", "streamed"])
@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_once_stays_mended(name, path):
    found = differences(FOUND[name], path)
    assert not found, campaign.script(FOUND[name], found)


ROUNDED = {
    "another class at an angle of 0.0006": Case(
        21115, ((1.0, "inter_topk", {"margin": 0.0, "top_k": 1, "penalty": 0.015625}),),
        "cosine_adaptive", rows=7, classes=11, dtype="float32", parameter_dtype="float32",
        reduction="sum",
    ),
    "equal scores at the kink of a hinge": Case(
        22081, ((1.0, "hinge", {"margin": 0.0}),), "cosine_adaptive", rows=2, classes=7, size=1,
        reduction="sum", steps=2, at_call={"margin": "learned"},
    ),
    "a distance of zero at the kink of a bound": Case(
        701751, ((1.0, "arpl", {"bound": 0.265625, "margin": 0.0}),), "cosine", rows=2, classes=2,
        size=1, reduction="sum",
    ),
    "a distance from zero, which no unit prototype changes": Case(
        4, ((1.0, "cac", {"anchor": 0.5}),), "cosine_raw", rows=1, classes=2, size=3,
        dtype="float32", parameter_dtype="float32", reduction="sum", special=("zero",),
    ),
    "large scores that are nearly equal": Case(
        800563, ((1.0, "logit_divergence", {"kind": "q_u"}),), "reciprocal", learnable=True,
        rows=1, size=6, reduction="sum", spread=8.0,
    ),
}  # fmt: skip
"""Cases in which rounding of a similarity or a distance decides, and none of the inputs."""


@pytest.mark.parametrize("path", ["dense", "streamed"])
@pytest.mark.parametrize("name", ROUNDED)
def test_rounding_of_a_similarity_is_not_taken_for_an_error(name, path):
    found = differences(ROUNDED[name], path)
    assert not found, campaign.script(ROUNDED[name], found)


@pytest.mark.skipif(
    not (torch.cuda.is_available() or fused_kernels.launch.INTERPRETED), reason="no triton here"
)
def test_rounding_of_two_sums_that_cancel_is_not_taken_for_an_error():
    case = Case(
        782278, ((1.0, "logit_divergence", {"kind": "u_q"}),), "gaussian", rows=1, classes=2,
        size=1, dtype="float16", parameter_dtype="float16",
    )  # fmt: skip
    found = differences(case, "fused")
    assert not found, campaign.script(case, found)


def test_an_own_angle_from_a_rounded_cosine_is_found(monkeypatch):
    def rounded(features, prototypes, *args, **kwargs):
        cosine = torch.cosine_similarity(features, prototypes, -1)
        return {"gap": 1 - cosine, "opposite": 1 + cosine}

    monkeypatch.setattr(similarity, "angle_gaps", rounded)
    assert differences(FOUND["an angle of 1e-8 in float64"], "dense")


# --------------------------------------------------------------------------- the reference is whole


def test_the_reference_knows_every_term_of_the_library():
    public = set(tammes.losses.__all__)
    assert set(formulas.TERMS) == public
    assert set(SETTINGS) == public


def test_the_fuzz_draws_every_setting_of_every_term():
    for name, drawn in SETTINGS.items():
        definition = getattr(tammes, name).definition
        assert set(drawn) == set(definition.signature.parameters), name


@pytest.mark.parametrize("module", [formulas, reference])
def test_the_reference_does_not_import_the_library(module):
    tree = ast.parse(Path(module.__file__).read_text())
    imported = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
    assert imported
    assert not [name for name in imported if name.split(".")[0] == "tammes"]


def test_a_case_is_drawn_from_its_seed_alone_and_is_printed_as_code():
    for seed in range(50):
        case = draw(seed)
        assert case == draw(seed)
        assert eval(repr(case), {"Case": Case}) == case


def test_draws_reach_everything_there_is():
    cases = [draw(seed) for seed in range(1200)]
    assert {name for case in cases for _, name, _ in case.terms} == set(SETTINGS)
    assert {case.head for case in cases} == set(paths.KINDS)
    assert {case.reduction for case in cases} == {"mean", "sum", "none"}
    assert {case.weights for case in cases} == {"", "given", "learned"}
    assert {case.within[0] for case in cases if case.within} == {"direct_sum", "spectral_sum"}
    for wanted in ("learnable", "masked", "masked_own", "ignored", "nan_ignored", "autocast"):
        assert any(getattr(case, wanted) for case in cases), wanted
    for wanted in ("class_weights", "at_call", "schedules", "special"):
        assert any(getattr(case, wanted) for case in cases), wanted
    assert any(case.rows == 0 for case in cases)


# ----------------------------------------------------------------------------- the fuzz can fail


def failing(path, cases=40):
    """Seeds among the first cases that a path has wrong."""
    summary = campaign.run([path], first=5000, cases=cases, every={}, shrinking=0.0, most=1)
    return [failure.seed for failure in summary.failures]


def test_a_dropped_margin_is_found(monkeypatch):
    resolve = Settings.resolve

    def without_margin(self, *args):
        found = resolve(self, *args)
        return {n: {k: 0.0 if k == "margin" else v for k, v in s.items()} for n, s in found.items()}

    monkeypatch.setattr(Settings, "resolve", without_margin)
    assert failing("dense")


@pytest.mark.parametrize("quantity", ["grad features", "grad weight", "grad bias"])
def test_a_flipped_gradient_is_found(monkeypatch, quantity):
    def flipped(case):
        steps = paths.dense(case)
        return [{k: -v if k == quantity else v for k, v in found.items()} for found in steps]

    monkeypatch.setitem(paths.PATHS, "dense", flipped)
    assert failing("dense")


def test_a_weight_that_is_off_by_a_percent_is_found(monkeypatch):
    weigh = general_call._weigh

    def off(*args):
        weights = weigh(*args).clone()
        weights[:1] *= 1.01
        return weights

    monkeypatch.setattr(general_call, "_weigh", off)
    assert failing("dense")


def test_a_state_that_stands_still_is_found(monkeypatch):
    monkeypatch.setattr(general_call, "_remember", lambda *_: None)
    assert failing("dense", 80)


def test_a_scale_that_stands_still_is_found(monkeypatch):
    monkeypatch.setattr(general_call, "_adapted_scale", lambda criterion, *_: criterion.head.scale)
    assert failing("dense")


def test_a_rival_that_is_forgotten_at_a_seam_is_found(monkeypatch):
    def shorter(total, most, multiple=1):
        return [slice(s, min(s + most, total - (total > 3))) for s in range(0, total, most)]

    monkeypatch.setattr(paths.tiling, "cut", shorter)
    assert failing("streamed", 20)


@pytest.mark.skipif(
    not (torch.cuda.is_available() or fused_kernels.launch.INTERPRETED), reason="no triton here"
)
def test_a_fused_gradient_without_its_factor_is_found(monkeypatch):
    finish = fused_kernels.FusedRows.finish
    monkeypatch.setattr(
        fused_kernels.FusedRows, "finish", lambda self, factor: finish(self, factor * 1.01)
    )
    assert failing("fused", 100)


def test_a_failure_is_simplified_and_printed_as_code_that_shows_it(monkeypatch, capsys):
    def wrong(case):
        steps = paths.dense(case)
        cosface = any(name == "cosface" for _, name, _ in case.terms)
        return [{**s, "loss": s["loss"] * 1.01} if cosface else s for s in steps]

    monkeypatch.setitem(paths.PATHS, "dense", wrong)
    terms = ((0.5, "cosface", {"margin": 0.25}), (1.0, "bce", {"average": True}))
    case = Case(3, terms, rows=9, classes=7, size=6, weights="given", ignored=2)
    small, found = shrink.shrink(case, "dense")
    assert [name for _, name, _ in small.terms] == ["cosface"]
    assert (small.rows, small.classes, small.size) == (1, 2, 1)
    assert (small.weights, small.ignored) == ("", 0)
    code = campaign.script(small, found)
    assert len(code.splitlines()) <= 18
    exec(code, {})
    exact = Reference(small).exact[0]
    assert f"{exact['loss'].item():.4f}"[:5] in capsys.readouterr().out


def test_a_masked_own_class_has_to_be_refused(monkeypatch):
    case = dataclasses.replace(Case(1), rows=2, classes=4, masked=1, masked_own=True)
    monkeypatch.setitem(paths.PATHS, "dense", lambda case: None)
    assert [d.quantity for d in differences(case, "dense")] == ["raises"]

    def refuse(case):
        raise ValueError("masked")

    monkeypatch.setitem(paths.PATHS, "dense", refuse)
    assert differences(case, "dense") == []
