"""The wheel is complete: installed where nothing else is, it does what the checkout does.

Everything it needs is installed with it, from the registry that the checkout was installed from. An
environment that borrowed the packages of this one would not notice a dependency that the extra
`lab` forgot to name.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

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
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", ROOT, "--no-deps", "-w", folder, folder=folder)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Binaries of an environment that holds the wheel and what it asks for, and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", folder / "environment", folder=folder)
    binaries = folder / "environment" / "bin"
    pip = (binaries / "python", "-m", "pip", "install", "--quiet")
    # The constraint takes the small build of torch where there is one, as in the Makefile.
    run(*pip, "--constraint", ROOT / "constraints.txt", f"{wheel}[lab]", folder=folder)
    yield binaries
    # It is large, and pytest keeps the folders of its last three sessions.
    shutil.rmtree(folder / "environment")


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


def test_the_installed_demo_ends_by_naming_a_page_that_is_there(installed, tmp_path):
    printed = run(installed / "tammes", "demo", folder=tmp_path)
    last = printed.splitlines()[-1]
    page = tmp_path / last.partition("page: ")[2]
    assert page.is_relative_to(tmp_path)
    assert "cosface(margin=0.2)" in page.read_text(encoding="utf-8")
