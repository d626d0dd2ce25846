"""The command: answers on the core install, and says one sentence where something is wrong."""

import io
import json
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path

import pytest
from test_import import BLOCKER, OPTIONAL, loaded_by_torch, run

import tammes
from tammes.advise.advice import advise
from tammes.lab.cli.main import COMMANDS, main

MILLION = ["advise", "--classes", "1000000", "--dim", "512", "--batch", "4096", "--gpus", "8"]


def refused(capsys, *words):
    """The sentence on stderr of a call that was refused."""
    assert main(list(words)) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    return printed.err.strip()


# ----------------------------------------------------------------------------------- advise


def test_advise_prints_a_table(capsys):
    assert main(MILLION) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    for part in ("1,000,000 classes in 512 dimensions", "86.96°", "cosface", "streamed"):
        assert part in printed.out


def test_advise_prints_the_same_as_json(capsys):
    assert main([*MILLION, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    expected = advise(1_000_000, 512, batch=4096, gpus=8).to_dict()
    assert found == json.loads(json.dumps(expected))


def test_advise_hands_every_option_on(capsys):
    words = ["--classes", "10000", "--dim", "512", "--loss", "arcface", "--margin", "0.5"]
    words += ["--scale", "64", "--samples-per-class", "3", "--optimizer", "adamw", "--lr", "0.1"]
    words += ["--dtype", "float16", "--imbalance", "7", "--posterior", "0.8", "--device", "cpu"]
    words += ["--sample-rate", "0.3", "--autocast", "bfloat16", "--annealing", "--json"]
    words += ["--subcenters", "2"]
    assert main(["advise", *words]) == 0
    expected = advise(
        10_000, 512, loss="arcface", margin=0.5, scale=64.0, samples_per_class=3.0,
        optimizer="adamw", lr=0.1, dtype="float16", imbalance=7.0, posterior=0.8, device="cpu",
        sample_rate=0.3, autocast="bfloat16", annealing=True, subcenters=2,
    )  # fmt: skip
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(expected.to_dict()))


def test_advise_plans_for_the_machine_it_is_told(capsys):
    words = ["--memory", "8", "--tflops", "10", "--bandwidth", "500", "--json"]
    assert main([*MILLION, *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["machine"]["memory"] == 8 * 2**30
    assert found["machine"]["bandwidth"] == 5e11
    products = 6 * 512 * 1_000_000 * 512 / 1e13
    assert found["costs"][0]["products"] == pytest.approx(products)
    assert not found["costs"][0]["fits"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--classes", "10"], "the following arguments are required: --dim"),
        (["--classes", "ten", "--dim", "4"], "a whole number such as 1000 is expected, got 'ten'"),
        (["--classes", "1", "--dim", "4"], "classes to be a whole number from 2, got 1"),
        (["--classes", "9", "--dim", "4", "--loss", "arcfce"], "did you mean arcface?"),
        (["--classes", "9", "--dim", "4", "--dtype", "int8"], "invalid choice: 'int8'"),
        (["--classes", "9", "--dim", "4", "--posterior", "2"], "posterior between 0 and 1"),
        (["--classes", "9", "--dim", "4", "--memory", "-1"], "--memory is expected to be above 0"),
        (["--classes", "9", "--dim", "4", "--nonsense"], "unrecognized arguments: --nonsense"),
    ],
)
def test_advise_refuses_what_cannot_be_in_a_sentence(capsys, words, sentence):
    said = refused(capsys, "advise", *words)
    assert said.startswith("tammes advise: ")
    assert sentence in said


def test_advise_answers_within_two_seconds_beyond_importing_torch():
    # Of this process's own time: others share the machine.
    code = f"""
import contextlib, io, time, torch
start = time.process_time()
from tammes.lab.cli import main
with contextlib.redirect_stdout(io.StringIO()):
    assert main({MILLION!r}) == 0
print(time.process_time() - start)
"""
    result = run(code)
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) < 2


def test_advise_and_losses_work_with_every_optional_package_blocked():
    blocked = set(OPTIONAL) - loaded_by_torch()
    calls = [MILLION, ["losses"], ["losses", "cosface"], ["losses", "--json"]]
    code = (
        BLOCKER.format(blocked=blocked)
        + f"""
from tammes.lab.cli import main
codes = [main(words) for words in {calls!r}]
assert not [name for name in sys.modules if name.startswith("tammes.lab.report")]
sys.exit(max(codes))
"""
    )
    result = run(code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("cosface") > 4


DOCS = Path(__file__).parents[3] / "docs" / "advise.md"


def test_the_examples_in_the_docs_are_what_the_command_prints(capsys):
    examples = re.findall(r"^```\n\$ tammes ([^\n]*)\n(.*?)^```", DOCS.read_text(), re.M | re.S)
    assert examples
    for call, printed in examples:
        assert main(shlex.split(call)) == 0
        assert capsys.readouterr().out == printed


# ------------------------------------------------------------------------------- the command


def test_without_a_command_all_are_listed(capsys):
    assert main([]) == 0
    printed = capsys.readouterr().out
    for name, text in COMMANDS.items():
        # In exactly one section.
        assert printed.count(f"\n  {name:<12}{text}\n") == 1
    assert main(["--help"]) == 0
    assert capsys.readouterr().out == printed


def test_the_version_is_that_of_the_package(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"tammes {tammes.__version__}\n"


def test_an_unknown_command_is_answered_with_the_nearest(capsys):
    assert refused(capsys, "advice") == "tammes: there is no command 'advice'; did you mean advise?"
    assert f"there are {', '.join(sorted(COMMANDS))}" in refused(capsys, "xyzzy")


def test_an_unknown_flag_is_answered_with_the_nearest(capsys):
    said = refused(capsys, "compare", "--losses", "bce", "--bach-size", "3")
    assert said.startswith("tammes compare: unrecognized arguments: --bach-size 3; did you mean ")
    assert "did you mean" not in refused(capsys, "losses", "--qqqqq")


def test_an_interrupt_ends_with_130(capsys, monkeypatch):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("tammes.lab.cli.measure.run", interrupted)
    assert main(["measure", "file"]) == 130
    assert capsys.readouterr().err == "tammes measure: interrupted\n"


def test_a_command_is_imported_only_when_it_is_called(capsys, monkeypatch):
    imported = []
    module = types.ModuleType("pretended")
    module.add_arguments = lambda parser: parser.add_argument("word")
    module.run = lambda arguments: print(arguments.word) or 5

    def pretend(name):
        imported.append(name)
        return module

    monkeypatch.setattr("importlib.import_module", pretend)
    assert main(["measure", "hello"]) == 5
    assert imported == ["tammes.lab.cli.measure"]
    assert capsys.readouterr().out == "hello\n"


def test_a_missing_package_is_named_in_a_sentence(capsys, monkeypatch):
    def missing(name):
        raise ImportError(
            "plotly could not be imported;\ninstall it with: pip install 'tammes[lab]'"
        )

    monkeypatch.setattr("importlib.import_module", missing)
    said = refused(capsys, "measure", "x")
    assert said.endswith("plotly could not be imported; install it with: pip install 'tammes[lab]'")


def test_a_mistake_of_ours_is_not_hidden(monkeypatch):
    monkeypatch.setattr("importlib.import_module", lambda name: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["losses"])


def test_the_lab_says_what_to_install_where_a_package_is_missing():
    code = (
        BLOCKER.format(blocked={"yaml"})
        + """
from tammes.lab.cli import main
sys.exit(main(["compare", "--losses", "softmax", "--config", "run.yaml"]))
"""
    )
    result = run(code)
    assert result.returncode == 2
    assert result.stderr.startswith("tammes compare: yaml could not be imported")
    assert result.stderr.endswith("install it with: pip install 'tammes[lab]'\n")


def test_commands_of_the_core_do_not_import_the_lab():
    code = f"""
import sys
from tammes.lab.cli import main
main({MILLION!r}), main(["losses"])
for name in ("rich", "yaml", "lightning", "tammes.lab.config.flags", "tammes.lab.data"):
    assert name not in sys.modules, name
"""
    result = run(code)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(capsys, command):
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    assert f"usage: tammes {command}" in capsys.readouterr().out


def test_python_m_tammes_is_the_command():
    words = [sys.executable, "-m", "tammes", "advise", "--classes", "1", "--dim", "2"]
    result = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("tammes advise: ")


def test_a_terminal_without_greek_letters_gets_what_it_can_show(monkeypatch):
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii"))
    assert main(["losses", "cosface"]) == 0
    assert b"CosFace: softmax cross entropy" in shown.getvalue()
    assert b"? = log(1 + e^{? ? s(cos ?_y ? m)})" in shown.getvalue()


def test_a_reader_who_leaves_early_is_no_error():
    # Gone long before there is anything to read.
    words = f"{sys.executable} -m tammes losses cosface | true; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(
        ["bash", "-c", words], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0
    assert result.stderr == ""
