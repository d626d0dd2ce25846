"""A field of the configuration is a flag and a line of YAML; the page with all of them is true."""

import dataclasses
import re
import sys
import typing
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from messages import pattern
from update_docs import with_fields

from tammes.lab.cli.main import _Parser
from tammes.lab.config.flags import add_config, field_help, read_config, read_file
from tammes.lab.config.schema import Config
from tammes.lab.config.yaml_file import write_yaml

DOCUMENT = Path(__file__).parents[3] / "docs" / "configuration.md"
FIELDS = {field.name: field for field in dataclasses.fields(Config)}


def read(*words, **defaults):
    parser = _Parser(prog="tammes train")
    parser.add_argument("--out")
    parser.add_argument("--folder")
    add_config(parser)
    return read_config(parser.parse_args(words), **defaults)


def yaml(folder, text, name="run.yaml"):
    path = folder / name
    path.write_text(text)
    return str(path)


# -- Flags.


def test_without_flags_everything_is_as_the_class_says():
    assert read() == Config()


OTHERS = {
    str: "a text, with 'signs' = 1e3",
    int: 7,
    float: 0.25,
    bool: True,
    str | None: "/some/where",
    int | None: 9,
    float | None: 0.125,
}


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_is_a_flag_and_a_line_of_yaml(name, tmp_path):
    kind, default = FIELDS[name].type, FIELDS[name].default
    choices = ("auto", "cpu") if name == "accelerator" else typing.get_args(kind)
    if choices and isinstance(choices[0], str):
        value = next(choice for choice in choices if choice != default)
    else:
        value = (not default) if kind is bool else OTHERS[kind]
    expected = Config().replace(**{name: value})
    shown = str(value).lower() if kind is bool else str(value)
    assert expected != Config()
    assert read(f"--{name}", shown) == expected
    assert read(f"--{name.replace('_', '-')}={shown}") == expected
    assert read("--config", yaml(tmp_path, write_yaml(expected.to_dict()))) == expected


def test_a_switch_needs_no_value():
    assert read("--skip-corrupt", "--lr", "0.5") == Config(skip_corrupt=True, lr=0.5)
    assert read("--decay_norms", "false") == Config(decay_norms=False)


def test_numbers_are_read_as_people_write_them(tmp_path):
    assert read("--lr", "1e-4").lr == 1e-4
    assert read("--config", yaml(tmp_path, "lr: 1e-4\nweight_decay: 5e-4")).lr == 1e-4
    assert read("--epochs", "3").epochs == 3
    assert read("--warmup", "3").warmup == 3.0


def test_text_stays_text(tmp_path):
    assert read("--config", yaml(tmp_path, "name: 2020-01-01")).name == "2020-01-01"
    assert read("--name", "123", "--data", "null").to_dict().items() >= {
        "name": "123", "data": "null"}.items()  # fmt: skip
    assert read("--loss=-softmax + 2*bce").loss == "-softmax + 2*bce"
    assert read("--test", "null").test is None


# -- Files.


def test_a_flag_beats_the_file_and_a_later_file_an_earlier_one(tmp_path):
    first = yaml(tmp_path, "lr: 0.2\nepochs: 3\nname: first", "first.yaml")
    second = yaml(tmp_path, "epochs: 4", "second.yaml")
    found = read("--epochs", "5", "--config", first)
    assert found == Config(lr=0.2, epochs=5, name="first")
    found = read("--config", first, "--config", second)
    assert found == Config(lr=0.2, epochs=4, name="first")


def test_a_default_of_a_command_gives_way_to_both(tmp_path):
    path = yaml(tmp_path, "epochs: 3")
    assert read("--config", path, "--lr", "0.2", lr=0.5, epochs=9, seed=4) == Config(
        lr=0.2, epochs=3, seed=4
    )


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "---\n"])
def test_an_empty_file_says_nothing(tmp_path, text):
    assert read_file(yaml(tmp_path, text)) == {}


def test_what_is_printed_is_read_back(capsys, tmp_path):
    words = [
        "--loss",
        "cosface(margin=0.35) + 0.5*sample_margin()",
        "--lr",
        "0.05",
        "--name",
        "é: #",
    ]
    with pytest.raises(SystemExit) as end:
        read(*words, "--print_config")
    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert read("--config", yaml(tmp_path, printed)) == read(*words)


