"""Gallery of known identities: enrol, identify, reject the unknown, save and load."""

from tammes.gallery.gallery import Calibration, Gallery, Identified, Recall

__all__ = ["Calibration", "Gallery", "Identified", "Recall"]
