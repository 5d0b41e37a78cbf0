"""Guards: one file for each thing that a loop may do around the optimizer, made to take effect, warned of or refused."""
