"""Load heads trained with other libraries.

Both functions need torch only: they read a saved state dict or the attributes of a live module,
and never import the other library.
"""

import difflib
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, NoReturn, TypeAlias, Unpack

import torch
from torch import Tensor, nn

from tammes.criterion.criterion import Criterion
from tammes.criterion.presets import Options
from tammes.heads import CosineHead, Head, LinearHead
from tammes.losses import arcface, cosface, l_softmax, normface, sphereface
from tammes.terms import Loss

__all__ = ["from_insightface", "from_pytorch_metric_learning"]

StateDict: TypeAlias = Mapping[str, Any]
"""Result of ``torch.load``: tensors by name, possibly among other entries."""


@dataclass(frozen=True)
class _Peer:
    """Loss of pytorch-metric-learning, with the corresponding head and loss here.

    Attributes:
        defaults: defaults of its constructor, by the names used here.
        head: builds the head from feature size, number of classes, scale and, if it has them,
            ``subcenters``.
        loss: builds the loss from the margin.
        read: reads settings of a live loss that have another name or form there.
        weight: name of its prototypes.
        degrees: whether its margin is given in degrees.
        whole_margin: whether its margin must be an integer.
    """

    defaults: Mapping[str, float]
    head: Callable[..., Head]
    loss: Callable[[float], Loss]
    read: Mapping[str, Callable[[Any], float]] = field(default_factory=dict)
    weight: str = "W"
    degrees: bool = False
    whole_margin: bool = False


def _cosine(size: int, classes: int, scale: float, **options: Any) -> Head:
    return CosineHead(size, classes, scale=scale, **options)


_PEERS = {
    "ArcFaceLoss": _Peer(
        {"margin": 28.6, "scale": 64.0},
        _cosine,
        lambda margin: arcface(margin=margin, extension="linear"),
        degrees=True,
    ),
    "SubCenterArcFaceLoss": _Peer(
        {"margin": 28.6, "scale": 64.0, "subcenters": 3},
        _cosine,
        lambda margin: arcface(margin=margin, extension="linear"),
        read={"subcenters": lambda live: live.sub_centers},
        degrees=True,
    ),
    "SoftTripleLoss": _Peer(
        {"margin": 0.01, "scale": 20.0, "temperature": 0.1, "subcenters": 10},
        partial(_cosine, pooling="soft"),
        lambda margin: cosface(margin=margin),
        read={
            "scale": lambda live: live.la,
            "temperature": lambda live: 1 / live.gamma,
            "subcenters": lambda live: live.centers_per_class,
        },
        weight="fc",
    ),
    "CosFaceLoss": _Peer(
        {"margin": 0.35, "scale": 64.0}, _cosine, lambda margin: cosface(margin=margin)
    ),
    "NormalizedSoftmaxLoss": _Peer({"temperature": 0.05}, _cosine, lambda margin: normface()),
    "LargeMarginSoftmaxLoss": _Peer(
        {"margin": 4, "scale": 1.0},
        lambda size, classes, scale: LinearHead(size, classes, bias=False, scale=scale),
        lambda margin: l_softmax(margin=margin),
        whole_margin=True,
    ),
    "SphereFaceLoss": _Peer(
        {"margin": 4, "scale": 1.0},
        lambda size, classes, scale: CosineHead(
            size, classes, scale=scale, normalize_features=False
        ),
        lambda margin: sphereface(margin=margin),
        whole_margin=True,
    ),
}

_WITHOUT_COUNTERPART = {
    "ProxyNCALoss": "its proxies are the head.weight of a NormFace of scale 2 * softmax_scale",
    "ProxyAnchorLoss": "its proxies are the head.weight of a CosineHead with "
    "proxy_anchor(scale=alpha, margin=margin)",
}

_REDUCTIONS = {"MeanReducer": "mean", "SumReducer": "sum"}


