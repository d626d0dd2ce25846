"""Data sets of the Hugging Face hub, through ``datasets``."""

import logging
import os
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from tammes.lab.data.images import DataError
from tammes.lab.data.listing import Entries, Partitions, hash_of, image_column, read_labels
from tammes.optional import require


class HubImages:
    """Images in a column of a Hugging Face data set; ``title`` names it in messages."""

    def __init__(self, dataset: Any, column: str, title: str) -> None:
        self.dataset, self.column, self.title = dataset, column, title

    def __len__(self) -> int:
        return len(self.dataset)

    def fetch(self, row: int) -> bytes | str:
        """Return the bytes of an image, or the path of its file."""
        value = self.dataset[row][self.column] or b""
        if isinstance(value, dict):
            value = value.get("bytes") or value.get("path") or b""
        return value if isinstance(value, str) else bytes(value)

    def name(self, row: int) -> str:
        """Return the data set and row of an image."""
        return f"{self.title} row {row}"


def partitions(name: str, config: str | None, *, title: str = "") -> Partitions:
    """Return the splits of a data set on the hub, ``OWNER/NAME``, downloaded if needed.

    ``title`` is the name that the user gave, if it is another.
    """
    title = title or name
    on_hub = "the Hugging Face hub" if title == name else f"the Hugging Face hub ({name})"
    if not (_is_downloaded(name) or is_reachable()):
        # Tested before importing datasets: the import takes seconds, and so do its retries.
        raise DataError(
            f"{title}: not a local file or folder, and {on_hub} cannot be reached; check the "
            "spelling of a path, or the network"
        )
    datasets = require("datasets", extra="lab")
    # It would log every failed attempt; the error below is raised once.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        loaded = datasets.load_dataset(name, config)
    except Exception as error:
        # Network, hub and format readers raise many types of errors.
        message = str(error).strip().split("\n")[0].rstrip(".")[:200]
        raise DataError(
            f"{title}: not a local file or folder, and {on_hub} could not load it "
            f"({type(error).__name__}: {message})"
        ) from error
    return {
        split.lower(): lambda split=split: _entries(f"{name} {split}", loaded[split])  # type: ignore[misc]
        for split in loaded
    }


def is_reachable(seconds: float = 2.0) -> bool:
    """Whether the hub, or the proxy on the way to it, accepts a connection in time."""
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    address = urlsplit(getproxies().get("https") or endpoint)
    port = address.port or {"http": 80}.get(address.scheme, 443)
    reached = threading.Event()

    def connect() -> None:
        with suppress(OSError), socket.create_connection((address.hostname, port), seconds):
            reached.set()

    # In a thread, since the DNS lookup has no timeout.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(seconds)
    return reached.is_set()


def _is_downloaded(name: str) -> bool:
    """Whether a Hugging Face cache has a folder for this data set."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface"))
    hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    prepared = Path(os.environ.get("HF_DATASETS_CACHE", home / "datasets"))
    folders = (
        hub / f"datasets--{name.replace('/', '--')}",
        prepared / name.replace("/", "___"),
        prepared / name.replace("/", "___").lower(),
    )
    return any(folder.expanduser().is_dir() for folder in folders)


def _entries(title: str, dataset: Any) -> Entries:
    datasets = require("datasets", extra="lab")
    features = dataset.features
    images = [key for key, value in features.items() if _holds_images(value, datasets)]
    image = image_column(title, images, list(features))
    could = [key for key, value in features.items() if key != image and _holds_labels(value)]
    classes = {key: names for key in could if (names := getattr(features[key], "names", None))}
    columns, labels, names = read_labels(
        title, could, classes, list(features), lambda column: list(dataset[column])
    )
    encoded = dataset.select_columns([image])
    if isinstance(features[image], datasets.Image):
        encoded = encoded.cast_column(image, datasets.Image(decode=False))
    files = [file["filename"] for file in dataset.cache_files]
    sizes = [(os.path.basename(file), os.stat(file).st_size) for file in files]
    times = [os.stat(file).st_mtime_ns for file in files]
    return Entries(
        items=HubImages(encoded, image, title),
        labels=labels,
        names=names,
        stamp=hash_of((title, dataset._fingerprint, files, sizes, times, image, columns)),
        origin=hash_of((title, len(dataset), image, columns)),
    )


def _holds_images(feature: Any, datasets: Any) -> bool:
    if isinstance(feature, dict):
        return "bytes" in feature
    binary = getattr(feature, "dtype", "") in ("binary", "large_binary")
    return isinstance(feature, datasets.Image) or binary


def _holds_labels(feature: Any) -> bool:
    kind = str(getattr(feature, "dtype", ""))
    return kind in ("string", "large_string") or kind.startswith(("int", "uint"))
