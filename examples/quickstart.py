"""Compare the accuracy and the margins of three losses on scikit-learn's digits.

    python examples/quickstart.py

The same small network is trained with softmax, CosFace and LM-Softmax. Only the criterion differs.
"""

import math
import statistics

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import tammes

SIZE, CLASSES = 32, 10

CRITERIA = {
    "softmax": lambda: tammes.Softmax(SIZE, CLASSES),
    "CosFace": lambda: tammes.CosFace(SIZE, CLASSES, margin=0.35, scale=16.0),
    "LM-Softmax": lambda: tammes.LMSoftmax(SIZE, CLASSES, scale=16.0),
}


def digits():
    """Return training and test images, as rows in [0, 1], with their labels."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images / 16, labels, test_size=0.25, random_state=0, stratify=labels)
    train_x, test_x, train_y, test_y = map(torch.as_tensor, parts)
    return (train_x.float(), train_y), (test_x.float(), test_y)


def train(criterion, images, labels, epochs):
    network = nn.Sequential(
        nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, SIZE)
    )
    # The criterion owns the prototypes: its param_groups covers both.
    groups = criterion.param_groups(network, lr=0.1, weight_decay=5e-4)
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    steps = epochs * math.ceil(len(images) / 64)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(epochs):
        for batch in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            criterion(network(images[batch]), labels[batch]).backward()
            optimizer.step()
            schedule.step()
    return network.eval()


@torch.no_grad()
def measure(network, criterion, images, labels):
    """Return the accuracy and the margins in angles and cosines, for any loss."""
    features = network(images)
    correct = criterion.logits(features).argmax(1) == labels
    prototypes = nn.functional.normalize(criterion.head.weight)
    between = (prototypes @ prototypes.T).fill_diagonal_(-1).max().clamp(-1, 1)
    split = tammes.split(nn.functional.normalize(features) @ prototypes.T, labels)
    sample_margin = split.target - split.hardest
    return {
        "accuracy": 100 * correct.float().mean().item(),
        "class margin": math.degrees(between.acos()),
        "mean": sample_margin.mean().item(),
        "minimum": sample_margin.min().item(),
    }


def main(seeds=3, epochs=20):
    """Train every loss with every seed; returns the measures of each run."""
    training, testing = digits()
    runs = {}
    for name, make in CRITERIA.items():
        runs[name] = []
        for seed in range(seeds):
            torch.manual_seed(seed)
            criterion = make()
            network = train(criterion, *training, epochs)
            runs[name].append(measure(network, criterion, *testing))
    print(table(runs, seeds, len(testing[0])))
    return runs


def table(runs, seeds, tested):
    columns = {
        "accuracy": "{:.1f}",
        "class margin": "{:.1f}",
        "mean": "{:.2f}",
        "minimum": "{:.2f}",
    }
    lines = [
        f"scikit-learn's digits, {tested} test images, {seeds} seeds, mean ± standard deviation",
        "",
        f"{'':11}{'accuracy':>13}{'class margin':>15}{'sample margin (cosine)':>27}",
        f"{'':11}{'%':>13}{'degrees':>15}{'mean':>14}{'minimum':>13}",
    ]
    for name, results in runs.items():
        cells = []
        for column, form in columns.items():
            values = [result[column] for result in results]
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            cells.append(f"{form.format(statistics.mean(values))} ± {form.format(spread)}")
        lines.append("{:11}{:>13}{:>15}{:>14}{:>13}".format(name, *cells))
    best, largest = math.degrees(math.acos(-1 / (CLASSES - 1))), CLASSES / (CLASSES - 1)
    lines += [
        f"{'optimum':11}{'100.0':>13}{best:15.1f}{largest:14.2f}{largest:13.2f}",
        "",
        "class margin: smallest angle between two prototypes.",
        "sample margin: cosine to the own prototype minus that to the nearest other.",
        "Next: examples/plain_torch.py (a training loop), docs/losses.md (every loss).",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    torch.set_num_threads(1)  # products this small gain nothing from more threads
    main()
