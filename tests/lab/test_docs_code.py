"""Every code block of the documentation runs: here, or in the test that ``ELSEWHERE`` names."""

import argparse
import inspect
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch

from tammes.lab.cli.main import _load, _Parser, main
from tammes.lab.reproduce import run as reproduction

ROOT = Path(__file__).parents[2]
TEXTS = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").glob("*.md")),
    )
}
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PYTHON = {
    page: blocks
    for page, text in TEXTS.items()
    if (blocks := [code for kind, code in BLOCK.findall(text) if kind == "python"])
}

ELSEWHERE = {
    "README.md": "test_docs.py",
    "docs/evaluate.md": "lab/test_evaluate_document.py",
    "docs/fewshot.md": "lab/cli/test_evaluate.py",
    "docs/integrations.md": "integrations/test_integrations_page.py",
    "docs/scaling.md": "advise/test_scaling_table.py",
    "docs/training.md": "lab/test_tutorial.py",
    "docs/tutorial.md": "lab/test_tutorial.py",
    "docs/tutorial_fewshot.md": "lab/test_tutorial_fewshot.py",
    "docs/tutorial_gallery.md": "lab/test_tutorial_gallery.py",
    "docs/use.md": "lab/inference/test_use_page.py",
}
"""Tests that run the code of a page together with what it prints."""


def run(page, names):
    """Run the Python blocks of a page one after the other."""
    for number, block in enumerate(PYTHON[page], 1):
        exec(compile(block, f"{page}, block {number}", "exec"), names)
    return names


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    return tmp_path


# ------------------------------------------------------------------------------------- the pages


def test_the_code_of_every_page_has_a_test():
    here = {page for page in PYTHON if f'"{page}"' in Path(__file__).read_text(encoding="utf-8")}
    assert set(PYTHON) == here
    for page, test in ELSEWHERE.items():
        text = (ROOT / "tests" / test).read_text(encoding="utf-8")
        assert Path(page).name in text, page
        assert "exec(" in text or "subprocess.run(" in text, test


@pytest.mark.parametrize(
    "page",
    [
        pytest.param("docs/coming_from.md", marks=pytest.mark.slow),
        "docs/configuration.md",
        "docs/kernels.md",
        "docs/losses.md",
        "docs/sampling.md",
    ],
)
def test_code_that_needs_nothing_runs(page):
    run(page, {})


def test_code_of_the_doctor_page_finds_what_it_says(capsys):
    run("docs/doctor.md", {})
    assert "negative-margin: the negative margin of cosface adds 9" in capsys.readouterr().out


@pytest.mark.slow
def test_code_of_the_geometry_page_runs():
    names = run("docs/geometry.md", {"prototypes": torch.randn(4, 3)})
    assert names["best"].features.shape == (4, 3)
    assert names["packing"].degrees == pytest.approx(43.691, abs=1e-3)