def from_pytorch_metric_learning(
    source: StateDict | nn.Module,
    loss: str | None = None,
    *,
    margin: float | None = None,
    scale: float | None = None,
    temperature: float | None = None,
    subcenters: int | None = None,
    num_classes: int | None = None,
    key: str | None = None,
    **options: Unpack[Options],
) -> Criterion:
    r"""Convert a loss of pytorch-metric-learning 2 to a criterion with its prototypes.

    Scores, loss and gradient are the same:

    - ``ArcFaceLoss``: ``arcface``, continued linearly, on ``CosineHead``
    - ``SubCenterArcFaceLoss``: the same on ``CosineHead(..., subcenters=K)``
    - ``SoftTripleLoss``: ``cosface`` on ``CosineHead(..., subcenters=K, pooling="soft")``
    - ``CosFaceLoss``: ``cosface`` on ``CosineHead``
    - ``NormalizedSoftmaxLoss``: ``normface`` on ``CosineHead``, scale :math:`1/T`
    - ``SphereFaceLoss``: ``sphereface`` on ``CosineHead(..., normalize_features=False)``
    - ``LargeMarginSoftmaxLoss``: ``l_softmax`` on ``LinearHead(..., bias=False)``

    Their weight ``W`` (``fc`` of ``SoftTripleLoss``) has shape ``(D, C)``, or ``(D, C K)`` with K
    prototypes per class, and is transposed. Half precision, to which version 2
    casts its weights under autocast, is converted to float32.

    Args:
        source: a live loss, whose settings are read from it; or a state dict that holds ``W``,
            possibly with a prefix such as ``loss.W``, together with the settings below. Only a
            live loss is checked for features without a counterpart: regularizers, other reducers,
            other distances.
        loss: name of the class the state dict is from, such as ``"ArcFaceLoss"``.
        margin: as their constructor took it: degrees for ``ArcFaceLoss`` and
            ``SubCenterArcFaceLoss``, a cosine for ``CosFaceLoss`` and ``SoftTripleLoss``, a whole
            number for the other two. Their default if not given.
        scale: as their constructor took it, ``la`` of ``SoftTripleLoss``; their default if not
            given.
        temperature: :math:`T` of ``NormalizedSoftmaxLoss``, ``gamma`` of ``SoftTripleLoss``; their
            default if not given.
        subcenters: ``sub_centers`` or ``centers_per_class``; their default if not given.
        num_classes: expected number of classes; another number raises an error.
        key: name of the weight in the state dict, if ``W`` is ambiguous.
        **options: options of :class:`tammes.Criterion`.

    Returns:
        A :class:`tammes.Criterion` on the weight's device, with its own copy of the prototypes.

    Example:
        >>> import tammes
        >>> saved = {"W": torch.eye(4)[:, :3]}
        >>> criterion = tammes.convert.from_pytorch_metric_learning(
        ...     saved, "ArcFaceLoss", margin=28.6, scale=64.0)
        >>> criterion.head
        CosineHead(4, 3, scale=64)
        >>> criterion.loss
        arcface(margin=0.4991641660703783, extension='linear', gradient='exact')
    """
    caller = "from_pytorch_metric_learning"
    numbers = {
        "margin": margin, "scale": scale, "temperature": temperature, "subcenters": subcenters
    }  # fmt: skip
    given = {name: number for name, number in numbers.items() if number is not None}
    if isinstance(source, nn.Module):
        name = type(source).__name__
        peer = _peer(caller, name)
        if loss is not None or given or key is not None:
            raise ValueError(
                f"{caller} expects only options together with a live {name}, got settings"
            )
        options = _options_of(caller, source, options)
        weight = _matrix(caller, peer.weight, getattr(source, peer.weight, None), "(D, C)")
        # A live ArcFaceLoss has already converted degrees to radians.
        settings = {
            setting: float(peer.read.get(setting, attrgetter(setting))(source))
            for setting in peer.defaults
        }
    elif isinstance(source, Mapping):
        if loss is None:
            raise ValueError(
                f"{caller} expects the name of the loss that the state dict is from, such as "
                "'ArcFaceLoss', got none"
            )
        name = loss
        peer = _peer(caller, name)
        unknown = sorted(set(given) - set(peer.defaults))
        if unknown:
            raise ValueError(f"{name} has {' and '.join(peer.defaults)}, got {', '.join(unknown)}")
        weight = _matrix(caller, *_find(caller, source, peer.weight, key), "(D, C)")
        settings = {**peer.defaults, **given}
        if peer.degrees:
            settings["margin"] = _radians(caller, name, settings["margin"])
    else:
        raise TypeError(
            f"{caller} expects a state dict or a live loss, got {type(source).__name__}"
        )

    centers = int(settings.get("subcenters", 1))
    columns = None if num_classes is None else num_classes * centers
    if columns is not None and weight.shape[1] != columns:
        transposed = ": is it transposed?" if weight.shape[0] == columns else ""
        raise ValueError(
            f"{caller} expects a weight of shape (D, {columns}), "
            f"got {tuple(weight.shape)}{transposed}"
        )
    if centers < 1 or weight.shape[1] % centers:
        raise ValueError(
            f"{name} expects a weight of shape (D, C * {centers}), {centers} prototypes per class, "
            f"got {tuple(weight.shape)}"
        )
    if peer.whole_margin and settings["margin"] % 1:
        raise ValueError(f"{name} expects a whole number as margin, got {settings['margin']}")
    if settings.get("temperature", 1.0) <= 0:
        raise ValueError(f"{name} expects temperature above 0, got {settings['temperature']}")
    factor = settings["scale"] if "scale" in settings else 1 / settings["temperature"]
    # A copy, so that training does not change the source.
    prototypes = weight.T.clone(memory_format=torch.contiguous_format)
    pooled: dict[str, Any] = {}
    if "subcenters" in settings:
        pooled = {"subcenters": centers, "temperature": settings.get("temperature", 0.1)}
        if centers > 1:
            prototypes = prototypes.unflatten(0, (-1, centers))
    head = _build_head(partial(peer.head, **pooled), prototypes, factor)
    return Criterion(head, peer.loss(settings.get("margin", 0.0)), **options)


