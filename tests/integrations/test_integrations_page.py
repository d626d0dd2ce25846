"""The code on docs/integrations.md runs."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"


def sections():
    """Python blocks of each library's section."""
    for section in re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.M)[1:]:
        name = section.partition("\n")[0]
        yield name, re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec:FutureWarning")
@pytest.mark.parametrize(("name", "blocks"), [*sections()], ids=lambda value: str(value)[:20])
def test_the_code_of_a_section_runs(name, blocks, tmp_path, monkeypatch):
    assert blocks
    monkeypatch.chdir(tmp_path)
    names = {}
    for number, block in enumerate(blocks, 1):
        exec(compile(block, f"integrations.md, {name}, block {number}", "exec"), names)
