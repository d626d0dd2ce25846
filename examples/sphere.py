"""Eight classes on the sphere: the optimum of a loss, and where training with it ends.

    python examples/sphere.py                  # 10 seeds, under two minutes on one core
    python examples/sphere.py --seeds 3 --png sphere.png

The toy problem of Zhou et al., Learning Towards the Largest Margins, ICLR 2022, Fig. 1. Eight
prototypes and one free feature per class are trained with SGD: learning rate 0.1 with cosine decay,
momentum 0.9, 3000 steps, renormalised to unit length after each. Eight directions can be 74.86
degrees apart; the figure shows LM-Softmax close to that and the other losses far below. Solved to
the optimum instead, all losses end at the same angle: the gap comes from training, where the
softmax saturates, not from the optimum of the losses.
"""

import argparse
import math
from collections.abc import Sequence
from statistics import mean, stdev

import torch
from torch import Tensor

import tammes
from tammes.metrics.functional import class_margin
from tammes.similarity import Cosine, unit

CLASSES, SIZE = 8, 3
LOSSES = {
    "NormFace": tammes.normface(),
    "CosFace 0.1": tammes.cosface(margin=0.1),
    "CosFace 0.35": tammes.cosface(margin=0.35),
    "ArcFace 0.5": tammes.arcface(margin=0.5),
    "LM-Softmax": tammes.lm_softmax(),
}
SCALES = (20.0, 64.0)


def start(seeds: int) -> tuple[Tensor, Tensor]:
    """Draw random prototypes and features of every seed, each of shape (seeds, 8, 3)."""
    draws = [
        torch.randn(2, CLASSES, SIZE, generator=torch.Generator().manual_seed(seed)).double()
        for seed in range(seeds)
    ]
    prototypes, features = unit(torch.stack(draws, 1))
    return prototypes, features


def loss(term: tammes.Term, scale: float, prototypes: Tensor, features: Tensor) -> Tensor:
    """Mean loss of every seed, shape (seeds,). The seeds are stacked: each row has its own 8."""
    prototypes, features = unit(prototypes), unit(features)
    seeds, reads = len(prototypes), term.definition.reads
    split = tammes.split(
        (features @ prototypes.mT).flatten(0, 1),
        torch.arange(CLASSES).repeat(seeds),
        scale=scale,
        # The similarity to the own prototype is computed separately, to keep small angles exact.
        own=Cosine().own(features.flatten(0, 1), prototypes.flatten(0, 1), reads),
        reads=reads,
    )
    return term(split).view(seeds, CLASSES).mean(1)


