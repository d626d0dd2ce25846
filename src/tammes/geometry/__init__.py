"""Where prototypes can be: arrangements of points on the sphere."""

from tammes.geometry.simplex import simplex

__all__ = ["simplex"]
