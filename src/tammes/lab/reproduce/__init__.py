"""Reproduction of the papers: recipes, planned cells, ledgers, claims."""
