"""Images per second of the lab compared with a bare loop on the same network.

    python benchmarks/train.py                    # on a GPU: CIFAR-100, 13-layer network, bf16
    python benchmarks/train.py --cells 6          # also six concurrent runs
    python benchmarks/train.py --cells 6 --only   # only the concurrent runs
    python benchmarks/train.py --uncompiled       # without torch.compile, in half a minute
    python benchmarks/train.py --cpu              # tiny, as a smoke test
    python benchmarks/train.py --quick            # tiny, on digits; with --cpu too
    python benchmarks/train.py --profile          # where the host spends the time of eager steps

The bare loop is written by hand: images on the device, crops and flips in plain torch,
autocast, cross entropy, SGD. It measures nothing and writes nothing.
"""

import argparse
import cProfile
import json
import pstats
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tammes.lab import backbones, data
from tammes.lab.config.schema import Config
from tammes.lab.records.run_folder import Run
from tammes.lab.runner import Cell, plan_resources, run_cells
from tammes.lab.training import loop
from tammes.lab.training.loop import train

WORK = "tammes.lab.runner.sweep:train_cell"


def augmented(pixels, mean, std):
    """Crop the padded images, flip half of them, and normalise."""
    images = (pixels.float() / 255 - mean) / std
    count, _, height, width = images.shape
    padded = F.pad(images, (4, 4, 4, 4))
    top, left = (torch.randint(9, (count, 1, 1), device=pixels.device) for _ in range(2))
    rows = (top + torch.arange(height, device=pixels.device)[:, None]).expand(-1, -1, width)
    columns = (left + torch.arange(width, device=pixels.device)).expand(-1, height, -1)
    flip = torch.rand(count, 1, 1, device=pixels.device) < 0.5
    columns = torch.where(flip, columns.flip(2), columns)
    every = torch.arange(count, device=pixels.device)[:, None, None]
    return padded.permute(0, 2, 3, 1)[every, rows, columns].permute(0, 3, 1, 2)


def bare(images, config, device, *, compiled):
    """Images per second of the hand-written loop, over its last epoch."""
    torch.manual_seed(0)
    backbone = backbones.build(config.backbone, shape=images.shape)
    classes = len(images.classes)
    network = torch.nn.Sequential(backbone, torch.nn.Linear(backbone.num_features, classes))
    network = network.to(device)
    if device.type == "cuda":
        network = network.to(memory_format=torch.channels_last)
    step_forward = torch.compile(network, dynamic=False) if compiled else network
    optimizer = torch.optim.SGD(
        network.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, fused=device.type == "cuda"
    )
    pixels, labels = images.pixels.to(device), images.labels.to(device)
    mean, std = (torch.tensor(v, device=device).view(-1, 1, 1) for v in images.mean_std())
    precision = torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16")
    for epoch in range(config.epochs):
        order = torch.randperm(len(pixels), device=device)
        began, count = time.perf_counter(), 0
        for batch in order.split(config.batch_size):
            if len(batch) < config.batch_size:
                break
            x = augmented(pixels[batch], mean, std).contiguous(memory_format=torch.channels_last)
            with precision:
                loss = F.cross_entropy(step_forward(x).float(), labels[batch])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            count += len(batch)
        if device.type == "cuda":
            torch.cuda.synchronize()
        rate = count / (time.perf_counter() - began)
        print(f"  bare{' compiled' if compiled else ''}, epoch {epoch + 1}: {rate:,.0f} images/s")
    return rate


def rate_of(run):
    """Images per second over the last epoch."""
    return run.timing[-1]["images_per_second"]


def cell(config, folder):
    """A run in its own process."""
    return Cell(f"seed {config.seed}", Path(folder) / config.folder, {"config": config.to_dict()})


def together(folders):
    """Images per second of all concurrent cells in total, after the first epoch of each."""
    epochs = [Run(folder).timing for folder in folders]
    low = max(rows[0]["ended"] for rows in epochs)
    high = min(rows[-1]["ended"] for rows in epochs)
    if low >= high:
        raise SystemExit("the cells were not at work at the same time; try more --epochs")
    images = 0.0
    for rows in epochs:
        for row in rows:
            inside = min(row["ended"], high) - max(row["ended"] - row["seconds"], low)
            images += max(inside, 0.0) * row["images_per_second"]
    return images / (high - low)


