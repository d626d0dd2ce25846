"""Every figure shows the numbers of its formula, in both ways of drawing it."""

import math
import subprocess
import sys

import pytest
import torch
from catalogue import DETACHED, TERMS
from torch.testing import assert_close

import tammes
from tammes.lab.report.charts import distributions, loss_curves, paper_figures
from tammes.lab.report.charts.chart import Arrow, Ball, Bars, Chart, Line, Panel, Points, Rule
from tammes.lab.report.charts.distributions import shown_classes
from tammes.lab.report.charts.loss_curves import over_angle, split_at, term_named
from tammes.lab.report.charts.paper_figures import boundaries
from tammes.lab.report.render import matplotlib_charts

pytest.importorskip("matplotlib", reason="figures need matplotlib")
pytest.importorskip("plotly", reason="interactive figures need plotly")


def tensor(values):
    return torch.tensor(list(values), dtype=torch.double)


def lines_of(figure, axes=0):
    """Curves of a figure of matplotlib by their name."""
    return {
        line.get_label(): (tensor(line.get_xdata()), tensor(line.get_ydata()))
        for line in figure.axes[axes].lines
    }


@pytest.fixture
def cosines(generator):
    prototypes = torch.nn.functional.normalize(torch.randn(7, 5, generator=generator).double())
    labels = torch.arange(7).repeat(30)
    noise = 0.3 * torch.randn(210, 5, generator=generator).double()
    features = torch.nn.functional.normalize(prototypes[labels] + noise)
    return tammes.split(features @ prototypes.T, labels)


def test_hinge_and_softplus_are_their_formulas():
    lines = lines_of(paper_figures.hinge_and_softplus())
    excess, hinge = lines["hinge"]
    assert_close(hinge, excess.clamp_min(0))
    assert_close(lines["softplus"][1], (1 + excess.exp()).log())


@pytest.mark.parametrize("margin", [1, 2, 3, 4])
def test_psi_is_the_folded_cosine(margin):
    degrees, psi = lines_of(paper_figures.psi())[f"m = {margin}"]
    theta = torch.deg2rad(degrees)
    turn = (margin * theta / math.pi).floor().clamp_max(margin - 1)
    assert_close(psi, (-1) ** turn * (margin * theta).cos() - 2 * turn, atol=1e-6, rtol=0)
    assert psi[-1].item() == pytest.approx(1 - 2 * margin, abs=1e-6)


def test_extensions_differ_only_past_pi():
    lines = lines_of(paper_figures.extensions(margin=0.5))
    degrees, monotone = lines["monotone"]
    theta = torch.deg2rad(degrees)
    past = theta + 0.5 > math.pi
    assert_close(monotone[~past], (theta + 0.5).cos()[~past], atol=1e-6, rtol=0)
    assert_close(monotone[past], -2 - (theta + 0.5).cos()[past], atol=1e-6, rtol=0)
    linear = lines["linear"][1]
    assert_close(linear[~past], monotone[~past])
    assert_close(linear[past], theta.cos()[past] - 0.5 * math.sin(0.5), atol=1e-6, rtol=0)


def test_divergences_are_those_of_two_categories_from_uniform():
    lines = lines_of(paper_figures.divergences())
    q, forward = lines["D(q‖u)"]
    assert_close(forward, q * (2 * q).log() + (1 - q) * (2 * (1 - q)).log(), atol=1e-9, rtol=0)
    backward = lines["D(u‖q)"][1]
    assert_close(backward, -((2 * q).log() + (2 * (1 - q)).log()) / 2, atol=1e-9, rtol=0)
    assert_close(lines["D̃(q)"][1], (forward + backward) / 2, atol=1e-9, rtol=0)


@pytest.mark.parametrize("power", [0.1, 0.3, 1.0, 2.0])
def test_spectral_overlap_is_its_formula_and_its_top_is_marked(power):
    lines = lines_of(paper_figures.spectral_overlap(powers=(power,)))
    share, overlap = lines[f"p = {power:g}"]
    assert_close(overlap, share * (1 - share**power))
    top = lines["largest"][1].item()
    assert top == pytest.approx(power * (1 + power) ** -(1 + 1 / power))
    assert overlap.max() <= top + 1e-12


def test_the_direct_sum_has_no_overlap():
    assert lines_of(paper_figures.spectral_overlap())["p = 0"][1].abs().max() == 0


