"""timm networks with a criterion as classifier.

Importing this module does not import timm; :func:`margin_model` does.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from tammes.criterion.criterion import Criterion
from tammes.lab.config.expressions import did_you_mean
from tammes.optional import require

__all__ = ["CriterionClassifier", "margin_model"]


class CriterionClassifier(nn.Module):
    """Classifier of a timm network: returns embeddings in training mode, logits in evaluation.

    Args:
        criterion: head and loss; its scores without margin are the logits.

    Example:
        >>> from tammes.integrations.timm import CriterionClassifier
        >>> classifier = CriterionClassifier(tammes.CosFace(8, 3))
        >>> classifier(torch.randn(2, 8)).shape, classifier.eval()(torch.randn(2, 8)).shape
        (torch.Size([2, 8]), torch.Size([2, 3]))
    """

    def __init__(self, criterion: Criterion) -> None:
        super().__init__()
        self.criterion = criterion

    def forward(self, features: Tensor) -> Tensor:
        """Return the features in training mode, else logits of shape ``(N, C)``."""
        return features if self.training else self.criterion.logits(features)


def margin_model(
    name: str,
    criterion: Criterion | Callable[[int], Criterion],
    *,
    pretrained: bool = False,
    **settings: Any,
) -> Any:
    """Build a timm network with a criterion in place of its classifier.

    The result is still a timm network: training scripts, parameter groups, checkpoints and
    ``forward_features`` work as before, and the prototypes are among its parameters. In training
    mode it returns embeddings, so that ``criterion(model(images), labels)`` is the loss, with
    ``criterion = model.get_classifier().criterion``. In evaluation mode it returns logits.

    Args:
        name: name in timm, such as ``resnet50`` or ``vit_small_patch16_224.dino``.
        criterion: a function that builds a criterion from the size of the network's pooled
            features, such as ``lambda size: tammes.CosFace(size, num_classes=100)``; or a
            criterion with that embedding size.
        pretrained: download and use timm's weights; random weights otherwise.
        **settings: further arguments of ``timm.create_model``, such as ``in_chans`` or
            ``drop_path_rate``.

    Returns:
        The network, a ``torch.nn.Module``.

    Raises:
        ImportError: timm cannot be imported.
        ValueError: timm has no network of this name, the network has no linear classifier, or the
            criterion does not fit its features.
    """
    timm = require("timm", extra="timm")
    try:
        # With one class: the layer is replaced, and only the size of its features matters.
        model = timm.create_model(name, pretrained=pretrained, num_classes=1, **settings)
    except RuntimeError as cause:
        if "Unknown model" not in str(cause):
            raise
        hint = did_you_mean(name, timm.list_models())
        raise ValueError(f"timm has no network {name!r}{hint}") from None
    place, layer = model.pretrained_cfg.get("classifier"), model.get_classifier()
    if not isinstance(place, str) or not isinstance(layer, nn.Linear):
        raise ValueError(
            f"margin_model expects a network with one linear classifier, got {name} with "
            f"{type(layer).__name__} at {place!r}"
        )
    size = layer.in_features
    made = criterion if isinstance(criterion, Criterion) else criterion(size)
    if not isinstance(made, Criterion):
        raise TypeError(
            "margin_model expects a criterion, or a function that makes one from the size of the "
            f"features, got {type(made).__name__}"
        )
    if made.head.embedding_size != size:
        raise ValueError(
            f"margin_model expects a criterion with embedding_size={size} for {name}, got "
            f"{made.head.embedding_size}; give a function of the size, such as "
            "lambda size: tammes.CosFace(size, num_classes=100)"
        )
    model.set_submodule(place, CriterionClassifier(made.to(layer.weight.device)))
    model.num_classes = made.head.num_classes
    return model
