"""Gallery of known identities: enrol, identify, reject the unknown, save and load."""

from tammes.gallery.gallery import CalibratedThreshold, Gallery, Identified, Recall

__all__ = ["CalibratedThreshold", "Gallery", "Identified", "Recall"]
