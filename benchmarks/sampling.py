"""Accuracy, time and memory of a head that samples a share of the classes in every step.

    python benchmarks/sampling.py                # CPU, about ten minutes on two free cores
    python benchmarks/sampling.py --device cuda --write results/sampling_h200.json

Accuracy: Omniglot. The training classes are the characters of the background set; every rotation
(on a GPU also every reflection) is a separate class. 15 of the 20 images of a class are used for
training. Two numbers of the last epoch are reported: accuracy on the other 5 images among all
training classes, and recall, how often the nearest image of a new character of the evaluation set
shows the same character.

Cost: one step of a head of many random classes with SGD and momentum, without a network.

Needs only torch, pyarrow and Pillow, and the data in TAMMES_DATA.
"""

import argparse
import contextlib
import io
import json
import math
import os
import platform
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import tammes
from tammes.heads.class_sampling import sample_size

RATES = (1.0, 0.5, 0.3, 0.1, 0.05)
TRAINED = 15
"""Images of each character that are trained with."""
SIDE = 28
CHARACTERS = 964
"""Of the background set."""
DATA = Path(os.environ.get("TAMMES_DATA", "."))

FORMS = {
    "cpu": {"views": 2, "epochs": 3, "batch": 64, "channels": 16, "features": 64, "seeds": 2},
    "cuda": {"views": 8, "epochs": 12, "batch": 256, "channels": 64, "features": 256, "seeds": 3},
}
"""Ways to turn a character, and the rest of what training is made of, by device."""
WORKERS = {"cpu": 1, "cuda": 6}
COST = {"cpu": (64, 128, 200_000), "cuda": (1024, 512, 1_000_000)}
"""N, D and C of the head that is timed."""


# ----------------------------------------------------------------------------------------- data


def read(split):
    """Images of all characters of a split, shape ``(characters, 20, 28, 28)``; ink is 1."""
    import pyarrow.parquet
    from PIL import Image

    table = pyarrow.parquet.read_table(DATA / "omniglot.parquet")
    rows = [row for row in table.to_pylist() if row["split"] == split]
    characters = {}
    for row in rows:
        with Image.open(io.BytesIO(row["image"]["bytes"])) as image:
            grey = image.convert("L").resize((SIDE, SIDE), Image.Resampling.BOX)
        pixels = torch.frombuffer(bytearray(grey.tobytes()), dtype=torch.uint8)
        ink = 1 - pixels.view(SIDE, SIDE).float() / 255
        characters.setdefault((row["alphabet"], row["character"]), []).append(ink)
    return torch.stack([torch.stack(images) for images in characters.values()])


def turned(images, views):
    """Return the first of the eight rotations and reflections of each character, as classes."""
    ways = [torch.rot90(images, turn, (-2, -1)) for turn in range(4)]
    ways += [way.flip(-1) for way in ways]
    return torch.cat(ways[:views])


def shifted(images):
    """Shift each image by up to two pixels in each direction."""
    count = len(images)
    padded = F.pad(images, (2, 2, 2, 2))
    top, left = (torch.randint(5, (count, 1, 1), device=images.device) for _ in range(2))
    rows = top + torch.arange(SIDE, device=images.device)[:, None]
    columns = left + torch.arange(SIDE, device=images.device)
    return padded[torch.arange(count, device=images.device)[:, None, None], rows, columns]


# ------------------------------------------------------------------------------------- training


def network(channels, features):
    """Build a network of four convolutions, each halving the image, and a linear layer."""
    layers, before = [], 1
    for after in (channels, 2 * channels, 2 * channels, 2 * channels):
        layers.append(nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False))
        layers += [nn.BatchNorm2d(after), nn.ReLU()]
        before = after
    layers += [nn.Flatten(), nn.Linear(4 * before, features, bias=False)]
    return nn.Sequential(*layers, nn.BatchNorm1d(features))


def build(size, classes, rate, correct, scale):
    return tammes.ShardedHead(
        tammes.CosineHead, size, classes, scale=scale, sample_rate=rate, correct=correct
    )


