"""The code on docs/integrations.md runs."""

import re
from pathlib import Path

import pytest

from tammes.optional import require

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"


def sections():
    """Name and Python blocks of each library's section."""
    # What these two warn of is not ours.
    foreign = pytest.mark.filterwarnings("default")
    marks = {
        "timm": (pytest.mark.timm, foreign),
        "Sentence Transformers": (pytest.mark.slow, foreign),
    }
    for section in re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.M)[1:]:
        name = section.partition("\n")[0]
        blocks = re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
        yield pytest.param(name, blocks, marks=marks.get(name, ()), id=name)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec:FutureWarning")
@pytest.mark.parametrize(("name", "blocks"), [*sections()])
def test_the_code_of_a_section_runs(name, blocks, tmp_path, monkeypatch):
    assert blocks
    package = {"timm": "timm", "Sentence Transformers": "sentence_transformers"}.get(name, "torch")
    try:
        require(package, extra=package)
    except ImportError as error:
        pytest.skip(str(error))
    monkeypatch.chdir(tmp_path)
    names = {}
    for number, block in enumerate(blocks, 1):
        exec(compile(block, f"integrations.md, {name}, block {number}", "exec"), names)
