"""Parts of the documentation site that mkdocs.yml cannot say: pages that are not in ``docs/``.

mkdocs calls the functions ``on_...`` (``hooks`` in mkdocs.yml), and mkdocstrings the class
``TammesDocstrings``. The README is the first page; the reference has a page for every module with
public names; and a file of the repository that a page links to becomes a page or an asset, so that
the links of ``docs/*.md`` lead to the same place on GitHub and on the site.
"""

import functools
import json
import posixpath
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import griffe
import latex2mathml.converter
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "results/README.md": "benchmarks.md",
}
"""Pages outside of ``docs/``, and where they are on the site."""
LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
NODE = re.compile(r"(\w+)[\[{]\"(.+?)\"[\]}]")
EDGE = re.compile(r"^ *(\w+) -->(?:\|\"?(.+?)\"?\|)? (\w+)$", re.MULTILINE)


# ------------------------------------------------------------------------------------- the pages


def on_config(config: MkDocsConfig) -> None:
    """Add the pages of the reference to the navigation."""
    (section,) = (part for part in config.nav or () if "Reference" in part)
    section["Reference"] = [
        page if page == "api/index.md" else {page[len("api/") : -len(".md")]: page}
        for page in reference()
    ]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in ``docs/`` and, from page to page, every file they link to."""
    for path, uri in PAGES.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    sources = [Path(file.abs_src_path) for file in files.documentation_pages()]
    for path in sources:
        for target in links(path.read_text(encoding="utf-8")):
            linked = (path.parent / target).resolve()
            if linked.is_file() and files.get_file_from_path(site_path(linked)) is None:
                files.append(_linked_file(config, linked))
                if linked.suffix == ".md":
                    sources.append(linked)
    for uri, text in reference().items():
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to where their targets are on the site, and write out diagrams."""
    if page.file.abs_src_path is None:
        return markdown
    source, folder = Path(page.file.abs_src_path), posixpath.dirname(page.file.src_uri) or "."

    def relative(link: re.Match[str]) -> str:
        place = site_path((source.parent / link[2]).resolve())
        if files.get_file_from_path(place) is None:
            return link[0]
        return link[1] + posixpath.relpath(place, folder) + link[3]

    parts = re.split(f"({FENCE.pattern})", markdown, flags=FENCE.flags)
    parts[::2] = [LINK.sub(relative, part) for part in parts[::2]]
    return "".join(tree(part) if part.startswith("```mermaid") else part for part in parts)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace the formulas by MathML, which browsers draw without a script."""
    return re.sub(
        r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>',
        lambda found: mathml(found[2], display=found[1] == "div"),
        html,
        flags=re.DOTALL,
    )


def links(markdown: str) -> list[str]:
    """Relative targets of the links on a page."""
    return [link[2] for link in LINK.finditer(FENCE.sub("", markdown))]


def site_path(path: Path) -> str:
    """Place on the site of a file of the repository."""
    if not path.is_relative_to(ROOT):
        return path.as_posix()
    name = path.relative_to(ROOT).as_posix()
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    page = name + ".md" if path.suffix in (".ipynb", ".py", ".yaml") else name
    return PAGES.get(name, page)


def _linked_file(config: MkDocsConfig, path: Path) -> File:
    """Show a program or a notebook on a page; copy anything else."""
    place = site_path(path)
    if path.suffix == ".md" or not place.endswith(".md"):
        file = File.generated(config, place, abs_src_path=str(path))
    else:
        options = "---\nsearch:\n  exclude: true\n---\n"
        file = File.generated(config, place, content=options + source_page(path))
    file.inclusion = InclusionLevel.NOT_IN_NAV
    return file


def source_page(path: Path) -> str:
    """Markdown of a program, or of the cells of a notebook."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return f"# {path.relative_to(ROOT).as_posix()}\n\n````{path.suffix[1:]}\n{text}````\n"
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"]]
    parts = [f"````python\n{code}\n````" if kind == "code" else code for kind, code in cells]
    return "\n\n".join(parts) + "\n"


def tree(mermaid: str) -> str:
    """Write a Mermaid flow chart that is a tree as a nested list: Mermaid needs a script."""
    texts = dict(NODE.findall(mermaid))
    children: dict[str, list[tuple[str, str]]] = {}
    for parent, condition, child in EDGE.findall(NODE.sub(r"\1", mermaid)):
        children.setdefault(parent, []).append((condition, child))
    below = {child for group in children.values() for _, child in group}
    (root,) = children.keys() - below

    def items(condition: str, name: str, depth: int) -> Iterator[str]:
        path, colon, text = texts[name].partition(": ")
        shown = f"`{path}`" if "/" in path or path.endswith(".py") else path
        yield f"{'    ' * depth}- {f'*{condition}:* ' if condition else ''}{shown}{colon}{text}"
        for child in children.get(name, ()):
            yield from items(*child, depth + 1)

    return "\n".join(('<div class="tree" markdown>\n', *items("", root, 0), "\n</div>"))


def mathml(latex: str, *, display: bool) -> str:
    """Convert a formula of a docstring."""
    latex = latex.replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">")
    if not display:
        return latex2mathml.converter.convert(latex)
    formula = latex2mathml.converter.convert(latex, display="block")
    return f'<div class="formula">{formula}</div>'


# --------------------------------------------------------------------------------- the reference


