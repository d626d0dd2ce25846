"""Optimizer state: row-sparse steps, and its transfer to resized parameters."""
