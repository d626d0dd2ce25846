"""Use a criterion with Lightning: as a submodule it is trained, moved and saved automatically.

python examples/lightning_module.py
"""

import tempfile

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tammes


class Classifier(lightning.LightningModule):
    """A small network and an ArcFace criterion."""

    def __init__(self, size=32, classes=10, lr=0.01):
        super().__init__()
        self.lr = lr
        self.network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, size))
        # As an attribute set in __init__, Lightning finds its parameters.
        self.criterion = tammes.ArcFace(size, classes, margin=0.3, scale=16.0)

    def training_step(self, batch, index):
        """Return the loss of a batch and log every term."""
        images, labels = batch
        loss = self.criterion(self.network(images), labels)
        self.log_dict(self.criterion.terms)
        return loss

    def test_step(self, batch, index):
        """Log the accuracy of the logits without margin."""
        images, labels = batch
        predicted = self.criterion.logits(self.network(images)).argmax(1)
        self.log("accuracy", (predicted == labels).float().mean())

    def configure_optimizers(self):
        """Use a larger learning rate for the prototypes than for the network."""
        groups = self.criterion.param_groups(self.network, lr=self.lr, head_lr=10 * self.lr)
        return torch.optim.SGD(groups, momentum=0.9)


def main(epochs=10, path=None):
    """Train, test, and save a checkpoint; returns the test accuracy."""
    lightning.seed_everything(0, verbose=False)
    data = load_digits()
    images, labels = torch.tensor(data.data).float() / 16, torch.tensor(data.target)
    training = TensorDataset(images[:1400], labels[:1400])
    testing = TensorDataset(images[1400:], labels[1400:])

    model = Classifier()
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(model, DataLoader(training, batch_size=64, shuffle=True))
        (result,) = trainer.test(model, DataLoader(testing, batch_size=397), verbose=False)
        trainer.save_checkpoint(path or f"{folder}/model.ckpt")
    print(f"test accuracy {result['accuracy']:.3f}")
    return result["accuracy"]


if __name__ == "__main__":
    main()
