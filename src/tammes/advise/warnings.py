"""Warnings about settings that cannot train, or that users found hard to train.

Each caution names its source: a proof, or reports of users by repository and number.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from tammes.advise.defaults import LEARNING_RATES
from tammes.advise.feasibility import (
    CHORDS,
    KINDS,
    LINEAR,
    SUMS,
    Margins,
    adapts_scale,
    bent,
    class_radius,
    definition,
    log_odds,
    scale_for,
)
from tammes.advise.workload import Workload
from tammes.geometry.bounds import largest_class_margin
from tammes.geometry.theory import smallest_alpha1

FEW = 5
"""Examples per class below which a large margin is reported not to train."""
LARGEST_SCALE = 64.0
"""Largest scale of our trainings, and of the papers'."""
METRIC = ("nca", "proto", "triplet", "contrastive")
"""Losses between the examples of a batch."""
BOUNDED = ("normface", "cosface", "arcface", "sphereface", "combined_margin", "gm_softmax")
"""Losses with a known lower bound of the risk for balanced classes."""
ANGULAR = (
    *("arcface", "combined_margin", "sphereface", "l_softmax"),
    *("adaface", "curricularface", "elasticface", "inter_topk", "magface"),
)
"""Losses with a function of the angle, whose gradient grows near the prototype."""


@dataclass(frozen=True)
class Caution:
    """Warning about a setting.

    Attributes:
        level: ``"cannot"`` if it provably does not work, ``"risk"`` if users report problems,
            ``"note"`` for information.
        code: short name of the case.
        text: problem and remedy, in a sentence or two.
        source: proof or reports.
    """

    level: str
    code: str
    text: str
    source: str


@dataclass(frozen=True)
class Choice:
    """Settings of the user, and the geometry of their sphere."""

    work: Workload
    names: tuple[str, ...]
    angle: float
    exact: bool
    scale: float
    margin: float | None
    margins: Margins
    posterior: float
    lr: float | None = None
    samples_per_class: float | None = None
    imbalance: float = 1.0
    identities: bool = False
    annealing: bool = False
    start: float | None = None

    @property
    def main(self) -> str:
        """Loss that margin and scale belong to."""
        return next(name for name in self.names if name not in SUMS)

    @property
    def spherical(self) -> bool:
        """Whether the main loss compares directions only."""
        return self.main not in LINEAR and definition(self.main).on == "split"

    @property
    def lacks_centroid(self) -> bool:
        """Whether the optimum of the loss needs ``zero_centroid``, and the loss lacks it."""
        return (
            self.main == "lm_softmax" and self.imbalance > 1 and "zero_centroid" not in self.names
        )

    @property
    def odds(self) -> float:
        """Score margin that the desired posterior requires."""
        return log_odds(self.posterior, self.work.classes)

    @property
    def least_scale(self) -> float | None:
        """Proven smallest scale for the desired posterior, if the theorem applies."""
        m1, m2, _ = self.margins
        proven = self.main in BOUNDED and self.imbalance == 1 and m1 >= 1 and m2 >= 0
        if not proven or math.cos(m2) < smallest_alpha1(self.work.classes):
            return None
        return scale_for(self.odds, bent(0.0, self.margins), -1 / (self.work.classes - 1))


def cautions(choice: Choice) -> tuple[Caution, ...]:
    """Return every caution that applies to a choice, the most severe first."""
    checks = (_margin, _room, _scale, _training, _precision, _batch, _combination)
    found = [caution for check in checks for caution in check(choice)]
    order = ("cannot", "risk", "note")
    return tuple(sorted(found, key=lambda caution: order.index(caution.level)))


def _margin(choice: Choice) -> Iterator[Caution]:
    margin, angle, main = choice.margin, choice.angle, choice.main
    if margin is None:
        return
    kind = KINDS.get(main)
    if main in CHORDS and margin > 2 * math.sin(angle / 2):
        yield Caution(
            "cannot",
            "margin-infeasible",
            f"{main} requires a distance of {margin:g}, but unit features of "
            f"{choice.work.classes:,} classes are at most {2 * math.sin(angle / 2):.4g} apart; "
            "use a smaller margin, or do not normalize",
            "m <= 2 sin(A/2)",
        )
    if kind is None or not choice.spherical:
        return
    if class_radius(angle, choice.margins) is None:
        best = "is at best" if choice.exact else "cannot be more than"
        yield Caution(
            "cannot",
            "margin-infeasible",
            f"{kind.setting}={margin:g} of {main} cannot be met by all classes: the class margin "
            f"of {choice.work.classes:,} classes in {choice.work.dim} dimensions {best} "
            f"{math.degrees(angle):.2f}°, which allows {kind.largest(angle):.4g}; the loss then "
            "never gets small and pulls classes against each other",
            kind.rule,
        )
    if -margin > 1 - math.cos(angle):
        yield Caution(
            "cannot",
            "loss-without-accuracy",
            f"with {kind.setting}={margin:g} an example on the wrong prototype already meets the "
            f"margin, so the loss can be 0 with accuracy 0; keep it above "
            f"{math.cos(angle) - 1:.4g}",
            "-m > 1 - cos A",
        )


