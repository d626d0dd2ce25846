"""Margin losses inside other libraries' training: one module for each, imported on its own.

:mod:`tammes.integrations.sklearn` is a scikit-learn classifier. Importing a module here imports the
library that it is named after; ``import tammes`` imports none of them.
"""
