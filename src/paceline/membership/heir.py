"""How the join point moves: a worker takes its address over once the process that held it has died."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Mapping

from paceline.membership.join_point import JoinPoint, JoinPointLostError

_LOOK_EVERY_S = 0.1


class Heir:
    """Watches the join point's address for a worker of a run that has begun, so that others can join for as long as it lives.

    Only a worker on the machine that has the address can hold it. The new store has what the old one had when this worker
    met the others, and the newest addresses of all. Counts are lost.
    """

    def __init__(self, join_point: JoinPoint, addresses: Callable[[], Mapping[int, tuple[int, str]]]) -> None:
        self._join_point = join_point
        self._addresses = addresses  # the other workers' newest incarnations and addresses, by worker
        self._end = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="join-point-heir", daemon=True)
        with contextlib.suppress(JoinPointLostError):
            self._values = join_point.values()
            self._watcher.start()

    def close(self) -> None:
        self._end.set()
        if self._watcher.ident is not None:
            self._watcher.join()

    def _watch(self) -> None:
        while not self._end.wait(_LOOK_EVERY_S):
            if self._join_point.holds or self._is_held():
                continue
            for worker, (incarnation, address) in self._addresses().items():
                self._values[f"peer/{worker}"] = f"{incarnation} {address}"
                # A successor may have claimed the next incarnation at the old join point, so no other one may.
                self._values[f"place/{worker}"] = f"{incarnation + 1} moved {address}"
            self._join_point.hold(self._values)

    def _is_held(self) -> bool:
        """Whether a process holds the address, or the address belongs to another machine."""
        where = self._join_point.where
        with socket.socket(socket.AF_INET6 if ":" in where[0] else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(where)
            except OSError:
                return True
        return False
