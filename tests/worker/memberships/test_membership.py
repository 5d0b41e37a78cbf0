"""Each way of being in a run gives a loop all that it may ask of its run."""

import inspect
import sys

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.algorithms import registry
from paceline.membership import elastic
from paceline.membership.environment import Invitation, LaunchedEnvironment, current_environment
from paceline.worker.chosen_algorithm import chosen_algorithm
from paceline.worker.memberships.elastic import ElasticMembership
from paceline.worker.memberships.entry import enter
from paceline.worker.memberships.launched import LaunchedMembership
from paceline.worker.memberships.membership import Membership
from processes.join_programs import free_address

ASKED_FOR = {*Membership.__annotations__, *(name for name, _ in inspect.getmembers(Membership, inspect.isfunction))}
PUBLIC = {name for name in ASKED_FOR if not name.startswith("_")}


def made():
    model = nn.Linear(3, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def delayed(monkeypatch):
    with pl.attach(*made(), "sequential(delay=constant(updates_late=1))") as worker:
        yield worker._membership


def attached_by(start):
    """The membership of a worker that this function started."""

    def member(monkeypatch):
        found = []

        def program():
            model, optimizer = made()
            with pl.attach(model, optimizer, algorithm="hogwild") as worker:
                found.append(worker._membership)
                found.append(worker._membership.batches())  # an ended simulation has none
                for x in worker.batches([torch.ones(4, 3)] * 2):
                    optimizer.zero_grad()
                    model(x).mean().backward()
                    optimizer.step()

        start(program)
        member, batches = found
        monkeypatch.setattr(member, "batches", lambda: batches)
        yield member

    return member


def launched(monkeypatch):
    host, _, port = free_address().rpartition(":")
    monkeypatch.setenv("MASTER_ADDR", host)
    monkeypatch.setenv("MASTER_PORT", port)
    member = LaunchedMembership(LaunchedEnvironment(deadline_s=60.0), made()[0], registry.build("all-reduce"))
    yield member
    member.close(failed=False)


def joined(monkeypatch):
    monkeypatch.setattr(elastic, "_joined", False)
    model, algorithm = made()[0], registry.build("ad-psgd")
    entry = enter(Invitation(address=free_address(), of=1, deadline_s=60.0), model, algorithm)
    member = entry.join(model, algorithm, (), None)
    assert isinstance(member, ElasticMembership)
    yield member
    member.close(failed=False)


WAYS = {
    "delayed": delayed,
    "supervised": attached_by(lambda program: pl.launch(program, workers=1, backend="threads")),
    "launched": launched,
    "joined": joined,
    "simulated": attached_by(lambda program: pl.simulate(program, workers=1)),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_membership_has_all_that_a_loop_may_ask_for(way, monkeypatch):
    assert {"ports", "binding", "snapshot", "final_model", "close"} <= PUBLIC, "the protocol is there"
    for member in WAYS[way](monkeypatch):
        missing = {name for name in PUBLIC if not hasattr(member, name)}
        assert not missing
        assert member.batches().counts.newest() == 0
        assert len(type(member).__mro__) == len(Membership.__mro__) + 1, "no membership is made of another"


def test_errors_of_ours_alone_are_shown_otherwise_in_a_process_that_a_launcher_started(monkeypatch, capfd):
    shown = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: shown.append(error))
    monkeypatch.setenv("PACELINE_JOIN", free_address())
    for _ in range(2):
        current_environment()
    mine = KeyError("mine")
    sys.excepthook(KeyError, mine, None)
    assert shown == [(KeyError, mine, None)]
    for error, code in ((pl.UsageError("It is wrong."), 2), (pl.WorkerLostError("It is gone."), 1)):
        with pytest.raises(SystemExit) as ended:
            sys.excepthook(type(error), error, None)
        assert ended.value.code == code
        assert capfd.readouterr().err == f"paceline: {error}\n"


def test_workers_that_join_have_the_same_default(monkeypatch):
    monkeypatch.setenv("PACELINE_JOIN", "127.0.0.1:1")
    assert chosen_algorithm(None, current_environment()) == pl.AllReduce()
