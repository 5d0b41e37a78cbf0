"""Measures this machine, or those of a launcher, as a cluster to simulate."""
