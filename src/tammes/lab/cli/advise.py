"""The command ``tammes advise``."""

import argparse
import json
from dataclasses import replace
from functools import partial

from tammes.advise.advice import advise
from tammes.advise.workload import DTYPES, MACHINES, OPTIMIZERS, Machine, choose_machine
from tammes.lab.cli.arguments import add_argument


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tammes advise`` to a parser."""
    parser.description = (
        "Say which margins and scales are feasible for a number of classes and dimensions, which "
        "settings to start from, which cannot train, and what memory and time a step takes."
    )
    add = partial(add_argument, parser)
    add("--classes C", "number of classes", type=int, required=True)
    add("--dim D", "dimension of the features", type=int, required=True)
    add("--batch N", "batch size, summed over all GPUs (%(default)s)", 256)
    add("--gpus G", "number of GPUs (%(default)s)", 1)
    add("--dtype", "dtype of the prototypes (%(default)s)", "float32", choices=[*DTYPES])
    autocast = ["bfloat16", "float16"]
    add("--autocast", "dtype of matrix products under autocast", choices=autocast)
    momentum = "optimizer of the head; momentum is SGD with momentum (%(default)s)"
    add("--optimizer", momentum, "momentum", choices=[*OPTIMIZERS])
    add("--lr X", "learning rate of the head", type=float)
    add("--samples-per-class X", "training examples per class", type=float)
    add("--imbalance X", "size of the largest class over the smallest (%(default)s)", 1.0)
    add("--identities", "the model is to tell apart identities that it was not trained on")
    add("--loss NAME", "one loss, or several joined by +, the main one first")
    add("--scale X", "scale, if already fixed", type=float)
    add("--margin X", "margin, if already fixed; in radians for angles", type=float)
    add("--annealing", "anneal the blend of l_softmax or sphereface")
    add("--posterior P", "target posterior of a feature at its prototype (%(default)s)", 0.9)
    add("--sample-rate R", "share of the classes sampled per step (%(default)s)", 0.1)
    add("--subcenters K", "prototypes of a class (%(default)s)", 1)
    machine = "machine to plan for; by default the one at hand"
    add("--machine", machine, choices=[*MACHINES])
    add("--device", "device to plan for; by default that of the machine", choices=["cuda", "cpu"])
    add("--memory GIB", "memory of one GPU, or of the machine", type=float)
    add("--tflops X", "float32 throughput, in 10^12 operations per second", type=float)
    add("--bandwidth GB", "memory bandwidth, in 10^9 bytes per second", type=float)
    add("--json", "print JSON instead of text")


def run(arguments: argparse.Namespace) -> int:
    """Run ``tammes advise`` and return the exit code."""
    settings = vars(arguments).copy()
    as_json = settings.pop("json")
    rates = [settings.pop(name) for name in ("memory", "tflops", "bandwidth")]
    if any(rate is not None for rate in rates):
        named = (settings[name] for name in ("machine", "device", "gpus"))
        usual, settings["device"] = choose_machine(*named)
        settings["machine"] = _with_rates(usual, *rates)
    advice = advise(**settings)
    if as_json:
        print(json.dumps(advice.to_dict(), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        print(advice)
    return 0


def _with_rates(
    usual: Machine, memory: float | None, tflops: float | None, bandwidth: float | None
) -> Machine:
    given = {"--memory": memory, "--tflops": tflops, "--bandwidth": bandwidth}
    for name, value in given.items():
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{name} is expected to be above 0, got {value:g}")
    # There is no flag for half precision: it keeps its ratio to float32.
    flops = usual.flops if tflops is None else tflops * 1e12
    return replace(
        usual,
        name="CPU" if usual.device == "cpu" else "GPU",
        memory=usual.memory if memory is None else memory * 2**30,
        flops=flops,
        half_flops=flops * usual.half_flops / usual.flops,
        bandwidth=usual.bandwidth if bandwidth is None else bandwidth * 1e9,
    )
