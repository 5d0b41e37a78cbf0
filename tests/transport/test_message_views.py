"""D-PSGD by messages among workers that die, leave and lose connections: on a network whose every event a seed draws."""

import contextlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from chosen import each_value, soaked
from oracles import gossip
from paceline.algorithms import registry
from paceline.data.plan import BatchPlan
from paceline.data.sources import ABSENT, END, BatchClaims
from paceline.errors import NotReplacedError, RunStopped, WorkerLostError
from paceline.ports.ports import Counts, Message, PeerLeft, Received
from paceline.ports.views import LOST
from paceline.transport.message_newcomers import MessageNewcomers
from paceline.transport.message_views import MessageViews
from paceline.transport.packed_vectors import packed, unpacked
from paceline.transport.round_header import Purpose, RoundHeader
from transport.test_message_collectives import Network

EPOCHS, BATCHES = 2, 8
TOPOLOGIES = {
    "ring": gossip.ring,
    "complete": gossip.complete,
    "exponential": gossip.exponential,
    "one-peer-exponential": gossip.one_peer,
}


@dataclass
class Worker:
    """What one worker has done.

    Attributes:
        members: of each round that it has begun.
        first: the first of these rounds.
        before: its model at the beginning of each.
        missing: (round, worker): models that did not come.
        mixed: by worker, how many of its steps the last model that came contains.
        batches: of each of its steps.
        kept: by dead worker and the first round without it, how many of its steps survive.
        sums: what all workers have added up.
        end: the mean of all models, and the workers in that.
        has_left: whether it has left before the end.
        error: with which it ended instead.
    """

    members: list = field(default_factory=list)
    first: int = 0
    before: list = field(default_factory=list)
    missing: set = field(default_factory=set)
    mixed: dict = field(default_factory=dict)
    batches: list = field(default_factory=list)
    kept: dict = field(default_factory=dict)
    sums: list = field(default_factory=list)
    end: tuple | None = None
    has_left: bool = False
    error: str = ""


class Breaking(Network):
    """Notes whether a connection broke between living workers."""

    has_cut = False

    def _mend(self):
        super()._mend()
        self.has_cut = True


class Shared:
    def __init__(self, workers):
        self.x, self.version = torch.zeros(workers, dtype=torch.float64), 0

    def writing(self):
        return contextlib.nullcontext()

    def advance(self, updates=1):
        self.version += 1
        return self.version


class Views(MessageViews):
    """Notes what the program asks for and gets."""

    notes: Worker

    def _meet(self, place=0):
        reports = super()._meet(place)
        for worker, round in self._first_without.items():
            self.notes.kept[worker, round] = self._kept[worker]
        return reports

    def begin(self, round):
        members = super().begin(round)
        self.notes.members.append(tuple(members))
        self.notes.first = round + 1 - len(self.notes.members)
        return members

    def receive(self, timeout_s, *, kind, sender, number):
        found = super().receive(timeout_s, kind=kind, sender=sender, number=number)
        assert isinstance(found, Received)
        if found.message.kind == LOST:
            self.notes.missing.add((number, sender))
        else:
            self.notes.mixed[sender] = found.message.version
        return found


class Replica:
    """Its gradient is 1 for the worker's own element."""

    round = 0
    rates = 0.0
    scaled = False
    closure = None

    def __init__(self, ports, claims, stops, sums, notes):
        self.ports, self.claims, self.stops, self.sums, self.notes = ports, claims, stops, sums, notes
        self.samples = 0
        self.given = None

    @property
    def deal(self):
        return self.claims.deal if self.claims is not None else None

    def carries_all(self):
        return True

    def for_newcomers(self):
        return {}

    def let_in(self, members):
        return self.claims.deal.let_in(members)

    @property
    def rounds_begun(self):
        return self.claims.taken if self.claims is not None else 0

    def steps(self):
        while len(self.notes.batches) != self.stops and (number := self.claims.next() if self.claims else 0) != END:
            self.samples = int(number != ABSENT)
            self.notes.batches.append(number)
            self.notes.before.append(self.ports.shared.x.clone())
            yield
            if self.sums and len(self.notes.batches) % self.sums == 0:
                self.ports.views.purpose = Purpose.SUM
                total = torch.zeros(self.ports.num_workers)
                total[self.ports.worker_id] = 1
                self.ports.views.start_all_reduce(total).wait()
                self.ports.views.purpose = Purpose.STEP
                self.notes.sums.append(total.tolist())

    def meet(self, members, rounds=None):
        if self.claims is not None:
            self.claims.deal.meet(members, rounds)

    def gradient(self, at, version):
        pass

    def apply(self, to):
        to[self.ports.worker_id] += 1

    def applied(self, version, gradient_version):
        pass

    def absent(self, version):
        pass


