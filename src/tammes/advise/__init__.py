"""Advice before training: feasible margins and scales, what to start with, memory and time."""

from tammes.advise.advice import Advice, advise

__all__ = ["Advice", "advise"]
