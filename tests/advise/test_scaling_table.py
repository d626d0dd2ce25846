"""What the pages show of the planner is what it says, and what it says adds up."""

import doctest
import os
import re
import subprocess
import sys

import pytest
import scaling_table as scaling
from update_docs import DOCS, with_outputs

from tammes.advise.memory_plan import messages
from tammes.advise.workload import Machine
from tammes.kernels.tiling import fused_blocks
from tammes.lab.cli import main

PAGE = DOCS / "scaling.md"
GIB = 2**30


def test_what_the_page_on_scaling_shows_is_what_is_printed():
    # That on advice is looked at where its command is tested.
    text = PAGE.read_text()
    assert with_outputs(text) == text, "run make docs"


def test_the_examples_of_the_script_hold():
    assert doctest.testmod(scaling, optionflags=doctest.NORMALIZE_WHITESPACE) == (0, 2)


def test_outputs_on_a_page_are_found_and_with_outputs():
    page = "a\n```\n$ python scripts/scaling_table.py --classes 1000 --gpus 2\nold\n```\nb\n"
    assert "1,000 classes on 2 ranks, 256 examples a step" in with_outputs(page)
    assert "old" not in with_outputs(page)
    page = "<!-- python scripts/scaling_table.py -->\nold\n<!-- end -->\n"
    assert scaling.scaling_table() in with_outputs(page)
    assert "old" not in with_outputs(page)


def test_the_page_on_scaling_has_the_table_and_the_largest_case():
    text = PAGE.read_text()
    assert scaling.scaling_table() in text
    assert "100,000,000 classes on 64 ranks" in text


def test_the_largest_case_is_what_one_computes_by_hand():
    cost = scaling.by_mode(scaling.workload(100_000_000, 64), Machine())["sharded"]
    shard = 100_000_000 / 64
    assert cost.weights == cost.gradient == cost.optimizer == shard * 512 * 4
    assert cost.products == pytest.approx(3 * 2 * 8192 * shard * 512 / 7e14)
    # Two features and two gradients of 8192 or 128 rows.
    assert cost.features == 2 * (8192 + 128) * 512 * 4
    # Features and gradients of 63 of 64 rows, labels with a mark, two numbers of 63 ranks.
    received = (2 * 8192 * 512 * 4 + 16 * 8192) * 63 / 64 + 2 * 4 * 8192 * 63
    assert sum(messages(scaling.workload(100_000_000, 64)).values()) == pytest.approx(received)
    # So many rows fit into the scratch in whole tiles; six steps double 64 ranks.
    blocks = len(fused_blocks(8192, 1_562_500, 512, 2))
    waits = (4 + blocks) * 6 * 1e-5
    assert cost.exchange == pytest.approx(received / 4e10 + waits)
    assert cost.total < 13 * GIB


def test_the_lines_of_the_arithmetic_add_up():
    text = scaling.arithmetic(scaling.workload(10_000_000, 8))
    units = {"GiB": GIB, "MiB": 2**20, "KiB": 2**10, "ms": 1}
    lines = [line.split() for line in text.splitlines()[2:] if "(overlap)" not in line]
    values = [float(line[-2]) * units[line[-1]] for line in lines]
    end = next(i for i, line in enumerate(lines) if line[0] == "memory")
    assert sum(values[:end]) == pytest.approx(values[end], rel=0.01)
    assert sum(values[end + 1 : -1]) == pytest.approx(values[-1], rel=0.01)


def test_what_does_not_fit_has_no_time_in_the_table():
    small = Machine(memory=GIB)
    row = scaling.scaling_table([1_000_000], [1], machine=small).splitlines()[-1]
    assert "6.92: too much | – | – | – | – | – | – |" in row
    assert "too much" not in scaling.scaling_table([1_000_000], [8], machine=Machine())


def test_more_ranks_of_the_same_batch_each_take_as_many_products():
    times = {g: scaling.by_mode(scaling.workload(10**7, g), Machine())["sharded"] for g in (8, 64)}
    assert times[8].products == pytest.approx(times[64].products)


@pytest.mark.slow
def test_the_program_on_the_page_runs_on_two_ranks_and_its_checkpoint_is_whole(tmp_path, capsys):
    (program,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.M)
    # On CPUs, torch 2.13 may hang or abort if a DistributedDataParallel outlives its group.
    end = "dist.destroy_process_group()"
    assert program.endswith(f"{end}\n")
    program = program.replace(end, f"import gc\n\ndel backbone\ngc.collect()\n{end}")
    (tmp_path / "train.py").write_text(program)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*words, "train.py"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert main(["checkpoint", "inspect", str(tmp_path / "out" / "head")]) == 0
    said = capsys.readouterr().out
    assert "intact" in said
    assert "classes 500 to 999" in said
