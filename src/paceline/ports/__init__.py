"""The contract between an algorithm and the world: what a program may ask for, as protocols."""
