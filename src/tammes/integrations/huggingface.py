"""A backbone and a criterion as one Hugging Face model, for ``Trainer`` and the Hub.

As part of the model, the prototypes are trained, moved and saved like all other parameters. Passed
to ``Trainer`` as ``compute_loss_func``, a criterion would be neither trained nor saved.
"""

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from tammes.criterion.criterion import Criterion
from tammes.lab.config import HEADS, head_text, parse_head, parse_loss
from tammes.metrics.functional import class_margin
from tammes.optional import require

if TYPE_CHECKING:
    import transformers
    from huggingface_hub import ModelCard, PyTorchModelHubMixin, hf_hub_download
    from safetensors.torch import load_model, save_model
    from transformers import PretrainedConfig, PreTrainedModel, TrainerCallback
    from transformers.utils.generic import ModelOutput
else:
    transformers = require("transformers", extra="huggingface")
    PretrainedConfig = transformers.PretrainedConfig
    PreTrainedModel, TrainerCallback = transformers.PreTrainedModel, transformers.TrainerCallback
    ModelOutput = require("transformers.utils.generic", extra="huggingface").ModelOutput
    _hub = require("huggingface_hub", extra="huggingface")
    PyTorchModelHubMixin = _hub.PyTorchModelHubMixin
    ModelCard, hf_hub_download = _hub.ModelCard, _hub.hf_hub_download
    _safetensors = require("safetensors.torch", extra="huggingface")
    load_model, save_model = _safetensors.load_model, _safetensors.save_model

__all__ = ["MarginCallback", "MarginModel", "MarginOutput"]

Pooling = Literal["auto", "pooler", "mean", "first"]

_WEIGHTS = "model.safetensors"
_CONFIG = "config.json"
_SCHEDULES = "criterion.schedules."
_CARD = """---
{data}
---

# Margin model

Trained with Tammes.

| | |
|---|---|
{table}

## Load it

```python
from tammes.integrations.huggingface import MarginModel

model = MarginModel.from_pretrained("a folder, or a name on the hub")
output = model(**inputs)  # output.logits, output.embeddings
```
"""


