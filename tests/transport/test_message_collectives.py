"""Means by messages among workers that die, leave and lose connections: on a network whose every event a seed draws."""

import random
from collections import Counter
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from greenlet import getcurrent, greenlet

import soak_results
from chosen import each_value, soaked
from paceline.errors import NotReplacedError, PeerLostError, RunStopped, WorkerLostError
from paceline.ports.ports import Message, PeerBack, PeerLeft, Received
from paceline.transport.message_collectives import ASK, JoinRequest, MessageCollectives
from paceline.transport.message_newcomers import MessageNewcomers

ROUNDS, LONG = 4, 10
SIZE = 5
SILENCE_S = 3.0


class Killed(BaseException):
    """Unwinds a dead worker's stack."""


class Network:
    """Mailboxes of programs that run in turns; a seed draws who runs, and what a death or a broken connection loses.

    Args:
        faults: how many deaths and broken connections there may be at most.
        replaces: whether dead workers have successors.
        silences: whether cables may be pulled, and workers stopped, for longer than the deadline.
    """

    def __init__(self, seed, workers, faults, *, replaces=False, silences=False):
        self.name, self.deadline_s = seed, SILENCE_S if silences else 600.0
        self.silences, self.stopped = silences, set()
        self.waiting = set()  # newcomers
        self.heard_s = {}  # (worker, another one that was cut off): the last sign of life, until a message comes from it
        self.known = set()  # (worker, another one, its incarnation that it knows to have ended)
        self.draws, self.workers, self.faults = random.Random(seed), workers, faults
        self.queues = {(a, b): [] for a in range(workers) for b in range(workers) if a != b}  # what a has sent to b
        self.dead, self.over, self.hub = set(), set(), getcurrent()
        self.left = set()  # workers over in order
        self.cut = set()  # pairs whose connection is broken
        self.late = []  # losses of connections that some hear of long after others
        self.log, self.turns = [], 0
        self.replaces, self.incarnations = replaces, [0] * workers
        self.rate = self.draws.choice([0.02, 0.1, 0.3])  # of faults in turns

    def run(self, program):
        """Runs `program`, which is called with a mailbox, as every worker."""
        programs = {one: self.started(program, one) for one in range(self.workers)}
        idle = 0
        while running := [one for one in programs if one not in self.dead | self.over]:
            self.stopped = {one for one in self.stopped if any(one in pair for pair in self.cut)}
            running = [one for one in running if one not in self.stopped] or running
            if self.faults and self.draws.random() < self.rate:
                self._fault(running, programs)
                continue
            if self.cut and self.draws.random() < (0.005 if self.silences else 0.2):
                self._mend()
            if self.late and self.draws.random() < 0.01:
                dead, other, event = self.late.pop()
                self.queues[dead, other].append(event)
            if self.replaces and (self.dead or self.left & self.over) and self.draws.random() < 0.05:
                self._replace(program, programs)
            one = self.draws.choice(running)
            before, self.turns = len(self.log), self.turns + 1
            programs[one].switch()
            idle = 0 if len(self.log) > before else idle + 1
            assert idle < 5_000, "no worker goes on"

    def now_s(self):
        return self.turns / 50

    def has_only_newcomers(self):
        return {*range(self.workers)} <= self.dead | self.over | self.waiting

    def started(self, program, one):
        def run():
            mailbox = _Mailbox(self, one, self.incarnations[one])
            try:
                program(mailbox)
                mailbox.is_closing = True
                if mailbox.collectives is not None and mailbox.collectives.has_left:
                    mailbox.collectives.leave()  # again, as a worker does before it closes its mailbox
            except Killed:
                return
            self.over.add(one)
            self._end(one)
            for other in range(self.workers):
                if other != one and frozenset((one, other)) not in self.cut:
                    self.queues[one, other].append(PeerLeft(one, self.incarnations[one], "ended"))

        return greenlet(run)

    def _fault(self, running, programs):
        self.faults -= 1
        one = self.draws.choice(running)
        if self.silences and self.draws.random() < 0.5:
            self._silence(running)
        elif self.draws.random() < 0.6:
            self.kill(one, running, programs)
        elif len(running) > 1:
            other = self.draws.choice([other for other in running if other != one])
            self._cut(one, other)

    def kill(self, one, running, programs):
        self.dead.add(one)
        self._end(one)
        self.log.append(f"{one} dies")
        programs[one].throw(Killed) if programs[one] else None
        for other in running:
            if other != one:
                self._lose(one, other)
                self.queues[other, one].clear()
                if self.draws.random() < 0.3:
                    self.late.append((one, other, self.queues[one, other].pop()))

    def _cut(self, one, other):
        pair = frozenset((one, other))
        if pair not in self.cut:
            self.cut.add(pair)
            for a, b in ((one, other), (other, one)):
                self.heard_s.setdefault((a, b), self.now_s())
                self._lose(a, b)

    def _silence(self, running):
        """A part of the network is cut off, or a worker stands still."""
        part = self.draws.sample(running, self.draws.randint(1, len(running)))
        if len(part) == 1 and self.draws.random() < 0.5:
            self.stopped.update(part)
        for one in part:
            for other in set(running).difference(part):
                self._cut(one, other)

    def _end(self, one):
        """Those that can reach its machine know that its process has ended."""
        for other in range(self.workers):
            if other != one and frozenset((one, other)) not in self.cut:
                self._find_out(other, one)

    def _find_out(self, one, ended):
        """A worker notices the end of one from which it has had a sign of life not long before."""
        if self.now_s() - self.heard_s.get((one, ended), self.now_s()) < SILENCE_S / 2:
            self.known.add((one, ended, self.incarnations[ended]))

    def _lose(self, sender, to):
        """The last messages are lost, and the receiver hears of it after the others."""
        queue = self.queues[sender, to]
        first = self.draws.randrange(len(queue) + 1)
        queue[first:] = [event for event in queue[first:] if not isinstance(event, Received)]
        queue.append(PeerLeft(sender, self.incarnations[sender], "its connection broke"))

    def _replace(self, program, programs):
        """A new process takes a dead worker's place: all have heard of the death by then, but may not have looked."""
        one = self.draws.choice(sorted(self.dead | (self.left & self.over)))
        for dead, other, event in [late for late in self.late if late[0] == one]:
            self.late.remove((dead, other, event))
            self.queues[dead, other].append(event)
        self.cut = {pair for pair in self.cut if one not in pair}
        for other in range(self.workers):
            if (other, one) in self.heard_s:
                self._find_out(other, one)
            for pair in ((one, other), (other, one)):
                self.heard_s.pop(pair, None)
        for group in (self.dead, self.over, self.left):
            group.discard(one)
        self.incarnations[one] += 1
        for other in range(self.workers):
            if other != one:
                self.queues[other, one].clear()
                self.queues[one, other].append(PeerBack(one, self.incarnations[one]))
        programs[one] = self.started(program, one)
        self.log.append(f"{one} has a successor")

    def _mend(self):
        pairs = [self.draws.choice(sorted(map(sorted, self.cut)))]
        if self.silences and self.draws.random() < 0.8:
            pairs = sorted(map(sorted, self.cut))
        for one, other in pairs:
            self._mend_one(one, other)

    def _mend_one(self, one, other):
        self.cut.remove(frozenset((one, other)))
        self.stopped -= {one, other}
        for a, b in ((one, other), (other, one)):
            if a in self.dead | self.over:
                self._find_out(b, a)
            else:
                self.queues[a, b].append(PeerBack(a, self.incarnations[a]))


