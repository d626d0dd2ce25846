"""Few-shot recognition: class splits, episodes, methods, margin analysis, cells of recipes."""
