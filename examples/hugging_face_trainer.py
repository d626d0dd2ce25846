"""Use a criterion with the Hugging Face Trainer: the model contains it and returns its loss.

    python examples/hugging_face_trainer.py

As part of the model, the prototypes are trained, moved and saved with all other parameters.
"""

import tempfile
from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments
from transformers.modeling_outputs import ModelOutput

import tammes


@dataclass
class Scores(ModelOutput):
    """Output for the Trainer: the loss if labels are given, and logits without margin."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None


class DigitsConfig(PretrainedConfig):
    """Sizes of the model."""

    model_type = "tammes_digits"

    def __init__(self, embedding_size=32, num_classes=10, margin=0.35, scale=16.0, **rest):
        super().__init__(**rest)
        self.embedding_size, self.num_classes = embedding_size, num_classes
        self.margin, self.scale = margin, scale


class DigitsModel(PreTrainedModel):
    """A small network and a CosFace criterion."""

    config_class = DigitsConfig

    def __init__(self, config):
        super().__init__(config)
        self.network = nn.Sequential(
            nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, config.embedding_size)
        )
        self.criterion = tammes.CosFace(
            config.embedding_size, config.num_classes, margin=config.margin, scale=config.scale
        )
        self.post_init()

    def _init_weights(self, module):
        """Do nothing: every submodule initialises itself."""

    def forward(self, images, labels=None):
        """Return the logits of a batch, and the loss if labels are given."""
        features = self.network(images)
        loss = None if labels is None else self.criterion(features, labels)
        return Scores(loss=loss, logits=self.criterion.logits(features))


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(1) == prediction.label_ids).mean())}


def main(epochs=10, path=None):
    """Train, evaluate, save and load; returns the test accuracy of the loaded model."""
    torch.manual_seed(0)
    data = load_digits()
    examples = [
        {"images": torch.tensor(image).float() / 16, "labels": int(label)}
        for image, label in zip(data.data, data.target, strict=True)
    ]
    with tempfile.TemporaryDirectory() as folder:
        model = DigitsModel(DigitsConfig())
        options = TrainingArguments(
            output_dir=folder,
            num_train_epochs=epochs,
            per_device_train_batch_size=64,
            per_device_eval_batch_size=397,
            learning_rate=3e-3,
            use_cpu=True,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=0,
        )
        Trainer(model, options, train_dataset=examples[:1400]).train()
        model.save_pretrained(path or folder)

        loaded = DigitsModel.from_pretrained(path or folder)
        trainer = Trainer(loaded, options, compute_metrics=accuracy)
        result = trainer.evaluate(examples[1400:])["eval_accuracy"]
    print(f"test accuracy {result:.3f}")
    return result


if __name__ == "__main__":
    main()
