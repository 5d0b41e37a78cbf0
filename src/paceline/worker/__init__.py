"""`attach`, a worker's session in a run, its process, and the processes beside it, such as the one that evaluates."""
