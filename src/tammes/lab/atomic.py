"""Write files so that a reader never sees half of one."""

import contextlib
import os
import secrets
from pathlib import Path


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file in one step: it is there as a whole, or as it was before.

    Args:
        path: where to; missing folders are made.
        data: what to write.

    Raises:
        OSError: with nothing left behind, folders included.
    """
    path = Path(path)
    made = [parent for parent in (path.parent, *path.parent.parents) if not parent.exists()]
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path.parent / f".{path.name}.{secrets.token_hex(4)}", "xb") as file:
            temporary = Path(file.name)
            file.write(data)
            file.flush()
            # Only what has reached the disk may take the place of what was there.
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        for folder in made:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise
