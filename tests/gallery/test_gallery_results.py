"""Numbers of the pages on galleries are those of the files in results/."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
TUTORIAL = (ROOT / "docs" / "tutorial_gallery.md").read_text(encoding="utf-8")


def rows(page):
    """Cells of the rows of the tables of a page, by the first cell."""
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {first: rest for first, *rest in cells}


@pytest.fixture(scope="module")
def measured():
    return json.loads((ROOT / "results" / "gallery_cpu.json").read_text())


@pytest.mark.parametrize("part", ["one_query", "many_queries"])
def test_the_page_has_the_ratios_to_the_bare_product(measured, part):
    found = measured[part]
    name = {"one_query": "one query", "many_queries": f"{found['size']['queries']:,} queries"}[part]
    ratios = [found[kind]["ratio"] for kind in ("processor_seconds", "seconds")]
    assert rows(PAGE)[name] == [f"{ratio:.2f}" for ratio in ratios]


@pytest.mark.parametrize("part", ["one_query", "many_queries"])
def test_identifying_costs_little_more_than_the_bare_product(measured, part):
    found = measured[part]
    assert max(found["processor_seconds"]["ratio"], found["seconds"]["ratio"]) <= 1.3


def test_the_memory_is_that_of_the_embeddings(measured):
    peak = measured["memory"]["peak_gib"]
    assert measured["memory"]["size"]["identities"] == 1_000_000
    assert peak <= 3
    assert f"at most {peak:.2f} GiB" in PAGE


def test_the_tutorial_has_the_accuracy_on_chimpanzees():
    measured = json.loads((ROOT / "results" / "gallery_chimpanzees.json").read_text())
    assert (measured["counts"]["enrolled"], measured["counts"]["unknown"]) == (20, 9)
    table = rows(TUTORIAL)
    for name, found in measured["numbers"].items():
        low, high = found["interval"]
        assert table[name] == [
            f"{found['percent']:.1f} %",
            f"{low:.1f} to {high:.1f}",
            f"{found['mean_of_draws']:.1f} ± {found['deviation_of_draws']:.1f}",
        ]
    (threshold,) = re.findall(r"threshold of that draw is (\d\.\d+)", TUTORIAL)
    assert threshold == f"{measured['threshold']['threshold']:.3f}"
