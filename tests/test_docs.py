"""What is public is documented, what is documented runs, and what is linked is there."""

import doctest
import functools
import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

import tammes
from tammes.losses.aliases import ALIASES

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "results/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]

BUILDERS = {
    name: value
    for name, value in vars(tammes).items()
    if hasattr(value, "definition") and value.definition.name == name
}
SUMS = {"direct_sum": tammes.direct_sum, "spectral_sum": tammes.spectral_sum}


def public_names():
    """Name and object of everything a user is meant to touch."""
    found = {name: getattr(tammes, name) for name in tammes.__all__}
    for module in (tammes.schedules, tammes.geometry, tammes.convert):
        names = getattr(module, "__all__", None) or [
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
        ]
        found |= {f"{module.__name__}.{name}": getattr(module, name) for name in names}
    return {name: value for name, value in found.items() if not isinstance(value, ModuleType)}


@functools.cache
def documented_objects():
    """Everything defined in the package that has a docstring; a builder is what its name says.

    pytest's own collection passes builders by: they are wrappers made in another module.
    """
    found = {}
    for info in pkgutil.walk_packages(tammes.__path__, "tammes."):
        module = importlib.import_module(info.name)
        found[info.name] = (module, module)
        for name, value in vars(module).items():
            if callable(value) and getattr(value, "__module__", None) == info.name:
                found[f"{info.name}.{name}"] = (module, value)
    return found


def doctests(name):
    """The examples in a docstring and, for a class, in those of its methods."""
    module, value = documented_objects()[name]
    names = {"torch": torch, "tammes": tammes, **vars(module)}
    if value is module:
        parser = doctest.DocTestParser()
        return [parser.get_doctest(module.__doc__ or "", names, name, module.__file__, 0)]
    return doctest.DocTestFinder().find(value, name, module=False, globs=names)


WITH_EXAMPLES = [
    name for name in documented_objects() if any(test.examples for test in doctests(name))
]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_in_docstrings_run(name):
    report = []
    for test in doctests(name):
        runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE, verbose=False)
        runner.run(test, out=report.append)
    assert not report, "".join(report)


def test_the_examples_of_builders_are_among_those_that_run():
    ran = {name.rpartition(".")[2] for name in WITH_EXAMPLES}
    assert BUILDERS
    assert set(BUILDERS) | set(SUMS) <= ran


@pytest.mark.parametrize("name", public_names())
def test_every_public_name_has_a_docstring_with_an_example(name):
    value = public_names()[name]
    # One's own: neither inherited, nor the signature that Python puts in its place.
    text = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    assert text, "no docstring"
    assert not text.startswith(f"{value.__name__}("), "no docstring"
    assert ">>> " in text, "no example"


@pytest.mark.parametrize("module", ["convert", "geometry", "schedules"])
def test_every_public_module_has_a_docstring(module):
    assert getattr(tammes, module).__doc__


@pytest.mark.parametrize("name", [*BUILDERS, *SUMS])
@pytest.mark.parametrize("part", [".. math::", "Args:", "Returns:", "Example:", "References:"])
def test_every_term_is_documented_with_formula_result_and_reference(name, part):
    assert part in inspect.getdoc({**BUILDERS, **SUMS}[name])


@pytest.mark.parametrize("name", BUILDERS)
def test_every_setting_of_a_term_is_documented(name):
    text = inspect.getdoc(BUILDERS[name])
    for setting in inspect.signature(BUILDERS[name]).parameters:
        assert re.search(rf"^    {setting}: ", text, re.MULTILINE), setting


@pytest.mark.parametrize("name", [*BUILDERS, *SUMS, *ALIASES])
def test_every_term_is_in_the_table_of_losses(name):
    assert re.search(rf"`{name}[`(]", (ROOT / "docs" / "losses.md").read_text())


# --------------------------------------------------------------------------------- the pages


def code_blocks(text):
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_the_code_in_the_readme_runs(tmp_path, monkeypatch):
    blocks = code_blocks((ROOT / "README.md").read_text())
    assert blocks
    monkeypatch.chdir(tmp_path)
    names = {}
    for number, block in enumerate(blocks, 1):
        exec(compile(block, f"README.md, block {number}", "exec"), names)