@dataclass
class Ports:
    worker_id: int
    num_workers: int
    shared: Shared
    views: Views
    incarnation: int = 0
    newcomers: Any = None
    counts: Counts = field(default_factory=Counts)
    decided: Any = lambda *_, **__: None

    @property
    def mailbox(self):
        return self.views

    def moved(self, *_):
        pass


class Newcomers(MessageNewcomers):
    """A program that has no epochs waits."""

    def accepted(self, epoch):
        return super().accepted(0)


def train_with_newcomers(network, topology):
    """Returns each worker's notes, by worker and incarnation."""
    found = {}
    algorithm = registry.build(f"d-psgd(topology={topology}, deadline_s=1000000)")

    def program(mailbox):
        me = mailbox.me
        try:
            work(me, mailbox, found.setdefault((me, mailbox.incarnation), Worker()))
        except (NotReplacedError, RunStopped, WorkerLostError) as error:
            network.left.add(me)
            found[me, mailbox.incarnation].error = str(error)
            if isinstance(error, WorkerLostError) and not network.silences:
                raise

    def work(me, mailbox, notes):
        views = Views(mailbox, me, network.workers, ends=mailbox, deadline_s=network.deadline_s, now_s=network.now_s)
        views.notes, shared, incarnation = notes, Shared(network.workers), mailbox.incarnation
        newcomers = Newcomers(
            mailbox,
            views,
            incarnation,
            model=lambda: {"x": shared.x.clone(), "version": shared.version},
            deadline_s=1e9,
            stopped=network.has_only_newcomers,
        )
        plan = BatchPlan(num_samples=BATCHES, batch_size=1, num_workers=network.workers, seed=0)
        options = {"lockstep": True, "counter": int, "max_epochs": EPOCHS + 1, "tracks": True, "survivors": views}
        claims = BatchClaims(plan, worker_id=me, **options)
        ports = Ports(me, network.workers, shared, views, incarnation, newcomers)
        replica = Replica(ports, claims, None, 0, notes)
        if incarnation:
            network.waiting.add(me)
            try:
                replica.given = newcomers.enter(epoch=0)
            except (NotReplacedError, RunStopped):
                views.leave()
                raise
            finally:
                network.waiting.discard(me)
            shared.x, shared.version = replica.given["x"], replica.given["version"]
            views.enter(replica.given["group"])
            claims.enter(replica.given["deal"])
        algorithm.work(replica, ports)
        notes.before.append(shared.x.clone())
        views.purpose, mean = Purpose.END, shared.x.clone()
        views.all_reduce_mean(mean, 1.0)
        notes.end = (mean.tolist(), tuple(views.members))

    network.run(program)
    return found


def check_with_newcomers(network, found, topology):
    """As `check`; returns how many newcomers have taken part."""
    ended = {one: notes for one, notes in found.items() if notes.end}
    if not ended:
        return 0
    rounds = {}
    for notes in ended.values():
        for k, members in enumerate(notes.members, notes.first):
            assert rounds.setdefault(k, members) == members
    first = next(iter(ended.values()))
    assert all(notes.end == first.end for notes in ended.values())
    kept = {one: steps for notes in found.values() for one, steps in notes.kept.items()}
    assert all(kept[one] == steps for notes in found.values() for one, steps in notes.kept.items())

    def at(worker, k):
        """The notes of the process that was there in a round."""
        lives = [notes for (one, _), notes in found.items() if one == worker and notes.members and notes.first <= k]
        return max(lives, key=lambda notes: notes.first)

    for (one, incarnation), notes in ended.items():
        if incarnation:
            others = [own.before[notes.first - own.first :] for (other, _), own in found.items() if other != one]
            assert any(before and torch.equal(notes.before[0], before[0]) for before in others)
        for k, members in enumerate(notes.members, notes.first):
            W = gossip.metropolis(TOPOLOGIES[topology], len(members), k) if len(members) > 1 else np.ones((1, 1))
            mixed = torch.zeros(network.workers, dtype=torch.float64)
            for other, weight in zip(members, W[members.index(one)], strict=True):
                source = notes if (k, other) in notes.missing or not weight else at(other, k)
                mixed += weight * source.before[k - source.first]
            mixed[one] += notes.batches[k - notes.first] != ABSENT
            torch.testing.assert_close(notes.before[k + 1 - notes.first], mixed)
    counted = Counter()
    for one, notes in found.items():
        end = None if one in ended else kept_of(kept, one[0], notes.first)
        own = notes.batches[: max(0, end - notes.first) if end is not None else None]
        counted.update(batch for batch in own if batch != ABSENT)
    assert set(counted.values()) == {1}
    alive = {worker for worker, _ in ended}
    assert {*rounds[max(rounds)]} - alive or len(counted) == (EPOCHS + 1) * BATCHES
    return sum(bool(incarnation and notes.members) for (_, incarnation), notes in ended.items())