def train(images, new, rate, correct, seed, form, device):
    """Train once; return the accuracy on held-out images and the recall on new characters."""
    torch.manual_seed(seed)
    classes = len(images)
    backbone = network(form["channels"], form["features"]).to(device)
    head = build(form["features"], classes, rate, correct, form["scale"])
    criterion = tammes.Criterion(head, tammes.cosface(margin=form["margin"])).to(device)
    groups = criterion.param_groups(
        backbone, lr=form["lr"], head_lr=form["head_lr"], weight_decay=form["weight_decay"]
    )
    optimizer = torch.optim.SGD(groups, momentum=0.9, nesterov=True)
    seen = images[:, :TRAINED].flatten(0, 1).to(device)
    labels = torch.arange(classes, device=device).repeat_interleave(TRAINED)
    steps = len(seen) // form["batch"]
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        [group["lr"] for group in groups],
        total_steps=form["epochs"] * steps,
        pct_start=0.2,
    )
    for _ in range(form["epochs"]):
        for batch in torch.randperm(len(seen), device=device).split(form["batch"])[:steps]:
            features = backbone(shifted(seen[batch])[:, None])
            optimizer.zero_grad()
            criterion(features, labels[batch]).backward()
            optimizer.step()
            schedule.step()
    return {
        "accuracy": accuracy(backbone, head, images[:, TRAINED:], device),
        "recall": recall(backbone, new, device),
    }


@torch.no_grad()
def embed(backbone, images, device):
    backbone.eval()
    return torch.cat([backbone(part.to(device)[:, None]) for part in images.split(1024)])


def accuracy(backbone, head, images, device):
    """Percentage of images whose class has the highest score of all training classes."""
    features = embed(backbone, images.flatten(0, 1), device)
    labels = torch.arange(len(images), device=device).repeat_interleave(images.shape[1])
    best = torch.cat([head.top(part).classes[:, 0] for part in features.split(1024)])
    return 100 * (best == labels).float().mean().item()


def recall(backbone, images, device):
    """Percentage of images of new characters whose nearest other image shows the same character."""
    features = F.normalize(embed(backbone, images.flatten(0, 1), device))
    labels = torch.arange(len(images), device=device).repeat_interleave(images.shape[1])
    right = 0
    for part in torch.arange(len(features), device=device).split(1024):
        cosine = features[part] @ features.T
        cosine[torch.arange(len(part), device=device), part] = -2
        right += (labels[cosine.argmax(1)] == labels[part]).sum().item()
    return 100 * right / len(features)


# ---------------------------------------------------------------------------------------- cost


def cost(rate, device, turns=10):
    """Milliseconds per step of a head of many classes, and on a GPU the peak memory in GiB.

    On a CPU it is processor time, which does not depend on other processes.
    """
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    examples, size, classes = COST[device.type]
    torch.manual_seed(0)
    with device:
        head = build(size, classes, rate, False, 64.0)
        criterion = tammes.Criterion(head, tammes.cosface(), validate=None)
        features = torch.randn(examples, size, requires_grad=True)
        labels = torch.randint(classes, (examples,))
    optimizer = torch.optim.SGD(criterion.parameters(), lr=0.1, momentum=0.9)
    times = []
    for turn in range(turns + 2):
        if turn == 2 and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        began = clock()
        with torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda"):
            loss = criterion(features, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        features.grad = None
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (clock() - began))
    row = {"rate": rate, "milliseconds": times[2:]}
    if device.type == "cuda":
        row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return row


def costs(rates, device):
    shape = COST[device.type]
    print("one step of the head alone, N, D, C = {:,}, {:,}, {:,}".format(*shape))
    print(f"{'rate':>5} {'ms':>8} {'peak GiB':>9}")
    rows = []
    for rate in rates:
        row = cost(rate, device)
        rows.append(row)
        peak = f"{row['peak_gib']:9.2f}" if "peak_gib" in row else ""
        print(
            f"{rate:5g} {statistics.median(row['milliseconds']):8.2f} {peak}".rstrip(), flush=True
        )
    return {"shape": shape, "rows": rows}


