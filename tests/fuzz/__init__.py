"""Fuzz every path of a criterion against an independent float64 reference."""