def from_insightface(
    state_dicts: StateDict | Tensor | Sequence[StateDict | Tensor],
    *,
    margins: tuple[float, float, float] = (1.0, 0.5, 0.0),
    scale: float = 64.0,
    gradient: str = "detached",
    num_classes: int | None = None,
    key: str | None = None,
    **options: Unpack[Options],
) -> Criterion:
    r"""Convert the class centres of InsightFace's Partial FC (``arcface_torch``) to a criterion.

    Every rank has saved its own classes, shape ``(C_local, D)``; they are joined in rank order.
    The loss is that of its ``CombinedMarginLoss`` over all classes, whatever fraction of them was
    sampled in training:

    .. math:: (1, m_2, 0):\ \text{arcface}(m_2),\qquad (1, 0, m_3):\ \text{cosface}(m_3)

    The values differ only for :math:`\theta + m_2 > \pi`, where the cosine of the original rises
    again and this one keeps falling. Other triples raise an error: the original ignores
    :math:`m_1` and :math:`m_2` if :math:`m_3 > 0`, and rejects all others. Its interclass filter is
    :func:`tammes.interclass_filter`, which :class:`tammes.convert.PartialFC_V2` takes.

    Args:
        state_dicts: one checkpoint per rank, in rank order: the content of
            ``checkpoint_gpu_{rank}.pt``, with the weight under ``state_dict_softmax_fc``, or that
            state dict, or the weight itself. Note that sorted by name the file of rank 10 comes
            before that of rank 2.
        margins: :math:`(m_1, m_2, m_3)` as in its configurations, :math:`m_2` in radians.
        scale: factor of the cosines.
        gradient: ``"detached"`` as in the original, which ignores the margin in the gradient;
            ``"exact"`` is the gradient of the formula.
        num_classes: expected number of classes; raises an error if, say, a rank is missing.
        key: name of the weight in each state dict, if ``weight`` is ambiguous.
        **options: options of :class:`tammes.Criterion`.

    Returns:
        A :class:`tammes.Criterion` on the first weight's device, with its own copy of the
        prototypes.

    Example:
        >>> import tammes
        >>> ranks = [{"state_dict_softmax_fc": {"weight": torch.randn(n, 8)}} for n in (3, 2)]
        >>> criterion = tammes.convert.from_insightface(ranks, margins=(1.0, 0.5, 0.0))
        >>> criterion.head
        CosineHead(8, 5, scale=64)
        >>> criterion.loss
        arcface(margin=0.5, extension='monotone', gradient='detached')
    """
    caller = "from_insightface"
    loss = insightface_loss(caller, margins, gradient)
    if isinstance(state_dicts, (Mapping, Tensor)):
        state_dicts = [state_dicts]
    shards = []
    for rank, source in enumerate(state_dicts):
        name, value = "weight", source
        if isinstance(source, Mapping):
            source = source.get("state_dict_softmax_fc", source)
            name, value = _find(caller, source, "weight", key)
        elif not isinstance(source, Tensor):
            raise TypeError(
                f"{caller} expects a state dict or a weight of each rank, "
                f"got {type(source).__name__} for rank {rank}: load files with torch.load"
            )
        shards.append(_matrix(caller, f"{name} of rank {rank}", value, "(C_local, D)"))
    if not shards:
        raise ValueError(f"{caller} expects a state dict for each rank, got none")
    sizes = {shard.shape[1] for shard in shards}
    if len(sizes) > 1:
        raise ValueError(
            f"{caller} expects weights of one embedding size, got {sorted(sizes)}: "
            "are they all of one run, and of shape (C_local, D)?"
        )
    counts = [len(shard) for shard in shards]
    share, more = divmod(sum(counts), len(counts))
    expected = [share + (rank < more) for rank in range(len(counts))]
    if counts != expected:
        raise ValueError(
            f"{caller} expects the ranks in order, the first with at most one class more than the "
            f"last, got {counts} classes: {sum(counts)} classes are divided as {expected}"
        )
    if num_classes not in (None, sum(counts)):
        raise ValueError(
            f"{caller} expects {num_classes} classes, got {sum(counts)} on {len(counts)} ranks"
        )
    prototypes = torch.cat([shard.to(shards[0]) for shard in shards])
    return Criterion(_build_head(_cosine, prototypes, scale), loss, **options)


