"""A run that is killed outright, again and again, ends as one that was left alone."""

import random
import signal
import time

import pytest
import torch
from lab_runs import SAME, train_in_a_process

from tammes.lab.config.schema import Config
from tammes.lab.records.run_folder import Run
from tammes.lab.training.loop import train

CONFIG = Config(
    data="digits",
    loss="cosface(margin=0.2) + 0.1*sample_margin()",
    backbone="mnist_cnn(width=0.5)",
    augment="pad_crop(1)",
    schedules="margin=WarmUp(0.0, 0.2, epochs=3)",
    validation=0.2,
    epochs=8,
    batch_size=64,
    save_steps=5,
)
TRIALS = 20


def start(processes, config, folder):
    process = processes.Process(target=train_in_a_process, args=(config.to_dict(), str(folder)))
    process.start()
    return process


def finish(processes, config, folder):
    process = start(processes, config, folder)
    process.join()
    assert process.exitcode == 0
    return Run(folder)


def assert_same(one, two, trial=""):
    for name in (*SAME, "health.json"):
        assert (one.folder / name).read_bytes() == (two.folder / name).read_bytes(), (trial, name)


@pytest.mark.slow
def test_a_run_killed_at_random_moments_ends_in_the_same_bits(tmp_path, processes):
    finish(processes, CONFIG.replace(epochs=1), tmp_path / "first")
    began = time.monotonic()
    whole = finish(processes, CONFIG, tmp_path / "whole")
    length = time.monotonic() - began

    moments = random.Random(0)
    endings = []
    for trial in range(TRIALS):
        folder = tmp_path / f"trial{trial}"
        # Twice, so that a run that went on is killed as well.
        for _ in range(2):
            process = start(processes, CONFIG, folder)
            time.sleep(moments.uniform(0.0, 0.7 * length))
            process.kill()
            process.join()
            endings.append(process.exitcode)
            if process.exitcode == 0:
                # The machine was busier when the run was timed.
                length *= 0.7
        assert_same(finish(processes, CONFIG, folder), whole, trial)
    assert endings.count(-signal.SIGKILL) >= TRIALS


@pytest.mark.slow
def test_a_run_in_this_process_is_that_of_another_one(tmp_path, processes):
    """The trials above compare processes; this one says that a process is nothing special."""
    config = CONFIG.replace(epochs=1)
    other = finish(processes, config, tmp_path / "other")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert_same(train(config, tmp_path / "here"), other)
    finally:
        torch.set_num_threads(threads)
