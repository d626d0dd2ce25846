"""Plain training loop with two parameter groups, margin warm-up and a resumable checkpoint.

    python examples/plain_torch.py

The criterion owns the prototypes, so treat it like the network: pass it to the optimizer, move it
to the device, and save it in the checkpoint.
"""

import tempfile

import torch
from sklearn.datasets import load_digits
from torch import nn

import tammes
from tammes.schedules import WarmUp


def build(epochs):
    network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))
    criterion = tammes.CosFace(embedding_size=32, num_classes=10, margin=0.35, scale=16.0)
    # Each call is one step: the margin reaches its final value halfway through training.
    criterion.schedule(margin=WarmUp(0.0, 0.35, steps=epochs * 11))
    groups = criterion.param_groups(network, lr=0.01, head_lr=0.1, weight_decay=5e-4)
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    return network, criterion, optimizer


def save(path, **parts):
    torch.save({name: part.state_dict() for name, part in parts.items()}, path)


def load(path, **parts):
    saved = torch.load(path, weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(saved[name])


def train(network, criterion, optimizer, images, labels, epochs):
    network.train()
    criterion.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(images)).split(64):
            loss = criterion(network(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"loss {loss.item():.3f}, margin {criterion.schedules['margin'].value.item():.2f}")


def main(epochs=10, path=None):
    """Train half, save, load into new objects, train the rest; returns the test accuracy."""
    torch.manual_seed(0)
    data = load_digits()
    images, labels = torch.tensor(data.data).float() / 16, torch.tensor(data.target)
    with tempfile.TemporaryDirectory() as folder:
        path = path or f"{folder}/checkpoint.pt"
        network, criterion, optimizer = build(epochs)
        train(network, criterion, optimizer, images[:1400], labels[:1400], epochs // 2)
        save(path, network=network, criterion=criterion, optimizer=optimizer)

        network, criterion, optimizer = build(epochs)
        load(path, network=network, criterion=criterion, optimizer=optimizer)
        train(network, criterion, optimizer, images[:1400], labels[:1400], epochs - epochs // 2)

    with torch.no_grad():
        # Logits without margin: the argmax is the prediction.
        predicted = criterion.logits(network.eval()(images[1400:])).argmax(1)
    accuracy = (predicted == labels[1400:]).float().mean().item()
    print(f"test accuracy {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    main()
