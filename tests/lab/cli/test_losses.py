"""``tammes losses`` says of every loss what its builder says."""

import inspect
import json
import re
import sys
import types

import pytest

import tammes
from tammes import losses
from tammes.lab.cli.latex_to_text import docstring, formula
from tammes.lab.cli.losses import all_loss_info, description, listing, loss_info
from tammes.lab.cli.main import main

EVERY = [*losses.__all__, "direct_sum", "spectral_sum"]


def test_every_loss_is_listed_once():
    assert [found.name for found in all_loss_info()] == EVERY
    text = listing()
    for name in EVERY:
        assert len(re.findall(rf"^{name}\(", text, re.MULTILINE)) == 1


@pytest.mark.parametrize("name", EVERY)
def test_an_entry_is_complete_and_has_no_latex_left(name):
    found = loss_info(name)
    assert found.summary
    assert found.source
    assert found.heads
    assert re.search(r"[=]", found.formula)
    assert not re.search(r"[\\$\x00\x01]|\bfrac\b|[lr]Vert|bigl", found.formula)
    assert found.formula.count("{") == found.formula.count("}")
    assert found.formula.count("(") == found.formula.count(")")


@pytest.mark.parametrize("name", losses.__all__)
def test_settings_are_those_of_the_builder(name):
    definition = getattr(losses, name).definition
    assert loss_info(name).settings == definition.defaults
    assert loss_info(name).on == definition.on
    assert loss_info(name).dense == ("rest" in definition.reads)


def test_a_setting_without_default_is_required():
    assert loss_info("ldam").required == ["counts"]
    assert loss_info("cosface").required == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cosface", "ℓ = log(1 + e^{Λ − s(cos θ_y − m)})"),
        ("arcface", "ℓ = log(1 + e^{Λ − s Φ(θ_y)}); Φ(θ) = cos(θ + m) for θ + m ≤ π"),
        ("lm_softmax", "ℓ = 1/s log Σ_{c≠y} e^{s cos θ_c} − cos θ_y"),
        ("hinge", "ℓ = 1/(C−1) Σ_{c≠y} max(0, f_c − f_y + m)"),
        (
            "gm_softmax",
            "ℓ = −log(e^{s(α_1 cos θ_y + β_1)}/(e^{s(α_2 cos θ_y + β_2)} + Σ_{c≠y} e^{s cos θ_c}))",
        ),
        ("zero_centroid", "R_W = ‖1/C Σ_j ŵ_j‖²"),
        ("ldam", "ℓ = log(1 + e^{Λ − s(cos θ_y − Δ_y)}); Δ_j = m_{max} ((min_i n_i)/n_j)^{1/4}"),
    ],
)
def test_formulas_read_as_the_docstring_has_them(name, expected):
    assert loss_info(name).formula == expected


@pytest.mark.parametrize(
    ("latex", "plain"),
    [
        (r"\frac{a+b}{c}", "(a+b)/c"),
        (r"\frac12 x", "1/2 x"),
        (r"x^2 + y^{10}", "x² + y^{10}"),
        (r"a,\qquad b", "a; b"),
        (r"\lVert x \rVert^2", "‖x‖²"),
        (r"\max_{c\ne y} f_c", "max_{c≠y} f_c"),
        (r"2\cos\theta", "2 cos θ"),
        (r"\bar f - \hat w", "f̄ − ŵ"),
        (r"\sum_{c\notin P_i} e^{\tau - \delta}", "Σ_{c∉P_i} e^{τ − δ}"),
        (r"m_i\sim\mathcal N", "m_i ∼ N"),
        (r"\unknown + 1", "unknown + 1"),
    ],
)
def test_latex_becomes_plain_text(latex, plain):
    assert formula(latex) == plain


@pytest.mark.parametrize("name", losses.__all__)
def test_heads_are_those_a_criterion_accepts(name):
    found = loss_info(name).heads
    requires = getattr(losses, name).definition.requires
    adaptive = "(scale='adaptive')" if requires == "adaptive" else ""
    assert {f"CosineHead{adaptive}", f"SimplexHead{adaptive}"} <= set(found)
    cosine = requires in ("cosine", "adaptive")
    assert ("LinearHead(bias=False)" in found) != cosine
    assert ("CosineHead(normalize_features=False)" in found) != cosine
    assert ("LinearHead" in found) == (requires in ("", "product"))
    assert ("GaussianHead" in found) == (requires == "")


def test_the_ready_made_criterion_is_named():
    assert loss_info("cosface").criterion == "CosFace"
    assert loss_info("lm_softmax").criterion == "LMSoftmax"
    assert loss_info("hinge").criterion == ""


@pytest.mark.parametrize("name", ["cosface", "CosFace", "COSFACE", "lm-softmax", "LMSoftmax"])
def test_a_loss_is_found_under_the_name_of_its_class_too(name):
    assert loss_info(name).name in ("cosface", "lm_softmax")


@pytest.mark.parametrize("name", EVERY)
def test_a_description_is_the_whole_docstring_without_markup(name):
    text = description(name)
    for line in inspect.getdoc(getattr(tammes, name)).splitlines():
        if line.startswith(("Args:", "Returns:", "References:", "    >>>")):
            assert line in text
    assert not re.search(r":\w+:`|``|\.\. math|\\[a-zA-Z]", text)


def test_a_docstring_keeps_its_lines_and_indents():
    text = "One.\n\n.. math:: a = \\frac12,\\qquad b\n\nSee :func:`tammes.cosface` with ``x``."
    assert list(docstring(text)) == ["One.", "", "    a = 1/2", "    b", "", "See cosface with x."]


def test_losses_as_json(capsys):
    assert main(["losses", "--json"]) == 0
    every = json.loads(capsys.readouterr().out)
    assert [found["name"] for found in every] == EVERY
    assert main(["losses", "ArcFace", "--json"]) == 0
    one = json.loads(capsys.readouterr().out)
    assert one == every[EVERY.index("arcface")]
    assert one["settings"]["margin"] == 0.5


def test_losses_as_text(capsys):
    assert main(["losses"]) == 0
    assert capsys.readouterr().out == listing() + "\n"
    assert main(["losses", "nca"]) == 0
    assert capsys.readouterr().out == description("nca") + "\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["cosfase"], "there is no loss 'cosfase'; did you mean cosface?"),
        (["--plot", "x.png"], "--plot expects the name of a loss"),
        (["cosfase", "--plot", "x.png"], "did you mean cosface?"),
    ],
)
def test_losses_refuses_in_a_sentence_and_writes_nothing(
    capsys, tmp_path, monkeypatch, words, sentence
):
    monkeypatch.chdir(tmp_path)
    assert main(["losses", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("tammes losses: ")
    assert sentence in printed.err
    assert printed.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_plot_is_asked_of_the_report_with_the_builders_name(capsys, monkeypatch):
    asked = []
    module = types.ModuleType("tammes.lab.report.charts.loss_curves")
    module.plot_loss = lambda name, path: asked.append((name, path))
    monkeypatch.setitem(sys.modules, "tammes.lab.report.charts.loss_curves", module)
    assert main(["losses", "ArcFace", "--plot", "there.svg"]) == 0
    assert asked == [("arcface", "there.svg")]
    assert capsys.readouterr().out == "there.svg\n"
