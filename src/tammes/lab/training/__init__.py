"""The parts of :mod:`tammes.lab.train`."""