@dataclass
class MarginOutput(ModelOutput):
    """Output of :class:`MarginModel`.

    Attributes:
        loss: loss of the batch, if labels are given.
        logits: scores of the classes without margin, shape ``(N, C)``.
        embeddings: features that the criterion compares with prototypes, shape ``(N, D)``.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    embeddings: Tensor | None = None


class MarginModel(nn.Module, PyTorchModelHubMixin, library_name="tammes", tags=["tammes"]):
    """A backbone and a criterion that ``Trainer`` trains and saves together.

    Args:
        backbone: the network that computes the features: an ``AutoModel`` for images, audio or
            text, or any module that returns features of shape ``(N, D)``.
        criterion: head and loss, with the embedding size of the pooled features.
        pooling: how an encoder's output is pooled to one feature: its ``"pooler"``; the ``"mean"``
            over tokens, patches or frames that are not padding; the ``"first"`` token. ``"auto"``
            is the pooler if there is one, else the mean.

    Attributes:
        measures: numbers for the model card, such as ``{"accuracy": 0.93}``;
            :class:`MarginCallback` keeps those of the last evaluation here.

    Example:
        >>> from transformers import AutoModel, ViTConfig
        >>> from tammes.integrations.huggingface import MarginModel
        >>> sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
        >>> config = ViTConfig(**sizes, intermediate_size=16, image_size=8, patch_size=4)
        >>> model = MarginModel(AutoModel.from_config(config), tammes.CosFace(16, 10, scale=16.0))
        >>> output = model(pixel_values=torch.randn(2, 3, 8, 8), labels=torch.tensor([3, 7]))
        >>> output.loss.backward()
        >>> output.logits.shape, output.embeddings.shape
        (torch.Size([2, 10]), torch.Size([2, 16]))
    """

    # The loss is a mean, so Trainer must divide it by the number of accumulated batches.
    accepts_loss_kwargs = False

    def __init__(
        self, backbone: nn.Module, criterion: Criterion, *, pooling: Pooling = "auto"
    ) -> None:
        super().__init__()
        if not isinstance(criterion, Criterion):
            raise TypeError(
                "MarginModel expects a criterion, such as tammes.CosFace(...), "
                f"got {type(criterion).__name__}"
            )
        if criterion.reduction == "none":
            raise ValueError(
                "MarginModel expects a criterion with reduction 'mean' or 'sum', got 'none'"
            )
        if pooling not in ("auto", "pooler", "mean", "first"):
            raise ValueError(
                f"MarginModel expects pooling 'auto', 'pooler', 'mean' or 'first', got {pooling!r}"
            )
        self.backbone = backbone
        self.criterion = criterion
        self.pooling = pooling
        self.measures: dict[str, float] = {}
        config = getattr(backbone, "config", None)
        # A copy, since the key below concerns this model's output, not the backbone's.
        self.config = (
            copy.deepcopy(config) if isinstance(config, PretrainedConfig) else PretrainedConfig()
        )
        # So that Trainer.evaluate passes only the logits to compute_metrics.
        ignored = getattr(config, "keys_to_ignore_at_inference", None) or []
        self.config.keys_to_ignore_at_inference = [*ignored, "embeddings"]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        input_values: Tensor | None = None,
        input_features: Tensor | None = None,
        labels: Tensor | None = None,
        sample_weight: Tensor | None = None,
        **inputs: Any,
    ) -> MarginOutput:
        """Embed a batch, and compute its loss if labels are given.

        The names are those of tokenizers and processors: ``Trainer`` drops dataset columns that are
        not arguments here, unless ``remove_unused_columns=False``.

        Args:
            input_ids: token ids of texts.
            attention_mask: 0 for padding of texts and audio; shape ``(N, T)``.
            token_type_ids: token types of texts.
            pixel_values: images.
            input_values: raw audio.
            input_features: spectrograms.
            labels: class of each example, shape ``(N,)``.
            sample_weight: weight of each example, shape ``(N,)``.
            **inputs: further inputs of the backbone.
        """
        given = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "pixel_values": pixel_values,
            "input_values": input_values,
            "input_features": input_features,
            **inputs,
        }
        given = {name: value for name, value in given.items() if value is not None}
        embeddings = self.embed(given)
        loss = None
        if labels is not None:
            loss = self.criterion(embeddings, labels, weights=sample_weight)
        return MarginOutput(
            loss=loss, logits=self.criterion.logits(embeddings), embeddings=embeddings
        )

    def embed(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return the features of a batch, shape ``(N, D)``.

        Args:
            inputs: as a tokenizer or a processor returns them.
        """
        if isinstance(self.backbone, PreTrainedModel) or len(inputs) != 1:
            output = self.backbone(**inputs)
        else:
            # A plain module may name its argument differently.
            output = self.backbone(*inputs.values())
        return output if isinstance(output, Tensor) else self._pool(output, inputs)

    def _pool(self, output: Any, inputs: Mapping[str, Any]) -> Tensor:
        pooled = getattr(output, "pooler_output", None)
        if self.pooling == "pooler" and pooled is None:
            raise ValueError(
                f"MarginModel expects an output with a pooler for pooling='pooler', got "
                f"{type(output).__name__} of {type(self.backbone).__name__}; try 'mean'"
            )
        if pooled is not None and self.pooling in ("auto", "pooler"):
            # Convolutional networks return (N, D, 1, 1).
            return pooled.flatten(1)
        hidden = output.last_hidden_state
        if hidden.ndim == 4:
            return hidden.mean((2, 3))
        if self.pooling == "first":
            return hidden[:, 0]
        mask = inputs.get("attention_mask")
        if mask is None:
            return hidden.mean(1)
        if mask.shape[1] != hidden.shape[1]:
            # For audio, the mask is over samples and the output over frames.
            backbone: Any = self.backbone
            mask = backbone._get_feature_vector_attention_mask(hidden.shape[1], mask)
        mask = mask.to(hidden.dtype)[:, :, None]
        return (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)

    def activation_checkpointing_enable(self, **settings: Any) -> None:
        """Recompute activations of the backbone in backward."""
        backbone: Any = self.backbone
        backbone.activation_checkpointing_enable(**settings)

    def gradient_checkpointing_enable(self, **settings: Any) -> None:
        """Recompute activations of the backbone in backward; the former name of it."""
        backbone: Any = self.backbone
        backbone.gradient_checkpointing_enable(**settings)

    # ---------------------------------------------------------------- files and the hub

    def _save_pretrained(self, save_directory: Path) -> None:
        save_model(self, str(save_directory / _WEIGHTS), metadata={"format": "pt"})
        self.save_config(save_directory)

    def save_config(self, folder: str | Path) -> None:
        """Write ``config.json``, from which :meth:`from_pretrained` builds the model.

        Args:
            folder: folder such as a checkpoint of ``Trainer``, which has only the weights.
        """
        config = {
            "tammes": {
                "pooling": self.pooling,
                "backbone": _encode_backbone(self.backbone),
                "criterion": _encode_criterion(self.criterion),
                "measures": self.measures,
            }
        }
        text = json.dumps(config, indent=2, sort_keys=True)
        (Path(folder) / _CONFIG).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def _from_pretrained(
        cls,
        *,
        model_id: str,
        revision: str | None,
        cache_dir: str | Path | None,
        force_download: bool,
        local_files_only: bool,
        token: str | bool | None,
        map_location: str = "cpu",
        strict: bool = True,
        config: Mapping[str, Any] | None = None,
        backbone: nn.Module | None = None,
        criterion: Criterion | None = None,
        pooling: Pooling | None = None,
        **model_kwargs: Any,
    ) -> "MarginModel":
        """Build the model from ``config.json``, or from the given parts, and load its weights."""
        saved = (config or {}).get("tammes", {})
        if backbone is None:
            backbone = _decode_backbone(saved.get("backbone"), model_id)
        if criterion is None:
            criterion = _decode_criterion(saved.get("criterion"), model_id)
        pooling = pooling or saved.get("pooling", "auto")
        model = cls(backbone, criterion, pooling=pooling, **model_kwargs)
        model.measures = dict(saved.get("measures", {}))
        file = Path(model_id) / _WEIGHTS
        if not Path(model_id).is_dir():
            file = Path(
                hf_hub_download(
                    repo_id=model_id,
                    filename=_WEIGHTS,
                    revision=revision,
                    cache_dir=cache_dir,
                    force_download=force_download,
                    token=token,
                    local_files_only=local_files_only,
                )
            )
        missing, unexpected = load_model(model, file, strict=False, device=map_location)
        # Schedules belong to a training run, and are not described in config.json.
        wrong = sorted({*missing, *(key for key in unexpected if not key.startswith(_SCHEDULES))})
        if wrong and strict:
            raise ValueError(
                f"{model_id}: the weights do not fit the model that config.json describes "
                f"({', '.join(wrong[:3])}{', ...' if len(wrong) > 3 else ''}); "
                "give from_pretrained the backbone= and criterion= that were saved"
            )
        return model.to(map_location).eval()

    def generate_model_card(self, *args: Any, **kwargs: Any) -> "ModelCard":
        """Write a model card: loss, head, class margin, metrics, and how to load the model."""
        head = self.criterion.head
        rows = {
            "loss": f"`{self.criterion.loss!r}`",
            "head": f"`{head!r}`",
            "backbone": f"`{type(self.backbone).__name__}`, pooling `{self.pooling}`",
            "classes": head.num_classes,
            "embedding size": head.embedding_size,
        }
        margin = class_margin(head.prototypes.detach().float())
        bound = "optimum" if margin.exact else "no larger than"
        rows["class margin (smallest angle between prototypes)"] = (
            f"{float(margin.angle):.2f}° ({bound} {float(margin.optimum):.2f}°)"
        )
        rows |= {name: f"{value:.4g}" for name, value in self.measures.items()}
        table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
        data = self._hub_mixin_info.model_card_data.to_yaml()
        return ModelCard(_CARD.format(data=data, table=table))


