"""Fill the ledgers in this folder on a machine with one H200.

``python results/reproduce_h200.py next --seconds 560 [--parallel 6] [--out DIR]`` takes the next
open cells of the queue below and says how many minutes remain; repeat the call to go on.
``next --plan`` says it without running anything, line by line. All recipes share one queue, so that
the GPU is never idle. ``--out`` is this folder by default; into another one the entries of this
folder are taken over first, and its ledgers are to be copied back. Data are read from
``$TAMMES_DATA``.

Other phases than ``next`` are parts of the queue, cells that are not in it, and repetitions of the
sessions that the ledgers name. Needs only torch, Lightning, pyarrow and Pillow.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from cell_queue import QueueLine, remaining, run_queue

from tammes.lab.report.paper_comparison_writers import print_table
from tammes.lab.reproduce import recipes
from tammes.lab.reproduce.ledger import Ledger
from tammes.lab.reproduce.run import RunnerSettings, Selection

HERE = Path(__file__).parent
CIFAR, TAILS = ["cifar100"], ["cifar100_lt100", "cifar100_lt10"]
FIVE = [
    f"{loss}{zc}"
    for loss in ("ldam", "normface", "lm_softmax", "cosface", "arcface")
    for zc in ("", "_zc")
]
TEN = ["ce", *(f"{loss}_{s}" for loss in ("cosface", "arcface", "normface") for s in (10, 20, 64))]
SUMS = ["sce+nca", "sce+proto", "bce+nca", "sce_direct_nca", "sce_direct_proto", "bce_direct_nca"]
SINGLE, CROPS = ["sce", "bce", "nca", "proto"], ["way32_cold", "way32_crop8", "way32_crop30"]
FOUR = ["softmax", "divergence", "lsr_0.1", "super_symmetry"]
PAIR = ["sce", "nca", "sce+nca", "sce_direct_nca"]
BCE = ["bce_mean", "bce_mean+nca", "bce_bias", "bce_quarter"]
MAIN = [*SINGLE, "sce+nca", "sce_direct_nca"]
LOST = ["arcface_64", "cosface_64", "ce", "arcface_64_fifth"]
FOUND = ["arcface_30", "arcface_64_margin", "arcface_64_warm"]
IDENTITY_LOSSES = ["softmax", "cosface", "arcface", "lm_softmax"]
TAIL_LOSSES = ["softmax", "logit_adjustment", "ldam_drw", "vs_softmax"]
INNER = [f"inner_{m}" for m in ("-0.5", "-0.3", "-0.1", "-0.05", "0", "+0.1", "+0.3")]
Line = tuple[str, Sequence[str] | None, Sequence[str] | None, int, float]
"""Recipe, rows, columns, seeds, and a guess of the minutes of a cell, six at a time."""
START: list[Line] = [("kobayashi2024/cifar", MAIN, ["way32"], 3, 2.5)]
SEEDS: list[Line] = [
    ("zhou2022/table1", None, ["mnist"], 3, 0.5),
    ("liu2016/mnist", None, None, 3, 1.5),
]
QUEUE: list[Line] = [
    *START,
    # Further seeds on MNIST, some seconds each.
    *SEEDS,
    ("kobayashi2024/cifar", None, ["way32"], 3, 2.5),
    ("kobayashi2024/cifar", None, ["way16"], 3, 2.5),
    ("zhou2022/table1", None, CIFAR, 1, 6.5),
    ("zhou2022/unstable", None, CIFAR, 1, 6.5),
    ("zhou2022/table2", FIVE, TAILS, 1, 1.4),
    ("kobayashi2019/table4", None, CIFAR, 1, 4),
    ("kobayashi2019/table1", None, CIFAR, 1, 4),
    ("kobayashi2019/table3a", None, None, 1, 4),
    ("kobayashi2019/table3b", None, None, 1, 4),
    ("kobayashi2019/discussion", None, CIFAR, 1, 4),
    ("liu2016/cifar", None, CIFAR, 1, 4),
    ("liu2016/fig6", None, CIFAR, 1, 4),
    ("liu2016/fig7", None, CIFAR, 1, 4),
    ("liu2020/table6", None, ["cifar"], 3, 2.5),
    ("liu2020/fig9", None, ["inner"], 3, 2.5),
    ("liu2020/sweep", [*INNER, "negative_softmax"], ["cifar"], 3, 2.5),
    ("liu2020/cub", None, ["resnet12"], 1, 10),
    ("kobayashi2024/cub", PAIR, ["way32"], 1, 5),
    ("kobayashi2024/cifar", PAIR, ["way32_84"], 1, 20),
    ("kobayashi2024/cifar", ["sce_direct_nca", "sce"], ["way32_sibling"], 1, 12),
    ("kobayashi2024/cifar", None, ["random"], 1, 2.5),
    ("kobayashi2024/spectral", None, ["d64"], 1, 2.5),
    # Further seeds of what has one by then.
    ("kobayashi2019/table4", None, CIFAR, 3, 4),
    ("kobayashi2019/table2", None, CIFAR, 3, 4),
    ("liu2016/cifar", None, CIFAR, 3, 4),
    ("kobayashi2024/cub", PAIR, ["way32"], 3, 5),
    ("zhou2022/table1", None, CIFAR, 3, 6.5),
]
MUST: dict[str, list[Line]] = {
    "bce": [("kobayashi2024/cifar", BCE, ["way32"], 1, 2.5)],
    "smoothing": [("liu2020/table6", None, ["cifar"], 1, 2.5)],
    "networks": [
        ("kobayashi2019/table4", None, CIFAR, 1, 4),
        ("kobayashi2019/table4", ["lgm_warm"], CIFAR, 1, 4),
    ],
    "multiples": [("liu2016/cifar", ["m1", "m2", "m3", "m4"], CIFAR, 1, 4)],
    "large": [("kobayashi2024/cifar", ["sce_direct_nca", "bce"], ["way32_84"], 1, 7)],
    "margins": [
        ("zhou2022/table1", [f"{row}{sm}" for row in TEN for sm in ("", "_sm")], CIFAR, 1, 6.5)
    ],
    "epochs": [
        ("zhou2022/table1", ["cosface_20", "cosface_20_sm"], ["cifar100_long"], 1, 6),
    ],
    "tails": [
        ("zhou2022/table2", FIVE[:2], TAILS, 1, 1.4),
        ("zhou2022/table2", FIVE, TAILS, 1, 1.4),
    ],
}
"""Cells of one seed without which a table of a paper cannot be judged, the shortest first."""
PHASES: dict[str, list[Line]] = {
    "start": START,
    "seeds": SEEDS,
    **MUST,
    "must": [line for lines in MUST.values() for line in lines],
    "doctor": [("zhou2022/unstable", [*LOST, *FOUND], ["short"], 1, 1.5)],
    "advice": [
        ("advice/classes", None, ["cifar100"], 2, 0.7),
        ("advice/classes", None, ["omniglot"], 2, 0.4),
        ("advice/identities", None, None, 2, 0.4),
    ],
    "identities": [
        ("identities/audiomnist", IDENTITY_LOSSES, None, 3, 0.5),
        ("identities/chimpanzees", IDENTITY_LOSSES, None, 3, 1),
        ("identities/cub", IDENTITY_LOSSES, None, 3, 1.2),
    ],
    "longtail": [
        ("losses/longtail", TAIL_LOSSES, None, 3, 1.7),
        ("losses/longtail", None, None, 3, 1.7),
    ],
    "noise": [
        ("losses/noise", ["softmax", "cosface", "subcenter_cosface"], None, 3, 1),
        ("losses/noise", None, None, 3, 1.5),
    ],
    "divergence": [
        ("kobayashi2019/table2", FOUR, CIFAR, 3, 4),
        ("kobayashi2019/fig3", None, CIFAR, 3, 4),
    ],
    "mnist": [("zhou2022/table1", None, ["mnist"], 1, 0.5)],
    "plane": [("liu2016/mnist", None, None, 1, 0.5)],
    "crops": [
        ("kobayashi2024/cifar", ["sce", "nca"], CROPS, 1, 2.5),
    ],
    "sweep": [
        ("liu2020/sweep", None, ["cifar"], 1, 2.5),
        ("liu2020/table6", ["cosine", "smoothing", "negative"], ["cifar"], 1, 2.5),
        ("liu2020/fig9", None, ["cifar"], 1, 2.5),
    ],
    "sums": [
        ("kobayashi2024/cifar", [*SINGLE, *SUMS], ["way32_cold", "way16_cold"], 1, 2.5),
    ],
    "ends": [("liu2020/sweep", ["cosine_-0.3", "cosine_+0.2"], ["cifar"], 3, 2.5)],
    "birds": [
        ("kobayashi2024/cub", PAIR, ["way32_former"], 1, 5),
        ("liu2020/cub", ["cosine", "negative_cosine"], ["resnet12_adam"], 1, 4),
    ],
    "prototypes": [("kobayashi2024/cifar", ["sce+proto", "sce_direct_proto"], ["way32"], 3, 2.5)],
    "negative": [
        ("liu2020/table6", None, ["cifar"], 3, 2.5),
        ("liu2020/sweep", ["inner_0", "inner_-0.3"], ["cifar"], 3, 2.5),
        ("liu2020/fig9", None, ["inner"], 3, 2.5),
    ],
    "floor": [("liu2016/cifar", ["m4_floor"], CIFAR, 1, 4)],
    "long": [("kobayashi2024/cifar", ["nca", "sce_direct_nca"], ["way32_long"], 1, 5)],
}  # fmt: skip


def queue_lines(chosen: Sequence[Line]) -> list[QueueLine]:
    """Load the recipes of some lines."""
    loaded = {name: recipes.load(name) for name, *_ in chosen}
    return [
        QueueLine(Selection(loaded[name], rows, columns, seeds), minutes)
        for name, rows, columns, seeds, minutes in chosen
    ]


def main(words: Sequence[str] | None = None) -> int:
    """Run the phases that are named; return 0 if nothing is open."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("phases", nargs="+", choices=["next", *PHASES])
    parser.add_argument("--out", default=HERE, type=Path)
    parser.add_argument("--seconds", type=float, default=560)
    parser.add_argument("--parallel", type=int, default=None)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--plan", action="store_true")
    arguments = parser.parse_args(words)
    out, quick = arguments.out, arguments.quick
    named = [line for name in arguments.phases for line in PHASES.get(name, QUEUE)]
    lines = queue_lines(named)
    if arguments.plan:
        for (name, _, columns, *_), line in zip(named, lines, strict=True):
            own = remaining([line], out, quick=quick, workers=arguments.parallel, beside=lines)
            print(f"{name}, {', '.join(columns or ['all columns'])}: {own}")
        left = remaining(lines, out, quick=quick, workers=arguments.parallel)
    else:
        engine = RunnerSettings(workers=arguments.parallel)
        left = run_queue(
            lines, out, seconds=arguments.seconds, known=HERE, quick=quick, engine=engine
        )
        for recipe in {
            line.selection.recipe.name: line.selection.recipe for line in lines
        }.values():
            path = out / ("quick" if quick else "") / f"{recipe.name}.json"
            if path.exists():
                print(print_table(recipe, Ledger.at(path, recipe, quick=quick)))
    print(left)
    return 1 if left.cells else 0


if __name__ == "__main__":
    raise SystemExit(main())
