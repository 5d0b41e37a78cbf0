"""Messages between programs of one machine, whose cores do all the work of it."""

from __future__ import annotations

from collections import deque
from typing import Any

from paceline.simulator.cluster import Cluster
from paceline.simulator.hardware.cores import Cores
from paceline.simulator.network import Network
from paceline.simulator.scheduler import Scheduler

__all__ = ["LoopbackNetwork"]


class LoopbackNetwork(Network):
    """A network without wires: a message takes a core `latency_s` and its bytes' time, as packing, copying and the kernel do.

    A sender's messages are taken one after the other, beside whatever its program computes meanwhile; the receiver's part
    counts as the sender's. There is no NIC and no switch.
    """

    def __init__(self, scheduler: Scheduler, cluster: Cluster, num_servers: int, cores: Cores) -> None:
        super().__init__(scheduler, cluster, num_servers)
        self._cores = cores
        self._outboxes: dict[int, deque[tuple[int, Any, float]]] = {}  # of those whose messages are being taken

    def send(self, sender: int, receiver: int, item: Any, num_bytes: float) -> None:
        outbox = self._outboxes.get(sender)
        if outbox is None:
            outbox = self._outboxes[sender] = deque()
        outbox.append((receiver, item, num_bytes))
        if len(outbox) == 1:
            self._take_next(sender, outbox)

    def _take_next(self, sender: int, outbox: deque[tuple[int, Any, float]]) -> None:
        receiver, item, num_bytes = outbox[0]
        factor = self._factors.get((sender, receiver), 1.0)
        duration_s = factor * (self._latency_s + num_bytes * self._s_per_byte)

        def arrived() -> None:
            outbox.popleft()
            if sender in self._killed:
                outbox.clear()
            else:
                self._scheduler.call_at(self._scheduler.now_s, (self.boxes[receiver], item))
            if outbox:
                self._take_next(sender, outbox)

        self._cores.start(arrived, duration_s)
