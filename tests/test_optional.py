"""Optional packages: asked for in one way, missing in one sentence."""

import subprocess
import sys

import pytest

from tammes.optional import require


def test_what_is_there_is_imported():
    assert require("json.decoder", extra="lab").JSONDecoder is not None


def test_what_is_missing_is_named_with_the_line_that_installs_it():
    with pytest.raises(
        ImportError, match=r"no_such_package .*pip install 'tammes\[lab\]'"
    ) as error:
        require("no_such_package", extra="lab")
    assert isinstance(error.value.__cause__, ModuleNotFoundError)
    assert error.value.name == "no_such_package"


def test_what_is_there_but_broken_ends_in_the_same_sentence(tmp_path, monkeypatch):
    (tmp_path / "broken_package.py").write_text("raise RuntimeError('operator does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ImportError, match=r"RuntimeError: operator does not exist\); install .*tammes\[metrics\]"
    ) as error:
        require("broken_package", extra="metrics")
    assert isinstance(error.value.__cause__, RuntimeError)


WITHOUT_TORCHMETRICS = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torchmetrics":
            raise ModuleNotFoundError("blocked")

sys.meta_path.insert(0, Blocker())
import torch
import tammes.metrics
from tammes.metrics import functional

print("functional", float(functional.prototype_norms(torch.eye(2)).ratio))
for text in ("from tammes.metrics import ClassMargin", "import tammes.metrics.collapse"):
    try:
        exec(text)
    except ImportError as error:
        print("refused", error)
"""


def test_the_functional_core_needs_no_torchmetrics_and_the_classes_say_so():
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCHMETRICS], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    first, *refused = run.stdout.splitlines()
    assert first == "functional 1.0"
    assert len(refused) == 2
    for line in refused:
        assert "torchmetrics could not be imported" in line
        assert "pip install 'tammes[metrics]'" in line
