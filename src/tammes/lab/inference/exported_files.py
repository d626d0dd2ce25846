"""Export a trained model to a single ONNX or ``torch.export`` file.

The input ``pixels`` is uint8 ``(batch, channels, height, width)``, as
:class:`~tammes.lab.inference.preprocess.Preprocess` returns it; the model normalises it itself. The
outputs are ``embedding`` ``(batch, D)`` and ``logits`` ``(batch, C)``. The batch size is dynamic.

The file is compared with the model before it is kept. Its metadata are strings: ``classes`` and
``preprocessing`` as JSON, ``scale``, ``loss``, ``digest``, and ``threshold`` if given.
"""

import contextlib
import copy
import io
import json
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import tammes
from tammes.lab.inference.trained_model import TrainedModel
from tammes.lab.measure.classification import classifies
from tammes.lab.records.atomic_io import write_atomically
from tammes.lab.training.evaluation import evaluation_features
from tammes.lab.training.model import Model
from tammes.optional import require

ONNX, TORCH = ".onnx", ".pt2"
"""Suffixes of the files."""
METADATA = "metadata.json"
"""Name of the metadata in a ``torch.export`` file."""
BATCH_SIZES = (1, 7)
"""Batch sizes at which a file is compared with the model."""
TOLERANCE = 1e-4
"""Largest deviation of embeddings, relative to their largest absolute value."""
_LIMIT = 2**31 - 2**20
"""Largest size of an ONNX file in bytes, minus some room for the graph."""

Outputs = tuple[Tensor, ...]
Compute = Callable[[Tensor], Outputs]
"""Returns embeddings and, if the file has them, logits."""


class ExportedFile(NamedTuple):
    """A file that was written, its size in bytes and the names of its outputs.

    ``deviation`` is the largest difference of its embeddings from those of the model.
    """

    path: Path
    size: int
    outputs: tuple[str, ...]
    deviation: float


