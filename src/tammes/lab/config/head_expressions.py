"""Heads written as text, and the default head of a loss."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from tammes.advise.defaults import main_term, recommended_scale
from tammes.advise.feasibility import LINEAR
from tammes.criterion.evaluate_terms import check_cosine_margin, check_fit
from tammes.heads import CosineHead, DistanceHead, GaussianHead, Head, LinearHead, SimplexHead
from tammes.lab.config.expressions import Call, build, parse_call
from tammes.terms import Loss

HEADS: dict[str, Callable[..., Head]] = {
    "linear": LinearHead,
    "cosine": CosineHead,
    "gaussian": GaussianHead,
    "distance": DistanceHead,
    "simplex": SimplexHead,
}
"""Heads by name."""


def parse_head(text: str, loss: Loss, embedding_size: int, num_classes: int) -> Head:
    """Build a head from text, and check that it works with the loss.

    Args:
        text: such as ``"cosine(scale=30)"``; ``"auto"`` is the default head of the loss. A head for
            unit features without a scale gets :func:`recommended_scale`.
        loss: loss that the head is trained with.
        embedding_size: dimension D of the features.
        num_classes: number of classes C.

    Example:
        >>> import tammes
        >>> parse_head("auto", tammes.cosface(margin=0.2), 3, 10)
        CosineHead(3, 10, scale=30)
    """
    given = [] if text.strip() == "auto" else [parse_call(text, what="head")]
    calls = [
        _with_scale(call, loss, embedding_size, num_classes) for call in given or _candidates(loss)
    ]
    call = calls[0] if given else _first_fit(calls, loss, embedding_size, num_classes)
    sizes = {"embedding_size": embedding_size, "num_classes": num_classes}
    head = build(call, HEADS, what="head", **sizes)
    for _, term in loss.leaves():
        check_fit(head, term)
        check_cosine_margin(head, term)
    return head


def head_text(head: Head) -> str:
    """Return the text from which :func:`parse_head` builds the same head.

    Example:
        >>> head_text(LinearHead(4, 3, bias=False))
        'linear(bias=False, scale=1.0)'
    """
    name = next(name for name, kind in HEADS.items() if type(head) is kind)
    return str(Call(name, (), head_settings(head)))


def head_settings(head: Head) -> dict[str, Any]:
    """Return the settings that build the same head, apart from its sizes."""
    settings: dict[str, Any] = {}
    if isinstance(head, LinearHead):
        settings["bias"] = head.bias is not None
    settings["scale"] = head.scale_setting
    settings |= head.similarity.options
    if isinstance(head, DistanceHead) and head.anchors is not None:
        settings["anchors"] = head.anchors
    if head.implementation != "auto":
        settings["implementation"] = head.implementation
    return settings


def _with_scale(call: Call, loss: Loss, embedding_size: int, num_classes: int) -> Call:
    """Give a cosine or simplex head without a scale the default one."""
    if call.name not in ("cosine", "simplex") or "scale" in call.kwargs:
        return call
    raw = call.kwargs.get("normalize_features") is False
    scale = 1.0 if raw else recommended_scale(loss, embedding_size, num_classes)
    return Call(call.name, call.args, {**call.kwargs, "scale": scale})


def _first_fit(calls: Sequence[Call], loss: Loss, embedding_size: int, num_classes: int) -> Call:
    """Return the first head that all terms of a loss accept."""
    problem: ValueError | None = None
    for call in calls:
        # On the meta device nothing is allocated or drawn; only compatibility is tested.
        with torch.device("meta"):
            head = HEADS[call.name](embedding_size, num_classes, **call.kwargs)
        try:
            for _, term in loss.leaves():
                check_fit(head, term)
        except ValueError as error:
            problem = problem or error
        else:
            return call
    assert problem is not None
    raise problem


def _candidates(loss: Loss) -> Iterator[Call]:
    """Yield the default heads of a loss, that of its main term first."""
    main = main_term(loss)
    terms = [term for _, term in loss.leaves()]
    with_bias, without_bias = Call("linear"), Call("linear", (), {"bias": False})
    cosine = Call("cosine")
    if main is None and any(term.definition.on == "proxies" for term in terms):
        yield cosine
    elif main is None or main.name == "l_softmax":
        yield without_bias
    elif main.name == "large_margin_gaussian":
        yield Call("gaussian")
    elif main.name == "cac":
        yield Call("distance")
    elif main.name == "arpl":
        yield Call("distance", (), {"reciprocal": True})
    elif main.name == "sphereface":
        yield Call("cosine", (), {"normalize_features": False})
    elif main.name not in LINEAR:
        yield cosine
    elif any(term.within is not None for term in terms):
        # Direct and spectral sums split the feature space by the span of the prototypes: no bias.
        yield without_bias
    yield from (with_bias, without_bias, cosine)