class _Mailbox:
    def __init__(self, network, me, incarnation):
        self.network, self.me, self.incarnation = network, me, incarnation
        self.collectives, self.is_closing = None, False

    def has_ended(self, worker, incarnation):
        return (self.me, worker, incarnation) in self.network.known

    def heard_s(self, worker):
        return self.network.heard_s.get((self.me, worker), self.network.now_s())

    def send(self, to, message):
        network = self.network
        network.log.append((self.me, to, message.kind, message.number, message.version))
        if to in network.dead | network.over or frozenset((self.me, to)) in network.cut:
            raise PeerLostError(to, "its connection broke")
        x = None if message.x is None else message.x.clone()
        network.heard_s.pop((to, self.me), None)
        network.queues[self.me, to].append(Received(self.me, self.incarnation, message._replace(x=x)))
        if not self.is_closing:
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
        found = {}
        for one in range(network.workers):
            queue = network.queues.get((one, self.me), ())
            wanted = [event for event in queue if not isinstance(event, Received) or event.message.kind in kind]
            if wanted:
                found[one] = wanted[0]
        if not found:
            return None
        one = network.draws.choice(sorted(found))
        network.queues[one, self.me] = [event for event in network.queues[one, self.me] if event is not found[one]]
        network.log.append((self.me, found[one]))
        return found[one]


