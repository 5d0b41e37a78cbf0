"""A worker's life: `attach`, its session in a run, its process, and those beside it."""
