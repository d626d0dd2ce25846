"""Networks from images to features."""

from tammes.lab.backbones.registry import TABLE, build, resolve

__all__ = ["TABLE", "build", "resolve"]
