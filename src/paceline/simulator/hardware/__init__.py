"""Simulated machines: cores, memory buses and sockets, and the time that workers' operations take on them."""
