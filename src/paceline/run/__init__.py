"""A run from its configuration to its folder: `train`, `launch`, `simulate`."""
