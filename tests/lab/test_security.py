"""Nothing a user is handed by somebody else is run: no records, no tables, no names."""

import ast
import hashlib
import html.parser
import io
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy
import pytest
import torch
from pages import body, escaped
from records import make_run
from test_bad_input import sentence, table
from test_measure import Trap
from test_whole_way import SHORT, digit_folder, interrupt

import tammes
from tammes.lab.cli.main import main
from tammes.lab.records.run_folder import Run

SOURCES = sorted(Path(tammes.__file__).parent.rglob("*.py"))

# -- What the source may not contain.

UNSAFE_MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
UNSAFE_BUILTINS = {"eval", "exec", "compile", "__import__"}
UNSAFE_CALLS = {
    "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput",
    "yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.unsafe_load_all", "yaml.full_load",
    "yaml.full_load_all", "torch.hub.load", "torch.jit.load", "torch.package.PackageImporter",
    "tarfile.open", "zipfile.ZipFile",
}  # fmt: skip
LOADS = {
    "torch": {"weights_only": True},
    "numpy": {"allow_pickle": False},
    "require('numpy')": {"allow_pickle": False},
    # A format of plain numbers: there is nothing in it that could run.
    "require('safetensors.torch')": {},
    # Images of our own module, and pixels of one that Pillow has opened.
    "data": {},
    "image": {},
    # Recipes are YAML of plain values.
    "recipes": {},
    # Our own checkpoints, of numbers and texts: tests/test_sharded_checkpoint.py sees to it.
    "checkpoint": {},
    # Our own file of a gallery, safetensors too.
    "Gallery": {},
    # What the line before has written, from memory.
    "torch.export": {},
    # What a Triton kernel reads from the GPU's memory.
    "tl": {},
    "query": {},
    "keys": {},
}
"""What ``.load`` may be called on, and with which settings; anything else is to be looked at."""
FORBIDDEN = {"shell": True, "allow_pickle": True, "weights_only": False, "trust_remote_code": True}
"""Settings that no call may have, nor anything but a plain opposite of them."""


def called(node):
    """What a call calls, as written; the extra of a ``require`` does not matter."""
    name = ast.unparse(node)
    return re.sub(r"require\(('[\w.]+'), extra='\w+'\)", r"require(\1)", name)