class ExportedNetwork(nn.Module):
    """A copy of a model on the CPU that takes only pixels.

    With ``logits`` it also returns the logits of the classes, and otherwise has no prototypes; with
    ``flip`` it averages the embeddings of an image and its mirror image.
    """

    def __init__(self, model: Model, *, logits: bool, flip: bool = False) -> None:
        super().__init__()
        self.flip = flip
        self.model = copy.deepcopy(model).cpu().requires_grad_(False)
        self.head = self.model.criterion.head if logits else None
        # The state of the loss, other than the head, does not belong in the file.
        del self.model.criterion

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the outputs."""
        return ("embedding",) if self.head is None else ("embedding", "logits")

    def forward(self, pixels: Tensor) -> Outputs:
        """Return embeddings and logits of pixels, uint8 ``(N, channels, height, width)``."""
        # len(pixels) would make the batch size a constant of the program.
        index = torch.zeros_like(pixels[:, 0, 0, 0], dtype=torch.int64)
        embedding = evaluation_features(self.model, pixels, index, flip=self.flip)
        return (embedding,) if self.head is None else (embedding, self.head.logits(embedding))


def export_onnx(
    model: TrainedModel,
    path: str | os.PathLike[str],
    *,
    logits: bool | None = None,
    threshold: float | None = None,
) -> ExportedFile:
    """Write a model to an ONNX file, after comparing its outputs in ONNX Runtime.

    An existing file is replaced only by one that agrees with the model. Logits are included by
    default if the loss trains the prototypes. ``threshold`` is a similarity below which users of
    the file should answer "unknown"; it is only stored.

    Raises:
        ValueError: the model cannot be exported, or the file would not agree with it.
    """
    for name in ("onnx", "onnxscript"):
        require(name, extra="export")
    runtime = require("onnxruntime", extra="export")
    network, metadata = _prepare(model, path, ONNX, logits, threshold)
    needed = sum(each.nbytes for each in network.state_dict().values())
    if needed > _LIMIT:
        hint = "" if network.head is None else "; --no-logits leaves out the classes"
        raise ValueError(
            f"{model.run.folder}: an ONNX file holds at most 2 GiB, and the model has "
            f"{needed / 2**30:.1f} GiB{hint}"
        )
    outputs, program = network.output_names, _program(model, network)
    try:
        with _quiet():
            converted = torch.onnx.export(
                program,
                dynamo=True,
                input_names=["pixels"],
                output_names=list(outputs),
                dynamic_shapes={"pixels": {0: "batch"}},
                external_data=False,
                verbose=False,
            )
        assert converted is not None
        converted.model.metadata_props.update(metadata)
        data: bytes = converted.model_proto.SerializeToString()
        options = runtime.SessionOptions()
        options.log_severity_level = 3
        session = runtime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise _cannot_export(model, "ONNX", error) from error

    def compute(pixels: Tensor) -> Outputs:
        found = session.run(list(outputs), {"pixels": pixels.numpy()})
        return tuple(torch.from_numpy(each) for each in found)

    return write_checked(path, data, network, compute)


def export_torch(
    model: TrainedModel,
    path: str | os.PathLike[str],
    *,
    logits: bool | None = None,
    threshold: float | None = None,
) -> ExportedFile:
    """Write a model to a ``torch.export`` file, after comparing its outputs.

    ``torch.export.load(path).module()`` reads it without Tammes; the metadata are the extra file
    :data:`METADATA`. Arguments and errors are those of :func:`export_onnx`.
    """
    network, metadata = _prepare(model, path, TORCH, logits, threshold)
    buffer, program = io.BytesIO(), _program(model, network)
    with _quiet():
        torch.export.save(program, buffer, extra_files={METADATA: json.dumps(metadata)})
        buffer.seek(0)
        loaded = torch.export.load(buffer).module()
    return write_checked(path, buffer.getvalue(), network, loaded)


def check_suffix(path: str | os.PathLike[str], suffix: str) -> None:
    """Reject a file name with another suffix."""
    if Path(path).suffix != suffix:
        raise ValueError(f"{path}: a file name that ends in {suffix} is expected")


def _prepare(
    model: TrainedModel,
    path: str | os.PathLike[str],
    suffix: str,
    logits: bool | None,
    threshold: float | None,
) -> tuple[ExportedNetwork, dict[str, str]]:
    """Return the network on the CPU and the metadata."""
    check_suffix(path, suffix)
    if threshold is not None and not math.isfinite(threshold):
        raise ValueError(f"export expects threshold to be a finite number, got {threshold}")
    if logits:
        model.check_classifies("export with logits")
    logits = classifies(model.loss) if logits is None else logits
    network = ExportedNetwork(model.model, logits=logits, flip=model.preprocess.flip).eval()
    shape = ", ".join(map(str, model.preprocess.shape))
    metadata = {
        "tammes": tammes.__version__,
        "digest": model.digest,
        "input": f"pixels, uint8, (batch, {shape}); normalised by the model",
        "preprocessing": json.dumps(model.preprocess.as_dict(), ensure_ascii=False),
        "classes": json.dumps(list(model.classes), ensure_ascii=False),
        "loss": repr(model.loss),
        "scale": repr(float(torch.as_tensor(model.model.criterion.head.scale).detach())),
    }
    if threshold is not None:
        metadata["threshold"] = repr(float(threshold))
    return network, metadata


def _program(model: TrainedModel, network: ExportedNetwork) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", min=1)
    try:
        with _quiet():
            return torch.export.export(
                network, (_pixels(network, 2),), dynamic_shapes={"pixels": {0: batch}}
            )
    except Exception as error:
        raise _cannot_export(model, "torch.export", error) from error


def _cannot_export(model: TrainedModel, kind: str, error: Exception) -> ValueError:
    # Exporters wrap the error in a page of advice.
    error = error.__cause__ if isinstance(error.__cause__, Exception) else error
    first = str(error).strip().split("\n")[0]
    return ValueError(
        f"{model.run.folder}: the network {model.run.config.backbone} cannot be exported by {kind} "
        f"({type(error).__name__}: {first})"
    )


def _pixels(network: ExportedNetwork, count: int) -> Tensor:
    """Return random images."""
    generator = torch.Generator().manual_seed(count)
    shape = (count, *network.model.augment.shape)
    return torch.randint(256, shape, dtype=torch.uint8, generator=generator)


def write_checked(
    path: str | os.PathLike[str], data: bytes, network: ExportedNetwork, compute: Compute
) -> ExportedFile:
    """Write a file if ``compute``, which runs its content, agrees with the network.

    If the results differ by more than rounding, a ValueError is raised, and an existing file is
    left unchanged.
    """
    deviation = 0.0
    for count in BATCH_SIZES:
        pixels = _pixels(network, count)
        with torch.no_grad():
            expected, found = network(pixels), compute(pixels)
        off = float((found[0] - expected[0]).abs().max())
        # A NaN is not close either.
        close = off <= TOLERANCE * float(expected[0].abs().max())
        wrong = "" if close else f"embeddings deviate by up to {off:.2g}"
        if close and network.head is not None and not same_ranking(found[1], expected[1]):
            wrong = "it ranks the classes differently"
        if wrong:
            raise ValueError(
                f"{path}: the exported file was not kept, as it does not agree with the model for "
                f"a batch of {count} ({wrong})"
            )
        deviation = max(deviation, off)
    write_atomically(path, data, what="exported file")
    return ExportedFile(Path(path), len(data), network.output_names, deviation)


def same_ranking(found: Tensor, expected: Tensor) -> bool:
    """Whether logits rank the classes alike; those that are equal up to rounding may swap."""
    if found.shape != expected.shape or not bool((found.isfinite() == expected.isfinite()).all()):
        return False
    expected = expected.nan_to_num(neginf=torch.finfo(expected.dtype).min)
    order = found.sort(dim=1, descending=True, stable=True).indices
    falling = expected.gather(1, order)
    rounding = TOLERANCE * expected[expected > torch.finfo(expected.dtype).min].abs().max()
    return bool((falling.diff(dim=1) <= rounding.clamp(min=TOLERANCE)).all())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporters' messages about packages that are not needed and coming changes."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
