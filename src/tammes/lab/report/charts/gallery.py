"""The papers' figures as functions.

Every one of them draws with matplotlib when it is called and returns the ``Figure``. With the same
arguments ``.interactive(...)`` gives the Plotly figure for a page, and ``.chart(...)`` the numbers
that both draw. ``save(figure, path)`` writes a figure of matplotlib.

    >>> from tammes.lab.report import plots
    >>> [line.name for line in plots.psi.chart(margins=(1, 2)).panels[0].layers]
    ['m = 1', 'm = 2']
"""

from tammes.lab.report.charts.distributions import (
    angle_heat_map,
    angle_histogram,
    bias_during_training,
    during_training,
    feature_scatter,
    histograms,
    margin_histogram,
    similarity_histogram,
    sphere,
    spheres,
)
from tammes.lab.report.charts.loss_curves import loss, plot_loss
from tammes.lab.report.charts.paper_figures import (
    decision_geometry,
    divergences,
    extensions,
    hinge_and_softplus,
    margins_in_losses,
    psi,
    spectral_overlap,
)
from tammes.lab.report.render.matplotlib_charts import save

__all__ = [
    "angle_heat_map",
    "angle_histogram",
    "bias_during_training",
    "decision_geometry",
    "divergences",
    "during_training",
    "extensions",
    "feature_scatter",
    "hinge_and_softplus",
    "histograms",
    "loss",
    "margin_histogram",
    "margins_in_losses",
    "plot_loss",
    "psi",
    "save",
    "similarity_histogram",
    "spectral_overlap",
    "sphere",
    "spheres",
]
