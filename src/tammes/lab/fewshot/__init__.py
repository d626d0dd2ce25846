"""Few-shot recognition: class splits, episodes, classifiers, margin analysis, recipe cells."""
