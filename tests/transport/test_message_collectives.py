"""Means by messages among workers that die, leave and lose connections: on a network whose every event a seed draws."""

import random

import pytest
import torch
from greenlet import getcurrent, greenlet

from paceline.errors import PeerLostError
from paceline.ports.ports import PeerBack, PeerLeft, Received
from paceline.transport.message_collectives import MessageCollectives

ROUNDS = 4
SIZE = 5


class Killed(BaseException):
    """Unwinds a dead worker's stack."""


class Network:
    """Mailboxes of programs that run in turns; a seed draws who runs, and what a death or a broken connection loses.

    Args:
        program: called with each worker's id and mailbox.
        faults: how many deaths and broken connections there may be at most.
        leaves: a worker that leaves in order, or None.
    """

    def __init__(self, seed, workers, faults):
        self.draws, self.workers, self.faults = random.Random(seed), workers, faults
        self.queues = {(a, b): [] for a in range(workers) for b in range(workers) if a != b}  # what a has sent to b
        self.dead, self.over, self.hub = set(), set(), getcurrent()
        self.cut = set()  # pairs whose connection is broken
        self.late = []  # losses of connections that some hear of long after others
        self.log, self.turns = [], 0
        self.rate = self.draws.choice([0.02, 0.1, 0.3])  # of faults in turns

    def run(self, program):
        programs = {one: greenlet(self._ended_with(program, one)) for one in range(self.workers)}
        idle = 0
        while running := [one for one in programs if one not in self.dead | self.over]:
            if self.faults and self.draws.random() < self.rate:
                self._fault(running, programs)
                continue
            if self.cut and self.draws.random() < 0.2:
                self._mend()
            if self.late and self.draws.random() < 0.01:
                dead, other, event = self.late.pop()
                self.queues[dead, other].append(event)
            one = self.draws.choice(running)
            before, self.turns = len(self.log), self.turns + 1
            programs[one].switch()
            idle = 0 if len(self.log) > before else idle + 1
            assert idle < 5_000, "no worker goes on"

    def has_ended(self, one):
        return one in self.dead or one in self.over

    def now_s(self):
        return self.turns / 50

    def _ended_with(self, program, one):
        def run():
            try:
                program(one, _Mailbox(self, one))
            except Killed:
                return
            self.over.add(one)
            for other in range(self.workers):
                if other != one and frozenset((one, other)) not in self.cut:
                    self.queues[one, other].append(PeerLeft(one, 0, "ended"))

        return run

    def _fault(self, running, programs):
        self.faults -= 1
        one = self.draws.choice(running)
        if self.draws.random() < 0.6:
            self.dead.add(one)
            self.log.append(f"{one} dies")
            programs[one].throw(Killed) if programs[one] else None
            others = [other for other in running if other != one]
            for other in others:
                self._lose(one, other)
                self.queues[other, one].clear()
                if self.draws.random() < 0.3:
                    self.late.append((one, other, self.queues[one, other].pop()))
        elif len(running) > 1:
            other = self.draws.choice([other for other in running if other != one])
            if frozenset((one, other)) not in self.cut:
                self.cut.add(frozenset((one, other)))
                self._lose(one, other)
                self._lose(other, one)

    def _lose(self, sender, to):
        """The last messages are lost, and the receiver hears of it after the others."""
        queue = self.queues[sender, to]
        del queue[self.draws.randrange(len(queue) + 1) :]
        queue.append(PeerLeft(sender, 0, "its connection broke"))

    def _mend(self):
        pair = self.draws.choice(sorted(map(sorted, self.cut)))
        self.cut.remove(frozenset(pair))
        one, other = pair
        for a, b in ((one, other), (other, one)):
            if a not in self.dead | self.over:
                self.queues[a, b].append(PeerBack(a, 0))


class _Mailbox:
    def __init__(self, network, me):
        self.network, self.me = network, me

    def send(self, to, message):
        network = self.network
        network.log.append((self.me, to, message.kind, message.number, message.version))
        if to in network.dead | network.over or frozenset((self.me, to)) in network.cut:
            raise PeerLostError(to, "its connection broke")
        x = None if message.x is None else message.x.clone()
        network.queues[self.me, to].append(Received(self.me, 0, message._replace(x=x)))
        network.hub.switch()

    def peers(self):
        gone = self.network.dead | self.network.over
        return {
            one
            for one in range(self.network.workers)
            if one != self.me and one not in gone and frozenset((one, self.me)) not in self.network.cut
        }

    def receive(self, timeout_s=None, *, kind=None, sender=None, number=None):
        network = self.network
        network.hub.switch()
        senders = [one for one in range(network.workers) if one != self.me and network.queues[one, self.me]]
        if not senders:
            return None
        event = network.queues[network.draws.choice(senders), self.me].pop(0)
        network.log.append((self.me, event))
        return event


def given(worker, round):
    """Integers, so that sums are exact: from a mean one can read whose vectors it contains."""
    return torch.full((SIZE,), float(10**worker * (round + 1)))


def train(network, histories, *, leaver=None):
    def program(me, mailbox):
        collectives = MessageCollectives(mailbox, me, network.workers, has_ended=network.has_ended, now_s=network.now_s)
        for round in range(ROUNDS):
            if me == leaver and round == 2:
                collectives.leave()
                return
            x, total = given(me, round), torch.ones(3, dtype=torch.float64)
            if round % 2:
                handles = [collectives.start_all_reduce(x), collectives.start_all_reduce(total)]
                for one in handles:
                    one.wait()
            else:
                number = collectives.all_reduce_mean(x, weight=2.0, number=float(2**me))
                assert number == sum(2**one for one in collectives.members)
            histories[me].append((tuple(collectives.members), x.tolist()))

    network.run(program)


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("faults", [0, 1, 2, 3])
def test_survivors_agree_on_every_round(workers, faults):
    check_runs(workers, faults)


def check_runs(workers, faults):
    """In 300 runs each: the same members and results, each of exactly its members' vectors, in all rounds of all survivors."""
    deaths = 0
    for number in range(300):
        network = Network(f"{workers} {faults} {number}", workers, faults)
        histories = {one: [] for one in range(workers)}
        leaver = 1 if number % 3 == 2 else None
        train(network, histories, leaver=leaver)
        deaths += len(network.dead)
        longest = max(histories.values(), key=len)
        for one, history in histories.items():
            assert history == longest[: len(history)], number
            assert one in network.dead or len(history) == (2 if one == leaver else ROUNDS), number
        before = tuple(range(workers))
        for round, (members, x) in enumerate(longest):
            assert set(members) <= set(before), number
            expected = sum(given(one, round)[0].item() for one in members) / (1 if round % 2 else len(members))
            assert x == pytest.approx([expected] * SIZE, rel=1e-6), number
            before = members
    assert faults == 0 or deaths > 0


def test_two_members_that_cut_their_vectors(monkeypatch):
    """As they do with large ones."""
    monkeypatch.setattr("paceline.transport.message_collectives._AT_ONCE_BYTES", 0)
    check_runs(2, 2)


def test_half_types_are_averaged_in_float32():
    """In bfloat16, 256 + 1 is 256."""
    results = []

    def program(me, mailbox):
        x = torch.tensor([256.0 if me == 0 else 1.0] * SIZE, dtype=torch.bfloat16)
        collectives = MessageCollectives(mailbox, me, 3, has_ended=network.has_ended, now_s=network.now_s)
        collectives.all_reduce_mean(x, weight=1.0)
        results.append(x.tolist())

    network = Network("half types", 3, faults=0)
    network.run(program)
    assert results == [[86.0] * SIZE] * 3
