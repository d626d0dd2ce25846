"""A classifier tells examples of its classes from examples of no known class."""

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from tammes.lab.measure.formats import FileError
from tammes.lab.recognition.unknown_classes import classified_by_files, evaluate_unknown
from tammes.metrics.functional import energy_score, logit_score, openset, softmax_score

QUICK = {"resamples": 20}
GENERATOR = np.random.default_rng(0)
POINTS = GENERATOR.normal(size=(12, 6))
LABELS, OTHERS = np.repeat(np.arange(8), 10), np.repeat(np.arange(8, 12), 10)
KNOWN = POINTS[LABELS] + 0.7 * GENERATOR.normal(size=(80, 6))
UNKNOWN = POINTS[OTHERS] + 0.7 * GENERATOR.normal(size=(40, 6))


@pytest.fixture
def known(tmp_path):
    np.savez(tmp_path / "known.npz", prototypes=POINTS[:8], embeddings=KNOWN, labels=LABELS)
    return [str(tmp_path / "known.npz")]


@pytest.fixture
def unknown(tmp_path):
    np.savez(tmp_path / "unknown.npz", embeddings=UNKNOWN, identities=OTHERS)
    return [str(tmp_path / "unknown.npz")]


@pytest.mark.parametrize("scale", [None, 16.0])
def test_all_scores_are_those_of_the_metrics(known, unknown, scale):
    found = evaluate_unknown(classified_by_files(known, unknown, scale=scale), **QUICK)
    rows, prototypes = torch.tensor(np.concatenate([KNOWN, UNKNOWN])), torch.tensor(POINTS[:8])
    unit = torch.nn.functional.normalize(rows), torch.nn.functional.normalize(prototypes)
    cosine = unit[0] @ unit[1].T
    logits = rows @ prototypes.T if scale is None else scale * cosine
    is_known = torch.arange(120) < 80
    right = is_known & (logits.argmax(1) == torch.tensor([*LABELS, *[-1] * 40]))
    scores = {
        "prototype": cosine.amax(1),
        "softmax": softmax_score(logits),
        "logit": logit_score(logits),
        "energy": energy_score(logits),
    }
    table = {row[0]: row[1:] for row in found.tables["Scores compared"].rows}
    assert list(table) == list(scores)
    for name, score in scores.items():
        expected = openset(score, is_known, right)
        assert table[name] == pytest.approx([100 * float(value) for value in expected[:5]])
    values = {number.key: number.value for number in found.numbers}
    assert values["auroc"] == pytest.approx(roc_auc_score(is_known, scores["prototype"]))
    assert values["rank_1"] == pytest.approx(float(right[:80].double().mean()))
    for point in found.thresholds:
        accepted = scores["prototype"] >= point.thresholds[0] - 1e-12
        assert point.reached.value == pytest.approx(float(accepted[80:].double().mean()))
        assert point.accepted.value == pytest.approx(float((accepted & right)[:80].double().mean()))
        assert point.reached.value <= point.target
    assert found.counts["known"] == 80
    assert found.counts["unknown"] == 40


def test_the_chosen_score_decides_thresholds(known, unknown):
    given = classified_by_files(known, unknown)
    found = [evaluate_unknown(given, score=score, **QUICK) for score in ("prototype", "energy")]
    assert found[0].thresholds[0].thresholds != found[1].thresholds[0].thresholds
    assert found[0].tables == found[1].tables
    (shown,) = found[1].rankings.values()
    assert all(each.query >= 80 for each in shown)


def test_without_names_of_the_unknown_there_are_no_intervals(known, tmp_path):
    np.savez(tmp_path / "plain.npz", embeddings=UNKNOWN)
    found = evaluate_unknown(classified_by_files(known, [str(tmp_path / "plain.npz")]), **QUICK)
    assert found.numbers[0].low is None
    assert found.failing.rows == []
    assert "classes of the unknown are not known: no intervals" in found.notes


def test_what_does_not_go_together_is_refused(known, unknown, tmp_path):
    np.savez(tmp_path / "a.npz", embeddings=UNKNOWN, identities=OTHERS - 4)
    with pytest.raises(ValueError, match=r"of other classes are expected, got 4 classes that are"):
        classified_by_files(known, [str(tmp_path / "a.npz")])
    np.savez(tmp_path / "b.npz", embeddings=UNKNOWN[:, :5])
    with pytest.raises(FileError, match=r"of 5 dimensions do not go with the 6 of .* one network"):
        classified_by_files(known, [str(tmp_path / "b.npz")])
    np.savez(tmp_path / "c.npz", embeddings=KNOWN, labels=LABELS)
    with pytest.raises(FileError, match=r"prototypes, embeddings and labels are expected with"):
        classified_by_files([str(tmp_path / "c.npz")], unknown)
    given = classified_by_files(known, unknown)
    with pytest.raises(ValueError, match=r"--score is expected to be one of prototype, softmax"):
        evaluate_unknown(given, score="x", **QUICK)
    with pytest.raises(ValueError, match=r"openset expects 1,000 unknown probes of a gallery or"):
        evaluate_unknown(given, fpirs=(0.001,), **QUICK)
