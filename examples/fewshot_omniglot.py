"""Few-shot on Omniglot: train on 1,028 characters, recognise 423 others from one or five drawings.

    python examples/fewshot_omniglot.py

Needs `tammes[lab]`, and Omniglot in $TAMMES_DATA or from the Hugging Face hub.
"""

import torch

import tammes
from tammes.lab import backbones
from tammes.lab.data import samplers, splits
from tammes.lab.protocols.fewshot import Examples, evaluate


def main(epochs=1, episodes=2000, classes=None):
    """Train, then print and return the accuracies; fewer ``classes`` are quicker."""
    split = splits.read("omniglot")
    base, novel = (
        splits.load_classes("omniglot", part[:classes], size=28)
        for part in (split.base, split.novel)
    )
    torch.manual_seed(0)
    backbone = backbones.build("conv4(width=0.5)", shape=base.shape)
    head = tammes.LinearHead(backbone.num_features, len(base.classes), bias=False)
    criterion = tammes.Criterion(head, tammes.softmax() + tammes.proto())
    optimizer = torch.optim.Adam([*backbone.parameters(), *criterion.parameters()], lr=1e-3)
    # Goes on with the next epoch each time it is gone through.
    sampler = samplers.Episodes(way=16, shot=8, labels=base.labels, seed=0)
    for _ in range(epochs):
        for batch in sampler:
            loss = criterion(backbone(base.pixels[batch] / 255), base.labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    backbone.eval()
    with torch.no_grad():
        features = torch.cat([backbone(some / 255) for some in novel.pixels.split(500)])
    examples = Examples(features, novel.labels, novel.classes)
    rows = evaluate(examples, shots=(1, 5), queries=15, episodes=episodes, method="centroid, l2")
    for row in rows:
        print(f"{row.method:<10}{row.shot}-shot   {row.accuracy.shown()} %")
    return {f"{row.method} {row.shot}": row.accuracy.mean for row in rows}


if __name__ == "__main__":
    main()
