"""A run from its configuration to its folder: `train`, `launch`, `simulate`, and the supervisor of real workers."""
