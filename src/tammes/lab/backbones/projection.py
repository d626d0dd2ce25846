"""Linear layer after a network that only the training uses."""

from torch import Tensor, nn

from tammes.lab.backbones.blocks import Backbone


class Projected(nn.Module):
    """Network followed by a linear layer, between its features and the loss.

    Few-shot codes train on projected features and recognise novel classes by those before the
    layer: ``projected.network(images)``.
    """

    def __init__(self, network: Backbone, num_features: int) -> None:
        super().__init__()
        self.network, self.num_features = network, num_features
        self.layer = nn.Linear(network.num_features, num_features)

    def forward(self, images: Tensor) -> Tensor:
        """Compute projected features of images, shape ``(N, num_features)``."""
        projected: Tensor = self.layer(self.network(images))
        return projected
