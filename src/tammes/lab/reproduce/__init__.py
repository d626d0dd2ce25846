"""Reproduction of the papers: recipes, cells, ledgers, claims."""