def train(
    term: tammes.Term, scale: float, *, seeds: int = 10, steps: int = 3000
) -> tuple[Tensor, Tensor]:
    """Return prototypes and features after SGD, each of shape (seeds, 8, 3)."""
    points = [tensor.requires_grad_() for tensor in start(seeds)]
    optimizer = torch.optim.SGD(points, lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        # Sum over seeds, so that each gets the gradient of its own mean.
        loss(term, scale, *points).sum().backward()
        optimizer.step()
        schedule.step()
        # Otherwise the points grow, which slows them down and makes the gap even larger.
        with torch.no_grad():
            for tensor in points:
                tensor.copy_(unit(tensor))
    prototypes, features = (tensor.detach() for tensor in points)
    return prototypes, features


def solve(term: tammes.Term, scale: float, *, starts: int = 2) -> tuple[Tensor, Tensor]:
    """Return the optimal prototypes and features, each of shape (1, 8, 3): the best of two starts.

    L-BFGS on the logarithm of the loss, which does not saturate, with a scale that grows from a
    small value to the final one, so that a start does not get stuck in a poor arrangement.
    """
    found = []
    for pair in zip(*start(starts), strict=True):
        free = [tensor[None].clone().requires_grad_() for tensor in pair]
        for soft in torch.logspace(math.log10(5), math.log10(scale), 4).tolist():
            value = descend(term, soft, free)
        found.append((value, *place(term, *(tensor.detach() for tensor in free))))
    _, prototypes, features = min(found, key=lambda each: each[0])
    return prototypes, features


def place(term: tammes.Term, prototypes: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Unit prototypes, and features close to them."""
    prototypes = unit(prototypes)
    across = offsets - (offsets * prototypes).sum(-1, keepdim=True) * prototypes
    if term.name == "arcface":
        # The angle has a corner at zero; a quadratic parametrisation is smooth there.
        across = across * across.norm(dim=-1, keepdim=True)
    return prototypes, unit(prototypes + across)


def descend(term: tammes.Term, scale: float, free: Sequence[Tensor]) -> float:
    optimizer = torch.optim.LBFGS(
        free,
        max_iter=150,
        tolerance_grad=1e-10,
        tolerance_change=1e-14,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(term, scale, *place(term, *free)).sum()
        # LM-Softmax is a logarithm already.
        value = value if term.name == "lm_softmax" else value.log()
        value.backward()
        return value

    optimizer.step(closure)
    return closure().item()


def margins(prototypes: Tensor) -> list[float]:
    """Class margin of every seed, in degrees."""
    return [float(class_margin(points).angle) for points in prototypes]


def final_points(
    scale: float = 64.0, *, seed: int = 0, steps: int = 3000
) -> dict[str, tuple[Tensor, Tensor]]:
    """Trained prototypes and features of one seed, each of shape (8, 3), by the loss's name."""
    found = {}
    for name, term in LOSSES.items():
        prototypes, features = train(term, scale, seeds=seed + 1, steps=steps)
        found[name] = prototypes[seed], features[seed]
    return found


def draw(path: str, scale: float = 64.0, steps: int = 3000) -> None:
    """Write a picture of the trained prototypes and features of seed 0."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(4 * len(LOSSES), 4.4))
    for column, (name, pair) in enumerate(final_points(scale, steps=steps).items(), 1):
        axes = figure.add_subplot(1, len(LOSSES), column, projection="3d")
        prototypes, features = (tensor.numpy() for tensor in pair)
        axes.quiver(*[[0] * CLASSES] * 3, *prototypes.T, color="tab:red", arrow_length_ratio=0.1)
        axes.scatter(*features.T, color="tab:green", s=40)
        axes.set_title(f"{name}, s = {scale:g}\n{margins(pair[0][None])[0]:.2f}°")
        axes.set_box_aspect((1, 1, 1))
        axes.set(xlim=(-1, 1), ylim=(-1, 1), zlim=(-1, 1), xticks=[], yticks=[], zticks=[])
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def main(seeds=10, steps=3000, png=None):
    """Print the table; returns the trained margins of every seed and the solved one, in degrees."""
    best = tammes.geometry.largest_class_margin(CLASSES, SIZE)
    print(f"Class margin in degrees after training with {seeds} seeds, and at the optimum.")
    print(f"The largest there is for 8 directions: {best.degrees:.3f}")
    print(f"\n{'scale':>5}  {'loss':<13}{'trained, mean ± sd':>20}{'solved':>10}")
    numbers = {}
    for scale in SCALES:
        for name, term in LOSSES.items():
            trained = margins(train(term, scale, seeds=seeds, steps=steps)[0])
            solved = margins(solve(term, scale)[0])[0]
            numbers[scale, name] = trained, solved
            spread = f"± {stdev(trained):5.2f}" if seeds > 1 else ""
            print(f"{scale:>5g}  {name:<13}{mean(trained):>12.2f} {spread:>7}{solved:>10.3f}")
    if png:
        draw(png, steps=steps)
    return numbers


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--png", help="write a picture there; needs matplotlib")
    torch.set_num_threads(1)  # products this small gain nothing from more threads
    main(**vars(parser.parse_args()))