def given(worker, round):
    """Integers, so that sums are exact: from a mean one can read whose vectors it contains."""
    return torch.full((SIZE,), float(10**worker * (round + 1)))


def start_gather(collectives, me, workers, round, to_all):
    """An all-to-all or an all-gather of numbers that say who has sent them to whom; and its result."""
    found = torch.full((workers,), -1.0)
    if to_all:
        sent = torch.tensor([100.0 * round + 10 * me + to for to in range(workers)])
        return collectives.start_all_to_all(sent, found), found
    return collectives.start_all_gather(torch.tensor([1e4 + 100 * round + 10 * me]), found), found


def check_gathered(members, me, round, found):
    for one, number in enumerate(found.tolist()):
        sent = 100 * round + 10 * one
        assert number in ((sent + me, 1e4 + sent) if one in members else (-1,))


def collectives_over(mailbox):
    network = mailbox.network
    mailbox.collectives = MessageCollectives(
        mailbox,
        mailbox.me,
        network.workers,
        ends=mailbox,
        deadline_s=network.deadline_s,
        incarnations=network.incarnations if mailbox.incarnation else (),
        now_s=network.now_s,
    )
    return mailbox.collectives


def train(network, histories, *, leaver=None):
    def program(mailbox):
        me, collectives = mailbox.me, collectives_over(mailbox)
        for round in range(ROUNDS):
            if me == leaver and round == 2:
                collectives.leave()
                return
            x, total = given(me, round), torch.ones(3, dtype=torch.float64)
            if round % 2:
                handles = [collectives.start_all_reduce(x), collectives.start_all_reduce(total)]
                gathered = [start_gather(collectives, me, network.workers, round, to_all) for to_all in (True, False)]
                for one in handles:
                    assert one.wait() == collectives.members
                for handle, found in gathered:
                    check_gathered(handle.wait(), me, round, found)
            else:
                numbers = collectives.all_reduce_mean(x, 2.0, (2.0**me, 1, 0, 0))
                assert numbers == [sum(2**one for one in collectives.members), len(collectives.members), 0, 0]
            histories[me].append((tuple(collectives.members), x.tolist()))

    network.run(program)


@pytest.mark.parametrize(("workers", "faults"), each_value([4, 2, 3], [0, 1, 2, 3]))
def test_survivors_agree_on_every_round(workers, faults):
    check_runs(workers, faults, runs=150 if faults else 40)


def check_runs(workers, faults, runs=150):
    """The same members and results, each of exactly its members' vectors, in all rounds of all survivors."""
    deaths = 0
    for number in range(runs):
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


@pytest.mark.parametrize(("workers", "faults"), each_value([2, 3, 4, 5], [1, 3]))
def test_workers_that_cannot_reach_each_other_never_train_on_both_sides(workers, faults):
    check_silences(workers, faults, runs=50)


def averaged(network, rounds):
    """All workers average in so many rounds: the longest history, which the others' begin, and the errors of some."""
    histories, ended_early = {one: [] for one in range(network.workers)}, {}

    def program(mailbox):
        me, collectives = mailbox.me, collectives_over(mailbox)
        try:
            for round in range(rounds):
                x = given(me, round)
                collectives.all_reduce_mean(x, weight=1.0)
                histories[me].append((tuple(collectives.members), x.tolist()))
        except WorkerLostError as error:
            ended_early[me] = str(error)
        else:
            collectives.leave()

    network.run(program)
    longest = max(histories.values(), key=len)
    for one, history in histories.items():
        assert history == longest[: len(history)], network.name
        assert one in network.dead or one in ended_early or len(history) == rounds, network.name
    return longest, ended_early


