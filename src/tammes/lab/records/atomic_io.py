"""Write files atomically, and lock folders."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from tammes.checkpoint.safetensors_io import atomic_write


def write_atomically(path: str | os.PathLike[str], data: bytes, *, what: str = "") -> None:
    """Write a file atomically: readers see the old content or all of the new.

    Missing folders are created. If writing fails, no partial file and no new folder is left behind,
    and an OSError says ``what`` kind of file it was, such as "page".
    """
    path = Path(path)
    created = _missing(path.parent)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            file.write(data)
    except BaseException as error:
        _remove_empty(created)
        if isinstance(error, OSError) and what:
            reason = error.strerror or error
            raise OSError(f"{path}: the {what} cannot be written ({reason})") from error
        if isinstance(error, OSError) and error.filename is None:
            # The error for a full disk does not name the file.
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def _missing(folder: Path) -> list[Path]:
    """Return a folder and its parents as far as they do not exist, innermost first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def _remove_empty(folders: list[Path]) -> None:
    """Remove those folders that are empty."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def clear_leftovers(folder: Path) -> None:
    """Delete unfinished files of killed processes from a folder."""
    for path in folder.glob(".*.????????"):
        path.unlink(missing_ok=True)


def writable(folder: Path, *, flag: str) -> Path:
    """Check that a folder, which need not exist, can be written to, and return it.

    Nothing is left behind. If it cannot, a ValueError says why and points to ``flag``.
    """
    probe = folder / f".{secrets.token_hex(4)}"
    created = _missing(folder)
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
        _remove_empty(created)
    return folder


@contextlib.contextmanager
def locked(folder: Path, otherwise: str) -> Iterator[None]:
    """Hold an exclusive lock on a folder, at most until the process ends.

    A folder that was created for the lock and stayed empty is removed. If another process holds the
    lock, a ValueError says ``otherwise``.
    """
    created = _missing(folder)
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder / ".lock"
    try:
        with open(lock, "w") as file:
            if not _try_lock(file):
                raise ValueError(f"{folder}: {otherwise}")
            yield
    finally:
        if created and [*folder.iterdir()] == [lock]:
            lock.unlink(missing_ok=True)
            _remove_empty(created)


def _try_lock(file: IO[str]) -> bool:
    try:
        import fcntl
    except ImportError:
        # Windows has no such locks.
        return True
    try:
        # A forked process does not inherit this kind of lock.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
