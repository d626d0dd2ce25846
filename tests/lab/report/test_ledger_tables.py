"""Tables of docs/doctor.md, fewshot.md and kernels.md are what ledgers and benchmarks say."""

import sys
from pathlib import Path

import pytest
from ledgers import MACHINE, entry

from tammes.lab.reproduce import recipes
from tammes.lab.reproduce.ledger import Ledger

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
import doctor_table
import everyday_table
import fewshot_table
from update_docs import DOCS, with_outputs


def cell(row, findings, seconds=(0.5, 0.02, 0.03, 0.04), accuracy=70.0):
    looks = [
        {"epoch": epoch, "findings": names, "seconds": lasted}
        for epoch, names, lasted in zip((0, 1, 2, 20), findings, seconds, strict=True)
    ]
    values = {"accuracy": accuracy, "class_margin": 0.5}
    health = {"looks": looks, "epoch_seconds": 2.0}
    return entry(row, "short", 0, values, epochs=20, machine=0, kept={"health": health})


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("doctor", "doctor_table.py"),
        ("fewshot", "fewshot_table.py"),
        ("kernels", "everyday_table.py cpu"),
        ("kernels", "everyday_table.py cuda"),
    ],
)
def test_the_page_has_the_table_of_the_ledger(name, command):
    page = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    assert f"<!-- python scripts/{command} -->" in page
    assert with_outputs(page) == page, "run make docs"


def test_findings_are_named_with_the_first_look_that_had_them():
    one, two = "prototypes-collapsed", "loss-at-chance"
    ill = cell("arcface_64", [[], [one], [one, two], [one]], accuracy=3.0)
    healthy = cell("cosface_64", [[]] * 4)
    ledger = Ledger(doctor_table.NAME, machines=[MACHINE], cells=[healthy, ill])
    head, table = doctor_table.table(ledger).split("\n\n")
    assert "20 epochs on NVIDIA H200" in head
    assert table.splitlines()[2:] == [
        "| ArcFace (s = 64) | 3.00 | 0.50 | `prototypes-collapsed` after epoch 1, `loss-at-chance` "
        "after epoch 2 | 25.00% | 1.50% |",
        "| CosFace (s = 64) | 70.00 | 0.50 | none | 25.00% | 1.50% |",
    ]


def test_on_cifar100_the_collapse_is_named_in_time_and_healthy_runs_have_no_findings():
    ledger = Ledger.at(doctor_table.LEDGER, recipes.load(doctor_table.NAME))
    looks = {
        row: [look for cell in ledger.of(row, "short") for look in cell.kept["health"]["looks"]]
        for row in ("arcface_64", "ce", "cosface_64")
    }
    if not all(looks.values()):
        pytest.skip("the column was not run yet")
    early = [look for look in looks["arcface_64"] if look["epoch"] <= 2]
    assert any("prototypes-collapsed" in look["findings"] for look in early)
    assert not [look for row in ("ce", "cosface_64") for look in looks[row] if look["findings"]]


@pytest.mark.parametrize("cells", [[], [entry("ce", "cifar100", 0, {"accuracy": 70.0})]])
def test_without_such_cells_it_says_so(cells):
    said = doctor_table.table(Ledger(doctor_table.NAME, machines=[MACHINE], cells=cells))
    assert said == "It was not run on a GPU yet."


def episodes(row, column, seed, accuracies):
    rows = [
        {"method": method, "shot": shot, "accuracy": accuracy + (0.1 if method == "l2" else 0.0)}
        for shot, accuracy in zip((1, 5), accuracies, strict=True)
        for method in ("l2", "cl2n")
    ]
    return entry(row, column, seed, {"shot1": 9.0}, kept={"fewshot": {"rows": {"novel": rows}}})


def test_a_number_by_hand_gives_way_to_that_of_the_ledger():
    cells = [episodes("nca", "way32_cold", 0, (0.68, 0.81))]
    name = fewshot_table.NAME
    said = fewshot_table.table(Ledger(name, machines=[MACHINE], cells=cells))
    assert "| NCA | 68.0 / 81.0 | 70.1 / 83.0 \\* | 70.53 / 83.57 |" in said
    assert said.endswith("\\* By hand, one seed, not in a ledger.")
    cells += [episodes("nca", "way32", seed, (0.70 + seed / 100, 0.83)) for seed in range(3)]
    said = fewshot_table.table(Ledger(name, machines=[MACHINE], cells=cells))
    mean = "71.0 ± 1.0 / 83.0 ± 0.0 (3 seeds)"
    assert f"| NCA | 68.0 / 81.0 | {mean} | 70.53 / 83.57 |" in said
    assert "| BCE+Proto |" not in said


def test_settings_of_a_size_share_a_line():
    def row(setting, **times):
        contestants = {
            name: {"milliseconds": time, "of_by_hand": time / times["by hand"]}
            for name, time in times.items()
        }
        return {
            "loss": "CosFace",
            "n": 8,
            "c": 1000,
            "setting": setting,
            "contestants": contestants,
        }

    rows = [
        row("fp32", **{"by hand": 2.0, "Tammes": 1.0, "PML": 3.0}),
        row("bf16", **{"by hand": 400.0, "Tammes": 100.0}),
    ]
    assert everyday_table.table(rows).split("\n") == [
        "| (N, D, C) | loss | by hand, ms | eager | pytorch-metric-learning |",
        "|---|---|---|---|---|",
        "| (8, 512, 1,000) | CosFace | 2.00 / 400 | 0.50 / 0.25 | 1.50 / – |",
    ]