def faults(text):
    """What is wrong with a source, a sentence each."""
    found = []
    for node in ast.walk(ast.parse(text)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
            # The rules below go by the name of the module a call is made on.
            functions = {f"{node.module}.{alias.name}" for alias in node.names}
            found += [f"from {name}" for name in functions & (UNSAFE_CALLS | {"torch.load"})]
            found += [f"from {name}" for name in functions if name in ("numpy.load", "yaml.load")]
        found += [f"import {name}" for name in names if name.split(".")[0] in UNSAFE_MODULES]
        if isinstance(node, ast.Name) and node.id in UNSAFE_BUILTINS:
            # A field may be called like that.
            found += [node.id] * isinstance(node.ctx, ast.Load)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in UNSAFE_CALLS:
            found.append(ast.unparse(node))
        if isinstance(node, ast.Call):
            found += list(_faults_of_call(node))
    return found


def _faults_of_call(node):
    name = called(node.func)
    given = {each.arg: each.value for each in node.keywords}
    words = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
    if name.rpartition(".")[2] in ("require", "import_module"):
        yield from (f"{name}({word!r})" for word in words if word in UNSAFE_MODULES)
    for key, value in FORBIDDEN.items():
        plain = isinstance(given.get(key), ast.Constant) and given[key].value is (not value)
        if key in given and not plain:
            yield f"{name}({key}=...)"
    if re.fullmatch(r"os\.(exec|spawn|posix_spawn)\w*", name):
        yield name
    if isinstance(node.func, ast.Attribute) and node.func.attr == "load":
        on = called(node.func.value)
        if on not in LOADS:
            yield f"{on}.load is not known to be safe"
        for key, value in LOADS.get(on, {}).items():
            if not (isinstance(given.get(key), ast.Constant) and given[key].value is value):
                yield f"{on}.load without {key}={value}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_no_source_runs_what_it_reads(path):
    assert faults(path.read_text(encoding="utf-8")) == []


def test_all_sources_are_looked_at():
    names = {path.name for path in SOURCES}
    assert {"checkpoint.py", "formats.py", "cache.py", "run_folder.py", "loop.py"} <= names
    # The rules for loads meet the loads there are.
    text = "".join(path.read_text(encoding="utf-8") for path in SOURCES)
    for call in ("torch.load(", "numpy.load(", "yaml.SafeDumper"):
        assert call in text


@pytest.mark.parametrize(
    "text",
    [
        "eval('1')", "exec(text)", "compile(text, '', 'eval')", "__import__('os')", "f = eval",
        "import pickle", "import pickle as p", "from pickle import loads", "import marshal",
        "import shelve", "require('pickle', extra='lab')", "importlib.import_module('dill')",
        "os.system('ls')", "run = os.system", "os.popen('ls')", "os.execv('ls', [])",
        "subprocess.run('ls', shell=True)", "subprocess.run(['ls'], shell=True)",
        "subprocess.run(['ls'], shell=flag)", "subprocess.getoutput('ls')",
        "yaml.load(text)", "yaml.load(text, Loader=yaml.Loader)", "from yaml import load",
        "yaml.unsafe_load(text)", "torch.load(path)", "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=flag)", "from torch import load", "torch.hub.load(path)",
        "numpy.load(path)", "numpy.load(path, allow_pickle=True)", "np.load(path)",
        "require('numpy', extra='lab').load(path)", "anything.load(path)",
        "datasets.load_dataset(name, trust_remote_code=True)",
    ],
)  # fmt: skip
def test_the_rules_find_what_they_are_for(text):
    assert faults(text)


@pytest.mark.parametrize(
    "text",
    [
        "re.compile('a')", "torch.compile(model)", "model.eval()", "ast.parse(text, mode='eval')",
        "torch.load(path, weights_only=True)", "yaml.safe_load(text)",
        "require('numpy', extra='lab').load(path, allow_pickle=False)",
        "require('safetensors.torch', extra='lab').load(data)", "subprocess.run(['ls', path])",
    ],
)  # fmt: skip
def test_the_rules_leave_alone_what_is_safe(text):
    assert faults(text) == []


# -- Files that hold more than they should.


def with_checksum(folder, state, step):
    """A checkpoint as Tammes would have named it."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    data = buffer.getvalue()
    path = folder / f"last-{step:09d}-{hashlib.sha256(data).hexdigest()[:16]}.pt"
    path.write_bytes(data)
    return path


def test_a_checkpoint_with_a_pickle_inside_is_refused_and_nothing_runs(
    tmp_path, capsys, monkeypatch
):
    pictures = digit_folder(tmp_path / "pictures", ["zero", "one"], each=10)
    folder, sprung = tmp_path / "run", tmp_path / "sprung"
    interrupt(monkeypatch, epoch=2)
    words = ["train", "--data", str(pictures), *SHORT, "--folder", str(folder)]
    assert main(words) == 130
    monkeypatch.undo()
    capsys.readouterr()
    (sound,) = (folder / "checkpoints").glob("last-*.pt")
    state, step = torch.load(sound, weights_only=True), int(sound.name.split("-")[1])
    trap = with_checksum(sound.parent, {**state, "more": Trap(sprung)}, step + 1)
    # It is a trap indeed, for whoever trusts it.
    torch.load(trap, weights_only=False)
    assert sprung.is_dir()
    sprung.rmdir()
    said = sentence(capsys, "train", "--resume", folder)
    assert str(trap) in said
    assert not sprung.exists()
    # What was there before is there still.
    trap.unlink()
    assert main(["train", "--resume", str(folder)]) == 0
    assert Run(folder).status == "done"


@pytest.mark.parametrize("name", ["embeddings", "prototypes", "examples"])
def test_a_pickle_that_calls_itself_safetensors_is_not_run_by_a_report(tmp_path, name):
    run, sprung = make_run(tmp_path / "run"), tmp_path / "sprung"
    torch.save({"features": Trap(sprung)}, run.folder / f"{name}.safetensors")
    page = tmp_path / "page.html"
    assert main(["report", str(run.folder), "--out", str(page)]) == 0
    assert f"{run.folder / name}.safetensors: damaged (" in page.read_text()
    assert not sprung.exists()


@pytest.mark.parametrize("kind", ["pt", "npz", "npy"])
def test_a_file_to_measure_with_a_pickle_inside_is_refused_and_nothing_runs(tmp_path, capsys, kind):
    path, sprung = tmp_path / f"file.{kind}", tmp_path / "sprung"
    objects = numpy.array([Trap(sprung)], dtype=object)
    if kind == "pt":
        torch.save({"weight": Trap(sprung)}, path)
        torch.load(path, weights_only=False)
    elif kind == "npz":
        numpy.savez(path, prototypes=objects)
        numpy.load(path, allow_pickle=True)["prototypes"]
    else:
        numpy.save(path, objects)
        numpy.load(path, allow_pickle=True)
    # It is a trap indeed, for whoever trusts it.
    sprung.rmdir()
    assert str(path) in sentence(capsys, "measure", path, "--out", tmp_path / "out")
    assert not sprung.exists()


def test_a_loss_is_text_that_is_read_and_never_run(tmp_path, capsys):
    sprung = tmp_path / "sprung"
    for text in (
        f"__import__('os').mkdir({str(sprung)!r})",
        f"softmax(__import__('os').mkdir({str(sprung)!r}))",
        f"[softmax for _ in [open({str(sprung)!r}, 'w')]]",
        f"(lambda: open({str(sprung)!r}, 'w'))()",
    ):
        for words in (["train", "--loss", text], ["compare", "--losses", text]):
            sentence(capsys, *words, "--out", tmp_path / "out")
            assert not sprung.exists()


# -- Names.

SCRIPT = "<script>alert(1)</script>"
LINK = '<a href="https://example.com">plain</a>'
NAMES = [SCRIPT, "<img src=x onerror=alert(2)>", "</script><script>alert(3)</script>", LINK]


class Tags(html.parser.HTMLParser):
    """What a browser would make of a page: its elements, the text of them, its scripts."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.text, self.scripts, self.open = [], "", 0, []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self.scripts += tag == "script"
        self.open.append(tag)

    def handle_endtag(self, tag):
        while tag in self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data):
        if not {"script", "style"} & set(self.open):
            self.text += data


