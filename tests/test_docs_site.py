"""The documentation site builds without a warning, is whole, and needs nothing from elsewhere."""

import html.parser
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import browser
import pytest

import tammes

ROOT = Path(__file__).parents[1]
docs_site = pytest.importorskip("docs_site", reason="the extra docs is not installed")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


class Tags(html.parser.HTMLParser):
    """Addresses, identifiers and classes of a page."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.links, self.loaded, self.classes = set(), [], [], set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.ids |= {values.get("id"), values.get("name")}
        self.classes |= set((values.get("class") or "").split())
        if tag == "a":
            self.links.append(values.get("href") or "")
        else:
            self.loaded += [values[key] for key in ("href", "src", "data") if values.get(key)]


@pytest.fixture(scope="module")
def pages(site):
    """Tags of every page."""
    return {path: Tags(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}


# ----------------------------------------------------------------------------------- the building


def test_a_formula_becomes_mathml():
    assert docs_site.mathml(r"\cos\theta &lt; 1", display=False).startswith("<math ")
    page = docs_site.on_page_content(r'a <span class="arithmatex">\(x_i\)</span> b', None, {}, [])
    assert re.fullmatch(r"a <math .*<msub><mi>x</mi><mi>i</mi></msub>.*</math> b", page)


def test_roles_and_formulas_of_a_docstring_become_markdown():
    owner = docs_site.griffe.Module("tammes")
    text = "See :func:`tammes.x` with\n:math:`a\n+ b`.\n\n"
    text += ".. math::\n    a = b,\n    c\n\nExample:\n    >>> 1"
    link = '<autoref identifier="tammes.x" optional><code>tammes.x</code></autoref>'
    assert docs_site.markdown(text, owner) == (
        f"See {link} with\n\\(a\n+ b\\).\n\n\\[ a = b, c \\]\n\nExamples:\n    >>> 1"
    )


def test_a_flow_chart_becomes_a_list_of_its_tree():
    chart = 'flowchart TD\n  a["x.py: first"]\n  a --> b["y/: second"]\n'
    chart += '  b -->|"if so, z"| c{"Which?"}\n  a -->|no| d["w"]\n'
    lines = docs_site.tree(f"```mermaid\n{chart}```").splitlines()
    assert lines[2:-2] == [
        "- `x.py`: first",
        "    - `y/`: second",
        "        - *if so, z:* Which?",
        "    - *no:* w",
    ]


def test_files_have_one_place_on_the_site():
    places = {
        "README.md": "index.md",
        "docs/losses.md": "losses.md",
        "results/README.md": "benchmarks.md",
        "examples/sphere.py": "examples/sphere.py.md",
        "results/results.csv": "results/results.csv",
    }
    assert {name: docs_site.site_path(ROOT / name) for name in places} == places


def test_a_program_and_a_notebook_become_pages(tmp_path, monkeypatch):
    monkeypatch.setattr(docs_site, "ROOT", tmp_path)
    (tmp_path / "a.py").write_text("x = 1\n")
    assert docs_site.source_page(tmp_path / "a.py") == "# a.py\n\n````py\nx = 1\n````\n"
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "text"]},
        {"cell_type": "code", "source": ["x = 1\n", "y = 2"]},
    ]
    (tmp_path / "b.ipynb").write_text(json.dumps({"cells": cells}))
    shown = "# Title\ntext\n\n````python\nx = 1\ny = 2\n````\n"
    assert docs_site.source_page(tmp_path / "b.ipynb") == shown


# --------------------------------------------------------------------------------------- the site


def public_names():
    """Public names by import: those of ``tammes``, of every package and of every integration."""
    modules = [tammes]
    for info in pkgutil.walk_packages(tammes.__path__, "tammes."):
        own = info.ispkg or info.name.count(".") == 1 or ".integrations." in info.name
        if own and not info.name.rpartition(".")[2].startswith("_"):
            modules.append(importlib.import_module(info.name))
    for module in modules:
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            if not isinstance(value, ModuleType):
                yield f"{module.__name__}.{name}", value


@pytest.mark.slow
def test_every_public_name_is_in_the_reference(pages):
    """Under its own name, or under that of its definition or of another module that lists it."""
    ids = set().union(*(tags.ids for path, tags in pages.items() if path.parent.name == "api"))
    names = dict(public_names())
    assert len(names) > 200
    shown = {id(value) for name, value in names.items() if name in ids}
    assert not [name for name, value in names.items() if id(value) not in shown]


@pytest.mark.slow
def test_no_markup_of_docstrings_is_left(site):
    left = re.compile(
        r":(?:attr|class|data|func|math|meth|mod):<?|\.\. math|arithmatex|^====", re.M
    )
    for page in (site / "api").glob("*.html"):
        assert not left.findall(page.read_text(encoding="utf-8")), page.name


@pytest.mark.slow
def test_every_link_within_the_site_leads_somewhere(site, pages):
    broken = []
    for page, tags in pages.items():
        for link in tags.links + tags.loaded:
            parts = urlsplit(link)
            if parts.scheme or not (parts.path or parts.fragment):
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            target = target / "index.html" if target.is_dir() else target
            there = target.is_file() and (
                not parts.fragment or target not in pages or parts.fragment in pages[target].ids
            )
            if not there and page.name != "404.html":
                broken.append((page.relative_to(site).as_posix(), link))
    assert not broken


@pytest.mark.slow
def test_nothing_is_loaded_from_elsewhere(site, pages):
    outside = re.compile(r"(?:https?:)?//")
    loaded = [(path.name, link) for path, tags in pages.items() for link in tags.loaded]
    assert not [(page, link) for page, link in loaded if outside.match(link)]
    for style in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", style.read_text("utf-8"))
    # The theme's script would load Mermaid for these.
    assert not [path for path, tags in pages.items() if "mermaid" in tags.classes]


@pytest.mark.slow
def test_every_page_of_the_docs_is_on_the_site(site):
    built = {path.stem for path in site.glob("*.html")}
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} <= built


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_pages_open_from_a_folder_and_can_be_searched(site, width, dark):
    if browser.find() is None:
        pytest.skip("no browser is installed: the site was not opened")
    with browser.Browser(browser.find()) as chromium:
        for name in ("index", "api/losses", "losses", "results", "architecture"):
            with chromium.open(site / f"{name}.html", width=width, dark=dark) as page:
                wide = page.run("document.documentElement.scrollWidth")
                assert wide <= width, f"{name} is wider than the window"
                scheme = "document.body.dataset.mdColorScheme"
                page.wait_for(f"{scheme} === '{'slate' if dark else 'default'}'")
                assert page.requests() == page.errors() == []
        with chromium.open(site / "index.html", width=width, dark=dark) as page:
            page.run("document.querySelector('[data-md-component=search-query]').focus()")
            page.run(
                "(box => { box.value = 'sphereface'; box.dispatchEvent(new Event('input')); "
                "box.dispatchEvent(new KeyboardEvent('keyup')) })"
                "(document.querySelector('[data-md-component=search-query]'))"
            )
            found = "[...document.querySelectorAll('.md-search-result__link')].map(a => a.href)"
            page.wait_for(f"{found}.length")
            assert any("/api/" in link for link in page.run(found))
            assert page.requests() == page.errors() == []
