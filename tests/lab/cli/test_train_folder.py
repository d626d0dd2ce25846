"""Folder of a run: what may be in it before."""

import pytest

from tammes.lab.cli.train import _run_folder


@pytest.mark.parametrize("name", ["slurm.out", "log.txt", "failure.json", ".lock", "config.json"])
def test_a_folder_with_a_log_may_take_a_run(tmp_path, name):
    (tmp_path / name).touch()
    assert _run_folder(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["cat.png", "labels.csv", "train.parquet"])
def test_a_folder_of_data_takes_no_run(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(ValueError, match=f"with '{name}' in it; --data names the images"):
        _run_folder(str(tmp_path))
