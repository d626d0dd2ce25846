"""The typed user of the public API runs, and mypy checks it."""

import tomllib
from pathlib import Path

import typed_user

ROOT = Path(__file__).parents[1]


def test_it_runs():
    typed_user.use()


def test_mypy_checks_it():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    assert "tests/typed_user.py" in settings["files"]
    (strict,) = (each for each in settings["overrides"] if each["module"] == ["typed_user"])
    assert all(value for name, value in strict.items() if name != "module")
