"""Train with Accelerate: any number of processes, accumulated gradients, a resumable state.

    python examples/accelerate_loop.py
    torchrun --nproc-per-node 2 examples/accelerate_loop.py

``MarginModel`` joins backbone and criterion, so that ``prepare`` moves and wraps the prototypes
with all other parameters, and ``save_state`` saves them.
"""

import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tammes
from tammes.integrations.huggingface import MarginModel


def digits():
    data = load_digits()
    examples = TensorDataset(torch.tensor(data.data).float() / 16, torch.tensor(data.target))
    return torch.utils.data.Subset(examples, range(1400)), examples[1400:]


def build(accelerator, examples):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))
    criterion = tammes.CosFace(embedding_size=32, num_classes=10, margin=0.2, scale=16.0)
    model = MarginModel(network, criterion)
    groups = criterion.param_groups(network, lr=0.01, head_lr=0.1, weight_decay=5e-4)
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    # 32 examples in a step, over all processes and accumulated batches.
    loader = DataLoader(examples, batch_size=16 // accelerator.num_processes, shuffle=True)
    return accelerator.prepare(model, optimizer, loader)


def train(accelerator, model, optimizer, loader, epochs):
    model.train()
    for _ in range(epochs):
        for images, labels in loader:
            with accelerator.accumulate(model):
                loss = model(pixel_values=images, labels=labels).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.print(f"loss {loss.item():.3f}")


def main(epochs=6, path=None):
    """Train half, save, load into new objects, train the rest; returns the test accuracy."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    training, (images, labels) = digits()
    with tempfile.TemporaryDirectory() as folder:
        # All processes load what the first one saves.
        (path,) = broadcast_object_list([path or folder])
        parts = build(accelerator, training)
        train(accelerator, *parts, epochs // 2)
        accelerator.save_state(path)

        accelerator.free_memory(*parts)
        model, optimizer, loader = build(accelerator, training)
        accelerator.load_state(path)
        train(accelerator, model, optimizer, loader, epochs - epochs // 2)
        accelerator.wait_for_everyone()

    with torch.no_grad():
        predicted = model.eval()(pixel_values=images).logits.argmax(1)
    accuracy = (predicted == labels).float().mean().item()
    accelerator.print(f"test accuracy {accuracy:.3f}")
    accelerator.end_training()
    return accuracy


if __name__ == "__main__":
    main()
