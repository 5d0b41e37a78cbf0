"""Plain SGD: the program of a worker that agrees with no other."""

from __future__ import annotations

from paceline.ports.ports import Ports
from paceline.ports.replica import Replica
from paceline.ports.shared import WritableParameters


def work_plainly(replica: Replica, ports: Ports[WritableParameters], *, counts: bool = True) -> None:
    """One update after the other. x: parameters (P,). Without `counts`, another worker counts the updates."""
    shared = ports.shared
    for _ in replica.steps():
        version = shared.version
        replica.gradient(at=shared.x, version=version)
        with shared.writing():
            replica.apply(to=shared.x)
            if counts:
                replica.applied(shared.advance(), gradient_version=version)
            else:
                replica.absent(version)