def check_silences(workers, faults, runs):
    """Cables are pulled, and workers stopped, for less and for more than the deadline; some also die."""
    outcomes = Counter()
    for number in range(runs):
        network = Network(f"silent {workers} {faults} {number}", workers, faults, silences=True)
        longest, ended_early = averaged(network, LONG)
        for round, (members, x) in enumerate(longest):
            expected = sum(given(one, round)[0].item() for one in members) / len(members)
            assert x == pytest.approx([expected] * SIZE, rel=1e-6), number
        outcomes[len(longest) == LONG, bool(ended_early)] += 1
    assert outcomes[True, True] > 2, "the majority trains on to the end"


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_silences():
    """Writes how many runs there were to PACELINE_SOAK_RESULTS."""
    runs = 2_000
    cases = [(workers, faults) for workers in (2, 3, 4, 5) for faults in (1, 2, 4, 6)]
    for workers, faults in cases:
        check_silences(workers, faults, runs)
    soak_results.keep("soak_drawn_rounds", "cables pulled, workers stopped and killed", {"runs": runs * len(cases)})


def test_two_members_that_cut_their_vectors(monkeypatch):
    """As they do with large ones."""
    monkeypatch.setattr("paceline.transport.round_vectors._AT_ONCE_BYTES", 0)
    check_runs(2, 2)


def test_half_types_are_averaged_in_float32():
    """In bfloat16, 256 + 1 is 256."""
    results = []

    def program(mailbox):
        x = torch.tensor([256.0 if mailbox.me == 0 else 1.0] * SIZE, dtype=torch.bfloat16)
        collectives_over(mailbox).all_reduce_mean(x, weight=1.0)
        results.append(x.tolist())

    network = Network("half types", 3, faults=0)
    network.run(program)
    assert results == [[86.0] * SIZE] * 3


def train_with_newcomers(network, histories, leaves_in=None):
    """As the exchange of reports of `Round`: the first member tells in each round who has asked; then all let these in."""

    def program(mailbox):
        try:
            work(mailbox)
        except WorkerLostError:
            network.left.add(mailbox.me)

    def work(mailbox):
        me, incarnation, collectives = mailbox.me, mailbox.incarnation, collectives_over(mailbox)
        newcomers = MessageNewcomers(
            mailbox, collectives, incarnation, model=dict, deadline_s=1e9, stopped=network.has_only_newcomers
        )
        first = 0
        if incarnation:
            network.waiting.add(me)
            try:
                state = newcomers.enter(epoch=0)
            except (NotReplacedError, RunStopped):
                network.left.add(me)
                collectives.leave()
                return
            network.waiting.remove(me)
            collectives.enter(state["group"])
            first = state["round"]
        history = histories[me, incarnation] = []
        come = {}
        for round in range(first, LONG):
            if (me, incarnation, round) == (1, 0, leaves_in):
                network.left.add(me)
                collectives.leave()
                return
            if come:
                giver = collectives.members[0]
                newcomers.let_in(come, giver)
                state = {"round": round, "group": collectives.let_in(come)}
                if me == giver:
                    newcomers.give(come, state)
            x, told = given(me, round), torch.zeros(network.workers)
            collectives.all_reduce_mean(x, weight=1.0)
            history.append((round, tuple(collectives.members), x.tolist()))
            for worker, number in newcomers.accepted(epoch=0).items() if me == collectives.members[0] else ():
                told[worker] = number
            collectives.start_all_reduce(told).wait()
            come = {worker: int(number) for worker, number in enumerate(told.tolist()) if number}

    network.run(program)


@pytest.mark.parametrize(("workers", "faults"), each_value([2, 3, 4], [1, 4, 2]))
def test_newcomers_take_part_from_the_round_in_which_all_have_let_them_in(workers, faults):
    check_newcomers(workers, faults, runs=max(60, 30 * faults))


@pytest.mark.parametrize(("workers", "faults"), [(2, 4), (3, 4), *soaked((4, 3))])
def test_newcomers_and_workers_that_cannot_reach_each_other(workers, faults):
    check_newcomers(workers, faults, runs=60, silences=True)


