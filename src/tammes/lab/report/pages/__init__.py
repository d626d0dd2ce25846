"""Pages, one module each: runs, a reproduction, a measurement."""
