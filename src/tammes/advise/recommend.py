"""Recommend initial settings, with reasons."""

import math
from dataclasses import dataclass

from tammes.advise import defaults
from tammes.advise.evidence import effect
from tammes.advise.feasibility import (
    KINDS,
    LINEAR,
    NO_MARGINS,
    adapts_scale,
    bent,
    definition,
    largest_where,
    scale_for,
)
from tammes.advise.memory_plan import Cost, size
from tammes.advise.warnings import FEW, METRIC, Choice
from tammes.kernels.tiling import MOST_CENTERS, WIDEST
from tammes.split import FREE_MAP

_LARGE_SCORE = 15.0
"""Scale times margin from which the margin is warmed up."""
_FEW_IDENTITIES = 100
"""Identities in training up to which a margin lost against softmax (recipes ``identities``)."""
_IMBALANCED = 10.0
"""Largest over smallest class from which the sizes of classes decide on the loss."""
_REPLICATED = "the same on every rank"
_TOO_LARGE = "no mode fits into memory: use more GPUs, a smaller batch or fewer dimensions"


@dataclass(frozen=True)
class Recommendation:
    """Recommended value of a setting.

    Attributes:
        setting: name of the setting.
        value: a number or a word.
        reason: reason for the value.
        basis: ``"formula"``, ``"measured"`` in our own training runs, ``"literature"``,
            ``"reports"`` of users, or ``"rule of thumb"``.
    """

    setting: str
    value: float | str
    reason: str
    basis: str


def _few(samples: float | None) -> bool:
    return samples is not None and samples <= FEW


def usual_margin(name: str, classes: int) -> defaults.Default:
    """Return the usual margin of a loss of :data:`KINDS`, without regard to the sphere.

    It is the best of our training runs or that of the literature, on unit features if possible.
    """
    measured = defaults.measured_margin(name, classes)
    if measured is not None:
        return measured
    value = 1.5 if name == "sphereface" else KINDS[name].default
    if value is None:
        value = float(definition(name).defaults[KINDS[name].setting])
    return defaults.Default(value, "the usual value, which is feasible", "literature")


def best_margin(
    name: str,
    classes: int,
    angle: float,
    odds: float,
    scale: float | None,
    samples: float | None,
) -> float | None:
    """Measured or usual margin, or less if the sphere, the data or the scale require it.

    Args:
        name: name of the loss.
        classes: number of classes.
        angle: the largest class margin.
        odds: score margin that the posterior requires.
        scale: scale of the head, if already chosen.
        samples: examples per class, if known.

    Returns:
        The margin, or ``None`` if the loss has none on the sphere.
    """
    kind = KINDS.get(name)
    if kind is None:
        return None
    default = usual_margin(name, classes).value
    largest = kind.largest(angle)
    if math.isinf(largest):
        return default
    margin = min(default, largest / 2)
    margin = margin / 2 if _few(samples) else margin

    def needed(margin: float) -> float:
        return scale_for(odds, bent(0.0, kind.place(margin)), math.cos(angle))

    if scale is not None and needed(margin) > scale:
        # Largest margin at this scale; none, if the scale is too small even without one.
        margin = largest_where(lambda margin: needed(margin) <= scale, margin)
    return float(f"{margin:.3g}")


def recommendations(
    choice: Choice, margin: float | None, costs: tuple[Cost, ...], *, free: bool
) -> tuple[Recommendation, ...]:
    """Recommend initial settings.

    Args:
        choice: settings of the user.
        margin: see :func:`best_margin`.
        costs: cost of every implementation.
        free: whether no loss was given.
    """
    rows = []
    if free:
        rows.append(_recommend_loss(choice))
    scale = _recommend_scale(choice, margin)
    if margin is not None:
        fixed = choice.scale if isinstance(scale.value, str) else scale.value
        rows += _recommend_margin(choice, margin, fixed)
    if choice.spherical or choice.main in LINEAR:
        rows.append(scale)
    rows += _recommend_training(choice)
    if costs:
        rows += _recommend_mode(choice, costs)
    return tuple(rows)


