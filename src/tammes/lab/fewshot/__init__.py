"""Few-shot recognition: class lists, episodes, classifiers, margin analysis, recipe cells."""
