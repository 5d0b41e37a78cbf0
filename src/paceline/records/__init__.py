"""Records of every step, a run's summary, and checkpoints."""
