"""Simulated machines: cores, memory buses and sockets, and how long they take for what workers do."""
