"""Tables and figures of the papers: what to train, what came out there, what is claimed of it.

Each is a YAML file named ``PAPER/TABLE.yaml``; :func:`names` lists them and :func:`load` reads one.
"""

from tammes.lab.reproduce.recipe import Column, PlannedCell, Published, Recipe, Row
from tammes.lab.reproduce.recipe_files import RecipeError, names
from tammes.lab.reproduce.recipe_yaml import load

__all__ = ["Column", "PlannedCell", "Published", "Recipe", "RecipeError", "Row", "load", "names"]