def _room(choice: Choice) -> Iterator[Caution]:
    """Warn of more classes than the dimensions have room for."""
    if not choice.spherical or choice.main == "lm_softmax" or adapts_scale(choice.names):
        return
    classes, dim = choice.work.classes, choice.work.dim

    def needed(dim: int) -> float:
        reach = math.cos(largest_class_margin(classes, dim).angle)
        return scale_for(choice.odds, 1.0, reach)

    about = needed(dim)
    # Half of the room is the margin's, which takes twice the scale.
    most = LARGEST_SCALE / 2
    if about <= most or needed(classes) > most:
        return
    enough = dim
    while needed(enough) > most:
        enough *= 2
    apart = (
        f"are at most {math.degrees(choice.angle):.3g}° apart, which takes a scale of {about:.3g} "
    )
    apart += (
        f"even without a margin and twice that with one; {LARGEST_SCALE:g} is the most we tried"
    )
    yield Caution(
        "cannot" if math.isinf(about) else "risk",
        "no-room",
        f"{classes:,} classes in {dim:,} dimension{'s' * (dim > 1)} "
        f"{'have to share directions' if math.isinf(about) else apart}; use {enough:,} dimensions "
        "or more",
        "s >= log((C-1) p / (1-p)) / (1 - cos A)",
    )


def _scale(choice: Choice) -> Iterator[Caution]:
    if not choice.spherical or choice.main == "lm_softmax" or adapts_scale(choice.names):
        return
    scale, classes, odds = choice.scale, choice.work.classes, choice.odds
    target = bent(0.0, choice.margins)
    least, about = choice.least_scale, scale_for(odds, target, math.cos(choice.angle))
    if least is not None and scale < least < math.inf:
        loss = math.log1p((classes - 1) * math.exp(-scale * (target + 1 / (classes - 1))))
        yield Caution(
            "cannot",
            "scale-too-small",
            f"at scale {scale:g} no arrangement of classes has a mean loss under {loss:.3g}, a "
            f"posterior of {math.exp(-loss):.3g}, where {choice.posterior:g} is wanted; the scale "
            f"must be at least {least:.3g}, and about {about:.3g} on this sphere",
            "s >= log((C-1) p / (1-p)) / (t + 1/(C-1)); Zhou et al. 2022, Theorem 5",
        )
    elif scale < about < math.inf:
        best = 1 / (1 + math.exp(math.log(classes - 1) - scale * (target - math.cos(choice.angle))))
        yield Caution(
            "risk",
            "scale-small",
            f"at scale {scale:g} an example on its prototype, with the others at the largest class "
            f"margin, has a posterior of {best:.3g} in training, where {choice.posterior:g} is "
            f"wanted; use a scale of about {about:.3g}",
            "s >= log((C-1) p / (1-p)) / (t - cos A)",
        )


