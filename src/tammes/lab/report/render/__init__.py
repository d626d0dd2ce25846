"""Renderers: matplotlib figures, Plotly figures, self-contained HTML pages."""
