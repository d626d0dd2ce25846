"""A criterion as a loss for Sentence Transformers.

``SentenceTransformerTrainer`` trains the parameters of a loss, but neither saves them nor
synchronises them between processes: :class:`CriterionCheckpoint` saves and restores the prototypes,
and :class:`MarginLoss` keeps them equal on all processes.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tammes.criterion.criterion import Criterion
from tammes.optional import require

if TYPE_CHECKING:
    from safetensors.torch import load_file, save_file
    from transformers import TrainerCallback
else:
    _extra = "sentence-transformers"
    TrainerCallback = require("transformers", extra=_extra).TrainerCallback
    _safetensors = require("safetensors.torch", extra=_extra)
    load_file, save_file = _safetensors.load_file, _safetensors.save_file

__all__ = ["CriterionCheckpoint", "MarginLoss"]

_WEIGHTS = "criterion.safetensors"


class MarginLoss(nn.Module):
    """Margin loss for ``SentenceTransformerTrainer``, for one column of texts and one of labels.

    Args:
        model: the ``SentenceTransformer`` to train.
        criterion: head and loss, with the embedding size of the model.

    Example:
        >>> from tammes.integrations.sentence_transformers import MarginLoss
        >>> model = torch.nn.Module()  # SentenceTransformer("all-MiniLM-L6-v2")
        >>> loss = MarginLoss(model, tammes.CosFace(384, num_classes=150, scale=16.0))
    """

    def __init__(self, model: nn.Module, criterion: Criterion) -> None:
        super().__init__()
        if not isinstance(criterion, Criterion):
            raise TypeError(
                "MarginLoss expects a criterion, such as tammes.CosFace(...), "
                f"got {type(criterion).__name__}"
            )
        if criterion.reduction == "none" or criterion.head.is_sharded:
            got = "a sharded head" if criterion.head.is_sharded else "reduction 'none'"
            raise ValueError(
                "MarginLoss expects a criterion with reduction 'mean' or 'sum' and a head that is "
                f"not sharded, got {got}"
            )
        self.model = model
        self.criterion = criterion
        self._shared = False

    def forward(self, sentence_features: Sequence[Mapping[str, Any]], labels: Tensor) -> Tensor:
        """Return the loss of a batch.

        Args:
            sentence_features: tokens of the texts, one mapping for each column of texts.
            labels: class of each text, shape ``(N,)``.
        """
        columns = [*sentence_features]
        if len(columns) != 1:
            raise ValueError(
                f"MarginLoss expects one column of texts beside the labels, got {len(columns)}; "
                "remove the others from the data set"
            )
        if not self._shared and dist.is_initialized() and dist.get_world_size() > 1:
            self._share()
        return self.criterion(self.model(columns[0])["sentence_embedding"], labels)

    @torch.no_grad()
    def _share(self) -> None:
        """Start from the prototypes of rank 0 and average their gradients over the ranks.

        Needed because the trainer wraps only the model in ``DistributedDataParallel``.
        """
        for tensor in (*self.criterion.parameters(), *self.criterion.buffers()):
            dist.broadcast(tensor, src=0)
        for parameter in self.criterion.parameters():
            parameter.register_hook(_mean_over_ranks)
        self._shared = True

    def get_config_dict(self) -> dict[str, str]:
        """Describe the loss for the model card of Sentence Transformers."""
        return {"loss": repr(self.criterion.loss), "head": repr(self.criterion.head)}


def _mean_over_ranks(gradient: Tensor) -> Tensor:
    total = gradient.contiguous().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


class CriterionCheckpoint(TrainerCallback):
    """Save a criterion in the trainer's checkpoints, and load it when training resumes.

    Without it, resumed training starts from random prototypes.

    Args:
        criterion: the criterion of :class:`MarginLoss`.

    Example:
        >>> from tammes.integrations.sentence_transformers import CriterionCheckpoint
        >>> callback = CriterionCheckpoint(tammes.CosFace(384, num_classes=150))
        >>> # SentenceTransformerTrainer(..., callbacks=[callback])
    """

    def __init__(self, criterion: Criterion) -> None:
        self.criterion = criterion

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write ``criterion.safetensors`` beside the weights of a checkpoint."""
        if state.is_world_process_zero:
            tensors = {
                name: tensor.detach().clone().contiguous()
                for name, tensor in self.criterion.state_dict().items()
            }
            save_file(tensors, _folder(args, state) / _WEIGHTS)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Load the criterion of the checkpoint that the trainer resumes."""
        if state.global_step:
            self.restore(_folder(args, state))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Load the criterion of the best checkpoint if the trainer loads its model."""
        if args.load_best_model_at_end and state.best_model_checkpoint:
            self.restore(state.best_model_checkpoint)

    def restore(self, folder: str | Path) -> None:
        """Load the criterion of a checkpoint.

        Args:
            folder: folder of the checkpoint.
        """
        file = Path(folder) / _WEIGHTS
        if not file.is_file():
            raise ValueError(
                f"CriterionCheckpoint expects {file}, which is not there; resume from a checkpoint "
                "in output_dir that was written with this callback"
            )
        self.criterion.load_state_dict(load_file(file))


def _folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
