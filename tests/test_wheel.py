"""Wheel and sdist are complete: installed where nothing else is, they do what the checkout does.

Everything it needs is installed with it, from the registry that the checkout was installed from. An
environment that borrowed the packages of this one would not notice a dependency that the extras
`demo` and `lab` forgot to name.
"""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import tammes
from tammes.lab.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.slow


def run(*command, folder):
    """Output of a command that sees neither this checkout nor this environment."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTEST_CURRENT_TEST")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Folder of the wheel and the sdist of the checkout, which twine has checked."""
    folder = tmp_path_factory.mktemp("built")
    run(sys.executable, "-m", "venv", folder / "tools", folder=folder)
    python = folder / "tools" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "hatchling>=1.25", "twine>=6", folder=folder)
    run(python, "-m", "hatchling", "build", "-d", folder / "dist", folder=ROOT)
    files = sorted((folder / "dist").iterdir())
    printed = run(python, "-m", "twine", "check", "--strict", *files, folder=folder)
    assert printed.count("PASSED") == len(files) == 2
    shutil.rmtree(folder / "tools")
    return folder / "dist"


@pytest.fixture(scope="module")
def wheel(built):
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """Binaries of an environment that holds the wheel and torch, and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", folder / "environment", folder=folder)
    yield install(folder / "environment" / "bin", wheel)
    # It is large, and pytest keeps the folders of its last three sessions.
    shutil.rmtree(folder / "environment")


def install(binaries, wheel):
    """Install a wheel; the constraint takes the small build of torch, as in the Makefile."""
    pip = (binaries / "python", "-m", "pip", "install", "--quiet")
    run(*pip, "--constraint", ROOT / "constraints.txt", wheel, folder=binaries)
    return binaries


@pytest.fixture(scope="module")
def alone(environment):
    """What the core says where torch is all that it finds."""
    code = """
import importlib.util, json, torch, tammes
criterion = tammes.CosFace(8, 3)
criterion(torch.randn(4, 8), torch.tensor([0, 1, 2, 0])).backward()
others = ("numpy", "safetensors", "sklearn", "lightning", "transformers")
there = [name for name in others if importlib.util.find_spec(name)]
print(json.dumps([tammes.__version__, there, bool(criterion.head.weight.grad.any())]))
"""
    return json.loads(run(environment / "python", "-c", code, folder=environment))


@pytest.fixture(scope="module")
def demonstrated(alone, environment, wheel, tmp_path_factory):
    """Folder and output of the demo where only its extra is installed, as `make demo` does."""
    folder = tmp_path_factory.mktemp("demonstrated")
    install(environment, f"{wheel}[demo]")
    return folder, run(environment / "tammes", "demo", folder=folder)


@pytest.fixture(scope="module")
def installed(demonstrated, environment, wheel):
    """The same environment with the lab, after the core and the demo were tried alone."""
    return install(environment, f"{wheel}[lab]")


def test_the_core_needs_torch_alone(alone):
    assert alone == [tammes.__version__, [], True]


def test_the_wheel_of_the_sdist_is_that_of_the_checkout(built, wheel, tmp_path):
    (sdist,) = built.glob("*.tar.gz")
    run(sys.executable, "-m", "pip", "wheel", sdist, "--no-deps", "-w", tmp_path, folder=tmp_path)
    (again,) = tmp_path.glob("*.whl")
    assert again.name == wheel.name
    first, second = (zipfile.ZipFile(path) for path in (wheel, again))
    assert {i.filename: i.CRC for i in first.infolist()} == {
        i.filename: i.CRC for i in second.infolist()
    }


def other_pythons():
    """Interpreters of other versions that pyproject.toml names, where they are found."""
    for minor in (11, 12, 13):
        name = f"python3.{minor}"
        places = [shutil.which(name), *Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/{name}")]
        for place in filter(None, places):
            done = subprocess.run([place, "--version"], capture_output=True, check=False)
            if sys.version_info[1] != minor and done.returncode == 0:
                yield pytest.param(place, id=name)
                break


# Installing torch for each would take 3 GB.
@pytest.mark.parametrize(
    "python",
    [*other_pythons()] or [pytest.param("", marks=pytest.mark.skip("no other Python here"))],
)
def test_other_pythons_take_the_wheel_and_compile_it(python, wheel, tmp_path):
    run(python, "-m", "venv", tmp_path / "other", folder=tmp_path)
    other = tmp_path / "other" / "bin" / "python"
    run(other, "-m", "pip", "install", "--quiet", "--no-deps", wheel, folder=tmp_path)
    (package,) = (tmp_path / "other").glob("lib/*/site-packages/tammes")
    run(other, "-W", "error", "-m", "compileall", "-q", "-f", package, folder=tmp_path)


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src" / "tammes").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"tammes/py.typed", "tammes/lab/report/render/templates/page.html"} <= package
    inside, beside = {name for name in names if name in package}, names - package
    assert inside == package
    assert all(".dist-info/" in name for name in beside), sorted(beside)


def test_the_installed_package_is_that_of_the_wheel(installed, tmp_path):
    code = "import tammes; print(tammes.__file__)"
    where = Path(run(installed / "python", "-c", code, folder=tmp_path).strip())
    assert where.is_relative_to(installed.parent)


def test_the_installed_command_lists_what_it_ships(installed, tmp_path):
    listed = run(installed / "tammes", "demo", "--list", folder=tmp_path)
    assert listed == run(Path(sys.executable).parent / "tammes", "demo", "--list", folder=tmp_path)
    for name in (*COMMANDS, "digits", "cosface", "lm_softmax", "resnet18", "pad_crop"):
        assert name in listed, name


def test_the_demo_needs_its_extra_alone_and_ends_by_naming_a_page_that_is_there(demonstrated):
    folder, printed = demonstrated
    page = folder / printed.splitlines()[-1].partition("page: ")[2]
    assert page.is_relative_to(folder)
    assert "cosface(margin=0.3)" in page.read_text(encoding="utf-8")