def check_newcomers(workers, faults, runs, *, silences=False):
    """All workers that take part in a round have the same members and result."""
    entered = 0
    for number in range(runs):
        network = Network(f"newcomers {workers} {faults} {number}", workers, faults, replaces=True, silences=silences)
        histories = {}
        train_with_newcomers(network, histories, leaves_in=number % 4 or None)
        results = {}
        for (one, incarnation), history in histories.items():
            for round, members, x in history:
                assert results.setdefault(round, (members, x)) == (members, x), number
                assert one in members, number
            has_ended = one in network.dead | network.left or incarnation < network.incarnations[one]
            assert has_ended or not history or history[-1][0] == LONG - 1, number
            entered += bool(incarnation and history)
        assert len(results) == LONG or all(
            one in network.dead | network.left for one in range(workers) if not network.incarnations[one]
        )
        for round, (members, x) in results.items():
            expected = sum(given(one, round)[0].item() for one in members) / len(members)
            assert x == pytest.approx([expected] * SIZE, rel=1e-6), number
    assert entered > 5


def test_a_newcomer_is_accepted_once_it_can_reach_all_members_and_is_in_their_epoch():
    answers = {}
    collectives = SimpleNamespace(members=(0, 1), requests={}, incarnation=lambda worker: int(worker == 3))
    mailbox = SimpleNamespace(send=lambda to, message: answers.__setitem__(to, message))
    newcomers: Any = MessageNewcomers(
        cast(Any, mailbox), cast(Any, collectives), 0, model=dict, deadline_s=1.0, stopped=lambda: False
    )
    collectives.requests |= {
        2: JoinRequest(incarnation=1, epoch=2, peers=frozenset({0})),
        3: JoinRequest(incarnation=1, epoch=2, peers=frozenset({0, 1})),
        4: JoinRequest(incarnation=1, epoch=3, peers=frozenset({0, 1})),
        5: JoinRequest(incarnation=1, epoch=1, peers=frozenset({0, 1})),
        6: JoinRequest(incarnation=1, epoch=2, peers=frozenset({0, 1, 4})),
        7: JoinRequest(incarnation=2, epoch=2, peers=frozenset({0, 1, 6})),
        8: JoinRequest(incarnation=1, epoch=2, peers=frozenset({0, 1})),
    }
    assert newcomers.accepted(epoch=2) == {6: 1, 7: 2}, "8 cannot reach them"
    assert set(collectives.requests) == {2, 4, 6, 7, 8}
    assert {to: message.number for to, message in answers.items()} == {5: 2}


def newcomer(events, peers=lambda left: {0, 1}, ended=False):
    """Whose mailbox has these events, and reaches `peers` while so many are left."""
    queue = list(events)
    mailbox = SimpleNamespace(
        send=lambda to, message: None,
        peers=lambda: peers(len(queue)),
        receive=lambda timeout_s, **wanted: queue.pop(0) if queue else None,
    )
    ends = SimpleNamespace(has_ended=lambda worker, incarnation: ended, heard_s=lambda worker: 0.0)
    collectives = MessageCollectives(cast(Any, mailbox), 2, 3, ends=cast(Any, ends))
    return MessageNewcomers(cast(Any, mailbox), collectives, 1, model=dict, deadline_s=0.2, stopped=lambda: False)


def test_members_forget_what_a_newcomer_asked_that_has_gone():
    """Others could wait for ever, as they cannot reach it; what its successor asks counts."""
    asked = Message(ASK, x=torch.tensor([2]))
    events = [Received(1, 1, asked), PeerLeft(1, 0, "lost"), PeerLeft(1, 1, "lost"), Received(1, 2, asked)]
    collectives, known = newcomer([]).collectives, []
    for event in events:
        collectives._handle(event)
        known.append({one: request.incarnation for one, request in collectives.requests.items()})
    assert known == [{1: 1}, {1: 1}, {}, {1: 2}]


def state_from(sender, incarnation, state=None):
    sent = []
    mailbox = SimpleNamespace(send=lambda to, message: sent.append(message))
    giver = MessageNewcomers(cast(Any, mailbox), cast(Any, None), 0, model=dict, deadline_s=1.0, stopped=lambda: False)
    giver.give({2: 1}, state or {"round": 3})
    return Received(sender, incarnation, sent[0])


def test_a_newcomer_waits_for_the_successor_of_a_dead_worker():
    """It enters while the newcomer waits, and is then the one that gives the state."""
    events = [
        PeerLeft(0, 0, "its connection broke"),
        PeerBack(0, 1),
        Received(1, 0, Message("newcomer yes", 1, x=torch.tensor([0, 1]))),
        state_from(0, 1),
    ]
    assert newcomer(events).enter(0) == {"round": 3}


