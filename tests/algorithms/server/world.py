"""The real programs of workers, servers and second copies in one thread; every message, pause and death is drawn from a seed.

`marks` has what tells which updates are in what is read.
"""

import random
from dataclasses import replace
from types import SimpleNamespace

import greenlet
import torch

from algorithms.server.marks import MOST, ROOM, SERVERS, Marks, Memory, Read, Storage, Watched
from paceline.errors import PeerLostError
from paceline.memory.served import PrivateShard
from paceline.optim.settings import settings_of
from paceline.ports.matching import PendingEvents
from paceline.ports.ports import PeerBack, PeerLeft, Ports, Received, ServerPorts

SETTINGS = settings_of(torch.optim.SGD([torch.nn.Parameter(torch.zeros(ROOM))], lr=1.0), lambda _: (0, ROOM))


class KilledError(greenlet.GreenletExit):
    """Ends a program where it waits."""


class Member:
    """One process of a worker, a server or a second copy, and its mailbox."""

    def __init__(self, world, member_id, incarnation):
        self.world, self.id, self.incarnation = world, member_id, incarnation
        self.arrivals, self.left, self.alive, self.ready = PendingEvents(), {}, True, True
        self.until_s, self.error, self.promoted = None, None, False
        self.is_leaving = False  # it has said goodbye
        self.run = greenlet.greenlet(self._run)

    def _run(self):
        try:
            self.world.program(self)
        except KilledError:
            return
        except BaseException as error:
            self.error = error
        self.world.ended(self)

    def pause(self):
        self.ready = True
        self.world.hub.switch()

    def send(self, to, message):
        if to in self.left:
            raise PeerLostError(to, self.left[to])
        x = None if message.x is None else message.x.clone()
        if message.kind in ("push", "push-only") and self.id < self.world.num_workers:
            x[self.id], x[MOST + self.id] = message.number, self.incarnation + 1
            self.read.clock = message.number - 1
        self.is_leaving |= message.kind == "bye"
        self.world.post(self, to, Received(self.id, self.incarnation, message._replace(x=x)))

    def receive(self, timeout_s=None, *, kind=None, sender=None, number=None):
        self.until_s = None if timeout_s is None else self.world.now_s + timeout_s
        while True:
            arrival = self.arrivals.take(kind, sender, number)
            if arrival is not None or (self.until_s is not None and self.world.now_s >= self.until_s):
                self.until_s = None
                return arrival
            self.ready = False
            self.world.hub.switch()

    def peers(self):
        return frozenset(one for one in self.world.members if one != self.id and one not in self.left)


