"""The command ``tammes advise``."""

import argparse
import json

from tammes.advise.advice import advise
from tammes.advise.workload import CPU, DTYPES, OPTIMIZERS, Machine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tammes advise`` to a parser."""
    parser.description = (
        "For a number of classes and dimensions: the feasible margins and scales, settings to "
        "start from, settings that cannot train, and the memory and time of a step."
    )
    add = parser.add_argument
    add("--classes", type=int, required=True, metavar="C", help="number of classes")
    add("--dim", type=int, required=True, metavar="D", help="dimension of the features")
    add(
        "--batch",
        type=int,
        default=256,
        metavar="N",
        help="batch size, summed over all GPUs (%(default)s)",
    )
    add("--gpus", type=int, default=1, metavar="G", help="number of GPUs (%(default)s)")
    add(
        "--dtype",
        choices=[*DTYPES],
        default="float32",
        help="dtype of the prototypes (%(default)s)",
    )
    add(
        "--autocast",
        choices=["bfloat16", "float16"],
        help="dtype of matrix products under autocast",
    )
    add(
        "--optimizer",
        choices=[*OPTIMIZERS],
        default="momentum",
        help="optimizer of the head; momentum is SGD with momentum (%(default)s)",
    )
    add("--lr", type=float, metavar="X", help="learning rate of the head")
    add("--samples-per-class", type=float, metavar="X", help="training examples per class")
    add(
        "--imbalance",
        type=float,
        default=1.0,
        metavar="X",
        help="size of the largest class over the smallest (%(default)s)",
    )
    add("--loss", metavar="NAME", help="one loss, or several joined by +, the main one first")
    add("--scale", type=float, metavar="X", help="scale, if already fixed")
    add("--margin", type=float, metavar="X", help="margin, if already fixed; in radians for angles")
    add("--annealing", action="store_true", help="anneal the blend of l_softmax or sphereface")
    add(
        "--posterior",
        type=float,
        default=0.9,
        metavar="P",
        help="target posterior of a feature at its prototype (%(default)s)",
    )
    add(
        "--sample-rate",
        type=float,
        default=0.1,
        metavar="R",
        help="share of the classes sampled per step (%(default)s)",
    )
    add(
        "--device", choices=["cuda", "cpu"], default="cuda", help="device to plan for (%(default)s)"
    )
    add("--memory", type=float, metavar="GIB", help="memory of one GPU; an H200 by default")
    add(
        "--tflops",
        type=float,
        metavar="X",
        help="float32 throughput, in 10^12 operations per second",
    )
    add("--bandwidth", type=float, metavar="GB", help="memory bandwidth, in 10^9 bytes per second")
    add("--json", action="store_true", help="print JSON instead of text")


def run(arguments: argparse.Namespace) -> int:
    """Run ``tammes advise``.

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
    # There is no flag for half precision: it keeps its ratio to float32.
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
