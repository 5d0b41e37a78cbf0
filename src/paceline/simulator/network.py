"""The network of a simulated cluster: when a message arrives, and when others learn that a worker has ended."""

from __future__ import annotations

from functools import partial
from typing import Any

from paceline.ports.ports import PeerBack, PeerLeft, Received
from paceline.simulator.cluster import Cluster
from paceline.simulator.scheduler import Box, Scheduler

HEADER_BYTES = 64  # per message, in addition to its vector


class Network:
    """One NIC per worker, full duplex, a link between any two of them, and a switch that all traffic passes.

    Messages are served in order, one at a time, at the full rate; there is no fluid sharing. A message leaves when its
    sender's NIC has sent the earlier ones, and passes the switch while it is being sent. It arrives `latency_s` after its
    last byte left; if the receiver's NIC is busy with messages that left earlier, it arrives after them, later by the time of
    its own bytes. Over a slow link it takes `factor` times as long and waits for that link's earlier messages; its sender's
    NIC is free again as if the link were fast. Messages from one sender to one receiver keep their order.

    For equal loads the totals match fair sharing: a NIC with k messages finishes the last of them at the same instant, and
    the others sooner. Costs: one event per message, two if it has to wait for its sender's NIC.

    When a worker ends, its peers, the workers that it has exchanged messages with, receive a last message. When it dies,
    they learn of it after `detection_s`. Messages to a worker that is gone are lost, and their sender is told.
    """

    def __init__(self, scheduler: Scheduler, cluster: Cluster, num_servers: int) -> None:
        num_members = cluster.workers + num_servers
        self.boxes: dict[int, Box] = {}  # by worker; the caller fills it in
        # For each worker, the workers that it has exchanged messages with or waited for. Servers must hear of the death of a
        # worker that has sent nothing yet.
        workers, servers = range(cluster.workers), range(cluster.workers, num_members)
        self.contacts = [*(set(servers) for _ in workers), *(set(workers) for _ in servers)]
        self.is_calm = True  # no worker is gone, asleep or cut off
        self._scheduler = scheduler
        self._latency_s = cluster.latency_s
        self._detection_s = cluster.detection_s
        self._s_per_byte = 1.0 / cluster.bandwidth_bytes_per_s
        self._switch_s_per_byte = 1.0 / cluster.switch_bytes_per_s if cluster.switch_bytes_per_s is not None else 0.0
        self._factors = {pair: factor for a, b, factor in cluster.link_factors for pair in ((a, b), (b, a))}
        self._out_free_s = [0.0] * num_members
        self._in_free_s = [0.0] * num_members
        self._link_free_s: dict[tuple[int, int], float] = {}
        self._switch_free_s = 0.0
        self._gone: dict[int, tuple[str, float]] = {}  # the reason, and from when others can know it
        self._killed: set[int] = set()
        self._cut: set[tuple[int, int]] = set()
        self._asleep_until_s: dict[int, float] = {}
        self._incarnations: dict[int, int] = {}  # of workers that were replaced

    # Messages

    def send(self, sender: int, receiver: int, item: Any, num_bytes: float) -> None:
        """Sends an item of `num_bytes`, including its header, to another worker's box."""
        scheduler = self._scheduler
        now_s, free_s = scheduler.now_s, self._out_free_s[sender]
        if free_s > now_s:
            self._out_free_s[sender] = free_s + num_bytes * self._s_per_byte
            scheduler.call_at(free_s, partial(self._leave, sender, receiver, item, num_bytes))
            return
        self._out_free_s[sender] = now_s + num_bytes * self._s_per_byte
        if self._factors or self._killed:
            self._leave(sender, receiver, item, num_bytes)
        else:
            self._pass_on(receiver, item, num_bytes, self._latency_s)

    def _leave(self, sender: int, receiver: int, item: Any, num_bytes: float) -> None:
        """The first byte leaves the sender's NIC now."""
        if sender in self._killed or self._is_of_the_dead(sender, item):
            return
        factor = self._factors.get((sender, receiver)) if self._factors else None
        if factor is None:
            self._pass_on(receiver, item, num_bytes, self._latency_s)
            return
        pair = (sender, receiver)
        begun_s = max(self._scheduler.now_s, self._link_free_s.get(pair, 0.0))
        done_s = self._link_free_s[pair] = begun_s + factor * num_bytes * self._s_per_byte
        last_s = done_s - num_bytes * self._s_per_byte  # from here on, an ordinary message to the receiver's NIC
        latency_s = factor * self._latency_s
        self._scheduler.call_at(last_s, partial(self._pass_on, receiver, item, num_bytes, latency_s))

    def _pass_on(self, receiver: int, item: Any, num_bytes: float, latency_s: float) -> None:
        """The first byte reaches the switch now."""
        scheduler = self._scheduler
        begun_s, duration_s = scheduler.now_s, num_bytes * self._s_per_byte
        left_s = begun_s + duration_s
        if self._switch_s_per_byte:
            self._switch_free_s = max(self._switch_free_s, begun_s) + num_bytes * self._switch_s_per_byte
            left_s = max(left_s, self._switch_free_s)
        arrived_s = left_s + latency_s
        after_others_s = self._in_free_s[receiver] + duration_s
        if after_others_s > arrived_s:
            arrived_s = after_others_s
        self._in_free_s[receiver] = arrived_s
        scheduler.call_at(arrived_s, (self.boxes[receiver], item))

    def lets_through(self, receiver: int, item: Received | PeerLeft | PeerBack) -> bool:
        """Whether an arrived item may be received now; if not, it is handled here. Call only while not `is_calm`."""
        sender = item.sender if isinstance(item, Received) else item.peer
        if receiver in self._gone:
            if sender not in self._gone:
                self.tell_gone(sender, receiver)
            return False
        if sender in self._gone and isinstance(item, PeerBack):
            return False  # it was paused, and has ended or died since
        if (sender, receiver) in self._cut and (isinstance(item, Received) or item == self._left(sender, "ended")):
            if not isinstance(item, Received):  # its goodbye is lost, too: others only know that it is silent
                left = self._left(sender, "the link was cut before it ended")
                self._scheduler.call_at(self._scheduler.now_s, (self.boxes[receiver], left))
            return False
        if self._is_of_the_dead(sender, item):
            return False
        until_s = self._asleep_until_s.get(receiver, 0.0)
        if until_s > self._scheduler.now_s:
            self._scheduler.call_at(until_s, (self.boxes[receiver], item))
            return False
        return True

    def _is_of_the_dead(self, sender: int, item: Any) -> bool:
        """Whether a message is from an incarnation that has been replaced."""
        newest = self._incarnations.get(sender, 0) if self._incarnations else 0
        return newest > 0 and isinstance(item, Received) and item.incarnation < newest

    # Workers that leave, and that are replaced

    def is_gone(self, worker: int) -> bool:
        return worker in self._gone

    def tell_gone(self, worker: int, gone: int) -> None:
        """Tells a worker that another one is gone as soon as it can know; if that one ended, after its last messages."""
        reason, known_from_s = self._gone[gone]
        if gone not in self._killed:
            self.send(gone, worker, self._left(gone, reason), HEADER_BYTES)
            return
        at_s = max(self._scheduler.now_s + self._latency_s, known_from_s)
        self._scheduler.call_at(at_s, (self.boxes[worker], self._left(gone, reason)))

    def _left(self, worker: int, reason: str) -> PeerLeft:
        return PeerLeft(worker, self._incarnations.get(worker, 0), reason)

    def end(self, worker: int) -> None:
        """The worker's program has ended; its messages still arrive, followed by the news that it has left."""
        if worker in self._gone:
            return
        self.is_calm = False
        self._gone[worker] = ("ended", self._scheduler.now_s)
        for peer in sorted(self.contacts[worker]):
            if peer not in self._gone:
                self.send(worker, peer, self._left(worker, "ended"), HEADER_BYTES)

    def kill(self, worker: int) -> None:
        """The worker is dead; messages that have not left its NIC are lost."""
        self.is_calm = False
        self._killed.add(worker)
        known_from_s = self._scheduler.now_s + self._detection_s
        self._gone[worker] = (f"killed at {self._scheduler.now_s:.6g} s", known_from_s)
        for peer in sorted(self.contacts[worker]):
            if peer not in self._gone:
                self.tell_gone(peer, worker)

    def departed(self) -> list[PeerLeft]:
        return [self._left(worker, why) for worker, (why, _) in self._gone.items()]

    def replace(self, worker: int, incarnation: int) -> None:
        """Adds a dead worker's next incarnation, with an empty send queue; no other worker knows of it yet."""
        del self._gone[worker]
        self._killed.discard(worker)
        self._incarnations[worker] = incarnation
        self._out_free_s[worker] = self._scheduler.now_s

    def welcome(self, worker: int) -> None:
        """Tells all workers that have exchanged messages with this worker's earlier incarnations that it is back."""
        at_s = self._scheduler.now_s + self._latency_s
        for peer in sorted(self.contacts[worker]):
            if peer not in self._gone:
                self._scheduler.call_at(at_s, (self.boxes[peer], PeerBack(worker, self._incarnations[worker])))

    def drop_link(self, a: int, b: int) -> None:
        """Cuts the link between two workers; each considers the other lost after `detection_s`."""
        self.is_calm = False
        self._cut |= {(a, b), (b, a)}
        at_s = self._scheduler.now_s + self._detection_s
        for here, there in ((a, b), (b, a)):
            left = self._left(there, f"the link was cut at {self._scheduler.now_s:.6g} s")
            self._scheduler.call_at(at_s, (self.boxes[here], left))

    def pause(self, worker: int, for_s: float) -> None:
        """The worker receives nothing for `for_s`; if that exceeds `detection_s`, others consider it lost meanwhile."""
        self.is_calm = False
        now_s = self._scheduler.now_s
        self._asleep_until_s[worker] = max(self._asleep_until_s.get(worker, 0.0), now_s + for_s)
        if for_s <= self._detection_s:
            return
        peers = sorted(self.contacts[worker])
        left = self._left(worker, f"no sign of life since {now_s:.6g} s")
        for peer in peers:
            self._scheduler.call_at(now_s + self._detection_s, (self.boxes[peer], left))
            self._scheduler.call_at(
                now_s + for_s, (self.boxes[peer], PeerBack(worker, self._incarnations.get(worker, 0)))
            )