def whole_way(root, names):
    """The page of a run whose classes, name, folder and title are called like that."""
    digits = [0, 1, 2, 3]
    folder = digit_folder(root / "pngs", "abcd", each=24, digits=digits)
    images = [path.read_bytes() for each in "abcd" for path in sorted((folder / each).iterdir())]
    labels = [names[place] for place in digits for _ in range(24)]
    source = table(root / "data" / f"{names[1]}.parquet", labels, images=images)
    page = root / "page.html"
    words = ["--data", str(source), *SHORT, "--epochs", "1", "--backbone", "mnist_cnn(features=3)"]
    words += ["--name", names[3], "--folder", str(root / names[1])]
    assert main(["train", *words]) == 0
    words = [str(root / names[1]), "--out", str(page), "--title", names[0]]
    assert main(["report", *words]) == 0
    return page


@pytest.fixture(scope="module")
def evil(tmp_path_factory):
    return whole_way(tmp_path_factory.mktemp("evil"), NAMES)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return whole_way(tmp_path_factory.mktemp("plain"), ["aaa", "bbb", "ccc", "ddd"])


def test_the_record_has_the_names_as_they_are(evil):
    run = Run(evil.parent / NAMES[1])
    assert run.data["classes"] == sorted(NAMES)
    assert run.config.name == LINK


def test_names_become_text_of_the_page_and_never_a_part_of_it(evil, plain):
    ours, theirs = Tags(evil.read_text()), Tags(plain.read_text())
    assert ours.scripts == theirs.scripts
    kinds = {(tag, key) for tag, attributes in ours.elements for key in attributes}
    assert kinds <= {(tag, key) for tag, attributes in theirs.elements for key in attributes}
    assert not [key for _, key in kinds if key.startswith("on")]
    assert {tag for tag, _ in ours.elements} <= {tag for tag, _ in theirs.elements}
    assert not [each for each in ours.elements if each[1].get("src") == "x"]
    for name in NAMES:
        assert name in ours.text


