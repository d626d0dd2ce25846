"""A run that is killed outright, again and again, ends as one that was left alone."""

import random
import signal
import subprocess
import sys
import time

import pytest
from lab_runs import SAME

from tammes.lab.config import Config
from tammes.lab.record import Run, write_json
from tammes.lab.train import train

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

SCRIPT = """
import json, sys, torch
from pathlib import Path
from tammes.lab.config import Config
from tammes.lab.train import train
torch.set_num_threads(1)
print("ready", flush=True)
train(Config.from_dict(json.loads(Path(sys.argv[1]).read_text())), Path(sys.argv[2]))
"""


@pytest.mark.slow
def test_a_run_killed_at_random_moments_ends_in_the_same_bits(tmp_path):
    write_json(tmp_path / "config.json", CONFIG.to_dict())
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "config.json")]

    began = time.monotonic()
    subprocess.run([*command, str(tmp_path / "whole")], check=True, stdout=subprocess.DEVNULL)
    whole, length = Run(tmp_path / "whole"), time.monotonic() - began

    moments = random.Random(0)
    killed = 0
    for trial in range(TRIALS):
        folder = tmp_path / f"trial{trial}"
        # Twice, so that a run that went on is killed as well.
        for _ in range(2):
            with subprocess.Popen([*command, str(folder)], stdout=subprocess.PIPE) as process:
                process.stdout.readline()
                time.sleep(moments.uniform(0.0, 0.6 * length))
                process.send_signal(signal.SIGKILL)
            killed += process.returncode == -signal.SIGKILL
        subprocess.run([*command, str(folder)], check=True, stdout=subprocess.DEVNULL)
        for name in SAME:
            theirs, ours = (folder / name).read_bytes(), (whole.folder / name).read_bytes()
            assert theirs == ours, (trial, name)
    assert killed >= TRIALS


def test_a_run_in_this_process_is_that_of_another_one(tmp_path):
    """The trials above compare processes; this one says that a process is nothing special."""
    config = CONFIG.replace(epochs=1)
    write_json(tmp_path / "config.json", config.to_dict())
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "config.json")]
    subprocess.run([*command, str(tmp_path / "other")], check=True, stdout=subprocess.DEVNULL)
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        run = train(config, tmp_path / "here")
    finally:
        torch.set_num_threads(threads)
    for name in SAME:
        assert (run.folder / name).read_bytes() == (tmp_path / "other" / name).read_bytes(), name
