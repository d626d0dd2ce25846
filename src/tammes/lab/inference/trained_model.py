"""The model of a finished run, ready to embed and classify images."""

import dataclasses
import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tammes.lab.inference.preprocess import Preprocess, UnreadableImage, named_images
from tammes.lab.measure.classification import classifies
from tammes.lab.records.run_folder import Run, finished_run
from tammes.lab.training.evaluation import evaluation_features
from tammes.lab.training.model import Model, load_model
from tammes.terms import Loss

BATCH = 64
"""Images in a batch."""

Report = Callable[[UnreadableImage], None]
"""Called with each image that is left out."""


class EmbeddedBatch(NamedTuple):
    """Embeddings ``(N, D)`` of a batch of images, float32, on the CPU.

    ``positions`` count the images given, from 0; a name is a path, or ``image POSITION``.
    """

    positions: list[int]
    names: list[str]
    embeddings: Tensor


class Prediction(NamedTuple):
    """The most likely classes of an image, best first, with labels and logits (``scores``).

    ``image`` is a path, or ``image POSITION``; ``probabilities`` are the softmax of the logits over
    all classes, not calibrated.
    """

    image: str
    classes: tuple[str, ...]
    labels: tuple[int, ...]
    scores: tuple[float, ...]
    probabilities: tuple[float, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the prediction as plain values."""
        rows = zip(self.classes, self.labels, self.scores, self.probabilities, strict=True)
        keys = ("class", "label", "score", "probability")
        return {
            "image": self.image,
            "predictions": [dict(zip(keys, row, strict=True)) for row in rows],
        }


class TrainedModel:
    """The model of a finished run, loaded by :func:`load`.

    Images are paths, Pillow images, arrays ``(height, width[, channels])`` or tensors
    ``([channels, ]height, width)``: a single one, an iterable of them, a four-dimensional array or
    tensor, or a folder, whose images are sorted by path. They are decoded and embedded batch by
    batch, in float32.

    Args:
        run: a finished run.
        device: device of the model; by default a GPU if there is one.

    Attributes:
        run: the run.
        model: its model in evaluation mode.
        classes: names of the classes, by label.
        loss: loss that it was trained with.
        preprocess: maps an image to pixels; print it to see all steps.
    """

    def __init__(self, run: Run, device: torch.device | str | None = None) -> None:
        self.run, self.device = run, _device(device)
        self.model: Model = load_model(run).to(self.device)
        self.classes: tuple[str, ...] = tuple(run.data["classes"])
        self.loss: Loss = self.model.criterion.loss
        self.preprocess = Preprocess.of(
            self.model.augment,
            mean=run.data["mean"],
            std=run.data["std"],
            flip=run.config.flip_test,
        )

    @property
    def embedding_size(self) -> int:
        """Dimension D of an embedding."""
        return self.model.criterion.head.embedding_size

    @cached_property
    def digest(self) -> str:
        """Hash of what an embedding depends on: the weights of the backbone and preprocessing.

        Embeddings of models with different digests cannot be compared.
        """
        described = [self.run.config.backbone, *dataclasses.astuple(self.preprocess)]
        result = hashlib.sha256(json.dumps(described).encode())
        for name, tensor in sorted(self.model.backbone.state_dict().items()):
            tensor = tensor.detach().cpu().contiguous()
            result.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            result.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        return result.hexdigest()[:16]

    def embed(self, images: Any, *, batch_size: int = BATCH) -> Tensor:
        """Compute the embeddings of images in any form that the class takes.

        Returns:
            Embeddings, shape ``(N, D)``, float32, on the CPU, in the order of the images; not
            normalised.

        Raises:
            UnreadableImage: an image cannot be read; :meth:`embed_batches` can leave it out.
        """
        parts = [batch.embeddings for batch in self.embed_batches(images, batch_size=batch_size)]
        return torch.cat(parts) if parts else torch.zeros(0, self.embedding_size)

    def embed_batches(
        self, images: Any, *, batch_size: int = BATCH, unreadable: Report | None = None
    ) -> Iterator[EmbeddedBatch]:
        """Yield the embeddings of images batch by batch, with only a few batches in memory.

        Args:
            images: images in any form that the class takes.
            batch_size: images in a batch.
            unreadable: called with an :class:`UnreadableImage` for each image that cannot be read
                and is left out; by default the first one is raised.
        """
        for positions, names, features in self._features(images, batch_size, unreadable):
            yield EmbeddedBatch(positions, names, features.cpu())

    def predict(self, images: Any, top: int = 5, *, batch_size: int = BATCH) -> list[Prediction]:
        """Predict the classes of images; the arguments are those of :meth:`predict_each`."""
        return [*self.predict_each(images, top, batch_size=batch_size)]

    def predict_each(
        self,
        images: Any,
        top: int = 5,
        *,
        batch_size: int = BATCH,
        unreadable: Report | None = None,
    ) -> Iterator[Prediction]:
        """Yield the prediction of each image as soon as its batch is computed.

        Args:
            images: images in any form that the class takes.
            top: number of classes for each image, at most all.
            batch_size: images in a batch.
            unreadable: see :meth:`embed_batches`.
        """
        if isinstance(top, bool) or not isinstance(top, int) or top < 1:
            raise ValueError(f"predict expects top to be 1 or more, got {top!r}")
        self.check_classifies("predict")
        head = self.model.criterion.head
        for _, names, features in self._features(images, batch_size, unreadable):
            with torch.no_grad():
                logits = head.logits(features)
                scores, labels = logits.topk(min(top, head.num_classes))
                shares = (scores - logits.logsumexp(1, keepdim=True)).exp()
            rows = zip(names, labels.tolist(), scores.tolist(), shares.tolist(), strict=True)
            for name, own, values, probabilities in rows:
                # A masked class has a logit of -inf.
                count = sum(value > -torch.inf for value in values)
                yield Prediction(
                    name,
                    tuple(self.classes[label] for label in own[:count]),
                    tuple(own[:count]),
                    tuple(values[:count]),
                    tuple(probabilities[:count]),
                )

    def check_classifies(self, who: str) -> None:
        """Reject a model whose loss does not train the prototypes of its classes."""
        if not classifies(self.loss):
            raise ValueError(
                f"{self.run.folder}: {who} expects a loss that classifies, got {self.loss!r}, "
                "which trains embeddings only; use embed"
            )

    def _features(
        self, images: Any, batch_size: int, unreadable: Report | None
    ) -> Iterator[tuple[list[int], list[str], Tensor]]:
        """Yield positions, names and features on the device, batch by batch."""
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"embed expects batch_size to be 1 or more, got {batch_size!r}")
        for chunk in self._decoded(enumerate(named_images(images)), batch_size):
            positions: list[int] = []
            names: list[str] = []
            pixels: list[Tensor] = []
            failure = None
            for position, name, waiting in chunk:
                try:
                    pixels.append(waiting.result())
                except UnreadableImage as error:
                    if unreadable is None:
                        failure = error
                        break
                    unreadable(error)
                    continue
                positions.append(position)
                names.append(name)
            if pixels:
                with torch.no_grad():
                    batch = torch.stack(pixels).to(self.device)
                    features = evaluation_features(self.model, batch, flip=self.preprocess.flip)
                yield positions, names, features
            if failure is not None:
                # Raised after the results of all images before it.
                raise failure

    def _decoded(
        self, images: Iterator[tuple[int, tuple[str, Any]]], size: int
    ) -> Iterator[list[tuple[int, str, Future[Tensor]]]]:
        """Decode in threads, one batch ahead of the network."""
        batches: deque[list[tuple[int, str, Future[Tensor]]]] = deque()
        pool = ThreadPoolExecutor(min(os.cpu_count() or 1, 8))
        try:
            while chunk := [*islice(images, size)]:
                batches.append(
                    [
                        (position, name, pool.submit(self.preprocess, image, name))
                        for position, (name, image) in chunk
                    ]
                )
                if len(batches) > 1:
                    yield batches.popleft()
            yield from batches
        finally:
            pool.shutdown(cancel_futures=True)

    def __repr__(self) -> str:
        return (
            f"TrainedModel({str(self.run.folder)!r}, {len(self.classes)} classes, "
            f"embedding_size={self.embedding_size}, loss={self.loss!r})"
        )


def _device(device: torch.device | str | None) -> torch.device:
    """Return a device of this machine; by default a GPU if there is one."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        # Only allocating on a device shows that it exists.
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ValueError(f"load expects a device that torch finds, got {device!r}") from error


def load(
    run: str | os.PathLike[str] | Run, *, device: torch.device | str | None = None
) -> TrainedModel:
    """Load the :class:`TrainedModel` of a finished run, to embed and classify images.

    Args:
        run: folder of a finished run.
        device: device of the model; by default a GPU if there is one, whatever it was trained on.

    Raises:
        ValueError: the folder is not a run, or the run is not finished.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from tammes.lab import Config, train
        >>> with TemporaryDirectory() as folder:
        ...     run = train(Config(data="digits", limit=100, epochs=1), folder)
        ...     model = tammes.load(folder, device="cpu")
        >>> model.embed(torch.zeros(3, 1, 8, 8)).shape
        torch.Size([3, 128])
        >>> [len(prediction.classes) for prediction in model.predict(torch.zeros(8, 8), top=2)]
        [2]
    """
    folder = run.folder if isinstance(run, Run) else run
    return TrainedModel(finished_run(folder), device)