@pytest.mark.parametrize("margin", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("angle", [1.0, math.pi / 2])
def test_equal_norms_put_the_boundary_at_one_part_in_m_plus_one(margin, angle):
    upper, middle, lower = boundaries((1.0, 1.0), margin=margin, angle=angle)
    # m * theta_1 = theta_2 with theta_1 + theta_2 = angle.
    assert upper == pytest.approx(angle / 2 - angle / (margin + 1), abs=1e-9)
    assert middle == pytest.approx(0, abs=1e-9)
    assert lower == pytest.approx(-upper, abs=1e-9)


def test_on_a_boundary_both_scores_are_equal_for_unequal_norms():
    first, second = 1.4, 1.0
    upper, middle, lower = boundaries((first, second), margin=2.0)
    quarter = math.pi / 4

    def psi(theta):
        turn = min(math.floor(2 * theta / math.pi), 1)
        return (-1) ** turn * math.cos(2 * theta) - 2 * turn

    assert first * psi(quarter - upper) == pytest.approx(second * math.cos(quarter + upper))
    assert first * math.cos(quarter - middle) == pytest.approx(second * math.cos(quarter + middle))
    assert second * psi(quarter + lower) == pytest.approx(first * math.cos(quarter - lower))
    # The longer prototype has the larger feasible angle.
    assert quarter - upper > quarter + lower


def test_boundaries_refuse_norms_whose_classes_do_not_meet():
    with pytest.raises(ValueError, match=r"meet between the prototypes, got \(9.0, 1.0\)"):
        boundaries((9.0, 1.0), margin=1.0, angle=1.0)


def test_decision_geometry_draws_the_boundaries_at_their_directions():
    figure = paper_figures.decision_geometry(margin=2.0)
    upper = boundaries((1.0, 1.0), margin=2.0)[0]
    xs, ys = lines_of(figure)["L-Softmax"]
    assert math.atan2(-xs[1], ys[1]) == pytest.approx(upper)
    assert len(figure.axes) == 3


def test_margins_in_losses_draws_the_bias_of_each_loss():
    others = (1.4, 0.3, -0.4, -1.2)
    chart = paper_figures.margins_in_losses.chart(3.6, others, extra=1.0)
    steps = [
        [layer.end[0] - layer.start[0] for layer in panel.layers if isinstance(layer, Arrow)]
        for panel in chart.panels
    ]
    hidden = math.log(sum(math.exp(other - 1.4) for other in others))
    # The last arrow of each panel is the biased margin, f_c* - f_y + all biases.
    assert steps[0] == pytest.approx([1.0, 1.4 - 3.6 + 1.0])
    assert steps[1] == pytest.approx([hidden, 1.0, 1.4 - 3.6 + hidden + 1.0])
    assert hidden < steps[2][0] < math.log(3 + 1)


THETA = torch.deg2rad(torch.linspace(1, 179, 179, dtype=torch.double))


@pytest.mark.parametrize(
    ("term", "score"),
    [
        (tammes.softmax(), lambda t: t.cos()),
        (tammes.normface(), lambda t: t.cos()),
        (tammes.cosface(margin=0.35), lambda t: t.cos() - 0.35),
        (tammes.softmax(margin=-0.3), lambda t: t.cos() + 0.3),
        (tammes.hard_bias(margin=3.0), lambda t: t.cos() - 3.0 / 30),
        (tammes.gm_softmax(0.8, -0.1, 0.8, -0.1), lambda t: 0.8 * t.cos() - 0.1),
        (
            tammes.arcface(margin=0.5),
            lambda t: torch.where(t + 0.5 <= math.pi, (t + 0.5).cos(), -2 - (t + 0.5).cos()),
        ),
        (tammes.l_softmax(margin=1.0), lambda t: t.cos()),
    ],
)
def test_the_target_score_is_read_off_the_loss(term, score):
    (curve,) = over_angle(term, THETA)
    assert_close(curve.score, score(THETA), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["lm_softmax", "crammer_singer", "focal", "sample_margin", "bce"])
def test_a_loss_that_is_no_softmax_of_a_score_has_no_target_score(name):
    (curve,) = over_angle(term_named(name), THETA)
    assert curve.score is None
    assert len(loss_curves.loss.chart(name).panels) == 2


# A detached gradient is not the slope, on purpose.
@pytest.mark.parametrize("name", sorted({*TERMS} - {*DETACHED}))
def test_every_loss_has_a_finite_curve_whose_gradient_is_its_slope(name):
    theta = torch.deg2rad(torch.linspace(5, 175, 35, dtype=torch.double))
    step = 1e-6
    before, here, after = (over_angle(TERMS[name], theta + h) for h in (-step, 0.0, step))
    for low, curve, high in zip(before, here, after, strict=True):
        assert curve.loss.isfinite().all()
        slope = (high.loss - low.loss) / (2 * step)
        # At a kink or a jump the slope has two sides.
        bend = (high.loss - 2 * curve.loss + low.loss).abs() / step
        smooth = bend < 1e-3
        assert smooth.sum() > 30
        assert_close(curve.gradient[smooth], slope[smooth], atol=2e-4, rtol=1e-4)


def test_a_rare_class_has_the_larger_margin_in_the_figure_of_ldam():
    frequent, rare = over_angle(term_named("ldam"), THETA)
    assert (rare.name, frequent.name) == ("counts 10", "counts 1000")
    assert_close(THETA.cos() - rare.score, torch.full_like(THETA, 0.5), atol=1e-6, rtol=0)
    small = torch.full_like(THETA, 0.5 * (10 / 1000) ** 0.25)
    assert_close(THETA.cos() - frequent.score, small, atol=1e-6, rtol=0)


def test_the_figure_of_a_loss_draws_its_curve():
    figure = loss_curves.loss("cosface", scale=20.0)
    degrees, loss = lines_of(figure, 1)["cosface"]
    (curve,) = over_angle(tammes.cosface(), torch.deg2rad(degrees), scale=20.0)
    assert_close(loss, curve.loss)
    assert_close(lines_of(figure, 2)["cosface"][1], curve.gradient)
    assert [axes.get_title() for axes in figure.axes] == ["target score", "loss", "gradient"]


def test_split_at_has_the_angle_it_is_asked_for():
    at = split_at(THETA, scale=2.0)
    assert_close(at.target, THETA.cos())
    assert_close(at.gap, 1 - THETA.cos())
    assert_close(at.others, (torch.tensor(2.0 * 0.5).exp() + 8).log().expand(179).double())


def test_an_unknown_loss_is_named_with_the_nearest_one(tmp_path):
    with pytest.raises(ValueError, match=r"no loss 'cosfaces'; did you mean cosface\?"):
        loss_curves.plot_loss("cosfaces", tmp_path / "x.png")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("suffix", "start"),
    [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF"), (".html", b"<!DOCTYPE html>")],
)
def test_plot_loss_writes_what_the_suffix_says(tmp_path, suffix, start):
    path = tmp_path / f"loss{suffix}"
    loss_curves.plot_loss("arcface", path)
    assert path.read_bytes().startswith(start)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_plot_loss_refuses_another_suffix(tmp_path):
    with pytest.raises(ValueError, match=r"writes \.png, \.svg, \.pdf, \.html, got .*loss\.gif"):
        loss_curves.plot_loss("arcface", tmp_path / "loss.gif")


def test_histograms_hold_the_share_of_every_bin(cosines):
    own, hardest = distributions.similarity_histogram.chart(cosines, bins=20).panels[0].layers
    for bars, values in ((own, cosines.target), (hardest, cosines.hardest)):
        expected = torch.histc(values, bins=20, min=-1, max=1) / len(values)
        assert_close(tensor(bars.heights), expected)
        assert sum(bars.heights) == pytest.approx(1.0)


def test_the_margin_histogram_holds_every_example_and_marks_mean_and_optimum(cosines):
    panel = distributions.margin_histogram.chart(cosines, optimum=7 / 6).panels[0]
    (bars,) = (layer for layer in panel.layers if isinstance(layer, Bars))
    rules = [layer.at for layer in panel.layers if isinstance(layer, Rule)]
    margins = cosines.target - cosines.hardest
    assert sum(bars.heights) == pytest.approx(1.0)
    assert bars.edges[0] <= margins.min()
    assert bars.edges[-1] >= margins.max()
    assert rules[:2] == pytest.approx([margins.mean().item(), 7 / 6])


def test_histograms_of_several_models_are_side_by_side(cosines):
    figure = distributions.histograms({"a": cosines, "b": cosines})
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["a: similarities", "b: similarities", "a: margins", "b: margins"]


def test_the_heat_map_holds_the_angle_of_every_pair(generator):
    prototypes = torch.randn(6, 4, generator=generator).double()
    (heat,) = distributions.angle_heat_map.chart(prototypes).panels[0].layers
    unit = prototypes / prototypes.norm(dim=1, keepdim=True)
    expected = torch.rad2deg((unit @ unit.T).clamp(-1, 1).acos())
    for i, row in enumerate(heat.values):
        assert row[i] is None
        for j, value in enumerate(row):
            assert i == j or value == pytest.approx(expected[i, j].item(), abs=1e-6)


def test_a_selection_of_classes_keeps_those_it_must_show():
    shown = shown_classes(1000, 200, always=[3, 777])
    assert len(shown) <= 200
    assert {0, 3, 777, 999} <= set(shown.tolist())
    assert shown_classes(200, 200).tolist() == list(range(200))


def test_the_sphere_shows_directions(generator):
    prototypes, features = torch.randn(4, 3, generator=generator), torch.randn(9, 3)
    labels = torch.arange(9) % 4
    (ball,) = distributions.sphere.chart(prototypes, features, labels).panels[0].layers
    assert isinstance(ball, Ball)
    expected = features / features.norm(dim=1, keepdim=True)
    assert_close(torch.tensor(ball.features), expected, atol=1e-6, rtol=0, check_dtype=False)
    assert ball.labels == labels.tolist()
    with pytest.raises(ValueError, match=r"sphere expects vectors of shape \(·, 3\), got \(4, 2\)"):
        distributions.sphere(prototypes[:, :2])


def test_the_far_side_of_a_sphere_is_pale_in_print():
    axes = distributions.sphere(torch.eye(3)).axes[0]
    up, around = math.radians(axes.elev), math.radians(axes.azim)
    level = math.cos(up)
    eye = torch.tensor([level * math.cos(around), level * math.sin(around), math.sin(up)])
    axes = distributions.sphere(torch.stack([eye, -eye]), eye[None] * torch.tensor([[1.0], [-1]]),
                                torch.tensor([0, 1])).axes[0]  # fmt: skip
    far, near = sorted(each.get_alpha() for each in axes.lines if each.get_marker() == "o")
    assert near > 3 * far
    near, far = (each.get_alpha() for each in axes.collections)
    assert near > 3 * far


def test_a_translucent_ball_hides_the_far_side_of_an_interactive_sphere():
    features = torch.eye(3)
    figure = distributions.sphere.interactive(torch.eye(3), features, torch.arange(3))
    (ball,) = [trace for trace in figure.data if trace.type == "surface"]
    radius = sum(torch.tensor(ball[axis]).square() for axis in "xyz").sqrt()
    # Inside of the points, so that it hides those behind it and none before it.
    assert 0.95 < radius.min() <= radius.max() < 0.99
    assert 0.4 < ball.opacity < 0.9
    points = [
        trace for trace in figure.data if trace["type"] == "scatter3d" and trace.mode == "markers"
    ]
    assert len(points) == 3
    # What is translucent itself is drawn after the ball, and over it.
    assert {trace.marker.opacity for trace in points} | {trace.opacity for trace in points} == {
        None
    }


def test_spheres_are_titled_with_their_class_margin():
    prototypes = tammes.geometry.simplex(4, 3)
    figure = distributions.spheres(
        {"one": (prototypes, prototypes), "two": (prototypes, prototypes)}
    )
    assert [axes.get_title() for axes in figure.axes] == ["one: 109.47°", "two: 109.47°"]


def test_long_titles_of_panels_stay_within_the_figure_and_apart():
    long = Panel([Line([0, 1], [0, 1])], "Class margin during training: CIFAR-100, long-tailed 100")
    figure = matplotlib_charts.draw(Chart([long, long]))
    figure.draw_without_rendering()
    left, right = (axes.title.get_window_extent() for axes in figure.axes)
    assert left.x0 >= 0
    assert left.x1 < right.x0
    assert right.x1 <= figure.bbox.x1


@pytest.mark.parametrize("lines", [8, 9])
def test_panels_with_many_lines_share_a_legend_below_them(lines):
    names = [f"line {number}" for number in range(lines)]
    panels = [Panel([Line([0, 1], [0, 1], name) for name in own]) for own in (names, ["other"])]
    figure = matplotlib_charts.draw(Chart(panels))
    shown = [text.get_text() for legend in figure.legends for text in legend.texts]
    assert shown == ([] if lines == 8 else [*names, "other"])
    assert (figure.axes[0].get_legend() is None) == (lines == 9)
    assert figure.axes[1].get_legend() is None


def test_the_scatter_shows_each_class_in_its_place(generator):
    features, labels = torch.randn(12, 2, generator=generator), torch.arange(12) % 3
    lines = lines_of(distributions.feature_scatter(features, labels, names=["a", "b", "c"]))
    xs, ys = lines["b"]
    assert_close(torch.stack([xs, ys], 1).float(), features[labels == 1])


def test_many_features_are_thinned_out(generator):
    features, labels = torch.randn(500, 2, generator=generator), torch.zeros(500, dtype=torch.long)
    (points,) = distributions.feature_scatter.chart(features, labels, limit=100).panels[0].layers
    assert len(points.x) == 100


def test_the_bias_during_training_stays_below_its_bound():
    panel = distributions.bias_during_training.chart({"softmax": [4.0, 2.0]}, classes=101).panels[0]
    line, rule = panel.layers
    assert (line.x, line.y) == ([1, 2], [4.0, 2.0])
    assert rule.at == pytest.approx(math.log(100))


def test_a_series_must_have_a_value_for_every_step():
    with pytest.raises(ValueError, match="a value for each of 3 steps, got 2 for 'run'"):
        distributions.during_training({"run": [1.0, 2.0]}, steps=[1, 2, 3], quantity="loss")


FIGURES = {
    "hinge_and_softplus": lambda: paper_figures.hinge_and_softplus,
    "margins_in_losses": lambda: paper_figures.margins_in_losses,
    "psi": lambda: paper_figures.psi,
    "extensions": lambda: paper_figures.extensions,
    "decision_geometry": lambda: paper_figures.decision_geometry,
    "divergences": lambda: paper_figures.divergences,
    "spectral_overlap": lambda: paper_figures.spectral_overlap,
}


@pytest.mark.parametrize("name", FIGURES)
def test_both_ways_of_drawing_show_the_same_numbers(name):
    drawing = FIGURES[name]()
    chart, figure, page = drawing.chart(), drawing(), drawing.interactive()
    drawn = [line for axes in figure.axes for line in axes.lines]
    for place, panel in enumerate(chart.panels):
        axis = "x" if not place else f"x{place + 1}"
        curves = [layer for layer in panel.layers if isinstance(layer, Line | Points)]
        traces = [
            trace
            for trace in page.data
            if (trace.xaxis or "x") == axis and trace.mode in ("lines", "markers")
        ]
        assert len(curves) == len(traces)
        for layer, trace in zip(curves, traces, strict=True):
            assert list(trace.x) == list(layer.x)
            assert list(trace.y) == list(layer.y)
            assert any(
                list(line.get_xdata()) == list(layer.x) and list(line.get_ydata()) == list(layer.y)
                for line in drawn
            )


def test_the_interactive_heat_map_and_histogram_show_the_chart_s_numbers(cosines):
    (heat,) = distributions.angle_heat_map.interactive(torch.eye(3), ["a", "b", "b"]).data
    assert [list(row) for row in heat.z] == [[None, 90, 90], [90, None, 90], [90, 90, None]]
    assert list(heat.x) == ["a", "b (1)", "b (2)"]
    bars = distributions.similarity_histogram.interactive(cosines, bins=20).data[0]
    chart = distributions.similarity_histogram.chart(cosines, bins=20).panels[0].layers[0]
    assert list(bars.y) == chart.heights


def test_names_are_escaped_in_interactive_figures():
    figure = distributions.sphere.interactive(torch.eye(3), names=["<b>x</b>", "&", "c"])
    # After the ball and its grid.
    assert [trace.name for trace in figure.data[2:]] == ["&lt;b&gt;x&lt;/b&gt;", "&amp;", "c"]


@pytest.mark.parametrize("suffix", [".png", ".pdf"])
def test_a_figure_of_the_same_numbers_has_the_same_bytes(tmp_path, suffix):
    one, two = (tmp_path / f"{name}{suffix}" for name in ("one", "two"))
    for path in (one, two):
        matplotlib_charts.save(paper_figures.psi(), path)
    assert one.read_bytes() == two.read_bytes()


def test_drawing_needs_no_pyplot_and_importing_needs_no_matplotlib():
    code = (
        "import sys; from tammes.lab.report.charts import paper_figures; "
        "assert 'matplotlib' not in sys.modules and 'plotly' not in sys.modules; "
        # Reading all settings in the plain way would load pyplot, to find a backend.
        "import matplotlib; settings = lambda: dict(dict.items(matplotlib.rcParams)); "
        "before = settings(); paper_figures.psi(); "
        "assert 'matplotlib.pyplot' not in sys.modules; assert settings() == before"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
