"""Fill the ledgers in this folder on a machine with one H200.

``python results/reproduce_h200.py PHASE... --out DIR --seconds 560 [--parallel 6]`` runs the
cells of the given phases until they are done or time is up; repeat the call to resume. Unlike
``tammes reproduce``, all recipes share one queue, so that the GPU is never idle. Needs only torch,
Lightning, pyarrow and Pillow.
"""

import argparse
import signal

from tammes.lab.report.paper_comparison_writers import print_table
from tammes.lab.reproduce import recipes
from tammes.lab.reproduce.run import RunnerSettings, Selection, reproduce

CIFAR, TAILS = ["cifar100"], ["cifar100_lt100", "cifar100_lt10"]
SIDES = [f"{name}_{s}" for name in ("normface", "cosface", "arcface") for s in (64, 20, 10)]
LOSSES = ["normface", "lm_softmax", "cosface", "arcface", "ldam"]
SUMS = ["sce+nca", "sce+proto", "bce+nca", "sce_direct_nca", "sce_direct_proto", "bce_direct_nca"]
CROPS = ["way32", "way32_crop8", "way32_crop30"]
PAIR = ["sce", "nca", "sce+nca", "sce_direct_nca"]
PHASES = {
    # Recipe, rows, columns, seeds.
    "divergence": [
        ("kobayashi2019/table2", ["softmax", "divergence", "lsr_0.1", "super_symmetry"], CIFAR, 3),
        ("kobayashi2019/fig3", None, CIFAR, 3),
    ],
    "mnist": [("zhou2022/table1", None, ["mnist"], 1)],
    "plane": [("liu2016/mnist", None, None, 1)],
    "margins": [
        ("zhou2022/table1", [r for e in ("ce", *SIDES) for r in (e, f"{e}_sm")], CIFAR, 1),
        ("zhou2022/fig9", None, CIFAR, 1),
        ("zhou2022/fig1", None, CIFAR, 1),
    ],
    "tails": [("zhou2022/table2", [r for e in LOSSES for r in (e, f"{e}_zc")], TAILS, 1)],
    "losses": [
        ("kobayashi2019/table4", None, CIFAR, 1),
        ("kobayashi2019/discussion", None, CIFAR, 1),
    ],
    "degraded": [
        ("kobayashi2019/table3a", None, ["fraction_0.5", "fraction_0.7"], 1),
        ("kobayashi2019/table3b", None, ["noise_0.2", "noise_0.4"], 1),
    ],
    "weights": [("kobayashi2019/table1", None, CIFAR, 1)],
    "cifar": [("liu2016/cifar", None, CIFAR, 1), ("liu2016/fig6", None, CIFAR, 1)],
    "crops": [
        ("kobayashi2024/cifar", ["sce", "nca"], CROPS, 1),
    ],
    "sweep": [
        ("liu2020/sweep", None, ["cifar"], 1),
        ("liu2020/table6", None, ["cifar"], 1),
        ("liu2020/fig9", None, ["cifar"], 1),
    ],
    "sums": [
        ("kobayashi2024/cifar", ["sce", "bce", "nca", "proto", *SUMS], ["way32", "way16"], 1),
    ],
    "ends": [("liu2020/sweep", ["cosine_-0.3", "cosine_+0.2"], ["cifar"], 3)],
    "birds": [
        ("kobayashi2024/cub", PAIR, ["way32"], 1),
        ("liu2020/cub", ["cosine", "negative_cosine"], ["resnet12"], 1),
    ],
    "long": [("kobayashi2024/cifar", ["nca", "sce_direct_nca"], ["way32_long"], 1)],
    "large": [("kobayashi2024/cifar", ["sce", "sce_direct_nca"], ["way32_84"], 1)],
    "spectral": [("kobayashi2024/spectral", None, ["d64"], 1)],
}


def main() -> None:
    """Run the phases that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("phases", nargs="+", choices=PHASES)
    parser.add_argument("--out", required=True)
    parser.add_argument("--seconds", type=int, default=560)
    parser.add_argument("--parallel", type=int, default=None)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    selections = [
        Selection(recipes.load(name), rows, columns, seeds)
        for phase in arguments.phases
        for name, rows, columns, seeds in PHASES[phase]
    ]
    # As Ctrl-C would: all processes end in order, and the ledgers have what was done.
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(arguments.seconds)
    try:
        engine = RunnerSettings(workers=arguments.parallel)
        ledgers = reproduce(selections, arguments.out, quick=arguments.quick, engine=engine)
    except KeyboardInterrupt:
        print(f"time is up; the ledgers are in {arguments.out}")
        return
    for selection, ledger in zip(selections, ledgers, strict=True):
        print(print_table(selection.recipe, ledger))


if __name__ == "__main__":
    main()
