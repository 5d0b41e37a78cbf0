"""Messages between programs of one machine, whose cores do all the work."""

from __future__ import annotations

from collections import deque
from typing import Any

from paceline.simulator.cluster import Cluster
from paceline.simulator.hardware.cores import Cores
from paceline.simulator.network import Network
from paceline.simulator.scheduler import Scheduler


class LoopbackNetwork(Network):
    """A network without a NIC or a switch: a message occupies a core for `latency_s` plus its bytes' time.

    This is the time for packing, copying and the kernel. A sender's messages are processed one after the other, in parallel
    with its program's computation. The receiver's part is charged to the sender.
    """

    def __init__(self, scheduler: Scheduler, cluster: Cluster, num_servers: int, cores: Cores) -> None:
        super().__init__(scheduler, cluster, num_servers)
        self._cores = cores
        self._outboxes: dict[int, deque[tuple[int, Any, float]]] = {}  # of senders whose messages are being processed

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
