"""Few-shot recognition: class lists, episodes, methods, margin analysis, cells of recipes."""