def links(text):
    """Targets of relative links, without what leads to another site or within the page."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    targets = re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", text)
    return [t.partition("#")[0] for t in targets if not re.match(r"[a-z]+:|#", t)]


def test_the_finder_of_links_finds_them():
    text = "[a](docs/a.md#part) [b](https://b.org) [c](#here)\n```\n[d](d.md)\n```\n![e](e.png)"
    assert links(text) == ["docs/a.md", "e.png"]


def page_id(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_between_pages_lead_somewhere(page):
    missing = [link for link in links(page.read_text()) if not (page.parent / link).exists()]
    assert not missing


def anchors(text):
    """Anchors that GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_into_pages_lead_to_headings(page):
    for name, anchor in re.findall(r"\]\(([\w./-]*\.md)?#([\w-]+)\)", page.read_text()):
        target = page.parent / name if name else page
        assert anchor in anchors(target.read_text()), f"{name}#{anchor}"


FOLDERS = "benchmarks|docs|examples|results|scripts|src|tests"
ROOMS = "|".join(f.name for f in Path(tammes.__file__).parent.iterdir() if f.is_dir())


def mentioned_files(text):
    """Paths of source, tests and pages that a text names, those inside the package included."""
    from_root = re.findall(rf"(?<![\w/.-])(?:{FOLDERS})/[\w/.-]*\.(?:py|md|yaml)\b", text)
    in_package = re.findall(rf"(?<![\w/.-])(?:{ROOMS})/[\w/.-]*\.py\b", text)
    return [ROOT / name for name in from_root] + [ROOT / "src/tammes" / name for name in in_package]


def test_mentioned_files_are_found():
    text = "`kernels/merge.py`, tests/lab/test_x.py; `python scripts/a.py --b` [c](../docs/c.md)"
    names = [str(path.relative_to(ROOT)) for path in mentioned_files(text)]
    assert names == ["tests/lab/test_x.py", "scripts/a.py", "src/tammes/kernels/merge.py"]


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_files_mentioned_in_pages_exist(page):
    missing = [path for path in mentioned_files(page.read_text()) if not path.exists()]
    assert not missing


def resolve(name):
    """The module, class, function or method of a dotted name; None where there is none."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            value = getattr(value, part, None)
        return value
    return None


def mentioned_names(text):
    """Dotted names under ``tammes`` that a text names or that its Python blocks import."""
    imports = re.findall(r"^from (tammes[\w.]*) import ([\w, ]+)$", text, re.MULTILINE)
    imported = [
        f"{module}.{name.split()[0]}" for module, names in imports for name in names.split(",")
    ]
    return [*re.findall(r"\btammes(?:\.[A-Za-z_]\w*)+", text), *imported]


def test_mentioned_names_are_found_and_resolved():
    text = (
        "`tammes.schedules.WarmUp(0)`, tammes.lab.nowhere.x.\nfrom tammes.geometry import pack, x\n"
    )
    found = [name for name in mentioned_names(text) if resolve(name) is not None]
    assert found == ["tammes.schedules.WarmUp", "tammes.geometry", "tammes.geometry.pack"]


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_names_mentioned_in_pages_exist(page):
    missing = [name for name in mentioned_names(page.read_text()) if resolve(name) is None]
    assert not missing


SCRIPTS = [
    ROOT / "Makefile",
    *(
        path
        for name in FOLDERS.split("|")
        if name != "tests"
        for path in (ROOT / name).rglob("*.py")
    ),
]


def test_files_and_names_mentioned_in_source_and_scripts_exist():
    missing = []
    for script in SCRIPTS:
        text = script.read_text(encoding="utf-8").replace("torch.ops.tammes", "")
        missing += [(page_id(script), p) for p in mentioned_files(text) if not p.exists()]
        missing += [(page_id(script), n) for n in mentioned_names(text) if resolve(n) is None]
    assert not missing


def test_the_readme_leads_to_the_pages():
    targets = {(ROOT / link).resolve() for link in links((ROOT / "README.md").read_text())}
    for page in ("losses.md", "contract.md", "decisions.md"):
        assert ROOT / "docs" / page in targets, page
