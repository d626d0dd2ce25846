"""Write files so that a reader never sees half of one, and folders so that only one does."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file in one step: it is there as a whole, or as it was before.

    Args:
        path: where to; missing folders are made.
        data: what to write.

    Raises:
        OSError: with nothing left behind, folders included.
    """
    path = Path(path)
    made = _missing(path.parent)
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
    except BaseException as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        _take_away(made)
        if isinstance(error, OSError) and error.filename is None:
            # A full disk does not say which file it was full for.
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def _missing(folder: Path) -> list[Path]:
    """The folders that have to be made for one to be there, the innermost first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def _take_away(folders: list[Path]) -> None:
    """Remove folders that were made in vain; one that somebody else uses meanwhile stays."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def clear_leftovers(folder: Path) -> None:
    """Take away what processes that were killed had begun to write to a folder."""
    for path in folder.glob(".*.????????"):
        path.unlink(missing_ok=True)


def writable(folder: Path, *, flag: str) -> Path:
    """A folder that can be written to; one that has to be made for the trial is taken away again.

    Args:
        folder: that need not be there yet.
        flag: how the user says which one.

    Raises:
        ValueError: a sentence that says why not.
    """
    probe = folder / f".{secrets.token_hex(4)}"
    made = _missing(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(
            f"{folder} cannot be written to ({error.strerror or error}); "
            f"choose another folder with {flag}"
        ) from None
    finally:
        _take_away(made)
    return folder


@contextlib.contextmanager
def alone(folder: Path, otherwise: str) -> Iterator[None]:
    """Have a folder to oneself; the lock goes with the process, however that ends.

    A folder that was made for it, and that nothing was written to, is taken away again.

    Args:
        folder: made if it is missing.
        otherwise: what is said where another process has it.

    Raises:
        ValueError: another process has it.
    """
    made = _missing(folder)
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder / ".lock"
    try:
        with open(lock, "w") as file:
            if not _locked(file):
                raise ValueError(f"{folder}: {otherwise}")
            yield
    finally:
        if made and [*folder.iterdir()] == [lock]:
            # Nothing came of it.
            lock.unlink(missing_ok=True)
            _take_away(made)


def _locked(file: IO[str]) -> bool:
    try:
        import fcntl
    except ImportError:
        # No such locks on this system.
        return True
    try:
        # Of this kind a process that is forked off inherits none.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