class World:
    """One run.

    Args:
        algorithm: a parameter server; its rule is replaced by one that makes marks.
        workers: their number, 7 at most.
        steps: of each worker; or, with `epochs`, of all workers together in each.
        seed: of everything that is drawn.
        deaths: members that are killed at random moments, each replaced by a new process a little later.
        breaks: so often the connection of a server and a worker, or another server, breaks, with what is under way, and is
            made again.
        late: workers that come when the others have made a third of their steps.
        epochs: their steps are dealt to whoever is free, and after each of them all workers meet that are alive; 0: no such
            thing.
        slow: member -> its speed, and that of what it sends, as a share of the others'.
    """

    def __init__(self, algorithm, *, workers, steps, seed, deaths=(), breaks=0, late=(), epochs=0, slow=()):
        self.mode = algorithm.mode
        self.algorithm = replace(algorithm, apply=Marks(), mode=Watched(mode=algorithm.mode, world=self))
        self.num_workers, self.shards, self.steps = workers, algorithm.shards, steps
        self.copies = algorithm.durability == "replica"
        self.ranges = tuple((ROOM * shard, ROOM * (shard + 1)) for shard in range(self.shards))
        self.draw, self.slow = random.Random(seed), dict(slow)
        self.memories = [Memory(self, shard) for shard in range(self.shards)]
        self.snapshots, self.now_s, self.hub = {}, 0.0, greenlet.getcurrent()
        self.reads = []
        self.updates = [[] for _ in range(self.shards)]  # of each shard, as made
        self.let_in = {}  # (shard, worker) -> the clock at which it takes part
        self.done = dict.fromkeys(range(workers), 0)
        self.left_of = [steps] * epochs  # steps of each epoch that nobody has been dealt
        self.epoch, self.at_meeting, self.finished = 0, set(), set()
        self.links = {}
        self.members = {}
        self.starts = {
            one: (0, steps * (workers - len(late)) // 3) for one in late
        }  # id -> incarnation, after so many steps
        self.deaths, self.breaks = list(deaths), breaks
        self.next_copy = 1
        for member_id in range(workers + self.shards * (2 if self.copies else 1)):
            if member_id not in self.starts:
                self.members[member_id] = Member(self, member_id, 0)
                self.members[member_id].left = dict.fromkeys(self.starts, "it has not come")

    # What the members run

    def program(self, member):
        if member.id < self.num_workers:
            shared = SimpleNamespace(x=torch.zeros(ROOM * self.shards, dtype=torch.float64), ranges=self.ranges)
            self.algorithm.work(Replica(self, member), self._ports(member, shared))
            return
        shard = (member.id - self.num_workers) % self.shards
        if member.id >= self.num_workers + self.shards:
            own = PrivateShard(ROOM, torch.float64, self.ranges)
            ports = self._ports(member, own, promoted=lambda: self._promoted(member, shard))
        else:
            ports = self._ports(member, self.memories[shard], storage=Storage(self, shard))
            if member.incarnation and not self.copies:
                self.memories[shard].restore(self.snapshots[shard]["x"])
        self.algorithm.serve(shard, ports)

    def _promoted(self, member, shard):
        return self._ports(member, self.memories[shard], storage=Storage(self, shard)) if member.promoted else None

    def _ports(self, member, shared, **others):
        if member.id >= self.num_workers:
            kind, others = ServerPorts, {"copies": self.copies, **others}
        else:
            kind = Ports
        return kind(
            worker_id=member.id,
            num_workers=self.num_workers,
            clock=SimpleNamespace(now_s=lambda: self.now_s),
            random=random.Random(0),
            shared=shared,
            staleness=SimpleNamespace(),
            mailbox=member,
            incarnation=member.incarnation,
            num_servers=self.shards,
            **others,
        )

    def meet(self, member):
        """Waits for all that are alive and go on."""
        epoch = self.epoch
        self.at_meeting.add(member.id)
        self._settle_meeting()
        while self.epoch == epoch:
            member.ready = False
            self.hub.switch()

    def finish(self, member):
        self.finished.add(member.id)
        self._settle_meeting()

    def _settle_meeting(self):
        workers = {one.id for one in self.members.values() if one.alive and one.id < self.num_workers} - self.finished
        if self.at_meeting and workers <= self.at_meeting:
            self.epoch += 1
            for one in self.at_meeting & workers:
                self.members[one].ready = True
            self.at_meeting.clear()

    # The network

    def post(self, sender, to, item):
        target = self.members.get(to)
        if sender.alive and target is not None and target.alive:
            self.links.setdefault((sender.id, to), []).append((target, item))

    def _tell(self, about, event, *, losing=False):
        """All others hear of it, after what it has sent before: all of that, or as much as a draw says."""
        for other in self.members.values():
            if other.alive and other is not about:
                link = self.links.setdefault((about.id, other.id), [])
                if losing:
                    del link[self.draw.randint(0, len(link)) :]
                link.append((other, event))

    def _deliver(self, link):
        target, item = self.links[link].pop(0)
        if not target.alive or self.members.get(link[1]) is not target:
            return
        match item:
            case PeerLeft(peer=peer, reason=reason):
                if peer in target.left:
                    return
                target.left[peer] = reason
            case PeerBack(peer=peer):
                if target.left.pop(peer, None) is None:
                    return
        target.arrivals.add(item)
        target.ready = True

    def ended(self, member):
        member.alive = False
        self._tell(member, PeerLeft(member.id, member.incarnation, "ended"))

    # What goes wrong

    def _kill(self, member):
        member.alive = False
        self._tell(member, PeerLeft(member.id, member.incarnation, "killed"), losing=True)
        for link in [one for one in self.links if one[1] == member.id]:
            del self.links[link]
        member.run.throw(KilledError)
        self.at_meeting.discard(member.id)
        self._settle_meeting()

    def _start(self, member_id, incarnation):
        member = self.members[member_id] = Member(self, member_id, incarnation)
        member.left = dict.fromkeys(self.starts, "it has not come")
        self._tell(member, PeerBack(member_id, incarnation))

    def _start_soon(self, member_id, incarnation):
        self.starts[member_id] = (incarnation, sum(self.done.values()) + self.draw.randint(0, 6))

    def _next_death(self):
        member = self.members.get(self.deaths[0])
        if member is None or not member.alive or member.is_leaving:
            return
        place = member.id - self.num_workers
        if place < 0 or place >= self.shards:  # a worker, or a second copy
            self.deaths.pop(0)
            self._kill(member)
            self._start_soon(member.id, self._copys_incarnation() if place > 0 else member.incarnation + 1)
        elif not self.copies and place in self.snapshots:
            self.deaths.pop(0)
            self._kill(member)
            self._start_soon(member.id, member.incarnation + 1)
        elif self.copies:
            copy = self.members.get(member.id + self.shards)
            if copy is not None and copy.alive and self.memories[place].named == copy.incarnation:
                self.deaths.pop(0)
                self._kill(member)
                self._promote(copy, member)

    def _promote(self, copy, server):
        """The copy's process goes on under its server's id, as `server_process` has it."""
        self.memories[server.id - self.num_workers].named = None
        was = copy.id
        self._tell(copy, PeerLeft(was, copy.incarnation, "its connection broke"), losing=True)
        for link in [one for one in self.links if one[1] == was]:
            del self.links[link]
        del self.members[was]
        copy.id, copy.incarnation, copy.promoted = server.id, server.incarnation + 1, True
        copy.arrivals, copy.ready, copy.left = (
            PendingEvents(),
            True,
            dict.fromkeys([*self.starts, was], "it has not come"),
        )
        self.members[copy.id] = copy
        self._tell(copy, PeerBack(copy.id, copy.incarnation))
        self._start_soon(was, self._copys_incarnation())

    def _copys_incarnation(self):
        self.next_copy += 1
        return self.next_copy

    def _break_one(self):
        server = self.members.get(self.num_workers + self.draw.randrange(self.shards))
        peer = self.members.get(self.draw.randrange(self.num_workers + self.shards))
        if server is None or peer is None or server is peer or not (peer.alive and server.alive):
            return
        self.breaks -= 1
        for one, other in ((peer, server), (server, peer)):
            link = self.links.setdefault((one.id, other.id), [])
            del link[self.draw.randint(0, len(link)) :]
            link.append((other, PeerLeft(one.id, one.incarnation, "its connection broke")))
            link.append((other, PeerBack(one.id, one.incarnation)))

    # What came of it

    def missed(self, bound):
        """Reads that lack an update that was promised, with that."""
        for read in self.reads:
            for shard, updates in enumerate(self.updates):
                server = int(read.part(shard)[SERVERS])
                for one in updates:
                    promised = one.number <= read.clock - bound and one.server <= server < one.undone and not one.late
                    if promised and (one.incarnation, one.number) > read.last(shard, one.worker):
                        yield read, shard, one

    # What happens next

    @torch.no_grad()  # around all of them: each program's own would end in another order than it began, and outlast the run
    def run(self):
        """Until all workers and servers have ended.

        Raises:
            AssertionError: nobody can go on; or what a program raised.
        """
        for _ in range(300_000):
            for member in self.members.values():
                if member.error is not None:
                    raise member.error
            if not self.starts and not any(one.alive for one in self.members.values()):
                return self
            self._go_on()
        raise AssertionError("the run has no end")

    def _training(self):
        return any(one.alive for one in self.members.values() if one.id < self.num_workers)

    def _go_on(self):
        made = sum(self.done.values())
        for member_id, (incarnation, after) in list(self.starts.items()):
            if made >= after or not self._training():
                del self.starts[member_id]
                self._start(member_id, incarnation)
        if self.deaths and self.draw.random() < 0.01 and self._training():
            self._next_death()
        if self.breaks and self.draw.random() < 0.01:
            self._break_one()
        links = [link for link, items in self.links.items() if items]
        ready = [member for member in self.members.values() if member.alive and member.ready]
        weights = [self.slow.get(link[0], 1.0) for link in links] + [self.slow.get(one.id, 1.0) for one in ready]
        if not weights:
            self._pass_time()
            return
        (chosen,) = self.draw.choices([*links, *ready], weights)
        if isinstance(chosen, tuple):
            self._deliver(chosen)
        else:
            chosen.run.switch()

    def _pass_time(self):
        """To the next instant at which anything happens by itself."""
        if self.starts:
            first = min(self.starts, key=lambda one: self.starts[one][1])
            self.starts[first] = (self.starts[first][0], 0)
            return
        waiting = [one for one in self.members.values() if one.alive and one.until_s is not None]
        if not self._training():  # the supervisor ends servers that have not heard all goodbyes
            for member in self.members.values():
                member.alive = False
                member.run.throw(KilledError)
            return
        assert waiting, f"nobody can go on; steps made: {self.done}"
        self.now_s = min(one.until_s for one in waiting)
        for one in waiting:
            one.ready = one.until_s <= self.now_s


class Replica:
    """A worker's steps; each gradient takes as long as the draw says."""

    samples = 1
    before_meeting = rows = lookups = None

    def __init__(self, world, member):
        self.world, self.member, self.g = world, member, torch.zeros(ROOM * world.shards, dtype=torch.float64)

    def steps(self):
        if not self.world.left_of:
            yield from range(1, self.world.steps + 1)
            return
        for epoch in range(self.world.epoch, len(self.world.left_of)):
            while self.world.left_of[epoch]:
                self.world.left_of[epoch] -= 1
                yield
            if self.before_meeting is not None:
                self.before_meeting()
            self.world.meet(self.member)
        self.world.finish(self.member)

    def optimizer_settings(self):
        return SETTINGS

    def optimizer_state(self):
        return {}

    def gradient(self, at, version):
        self.member.read = Read(self.member.id, self.member.incarnation, at.clone())
        self.world.reads.append(self.member.read)
        self.member.pause()

    def accrued(self):
        self.world.done[self.member.id] += 1

    def settled(self, version):
        pass

    def applied(self, version, gradient_version):
        self.world.done[self.member.id] += 1

    def dropped(self, gradient_version):
        self.world.done[self.member.id] += 1
