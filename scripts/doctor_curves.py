"""Draw the curves of docs/doctor.md: each illness beside a healthy twin, from small runs on a CPU.

``python scripts/doctor_curves.py`` writes docs/images/doctor.svg and prints what the doctor finds
in each run. A minute on one core.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import tammes
from tammes.advise.feasibility import KINDS
from tammes.advise.warnings import anchors
from tammes.geometry import largest_class_margin
from tammes.lab.data import load
from tammes.optional import require

OUT = Path(__file__).parents[1] / "docs" / "images" / "doctor.svg"
ILL, HEALTHY = "#c0392b", "#2471a3"
EVERY = 20
"""Steps between two looks."""


class Curve(NamedTuple):
    """One line of a panel."""

    label: str
    x: list[float]
    y: list[float]


def network(inputs: int, size: int) -> nn.Module:
    """Build a small network that ends in a ReLU, as most backbones do."""
    parts: list[nn.Module] = []
    for before, after in ((inputs, 256), (256, 256), (256, size)):
        parts += [nn.Linear(before, after), nn.BatchNorm1d(after), nn.ReLU()]
    return nn.Sequential(*parts)


def digits() -> Callable[[], tuple[Tensor, Tensor]]:
    """Return a function that draws batches of digits."""
    images = load("digits", "train")
    pixels, labels = images.pixels.flatten(1).float() / 16, images.labels
    return lambda: (lambda i: (pixels[i], labels[i]))(torch.randint(len(labels), (128,)))


def clusters(classes: int = 200) -> Callable[[], tuple[Tensor, Tensor]]:
    """Return a function that draws batches of overlapping clusters: a hard task of many classes."""
    means = torch.randn(classes, 32)

    def draw() -> tuple[Tensor, Tensor]:
        labels = torch.randint(classes, (128,))
        return means[labels] + 2 * torch.randn(128, 32), labels

    return draw


def course(
    title: str,
    data: Callable[[], Callable[[], tuple[Tensor, Tensor]]],
    loss: tammes.Loss,
    head: Callable[[int, int], tammes.Head],
    *,
    lr: float,
    steps: int = 200,
    every: int = EVERY,
    trained: bool = True,
    weight_decay: float = 5e-4,
) -> list[dict[str, Any]]:
    """Train, look every few steps, and return what was measured."""
    torch.manual_seed(0)
    draw = data()
    inputs, labels = draw()
    classes = 200 if inputs.shape[1] == 32 else 10
    net = network(inputs.shape[1], 64)
    # One of the runs is to end in numbers that are not finite.
    criterion = tammes.Criterion(head(64, classes), loss, validate=None)
    groups = criterion.param_groups(net, lr=lr, weight_decay=weight_decay)
    params = groups if trained else groups[:1]
    optimizer, means, losses = torch.optim.SGD(params, momentum=0.9), [], []
    seen: list[dict[str, Any]] = []
    found: dict[str, int] = {}
    for step in range(steps):
        inputs, labels = draw()
        features = net(inputs)
        if step % every == 0:
            means, losses = [*means, *([fmean(losses)] if losses else [])], []
            diagnosis = tammes.diagnose(
                criterion, features, labels, optimizer=optimizer, losses=means, steps=step
            )
            seen.append({"step": step, **diagnosis.measured})
            for finding in diagnosis.findings:
                found.setdefault(finding.name, step)
        value = criterion(features, labels)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    print(
        f"{title}: accuracy {seen[-1]['accuracy']:.2f}, first found at step: {found or 'healthy'}"
    )
    return seen


def curve(label: str, seen: list[dict[str, Any]], key: str, term: str = "") -> Curve:
    """Return a measured number over the steps."""
    rows = [row["terms"][term] if term else row for row in seen]
    return Curve(label, [row["step"] for row in seen], [row.get(key, math.nan) for row in rows])


def cosine(scale: float) -> Callable[[int, int], tammes.Head]:
    """Return a builder of cosine heads."""
    return lambda size, classes: tammes.CosineHead(size, classes, scale=scale)


def linear(size: int, classes: int) -> tammes.Head:
    """Build a linear head."""
    return tammes.LinearHead(size, classes)


def panels() -> Iterator[tuple[str, str, str, bool, list[Curve]]]:
    """Yield name, y label, x label, whether y is logarithmic, and curves of each panel."""
    arc = course("ArcFace", clusters, tammes.arcface(), cosine(64), lr=0.5, steps=400)
    cos = course("CosFace", clusters, tammes.cosface(0.5), cosine(64), lr=0.5, steps=400)
    calm = course("ArcFace m=0.1", clusters, tammes.arcface(0.1), cosine(64), lr=0.02, steps=400)
    step, ours = "step", "CosFace, m = 0.5, lr 0.5"
    theirs, low = "ArcFace, m = 0.5, lr 0.5", "ArcFace, m = 0.1, lr 0.02"
    yield "prototypes-collapsed", "mean cosine of prototypes", step, False, [
        curve(theirs, arc, "prototype_cosine"), curve(ours, cos, "prototype_cosine"),
    ]  # fmt: skip
    yield "features-collapsed", "mean cosine of features", step, False, [
        curve(theirs, arc, "feature_cosine"), curve(low, calm, "feature_cosine"),
    ]  # fmt: skip
    yield "loss-at-chance", "loss", step, False, [
        curve(theirs, arc, "loss"), curve(low, calm, "loss"),
    ]  # fmt: skip
    yield "features-dead", "live dimensions of 64", step, False, [
        curve(theirs, arc, "live_dimensions"), curve(low, calm, "live_dimensions"),
    ]  # fmt: skip
    high = course("softmax, lr 5", digits, tammes.softmax(), linear, lr=5)
    usual = course("softmax, lr 0.1", digits, tammes.softmax(), linear, lr=0.1)
    yield "features-zero", "share of zero features", step, False, [
        curve("softmax, lr 5", high, "zero_features"),
        curve("softmax, lr 0.1", usual, "zero_features"),
    ]  # fmt: skip
    jump = course("first steps, lr 5", digits, tammes.softmax(), linear, lr=5, steps=8, every=1)
    rest = course("first steps, lr 0.1", digits, tammes.softmax(), linear, lr=0.1, steps=8, every=1)
    yield "learning-rate", "loss", step, False, [
        curve("softmax, lr 5", jump, "loss"), curve("softmax, lr 0.1", rest, "loss"),
    ]  # fmt: skip
    wild = course("not finite", digits, tammes.softmax(), linear, lr=1e6, steps=8, every=1)
    yield "not-finite", "loss", step, True, [
        curve("softmax, lr 1e6", wild, "loss"), curve("softmax, lr 0.1", rest, "loss"),
    ]  # fmt: skip
    flat = course("m=-0.5", digits, tammes.cosface(-0.5), cosine(64), lr=0.1)
    good = course("m=-0.02", digits, tammes.cosface(-0.02), cosine(64), lr=0.1)
    yield "saturated", "sensitivity", step, True, [
        curve("m = -0.5, s = 64", flat, "sensitivity"),
        curve("m = -0.02, s = 64", good, "sensitivity"),
    ]  # fmt: skip
    yield "negative-margin", "training accuracy", step, False, [
        curve("m = -0.5, s = 64", flat, "accuracy"), curve("m = -0.02, s = 64", good, "accuracy"),
    ]  # fmt: skip
    both, even = tammes.softmax() + tammes.nca(), tammes.softmax() + 0.02 * tammes.nca()
    drowned = course("softmax + nca", clusters, both, linear, lr=0.1)
    evened = course("softmax + 0.02 nca", clusters, even, linear, lr=0.1)
    yield "gradient-ratio", "gradient of the term", step, True, [
        curve("nca", drowned, "gradient", "nca"),
        curve("softmax", drowned, "gradient", "softmax"),
    ]  # fmt: skip
    yield "first-gradient", "gradient over that of softmax", step, True, [
        Curve("nca", [r["step"] for r in drowned],
              [r["terms"]["nca"]["gradient"] / 0.55 for r in drowned]),
        Curve("0.02 nca", [r["step"] for r in evened],
              [r["terms"]["nca"]["gradient"] / 0.55 for r in evened]),
    ]  # fmt: skip
    left = course("not trained", digits, tammes.cosface(), cosine(16), lr=0.02, trained=False)
    held = course("trained", digits, tammes.cosface(), cosine(16), lr=0.02)
    yield "prototypes-not-trained", "loss", step, False, [
        curve("not held", left, "loss"), curve("held", held, "loss"),
    ]  # fmt: skip
    counts = [4, 8, 16, 32, 64, 128, 256, 512, 1024]
    limits = {d: [largest_class_margin(c, d).angle for c in counts] for d in (3, 64)}
    yield "margin-infeasible", "largest margin of CosFace", "classes", False, [
        Curve(f"{d} dimensions", [math.log2(c) for c in counts],
              [KINDS["cosface"].largest(angle) for angle in limits[d]]) for d in (3, 64)
    ]  # fmt: skip
    scales = [float(s) for s in range(1, 25)]
    yield "scale-small", "largest mean posterior", "scale", False, [
        Curve(f"{c:,} classes", scales,
              [1 / (1 + (c - 1) * math.exp(-s * c / (c - 1))) for s in scales])
        for c in (1000, 10)
    ]  # fmt: skip
    sizes = [float(size) for size in range(8, 513, 8)]
    yield "few-examples", "share with company", "examples in a batch", False, [
        Curve(f"{c:,} classes", sizes, [anchors(c, int(n)) for n in sizes]) for c in (1000, 64)
    ]  # fmt: skip


def main() -> None:
    """Train, draw and write the figure."""
    pyplot = require("matplotlib.pyplot", extra="lab")
    pyplot.rcParams.update({"font.size": 8, "svg.fonttype": "none", "svg.hashsalt": "tammes"})
    figure, axes = pyplot.subplots(5, 3, figsize=(10, 13), layout="constrained")
    for axis, (name, y, x, logarithmic, curves) in zip(axes.flat, panels(), strict=True):
        for color, each in zip((ILL, HEALTHY), curves, strict=True):
            axis.plot(each.x, each.y, color=color, label=each.label, linewidth=1.4)
        axis.set_title(name)
        axis.set_ylabel(y)
        axis.set_xlabel("log2 of the classes" if x == "classes" else x)
        if logarithmic:
            axis.set_yscale("log")
        axis.legend(frameon=False, fontsize=7)
        axis.grid(alpha=0.3)
    OUT.parent.mkdir(exist_ok=True)
    figure.savefig(OUT, metadata={"Date": None})
    print(f"{OUT}: {OUT.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main()
