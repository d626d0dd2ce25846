"""Shard the classes over processes: each holds a part of the prototypes, none holds all.

    python examples/sharded.py                          # one process holds all classes
    torchrun --nproc-per-node 2 examples/sharded.py     # two processes hold half each

The backbone is wrapped in DistributedDataParallel, the criterion is not: its head communicates on
its own. Every step samples a fifth of the classes. Halfway through, everything is saved and loaded
again; the checkpoint could be loaded at another world size as well.
"""

import argparse
import gc
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tammes
from tammes import checkpoint

CLASSES, PIXELS, SIZE = 1000, 64, 32
BATCH = 60
"""Examples of a step, over all processes."""


def synthetic(per_class, seed):
    """Draw noisy images of classes that are the same in every process."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(CLASSES, 16, generator=generator)
    lens = torch.randn(16, PIXELS, generator=generator) / 4
    generator.manual_seed(seed)
    labels = torch.arange(CLASSES).repeat_interleave(per_class)
    noise = torch.randn(len(labels), 16, generator=generator)
    return torch.tanh((centres[labels] + 0.4 * noise) @ lens), labels


def build(ranks):
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(PIXELS, 128), nn.ReLU(), nn.Linear(128, SIZE))
    if ranks > 1:
        backbone = DistributedDataParallel(backbone)
    head = tammes.ShardedHead(
        tammes.CosineHead, SIZE, CLASSES, scale=16.0, sample_rate=0.2, correct=True
    )
    criterion = tammes.Criterion(head, tammes.cosface(margin=0.1))
    groups = criterion.param_groups(backbone, lr=0.1, head_lr=1.0)
    return backbone, criterion, torch.optim.SGD(groups, momentum=0.9)


def train(backbone, criterion, optimizer, epochs, rank, ranks):
    images, labels = synthetic(per_class=8, seed=1)
    for epoch in epochs:
        # All processes use the same order, and each takes its part of every global batch.
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(BATCH):
            mine = batch[rank::ranks]
            loss = criterion(backbone(images[mine]), labels[mine])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch + 1}, loss {loss.item():.3f}")


def accuracy(backbone, head, rank, ranks):
    """Share of new images whose class has the highest score over all processes."""
    images, labels = synthetic(per_class=2, seed=2)
    images, labels = images[rank::ranks], labels[rank::ranks]
    with torch.no_grad():
        best = head.top(backbone(images)).classes[:, 0]
    right = torch.tensor([(best == labels).sum(), len(labels)])
    right = head.group.all_reduce(right)
    return (right[0] / right[1]).item()


def main(epochs=6, path=None):
    """Train half, save, load into new objects, train the rest; returns the test accuracy."""
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if ranks > 1:
        dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as folder:
        place = [path or folder]
        if ranks > 1:
            # All processes must write to the same folder: the one of the first process.
            dist.broadcast_object_list(place)
        backbone, criterion, optimizer = build(ranks)
        train(backbone, criterion, optimizer, range(epochs // 2), rank, ranks)
        plain = getattr(backbone, "module", backbone)
        checkpoint.save(
            place[0], criterion, optimizer, epoch=epochs // 2, backbone=plain.state_dict()
        )

        backbone, criterion, optimizer = build(ranks)
        saved = checkpoint.load(place[0], criterion, optimizer)
        getattr(backbone, "module", backbone).load_state_dict(saved["backbone"])
        train(backbone, criterion, optimizer, range(saved["epoch"], epochs), rank, ranks)
        result = accuracy(backbone, criterion.head, rank, ranks)
        if ranks > 1:
            # Wait for all processes to finish reading before the folder is deleted.
            dist.barrier()
            # On CPUs, torch 2.13 may hang if a wrapped backbone outlives the process group.
            del backbone
            gc.collect()
            dist.destroy_process_group()
    if rank == 0:
        print(f"test accuracy {result:.3f}")
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--path", help="folder of the checkpoint")
    main(**vars(parser.parse_args()))
