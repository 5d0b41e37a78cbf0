"""This machine, or those of a launcher, measured as a cluster to simulate."""