def insightface_loss(caller: str, margins: Sequence[float], gradient: str) -> Loss:
    """Return the loss of three margins, as InsightFace's ``CombinedMarginLoss`` takes them."""
    if not isinstance(margins, Sequence) or len(margins) != 3:
        raise ValueError(f"{caller} expects three margins (m1, m2, m3), got {margins!r}")
    m1, m2, m3 = margins
    if m1 == 1 and m3 == 0:
        return arcface(margin=m2, gradient=gradient)
    if (m1, m2) == (1, 0) and m3 > 0:
        # Check the name of the gradient too, though both are equal for a constant margin.
        arcface(gradient=gradient)
        return cosface(margin=m3)
    ignored = f": InsightFace itself trains that as (1, 0, {m3})" if m3 > 0 else ""
    raise ValueError(
        f"{caller} expects margins (1, m2, 0) or (1, 0, m3) with m3 above 0, "
        f"got {tuple(margins)}{ignored}"
    )


def _peer(caller: str, name: str) -> _Peer:
    if name in _PEERS:
        return _PEERS[name]
    if name in _WITHOUT_COUNTERPART:
        raise ValueError(f"{caller} cannot convert {name}: {_WITHOUT_COUNTERPART[name]}")
    known = {peer.lower(): peer for peer in _PEERS}
    close = difflib.get_close_matches(name.lower(), known, n=2, cutoff=0.5)
    hint = f"; did you mean {' or '.join(repr(known[c]) for c in close)}?" if close else ""
    raise ValueError(f"{caller} expects one of {', '.join(_PEERS)}, got {name!r}{hint}")


