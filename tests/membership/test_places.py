"""Places of a run that workers join and leave: if a worker dies at any time, the next worker can take its place."""

import contextlib
import os
import signal

import pytest

import forked
from paceline.algorithms import registry
from paceline.errors import UsageError
from paceline.membership import elastic
from paceline.membership.environment import Invitation
from paceline.membership.join_point import JoinPoint
from processes.join_programs import free_address

DEADLINE_S = forked.AGAINST_HANGS_S


@pytest.fixture
def address():
    address = free_address()
    holder = JoinPoint(address, None, DEADLINE_S)
    yield address
    holder.close()


def takes_a_place(address, monkeypatch, **wanted):
    """A worker that has a place, and has not published its mailbox's address yet."""
    monkeypatch.setattr(elastic, "_joined", False)
    invitation = Invitation(address=address, of=2, deadline_s=10.0)
    return elastic.JoinedRun(invitation, registry.build("ad-psgd"), "a model", **wanted)


def test_a_worker_that_dies_before_it_has_a_mailbox_leaves_its_place_to_the_next(address, monkeypatch):
    assert forked.call(lambda: os._exit(takes_a_place(address, monkeypatch).worker_id)) == 0
    run = takes_a_place(address, monkeypatch)
    assert (run.worker_id, run.incarnation) == (0, 1)
    run.close()


def test_a_worker_that_is_stopped_before_it_has_a_mailbox_keeps_its_place(address, monkeypatch):
    monkeypatch.setattr(elastic, "_PLACE_DEADLINE_S", 1.0)
    told, tells = os.pipe()
    pid = os.fork()
    if not pid:
        run = takes_a_place(address, monkeypatch)
        os.write(tells, b"!")
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(run.worker_id)
    try:
        os.read(told, 1)
        other = takes_a_place(address, monkeypatch)
        assert (other.worker_id, other.incarnation) == (1, 0)
        with pytest.raises(UsageError, match="All 2 places"):
            takes_a_place(address, monkeypatch)
        other.close()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(told)
        os.close(tells)


def test_a_worker_takes_no_other_place_than_the_one_that_it_asks_for(address, monkeypatch):
    monkeypatch.setattr(elastic, "_PLACE_DEADLINE_S", 1.0)
    run = takes_a_place(address, monkeypatch, place=1)
    assert run.worker_id == 1
    with pytest.raises(UsageError, match="has a worker 1 already: a worker can join when another has died"):
        takes_a_place(address, monkeypatch, place=1)
    run.close()


def test_workers_with_two_plans_share_no_run(address, monkeypatch):
    run = takes_a_place(address, monkeypatch, plan="one")
    with pytest.raises(
        UsageError, match=r"This worker's plan is two, and the run at \S+ has one: build the same model"
    ):
        takes_a_place(address, monkeypatch, plan="two")
    run.close()


def test_a_claim_that_no_worker_can_have_made_keeps_its_place(address, monkeypatch):
    with contextlib.closing(JoinPoint(address, None, DEADLINE_S)) as join_point:
        join_point.set("place/0", " ")
    run = takes_a_place(address, monkeypatch)
    assert run.worker_id == 1
    run.close()


def test_a_place_whose_machine_does_not_answer_is_taken_once_the_others_wait_no_longer(address, monkeypatch):
    run = takes_a_place(address, monkeypatch)
    other = takes_a_place(address, monkeypatch)
    silent, answers = run._join_point.get("place/0").decode().split()[-1], []

    def answer_of(endpoint):
        answers.append("silence" if endpoint == silent and len(answers) < 40 else "process")
        return answers[-1]

    monkeypatch.setattr(elastic, "answer_of", answer_of)
    monkeypatch.setattr(elastic, "_PLACE_DEADLINE_S", 0.0)
    with pytest.raises(UsageError, match="All 2 places"):  # it has answered again
        takes_a_place(address, monkeypatch)
    assert answers.count("silence") == 20
    monkeypatch.setattr(elastic, "_SILENCE_S", 0.2)
    answers.clear()
    later = takes_a_place(address, monkeypatch)
    assert (later.worker_id, later.incarnation) == (0, 1)
    for one in (run, other, later):
        one.close()


def test_a_worker_with_a_mailbox_is_looked_for_there(address, monkeypatch):
    run = takes_a_place(address, monkeypatch)
    place = run._join_point.get("place/0").decode().split()[-1]
    assert not run._has_died(0, 0, place)
    run._coming.close()
    assert run._has_died(0, 0, place)
    peers = elastic.Peers(run._join_point, 0, 2, run.counts, lambda: False, connect=False)
    assert not run._has_died(0, 0, place)
    peers.close()
    assert run._has_died(0, 0, place)
    run.close()
