"""The command ``tammes export``."""

import argparse
from functools import partial

from tammes.lab.cli.arguments import add_argument
from tammes.lab.inference.exported_files import (
    ONNX,
    TORCH,
    ExportedFile,
    check_suffix,
    export_onnx,
    export_torch,
)
from tammes.lab.inference.trained_model import load


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tammes export`` to a parser."""
    parser.description = (
        "Write the model of a finished run to a file for other programs: from uint8 pixels to "
        "embedding and logits, normalisation included, for any batch size. A file is kept only if "
        "it agrees with the model."
    )
    add = partial(add_argument, parser)
    add("model RUN", "directory of a finished run")
    add("--onnx FILE.onnx", "ONNX file to write")
    add("--torch FILE.pt2", "file of torch.export to write")
    add("--no-logits", "write the embedding only, without the prototypes of the classes")
    add(
        "--threshold T",
        "similarity below which the answer is unknown, for the metadata",
        type=float,
    )


def run(arguments: argparse.Namespace) -> int:
    """Run ``tammes export`` and return the exit code."""
    given = [(arguments.onnx, ONNX, export_onnx), (arguments.torch, TORCH, export_torch)]
    wanted = [each for each in given if each[0] is not None]
    if not wanted:
        raise ValueError("a file to write is expected, given by --onnx FILE or --torch FILE")
    for path, suffix, _ in wanted:
        # Before the first file is written.
        check_suffix(path, suffix)
    # Always on the CPU, where the files are compared with the model.
    model = load(arguments.model, device="cpu")
    logits = False if arguments.no_logits else None
    for path, _, export in wanted:
        print(as_text(export(model, path, logits=logits, threshold=arguments.threshold)))
    print(f"  preprocessing: {model.preprocess}")
    return 0


def as_text(written: ExportedFile) -> str:
    """Format an exported file as a line."""
    return (
        f"  {written.path}: {' and '.join(written.outputs)}, {written.size / 2**20:.1f} MiB, "
        f"embeddings within {written.deviation:.1g} of the model's"
    )
