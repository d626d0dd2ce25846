"""Select the best epoch by few-shot episodes of validation classes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from tammes.lab import data
from tammes.lab.config.expressions import build
from tammes.lab.config.schema import Config
from tammes.lab.config.typecheck import at_least, check_fields, not_empty
from tammes.lab.data import Images
from tammes.lab.fewshot import class_lists
from tammes.lab.fewshot.episodes import Episodes, draw
from tammes.lab.fewshot.features import check_disjoint
from tammes.lab.fewshot.protocol import accuracies, methods, needs_base_mean, needs_prototypes


@dataclass(frozen=True)
class ValidationEpisodes:
    """Episodes that score an epoch: the accuracy of the model on classes it is not trained on.

    Args:
        classes: part of class lists, such as ``cifar-fs:validation``, the default part.
        shot: labelled images per class.
        way: classes per episode.
        queries: images to recognise per class.
        episodes: number of episodes, the same after every epoch.
        method: one method of :data:`.protocol.TABLE`.
    """

    classes: Annotated[str, not_empty]
    shot: Annotated[int, at_least(1)] = 1
    way: Annotated[int, at_least(2)] = 5
    queries: Annotated[int, at_least(1)] = 15
    episodes: Annotated[int, at_least(1)] = 1000
    method: str = "l2"

    def __post_init__(self) -> None:
        check_fields(self, "select_epoch fewshot")
        chosen = methods(self.method)
        if len(chosen) > 1 or needs_prototypes(chosen):
            raise ValueError(
                "select_epoch fewshot expects one method that needs no prototypes, "
                f"got {self.method}"
            )

    @property
    def needs_base_mean(self) -> bool:
        """Whether the method subtracts the mean of the training features."""
        return needs_base_mean(methods(self.method))

    def load_images(
        self, config: Config, training: Images, report: Callable[[str], None]
    ) -> Images:
        """Load the images of the classes, in the size of the training images."""
        lists, part = class_lists.parse(self.classes, default="validation")
        wanted = lists.part(part)
        check_disjoint(f"select_epoch {self.classes}", training.classes, wanted)
        images = class_lists.load_classes(
            config.data, wanted, size=config.image_size, report=report
        )
        if config.limit:
            images = data.limit(images, config.limit, seed=config.seed)
        # Fail before training if there are too few images.
        self._draw(images, episodes=1)
        return images

    def _draw(self, images: Images, episodes: int) -> Episodes:
        return draw(
            images.labels, way=self.way, shot=self.shot, queries=self.queries, episodes=episodes,
            names=images.classes,
        )  # fmt: skip

    def accuracy(self, features: Tensor, images: Images, base_mean: Tensor | None) -> float:
        """Compute the mean accuracy of the episodes, from features of :meth:`load_images`.

        ``base_mean`` is that of the training features, if the method needs it.
        """
        (method,) = methods(self.method).values()
        drawn = self._draw(images, self.episodes)
        return float(accuracies(features, drawn, method, base_mean=base_mean).mean())


TABLE = {"fewshot": ValidationEpisodes}
"""Ways to choose an epoch, by name."""


def parse_selection(text: str) -> ValidationEpisodes | None:
    """Parse the field ``select_epoch``; None if it is empty.

    Example:
        >>> parse_selection("fewshot('cifar-fs:validation', shot=5)").shot
        5
    """
    return build(text, TABLE, what="select_epoch") if text else None
