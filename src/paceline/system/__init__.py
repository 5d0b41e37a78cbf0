"""What a process has of its own: the machine, the clock, signals, random generators, its output."""
