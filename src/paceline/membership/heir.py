"""How the join point moves: a worker takes its address over once the process that held it has died."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping

from paceline.membership.join_point import JoinPoint, JoinPointLostError, can_hold, is_answered

_LOOK_EVERY_S = 0.1  # at the first address
_LOOK_ELSEWHERE_S = 1.0
_PATIENCE_S = 3.0  # for the addresses before this machine's, each


class Heir:
    """Watches the join point for a worker of a run that has begun, so that others can join for as long as it lives.

    Only a worker on the machine that has an address can hold it. The first address is held again as soon as nobody holds it.
    Another one is held once no address has answered for 3 s, 6 s, and so on, in their order. The new store has what the old
    one had when this worker met the others, and the newest addresses of all. Counts are lost.

    Args:
        join_point: of this worker; it holds the address from then on.
        addresses: returns the other workers' newest incarnations and addresses, by worker.
    """

    def __init__(self, join_point: JoinPoint, addresses: Callable[[], Mapping[int, tuple[int, str]]]) -> None:
        self._join_point, self._addresses = join_point, addresses
        self._end = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="join-point-heir", daemon=True)
        with contextlib.suppress(JoinPointLostError):
            self._values = join_point.values()
            self._watcher.start()

    def close(self) -> None:
        """Ends the watch, before the workers leave the run."""
        self._end.set()
        if self._watcher.ident is not None:
            self._watcher.join()

    def _watch(self) -> None:
        candidates, every_s, answered_s = self._join_point.candidates, _LOOK_EVERY_S, time.monotonic()
        while not self._end.wait(every_s):
            own = next((number for number, where in enumerate(candidates) if can_hold(where)), None)
            if self._join_point.holds or own is None:
                continue
            every_s = _LOOK_ELSEWHERE_S if own else _LOOK_EVERY_S
            if len(candidates) > 1 and is_answered(candidates):
                answered_s = time.monotonic()
            elif time.monotonic() - answered_s >= own * _PATIENCE_S:
                for worker, (incarnation, address) in self._addresses().items():
                    self._values[f"peer/{worker}"] = f"{incarnation} {address}"
                    # A successor may have claimed the next incarnation at the old join point, so no other one may.
                    self._values[f"place/{worker}"] = f"{incarnation + 1} moved {address}"
                self._join_point.hold(candidates[own], self._values)
