"""Functions that :mod:`.ray_pool` sends to the nodes of a cluster as code.

Tammes may be missing on a node, or have another version, which must be reported in a sentence. So
these are nested functions, which Ray serialises by value instead of importing them by name.
"""

from collections.abc import Callable
from typing import Any


def run_task() -> Callable[..., Any]:
    """Return the function that checks the version of Tammes on a node and runs a task."""

    def _run_task(task, events):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        import os
        import platform
        import sys

        import ray

        if task.get("path"):
            sys.path[:] = task["path"]
            os.chdir(task["cwd"])
        # Read when torch is imported below.
        os.environ.update(task.get("variables", {}))
        os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(task["threads"])
        name = platform.node()
        try:
            import tammes
        except Exception as error:
            return {"reason": f"tammes could not be imported on the node {name} ({error})"}
        if tammes.__version__ != task["version"]:
            return {
                "reason": f"the node {name} has tammes {tammes.__version__}, and this machine "
                f"{task['version']}; install the same on both"
            }
        from tammes.lab.runner.ray_remote import work

        return {**work(task, events), "node": ray.get_runtime_context().get_node_id()}

    return _run_task


def event_queue() -> type:
    """Return the actor that holds the events of cells until they are read."""

    class EventQueue:
        def __init__(self):  # type: ignore[no-untyped-def]  # noqa: ANN204
            self.events = []

        def put(self, events):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
            self.events += events

        def drain(self):  # type: ignore[no-untyped-def]  # noqa: ANN202
            events, self.events = self.events, []
            return events

    return EventQueue


def remove_folder() -> Callable[..., Any]:
    """Return the function that deletes a folder on a node."""

    def _remove_folder(folder):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        import shutil

        shutil.rmtree(folder, ignore_errors=True)

    return _remove_folder
