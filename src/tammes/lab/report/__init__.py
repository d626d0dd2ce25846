"""Figures and HTML pages of results."""
