"""Cut the work of the streamed kernel as a test wants it."""

from tammes.kernels import tiling
from tammes.kernels.streamed import functions


def cut(monkeypatch, rows, classes, *, thin=False):
    """Make blocks of a given size, to see every seam; and take the way of blocks of classes."""

    def blocks(self, problem):
        return tiling.cut(len(problem.features), rows), tiling.cut(len(problem.prototypes), classes)

    monkeypatch.setattr(tiling.Plan, "blocks", blocks)
    monkeypatch.setattr(tiling.Plan, "too_thin", lambda self, problem: thin)
    monkeypatch.setattr(functions, "class_blocks", lambda p: tiling.cut(len(p.prototypes), classes))