def _training(choice: Choice) -> Iterator[Caution]:
    main, work = choice.main, choice.work
    margin = choice.margin or 0.0
    samples = choice.samples_per_class
    strong = choice.spherical and main in KINDS and choice.scale >= 64 and margin >= 0.3
    if samples is not None and samples <= FEW and strong:
        begins = "" if choice.start is None else f" starts at a loss of {choice.start:.0f} and"
        yield Caution(
            "risk",
            "few-samples",
            f"{main} with scale {choice.scale:g} and {KINDS[main].setting} {margin:g}{begins} is "
            f"reported not to train with {work.classes:,} classes of {samples:g} examples; begin "
            "with margin 0 and a smaller scale, and warm the margin up (tammes.schedules.WarmUp)",
            "pytorch-metric-learning #351, #186",
        )
    # Rates of the runs in results/advice, where ArcFace trained with either optimizer.
    high = LEARNING_RATES.get(work.optimizer, LEARNING_RATES["adam"])
    if choice.lr is not None and choice.lr > high and main in ANGULAR:
        yield Caution(
            "risk",
            "learning-rate",
            f"a learning rate of {choice.lr:g} with {main} is reported to diverge, to end in NaN "
            f"or to stay at its first loss; {high:g} trained with {work.optimizer}: use at most "
            "that, clip gradients, or use cosface",
            "insightface #2144, #2200, #1555; pytorch-metric-learning #209, #530",
        )
    if main in ("l_softmax", "sphereface") and margin > 1 and not choice.annealing:
        fall = bent(math.pi / 2, (margin, 0.0, 0.0))
        yield Caution(
            "risk",
            "annealing",
            f"{main} with margin {margin:g} lowers a target at 90° from 0 to {fall:.3g} times its "
            "norm and is reported not to start training; anneal blend from about 1000 "
            "(tammes.schedules.LambdaAnnealing)",
            "sphereface #14, #40; LargeMargin_Softmax #15",
        )
    if choice.lacks_centroid:
        yield Caution(
            "risk",
            "imbalance",
            f"lm_softmax with classes {choice.imbalance:g} times as large as others has its "
            "optimum far from the largest class margin (5° instead of 109° at 100:1 and four "
            "classes): its gradient does not fade. 10 to 100 times zero_centroid() spreads the "
            "prototypes, but on long-tailed CIFAR-100 lm_softmax has an accuracy of 24 % with it "
            "and 25 % without, and cosface of 38 %",
            "Zhou et al. 2022, Theorem 8; docs/advise.md; zhou2022/table2",
        )


def _precision(choice: Choice) -> Iterator[Caution]:
    dtype = choice.work.dtype
    if dtype in ("float16", "bfloat16"):
        digits = 8 if dtype == "bfloat16" else 11
        yield Caution(
            "risk",
            "half-precision-weights",
            f"prototypes stored in {dtype} do not move by less than about one part in "
            f"{2**digits}, so small steps are lost, and half precision is reported to end in NaN; "
            "keep the head in float32 and put autocast around it",
            "pytorch-metric-learning #209, #121; insightface #2200",
        )


def anchors(classes: int, batch: int, samples_per_class: float | None = None) -> float:
    r"""Fraction of a random batch whose class has another example in the batch.

    .. math:: 1 - \Bigl(1 - \frac1C\Bigr)^{N-1},\qquad
              1 - \prod_{j=0}^{n-2}\frac{nC-N-j}{nC-1-j}

    with very many examples per class, and with n of them, drawn without replacement.

    Example:
        >>> round(anchors(10, 2), 4), round(anchors(10, 2, 3), 4)
        (0.1, 0.069)
    """
    if samples_per_class is None:
        return -math.expm1((batch - 1) * math.log1p(-1 / classes))
    mates, total = samples_per_class - 1, samples_per_class * classes
    if total - batch < mates:
        return 1.0 if mates else 0.0
    left = math.lgamma(total - batch + 1) - math.lgamma(total - batch - mates + 1)
    return -math.expm1(min(0.0, left - math.lgamma(total) + math.lgamma(total - mates)))


def _batch(choice: Choice) -> Iterator[Caution]:
    metric = [name for name in choice.names if name in METRIC]
    if not metric:
        return
    work, name = choice.work, " and ".join(metric)
    if work.rows < 4:
        yield Caution(
            "cannot",
            "batch-too-small",
            f"{name} compares examples of one class with those of another within a batch: "
            f"at least 4 examples are needed, got {work.rows} on a rank",
            "2 classes of 2 examples",
        )
        return
    share = anchors(work.classes, work.rows, choice.samples_per_class)
    if share < 0.5:
        yield Caution(
            "cannot" if share == 0 else "risk",
            "no-company",
            f"in a random batch of {work.rows:,} from {work.classes:,} classes only "
            f"{share * work.rows:.3g} examples share their class with another, and {name} learns "
            "from those alone; draw K examples of each of N/K classes",
            "the share is 1 - (1 - 1/C)^(N-1), or less",
        )


def _combination(choice: Choice) -> Iterator[Caution]:
    work = choice.work
    if "direct_sum" in choice.names and work.dim <= work.classes:
        yield Caution(
            "cannot",
            "direct-sum",
            f"direct_sum uses the complement of {work.classes:,} prototypes in {work.dim} "
            "dimensions, which is empty; use spectral_sum",
            "needs D > C",
        )
    if "super_symmetry" in choice.names and work.classes > work.dim + 1:
        yield Caution(
            "cannot",
            "super-symmetry",
            f"super_symmetry cannot reach zero with {work.classes:,} classes in {work.dim} "
            "dimensions",
            "needs C <= D + 1",
        )
