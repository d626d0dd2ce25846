"""Images of examples, as data URLs for a page."""

import os
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from tammes.lab.data import Images
from tammes.lab.data.decode import reason
from tammes.lab.data.images import shrink
from tammes.lab.records.run_folder import Run
from tammes.lab.report.render.image_url import image_url
from tammes.lab.training.datasets import prepare_data
from tammes.optional import require

SIDE = 96
"""Longest side of an image on a page, in pixels."""


class Pictures(Protocol):
    """Images of examples, as far as they are available."""

    def show(self, row: int) -> str | None:
        """Return the image of an example as a data URL, or None."""

    def notes(self) -> list[str]:
        """Return sentences about images that could not be shown."""


@dataclass(frozen=True, eq=False)
class FilePictures:
    """Images in files: their common folder, and the path of each example."""

    root: str
    paths: tuple[str, ...]
    faults: dict[str, str] = field(default_factory=dict)
    shown: set[str] = field(default_factory=set)

    def show(self, row: int) -> str | None:
        """Return the image of an example as a data URL, or None."""
        path = os.path.join(self.root, self.paths[row])
        images = require("PIL.Image", extra="lab")
        operations = require("PIL.ImageOps", extra="lab")
        try:
            with images.open(path) as opened:
                opened.draft("RGB", (2 * SIDE, 2 * SIDE))
                picture = operations.exif_transpose(opened).convert("RGB")
        except Exception as error:
            self.faults[path] = reason(error)
            return None
        self.shown.add(path)
        picture.thumbnail((SIDE, SIDE))
        return image_url(picture)

    def notes(self) -> list[str]:
        """Return a sentence about files that could not be read."""
        if not self.faults:
            return []
        path, why = next(iter(self.faults.items()))
        count = len(self.faults)
        return [
            f"{count:,} of {count + len(self.shown):,} images could not be shown, the first is "
            f"{path} ({why}); --images DIR names their folder"
        ]


@dataclass(frozen=True, eq=False)
class RunPictures:
    """Test images of a run, from its data set if that is available, by their index in it."""

    run: Run
    index: Tensor

    def show(self, row: int) -> str | None:
        """Return the image of an example as a data URL, or None."""
        images, _ = self._loaded
        return None if images is None else image_url(shrink(images.read(row)[None], SIDE)[0])

    def notes(self) -> list[str]:
        """Return a sentence about a data set that is not available."""
        _, why = self._loaded
        return [why] if why else []

    @cached_property
    def _loaded(self) -> tuple[Images | None, str]:
        try:
            testing = prepare_data(self.run.config, lambda text: None)[2]
        except (ValueError, OSError, ImportError) as error:
            return None, f"images of {self.run.config.data} cannot be shown ({error})"
        same = testing.digest == self.run.data.get("test_digest")
        if not same or not torch.equal(testing.index, self.index):
            return None, f"images of {self.run.config.data} have changed since the run"
        return testing, ""