def _options_of(caller: str, live: nn.Module, options: Options) -> Options:
    """Options of the criterion that a live loss implies; raises if it has no counterpart."""
    name = type(live).__name__

    def refuse(what: str, got: object) -> NoReturn:
        raise ValueError(
            f"{caller} expects a {name} with {what}, got {got}: "
            "its state_dict() converts to the prototypes and the plain loss"
        )

    for part in ("weight_regularizer", "embedding_regularizer"):
        if getattr(live, part, None) is not None:
            refuse(f"no {part}", type(getattr(live, part)).__name__)
    distance = getattr(live, "distance", None)
    if distance is not None:
        kind = type(distance).__name__
        plain = (distance.normalize_embeddings, distance.p, distance.power) == (True, 2, 1)
        if kind not in ("CosineSimilarity", "DotProductSimilarity") or not plain:
            refuse("plain cosines as its distance", kind if plain else f"an altered {kind}")
    reducer = type(getattr(live, "reducer", None)).__name__
    if "reduction" not in options:
        if reducer not in _REDUCTIONS:
            refuse("a MeanReducer or a SumReducer", reducer)
        options = {"reduction": _REDUCTIONS[reducer], **options}  # type: ignore[typeddict-item]
    return options


def _find(caller: str, state: StateDict, name: str, key: str | None) -> tuple[str, Any]:
    """Return the one entry of that name, with or without a prefix."""
    if key is not None:
        matches = [key] if key in state else []
    else:
        matches = [name] if name in state else [k for k in state if str(k).endswith(f".{name}")]
    if len(matches) == 1:
        return matches[0], state[matches[0]]
    expected = (
        f"the key {key!r}" if key is not None else f"a key {name!r} or one ending in '.{name}'"
    )
    keys = [str(k) for k in state]
    shown = ", ".join(keys[:8]) + (f", ... {len(keys)} in all" if len(keys) > 8 else "")
    if matches:
        raise ValueError(
            f"{caller} expects one weight, got {', '.join(matches)}: name it with key="
        )
    raise ValueError(f"{caller} expects {expected}, got {shown or 'an empty state dict'}")


def _matrix(caller: str, name: str, value: object, layout: str) -> Tensor:
    """Check a weight, and return it detached in float32 or wider."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.ndim != 2:
        got = (
            f"shape {tuple(value.shape)} of {value.dtype}"
            if isinstance(value, Tensor)
            else type(value).__name__
        )
        raise ValueError(
            f"{caller} expects {name} to be a float tensor of shape {layout}, got {got}"
        )
    if not math.isfinite(value.detach().sum(dtype=torch.float64).item()):
        raise ValueError(f"{caller} expects finite prototypes, got NaN or infinity in {name}")
    return value.detach().to(torch.promote_types(value.dtype, torch.float32))


def _radians(caller: str, name: str, degrees: float) -> float:
    if 0 < abs(degrees) <= math.pi / 2:
        warnings.warn(
            f"{caller} takes the margin of {name} in degrees, as its constructor does, "
            f"got {degrees}: 0.5 radians are 28.6 degrees",
            stacklevel=3,
        )
    return math.radians(degrees)


def _build_head(make: Callable[..., Head], prototypes: Tensor, scale: float) -> Head:
    """Build a head with these prototypes; on the meta device none are initialized first."""
    classes, *_, size = prototypes.shape
    with torch.device("meta"):
        head = make(size, classes, scale)
    head.weight = nn.Parameter(prototypes)
    return head
