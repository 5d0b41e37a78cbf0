"""A model over unequal devices: graph, groups, placement, partition, and the workers that run its parts."""