def _recommend_loss(choice: Choice) -> Recommendation:
    """Recommend the loss that is left open, with what docs/choosing.md says about such data."""
    reason, basis = "simplest margin: it shifts the score", "measured"
    if choice.imbalance >= _IMBALANCED:
        reason += "; for classes of such different sizes compare logit_adjustment and vs_softmax, "
        reason += "which gained 4 to 5 points on long-tailed CIFAR-100"
    elif choice.identities and choice.work.classes <= _FEW_IDENTITIES:
        reason += "; from so few identities softmax was better on three data sets: compare both"
    elif choice.identities or choice.work.classes >= defaults.MANY_CLASSES:
        reason, basis = f"{reason}; trains where arcface is reported not to", "reports"
    else:
        reason += "; if accuracy on the trained classes is all that counts, softmax did as well on "
        reason += "MNIST"
    return Recommendation("loss", "cosface", reason, basis)


def _recommend_scale(choice: Choice, margin: float | None) -> Recommendation:
    name, work = choice.main, choice.work
    if adapts_scale(choice.names):
        reason = f"follows the angles of each batch, from sqrt(2) log(C - 1) = {choice.scale:.3g}"
        return Recommendation("scale", "adaptive", reason, "literature")
    placed = NO_MARGINS if margin is None else KINDS[name].place(margin)
    scale = defaults.default_scale(
        name, placed, work.classes, work.dim, choice.posterior, identities=choice.identities
    )
    if name in LINEAR:
        return Recommendation("scale", scale, "the norms of the features act as scale", "formula")
    if name == "lm_softmax":
        gap = math.log(work.classes - 1) / scale
        reason = f"hardly matters; the loss is within {gap:.3g} of minus the sample margin"
        return Recommendation("scale", scale, reason, "formula")
    usual = defaults.usual_scale(name, work.classes, identities=choice.identities)
    if scale == usual.value:
        return Recommendation("scale", scale, f"the default: {usual.evidence}", usual.basis)
    about = scale_for(choice.odds, bent(0.0, placed), math.cos(choice.angle))
    reason = (
        f"the default of {usual.value:g} is too small here: a posterior of {choice.posterior:g} "
        f"requires {about:.3g} at this margin"
    )
    return Recommendation("scale", scale, reason, "formula")


def _recommend_margin(choice: Choice, margin: float, scale: float) -> list[Recommendation]:
    kind, few = KINDS[choice.main], _few(choice.samples_per_class)
    usual = usual_margin(choice.main, choice.work.classes)
    why, basis = "the largest that the sphere and the scale have room for", "formula"
    if margin == usual.value:
        why, basis = usual.evidence, usual.basis
    elif few and margin == usual.value / 2:
        why, basis = f"half of {usual.value:g}, for few examples per class", "rule of thumb"
    rows = [Recommendation(kind.setting, margin, why, basis)]
    if choice.main in ("l_softmax", "sphereface"):
        how = "from 1000 down (tammes.schedules.LambdaAnnealing)"
        why = "training is reported not to start with the full margin"
        rows.append(Recommendation("blend", how, why, "literature"))
    elif warm_up(choice, margin, scale):
        how = "0 for the first tenth of the training, then up (tammes.schedules.WarmUp)"
        why = "training is reported not to start with a large margin"
        rows.append(Recommendation("margin warm-up", how, why, "reports"))
    return rows


def warm_up(choice: Choice, margin: float, scale: float) -> bool:
    """Return whether the margin should be warmed up: few examples, or a large score to win by."""
    return _few(choice.samples_per_class) or scale * margin > _LARGE_SCORE


def _recommend_training(choice: Choice) -> list[Recommendation]:
    rows = [
        Recommendation(
            "optimizer",
            f"SGD, momentum {defaults.MOMENTUM:g}",
            f"learning rate {defaults.LEARNING_RATES['sgd']:g}, cosine decay; AdamW at "
            f"{defaults.LEARNING_RATES['adamw']:g} instead: {effect(', adamw')}",
            "measured",
        ),
        Recommendation(
            "head learning rate",
            "that of the network",
            f"ten times as much: {effect(', head rate × 10')}",
            "measured",
        ),
        Recommendation(
            "precision",
            "float32 head under autocast",
            "scores, log-sum-exp and loss stay in single precision either way",
            "formula",
        ),
    ]
    if choice.lacks_centroid:
        reason = "with imbalanced classes the largest class margin is optimal only if this is 0"
        rows.append(Recommendation("weight of zero_centroid()", 10.0, reason, "formula"))
    if any(name in METRIC for name in choice.names):
        reason = "every example needs another one of its class in the batch"
        rows.append(Recommendation("sampler", "4 examples of a class", reason, "rule of thumb"))
    return rows


