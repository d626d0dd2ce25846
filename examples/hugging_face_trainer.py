"""Train an image encoder with the Hugging Face Trainer and a margin loss.

    python examples/hugging_face_trainer.py

``MarginModel`` joins backbone and criterion, so that the prototypes are trained, moved and saved
with all other parameters. The encoder here is small and starts from scratch; with
``AutoModel.from_pretrained("microsoft/resnet-18")`` nothing else changes but the sizes.
"""

import tempfile

import torch
from sklearn.datasets import load_digits
from transformers import AutoModel, ResNetConfig, Trainer, TrainingArguments

import tammes
from tammes.integrations.huggingface import MarginCallback, MarginModel


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(1) == prediction.label_ids).mean())}


def main(epochs=10, path=None):
    """Train, evaluate, save and load; returns the test accuracy of the loaded model."""
    torch.manual_seed(0)
    data = load_digits()
    examples = [
        {"pixel_values": torch.tensor(image).float()[None] / 16, "labels": int(label)}
        for image, label in zip(data.images, data.target, strict=True)
    ]
    config = ResNetConfig(
        num_channels=1,
        embedding_size=16,
        hidden_sizes=[16, 32],
        depths=[1, 1],
        layer_type="basic",
    )
    criterion = tammes.CosFace(embedding_size=32, num_classes=10, margin=0.2, scale=16.0)
    model = MarginModel(AutoModel.from_config(config), criterion)
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            output_dir=folder,
            num_train_epochs=epochs,
            per_device_train_batch_size=32,
            per_device_eval_batch_size=397,
            learning_rate=5e-3,
            use_cpu=True,
            save_strategy="no",
            logging_strategy="epoch",
            report_to=[],
            disable_tqdm=True,
            seed=0,
        )
        trainer = Trainer(model, options, train_dataset=examples[:1400])
        MarginCallback().add_to(trainer)
        trainer.train()
        model.save_pretrained(path or folder)

        loaded = MarginModel.from_pretrained(path or folder)
        trainer = Trainer(loaded, options, compute_metrics=accuracy)
        result = trainer.evaluate(examples[1400:])["eval_accuracy"]
    print(f"test accuracy {result:.3f}")
    return result


if __name__ == "__main__":
    main()
