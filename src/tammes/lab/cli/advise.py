"""The command ``tammes advise``."""

import argparse
import json

from tammes.advise.advice import advise
from tammes.advise.workload import CPU, DTYPES, OPTIMIZERS, Machine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what ``tammes advise`` takes to a parser."""
    parser.description = (
        "Say which margins and scales are possible for a number of classes and dimensions, what to "
        "begin with, what cannot train, and what a step costs."
    )
    add = parser.add_argument
    add("--classes", type=int, required=True, metavar="C", help="number of classes")
    add("--dim", type=int, required=True, metavar="D", help="size of a feature")
    add(
        "--batch",
        type=int,
        default=256,
        metavar="N",
        help="examples in a step, over all GPUs (%(default)s)",
    )
    add("--gpus", type=int, default=1, metavar="G", help="number of GPUs (%(default)s)")
    add(
        "--dtype",
        choices=[*DTYPES],
        default="float32",
        help="what prototypes are stored in (%(default)s)",
    )
    add("--autocast", choices=["bfloat16", "float16"], help="what products are computed in")
    add(
        "--optimizer",
        choices=[*OPTIMIZERS],
        default="momentum",
        help="momentum: SGD with it (%(default)s)",
    )
    add("--lr", type=float, metavar="X", help="learning rate of the head")
    add("--samples-per-class", type=float, metavar="X", help="training examples of a class")
    add(
        "--imbalance",
        type=float,
        default=1.0,
        metavar="X",
        help="largest class over smallest (%(default)s)",
    )
    add("--loss", metavar="NAME", help="a loss, or several joined by +, the main one first")
    add("--scale", type=float, metavar="X", help="scale, if it is decided already")
    add("--margin", type=float, metavar="X", help="margin, if it is decided; radians for angles")
    add("--annealing", action="store_true", help="blend of l_softmax or sphereface is annealed")
    add(
        "--posterior",
        type=float,
        default=0.9,
        metavar="P",
        help="posterior wanted on a prototype (%(default)s)",
    )
    add(
        "--sample-rate",
        type=float,
        default=0.1,
        metavar="R",
        help="share of classes sampled (%(default)s)",
    )
    add("--device", choices=["cuda", "cpu"], default="cuda", help="what it runs on (%(default)s)")
    add("--memory", type=float, metavar="GIB", help="memory of a GPU; that of an H200 by default")
    add("--tflops", type=float, metavar="X", help="rate of float32 products, in 10^12 per second")
    add("--bandwidth", type=float, metavar="GB", help="memory traffic, in 10^9 bytes per second")
    add("--json", action="store_true", help="print JSON in place of text")


def run(arguments: argparse.Namespace) -> int:
    """Do what ``tammes advise`` is asked to.

    Args:
        arguments: parsed with :func:`add_arguments`.

    Returns:
        The exit code.
    """
    settings = vars(arguments).copy()
    as_json = settings.pop("json")
    machine = _machine(
        settings["device"],
        memory=settings.pop("memory"),
        tflops=settings.pop("tflops"),
        bandwidth=settings.pop("bandwidth"),
    )
    advice = advise(**settings, machine=machine)
    if as_json:
        print(json.dumps(advice.to_dict(), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        print(advice)
    return 0


def _machine(
    device: str, *, memory: float | None, tflops: float | None, bandwidth: float | None
) -> Machine:
    given = {"--memory": memory, "--tflops": tflops, "--bandwidth": bandwidth}
    for name, value in given.items():
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{name} is expected to be above 0, got {value:g}")
    usual = CPU if device == "cpu" else Machine()
    if all(value is None for value in given.values()):
        return usual
    # The rate in half precision is not asked for; it keeps its ratio to the other.
    flops = usual.flops if tflops is None else tflops * 1e12
    return Machine(
        name="CPU" if device == "cpu" else "GPU",
        memory=usual.memory if memory is None else memory * 2**30,
        flops=flops,
        half_flops=flops * usual.half_flops / usual.flops,
        bandwidth=usual.bandwidth if bandwidth is None else bandwidth * 1e9,
        link=usual.link,
        launch=usual.launch,
    )
