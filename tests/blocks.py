"""Cut the work of the streamed kernel as a test wants it."""

from tammes.kernels import plan, streamed


def cut(monkeypatch, rows, classes, *, thin=False):
    """Make blocks of a given size, to see every seam; and take the way of blocks of classes."""

    def blocks(self, problem):
        return plan.cut(len(problem.features), rows), plan.cut(len(problem.prototypes), classes)

    monkeypatch.setattr(plan.Plan, "blocks", blocks)
    monkeypatch.setattr(plan.Plan, "too_thin", lambda self, problem: thin)
    monkeypatch.setattr(streamed, "class_blocks", lambda p: plan.cut(len(p.prototypes), classes))
