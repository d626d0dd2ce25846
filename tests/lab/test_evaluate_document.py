"""What docs/evaluate.md shows is what its commands print."""

import re
import shlex
from pathlib import Path

import pytest

from tammes.lab.cli.main import main

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "evaluate.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
PYTHON = [text for kind, text in BLOCKS if kind == "python"]
COMMANDS = [
    (text.strip(), BLOCKS[place + 1]) for place, (kind, text) in enumerate(BLOCKS) if kind == "sh"
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the files that the page writes."""
    folder = tmp_path_factory.mktemp("birds")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for code in PYTHON[:-1]:
            exec(compile(code, "docs/evaluate.md", "exec"), {})
    return folder


@pytest.mark.parametrize(("command", "shown"), COMMANDS)
def test_commands_print_what_the_page_shows(folder, monkeypatch, capsys, command, shown):
    monkeypatch.chdir(folder)
    assert main(shlex.split(command)[1:]) == 0
    kind, text = shown
    assert kind == "text"
    assert capsys.readouterr().out == text


def test_the_page_shows_every_protocol():
    assert [command.split()[2] for command, _ in COMMANDS] == [
        "retrieval",
        "verification",
        "openset",
        "openset",
    ]


def test_code_of_the_page_runs(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    exec(compile(PYTHON[-1].replace("1000", "20"), "docs/evaluate.md", "exec"), {})
    assert re.fullmatch(r"\(0\.\d+,\) 0\.\d+ 0\.\d+ 0\.\d+\n", capsys.readouterr().out)


def test_every_flag_is_on_the_page(capsys):
    for protocol in ("retrieval", "verification", "openset"):
        with pytest.raises(SystemExit):
            main(["evaluate", protocol, "--help"])
        flags = set(re.findall(r"--[a-z-]+", capsys.readouterr().out)) - {"--help"}
        assert flags
        assert not [flag for flag in flags if f"`{flag}" not in PAGE and f"[{flag} " not in PAGE]