def _encode_backbone(backbone: nn.Module) -> dict[str, Any] | None:
    """Describe a transformers model; no other can be rebuilt from a description."""
    name = type(backbone).__name__
    if not isinstance(backbone, PreTrainedModel) or not hasattr(transformers, name):
        return None
    config = json.loads(backbone.config.to_json_string(use_diff=False))
    described = {"class": name, "config": config}
    if "add_pooling_layer" in signature(type(backbone)).parameters:
        # Not part of the configuration.
        described["settings"] = {"add_pooling_layer": backbone.pooler is not None}
    return described


def _decode_backbone(saved: Mapping[str, Any] | None, model_id: str) -> nn.Module:
    if saved is None:
        raise ValueError(
            f"{model_id} does not describe its backbone, which is no model of transformers; "
            "give from_pretrained a backbone="
        )
    kind = getattr(transformers, saved["class"], None)
    # A name from a file must not be able to call anything else.
    if not (isinstance(kind, type) and issubclass(kind, PreTrainedModel)):
        raise ValueError(
            f"{model_id} expects a model of transformers as backbone, got {saved['class']!r}"
        )
    config: Any = kind.config_class
    return kind(config.from_dict(saved["config"]), **saved.get("settings", {}))


def _encode_criterion(criterion: Criterion) -> dict[str, Any] | None:
    """Describe a criterion as text; none if it has a user-defined term or head."""
    loss, head = repr(criterion.loss), criterion.head
    try:
        readable = parse_loss(loss) == criterion.loss
    except ValueError:
        readable = False
    if not readable or type(head) not in HEADS.values():
        return None
    weights = criterion.class_weights
    return {
        "loss": loss,
        "head": head_text(head),
        "embedding_size": head.embedding_size,
        "num_classes": head.num_classes,
        "reduction": criterion.reduction,
        "ignore_index": criterion.ignore_index,
        "class_weights": None if weights is None else weights.tolist(),
    }


