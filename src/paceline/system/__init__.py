"""The process and its machine: cores, clock, signals, random generators, output, files written whole or not at all."""
