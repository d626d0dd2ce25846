"""Advice before training: feasible margins and scales, initial settings, memory and time."""

from tammes.advise.advice import Advice, advise

__all__ = ["Advice", "advise"]
