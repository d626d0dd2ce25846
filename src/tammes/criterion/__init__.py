"""Criterion: a head and a loss, the object a training loop calls; and the ready-made criteria."""

from tammes.criterion.criterion import Criterion

__all__ = ["Criterion"]
