"""Workers that die and are replaced while others begin rounds, in drawn orders of their accesses to shared memory."""

import random

import greenlet
import pytest

from paceline.memory import views
from paceline.memory.segment import Layout, Segment
from paceline.memory.views import SharedViews

ROUNDS = 12
PATIENCE = 50_000  # turns without progress


class StuckError(AssertionError):
    pass


class Run:
    """Programs of workers, one greenlet each, which go on in a drawn order; each access to shared memory ends a turn.

    Args:
        seed: of all draws.
        workers: how many.
        deaths: how many processes are killed at most.
        pace: how many rounds a step with a new batch comes after the last one.
    """

    def __init__(self, seed, workers, deaths, pace):
        self.draw, self.deaths, self.pace = random.Random(seed), deaths, pace
        layout = Layout()
        self.plan = SharedViews.reserve(layout, 1, workers)
        self.segment = Segment.create(layout.size_bytes)
        self.supervisor = SharedViews(self.segment, self.plan, workers)
        self.members, self.entered = {}, {}  # by round: its members, and who came before it
        self.models, self.asking, self.given, self.givers = {}, {}, {}, {}
        self.turns_left = PATIENCE
        self.dead = {}  # and the newest round when the others could know
        self.hub = greenlet.getcurrent()
        self.programs = {(one, 0): greenlet.greenlet(self.work, self.hub) for one in range(workers)}
        self.inside = {*self.programs}  # those that take part
        self.num_replaced = 0

    def turn(self):
        self.hub.switch()

    def run(self):
        stays, who = self.draw.choice([0.0, 0.9, 0.99]), None
        while self.programs:
            self.turns_left -= 1
            if self.turns_left < 0:
                raise StuckError(f"{[*self.programs]} make no progress")
            who = who if who in self.programs and self.draw.random() < stays else self.draw.choice([*self.programs])
            if who[0] == -1 or self.inside <= {who} or not self.deaths or self.draw.random() > 0.003:
                program = self.programs[who]
                program.switch(*(() if program else who))
                if program.dead:
                    self.programs.pop(who, None)
                    self.inside.discard(who)
            else:
                self.kill(who)

    def kill(self, who):
        self.deaths -= 1
        self.programs.pop(who)
        self.inside.discard(who)
        if self.asking.get(who[0]) == who[1]:
            del self.asking[who[0]]
        self.programs[-1, who] = greenlet.greenlet(self.bury, self.hub)

    def bury(self, _, who):
        """What the supervisor does with a dead worker."""
        worker, incarnation = who
        self.supervisor.mark_lost(worker, incarnation, is_dead=True)
        self.dead[who] = max(self.members, default=0)
        if self.inside:
            self.programs[worker, incarnation + 1] = greenlet.greenlet(self.work, self.hub)

    def work(self, me, incarnation):
        own, k, coming = SharedViews(self.segment, self.plan, me, incarnation), 0, {}
        is_new = incarnation > 0
        if is_new:
            self.asking[me] = incarnation
            while (me, incarnation) not in self.given:
                if not self.inside or self.is_let_down(me):
                    self.kill((me, incarnation))
                    self.deaths += 1
                self.turn()
            state, k = self.given[me, incarnation]
            own.enter(state)
            own.living()
            self.num_replaced += 1
        while k < ROUNDS:
            if not is_new:
                coming |= own.coming(k)
            if coming and k % self.pace == 0:
                assert self.entered.setdefault(k, coming) == coming
                assert not any(coming.items() & came.items() for at, came in self.entered.items() if at != k)
                assert own.living() == own.members
                giver, state = own.members[0], own.let_in(coming)
                for worker, n in coming.items():
                    self.givers[worker, n] = giver, own._incarnations[giver]
                    if giver == me:
                        self.turn()
                        if self.asking.get(worker) == n:
                            del self.asking[worker]
                            self.given[worker, n] = state, k
                            self.inside.add((worker, n))
                own.living()
                coming = {}
            is_new = False
            members = own.begin(k)
            assert me in members
            assert not [one for one in members if k > 2 + self.dead.get((one, own._incarnations[one]), k)]
            assert self.members.setdefault(k, tuple(members)) == tuple(members)
            self.models[me, k] = True
            own.sent(k)
            if members[0] == me and not coming and self.asking:
                own.announce(dict(self.asking))
            for other in members:
                while (other, k) not in self.models and (other, own._incarnations[other]) not in self.dead:
                    self.turn()
            self.turns_left = PATIENCE
            k += 1

    def is_let_down(self, me):
        """Whether the worker that was to give its state to this newcomer has died."""
        return self.givers.get((me, self.asking[me])) in self.dead


@pytest.fixture
def turns(monkeypatch):
    """Sets the run whose turns end at every access."""
    runs = []

    def ending(access):
        def then(*arguments):
            if runs and greenlet.getcurrent() is not runs[-1].hub:
                runs[-1].turn()
            return access(*arguments)

        return then

    for name in ("load", "store", "compare_and_swap", "fetch_add"):
        monkeypatch.setattr(views, name, ending(getattr(views, name)))
    monkeypatch.setattr(views, "wait_briefly", lambda *_: runs[-1].turn())
    monkeypatch.setattr(views, "raise_if_stopped", lambda *_: None)
    return runs


def drawn(seed, turns):
    draw = random.Random(f"views {seed}")
    run = Run(seed, draw.randint(2, 4), draw.randint(1, 5), draw.choice([1, 1, 2, 3]))
    turns.append(run)
    run.run()
    assert sorted(run.members) == list(range(ROUNDS))
    return run


def test_all_agree_on_members_and_on_when_newcomers_come(turns):
    replaced = sum(drawn(seed, turns).num_replaced for seed in range(150))
    assert replaced > 30
