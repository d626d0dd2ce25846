"""Open-set classification: test images of known classes against images of unknown classes."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from tammes.lab.config import parse_loss
from tammes.lab.fewshot.features import from_run
from tammes.lab.measure import files
from tammes.lab.measure.classification import classifies
from tammes.lab.measure.formats import FileError
from tammes.lab.recognition.embeddings import IdentityEmbeddings, read_embeddings, run_embeddings
from tammes.lab.recognition.evaluate_openset import Searches, report_searches
from tammes.lab.recognition.evaluate_retrieval import SHOWN
from tammes.lab.recognition.results import Listing, Ranking, Recognition, counted, without_warnings
from tammes.lab.records.run_folder import Run
from tammes.lab.training.model import load_model
from tammes.metrics.functional import (
    energy_score,
    logit_score,
    openset,
    prototype_score,
    softmax_score,
)
from tammes.pooling import to_nearest
from tammes.similarity import InnerProduct, directions

_LOGITS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": softmax_score,
    "logit": logit_score,
    "energy": energy_score,
}
SCORES = ("prototype", *_LOGITS)
"""Scores of how known an example is: cosine to the nearest prototype, and those of logits."""


@dataclass(frozen=True, eq=False)
class ClassifiedExamples:
    """Examples of known classes, then of unknown ones, and the scores of a classifier.

    Attributes:
        examples: embeddings; identities are class names, or None if those of the unknown examples
            are missing.
        labels: class of each example, -1 if it is unknown, shape ``(N,)``.
        logits: shape ``(N, C)``.
        prototypes: all prototypes of the classes, shape ``(C, D)`` or ``(C K, D)``.
        classes: names of the known classes.
    """

    examples: IdentityEmbeddings
    labels: Tensor
    logits: Tensor
    prototypes: Tensor
    classes: Sequence[str]


@torch.no_grad()
def classified_by_run(folder: str | os.PathLike[str], unknown: str) -> ClassifiedExamples:
    """Classify the test images of a run, and an ``unknown`` data set, with the model of the run."""
    run = Run(Path(folder))
    known = run_embeddings(folder)
    if "identities" in run.data or not classifies(
        parse_loss(run.config.loss, counts=run.data["counts"])
    ):
        raise ValueError(
            f"{folder}: --unknown expects a run that classifies its test images, got one whose "
            "test identities are not its classes; leave --unknown out"
        )
    head = load_model(run).criterion.head
    others = from_run(folder, source=unknown)
    return _join(
        known,
        run.tensors("embeddings")["labels"],
        [str(name) for name in run.data["classes"]],
        others.features,
        [others.classes[label] for label in others.labels.tolist()],
        f"{folder} against {unknown}",
        head.logits,
        head.prototypes.detach().flatten(0, -2),
    )


def classified_by_files(
    paths: Sequence[str], unknown: Sequence[str], *, scale: float | None = None
) -> ClassifiedExamples:
    """Classify embeddings with prototypes, both from files as ``tammes measure`` reads them.

    ``scale`` is that of a cosine head; by default logits are inner products.
    """
    given = files.read(paths)
    if given.prototypes is None or given.examples is None:
        raise FileError(
            f"{paths[0]}: prototypes, embeddings and labels are expected with --unknown; without "
            "prototypes give a gallery with --gallery"
        )
    features, labels = given.examples
    others = read_embeddings(unknown, need_identities=False)
    prototypes = given.prototypes
    sizes = features.shape[1], others.features.shape[1]
    if sizes[0] != sizes[1]:
        raise FileError(
            f"{others.title}: unknown embeddings of {sizes[1]} dimensions do not go with the "
            f"{sizes[0]} of {paths[0]}; were both written by one network?"
        )
    similarity = to_nearest(InnerProduct(), prototypes)
    classes = list(given.names) or [str(number) for number in range(len(prototypes))]

    def logits(rows: Tensor) -> Tensor:
        keys = prototypes.double()
        if scale is None:
            return similarity.products(rows.double(), keys)
        return scale * similarity.products(directions(rows.double()), directions(keys))

    known = IdentityEmbeddings(
        ", ".join(paths),
        features,
        [classes[label] for label in labels.tolist()],
        None,
        torch.zeros(len(labels), dtype=torch.bool),
        None,
        [f"row {row}" for row in range(len(labels))],
        notes=(f"{given.ignored:,} examples labelled -100 left out",) if given.ignored else (),
    )
    named = None if others.identities is None else [str(name) for name in others.identities]
    title = f"{known.title} against {others.title}"
    rows = prototypes.flatten(0, -2)
    return _join(known, labels, classes, others.features, named, title, logits, rows)


def _join(
    known: IdentityEmbeddings,
    labels: Tensor,
    classes: Sequence[str],
    unknown: Tensor,
    names: Sequence[str] | None,
    title: str,
    logits: Callable[[Tensor], Tensor],
    prototypes: Tensor,
) -> ClassifiedExamples:
    assert known.identities is not None
    both = set(names or ()) & set(classes)
    if both:
        raise ValueError(
            f"{title}: unknown examples of other classes are expected, got {len(both):,} classes "
            f"that are known, such as {min(both)!r}"
        )
    features = torch.cat([known.features.double(), unknown.double()])
    rows = torch.cat([known.features.float(), unknown.float()])
    count = len(unknown)
    examples = replace(
        known,
        title=title,
        features=features,
        identities=None if names is None else [*map(str, known.identities), *names],
        junk=torch.zeros(len(features), dtype=torch.bool),
        names=[*known.names, *(f"unknown {row}" for row in range(count))],
        pictures=None,
        # That classes were trained on is no caveat for a classifier.
        notes=tuple(note for note in known.notes if "trained on" not in note),
    )
    every = torch.cat([labels.long(), torch.full((count,), -1)])
    return ClassifiedExamples(examples, every, logits(rows), prototypes, classes)


@without_warnings
def evaluate_unknown(
    given: ClassifiedExamples,
    *,
    score: str = "prototype",
    fpirs: Sequence[float] | None = None,
    resamples: int = 200,
    seed: int = 0,
) -> Recognition:
    """Evaluate how well test images of known classes are told from images of unknown ones.

    An example is accepted if its score is at or above a threshold. TPIR is the share of known
    examples that are accepted and classified correctly, FPIR that of unknown ones accepted.

    Args:
        given: examples and their logits.
        score: one of :data:`SCORES`, for thresholds, curves and intervals.
        fpirs: rates of accepted unknown examples; by default those that can be measured.
        resamples: number of bootstrap resamples of classes, for the intervals.
        seed: seed of the resamples.
    """
    if score not in SCORES:
        raise ValueError(f"--score is expected to be one of {', '.join(SCORES)}, got {score!r}")
    labels, examples = given.labels, given.examples
    known = labels >= 0
    predicted = given.logits.argmax(1)
    right = known & (predicted == labels)
    values = {name: _score(given, name).double() for name in SCORES}
    rank = torch.where(right, 1, torch.where(known, 2, 0))
    notes = examples.first_notes()
    if examples.identities is None:
        notes.append("classes of the unknown are not known: no intervals")
    found = report_searches(
        examples.title,
        examples.identities,
        Searches(values[score][None], rank[None]),
        notes,
        fpirs=fpirs,
        resamples=resamples,
        seed=seed,
    )
    rows = []
    for name, each in values.items():
        numbers = openset(each, known, right)
        rates = (numbers.auroc, numbers.fpr95, numbers.aupr_in, numbers.aupr_out, numbers.oscr)
        rows.append((name, *(100 * float(rate) for rate in rates if rate is not None)))
    columns = ("score", "AUROC %", "FPR95 %", "AUPR known %", "AUPR unknown %", "OSCR %")
    convincing = values[score].masked_fill(known, -torch.inf).argsort(descending=True, stable=True)
    return replace(
        found,
        summary=(
            f"{counted(int(known.sum()), 'example')} of "
            f"{counted(len(given.classes), 'class', 'classes')} and {int((~known).sum()):,} of "
            f"unknown classes; numbers and thresholds of the score {score}",
        ),
        counts={
            "embeddings": len(examples),
            "dimensions": examples.features.shape[1],
            "classes": len(given.classes),
            **found.counts,
        },
        tables={
            "Scores compared": Listing(columns, rows, "All scores are higher for known examples.")
        },
        rankings={
            "Unknown, accepted most easily": [
                Ranking(
                    place,
                    (),
                    f"taken for {given.classes[int(predicted[place])]}, score "
                    f"{float(values[score][place]):.4g}",
                )
                for place in convincing[: min(SHOWN, int((~known).sum()))].tolist()
            ]
        },
    )


def _score(given: ClassifiedExamples, name: str) -> Tensor:
    if name == "prototype":
        return prototype_score(given.examples.features, given.prototypes.double())
    return _LOGITS[name](given.logits)
