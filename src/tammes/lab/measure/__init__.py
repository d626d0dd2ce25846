"""Metrics of runs and files: accuracy, margins, collapse."""