def _decode_criterion(saved: Mapping[str, Any] | None, model_id: str) -> Criterion:
    if saved is None:
        raise ValueError(
            f"{model_id} does not describe its criterion, which has a term or a head of its own; "
            "give from_pretrained a criterion="
        )
    loss = parse_loss(saved["loss"])
    head = parse_head(saved["head"], loss, saved["embedding_size"], saved["num_classes"])
    return Criterion(
        head,
        loss,
        reduction=saved["reduction"],
        ignore_index=saved["ignore_index"],
        class_weights=saved["class_weights"],
    )


class MarginCallback(TrainerCallback):
    """Log terms, class margin and scale of a :class:`MarginModel` whenever ``Trainer`` logs.

    It also adds ``config.json`` to checkpoints, so that :meth:`MarginModel.from_pretrained` can
    load them, and keeps the metrics of the last evaluation for the model card.

    Args:
        step_schedules: advance the criterion's schedules once per optimizer step. For gradient
            accumulation, with which they would advance with every batch: attach them with
            ``criterion.schedule(by_hand=True, ...)``.

    Example:
        >>> from tammes.integrations.huggingface import MarginCallback
        >>> callback = MarginCallback()  # MarginCallback().add_to(trainer), before trainer.train()
    """

    def __init__(self, *, step_schedules: bool = False) -> None:
        self.step_schedules = step_schedules
        self._sums: dict[str, Tensor] = {}
        self._batches = 0

    def add_to(self, trainer: Any) -> None:
        """Add the callback before those that report, so that they see its values.

        Passed as ``callbacks=[MarginCallback()]`` it comes after them: its values are printed and
        saved in ``trainer_state.json``, but do not reach TensorBoard.
        """
        trainer.callback_handler.callbacks.insert(0, self)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the terms of a batch whose gradient is accumulated."""
        for name, value in kwargs["model"].criterion.terms.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        self._batches += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the terms of the last batch of a step."""
        self.on_substep_end(args, state, control, **kwargs)
        if self.step_schedules:
            kwargs["model"].criterion.step()

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add means of the terms since the last log, class margin and scale."""
        logs = kwargs["logs"]
        if "loss" not in logs or not self._batches:
            return
        head = kwargs["model"].criterion.head
        found = {f"terms/{name}": float(v) / self._batches for name, v in self._sums.items()}
        if not head.is_sharded:
            # In degrees. A sharded head has only the prototypes of this rank.
            found["class_margin"] = float(class_margin(head.prototypes.detach().float()).angle)
        if isinstance(head.scale, Tensor):
            found["scale"] = float(head.scale.detach())
        self._sums, self._batches = {}, 0
        logs |= found
        state.log_history[-1] |= found

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write ``config.json`` beside the weights of a checkpoint."""
        if state.is_world_process_zero:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            kwargs["model"].save_config(folder)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the metrics for the model card."""
        kwargs["model"].measures = {
            name.removeprefix("eval_"): float(value)
            for name, value in kwargs["metrics"].items()
            if name.startswith("eval_") and not name.endswith(("runtime", "per_second", "_time"))
        }