def check_newcomers(workers, faults, runs, *, silences=False):
    entered = 0
    for number in range(runs):
        topology = list(TOPOLOGIES)[number % len(TOPOLOGIES)]
        seed = f"newcomers of views {workers} {faults} {number}"
        network = Network(seed, workers, faults, replaces=True, silences=silences)
        try:
            entered += check_with_newcomers(network, train_with_newcomers(network, topology), topology)
        except BaseException as error:
            error.add_note(f"run {number} of {workers} workers with {faults} faults")
            raise
    return entered


@pytest.mark.parametrize(("workers", "faults"), each_value([2, 3, 4], [1, 4, 2]))
def test_newcomers_take_part_from_a_round_on_of_which_all_know(workers, faults):
    assert (
        check_newcomers(workers, faults, runs=150 if workers == 2 else 60) > 5
    )  # of two, one soon trains alone to the end


@pytest.mark.parametrize(("workers", "faults"), [(2, 4), (3, 4), *soaked((4, 3))])
def test_newcomers_and_workers_that_cannot_reach_each_other(workers, faults):
    check_newcomers(workers, faults, runs=40, silences=True)


def train(network, topology, *, leaver=None, sums=0, own_steps=()):
    """Returns each worker's notes.

    Args:
        leaver: a worker that leaves after two steps.
        sums: after so many steps workers add up numbers; 0: never.
        own_steps: how many steps each worker makes with batches of its own; empty: the workers share the batches.
    """
    found = [Worker() for _ in range(network.workers)]
    algorithm = registry.build(f"d-psgd(topology={topology}, deadline_s=1000000)")

    def program(mailbox):
        me = mailbox.me
        try:
            work(me, mailbox)
        except WorkerLostError as error:
            found[me].error = str(error)

    def work(me, mailbox):
        views = Views(mailbox, me, network.workers, ends=mailbox, deadline_s=network.deadline_s, now_s=network.now_s)
        views.notes = notes = found[me]
        plan = BatchPlan(num_samples=BATCHES, batch_size=1, num_workers=network.workers, seed=0)
        options = {"lockstep": True, "counter": int, "max_epochs": EPOCHS, "tracks": True, "survivors": views}
        claims = None if own_steps else BatchClaims(plan, worker_id=me, **options)
        ports = Ports(me, network.workers, Shared(network.workers), views)
        stops = 2 if me == leaver else own_steps[me] if own_steps else None
        algorithm.work(Replica(ports, claims, stops, sums, notes), ports)
        notes.before.append(ports.shared.x.clone())
        if me == leaver:
            notes.has_left = True
            views.leave()
            return
        views.purpose, mean = Purpose.END, ports.shared.x.clone()
        views.all_reduce_mean(mean, 1.0)
        notes.end = (mean.tolist(), tuple(views.members))

    network.run(program)
    return found


def check(network, found, topology, own_steps=()):
    """Survivors agree on all; their models are what one process computes; each batch counts once an epoch.

    A worker that dies in the last rounds takes its batches with it.
    """
    alive = [one for one in range(network.workers) if one not in network.dead and not found[one].has_left]
    if not alive:
        return
    first = found[alive[0]]
    for one in alive:
        own = found[one]
        assert not own.error
        assert own.members == first.members
        assert own.end == first.end
        assert own.sums == first.sums
        assert own.kept == first.kept
        assert len(own.before) == len(own.members) + 1
    before = tuple(range(network.workers))
    for members in first.members:
        assert set(alive) <= set(members) <= set(before)
        before = members
    check_models(found, alive, first.members, topology)
    mean, members = first.end
    assert set(alive) <= set(members)
    torch.testing.assert_close(
        torch.tensor(mean, dtype=torch.float64), sum(found[one].before[-1] for one in members) / len(members)
    )
    if not own_steps:
        check_batches(network, found, alive, first)
    lost = {(k, one, other) for one in alive for k, other in found[one].missing}
    if not network.has_cut:
        assert {other for *_, other in lost} <= {*range(network.workers)} - {*alive}


def check_models(found, alive, rounds, topology):
    neighbours = TOPOLOGIES[topology]
    for k, members in enumerate(rounds):
        W = gossip.metropolis(neighbours, len(members), k) if len(members) > 1 else np.ones((1, 1))
        for one in alive:
            own, place = found[one], members.index(one)
            mixed = torch.zeros_like(own.before[k])
            for other, weight in zip(members, W[place], strict=True):
                is_missing = (k, other) in own.missing
                mixed += weight * (own if is_missing or other == one else found[other]).before[k] if weight else 0
            mixed[one] += own.batches[k] != ABSENT
            torch.testing.assert_close(own.before[k + 1], mixed)