def test_names_are_escaped_everywhere(evil):
    text = body(evil.read_text())
    for name in NAMES:
        assert name not in text
        assert escaped(name) in text


def opened(chromium, path, blank):
    """A page in which an alert is noted in place of shown."""
    blank.write_text("<!doctype html><title>nothing yet</title>")
    page = chromium.open(blank)
    note = "window.alerts = []; window.alert = (what) => window.alerts.push(what);"
    page.call("Page.addScriptToEvaluateOnNewDocument", source=note)
    page.call("Page.navigate", url=path.resolve().as_uri())
    page.wait_for("document.readyState === 'complete' && document.title !== 'nothing yet'")
    return page


def hover(page, box):
    """Move the mouse over a part of a page."""
    page.run(f"{box}.scrollIntoView({{block: 'center'}})")
    edges = f"(({{x, y, width, height}}) => [x, y, width, height])({box}.getBoundingClientRect())"
    x, y, width, height = page.run(edges)
    for share in (0.2, 0.4, 0.5, 0.6, 0.8):
        at = {"x": x + share * width, "y": y + share * height}
        page.call("Input.dispatchMouseEvent", type="mouseMoved", **at)
    page.run("new Promise(done => setTimeout(done, 100))")


def test_a_browser_notes_an_alert(chromium, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(f"<!doctype html><title>evil</title>{''.join(NAMES[:3])}")
    with opened(chromium, path, tmp_path / "blank.html") as page:
        page.wait_for("window.alerts.length === 3")


def test_no_name_runs_in_a_browser(chromium, evil, tmp_path):
    with opened(chromium, evil, tmp_path / "blank.html") as page:
        page.wait_for("document.documentElement.dataset.drawn")
        page.run("document.querySelectorAll('details').forEach(box => box.open = true)")
        # Hover texts are made late, of the same names.
        for place in range(page.run("document.querySelectorAll('.plot').length")):
            hover(page, f"document.querySelectorAll('.plot')[{place}]")
        assert page.run("window.alerts") == []
        assert page.errors() == []
        assert page.requests() == []
        assert page.run("document.querySelectorAll('[onerror], [src=x]').length") == 0
        shown = page.run("document.body.textContent")
        labels = page.run("[...document.querySelectorAll('.plot text')].map(t => t.textContent)")
        for name in NAMES:
            assert name in shown
        # Plots read a little HTML, which a name is not.
        assert {SCRIPT, LINK} <= set(labels)
        assert page.run("document.querySelectorAll('.plot a[*|href*=example]').length") == 0


# -- Paths.


@pytest.mark.parametrize("name", ["../../x", "a/b", "..", ".", "/etc/x", "~/x", "\\..\\x", "a\nb"])
def test_the_name_of_a_run_does_not_lead_out_of_its_folder(tmp_path, name):
    out = tmp_path / "deep" / "er" / "out"
    words = ["--name", name, "--out", str(out), "--fraction", "0.05", "--epochs", "1"]
    assert main(["train", *words]) == 0
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    (folder,) = out.iterdir()
    assert re.fullmatch(r"[\w.]+-seed0-[0-9a-f]{8}", folder.name)
    assert not folder.name.startswith(".")
    assert all(folder in path.parents for path in files)
    assert (folder / "final.json") in files
    assert Run(folder).config.name == name


@pytest.mark.slow
def test_a_label_leads_figures_neither_out_of_their_folder_nor_into_a_script(tmp_path):
    for place, name in enumerate(("../../x", SCRIPT)):
        make_run(tmp_path / "runs" / str(place), name=name)
    figures = tmp_path / "deep" / "er" / "figures"
    words = [str(tmp_path / "runs"), "--out", str(tmp_path / "page.html")]
    assert main(["report", *words, "--figures", str(figures)]) == 0
    made = [path for path in tmp_path.rglob("*") if path.suffix in (".png", ".svg")]
    assert {path.parent for path in made} == {figures}
    drawn = [path for path in made if path.suffix == ".svg"]
    assert drawn
    for path in drawn:
        tags = {element.tag.rpartition("}")[2] for element in ElementTree.parse(path).iter()}
        assert "script" not in tags, path
