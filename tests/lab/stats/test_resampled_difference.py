"""Two losses on the same identities: is their difference larger than the interval over these?"""

import ledgers
import pytest
import torch
from ledgers import entry

from tammes.lab.measure import identities
from tammes.lab.measure.identities import identity_resamples, measure_identities
from tammes.lab.report.paper_comparison import PaperComparison
from tammes.lab.report.verdicts import verdict_on_reproduction
from tammes.lab.reproduce import recipes
from tammes.lab.reproduce.ledger import Ledger
from tammes.lab.stats.paired import resampled_difference

RECIPE = recipes.load("identities/chimpanzees")


def features_of(noise, count=12, each=12):
    generator = torch.Generator().manual_seed(3)
    labels = torch.arange(count).repeat_interleave(each)
    centres = torch.randn(count, 16, generator=generator)
    # Identities differ in how hard they are, for every model alike.
    hard = 0.3 + 2 * torch.rand(count, generator=generator)
    drawn = torch.randn(len(labels), 16, generator=generator)
    return centres[labels] + noise * hard[labels, None] * drawn, labels


def test_a_small_difference_is_clear_on_the_same_identities_and_not_on_others(monkeypatch):
    monkeypatch.setattr(identities, "RESAMPLES", 60)
    (good, labels), (bad, _) = features_of(1.0), features_of(1.15)
    ours, theirs = (identity_resamples(each, labels) for each in (good, bad))
    key = "mean_average_precision"
    low, high = resampled_difference({0: ours[key].tolist()}, {0: theirs[key].tolist()})
    measured = [measure_identities(each, labels)[key] for each in (good, bad)]
    assert 0 < low <= measured[0] - measured[1] <= high
    # Resamples that are not paired would not tell them apart.
    shuffled = theirs[key].roll(1).tolist()
    apart = resampled_difference({0: ours[key].tolist()}, {0: shuffled})
    assert apart[0] < 0 < apart[1]
    assert apart[1] - apart[0] > 2 * (high - low)


def test_seeds_are_averaged_in_every_resample():
    ours = {0: [1.0, 3.0], 1: [2.0, 4.0], 5: [100.0, 100.0]}
    theirs = {0: [0.0, 0.0], 1: [1.0, 1.0]}
    # Differences of 1 and 3 with both seeds; the ends are quantiles between them.
    assert resampled_difference(ours, theirs) == pytest.approx((1.05, 2.95))


@pytest.mark.parametrize(
    "theirs", [{}, {4: [1.0, 2.0]}, {0: [1.0, 2.0, 3.0]}], ids=["none", "seed", "count"]
)
def test_what_cannot_be_paired_has_no_interval(theirs):
    assert resampled_difference({0: [1.0, 2.0]}, theirs) is None


def comparison(better=(0.0, 0.0), kept=True):
    """CosFace and softmax with three seeds; ``better``: extra points of CosFace's resamples."""
    cells = []
    for row, extra in (("softmax", (0.0, 0.0)), ("cosface", better)):
        for seed in range(3):
            drawn = {key: [30.0 + seed + end for end in extra] for key in ("map", "eer")}
            values = {"map": 30.0 + seed / 10 + extra[0], "eer": 30.0 - seed / 10 - extra[0]}
            own = {"identities": {"intervals": {}, **({"resamples": drawn} if kept else {})}}
            cells.append(entry(row, "chimpanzees", seed, values, kept=own))
    return PaperComparison(RECIPE, Ledger(RECIPE.name, machines=[ledgers.MACHINE], cells=cells))


def test_claims_quote_the_interval_over_identities():
    said = comparison((1.0, 3.0)).verdicts[0].parts
    (text,) = [part.text for part in said if part.rows == ("cosface", "softmax")]
    assert text.endswith("; over identities +1.05 to +2.95) against Softmax")
    plain = comparison((1.0, 3.0), kept=False).verdicts[0].parts
    assert not any("identities" in part.text for part in plain)


def test_the_verdict_names_the_winner_of_retrieval_and_of_verification():
    clear = verdict_on_reproduction(comparison((1.0, 3.0)))
    assert (
        "In mAP CosFace is best, by 1.00 points over Softmax: as other identities would say too "
        "(95 % over identities +1.05 to +2.95)."
    ) in clear
    # Less is better for the error: here the resamples speak against the means.
    (verification,) = [each for each in clear if each.startswith("In EER")]
    assert "CosFace is best, by 1.00 points" in verification
    assert "other identities may disagree (95 % over identities -2.95 to -1.05)" in verification
    unclear = verdict_on_reproduction(comparison((1.0, -3.0)))
    assert any("other identities may disagree (95 % over identities -2.9" in e for e in unclear)
    assert not any("identities" in e for e in verdict_on_reproduction(comparison(kept=False)))
