"""The script that tries everything on a GPU, and what it has written down."""

import importlib.util
import itertools
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "results" / "gpu.json"


def loaded(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script():
    return loaded("gpu_script", ROOT / "scripts" / "gpu.py")


def test_tests_of_gpus_kernels_and_timm_are_started_in_shares(script, monkeypatch, tmp_path):
    monkeypatch.setattr(script, "Child", lambda command, log, **variables: (command, variables))
    started = script.start_tests(tmp_path)
    assert [variables["TAMMES_TEST_SHARE"] for _, variables in started] == [
        "0/4", "1/4", "2/4", "3/4"
    ]  # fmt: skip
    for command, _ in started:
        assert command[command.index("-m", 3) + 1] == "gpu or kernel or timm or torch_version"
        names = {Path(word).name for word in command if word.endswith(".py")}
        assert {"test_cuda.py", "test_timm.py", "test_compile.py"} <= names
        assert "test_docs.py" not in names


def test_shares_are_disjoint_and_leave_out_no_test(monkeypatch):
    # By its path: there is another conftest, in tests/lab.
    conftest = loaded("conftest_of_all", ROOT / "tests" / "conftest.py")
    marked = [f"test {number}" for number in range(10)]
    shares = []
    for number in range(3):
        monkeypatch.setenv("TAMMES_TEST_SHARE", f"{number}/3")
        shares.append(list(marked))
        conftest.pytest_collection_modifyitems(shares[-1])
    assert sorted(itertools.chain(*shares)) == marked
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_results_of_all_shares_are_added(script, capsys):
    class Ended:
        def __init__(self, *result):
            self.wait = lambda: result

    part = script.end_tests(
        [
            Ended(0, "1.50s call     tests/a.py::one\n3 passed, 1 skipped in 4s\n", 5.0),
            Ended(1, "2.50s call     tests/b.py::two\nFAILED b\n1 failed, 2 passed in 3s\n", 4.0),
            Ended(None, "half a", 420.0),
        ]
    )
    assert (part.count, part.seconds) == (6, 420.0)
    assert part.failures == ["FAILED b", "tests: not done after 540 s"]
    assert part.notes[-2:] == ["2.50 s: tests/b.py::two", "1.50 s: tests/a.py::one"]
    assert "half a" in capsys.readouterr().out


def test_training_is_shared_and_its_records_are_added(script, monkeypatch, tmp_path):
    monkeypatch.setattr(script, "Child", lambda command, log: command)
    started = script.start_training(tmp_path, "cuda", 5)
    assert [command[command.index("--share") + 1] for command in started] == ["0/3", "1/3", "2/3"]
    assert all(command[command.index("--losses") + 1] == "5" for command in started)

    class Ended:
        def __init__(self, number, code, seconds, own=None):
            self.log = tmp_path / f"training{number}.txt"
            self.wait = lambda: (code, "what it printed", seconds)
            if own is not None:
                text = json.dumps({"parts": {"training": own}})
                self.log.with_suffix(".json").write_text(text)

    part = script.end_training(
        [
            Ended(0, 0, 30.0, {"count": 3, "failures": [], "notes": ["default: 9 s"]}),
            Ended(1, 1, 40.0, {"count": 2, "failures": ["training x: no"], "notes": []}),
            Ended(2, -6, 10.0),
        ]
    )
    assert (part.count, part.seconds, part.notes) == (5, 40.0, ["default: 9 s"])
    assert part.failures == ["training x: no", "training ended with -6: what it printed"]


def test_tests_that_failed_run_again_after_a_change_of_tests(script, monkeypatch, tmp_path):
    started = []

    def child(command, log):
        started.append(command[-2:])

    monkeypatch.setattr(script, "Child", child)
    tests = {"count": 9, "seconds": 5.0, "failures": ["FAILED a.py::b", "ERROR a.py::c - x"]}
    known = {
        "parts": {"tests": tests | {"notes": ["9 ran"]}},
        "device": "H200",
        "tree": "1a2b3c4d5e",
        "seconds": 61.0,
    }
    monkeypatch.setattr(script, "end_tests", lambda _: script.Part(2))
    found = script.run_failed(known, tmp_path)
    assert started == [["a.py::b", "a.py::c"]]
    assert found["line"] == "gpu: 9 tests: all passed on H200 (tree 1a2b3c4d), 1 min 1 s"
    assert found["parts"]["tests"]["notes"][-1] == "again, after a change of tests: a.py::c"
    monkeypatch.setattr(script, "end_tests", lambda _: script.Part(2, failures=["FAILED a.py::b"]))
    assert ": 1 failed on " in script.run_failed(known, tmp_path)["line"]
    # One that is no longer there has not passed.
    monkeypatch.setattr(script, "end_tests", lambda _: script.Part(1))
    assert ": 1 failed on " in script.run_failed(known, tmp_path)["line"]


@pytest.fixture
def sources(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one.py").write_text("1\n")
    (tmp_path / "two.yaml").write_text("x: 1\n")
    return tmp_path


def test_the_digest_is_that_of_names_and_contents(script, sources):
    known = script.tree_digest(sources)
    (sources / "a" / "one.pyc").write_text("not a source")
    assert script.tree_digest(sources) == known
    (sources / "a" / "one.py").write_text("2\n")
    changed = script.tree_digest(sources)
    (sources / "a" / "one.py").write_text("1\n")
    assert script.tree_digest(sources) == known != changed
    (sources / "two.yaml").rename(sources / "three.yaml")
    assert script.tree_digest(sources) != known


def test_the_last_line_counts_what_ran_and_what_failed(script):
    parts = {"tests": script.Part(702), "training": script.Part(245), "benchmarks": script.Part(1)}
    line = script.closing_line(parts, "NVIDIA H200", "1a2b3c4d5e", 400.2)
    assert line == (
        "gpu: 702 tests, 245 trainings, 1 benchmark: "
        "all passed on NVIDIA H200 (tree 1a2b3c4d), 6 min 40 s"
    )
    parts["tests"].failures = ["FAILED one", "FAILED two"]
    assert ": 2 failed on NVIDIA H200 " in script.closing_line(parts, "NVIDIA H200", "1a2b", 1)


def test_parts_that_ran_on_the_same_sources_are_put_together(script):
    one, two = (
        script.record({name: script.Part(count, 60.0)}, "GPU", "abc", 60.0, {})
        for name, count in (("tests", 3), ("training", 4))
    )
    both = script.merged(one, two)
    assert both["line"] == "gpu: 3 tests, 4 trainings: all passed on GPU (tree abc), 2 min 0 s"


def test_every_term_and_every_benchmark_is_tried(script):
    import catalogue

    assert catalogue.TERMS.keys() <= script.every_loss().keys()
    beside = {"contestants", "process_memory"}
    there = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - beside
    assert script.BENCHMARKS["cuda"].keys() == there


def test_a_training_that_goes_wrong_is_a_failure_with_its_reason(script, monkeypatch):
    monkeypatch.setattr(script, "every_loss", lambda: {"good": "softmax()", "bad": "no_loss()"})
    monkeypatch.setitem(script.WAYS, "cpu", {"default": {}})
    part = script.train_each("cpu", None, lambda text: None)
    assert part.count == 2
    assert len(part.failures) == 1
    assert part.failures[0].startswith("training bad, default: ValueError")


def test_the_last_run_on_a_gpu_had_no_failures(script):
    if not RECORD.exists():
        pytest.skip("results/gpu.json is not there yet: run make gpu")
    known = json.loads(RECORD.read_text())
    assert {"line", "tree", "date", "device", "versions", "parts"} <= known.keys()
    assert known["parts"].keys() == set(script.PARTS)
    assert known["line"].startswith("gpu: ")
    assert not [f for part in known["parts"].values() for f in part["failures"]]
    assert all(part["count"] for part in known["parts"].values())
    for times in known["step_milliseconds"].values():
        assert all(each["graphs"] for each in times.values())
    if known["tree"] != script.tree_digest():
        pytest.skip("results/gpu.json is older than src: run make gpu")
