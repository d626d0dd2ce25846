"""The page of runs: everything in it comes from their records, and it opens anywhere."""

import json
import math
import re
import shlex
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
import torch
from pages import EVIL, LOSSES, NAMES, body, escaped, layers, make_runs, plots
from records import DIGITS, make_run, make_study

from tammes.lab.cli import main
from tammes.lab.config.flags import add_config, read_config
from tammes.lab.config.schema import Config
from tammes.lab.records.run_folder import Run, write_json, write_tensors
from tammes.lab.report.charts.chart import (
    Bars,
    Chart,
    HeatMap,
    HorizontalBars,
    Line,
    Panel,
    Points,
    Rule,
    short,
)
from tammes.lab.report.charts.feature_projection import CAPTIONS
from tammes.lab.report.confusions import pairs, worst_mistakes
from tammes.lab.report.load_runs import load_runs, representative_seeds
from tammes.lab.report.pages.runs_page import charts_of_runs, run_figures, runs_page
from tammes.lab.report.render import html_page
from tammes.lab.report.render.image_url import image_url
from tammes.lab.report.render.matplotlib_charts import draw
from tammes.lab.report.rerun import train_command
from tammes.lab.stats.seed_groups import study

pytest.importorskip("plotly", reason="pages need plotly")
pytest.importorskip("PIL", reason="images need Pillow")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two losses with names that try to break the page, a failed run and a damaged one."""
    return make_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def written(runs, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(runs_page(runs, title=f"title {EVIL}", command=f"tammes report '{EVIL}'"))
    return path


# ------------------------------------------------------------------------------ what is shown


def test_the_page_has_a_part_for_everything(written):
    headings = re.findall(r"<h2[^>]*>(.*?)</h2>", written.read_text())
    assert headings == [
        "Results",
        "Margins",
        "Features",
        "Training",
        "Classes",
        "Confused and close classes",
        "Configuration",
        "How to run it again",
        "Glossary",
    ]


def test_the_summary_has_means_deviations_and_paired_intervals(tmp_path):
    text = body(runs_page(make_study(tmp_path, pictures=False)))
    assert re.search(r'data-column="accuracy %" data-sort="90\.8\d*">90\.80 ± 0\.80</td>', text)
    assert re.search(r'data-column="accuracy %"[^>]*>\+1\.87 \[-1\.00, \+4\.74\]</td>', text)
    assert re.search(r'data-column="accuracy %"[^>]*>\+3\.73 \[\+0\.86, \+6\.60\]\*</td>', text)
    assert ">not decided</td>" in text
    assert ">higher</td>" in text
    assert "n\u00a0=\u00a01" not in text


def test_from_one_seed_no_winner_is_claimed(tmp_path):
    text = body(runs_page(make_study(tmp_path, seeds=1, pictures=False)))
    assert "no interval and no winner for n\u00a0=\u00a01" in text
    assert text.count(">not decided (n = 1)</td>") == 2
    assert ">higher</td>" not in text


def test_runs_without_a_result_are_listed_with_their_reason(written, runs):
    text = body(written.read_text())
    assert escaped(f"not finite: the loss {EVIL} is nan") in text
    assert f"{escaped(str(runs[-1].folder / 'config.json'))}: damaged" in text
    assert "Runs that are failed or damaged, and why." in text


def test_a_curve_is_the_mean_over_the_seeds_and_the_seeds_are_thin(tmp_path):
    found = make_study(tmp_path, seeds=3, losses=("softmax()",), pictures=False)
    lines = layers(run_figures(found)["test-accuracy"], Line)
    thin, thick = lines[:-1], lines[-1]
    assert [line.thin for line in lines] == [True, True, True, False]
    for line, run in zip(thin, found, strict=True):
        expected = [100 * row["test"]["accuracy"] for row in run.metrics]
        assert line.y == pytest.approx(expected, rel=1e-5)
    means = [sum(values) / 3 for values in zip(*(line.y for line in thin), strict=True)]
    assert thick.y == pytest.approx(means, rel=1e-5)
    assert list(thick.x) == [1, 2, 3, 4, 5, 6]


def test_a_stopped_run_is_dotted_and_not_in_the_mean(tmp_path):
    found = make_study(tmp_path, seeds=2, losses=("softmax()",), pictures=False)
    before = layers(run_figures(found)["train-loss"], Line)[-1]
    stopped = make_run(tmp_path / "x", seed=9, state="failed", loss="softmax()")
    lines = layers(run_figures([*found, stopped])["train-loss"], Line)
    assert [line.dash for line in lines] == ["solid", "solid", "dotted", "solid"]
    assert lines[-1] == before


def test_the_bias_is_under_its_bound_and_margins_under_their_optimum(tmp_path):
    charts = run_figures(make_study(tmp_path, seeds=1, pictures=False))
    (rule,) = layers(charts["softmax-bias"], Rule)
    assert rule.at == pytest.approx(math.log(9))
    assert layers(charts["class-margin"], Rule)[0].at == 70.0
    assert layers(charts["class-margins"], Rule)[0].at == 70.0
    assert layers(charts["sample-margins"], Rule)[0].at == 1.05
    (bars,) = layers(charts["class-margins"], HorizontalBars)
    assert bars.values == pytest.approx([45.0, 53.6, 61.2])


def test_histograms_are_those_of_the_cosines(tmp_path):
    run = make_run(tmp_path, classes=("a", "b", "c"), size=4, examples=30)
    prototypes = run.tensors("prototypes")["prototypes"]
    known = run.tensors("embeddings")
    unit = torch.nn.functional.normalize
    cosine = unit(known["features"]) @ unit(prototypes).T
    own = cosine.gather(1, known["labels"][:, None]).flatten()
    chart = run_figures([run])["similarities-1"]
    bars = layers(chart, Bars)[0]
    expected = torch.histogram(own.double(), torch.tensor(bars.edges).double()).hist / 30
    assert bars.heights == pytest.approx(expected.tolist())


def test_classes_are_shown_the_worst_first(tmp_path):
    found = make_study(tmp_path, seeds=2, losses=("softmax()",))
    (points,) = layers(run_figures(found)["class-accuracy"], Points)
    assert list(points.x) == sorted(points.x)
    mean = [
        sum(r.final["test"]["per_class_accuracy"][place] for r in found) / 2 for place in range(10)
    ]
    assert points.x[0] == pytest.approx(100 * min(mean))
    assert points.texts[0].startswith(DIGITS[mean.index(min(mean))])


def test_of_many_classes_the_worst_are_drawn_and_all_are_listed(tmp_path):
    names = [f"class {place}" for place in range(100)]
    found = [make_run(tmp_path, classes=names, size=8, examples=1000, pictures=False)]
    chart = run_figures(found)["class-accuracy"]
    assert len(chart.panels[0].rows) == 30
    text = body(runs_page(found))
    assert "The worst 30 of 100 classes" in text
    assert "All classes: accuracy in %" in text
    assert {name for name in names if f">{name}</td>" in text} == set(names)


def test_a_class_without_a_test_image_is_left_out(tmp_path):
    run = make_run(tmp_path, examples=8)
    chart = run_figures([run])["class-accuracy"]
    assert len(chart.panels[0].rows) == 8


def test_pairs_are_the_most_confused_and_the_closest(tmp_path):
    make_run(tmp_path, classes=("a", "b", "c", "d"), size=2, examples=8, pictures=False)
    angles = torch.deg2rad(torch.tensor([0.0, 10.0, 120.0, 240.0]))
    directions = torch.stack([angles.cos(), angles.sin()], 1)
    write_tensors(tmp_path / "prototypes.safetensors", {"prototypes": 3 * directions})
    labels = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    predictions = torch.tensor([0, 2, 1, 1, 3, 3, 2, 3])
    known = {"features": directions[labels], "labels": labels, "predictions": predictions}
    write_tensors(tmp_path / "embeddings.safetensors", known)
    seen = load_runs([Run(tmp_path)]).seen["softmax()"]
    first, second = pairs(seen, 1)
    assert (first.first, first.second, first.first_as_second, first.second_as_first) == (2, 3, 2, 1)
    assert first.degrees == pytest.approx(120.0, abs=1e-4)
    assert (second.first, second.second, second.confused) == (0, 1, 0)
    assert second.degrees == pytest.approx(10.0, abs=1e-4)


def test_a_confused_pair_has_its_images_between_right_ones(tmp_path):
    text = body(runs_page([make_run(tmp_path, channels=3, side=32)]))
    galleries = re.findall(r'<div class="gallery">(.*?)</div></div>', text, re.DOTALL)
    assert galleries.pop(0).startswith("<h3>Worst mistakes</h3>")
    assert galleries
    for gallery in galleries:
        one, two = re.search("<h3>(.*?) and (.*?)</h3>", gallery).groups()
        shown = re.findall("<figcaption>(.*?)</figcaption>", gallery)
        assert shown[0] == one
        assert shown[-1] == two
        assert set(shown[1:-1]) <= {f"{one}, predicted as {two}", f"{two}, predicted as {one}"}
        assert len(re.findall('<img src="data:image/(?:png|webp);base64,', gallery)) == len(shown)


def test_the_confusion_matrix_has_the_mistakes_of_each_class(tmp_path):
    make_run(tmp_path, classes=("a", "b", "c"), size=2, examples=6, pictures=False)
    labels = torch.tensor([0, 0, 0, 0, 1, 2])
    predictions = torch.tensor([0, 2, 2, 1, 1, 0])
    known = {"features": torch.ones(6, 2), "labels": labels, "predictions": predictions}
    write_tensors(tmp_path / "embeddings.safetensors", known)
    chart = run_figures([Run(tmp_path)])["confusion-1"]
    (heat,) = layers(chart, HeatMap)
    assert heat.values == [[None, 25.0, 50.0], [None] * 3, [100.0, None, None]]
    assert heat.names == ["a", "b", "c"]
    assert (chart.panels[0].x, chart.panels[0].y) == ("predicted class", "true class")


def test_of_many_classes_the_matrix_has_those_with_the_most_mistakes(tmp_path):
    names = [f"c{place}" for place in range(40)]
    make_run(tmp_path, classes=names, size=2, examples=80, pictures=False)
    labels = torch.arange(80) % 40
    predictions = labels.clone()
    predictions[[3, 43, 5]] = 7
    known = {"features": torch.ones(80, 2), "labels": labels, "predictions": predictions}
    write_tensors(tmp_path / "embeddings.safetensors", known)
    (heat,) = layers(run_figures([Run(tmp_path)])["confusion-1"], HeatMap)
    assert heat.names == ["c3", "c5", "c7"]
    assert heat.values == [[None, None, 100.0], [None, None, 50.0], [None] * 3]


def test_the_worst_mistakes_come_first(tmp_path):
    make_run(tmp_path, classes=("a", "b"), size=2, examples=4)
    directions = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    write_tensors(tmp_path / "prototypes.safetensors", {"prototypes": 2 * directions})
    features = torch.tensor([[0.6, 0.8], [0.0, 3.0], [1.0, 0.0], [0.0, 1.0]])
    labels, predictions = torch.tensor([0, 0, 1, 1]), torch.tensor([1, 1, 0, 1])
    index = torch.tensor([7, 3, 9, 4])
    known = {"features": features, "labels": labels, "predictions": predictions, "index": index}
    write_tensors(tmp_path / "embeddings.safetensors", known)
    # In another order than the embeddings.
    order = [3, 0, 1, 2]
    pictures = {key: value[order] for key, value in known.items() if key != "features"}
    pictures["images"] = torch.zeros(4, 1, 8, 8, dtype=torch.uint8)
    write_tensors(tmp_path / "examples.safetensors", pictures)
    seen = load_runs([Run(tmp_path)]).seen["softmax()"]
    assert seen.image_margins == [None, *map(pytest.approx, (-0.2, -1.0, -1.0))]
    (gallery,) = worst_mistakes(seen)
    captions = [image.caption for image in gallery.images]
    assert captions == ["a as b, -1.00", "b as a, -1.00", "a as b, -0.20"]
    assert worst_mistakes(replace(seen, image_margins=())) == []


@pytest.mark.parametrize("channels", [1, 3])
def test_an_image_is_kept_pixel_by_pixel(channels, generator):
    import base64
    import io

    from PIL import Image

    pixels = torch.randint(0, 256, (channels, 5, 7), generator=generator).to(torch.uint8)
    data = base64.b64decode(image_url(pixels).partition(",")[2])
    image = Image.open(io.BytesIO(data))
    assert image.size == (7, 5)
    read = torch.tensor(list(image.tobytes()), dtype=torch.uint8).view(5, 7, channels)
    assert torch.equal(read.permute(2, 0, 1), pixels)


def test_a_photograph_is_compressed_and_looks_the_same():
    import base64
    import io

    from PIL import Image

    across = torch.linspace(0, 255, 64)
    pixels = torch.stack(
        [across.expand(64, 64), across[:, None].expand(64, 64), 60 + 0 * across.expand(64, 64)]
    )
    pixels = (pixels + 40 * torch.rand(64, 64)).clamp(0, 255).byte()
    url = image_url(pixels)
    assert url.startswith("data:image/webp;base64,")
    assert len(url) < 4000
    with Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) as image:
        read = torch.tensor(list(image.convert("RGB").tobytes()), dtype=torch.uint8).view(64, 64, 3)
    assert (read.permute(2, 0, 1).float() - pixels.float()).abs().mean() < 8


@pytest.mark.parametrize(("size", "kind"), [(1, "pca"), (2, "plane"), (3, "sphere"), (64, "pca")])
def test_features_of_any_dimension_are_drawn(tmp_path, monkeypatch, size, kind):
    # An entry of None is what Python has for a module that cannot be imported.
    monkeypatch.setitem(sys.modules, "umap.umap_", None)
    found = make_study(tmp_path, seeds=2, size=size, pictures=False)
    shown = [name for name in run_figures(found) if name.startswith(("plane", "sphere", "pca"))]
    assert shown == [f"{kind}-{place}" for place in (1, 2, 3)]
    assert CAPTIONS[kind] in body(runs_page(found))


def test_terms_are_drawn_where_a_loss_has_several(tmp_path):
    found = [
        make_run(tmp_path / "a", loss="softmax()", pictures=False),
        make_run(
            tmp_path / "b", loss=LOSSES[1], terms=("cosface", "sample_margin"), pictures=False
        ),
    ]
    charts = run_figures(found)
    assert [name for name in charts if name.startswith("terms")] == ["terms-2"]
    assert [line.name for line in layers(charts["terms-2"], Line)] == ["cosface", "sample_margin"]


def test_validation_is_drawn_where_there_is_one(tmp_path):
    with_it = run_figures([make_run(tmp_path / "a", validation=True, pictures=False)])
    without = run_figures([make_run(tmp_path / "b", pictures=False)])
    assert "validation-accuracy" in with_it
    assert "validation-accuracy" not in without


def test_what_differs_is_a_table_and_what_is_common_is_there_once(tmp_path):
    found = [
        make_run(tmp_path / "a", lr=0.1, head="linear()", batch_size=64, pictures=False),
        make_run(tmp_path / "b", lr=0.5, head="cosine(scale=30)", batch_size=64, pictures=False),
    ]
    text = body(runs_page(found))
    assert re.search(r'data-column="lr">0\.5</td>', text)
    assert re.search(r'data-column="head">cosine\(scale=30\)</td>', text)
    common = re.search(r"Settings that all groups.*?<pre>(.*?)</pre>", text, re.DOTALL).group(1)
    assert "batch_size: 64" in common
    assert "\nlr:" not in common
    assert "seed:" not in common


def test_what_stood_for_auto_is_shown_as_it_was_chosen(tmp_path):
    found = [
        make_run(tmp_path / "a", head="auto", augment="auto", pictures=False),
        make_run(tmp_path / "b", head="linear()", augment="auto", name="b", pictures=False),
    ]
    text = body(runs_page(found))
    assert re.search(r'data-column="head">cosine\(scale=16\.0\)</td>', text)
    assert "augment: none\n" in text
    # The command is that of the same run, which has chosen by itself.
    assert "--head" not in re.search(r"2 commands</summary><pre>(.*?)\n\n", text, re.DOTALL)[1]


def test_groups_that_differ_in_their_loss_alone_say_so(tmp_path):
    text = body(runs_page(make_study(tmp_path, seeds=1, pictures=False)))
    assert "The groups differ only in their loss." in text


def test_a_command_trains_the_same_again(tmp_path):
    import argparse

    config = Config(
        loss="cosface(margin=0.35) + 0.5*sample_margin()",
        name="it's $HOME",
        lr=0.05,
        nesterov=True,
        decay_norms=False,
        head_lr=0.5,
        schedules="margin=WarmUp(0, 0.35, epochs=5)",
        seed=4,
    )
    words = shlex.split(train_command(config))
    assert words[:2] == ["tammes", "train"]
    parser = argparse.ArgumentParser()
    add_config(parser)
    assert read_config(parser.parse_args(words[2:])) == config
    text = body(runs_page([make_run(tmp_path, loss=config.loss, seed=4, pictures=False)]))
    assert escaped("--loss 'cosface(margin=0.35) + 0.5*sample_margin()'") in text


def test_every_command_is_on_the_page_once(tmp_path):
    found = make_study(tmp_path, seeds=3, losses=("softmax()", "nca()"), pictures=False)
    for run in found:
        known = json.loads((run.folder / "environment.json").read_text())
        write_json(run.folder / "environment.json", {**known, "command": "tammes compare --x 1"})
    text = body(runs_page(found, command="tammes compare --x 1"))
    shown = "\n".join(re.findall("<pre>(.*?)</pre>", text, re.DOTALL))
    assert shown.count("tammes compare --x 1") == 1
    assert shown.count("tammes train") == 2
    assert "# nca(), seeds 0, 1, 2\ntammes train" in shown


def test_a_run_that_was_trained_by_itself_has_its_command_once(tmp_path):
    run = make_run(tmp_path, loss="nca()", seed=4, pictures=False)
    text = body(runs_page([run], command="tammes report x"))
    shown = re.findall("<pre>(.*?)</pre>", text, re.DOTALL)
    assert [each for each in shown if "tammes" in each] == ["tammes report x", shown[-1]]
    assert shown[-1].startswith("# nca(), seed 4\ntammes train ")


def test_a_value_with_a_dash_is_no_flag():
    assert train_command(Config(name="-x")).endswith("--name=-x")


# ------------------------------------------------------------------------- much, little, damaged


def test_many_groups_stay_readable(tmp_path):
    losses = [f"cosface(margin=0.{place:02d})" for place in range(1, 21)]
    found = make_study(tmp_path, seeds=2, losses=losses, pictures=False, examples=60, epochs=3)
    charts = run_figures(found)
    lines = layers(charts["test-accuracy"], Line)
    # Means only, and no two that look the same.
    assert len(lines) == 20
    assert len({(line.color % 10, line.dash) for line in lines}) == 20
    assert sum(name.startswith("sphere") for name in charts) == 8
    text = runs_page(found)
    assert "The first 8 groups; 12 more are not drawn." in text
    assert "single seeds are not drawn" in text


@pytest.mark.parametrize(
    ("losses", "how"),
    [
        pytest.param(10, {"size": 3}, id="ten losses on ten classes"),
        pytest.param(2, {"size": 64, "noise": 3.0}, id="two losses with five seeds"),
        pytest.param(
            10,
            {
                "size": 128,
                "noise": 4.0,
                "classes": [f"class number {place}" for place in range(100)],
                "channels": 3,
                "side": 32,
            },
            id="ten losses on CIFAR-100",
        ),
        pytest.param(10, {"size": 3, "channels": 3, "side": 64}, id="photographs"),
    ],
)
def test_a_page_of_ten_runs_is_at_most_three_megabytes(tmp_path, losses, how):
    names = [f"cosface(margin=0.{place:02d})" for place in range(1, losses + 1)]
    how = {"epochs": 100, "examples": 2000, **how}
    found = make_study(tmp_path, seeds=10 // losses, losses=names, **how)
    assert len(found) == 10
    assert len(runs_page(found).encode()) <= 3_000_000


def test_a_large_test_set_is_read_once_and_thinned_out(tmp_path, monkeypatch):
    read = []
    tensors = Run.tensors
    monkeypatch.setattr(Run, "tensors", lambda run, name: read.append(name) or tensors(run, name))
    monkeypatch.setattr("tammes.lab.report.load_runs.EXAMPLES_SHOWN", 777)
    small = make_study(tmp_path / "small", seeds=2, examples=400, losses=("softmax()",))
    large = make_study(tmp_path / "large", seeds=2, examples=40_000, losses=("softmax()",))
    sizes = [len(runs_page(found)) for found in (small, large)]
    assert sorted(read) == sorted(["prototypes", "embeddings", "examples"] * 2)
    assert sizes[1] < sizes[0] + 100_000
    text = runs_page(large)
    assert " 777 of 40,000 test examples" in text


def test_one_seed_of_each_group_is_looked_at_and_the_same_where_possible(tmp_path):
    found = [
        make_run(tmp_path / f"{loss}{seed}", loss=f"{loss}()", seed=seed, pictures=False)
        for loss, seeds in (("softmax", (0, 1, 2)), ("cosface", (1, 2)), ("arcface", (5,)))
        for seed in seeds
    ]
    assert list(representative_seeds(study(found).groups).values()) == [1, 1, 5]


def test_a_run_without_embeddings_and_images_has_a_page(tmp_path):
    run = make_run(tmp_path, embeddings=False, pictures=False)
    text = runs_page([run])
    assert "damaged" not in body(text)
    assert "similarities-1" not in run_figures([run])
    assert "Confused and close classes" in text


def test_a_run_of_one_epoch_has_points_in_place_of_curves(tmp_path):
    text = runs_page([make_run(tmp_path, epochs=1, pictures=False)])
    accuracy = next(plot for plot in plots(text) if plot["name"] == "Test accuracy" and
                    plot["layout"]["xaxis"]["title"]["text"] == "epoch")  # fmt: skip
    assert [trace["mode"] for trace in accuracy["data"]] == ["markers"]


def test_only_stopped_runs_have_a_page_of_curves(tmp_path):
    found = [make_run(tmp_path / state, state=state) for state in ("failed", "unfinished")]
    text = runs_page(found)
    assert "0 finished runs." in text
    assert "Test accuracy" in {plot["name"] for plot in plots(text)}


PIECES = ("metrics.jsonl", "timing.jsonl", "data.json", "prototypes.safetensors",
          "embeddings.safetensors", "examples.safetensors", "final.json")  # fmt: skip


@pytest.mark.parametrize("damage", [b"", b'{"a": ', b"[1, 2]\n", b"\xff\xfe\x00", b"7\n"])
@pytest.mark.parametrize("piece", PIECES)
def test_a_damaged_piece_is_named_and_the_rest_is_drawn(tmp_path, piece, damage):
    good = make_run(tmp_path / "good", seed=1, loss="cosface()", pictures=False)
    make_run(tmp_path / "bad", loss="softmax()")
    (tmp_path / "bad" / piece).write_bytes(damage)
    found = load_runs([Run(tmp_path / "bad"), good])
    named = [each for each in found.troubles if str(tmp_path / "bad" / piece) in each.reason]
    # A file of no lines is a run without epochs.
    assert bool(named) == (bool(damage) or not piece.endswith("jsonl"))
    assert {each.state for each in named} <= {"damaged"}
    assert len(charts_of_runs(found)) > 10


def test_tensors_that_do_not_belong_together_are_damage(tmp_path):
    make_run(tmp_path, examples=20)
    known = {
        "features": torch.zeros(20, 3),
        "labels": torch.full((20,), 99),
        "predictions": torch.zeros(20, dtype=torch.long),
    }
    for change, reason in (
        ({}, "labels outside of 0 to 9"),
        ({"labels": torch.zeros(3, dtype=torch.long)}, "do not belong together"),
        (
            {"labels": torch.zeros(20).long(), "features": torch.full((20, 3), math.nan)},
            "not finite",
        ),
    ):
        write_tensors(tmp_path / "embeddings.safetensors", known | change)
        assert reason in body(runs_page([Run(tmp_path)]))


def test_runs_on_different_data_are_on_one_page(tmp_path):
    birds = {"data": "cub", "classes": ("a", "b", "c"), "channels": 3, "side": 64}
    found = [
        make_run(tmp_path / "a", data="mnist", seed=0),
        make_run(tmp_path / "b", size=2, **birds),
        make_run(tmp_path / "c", size=7, seed=4, loss="nca()", **birds),
    ]
    # Half of a character can stand in JSON, and in no file of text.
    data = (tmp_path / "b" / "data.json").read_text()
    (tmp_path / "b" / "data.json").write_text(data.replace('"c"', r'"\ud800"'))
    html_page.write(tmp_path / "page.html", runs_page(found))
    text = (tmp_path / "page.html").read_text()
    assert "<h1>Runs on mnist, cub</h1>" in text
    assert "Groups tested on different images are not compared." in text
    assert "Nothing can be concluded: the runs were tested on different images." in text
    names = set(run_figures(found))
    assert {"sphere-1", "plane-2", "class-accuracy"} <= names


def test_a_missing_piece_is_no_reason_to_stop(tmp_path):
    make_run(tmp_path, examples=20)
    for name in ("data.json", "environment.json", "timing.jsonl", "prototypes.safetensors"):
        (tmp_path / name).unlink()
        assert "Results" in runs_page([Run(tmp_path)])


# ------------------------------------------------------------------------------- the command


def test_the_command_writes_the_page_and_prints_the_table(tmp_path, capsys):
    make_study(tmp_path / "runs", seeds=2, pictures=False)
    path = tmp_path / "out" / "page.html"
    arguments = ["report", str(tmp_path / "runs"), "--out", str(path), "--baseline", "lm_softmax",
                 "--title", "a title"]  # fmt: skip
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "difference from lm_softmax()" in said
    assert f"page: {path}" in said
    text = path.read_text()
    assert "<h1>a title</h1>" in text
    assert escaped(shlex.join(["tammes", *arguments])) in text


def test_figures_are_written_as_png_and_svg(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    names, root = [*NAMES, "日本"], tmp_path / "runs"
    found = [
        make_run(root / "a", classes=names, pictures=False),
        make_run(root / "b", classes=names, name="_$\\frac$ <b>", embeddings=False, pictures=False),
    ]
    arguments = ["--out", str(tmp_path / "p.html"), "--figures", str(tmp_path / "figures")]
    assert main(["report", str(tmp_path / "runs"), *arguments]) == 0
    charts = run_figures(found)
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert names == {f"{name}.{kind}" for name in charts for kind in ("png", "svg")}
    for path in (tmp_path / "figures").iterdir():
        if path.suffix == ".png":
            assert path.read_bytes().startswith(b"\x89PNG")
        else:
            ElementTree.fromstring(path.read_text())
    assert f"figures: {len(charts)} as PNG and SVG" in capsys.readouterr().out


def test_a_name_that_starts_with_an_underscore_is_in_the_legend():
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    lines = [Line([1, 2], [1, 2], "_hidden"), Line([1, 2], [2, 3], "$x$"), Line([1, 2], [0, 1])]
    figure = draw(Chart([Panel(lines, y="y")]))
    shown = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert [name.strip("\u200b") for name in shown] == ["_hidden", r"\$x\$"]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda root: None, "there is no such folder"),
        (lambda root: root.mkdir(), "there is no run in it"),
        (
            lambda root: (make_run(root), (root / "config.json").write_text("{")),
            "there is no run that can be read: .*config.json: damaged",
        ),
        (lambda root: make_run(root, pictures=False), "no group of runs is called 'xyz'"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(tmp_path, capsys, make, sentence):
    make(tmp_path / "runs")
    path = tmp_path / "report.html"
    arguments = ["report", str(tmp_path / "runs"), "--out", str(path), "--baseline", "xyz"]
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert re.fullmatch(f"tammes report: .*{sentence}.*\n", said.err)
    assert said.out == ""
    assert not path.exists()


def test_a_page_that_cannot_be_written_is_one_sentence(tmp_path, capsys):
    make_run(tmp_path / "run", pictures=False)
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "report.html"
    assert main(["report", str(tmp_path / "run"), "--out", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"tammes report: {path}: the page cannot be written (")
    assert said.count("\n") == 1


# ------------------------------------------------------------------------------ names and rules


def test_names_are_escaped_wherever_they_stand(written):
    text = written.read_text()
    for name in (EVIL, "</script><b>bold", "a & b"):
        assert name not in body(text)
        assert escaped(name) in body(text)
    assert f'alt="{escaped(EVIL)}' in text
    assert f'data-group="{escaped(EVIL)}"' in text
    # The library, the numbers of the plots, the script that draws them.
    assert text.count("</script>") == 3


def test_short_names_are_different(generator):
    names = [f"{'long ' * 10}{place}{' name' * 10}" for place in range(5)]
    found = short(names, 20)
    assert len(set(found)) == 5
    assert short(["a", "b"], 5) == ["a", "b"]


# ------------------------------------------------------------------------------- in a browser


BOXES = "[...document.querySelectorAll('.plot')]"


def box(name):
    """JavaScript for the plot under a heading."""
    return (
        f"{BOXES}.find(box => box.closest('figure').querySelector('h3').textContent === {name!r})"
    )


def test_what_has_no_value_is_sorted_to_the_end(chromium, tmp_path):
    table = html_page.Table(
        ("a", "b", "c", "d"), [("x", None, 0, 0), ("y", 2, 0, 0), ("z", 1, 0, 0)]
    )
    path = tmp_path / "page.html"
    html_page.write(path, html_page.render("title", [html_page.Section("", [table])]))
    with chromium.open(path) as opened:
        for expected in (["z", "y", "x"], ["y", "z", "x"]):
            opened.run("document.querySelectorAll('th button')[1].click()")
            rows = "[...document.querySelector('tbody').rows].map(r => r.cells[0].textContent)"
            assert opened.run(rows) == expected


def test_a_click_on_the_legend_hides_a_group_in_all_plots(desktop):
    button = "document.querySelectorAll('.legend button')[0]"
    label = desktop.run(f"{button}.dataset.group")
    assert label == LOSSES[0]
    hidden = (
        f"{BOXES}.flatMap(box => box.data).filter(t => t.legendgroup === '{label}')"
        ".map(t => t.visible ?? true)"
    )
    assert set(desktop.run(hidden)) == {True}
    desktop.run(f"{button}.click()")
    assert set(desktop.run(hidden)) == {False}
    buttons = "[...document.querySelectorAll('.legend button')]"
    buttons += f".filter(button => button.dataset.group === '{label}')"
    pressed = f"{buttons}.map(b => b.getAttribute('aria-pressed'))"
    assert set(desktop.run(pressed)) == {"false"}
    desktop.run(f"{button}.click()")
    assert set(desktop.run(hidden)) == {True}


def test_a_plot_is_saved_on_white_with_its_legend(phone, tmp_path):
    phone.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    plot = box("Test sample margin")
    assert phone.run(f"{plot}._fullLayout.showlegend") is False
    phone.run(f"{plot}.querySelector('[data-title=\"Download plot\"]').click()")
    for _ in range(200):
        if (tmp_path / "Test-sample-margin.svg").exists():
            break
        phone.run("new Promise(done => setTimeout(done, 100))")
    text = (tmp_path / "Test-sample-margin.svg").read_text()
    shown = "".join(ElementTree.fromstring(text).itertext())
    for label in (*LOSSES, EVIL):
        assert label in shown
    assert "rgb(255, 255, 255)" in text
    assert phone.errors() == []
