"""AD-PSGD's second programs, all of them, on a network in memory whose delays, deaths and broken links are drawn at random.

The programs are the real ones; what is made up is what surrounds them: a virtual clock, mailboxes that keep the order of
messages between two workers, and workers that apply planted gradients. Everything follows from one seed.
"""

import heapq
from collections import defaultdict
from contextlib import contextmanager
from random import Random
from types import SimpleNamespace

import torch

from paceline.algorithms.deadline import MeasuredDeadline
from paceline.algorithms.pairwise import PairwiseAveraging
from paceline.errors import PeerLostError
from paceline.ports.ports import Counts, Message, PeerBack, PeerLeft, Received

P = 3


class World:
    """Workers 0 to n - 1 until all their programs are over.

    Args:
        topology: which workers average with each other.
        workers: n.
        seed: of all that is random.
        delay_s: the longest delay of a message; each link has a scale of its own below it.
        first_s: the deadline as long as nothing is measured, and `least_s`: the shortest.
        closes: whether a worker's mailbox ends with its program, or lives on as for a final mean.
        steps: gradients per worker.
    """

    def __init__(
        self, topology, workers, seed, *, delay_s=5.0, first_s=1.0, least_s=0.1, closes=True, steps=12, peers="random"
    ):
        self.random, self.now_s, self.closes = Random(seed), 0.0, closes
        self.topology, self.peers, self.delay_s = topology, peers, delay_s
        self.deadlines = {"first_s": first_s, "least_s": least_s}
        self.scales = defaultdict(lambda: delay_s * self.random.random() ** 3)
        self.busy_until = defaultdict(float)  # by (sender, receiver): when its last message arrives
        self.epochs = defaultdict(int)  # by (lower, higher): how many connections there have been
        self.down = set()  # links, (lower, higher), that are broken
        self.planned, self.num_planned = [], 0
        # What a worker's halves come to, by (worker, incarnation) and the same of its partner.
        self.halves = defaultdict(lambda: torch.zeros(P, dtype=torch.float64))
        self.planted = torch.zeros(P, dtype=torch.float64)
        generator = torch.Generator().manual_seed(seed)
        self.x0 = torch.randn(workers, P, dtype=torch.float64, generator=generator)
        self.workers = [
            Worker(self, one, self.x0[one].clone(), steps, dict.fromkeys({*range(workers)} - {one}, 0))
            for one in range(workers)
        ]

    def at(self, at_s, what, *arguments):
        self.num_planned += 1
        heapq.heappush(self.planned, (at_s, self.num_planned, what, arguments))

    def run(self):
        for one in self.workers:
            one.begin()
        while self.planned:
            self.now_s, _, what, arguments = heapq.heappop(self.planned)
            what(*arguments)
        assert all(one.over or one.dead for one in self.workers), "somebody waits for ever"
        return self

    # The network

    def deliver(self, sender, to, event):
        """After all that went the same way before."""
        link, pair = (sender, to), (min(sender, to), max(sender, to))
        if pair in self.down:
            return
        delay_s = self.scales[link] * self.random.random()
        self.busy_until[link] = at_s = max(self.busy_until[link], self.now_s + delay_s)
        self.at(at_s, self._arrive, sender, to, event, self.epochs[pair])

    def _arrive(self, sender, to, event, epoch):
        one = self.workers[to]
        if epoch != self.epochs[min(sender, to), max(sender, to)] or sender not in one.reachable:
            return
        if isinstance(event, PeerLeft):
            one.lose(sender, event.reason)
        else:
            one.hear(event)

    def kill(self, victim):
        """What has not arrived when another worker notices the death is lost; they notice it one after the other."""
        one = self.workers[victim]
        if one.dead or one.over:
            return
        one.dead = True
        for other in self.workers:
            if other is not one:
                self.at(self.now_s + self.random.random(), other.lose, victim, "killed", one.incarnation)

    def replace(self, victim):
        """A new process for a dead worker, with its parameters; workers that have not noticed the death do so now."""
        dead = self.workers[victim]
        if not dead.dead:
            return
        others = [one for one in self.workers if not (one.dead or one.closed)]
        known = {one.me: one.incarnation for one in others}
        fresh = self.workers[victim] = Worker(
            self, victim, dead.x.clone(), dead.steps_left, known, dead.incarnation + 1
        )
        for other in others:
            pair = min(victim, other.me), max(victim, other.me)
            self.epochs[pair] += 1
            self.down.discard(pair)
            other.lose(victim, "killed")
            other.meet(victim, fresh.incarnation)
        fresh.begin()

    def cut(self, a, b):
        """The link breaks, with all that is on it; both workers notice, and meet again later."""
        pair = min(a, b), max(a, b)
        if a == b or pair in self.down:
            return
        self.down.add(pair)
        self.epochs[pair] += 1
        mended_s = self.now_s + self.random.random()
        for here, there in ((a, b), (b, a)):
            noticed_s = self.now_s + (mended_s - self.now_s) * self.random.random()
            self.at(noticed_s, self._notice, here, there, self.epochs[pair])
        self.at(mended_s, self._mend, a, b, self.epochs[pair])

    def _notice(self, here, there, epoch):
        if self.epochs[min(here, there), max(here, there)] == epoch:  # neither was replaced since
            self.workers[here].lose(there, "its connection broke")

    def _mend(self, a, b, epoch):
        one, other, pair = self.workers[a], self.workers[b], (min(a, b), max(a, b))
        if self.epochs[pair] == epoch:
            self.down.remove(pair)
            if not (one.dead or other.dead or one.closed or other.closed):
                one.meet(b, other.incarnation)
                other.meet(a, one.incarnation)

    # What must hold

    def unpaired(self):
        """Pairs whose two sums of halves are not opposite, among the workers that lived on to the end."""
        alive = {(one.me, one.incarnation) for one in self.workers if not one.dead}
        pairs = {tuple(sorted(pair)) for pair in self.halves if set(pair) <= alive}
        return {pair for pair in pairs if (self.halves[pair] + self.halves[pair[::-1]]).abs().max() > 1e-11}

    def drift(self):
        """How far the sum of all models is from the models at the start plus all gradients."""
        return float((sum(one.x for one in self.workers) - self.x0.sum(0) - self.planted).abs().max())

    def count(self, name):
        return sum(getattr(one.counts, name) for one in self.workers if not one.dead)