def _recommend_mode(choice: Choice, costs: tuple[Cost, ...]) -> list[Recommendation]:
    """Recommend an implementation, and with several ranks a head."""
    work = choice.work
    by_mode = {cost.mode: cost for cost in costs}
    whole = by_mode[work.automatic()]
    rows = []
    if work.gpus > 1 and "sharded" in by_mode:
        rows.append(_recommend_head(choice, whole, by_mode["sharded"], by_mode["sampled"]))
    if rows and rows[0].value != _REPLICATED:
        way = work.within(work.batch, work.shard)
        reason = f"chosen automatically by a sharded head: {_why(choice, way)}"
        value = "none" if rows[0].value == "none" else way
        return [*rows, Recommendation("implementation", value, reason, "formula")]
    if whole.fits:
        reason = f"chosen automatically: {_why(choice, whole.mode)}; "
        reason += f"{size(whole.total)} per rank"
        return [*rows, Recommendation("implementation", whole.mode, reason, "formula")]
    # Prefer exact implementations, then fast ones.
    small = min(
        (cost for cost in costs if cost.fits),
        key=lambda cost: (cost.mode == "sampled", cost.seconds),
        default=None,
    )
    if small is None:
        return [Recommendation("implementation", "none", _TOO_LARGE, "formula")]
    reason = f"{whole.mode} does not fit; this takes {size(small.total)} per rank"
    if small.mode == "sampled":
        reason += f", as ShardedHead(sample_rate={work.sample_rate:g}), and is {small.note}"
    return [Recommendation("implementation", small.mode, reason, "formula")]


def _why(choice: Choice, way: str) -> str:
    """Reason for the choice of ``implementation="auto"``."""
    work = choice.work
    scores = work.rows * work.classes * work.centers
    if "rest" in work.reads:
        return "the loss needs all scores at once"
    if way == "dense":
        return f"{scores:,} scores fit in memory, where it is the fastest"
    if way == "fused":
        return f"products are in {work.autocast}, where the fused kernels are faster"
    if work.device == "cpu":
        return "the fused kernels are for CUDA"
    if not work.fusable:
        words = {FREE_MAP: "this map of the other scores"}
        missing = " and ".join(sorted(words.get(name, name) for name in work.unfused))
        if missing:
            return f"the fused kernels do not compute {missing}, which the loss reads"
        return (
            f"the fused kernels need float32, at most {WIDEST} dimensions and {MOST_CENTERS} "
            "prototypes of a class"
        )
    if not work.half:
        return "the fused kernels are faster only under autocast"
    return "few classes on a rank"


def _recommend_head(choice: Choice, whole: Cost, shard: Cost, sample: Cost) -> Recommendation:
    """Recommend all classes on every rank, or a shard on each."""
    work = choice.work
    if not (whole.fits or shard.fits or sample.fits):
        return Recommendation("head", "none", _TOO_LARGE, "formula")
    both = [_in_short(cost) for cost in (shard, whole)]
    if not (whole.fits or shard.fits):
        value = f"ShardedHead, sample_rate={work.sample_rate:g}"
        reason = f"all classes do not fit, {both[0]}; {sample.note}, {_in_short(sample)}"
        return Recommendation("head", value, reason, "formula")
    if shard.fits and (shard.seconds < whole.seconds or not whole.fits):
        reason = f"{work.shard:,} classes on each of {work.gpus} ranks take {both[0]}"
        reason += f", a copy of all on every rank {both[1]}"
        return Recommendation("head", "ShardedHead", reason, "formula")
    reason = f"a copy of all classes takes {both[1]}, a shard of them {both[0]}"
    return Recommendation("head", _REPLICATED, reason, "formula")


def _in_short(cost: Cost) -> str:
    return f"{size(cost.total)} and {cost.seconds * 1e3:.3g} ms"
