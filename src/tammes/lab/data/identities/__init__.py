"""Readers of examples with identities and of pairs, for retrieval and verification.

:func:`read_market1501`, :func:`read_dukemtmc`, :func:`read_table` and :func:`read_parquet` return
:class:`IdentityExamples`; :func:`read_lfw`, :func:`read_insightface` and :func:`read_trials` return
:class:`IdentityPairs`. Nothing is decoded: an item is the path of a file, or its bytes.
"""

from tammes.lab.data.identities.examples import IdentityExamples, IdentityPairs
from tammes.lab.data.identities.insightface import read_insightface
from tammes.lab.data.identities.layouts import read_dukemtmc, read_market1501
from tammes.lab.data.identities.pairs import read_lfw, read_trials
from tammes.lab.data.identities.tables import read_parquet, read_table

__all__ = [
    "IdentityExamples",
    "IdentityPairs",
    "read_dukemtmc",
    "read_insightface",
    "read_lfw",
    "read_market1501",
    "read_parquet",
    "read_table",
    "read_trials",
]