class Worker:
    """One worker, its mailbox and its lock."""

    def __init__(self, world, me, x, steps, known, incarnation=0):
        self.world, self.me, self.x, self.steps_left, self.incarnation = world, me, x, steps, incarnation
        self.known, self.reachable = known, set(known)  # known: the incarnations of the others
        self.counts, self.random = Counts(), Random(f"{world.random.random()}")
        self.over = self.dead = self.closed = False
        self.timer = 0
        self.partner = None  # of the half that is being made
        self.asked_by = {}  # incarnation of whoever requested something last, by worker
        self.final = None
        ports = SimpleNamespace(
            worker_id=me, num_workers=len(world.x0), incarnation=incarnation, mailbox=self, counts=self.counts,
            random=self.random, shared=SimpleNamespace(x=x, version=0, writing=self.writing, advance=lambda updates: 1),
            clock=SimpleNamespace(now_s=lambda: world.now_s), moved=lambda _: None, decided=lambda *_, **__: None,
        )  # fmt: skip
        self.program = PairwiseAveraging(world.topology, world.peers, ports, self, MeasuredDeadline(**world.deadlines))

    def __enter__(self):
        pass

    def __exit__(self, *exception):
        pass

    @contextmanager
    def writing(self):
        before = self.x.clone()
        yield
        self.world.halves[(self.me, self.incarnation), self.partner] += self.x - before

    # The compute program

    def begin(self):
        self.go_on(None)
        self.world.at(self.world.now_s + self.random.random(), self.step)

    def step(self):
        if self.dead:
            return
        if not self.steps_left:
            self.told_to_end_s = self.world.now_s
            self.send(self.me, Message("end", 1))
            return
        self.steps_left -= 1
        self.send(self.me, Message("turn"))
        self.world.at(self.world.now_s + self.random.expovariate(1), self.apply)

    def apply(self):
        if not self.dead:
            gradient = torch.full((P,), 1.0 + self.me, dtype=torch.float64)
            self.x -= gradient
            self.world.planted -= gradient
            self.step()

    # The communication program

    def hear(self, event):
        if self.dead or self.over:
            return
        if isinstance(event, Received) and event.message.kind == "request":
            self.asked_by[event.sender] = event.incarnation
        if isinstance(event, Received) and event.message.kind == "answer":
            self.partner = event.sender, event.incarnation
        self.go_on(event)

    def go_on(self, event):
        wait_s = self.program.handle(event)
        self.timer += 1
        if wait_s is None:
            self.over, self.final, self.ended_s = True, self.x.clone(), self.world.now_s
            if self.world.closes:
                self.close()
        elif wait_s < float("inf"):
            self.world.at(self.world.now_s + wait_s, self.ring, self.timer)

    def ring(self, timer):
        if timer == self.timer and not self.dead and not self.over:
            self.go_on(None)

    def close(self):
        self.closed = True
        for other in list(self.reachable):
            self.world.deliver(self.me, other, PeerLeft(self.me, self.incarnation, "ended"))

    # The mailbox

    def peers(self):
        return frozenset(self.reachable)

    def send(self, to, message):
        if message.x is not None:
            message = message._replace(x=message.x.clone())
        received = Received(self.me, self.incarnation, message)
        if to == self.me:
            self.world.at(self.world.now_s, self.hear, received)
            return
        if to not in self.reachable:
            raise PeerLostError(to, "gone")
        if message.kind == "answer":
            self.partner = to, self.asked_by[to]
        self.world.deliver(self.me, to, received)

    def lose(self, peer, why, incarnation=None):
        if peer in self.reachable and incarnation in (None, self.known[peer]):
            self.reachable.discard(peer)
            self.hear(PeerLeft(peer, self.known[peer], why))

    def meet(self, peer, incarnation):
        if peer not in self.reachable:
            self.reachable.add(peer)
            self.known[peer] = incarnation
            self.hear(PeerBack(peer, incarnation))
