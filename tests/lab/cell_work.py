"""Work for cells, called in processes of their own; stands in for training."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from tammes.lab.config.schema import Config
from tammes.lab.records.run_folder import write_json, write_lines
from tammes.lab.runner import Cell


def work(payload, folder, emit):
    """Do what the payload says."""
    folder.mkdir(parents=True, exist_ok=True)
    print("what is printed is nobody's event")
    (folder / "pid").write_text(str(os.getpid()))
    match payload.get("do", "done"):
        case "done":
            emit({"what": "begin", "epochs": 2, "done": 0})
            emit({"what": "epoch", "epoch": 1, "accuracy": 0.5})
        case "surroundings":
            found = {
                "threads": torch.get_num_threads(),
                "omp": os.environ["OMP_NUM_THREADS"],
                "gpu": os.environ.get("CUDA_VISIBLE_DEVICES"),
                "argv": sys.argv,
                "path": sys.path,
                "began": time.time(),
            }
            time.sleep(payload.get("seconds", 0))
            write_json(folder / "found.json", {**found, "ended": time.time()})
        case "raise":
            raise ValueError("the learning rate\nis too large")
        case "bug":
            raise KeyError("somewhere")
        case "long":
            raise RuntimeError("word " * 1000)
        case "kill":
            print("a last word", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(7)
        case "wait":
            started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            (folder / "child").write_text(str(started.pid))
            emit({"what": "waiting"})
            time.sleep(600)
        case "leave":
            # A process that outlives its parent and holds on to what it was given.
            started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            (folder / "child").write_text(str(started.pid))
        case "flood":
            for number in range(20_000):
                emit({"number": number})


def alive(path):
    """Whether the process whose number is in a file is there and not a zombie."""
    try:
        state = (
            Path(f"/proc/{int(path.read_text())}/stat").read_text().rpartition(")")[2].split()[0]
        )
    except OSError:
        return False
    return state != "Z"


def pretend_to_train(payload, folder, emit):
    """Write the record of a run, as training would; ``stop`` in the name of a run says how not."""
    config = Config.from_dict(payload["config"])
    log = Path(os.environ["CELL_LOG"])
    with log.open("a") as file:
        file.write(f"{folder.name}\n")
    emit({"what": "begin", "epochs": config.epochs, "done": 0})
    (folder / "failure.json").unlink(missing_ok=True)
    write_json(folder / "config.json", config.to_dict())
    accuracy = 0.9 + 0.01 * config.seed + 0.001 * len(config.loss)
    rows = [{"epoch": e + 1, "test": {"accuracy": accuracy}} for e in range(config.epochs)]
    write_lines(folder / "metrics.jsonl", rows)
    stop = json.loads(os.environ.get("CELL_STOP", "{}"))
    for part, how in stop.items():
        if part not in folder.name:
            continue
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "not finite":
            message = "the loss was not finite at step 3"
            write_json(folder / "failure.json", {"kind": "not finite", "message": message})
            raise ValueError(message)
        raise RuntimeError(how)
    emit({"what": "epoch", "epoch": config.epochs, "accuracy": accuracy})
    write_json(
        folder / "final.json",
        {"epoch": config.epochs, "test": {"accuracy": accuracy}, "seconds": 1.0},
    )


def cell(folder, name="a", **payload):
    """A cell of this work."""
    return Cell(name, folder / name, payload)


def until(condition, seconds=60):
    """Wait for something."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)
