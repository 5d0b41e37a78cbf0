"""Workers in lockstep end after the same round, however their questions and the stop are interleaved."""

import random

import pytest

from paceline.memory.atomics import store
from paceline.memory.rounds import Rounds
from paceline.memory.segment import Segment


@pytest.mark.parametrize("number", range(20))
def test_all_end_after_the_furthest_round(number):
    draws, segment = random.Random(number), Segment.create(4096)
    abort, furthest = segment.address, segment.address + 64
    workers = [Rounds(abort, furthest) for _ in range(4)]
    stop_at, going = draws.randrange(200), set(workers)
    for question in range(10_000):
        if question == stop_at:
            begun = max(worker.num_ended for worker in workers)
            Rounds.close(furthest)
            Rounds.close(furthest)
        if not going:
            break
        worker = draws.choice(sorted(going, key=workers.index))
        if worker.stopped():
            going.remove(worker)
        else:
            worker.num_ended += draws.random() < 0.7  # else it asks again
    assert not going
    assert len({worker.num_ended for worker in workers}) == 1
    assert begun <= workers[0].num_ended <= begun + 1


def test_an_abort_ends_a_worker_before_the_last_round():
    segment = Segment.create(4096)
    worker = Rounds(segment.address, segment.address + 64)
    assert not worker.stopped()
    store(segment.address, 1)
    assert worker.stopped()
