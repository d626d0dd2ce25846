"""Kernels: dense, streamed and fused ways to compute a split from features and prototypes.

:mod:`tammes.kernels.dispatch` chooses among them; all are tested against
:mod:`tammes.kernels.reference`.
"""
