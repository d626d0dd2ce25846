"""Measures of identities that were not trained: what is compared, and the numbers."""

import pytest
import torch

from tammes.lab.data.images import DataError
from tammes.lab.measure import identities
from tammes.lab.measure.identities import (
    IdentityProtocol,
    check_identities,
    identity_intervals,
    identity_resamples,
    measure_identities,
    protocol_pairs,
)
from tammes.metrics import functional

EVERY = (
    *("mean_average_precision", "recall_at_1", "recall_at_5", "map_at_r", "minp"),
    *("eer", "auc", "tar_at_far_1e-2", "tar_at_far_1e-3"),
    *("identification_rank_1", "tpir_at_fpir_1e-2"),
)


def examples(each, noise=1.0, size=6):
    """Features around a centre for each identity, and the identities."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(len(each)).repeat_interleave(torch.tensor(each))
    labels = labels[torch.randperm(len(labels), generator=generator)]
    centres = torch.randn(len(each), size, generator=generator)
    return centres[labels] + noise * torch.randn(len(labels), size, generator=generator), labels


def test_numbers_are_those_of_all_pairs_and_of_a_search_among_all_others():
    features, labels = examples([40, 60, 50, 30, 60, 50])
    found = measure_identities(features, labels)
    assert tuple(found) == EVERY
    searched = functional.retrieval(features, None, labels, None)
    assert found["mean_average_precision"] == pytest.approx(float(searched.mean_average_precision))
    assert found["recall_at_5"] == pytest.approx(float(searched.cmc[4]))
    units = torch.nn.functional.normalize(features.double())
    left, right = torch.triu_indices(len(labels), len(labels), 1)
    scores, same = (units[left] * units[right]).sum(1), labels[left] == labels[right]
    verified = functional.verification(scores, same)
    assert found["eer"] == pytest.approx(float(verified.eer))
    assert found["tar_at_far_1e-2"] == pytest.approx(float(verified.tar(0.01)))


def test_a_probe_is_mated_in_one_of_the_two_galleries(monkeypatch):
    seen = {}

    def identification(query, gallery, query_ids, gallery_ids, *, galleries):
        seen.update(probes=len(query), ids=query_ids, gallery=gallery_ids, member=galleries)
        return actual(query, gallery, query_ids, gallery_ids, galleries=galleries)

    actual = functional.identification
    monkeypatch.setattr(functional, "identification", identification)
    features, labels = examples([3, 20, 9, 1, 40], noise=1e-3)
    found = measure_identities(features, labels)
    # The person with one image cannot be enrolled; of the others 5, at most half, are.
    assert sorted(seen["gallery"].tolist()) == [0, 1, 2, 4]
    assert seen["member"].bincount().tolist() == [2, 2]
    assert torch.bincount(seen["ids"], minlength=5).tolist() == [2, 15, 5, 1, 35]
    assert found["identification_rank_1"] == 1.0
    # 58 probes are too few for an FPIR of 1 %.
    assert "tpir_at_fpir_1e-2" not in found


def test_more_pairs_than_the_limit_are_a_fixed_sample_of_each_kind():
    _, labels = examples([60, 50, 40])
    pairs = protocol_pairs(labels, IdentityProtocol(), 500)
    same = labels[pairs[:, 0]] == labels[pairs[:, 1]]
    assert (int(same.sum()), int((~same).sum())) == (500, 500)
    assert len(pairs.unique(dim=0)) == 1000
    assert bool((pairs[:, 0] < pairs[:, 1]).all())
    assert pairs.equal(protocol_pairs(labels, IdentityProtocol(), 500))


def test_sides_and_cameras_decide_what_is_compared():
    labels = torch.tensor([0, 0, 0, 1, 1, 1])
    query = torch.tensor([1, 0, 0, 1, 0, 0]).bool()
    cameras = torch.tensor([0, 0, 1, 0, 1, 1])
    found = protocol_pairs(labels, IdentityProtocol(cameras=cameras, query=query))
    # 0 and 1 are of one identity and one camera.
    expected = [[0, 2], [3, 4], [3, 5], [0, 4], [0, 5], [3, 1], [3, 2]]
    assert sorted(found.tolist()) == sorted(expected)
    features = torch.tensor([[1.0, 0], [1, 0], [0, 1], [0.6, 0.8], [0, 1], [1, 0.1]])
    measured = measure_identities(features, labels, IdentityProtocol(cameras=cameras, query=query))
    searched = functional.retrieval(
        features[query], features[~query], labels[query], labels[~query],
        cameras[query], cameras[~query],
    )  # fmt: skip
    assert measured["minp"] == pytest.approx(float(searched.minp))
    assert "identification_rank_1" not in measured


def test_prescribed_pairs_are_verified_in_their_folds():
    features, labels = examples([10, 10, 10, 10], noise=0.6)
    pairs = protocol_pairs(labels, IdentityProtocol(), 60)
    folds = torch.arange(len(pairs)) % 4
    protocol = IdentityProtocol(pairs=pairs, folds=folds)
    found = measure_identities(features, labels, protocol)
    units = torch.nn.functional.normalize(features.double())
    same = labels[pairs[:, 0]] == labels[pairs[:, 1]]
    scores = (units[pairs[:, 0]] * units[pairs[:, 1]]).sum(1)
    expected = functional.fold_accuracy(scores, same, folds=folds).mean
    assert found["verification_accuracy"] == pytest.approx(float(expected))
    assert "mean_average_precision" not in found
    kept = protocol.tensors(labels)
    assert kept["same"].tolist() == same.int().tolist()
    assert sorted(kept) == ["fold", "pairs", "same"]


def test_intervals_are_over_identities_and_around_the_numbers(monkeypatch):
    monkeypatch.setattr(identities, "RESAMPLES", 40)
    features, labels = examples([30] * 8, noise=2.0)
    found, drawn = measure_identities(features, labels), identity_resamples(features, labels)
    ends = identity_intervals(drawn)
    assert ends.keys() == found.keys()
    for name, (low, high) in ends.items():
        assert low <= found[name] <= high
    assert all(len(each) == 40 for each in drawn.values())
    assert ends == identity_intervals(identity_resamples(features, labels))
    assert ends["eer"][1] - ends["eer"][0] > 0.01


@pytest.mark.parametrize("labels", [[0, 1, 2], [4, 4, 4]])
def test_identities_that_cannot_be_measured_are_rejected(labels):
    with pytest.raises(DataError, match=r"faces: two identities or more are expected to test on"):
        check_identities("faces", torch.tensor(labels))
