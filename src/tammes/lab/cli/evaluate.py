"""The command ``tammes evaluate``, with a subcommand for each protocol."""

import argparse

from tammes.lab.cli import evaluate_fewshot, evaluate_identities

_PROTOCOLS = {
    "retrieval": "rank a gallery for each query: mAP, CMC, mINP, recall@k",
    "verification": "accept pairs of one identity: ROC, TAR at a FAR, EER, thresholds",
    "openset": "search in a gallery that may not have the identity: AUROC, OSCR, TPIR",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tammes evaluate`` to a parser."""
    parser.description = (
        "Evaluate a trained model, or features from a file, by retrieval, verification, open sets "
        "or few-shot episodes."
    )
    protocols = parser.add_subparsers(dest="protocol", required=True, metavar="PROTOCOL")
    for name, summary in _PROTOCOLS.items():
        own = protocols.add_parser(name, help=summary)
        evaluate_identities.add_arguments(own, name)
        own.set_defaults(run=evaluate_identities.run, parser=own)
    own = protocols.add_parser("fewshot", help="few-shot episodes on novel classes")
    evaluate_fewshot.add_arguments(own)
    own.set_defaults(run=evaluate_fewshot.run)


def run(arguments: argparse.Namespace) -> int:
    """Run ``tammes evaluate`` and return the exit code."""
    return int(arguments.run(arguments))
