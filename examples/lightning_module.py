"""Train with Lightning: a module that holds backbone and criterion, and a callback for margins.

    python examples/lightning_module.py

In a ``LightningModule`` of your own, set the criterion as an attribute in ``__init__``, return
``self.criterion(features, labels)`` from ``training_step``, and take the parameter groups from
``self.criterion.param_groups(...)``.
"""

import tempfile

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tammes
from tammes.integrations.lightning import MarginCallback, MarginModule


def main(epochs=10, path=None):
    """Train, test, and save a checkpoint; returns the test accuracy."""
    lightning.seed_everything(0, verbose=False)
    data = load_digits()
    images, labels = torch.tensor(data.data).float() / 16, torch.tensor(data.target)
    training = TensorDataset(images[:1400], labels[:1400])
    testing = TensorDataset(images[1400:], labels[1400:])

    model = MarginModule(
        nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32)),
        tammes.ArcFace(32, 10, margin=0.3, scale=16.0),
        lr=0.01,
        # A larger learning rate for the prototypes than for the network.
        head_lr=0.1,
        optimizer=lambda groups: torch.optim.SGD(groups, momentum=0.9),
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            callbacks=[MarginCallback()],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(model, DataLoader(training, batch_size=64, shuffle=True))
        margin = float(trainer.callback_metrics["class_margin"])
        (result,) = trainer.test(model, DataLoader(testing, batch_size=397), verbose=False)
        trainer.save_checkpoint(path or f"{folder}/model.ckpt")
    print(f"test accuracy {result['test_accuracy']:.3f}, class margin {margin:.1f}°")
    return result["test_accuracy"]


if __name__ == "__main__":
    main()
