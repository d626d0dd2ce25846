"""Start training from a finished run: large-margin fine-tuning."""

from collections.abc import Sequence

from tammes.lab.records.run_folder import RecordError, Run
from tammes.lab.training.model import Model

_TAKEN = ("backbone.", "criterion.head.", "criterion.states.")
"""Prefixes of the weights to load; schedules restart, and margins are those of the new loss."""


def start_from(model: Model, run: Run, classes: Sequence[str]) -> None:
    """Load the weights of a finished run into a new model.

    Raises:
        RecordError: the run is not finished, or its network, head or classes differ.
    """
    status = run.config and run.status
    if status != "done":
        raise RecordError(f"{run.folder}: start expects a finished run, got one that is {status}")
    if run.data["classes"] != list(classes):
        raise RecordError(
            f"{run.folder}: start expects a run on the same {len(classes)} classes, got "
            f"{len(run.data['classes'])} others"
        )
    own = {key: value for key, value in model.state_dict().items() if key.startswith(_TAKEN)}
    taken = {key: value for key, value in run.tensors("model").items() if key.startswith(_TAKEN)}
    faults = [
        key
        for key in own.keys() | taken.keys()
        if key not in own or key not in taken or own[key].shape != taken[key].shape
    ]
    if faults:
        raise RecordError(
            f"{run.folder}: start expects a run with the same network and head, got "
            f"{len(faults)} weights that do not fit, such as {min(faults)}"
        )
    model.load_state_dict(taken, strict=False)
