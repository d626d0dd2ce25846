"""Gallery of known identities: enrol, identify, reject unknown queries, save and load."""

from tammes.gallery.approximate_search import Recall
from tammes.gallery.gallery import Gallery, Identified
from tammes.gallery.pair_scores import CalibratedThreshold

__all__ = ["CalibratedThreshold", "Gallery", "Identified", "Recall"]
