"""``tammes export``: a trained model as a file."""

import shutil

import pytest
from test_bad_input import sentence

from tammes.lab.cli.main import main


@pytest.mark.slow
def test_both_files_are_written(digits_run, tmp_path, capsys):
    files = [tmp_path / "model.onnx", tmp_path / "deep" / "model.pt2"]
    words = ["--onnx", files[0], "--torch", files[1], "--threshold", "0.3"]
    assert main(["export", str(digits_run.folder), *map(str, words)]) == 0
    first, second, stated = capsys.readouterr().out.splitlines()
    assert first.startswith(f"  {files[0]}: embedding and logits, ")
    assert second.startswith(f"  {files[1]}: embedding and logits, ")
    assert "just cover 8×8" in stated
    assert all(file.stat().st_size > 1000 for file in files)
    assert main(["export", str(digits_run.folder), "--onnx", str(files[0]), "--no-logits"]) == 0
    assert capsys.readouterr().out.startswith(f"  {files[0]}: embedding, ")


def test_bad_input_is_one_sentence(digits_run, tmp_path, capsys):
    run, file = digits_run.folder, tmp_path / "out" / "model.onnx"
    assert sentence(capsys, "export", run).startswith(
        "a file to write is expected, given by --onnx"
    )
    said = sentence(capsys, "export", run, "--onnx", file, "--torch", "model.bin")
    assert said == "model.bin: a file name that ends in .pt2 is expected"
    said = sentence(capsys, "export", run, "--onnx", file, "--threshold", "nan")
    assert said == "export expects threshold to be a finite number, got nan"
    shutil.copy(run / "config.json", tmp_path)
    said = sentence(capsys, "export", tmp_path, "--onnx", file)
    assert said.endswith("the run has no model.safetensors, it is unfinished")
    assert not file.parent.exists()
