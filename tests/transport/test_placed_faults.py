"""Means by messages among three workers: faults at every place of a run, alone and in pairs."""

import itertools
import os

import pytest

import soak_results
from transport.test_message_collectives import Network, averaged

WORKERS, ROUNDS, TURNS = 3, 4, 90  # by this turn, two rounds are over
PAIRS = list(itertools.combinations(range(WORKERS), 2))
FAULTS = [
    *(("dies", one) for one in range(WORKERS)),
    *(("is cut off", one) for one in range(WORKERS)),
    *(("stands still", one) for one in range(WORKERS)),
    *(("cannot reach", pair) for pair in PAIRS),
    ("mended", None),
]


class InTurns:
    """Takes the place of random draws: workers run, and are read from, in turns; connections lose nothing, or all."""

    def __init__(self, *, loses):
        self.loses, self.count = loses, 0

    def choice(self, found):
        self.count += 1
        return found[self.count % len(found)]

    def randrange(self, number):
        return 0 if self.loses else number - 1

    def random(self):
        return 1.0


class Placed(Network):
    """Has these faults, by turn; a worker is excluded after 150 turns."""

    def __init__(self, faults, *, loses):
        super().__init__(f"{faults}, {loses=}", WORKERS, 0, silences=True)
        self.draws, self.placed = InTurns(loses=loses), dict(faults)

    def run(self, program):
        programs = {one: self.started(program, one) for one in range(self.workers)}
        while running := [one for one in programs if one not in self.dead | self.over]:
            running = [one for one in running if one not in self.stopped] or running  # stopped workers wake at last
            if self.turns in self.placed:
                kind, who = self.placed.pop(self.turns)
                self.place(kind, who, running, programs)
                continue
            self.turns += 1
            assert self.turns < 5_000, "no worker goes on"
            programs[self.draws.choice(running)].switch()

    def place(self, kind, who, running, programs):
        if kind == "dies" and who in running:
            self.kill(who, running, programs)
        elif kind in ("is cut off", "stands still") and who in running:
            if kind == "stands still":
                self.stopped.add(who)
            for other in set(range(self.workers)).difference(self.dead | self.over, [who]):
                self._cut(who, other)
        elif kind == "cannot reach" and set(who) <= set(running):
            self._cut(*who)
        elif kind == "mended":
            for one, other in sorted(map(sorted, self.cut)):
                self._mend_one(one, other)


def check(faults, *, loses):
    """The same members and results of all survivors, as far as they have come; returns whether some come to the end."""
    longest, _ = averaged(Placed(faults, loses=loses), ROUNDS)
    return len(longest) == ROUNDS


def schedules(number):
    """All placements of so many faults."""
    for turns in itertools.combinations(range(TURNS), number):
        for kinds in itertools.product(FAULTS[:-1], *[FAULTS] * (number - 1)):
            for loses in (False, True):
                yield tuple(zip(turns, kinds, strict=True)), loses


def check_alone(loses_in):
    """One fault at every place, which takes messages with it if `loses_in(turn, number of the fault)`."""
    for turn, (number, fault) in itertools.product(range(TURNS), enumerate(FAULTS[:-1])):
        assert check(((turn, fault),), loses=loses_in(turn, number)), "two of three always go on"


def test_one_fault_at_every_place():
    """Every other one takes messages with it."""
    check_alone(lambda turn, number: (turn + number) % 2 == 1)


def test_some_pairs_of_faults():
    went_on = [check(faults, loses=loses) for faults, loses in itertools.islice(schedules(2), 0, None, 2_003)]
    assert sum(went_on) > 0.3 * len(went_on) > 100


@pytest.mark.soak
def test_one_fault_at_every_place_the_other_way():
    check_alone(lambda turn, number: (turn + number) % 2 == 0)


@pytest.mark.soak
def test_all_pairs_of_faults():
    """Writes what became of them to PACELINE_SOAK_RESULTS."""
    number = went_on = 0
    for faults, loses in itertools.islice(schedules(2), 0, None, int(os.environ.get("PACELINE_STRIDE", "1"))):
        number, went_on = number + 1, went_on + check(faults, loses=loses)
    soak_results.keep("soak_placed_faults", "pairs of faults", {"runs": number, "went on": went_on})
