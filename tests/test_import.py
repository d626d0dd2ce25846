"""Importing tammes imports torch, and no other package that torch does not."""

import functools
import json
import subprocess
import sys

import tammes

OPTIONAL = [
    "accelerate",
    "datasets",
    "faiss",
    "huggingface_hub",
    "hypothesis",
    "kornia",
    "lightning",
    "lightning_fabric",
    "matplotlib",
    "onnx",
    "onnxruntime",
    "onnxscript",
    "plotly",
    "pytest",
    "pytorch_lightning",
    "pytorch_metric_learning",
    "ray",
    "rich",
    "safetensors",
    "scipy",
    "sentence_transformers",
    "sklearn",
    "timm",
    "torchmetrics",
    "torchvision",
    "transformers",
    "triton",
    "usearch",
]

BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"{{name}} is blocked by the test", name=name)

sys.meta_path.insert(0, Blocker())
"""

PACKAGES = """
import json, sys
def packages():
    return sorted({name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names)
"""


def run(code):
    """Run code in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )


def answer(code):
    """What code prints as JSON in a fresh interpreter."""
    result = run(code)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@functools.cache
def loaded_by_torch():
    """Packages torch itself imports: what of them is there depends on what is installed."""
    return frozenset(answer(PACKAGES + "import torch\nprint(json.dumps(packages()))"))


def test_importing_tammes_imports_no_package_but_torch():
    before = loaded_by_torch()
    after = set(answer(PACKAGES + "import tammes\nprint(json.dumps(packages()))"))
    assert "tammes" in after
    assert after - before == {"tammes"}


def test_tammes_works_with_every_optional_package_blocked():
    blocked = set(OPTIONAL) - loaded_by_torch()
    code = (
        BLOCKER.format(blocked=blocked)
        + """
import torch, tammes
for name in tammes.__all__:
    getattr(tammes, name)
criterion = tammes.Criterion(
    tammes.CosineHead(8, 3, scale=16.0), tammes.cosface() + 0.5 * tammes.sample_margin()
)
criterion.schedule(margin=tammes.schedules.WarmUp(0.0, 0.35, steps=10))
criterion(torch.randn(4, 8), torch.tensor([0, 1, 2, 0])).backward()
print(1)
"""
    )
    assert len(blocked) > len(OPTIONAL) // 2
    assert answer(code) == 1


def test_the_blocker_blocks():
    # Installed here, so that its absence cannot be what fails.
    assert run("import safetensors").returncode == 0
    for module in ("safetensors", "safetensors.torch"):
        result = run(BLOCKER.format(blocked={"safetensors"}) + f"import {module}")
        assert result.returncode != 0
        assert "safetensors is blocked by the test" in result.stderr


def test_a_package_of_ours_that_imports_another_would_be_noticed():
    before = loaded_by_torch()
    code = "import tammes, safetensors\nprint(json.dumps(packages()))"
    assert "safetensors" in set(answer(PACKAGES + code)) - before


def test_every_public_name_is_there_once():
    assert all(hasattr(tammes, name) for name in tammes.__all__)
    assert len(set(tammes.__all__)) == len(tammes.__all__)


def test_advise_is_imported_when_it_is_asked_for():
    code = """
import json, sys, tammes
before = "tammes.advise" in sys.modules
same = tammes.advise.advise is tammes.geometry.advise
print(json.dumps([before, same, hasattr(tammes, "nothing"), hasattr(tammes.geometry, "nothing")]))
"""
    assert answer(code) == [False, True, False, False]


def test_completion_shows_all_public_names_and_no_helper_of_the_module():
    assert not hasattr(tammes, "")
    shown = dir(tammes)
    assert {*tammes.__all__, "advise"} <= {*shown}
    assert not {"Any", "TYPE_CHECKING", "import_module", "nearest_name"} & {*shown}
