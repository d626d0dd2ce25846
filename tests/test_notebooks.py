"""The notebooks run, and the repository has them without outputs."""

import json
import re
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def cells(notebook, kind):
    """Text of the cells of a kind: code or markdown."""
    found = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == kind]


def test_there_are_six():
    assert [notebook.stem for notebook in NOTEBOOKS] == [
        "few_shot",
        "million_classes",
        "own_images",
        "own_loss",
        "quick_start",
        "verification_and_gallery",
    ]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_stripped_and_the_first_cell_is_a_title(notebook):
    content = json.loads(notebook.read_text(encoding="utf-8"))
    assert (content["nbformat"], content["nbformat_minor"]) == (4, 5)
    assert set(content["metadata"]) == {"kernelspec", "language_info"}
    ids = [cell["id"] for cell in content["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in content["cells"]:
        assert cell["metadata"] == {}
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
    assert cells(notebook, "markdown")[0].startswith("# ")


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_lead_somewhere(notebook):
    links = re.findall(r"\]\(([^)\s]+)\)", "\n".join(cells(notebook, "markdown")))
    assert links
    for link in links:
        assert (FOLDER / link.partition("#")[0]).exists(), link


CHECKS = {
    "few_shot": lambda names: all(row.accuracy.mean > 0.6 for row in names["final"]),
    "million_classes": lambda names: names["difference"] < 1e-4 and names["top1"] > 0.3,
    "own_images": lambda names: len(names["runs"]) == 4 and names["page"].is_file(),
    "own_loss": lambda names: names["difference"] < 1e-6 and min(names["accuracy"].values()) > 0.8,
    "quick_start": lambda names: min(names["accuracy"].values()) > 0.85,
    "verification_and_gallery": lambda names: float(names["result"].eer) < 0.4,
}
"""Check of the names that a notebook leaves behind."""


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(notebook, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    names = {"__name__": "__main__"}
    try:
        for number, cell in enumerate(cells(notebook, "code"), 1):
            exec(compile(cell, f"{notebook.name}, code cell {number}", "exec"), names)
    finally:
        torch.set_num_threads(threads)
    assert CHECKS[notebook.stem](names)
