"""Kernels: dense, streamed and fused ways from features to a split.

:mod:`tammes.kernels.dispatch` chooses among them; :mod:`tammes.kernels.dense` is the reference.
"""
