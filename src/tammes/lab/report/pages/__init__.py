"""Pages: runs, reproductions, measurements; one module each."""
