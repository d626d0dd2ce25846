"""The one way to import an optional package."""

import importlib
from types import ModuleType


def require(name: str, *, extra: str) -> ModuleType:
    """Import a package that the core install does not bring, or say what to install.

    A package can be missing, or be there and broken: torchvision beside a CPU build of torch
    raises ``RuntimeError`` when it is imported. Both end in the same sentence.

    Args:
        name: the module to import.
        extra: the extra of Tammes that brings it.

    Returns:
        The module.

    Raises:
        ImportError: with the original error as its cause and the line that installs the extra.

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
