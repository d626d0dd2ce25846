"""Rules of docs/architecture.md: which room may import which, and the path of a call."""

import ast
import sys
from pathlib import Path

import pytest
import torch

import tammes

ROOT = Path(tammes.__file__).parent
PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"

FORBIDDEN = {
    # The core does not know the lab, nor what stands on both.
    "tammes": ("tammes.lab", "tammes.integrations"),
    # A loss is a function of a split, of prototypes or of features, and knows nothing else.
    "tammes.losses": (
        "tammes.heads",
        "tammes.kernels",
        "tammes.criterion",
        "tammes.checkpoint",
        "tammes.optim",
        "tammes.metrics",
        "tammes.advise",
    ),
    "tammes.split": ("tammes.heads", "tammes.kernels", "tammes.criterion", "tammes.losses"),
    "tammes.similarity": ("tammes.heads", "tammes.kernels", "tammes.criterion", "tammes.losses"),
    "tammes.terms": ("tammes.heads", "tammes.kernels", "tammes.criterion", "tammes.losses"),
    "tammes.term_decorator": (
        "tammes.heads",
        "tammes.kernels",
        "tammes.criterion",
        "tammes.losses",
    ),
    # A kernel makes splits; which losses read them, and who owns prototypes, is not its business.
    "tammes.kernels": ("tammes.heads", "tammes.criterion", "tammes.losses"),
    # A head knows no margin.
    "tammes.heads": ("tammes.criterion", "tammes.losses"),
    # Mathematics alone.
    "tammes.geometry": (
        "tammes.heads",
        "tammes.kernels",
        "tammes.criterion",
        "tammes.losses",
        "tammes.advise",
    ),
    "tammes.metrics": ("tammes.heads", "tammes.kernels", "tammes.criterion", "tammes.losses"),
    # A gallery searches embeddings, wherever they come from.
    "tammes.gallery": ("tammes.heads", "tammes.kernels", "tammes.criterion", "tammes.losses"),
    # The lab uses the core as a user does: no private module of it.
    "tammes.lab": ("tammes._", "tammes.integrations"),
    # They read losses and heads written as text, and nothing else of the lab.
    "tammes.integrations": (
        "tammes._",
        *(
            f"tammes.lab.{room.name}"
            for room in (ROOT / "lab").iterdir()
            if room.is_dir() and room.name != "config"
        ),
    ),
}
ABOVE_THE_CORE = ("tammes.lab", "tammes.integrations")
EXEMPT = ("tammes.__main__",)
"""``python -m tammes`` is the lab's command."""


def module_of(path):
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path):
    """Modules that a file imports when it runs; those for type checkers are left out."""
    skipped = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            skipped |= {id(child) for part in node.body for child in ast.walk(part)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tammes"):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("tammes"))


def inside(module, package):
    return module == package or module.startswith(
        package if package.endswith("_") else f"{package}."
    )


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_respect_the_rules(package):
    wrong = set()
    for path in ROOT.rglob("*.py"):
        module = module_of(path)
        if (
            not inside(module, package)
            or module in EXEMPT
            or (package == "tammes" and any(inside(module, one) for one in ABOVE_THE_CORE))
        ):
            continue
        for imported in imports_of(path):
            for forbidden in FORBIDDEN[package]:
                if inside(imported, forbidden):
                    wrong.add(f"{module} imports {imported}")
    assert not wrong


def test_the_rules_would_notice(tmp_path):
    file = tmp_path / "loss.py"
    file.write_text("from tammes.heads import Head\nif TYPE_CHECKING:\n    import tammes.lab\n")
    assert [*imports_of(file)] == ["tammes.heads", "tammes.heads.Head"]


def travelled(implementation):
    """Files that one warm forward and backward of CosFace runs, in order of their first call."""
    head = tammes.CosineHead(8, 5, scale=16.0, implementation=implementation)
    criterion = tammes.Criterion(head, tammes.cosface())
    features, labels = torch.randn(4, 8, requires_grad=True), torch.tensor([0, 1, 2, 4])
    criterion(features, labels).backward()
    files = []

    def watch(frame, event, _):
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(str(ROOT)):
            file = Path(name).relative_to(ROOT).as_posix()
            if file not in files:
                files.append(file)

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        criterion(features, labels).backward()
    finally:
        sys.setprofile(before)
    return files


@pytest.mark.parametrize("implementation", ["dense", "streamed"])
def test_the_page_draws_the_files_that_a_call_runs(implementation):
    drawn = PAGE.read_text(encoding="utf-8").split(f"<!-- path: {implementation} -->", 1)[1]
    figure = drawn.split("```mermaid\n", 1)[1].split("```", 1)[0]
    missing = [file for file in travelled(implementation) if file not in figure]
    assert not missing