# --------------------------------------------------------------------------------------- report


def prepare(form, threads):
    """Set up a worker process."""
    global IMAGES, NEW
    torch.set_num_threads(threads)
    IMAGES, NEW = turned(read("background"), form["views"]), read("evaluation")


def run(rate, correct, seed, form, device):
    return train(IMAGES, NEW, rate, correct, seed, form, torch.device(device))


def accuracies(rates, form, device, workers):
    """Return a row for each rate; for rates below 1 also with the correction."""
    wanted = [(rate, correct) for rate in rates for correct in (False, True)[: 1 + (rate < 1)]]
    threads = max(torch.get_num_threads() // workers, 1)
    columns = ("rate", "corrected", "classes a step", "accuracy %", "recall %")
    print("{:>5}  {:9} {:>16} {:>14} {:>14}".format(*columns))
    with ProcessPoolExecutor(workers, get_context("spawn"), prepare, (form, threads)) as pool:
        runs = {
            cell: [pool.submit(run, *cell, seed, form, device) for seed in range(form["seeds"])]
            for cell in wanted
        }
        rows = []
        for (rate, correct), waited in runs.items():
            row = {"rate": rate, "correct": correct}
            row["sampled"] = sample_size(form["batch"], form["classes"], rate)
            results = [future.result() for future in waited]
            row |= {key: [result[key] for result in results] for key in results[0]}
            rows.append(row)
            print(line(row, form["classes"]), flush=True)
    return rows


def line(row, classes):
    correct, size = "yes" if row["correct"] else "no", f"{row['sampled']:,} of {classes:,}"
    text = f"{row['rate']:5g}  {correct:9} {size:>16}"
    for values in (row["accuracy"], row["recall"]):
        text += f" {statistics.mean(values):7.2f} ± {spread(values):4.2f}"
    return text


def spread(values):
    return statistics.stdev(values) if len(values) > 1 else math.nan


def machine(device):
    model = platform.processor()
    with contextlib.suppress(OSError, StopIteration, IndexError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(": ")[1] for line in lines if line.startswith("model name"))
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else model,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tammes": tammes.__version__,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=FORMS)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--seeds", type=int, help="runs of each (default: 2, on a GPU 3)")
    parser.add_argument("--epochs", type=int, help="default: 3, on a GPU 12")
    parser.add_argument("--lr", type=float, default=0.2)
    parser.add_argument("--head-lr", type=float, default=1.0)
    parser.add_argument("--weight-decay", type=float, default=5e-4)
    parser.add_argument("--scale", type=float, default=16.0)
    parser.add_argument("--margin", type=float, default=0.2)
    parser.add_argument("--workers", type=int, help="processes (default: 1, on a GPU 6)")
    parser.add_argument("--only", choices=("accuracy", "cost"), help="only that part")
    parser.add_argument("--write", metavar="FILE", help="results as JSON")
    arguments = vars(parser.parse_args())
    device, rates = arguments["device"], arguments["rates"]
    only, write = arguments["only"], arguments["write"]
    workers = arguments["workers"] or WORKERS[device]
    changed = ("seeds", "epochs", "lr", "head_lr", "weight_decay", "scale", "margin")
    form = FORMS[device] | {k: arguments[k] for k in changed if arguments[k] is not None}
    form["classes"] = CHARACTERS * form["views"]
    found = {
        "command": " ".join(["python", "benchmarks/sampling.py", *sys.argv[1:]]),
        "machine": machine(device),
        "settings": form,
        "load_average_before": os.getloadavg(),
    }
    if only != "accuracy":
        found["cost"] = costs(rates, torch.device(device))
        if device == "cuda":
            torch.cuda.empty_cache()
    if only != "cost":
        print(", ".join(f"{key} {value}" for key, value in form.items()))
        found["accuracy"] = accuracies(rates, form, device, workers)
    found["load_average_after"] = os.getloadavg()
    if write:
        Path(write).write_text(json.dumps(found, indent=2) + "\n")
        print(f"written: {write}")


if __name__ == "__main__":
    main()
