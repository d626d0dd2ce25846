"""The parts of :mod:`tammes.lab.training.loop`."""
