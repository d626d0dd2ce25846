"""Metrics on identities unseen in training: retrieval, verification, 1:N search.

Retrieval searches each image among all others. Verification compares pairs: all of them, or a fixed
sample of each kind. Identification enrols some images of each identity as one template, half of the
identities in each of two galleries, and searches every other image in both: one gallery has its
identity, the other does not.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tammes.lab.data import seeded_draws
from tammes.lab.data.identities.identity_protocol import IdentityProtocol
from tammes.lab.data.images import DataError
from tammes.lab.data.subsets import rank_in_class
from tammes.lab.measure.identity_pairs import MAX_PAIRS, pair_scores, sample_pairs
from tammes.metrics import functional
from tammes.metrics.functional.identities import resample_identities
from tammes.similarity import directions

ENROLLED = 5
"""Largest number of images of a template, which has at most half of those of an identity."""
RESAMPLES = 300
"""Number of bootstrap resamples of an interval."""
RATES = (1e-2, 1e-3)
"""False acceptance rates at which TAR is measured; TPIR is measured at the first as FPIR."""


def check_identities(source: str, labels: Tensor) -> None:
    """Reject test images of fewer than two identities, or with a single image of each."""
    counts = labels.bincount()
    if int((counts > 0).sum()) < 2 or int(counts.max()) < 2:
        raise DataError(
            f"{source}: two identities or more are expected to test on, one of them with two "
            f"images or more, got {int((counts > 0).sum())} with at most {int(counts.max())}"
        )


def measure_identities(
    features: Tensor, labels: Tensor, protocol: IdentityProtocol | None = None
) -> dict[str, float]:
    """Measure features ``(N, D)`` of identities, as in a line of ``metrics.jsonl``.

    Returns:
        Fractions by name: ``mean_average_precision``, ``recall_at_1``, ``eer``... Those that need
        more images are left out.
    """
    results = _results(features, labels, protocol or IdentityProtocol())
    return {
        name: value for result, read in results for name, value in _finite(read(result)).items()
    }


def identity_resamples(
    features: Tensor, labels: Tensor, protocol: IdentityProtocol | None = None
) -> dict[str, Tensor]:
    """Return :func:`measure_identities` of bootstrap resamples of the identities.

    Models tested on the same images get the same resamples, so that comparisons are paired.
    """
    found: dict[str, Tensor] = {}
    for result, read in _results(features, labels, protocol or IdentityProtocol()):
        generator = torch.Generator().manual_seed(0)
        found |= resample_identities(result, read, resamples=RESAMPLES, generator=generator)
    return found


def identity_intervals(resamples: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """Return the 95 % intervals over identities of :func:`identity_resamples`."""
    sides = torch.tensor([0.025, 0.975], dtype=torch.double)
    ends = {name: drawn.nanquantile(sides).tolist() for name, drawn in resamples.items()}
    return {name: pair for name, pair in ends.items() if all(map(math.isfinite, pair))}


Read = Callable[[Any], dict[str, Any]]


def _results(
    features: Tensor, labels: Tensor, protocol: IdentityProtocol
) -> list[tuple[Any, Read]]:
    """Compute the results of all protocols, each with a function that reads its numbers."""
    labels = labels.to(features.device)
    units = directions(features.double())
    found: list[tuple[Any, Read]] = []
    if protocol.pairs is None:
        found.append((_retrieval(units, labels, protocol), _read_retrieval))
    pairs = protocol_pairs(labels, protocol) if protocol.pairs is None else protocol.pairs
    pairs = pairs.to(features.device)
    sides = labels[pairs].unbind(1)
    same = sides[0] == sides[1]
    if bool(same.any()) and not bool(same.all()):
        scores = pair_scores(units, pairs)
        known = functional.verification(scores, same, identities=sides)
        found.append((known, _read_verification))
        if protocol.folds is not None:
            folds = protocol.folds.to(features.device)
            accuracy = functional.fold_accuracy(scores, same, folds=folds, identities=sides)
            found.append((accuracy, lambda each: {"verification_accuracy": each.mean}))
    if protocol.pairs is None and protocol.query is None:
        search = _identification(units, labels)
        if search is not None:
            found.append((search, _read_identification))
    return found


def _retrieval(units: Tensor, labels: Tensor, protocol: IdentityProtocol) -> Any:
    cameras = None if protocol.cameras is None else protocol.cameras.to(labels.device)
    if protocol.query is None:
        return functional.retrieval(units, None, labels, None, cameras)
    query = protocol.query.to(labels.device)
    own, other = (None, None) if cameras is None else (cameras[query], cameras[~query])
    return functional.retrieval(
        units[query], units[~query], labels[query], labels[~query], own, other
    )


def _read_retrieval(result: Any) -> dict[str, Any]:
    return {
        "mean_average_precision": result.mean_average_precision,
        "recall_at_1": result.recall_at(1),
        "recall_at_5": result.recall_at(5),
        "map_at_r": result.map_at_r,
        "minp": result.minp,
    }


def _read_verification(result: Any) -> dict[str, Any]:
    rates = {
        f"tar_at_far_{_power(far)}": result.tar(far) for far in RATES if result.different * far >= 1
    }
    return {"eer": result.eer, "auc": result.auc, **rates}


def _read_identification(result: Any) -> dict[str, Any]:
    fewest = min(int((search.rank == 0).sum()) for search in result.searches)
    found = {"identification_rank_1": result.rank_1}
    if fewest * RATES[0] >= 1:
        found[f"tpir_at_fpir_{_power(RATES[0])}"] = result.tpir(RATES[0])
    return found


def _power(rate: float) -> str:
    return f"1e{round(math.log10(rate))}"


def _finite(values: dict[str, Any]) -> dict[str, float]:
    plain = {name: float(value) for name, value in values.items()}
    return {name: value for name, value in plain.items() if math.isfinite(value)}


def protocol_pairs(labels: Tensor, protocol: IdentityProtocol, limit: int = MAX_PAIRS) -> Tensor:
    """Return the pairs of test images of a protocol, always the same ones, shape ``(P, 2)``.

    There are at most ``limit`` pairs of one identity, and at most ``limit`` of two.
    """
    sides = []
    if protocol.query is not None:
        sides = [side.cpu().nonzero().squeeze(1) for side in (protocol.query, ~protocol.query)]
    cameras = None if protocol.cameras is None else protocol.cameras.cpu()
    return sample_pairs(labels.cpu(), *sides, camera=cameras, limit=limit).rows


def _identification(units: Tensor, labels: Tensor) -> Any | None:
    """Enrol half of the identities in each of two galleries, and search other images in both."""
    labels = labels.cpu()
    counts = labels.bincount()
    known = (counts >= 2).nonzero().squeeze(1)
    if len(known) < 2:
        return None
    known = known[seeded_draws.permutation(len(known), 0, "galleries")]
    template = torch.full((len(counts),), -1)
    template[known] = torch.arange(len(known))
    enrolled = rank_in_class(labels, 0, "enrolled") < (counts // 2).clamp(max=ENROLLED)[labels]
    probes, rows = ((~enrolled).nonzero().squeeze(1), enrolled.nonzero().squeeze(1))
    device = units.device
    templates = units.new_zeros(len(known), units.shape[1]).index_add(
        0, template[labels[rows]].to(device), units[rows.to(device)]
    )
    return functional.identification(
        units[probes.to(device)],
        templates,
        labels[probes].to(device),
        known.to(device),
        galleries=(torch.arange(len(known)) % 2).to(device),
    )
