"""Workers that average in pairs over real sockets, on which answers come late; run in processes or threads."""

import heapq
import random
import time
from types import SimpleNamespace

import torch
from torch.distributed import TCPStore

import forked
from paceline.algorithms.deadline import MeasuredDeadline
from paceline.algorithms.pairwise import PairwiseAveraging
from paceline.algorithms.topology import Ring
from paceline.ports.ports import Counts, Ports, Received
from paceline.ports.private import PrivateVector
from paceline.transport.concurrency import ThreadConcurrency
from paceline.transport.mailbox import ZmqMailbox

DEADLINE_S = forked.AGAINST_HANGS_S
STEP_S = 0.002
SIZE = 20_000  # long enough to be sent in a frame of its own


class Late:
    """A mailbox that keeps what comes from others for a random time, in the order in which each of them sent it."""

    def __init__(self, inner, seed, longest_s):
        self.send, self.peers = inner.send, inner.peers
        self._inner, self._random, self._longest_s = inner, random.Random(seed), longest_s
        self._kept, self._last_s, self._number = [], {}, 0

    def receive(self, timeout_s=None, *, kind=None):
        until_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while True:
            now_s = time.monotonic()
            if self._kept and self._kept[0][0] <= now_s:
                return heapq.heappop(self._kept)[2]
            next_s = min(until_s, self._kept[0][0] if self._kept else float("inf"))
            arrival = self._inner.receive(None if next_s == float("inf") else max(0.0, next_s - now_s), kind=kind)
            if arrival is None and time.monotonic() >= until_s:
                return None
            if arrival is not None:
                sender = arrival.sender if isinstance(arrival, Received) else arrival.peer
                at_s = max(self._last_s.get(sender, 0.0), time.monotonic() + self._random.random() * self._longest_s)
                self._last_s[sender], self._number = at_s, self._number + 1
                heapq.heappush(self._kept, (at_s, self._number, arrival))


def average(port, worker_id, num_workers, longest_s, deadline_s, connection):
    """Trains until it is told to end, and tells its figures; before, that it has averaged, and of each deadline missed."""
    store = TCPStore("127.0.0.1", port, use_libuv=False)
    counts, concurrency = Counts(), ThreadConcurrency()
    x = torch.full((SIZE,), float(worker_id), dtype=torch.float64)
    planted, failures, averages = torch.zeros_like(x), 0, 0
    with ZmqMailbox(store, worker_id, num_workers, counts=counts, peer_deadline_s=DEADLINE_S) as mailbox:
        mailbox.connect(DEADLINE_S)
        ports: Ports = SimpleNamespace(
            worker_id=worker_id, num_workers=num_workers, incarnation=0, shared=PrivateVector(x), counts=counts,
            mailbox=Late(mailbox, worker_id, longest_s) if longest_s else mailbox, random=random.Random(worker_id),
            clock=SimpleNamespace(now_s=time.monotonic), moved=lambda *_, **__: None, codec_moves={},
            decided=lambda *_, **__: None,
        )  # fmt: skip
        deadline = MeasuredDeadline(first_s=deadline_s, least_s=deadline_s)
        lock = concurrency.lock()
        averaging = PairwiseAveraging(Ring(), "random", ports, lock, deadline)
        with averaging.in_background(concurrency):
            while not connection.poll():
                averaging.turn()
                time.sleep(STEP_S)  # the gradient
                with lock:
                    x -= 1.0 + worker_id
                    planted -= 1.0 + worker_id
                if counts.averages and not averages:
                    connection.send("averaged")
                if counts.peer_failures > failures:
                    connection.send("late")
                averages, failures = counts.averages, counts.peer_failures
        connection.send((x.numpy(), planted.numpy(), counts.averages, counts.unresolved_exchanges))
        assert [connection.recv(), connection.recv()] == ["end", "close"]  # nobody's mailbox ends before all have
    connection.close()