def test_a_newcomer_whose_connection_breaks_lets_the_next_one_try():
    with pytest.raises(NotReplacedError, match="a connection broke") as error:
        newcomer([PeerLeft(1, 0, "its connection broke"), PeerBack(1, 0)]).enter(0)
    assert error.value.can_try_again


def test_a_newcomer_waits_for_workers_that_stand_still_and_not_for_those_that_have_ended():
    events = [PeerLeft(0, 0, "no sign of life"), None, None]
    with pytest.raises(WorkerLostError, match="could not join"):
        newcomer(events, lambda left: set() if left < 3 else {0}).enter(0)
    with pytest.raises(RunStopped):
        newcomer(events, lambda left: set() if left < 3 else {0}, ended=True).enter(0)


def test_a_state_with_the_numbers_of_numpy_and_counters_is_given():
    state = {"lr": np.float64(0.25), "milestones": Counter({np.int64(3): 1}), "betas": (np.float32(0.5), 0.9)}
    found = newcomer([state_from(0, 0, state)]).enter(0)
    assert found == {"lr": 0.25, "milestones": Counter({3: 1}), "betas": (0.5, 0.9)}
    assert isinstance(found["milestones"], Counter)


def test_a_state_with_other_objects_is_refused():
    with pytest.raises(NotReplacedError, match="contains more than numbers and tensors"):
        newcomer([state_from(0, 0, {"fraction": Fraction(1, 3)})]).enter(0)


def draw_plan(draws):
    """What all workers do: start a vector, wait for all that have been started, or add up another one meanwhile."""
    plan = [draws.choice(["start", "start", "wait", "sum", "compute"]) for _ in range(20)]
    return [*plan, "wait"]


@pytest.mark.parametrize(("workers", "faults"), each_value([4, 2, 3], [3, 1, 0]))
@pytest.mark.parametrize("silences", [False, True])
def test_vectors_that_are_added_up_before_their_round(workers, faults, silences, monkeypatch):
    """In drawn programs: each sum is of the vectors of exactly the members of the round in which it is waited for."""
    monkeypatch.setattr("paceline.transport.message_collectives._LEAST_EARLY_BYTES", 1)
    monkeypatch.setattr("paceline.transport.round_vectors._AT_ONCE_BYTES", 0 if workers == 2 else 1 << 20)
    early = Counter()
    for number in range(50):
        network = Network(f"early {workers} {faults} {silences} {number}", workers, faults, silences=silences)
        check_early(network, draw_plan(network.draws), early)
    assert early["early pieces"] > 100
    assert early["early means"] > 100


def check_early(network, plan, early):
    histories, failed = {one: [] for one in range(network.workers)}, set()

    def program(mailbox):
        me, collectives = mailbox.me, collectives_over(mailbox)
        pending, gathered = [], []
        try:
            for step, what in enumerate(plan):
                x = given(me, step)[: SIZE if step % 3 else 1]  # one element is no early exchange by itself
                if what == "start" and step % 4 == 1:
                    gathered.append((step, *start_gather(collectives, me, network.workers, step, step % 8 == 1)))
                elif what == "start":
                    pending.append((step, x, collectives.start_all_reduce(x)))
                elif what == "sum":
                    collectives.add_up(x)
                    histories[me].append((collectives.members, step, x.tolist()))
                elif what == "compute":
                    network.hub.switch()
                else:
                    for begun, total, handle in pending:
                        handle.wait()
                        histories[me].append((collectives.members, begun, total.tolist()))
                    for begun, handle, found in gathered:
                        check_gathered(handle.wait(), me, begun, found)
                    pending, gathered = [], []
        except WorkerLostError:
            failed.add(me)
        else:
            collectives.leave()

    network.run(program)
    early.update(entry[2] for entry in network.log if len(entry) == 5)
    longest = max(histories.values(), key=len)
    for one, history in histories.items():
        assert history == longest[: len(history)]
        assert one in network.dead | failed or len(history) == len(longest)
    assert network.silences or not failed
    for members, step, x in longest:
        assert x == [sum(given(one, step)[0].item() for one in members)] * len(x)
