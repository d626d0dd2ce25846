"""Networks that make features of images."""

from tammes.lab.backbones.registry import TABLE, build, resolve

__all__ = ["TABLE", "build", "resolve"]