def one_by_one(images, config, device, folder, results, *, compiled):
    """Run the bare loop and every variant of the lab in sequence."""
    results["bare"] = bare(images, config, device, compiled=False)
    ways = {"eager": {"graphs": "off"}}
    if device.type == "cuda":
        ways["default"] = {}
        if compiled:
            results["bare compiled"] = bare(images, config, device, compiled=True)
            ways["compiled"] = {"compile": True, "graphs": "off"}
            ways["compiled, graphs"] = {"compile": True}
    for name, changes in ways.items():
        run = train(config.replace(**changes), folder / config.replace(**changes).folder)
        results[name] = rate_of(run)
        ratio = results[name] / results["bare"]
        print(f"  tammes {name}: {results[name]:,.0f} images/s, {ratio:.2f} of the bare loop")


class Operations(TorchDispatchMode):
    """Counts the operations of torch."""

    count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.count += 1
        return operation(*args, **(kwargs or {}))


def profile(config, folder):
    """Print operations per step of the last epoch but one, and a profile of the last."""
    train_epoch, profiler = loop._train_epoch, cProfile.Profile()

    def watched(work):
        if work.epoch == config.epochs - 2:
            with Operations() as operations:
                train_epoch(work)
            print(f"  {operations.count / len(work.sampler):.1f} operations per step")
        elif work.epoch == config.epochs - 1:
            profiler.runcall(train_epoch, work)
        else:
            train_epoch(work)

    loop._train_epoch = watched
    train(config.replace(graphs="off"), folder)
    loop._train_epoch = train_epoch
    pstats.Stats(profiler).strip_dirs().sort_stats("cumulative").print_stats(60)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="cifar100")
    parser.add_argument("--cells", type=int, default=0)
    parser.add_argument("--only", action="store_true", help="only the cells side by side")
    parser.add_argument("--uncompiled", action="store_true", help="nothing that is compiled")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--quick", action="store_true", help="tiny, to see that it works")
    parser.add_argument("--profile", action="store_true", help="only profile eager steps")
    parser.add_argument("--write", metavar="FILE", help="results as JSON")
    arguments = parser.parse_args()
    device = torch.device("cpu" if arguments.cpu else "cuda")
    tiny = arguments.cpu or arguments.quick
    config = Config(
        data="digits" if arguments.quick else arguments.data,
        image_size=16 if arguments.quick else None,
        backbone="layer13(width=0.0625)" if tiny else "layer13",
        augment="pad_crop(4) + flip()",
        fraction=0.01 if tiny and not arguments.quick else 1.0,
        precision="fp32" if arguments.cpu else "bf16",
        epochs=arguments.epochs,
        weight_decay=1e-4,
        evaluate_every=arguments.epochs,
        accelerator=device.type,
    )
    results = {"device": "CPU" if arguments.cpu else torch.cuda.get_device_name()}
    images = data.corrupt(
        data.load(config.data, "train", size=config.image_size), fraction=config.fraction, seed=0
    )
    with tempfile.TemporaryDirectory() as folder:
        if arguments.profile:
            profile(config, Path(folder) / "profile")
            return 0
        if not arguments.only:
            compiled = not arguments.uncompiled
            one_by_one(images, config, device, Path(folder), results, compiled=compiled)
        if arguments.cells:
            best = {} if arguments.cpu else {"compile": True}
            seeds = range(arguments.cells)
            # Enough epochs for the first cells to still run when the last ones start.
            longer = config.replace(**best, epochs=5 * config.epochs)
            cells = [cell(longer.replace(seed=seed), folder) for seed in seeds]
            at = plan_resources(arguments.cells, arguments.cells, accelerator=device.type)
            failed = [done for done in run_cells(cells, WORK, at=at) if not done.ok]
            assert not failed, failed
            total = results[f"{arguments.cells} cells"] = together([each.folder for each in cells])
            print(f"  {arguments.cells} cells side by side: {total:,.0f} images/s")
    print(json.dumps(results, indent=2))
    if arguments.write:
        Path(arguments.write).write_text(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
