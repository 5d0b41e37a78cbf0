"""The process and its machine: cores, clock, signals, random generators, output, atomic file writes."""
