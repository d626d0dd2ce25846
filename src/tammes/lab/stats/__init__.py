"""Statistics over seeds: means, intervals, paired differences."""
