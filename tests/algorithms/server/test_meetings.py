"""A worker that waits where all meet is waited for by nobody, and by everybody again as soon as one has gone on."""

import pytest

import paceline as pl
from loops.coder import batches, loss_of, made, own_id
from paceline.algorithms.server.admission import Clocks, Quorum
from paceline.algorithms.server.requests import Meetings
from paceline.ports.ports import Message


def told(meetings, *kinds):
    """What `hear` returns after the last of these (worker, kind), each a message of its own."""
    waiting = frozenset()
    for number, (worker, kind) in enumerate(kinds):
        waiting = meetings.hear(worker, Message(kind, number))
    return waiting


def test_who_has_come_waits_until_one_goes_on():
    meetings = Meetings()
    assert told(meetings, (0, "meet"), (2, "fetch"), (2, "settings")) == {0}
    assert told(meetings, (0, "meet"), (1, "meet")) == {0, 1}
    assert told(Meetings(), (0, "meet"), (1, "meet"), (2, "meet"), (1, "push")) == set()
    assert told(Meetings(), (0, "meet"), (1, "meet"), (2, "meet"), (1, "join"), (1, "meet")) == {1}


def test_a_push_before_the_meeting_is_no_end_of_it():
    assert told(Meetings(), (0, "meet"), (1, "push"), (1, "push-only"), (2, "join")) == {0}


def test_a_message_that_comes_twice_counts_once():
    meetings = Meetings()
    for _ in range(2):
        assert meetings.hear(0, Message("meet", -2)) == {0}
    assert meetings.hear(1, Message("meet", -2)) == {0, 1}
    assert meetings.hear(1, Message("push", 1)) == set()
    assert meetings.hear(0, Message("meet", -2)) == set()


def test_a_successor_has_come_to_what_is_over():
    meetings = Meetings()
    for number in range(3):
        told(meetings, (0, "meet"), (1, "meet"), (0, "push"))
        assert meetings.hear(1, Message("push", number)) == set()
    meetings.leave(1)
    assert meetings.hear(0, Message("meet", -9)) == {0}
    assert meetings.hear(1, Message("join", 0)) == {0}
    assert meetings.hear(1, Message("meet", -2)) == {0, 1}
    assert meetings.hear(0, Message("push", 4)) == set()


def test_a_successor_of_the_server_knows_who_waits():
    meetings, successor = Meetings(), Meetings()
    told(meetings, (0, "meet"), (1, "meet"), (0, "push"))
    meetings.hear(1, Message("meet", -3))
    assert successor.load(meetings.state()) == {1}
    assert successor.hear(0, Message("meet", -3)) == {0, 1}
    assert successor.hear(0, Message("push", 2)) == set()


def test_a_quorum_does_without_those_that_are_absent():
    quorum = Quorum(2, range(3))
    assert quorum.size == 2
    quorum.absent = frozenset({0, 1})
    assert quorum.size == 1
    quorum.absent = frozenset({0, 1, 2})
    assert quorum.size == 0
    assert quorum.complete() is None


def test_clocks_of_those_that_are_absent_hold_nobody():
    clocks = Clocks(1, range(3))
    for _ in range(2):
        clocks.told(0, 2)
        clocks.told(1, 1)
    assert not clocks.may_read(0)
    clocks.absent = frozenset({2})
    assert clocks.may_read(0)
    clocks.absent = frozenset({0, 1, 2})
    assert clocks.may_read(0)
    clocks.absent = frozenset()
    assert not clocks.may_read(0)


WAITING = ["sync", "sync(backups=1)", "sync(backups=auto)", "bounded(clock_bound=0)", "bounded(clock_bound=2)"]


def loop_of(num_batches, num_epochs, kept, *, in_steps=False):
    """A loop that meets after every epoch, or also within each step."""

    def loop():
        model, optimizer = made(lr=0.01)
        with pl.attach(model, optimizer) as worker:
            for _ in range(num_epochs):
                for x in worker.batches(batches(num_batches, worker=9)):
                    optimizer.zero_grad()
                    loss_of(model, x).backward()
                    if in_steps:
                        worker.mean(0.0)
                    optimizer.step()
                kept.setdefault(own_id(), []).append(worker.sum(1))

    return loop


@pytest.mark.filterwarnings("ignore:This worker got no batch")
@pytest.mark.parametrize("factor", [1.0, 7.0])
@pytest.mark.parametrize(("shards", "num_batches"), [(1, 1), (1, 2), (1, 7), (1, 8), (1, 20), (2, 1), (2, 7)])
@pytest.mark.parametrize("mode", WAITING)
def test_an_epoch_that_does_not_divide_leaves_nobody_waiting(mode, shards, num_batches, factor):
    kept, cluster = {}, pl.Cluster(workers=3).slow(worker=0, factor=factor)
    algorithm = f"parameter-server(mode={mode}, shards={shards})"
    run = pl.simulate(loop_of(num_batches, 3, kept), cluster=cluster, algorithm=algorithm)
    assert kept == {worker: [3, 3, 3] for worker in range(3)}
    if "backups" not in mode:  # whose late gradients are dropped
        assert run.result["dropped_updates"] == 0
        assert run.result["samples"] == 3 * num_batches * 4


@pytest.mark.parametrize("mode", WAITING)
def test_a_worker_that_dies_is_met_by_nobody(mode):
    kept = {}
    pl.simulate(
        loop_of(7, 4, kept),
        cluster=pl.Cluster(workers=3, detection_s=0.01).slow(worker=0, factor=7.0),
        algorithm=f"parameter-server(mode={mode})",
        faults=pl.Faults().kill(worker=0, at_s=0.1),
    )
    assert [len(kept[worker]) for worker in (1, 2)] == [4, 4]
    assert kept[1][-1] == kept[2][-1] == 2


def test_all_meet_before_every_step_and_no_gradient_is_lost():
    kept = {}
    run = pl.simulate(
        loop_of(9, 2, kept, in_steps=True),
        cluster=pl.Cluster(workers=3).slow(worker=0, factor=3.0),
        algorithm="parameter-server",
    )
    assert kept == {worker: [3, 3] for worker in range(3)}
    assert run.result["dropped_updates"] == 0