def kept_of(kept, worker, first=0):
    """How many steps survive of a worker that began with this round; None: all."""
    return min(
        ((round, steps) for (one, round), steps in kept.items() if one == worker and round > first), default=(0, None)
    )[1]


def check_batches(network, found, alive, first):
    counted = Counter()
    for worker, own in enumerate(found):
        kept = None if worker in alive else kept_of(first.kept, worker)
        counted.update(one for one in own.batches[:kept] if one != ABSENT)
        if kept is not None:  # what is in survivors' models counts; the only other ones that had more have died
            used = [one.mixed.get(worker, 0) for one in map(found.__getitem__, alive)]
            assert max(used) <= kept <= len(own.batches)
            assert max(used) == kept or len(alive) < network.workers - 1
    assert set(counted.values()) == {1}
    ends_with = {worker for worker in range(network.workers) if worker not in alive} & {*first.members[-1]}
    assert ends_with or len(counted) == EPOCHS * BATCHES


@pytest.mark.parametrize(("workers", "faults"), each_value([4, 2, 3], [0, 1, 2, 3]))
def test_survivors_agree_on_every_round(workers, faults):
    check_runs(workers, faults, runs=100 if faults else 40)


@pytest.mark.parametrize("faults", [1, 2])
def test_loops_with_batches_of_their_own(faults):
    """They do not meet at an epoch's end."""
    check_runs(3, faults, own_steps=(6, 6, 6))


def check_runs(workers, faults, runs=100, own_steps=()):
    deaths = losses = 0
    for number in range(runs):
        topology = list(TOPOLOGIES)[number % len(TOPOLOGIES)]
        network = Breaking(f"views {workers} {faults} {number}", workers, faults)
        leaver = 1 if number % 3 == 2 else None
        found = train(network, topology, leaver=leaver, sums=number // 4 % 3, own_steps=own_steps)
        try:
            check(network, found, topology, own_steps)
        except BaseException as error:
            error.add_note(f"run {number} of {workers} workers with {faults} faults")
            raise
        deaths += len(network.dead)
        losses += any(one.missing for one in found)
    assert faults == 0 or (deaths > 0 and losses > 0)


@pytest.mark.parametrize("workers", [3, 4])
def test_the_majority_trains_on_without_workers_that_it_cannot_reach(workers):
    went_on = 0
    for number in range(20):
        topology = list(TOPOLOGIES)[number % len(TOPOLOGIES)]
        network = Breaking(f"silent views {workers} {number}", workers, faults=3, silences=True)
        found = train(network, topology, sums=number // 4 % 3)
        excluded = [one for one in found if one.error]
        for one in excluded:
            one.has_left = True
        check(network, found, topology)
        went_on += bool(excluded) and any(one.end for one in found)
    assert went_on > 2


def test_a_loop_that_makes_fewer_steps_is_named():
    """By all workers that it leaves waiting, and by itself."""
    found = train(Network("fewer steps", 3, faults=0), "ring", own_steps=(6, 4, 6))
    says = ": worker 1 is at the end of its loop, and not at a step as worker 0: all must make as many steps"
    assert all(says in one.error for one in found)


class Ahead:
    """A mailbox that has worker 2's models of two rounds; worker 1 answers that it has begun the first one."""

    def __init__(self):
        self.events = [Received(2, 0, Message("model", k, 0.0, torch.ones(3), version=k)) for k in range(2)]
        self.events.append(PeerLeft(2, 0, "its connection broke"))

    def send(self, to, message):
        if to == 1:
            x = message.x
            if message.kind == "round pieces":
                header, table = unpacked(x, [RoundHeader().vector(), torch.empty(3 * 11, dtype=torch.int64)])
                table = torch.zeros_like(table).view(3, 11)
                table[1] = torch.tensor([1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0])
                x = packed([header, table.flatten()])
            self.events.append(Received(1, 0, message._replace(x=x)))

    def peers(self):
        return {1, 2} if self.events else {1}

    def receive(self, timeout_s=None, **_):
        return self.events.pop(0) if self.events else None


class Ends:
    """Worker 2 has ended."""

    def has_ended(self, worker_id, incarnation):
        return worker_id == 2

    def heard_s(self, worker_id):
        return 0.0


def test_a_dead_worker_was_ahead_of_all_others():
    """It is a member of the round of its last model, whose steps count."""
    views = MessageViews(Ahead(), 0, 3, ends=Ends())
    assert list(views.begin(0)) == [0, 1, 2]
    found = views.receive(60.0, kind=("model", "lost"), sender=1, number=0)
    assert isinstance(found, Received)
    assert found.message.kind == "lost"  # it was on its way when worker 1 met this one
    assert (list(views.begin(1)), list(views.begin(2))) == ([0, 1, 2], [0, 1])
    assert views.kept(2) == 1
