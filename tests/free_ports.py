"""Ports for servers that another process opens later."""

import random
import socket
from pathlib import Path


def free_port():
    """One on which nobody listens, and which the kernel gives to no outgoing connection in the meantime.

    A port that was bound to 0 and given back is in the kernel's range: any connection on the machine may get it next.
    """
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        first = 32_768
    lowest = 10_000 if first > 12_000 else 1024
    while True:
        port = random.SystemRandom().randrange(lowest, max(first, lowest + 1000))
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
