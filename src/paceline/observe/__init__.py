"""Results of runs, and their presentation."""
