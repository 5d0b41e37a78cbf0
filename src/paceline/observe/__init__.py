"""Results of runs, and how they are shown."""