@pytest.mark.slow
def test_code_of_the_metrics_page_runs(capsys):
    features, ids = torch.randn(400, 8), torch.arange(400) % 20
    first, second = torch.randint(7, (2, 2000))
    names = {
        "loader": [(torch.randn(1000, 512), torch.arange(1000))],
        **dict.fromkeys(("query", "gallery", "probes"), features),
        **dict.fromkeys(("query_ids", "gallery_ids", "probe_ids"), ids),
        **{"query_cameras": torch.arange(400) // 200, "gallery_cameras": torch.arange(400) % 3},
        **{"scores": torch.randn(2000), "same": first == second, "first": first, "second": second},
        "blocks": [(torch.rand(2000), first == second)],
        **{"logits": torch.randn(400, 4), "known": ids > 0, "correct": torch.randn(400) > 0},
        "gallery_of_each_item": torch.arange(400) % 2,
    }
    run("docs/metrics.md", names)
    assert "sample_margin.mean" in capsys.readouterr().out


def test_code_of_the_data_page_runs(place, capsys):
    for folder in ("query", "bounding_box_test"):
        for identity in (1, 2):
            camera = 1 if folder == "query" else 2
            image = place / "Market-1501" / folder / f"000{identity}_c{camera}s1_000451_03.jpg"
            image.parent.mkdir(parents=True, exist_ok=True)
            image.touch()
    lines = ["2\t1"]
    for name in "abcd":
        (place / "lfw" / name).mkdir(parents=True)
        for number in (1, 2):
            (place / "lfw" / name / f"{name}_000{number}.jpg").touch()
    lines += ["a\t1\t2", "a\t1\tb\t1", "c\t1\t2", "c\t1\td\t1"]
    (place / "pairs.txt").write_text("\n".join(lines) + "\n")
    paths = [str(place / f"{number}.png") for number in range(4)]
    for path in paths:
        PIL.Image.new("RGB", (8, 8)).save(path)
    labels, pixels = [0, 1, 0, 1], np.zeros((4, 8, 8, 3), np.uint8)
    dataset = [(pixels[0], 0), (pixels[1], 1)]
    own = {"paths": paths, "labels": labels, "pixels": pixels, "dataset": dataset}
    names = run(
        "docs/data.md",
        own | {"torch": torch, "embed": lambda items: torch.randn(len(items), 8)},
    )
    assert (place / "mine.csv").exists()
    assert (place / "mine" / "test.parquet").exists()
    assert names["result"].queries_without_match == 0
    assert "(1, 8, 8)" in capsys.readouterr().out


def test_code_of_the_gallery_page_runs(photograph_run, photographs, place):
    shutil.copytree(photograph_run.folder, place / "runs" / "faces")
    images = sorted((photographs / "test" / "cat").iterdir())
    for name, image in zip(("a1", "a2", "b1", "query"), images, strict=True):
        shutil.copy(image, f"{name}.jpg")
    images = [str(path) for path in (photographs / "train").glob("*/*")]
    ids = [f"other {number // 2}" for number in range(60)]
    names = {"held_out_images": (60 * images)[:60], "held_out_ids": ids}
    run("docs/gallery.md", names)
    assert len(names["found"].best) == 1
    assert names["gallery"].ids


def test_code_of_the_page_on_reproducing_calls_it_as_it_is(monkeypatch):
    calls = []
    signature = inspect.signature(reproduction.reproduce)
    monkeypatch.setattr(
        reproduction,
        "reproduce",
        lambda *args, **named: calls.append(signature.bind(*args, **named)),
    )
    run("docs/reproduce.md", {})
    assert len(calls) == 1


@pytest.mark.slow
def test_the_measure_page_shows_what_its_code_and_command_print(capsys):
    text = TEXTS["docs/measure.md"]
    first, *others = PYTHON["docs/measure.md"]
    exec(compile(first, "docs/measure.md", "exec"), {})
    ((command, shown),) = re.findall(r"^```\n\$ tammes (.*)\n((?:.|\n)*?)^```", text, re.MULTILINE)
    assert main(shlex.split(command)) == 0

    def words(text):
        return [re.sub(r"[-\d.e+]+", "", line).split() for line in text.splitlines()]

    # Rounding differs between machines, and with it who is closest.
    printed = re.sub(r"closest: .*;", "closest: and ;", capsys.readouterr().out)
    assert words(printed) == words(re.sub(r"closest: .*;", "closest: and ;", shown))
    for block in others:
        exec(compile(block, "docs/measure.md", "exec"), {})
    assert Path("psi.pdf").stat().st_size > 1000


# ---------------------------------------------------------------------------------- the commands


def commands():
    """Lines of all blocks that call ``tammes``, with the page."""
    for page, text in TEXTS.items():
        for kind, block in BLOCK.findall(text):
            if kind in ("", "sh"):
                for line in re.sub(r"\\\n|\n {8,}(?=\[)", " ", block).splitlines():
                    if found := re.match(r"(?:\$ |torchrun .*-m )?tammes +([a-z].*)", line):
                        yield page, found[1]


def parser_of(words):
    """Parser of a command, and of its own subcommand where it has some."""
    parser = _Parser(prog=f"tammes {words[0]}")
    _load(words[0]).add_arguments(parser)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction) and words[1] in action.choices:
            return action.choices[words[1]]
    return parser


def test_commands_are_found():
    found = [line for page, line in commands() if page == "docs/scaling.md"]
    assert found[0].startswith("checkpoint inspect out/head")
    assert len([*commands()]) > 50


@pytest.mark.parametrize(("page", "line"), [*commands()])
def test_commands_on_pages_are_accepted(page, line):
    bare = re.sub(r"\"[^\"]*\"|'[^']*'", "TEXT", line)
    flags = re.findall(r"(?<![\w-])--[\w-]+", bare)
    known = parser_of(line.split())._option_string_actions
    assert not [flag for flag in flags if flag not in known]
    if not re.search(r"[|\[>]|\.\.\.", bare):
        # An explanation follows after spaces or a sign.
        words = shlex.split(re.split(r"\s{2,}|\s+#", line)[0])
        parser = _Parser(prog=f"tammes {words[0]}")
        _load(words[0]).add_arguments(parser)
        parser.parse_args(words[1:])
