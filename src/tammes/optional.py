"""Import optional packages."""

import importlib
from types import ModuleType


def require(name: str, *, extra: str) -> ModuleType:
    """Import a package that is not part of the core install, or say how to install it.

    A package can be missing, or installed and broken: torchvision next to a CPU build of torch
    raises ``RuntimeError`` on import. Both cases raise the same error.

    Args:
        name: name of the module.
        extra: the extra of Tammes that installs it.

    Returns:
        The module.

    Raises:
        ImportError: the module cannot be imported; names the command that installs the extra.

    Example:
        >>> from tammes.optional import require
        >>> require("math", extra="metrics").pi
        3.141592653589793
    """
    try:
        return importlib.import_module(name)
    except Exception as cause:
        raise ImportError(
            f"{name} could not be imported ({type(cause).__name__}: {cause}); "
            f"install it with: pip install 'tammes[{extra}]'",
            name=name,
        ) from cause