def public_modules() -> dict[str, dict[str, str]]:
    """Public names of every module that has some, and the paths of their definitions.

    Public is what a package, a module of ``tammes`` itself or an integration lists in ``__all__``.
    A name is on one page: that of the module nearest to its definition.
    """
    package = griffe.load("tammes", search_paths=[ROOT / "src"], resolve_aliases=True)
    modules = {module.path: module for module in _modules(package) if module.exports}
    pages: dict[str, dict[str, str]] = {path: {} for path in modules}
    seen = set()
    for path, module in modules.items():
        for name in map(str, module.exports or ()):
            definition = _definition(f"{path}.{name}", package)
            if definition not in seen and not package.modules_collection[definition].is_module:
                pages[_home(definition, pages)][f"{path}.{name}"] = definition
            seen.add(definition)
    return {path: names for path, names in pages.items() if names}


def _definition(path: str, package: griffe.Module) -> str:
    """Follow imports: a function may have the name of the module that it is in."""
    home, _, name = path.rpartition(".")
    target = package.modules_collection[home].imports.get(name, path)
    inside = target != path and target.startswith("tammes.")
    return _definition(target, package) if inside else path


def _home(path: str, modules: Iterable[str]) -> str:
    """Module that shares most of a path; of several the highest."""
    target = path.replace(".", "/")

    def nearness(module: str) -> tuple[int, int]:
        return len(posixpath.commonpath([module.replace(".", "/"), target])), -len(module)

    return max(modules, key=nearness)


def _modules(package: griffe.Module) -> Iterator[griffe.Module]:
    yield package
    for member in sorted(package.members.values(), key=lambda member: member.name):
        if member.is_alias or not member.is_module or member.name.startswith("_"):
            continue
        if member.is_init_module:
            yield from _modules(member)
        elif package.path in ("tammes", "tammes.integrations"):
            yield member


@functools.cache
def reference() -> dict[str, str]:
    """Pages of the reference by place: the list of all names, and one page for each module."""
    pages, rows = {}, []
    for module, names in public_modules().items():
        short = module.removeprefix("tammes.")
        shown = [_directive(name, names[name]) for name in sorted(names, key=str.lower)]
        head = f"::: {module}\n    options:\n      members: false\n      heading_level: 1\n"
        pages[f"api/{short}.md"] = "\n".join(
            [f"---\ntitle: {module}\nsearch:\n  boost: 2\n---\n", head, *shown]
        )
        listed = ", ".join(f"[`{name.rpartition('.')[2]}`][{name}]" for name in names)
        rows.append(f"| [`{module}`]({short}.md) | {listed} |")
    table = "\n".join(("| module | names |", "|---|---|", *rows))
    return {"api/index.md": f"# Reference\n\nEvery public name, by module.\n\n{table}\n", **pages}


def _directive(name: str, definition: str) -> str:
    """Show an object under its public name, also where a module has the same one."""
    if not definition.endswith(".{0}.{0}".format(name.rpartition(".")[2])):
        return f"::: {name}\n"
    return f"[](){{#{name}}}\n\n::: {definition}\n    options:\n      heading: {name}\n"


class TammesDocstrings(griffe.Extension):
    """Read docstrings as they are meant: reStructuredText roles and formulas, terms as builders."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Turn a docstring to Markdown."""
        if isinstance(obj, griffe.Function) and any(
            decorator.callable_path == "tammes.term_decorator.term" for decorator in obj.decorators
        ):
            _show_builder(obj)
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value, obj)

    def on_package(self, *, pkg: griffe.Module, **_: object) -> None:
        """Turn the docstring of the package itself to Markdown."""
        self.on_object(obj=pkg)


def _show_builder(term: griffe.Function) -> None:
    """Give a function decorated with ``@term`` the signature and docstring of its builder."""
    data, *settings = term.parameters
    supplied = [data, *(p for p in settings if p.name in ("state", "shards"))]
    term.parameters = griffe.Parameters(*(p for p in settings if p not in supplied))
    term.returns = "Term"
    if term.docstring is None:
        return
    text = term.docstring.value
    for parameter in supplied:
        text = re.sub(rf"^    {parameter.name}: .*\n(?:     .*\n)*", "", text, flags=re.MULTILINE)
    text = text.replace("Args:\n\n", "")
    term.docstring.value = re.sub(
        r"^Returns:\n    (?:The )?(.)",
        lambda found: f"Returns:\n    A term whose value is the {found[1].lower()}",
        text,
        flags=re.MULTILINE,
    )


def markdown(text: str, owner: griffe.Object) -> str:
    """Markdown of a docstring: roles, formulas and examples."""
    text = re.sub(r"^( *)Example:$", r"\1Examples:", text, flags=re.MULTILINE)
    text = re.sub(
        r"^( *)\.\. math:: ?(.*(?:\n(?:\1 +.*|(?= *\n\1 ) *))*)",
        lambda found: f"{found[1]}\\[ {' '.join(found[2].split())} \\]",
        text,
        flags=re.MULTILINE,
    )
    text = re.sub(r":math:`(.+?)`", r"\\(\1\\)", text, flags=re.DOTALL)
    return re.sub(r":(?:class|func|meth|mod|attr|data):`~?(.+?)`", lambda m: _link(m, owner), text)


def _link(role: re.Match[str], owner: griffe.Object) -> str:
    name = role[1]
    try:
        target = owner.resolve(name)
    except griffe.NameResolutionError:
        target = name
    return f'<autoref identifier="{target}" optional><code>{name}</code></autoref>'
