"""Guards: one file for each thing that loops do around the optimizer. A guard makes it take effect, warns or refuses."""