@given(st.text(max_size=40), st.floats(1e-6, 1e6))
@example("\x85", 0.1)
@example("0E0", 0.1)
@example("é: # 1e3\n\t'", 0.1)
@settings(max_examples=100, deadline=None)
def test_any_text_survives_yaml(tmp_path_factory, text, lr):
    config = Config(name=text, lr=lr)
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(write_yaml(config.to_dict()), encoding="utf-8")
    assert Config.from_dict(read_file(str(path))) == config


# -- What is wrong.


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lr", "abc"], "--lr is expected to be a number, got abc"),
        (["--lr", "nan"], "--lr ... number ... nan"),
        (["--epochs", "2.5"], "--epochs ... whole number ... 2.5"),
        (["--epochs", "0"], "epochs ... at least 1 ... 0"),
        (["--image_size", "a"], "--image_size ... whole number ... a"),
        (["--optimizer", "sdg"], "--optimizer ... sdg"),
        (["--compile", "maybe"], "--compile ... maybe"),
        (["--config", "/no/such.yaml"], "/no/such.yaml: No such file or directory"),
        (["--config", "/"], "/: Is a directory"),
    ],
)
def test_a_wrong_flag_is_said_in_a_sentence(words, message):
    with pytest.raises(ValueError, match=pattern(message)):
        read(*words)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lrr: 3", "a configuration has no 'lrr'; did you mean lr?"),
        ("zzzzz: 3", "a configuration has no 'zzzzz'"),
        ("out: 3", "a configuration has no 'out'"),
        ("lr: [1]", "lr is expected to be a number, got [1]"),
        ("name: 123", "name ... text ... 123"),
        ("epochs: '3'", None),
        ("lr: 1\nlr: 2", "the key 'lr' appears twice in a table"),
        ("name: null", "name ... text ... None"),
        ("- 1", "lines such as lr: 0.1 are expected"),
        ("just a text", "lines such as lr: 0.1 are expected"),
        ("a: b: c", "not YAML (... line 1, column 5)"),
    ],
)
def test_a_wrong_line_is_said_with_the_name_of_the_file(tmp_path, text, message):
    path = yaml(tmp_path, text)
    if message is None:
        assert read("--config", path).epochs == 3
        return
    with pytest.raises(ValueError, match=pattern(f"{path}: {message}")):
        read("--config", path)


def test_yaml_runs_nothing(tmp_path):
    mark = tmp_path / "mark"
    text = f"data: !!python/object/apply:os.system ['touch {mark}']"
    with pytest.raises(ValueError, match="not YAML"):
        read("--config", yaml(tmp_path, text))
    assert not mark.exists()


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"run.yaml: not YAML \(it is not text\)"):
        read("--config", str(path))


@given(st.binary(max_size=60))
@settings(max_examples=100, deadline=None)
def test_any_file_is_a_configuration_or_a_value_error(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "noise.yaml"
    path.write_bytes(data)
    try:
        found = read_file(str(path))
    except ValueError as error:
        found = str(error)
    assert isinstance(found, dict) or "\n" not in found


def test_help_and_flags_need_no_package_of_the_lab(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(SystemExit):
        read("--help")
    printed = " ".join(capsys.readouterr().out.split())
    assert "--lr X learning rate of the backbone [0.1]" in printed
    assert read("--lr", "0.2") == Config(lr=0.2)
    with pytest.raises(ImportError, match=r"pip install 'tammes\[lab\]'"):
        read("--config", "run.yaml")


def test_every_field_is_explained():
    assert list(field_help()) == list(FIELDS)
    assert all(field_help().values())


# -- The page.


def test_the_page_lists_the_fields_as_they_are():
    page = DOCUMENT.read_text(encoding="utf-8")
    assert with_fields(page) == page, "run make docs"


def test_the_yaml_on_the_page_is_read(tmp_path):
    page = DOCUMENT.read_text(encoding="utf-8")
    files = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert files
    for text in files:
        assert read_file(yaml(tmp_path, text))
