"""Recipes of the papers' tables and figures: cells to train, published numbers, claims.

Each is a YAML file named ``PAPER/TABLE.yaml``; :func:`names` lists them and :func:`load` reads one.
"""

from tammes.lab.reproduce.recipe import Column, PlannedCell, Published, Recipe, Row
from tammes.lab.reproduce.recipe_files import RecipeError, names
from tammes.lab.reproduce.recipe_yaml import load

__all__ = ["Column", "PlannedCell", "Published", "Recipe", "RecipeError", "Row", "load", "names"]
