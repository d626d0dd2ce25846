"""What :mod:`.cluster` sends to the nodes of a cluster as code.

Tammes may be missing there, or be another one, and that is to be said in a sentence. So these are
functions within functions, which Ray sends as they are and does not look up by name.
"""

from collections.abc import Callable
from typing import Any


def begin() -> Callable[..., Any]:
    """What a process of the cluster does with a task: see that it can, then work on it."""

    def _begin(task, told):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        import os
        import platform
        import sys

        import ray

        if task.get("path"):
            sys.path[:] = task["path"]
            os.chdir(task["cwd"])
        # Read when torch is imported, which is below.
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

        return {**work(task, told), "node": ray.get_runtime_context().get_node_id()}

    return _begin


def told() -> type:
    """The actor that keeps what cells say until it is asked for."""

    class Told:
        def __init__(self):  # type: ignore[no-untyped-def]  # noqa: ANN204
            self.said = []

        def put(self, said):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
            self.said += said

        def take(self):  # type: ignore[no-untyped-def]  # noqa: ANN202
            said, self.said = self.said, []
            return said

    return Told


def forget() -> Callable[..., Any]:
    """Takes away a folder on a node."""

    def _forget(folder):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        import shutil

        shutil.rmtree(folder, ignore_errors=True)

    return _forget
