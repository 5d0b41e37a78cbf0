"""A worker's side with a scripted mailbox: what it sends again, what it tells a successor, and from where it counts on."""

from types import SimpleNamespace

import pytest
import torch

from paceline.algorithms.server.client import Client
from paceline.errors import WorkerLostError
from paceline.optim.rows import Selection, Table
from paceline.ports.ports import Counts, Message, PeerBack, PeerLeft, Received

WORKERS, SIZE = 2, 4
FIRST, SECOND = WORKERS, WORKERS + 1  # the servers


class Box:
    """Gives what the script says, in its order; None: that the time is up."""

    def __init__(self, script):
        self.script, self.sent, self.timeouts_s, self.senders = list(script), [], [], []
        self.now_s = 0.0

    def send(self, to, message):
        self.sent.append((to, message.kind, message.number))

    def receive(self, timeout_s=None, sender=None):
        self.timeouts_s.append(timeout_s)
        self.senders.append(sender)
        event = self.script.pop(0)
        if event is None:
            self.now_s += timeout_s
        return event


def client_of(*script):
    box = Box(script)
    shared = SimpleNamespace(x=torch.zeros(2 * SIZE), ranges=((0, SIZE), (SIZE, 2 * SIZE)))
    ports = SimpleNamespace(
        mailbox=box,
        incarnation=0,
        storage=None,
        shared=shared,
        num_workers=WORKERS,
        num_servers=2,
        moved=lambda _: None,
        decided=lambda *_, **__: None,
        codec_moves={},
        clock=SimpleNamespace(now_s=lambda: box.now_s),
        counts=Counts(),
    )
    return Client(ports), box


def x(server, number, value=0.0, version=1):
    return Received(server, 0, Message("x", number, version, torch.full((SIZE,), value), version))


def clock(server, number):
    return Received(server, 0, Message("clock", number))


G = torch.ones(2 * SIZE)


def test_answers_count_in_whatever_order_they_come():
    client, box = client_of(x(SECOND, 1, 2.0), x(FIRST, 1, 1.0, version=7), x(FIRST, 2, 3.0), x(SECOND, 2, 4.0))
    assert client.push(G, 1) == (7, 7)
    assert client.x.tolist() == [1.0] * SIZE + [2.0] * SIZE
    client.push(G, 1)
    assert client.x.tolist() == [3.0] * SIZE + [4.0] * SIZE
    assert box.sent == [(server, "push", n) for n in (1, 2) for server in (SECOND, FIRST)]


def test_a_successor_is_told_what_its_predecessor_had_answered():
    """This worker waits at the first shard for another, which may wait at the second for this one to have come so far."""
    client, box = client_of(
        x(SECOND, 1), PeerLeft(SECOND, 0, "killed"), PeerBack(SECOND, 1), x(FIRST, 1), x(SECOND, 2), x(FIRST, 2)
    )
    client.push(G, 1)
    assert box.sent[2:] == [(SECOND, "clock", 1)]
    client.push(G, 1)


def test_a_successor_is_sent_again_what_was_not_answered():
    client, box = client_of(x(FIRST, 1), PeerLeft(SECOND, 0, "killed"), PeerBack(SECOND, 1), x(SECOND, 1))
    client.push(G, 1)
    assert box.sent[2:] == [(SECOND, "push", 1)]


def test_a_late_worker_counts_on_from_the_furthest_shard_and_asks_the_others_again():
    client, box = client_of(
        clock(SECOND, 4), x(SECOND, 0), clock(FIRST, 5), x(FIRST, 0), x(SECOND, 5, 9.0), x(FIRST, 6), x(SECOND, 6)
    )
    client.join()
    assert box.sent == [(SECOND, "join", 0), (FIRST, "join", 0), (SECOND, "join", 5)]
    assert client.x[SIZE:].tolist() == [9.0] * SIZE
    client.push(G, 1)
    assert box.sent[3:] == [(SECOND, "push", 6), (FIRST, "push", 6)]


def test_a_clock_counts_with_the_parameters_that_follow_it():
    """Those were lost with the server; its successor is not that far, and says nothing."""
    client, box = client_of(
        x(FIRST, 0), clock(SECOND, 3), PeerLeft(SECOND, 0, "killed"), PeerBack(SECOND, 1), x(SECOND, 0)
    )
    client.join()
    assert client.sequence == 0
    assert box.sent[2:] == [(SECOND, "join", 0)]


@pytest.mark.parametrize("left_at_s", [0.0, 30.0])
def test_a_server_whose_place_nobody_takes_is_waited_for_a_minute(left_at_s):
    client, box = client_of(PeerLeft(SECOND, 0, "killed"), x(FIRST, 1), None)
    box.now_s = left_at_s
    with pytest.raises(WorkerLostError, match=r"Shard 1 .* has left \(killed\) and no other process replaced it"):
        client.push(G, 1)
    assert box.timeouts_s == [None, 60.0, 60.0]


def test_a_shard_whose_server_has_left_is_waited_for_alone_until_another_has_taken_its_place():
    """Such a wait ends as soon as the run is stopped, where nobody will; what others send meanwhile stays in the mailbox."""
    client, box = client_of(PeerLeft(SECOND, 0, "killed"), PeerBack(SECOND, 1), x(FIRST, 1), x(SECOND, 1))
    client.push(G, 1)
    assert box.senders == [None, SECOND, None, None]


def test_a_server_that_has_ended_is_not_waited_for():
    client, _ = client_of(x(FIRST, 1), PeerLeft(SECOND, 0, "ended"))
    with pytest.raises(WorkerLostError, match="its program has ended"):
        client.push(G, 1)


def test_a_server_that_left_when_it_was_not_waited_for_is_asked_once_it_is_back():
    client, box = client_of(
        x(SECOND, 1), PeerLeft(SECOND, 0, "killed"), x(FIRST, 1), x(FIRST, 2), PeerBack(SECOND, 1), x(SECOND, 2)
    )
    client.push(G, 1)
    client.push(G, 1)
    assert box.sent[-1] == (SECOND, "push", 2)
    assert box.timeouts_s[4:] == [60.0, None]


ROWS = Selection({Table(0, SIZE, 2): torch.tensor([1])}, 0, SIZE)


def rows_of(server, number):
    return Received(server, 0, Message("rows", number, x=ROWS.to_bytes()))


def test_an_answer_of_rows_leaves_all_else():
    some = Received(FIRST, 0, Message("x", 2, 2, torch.full((ROWS.count,), 9.0), 2))
    client, _ = client_of(x(FIRST, 1, 1.0), x(SECOND, 1, 2.0), rows_of(FIRST, 2), some, x(SECOND, 2, 3.0))
    client.push(G, 1)
    client.push(G, 1)
    assert client.x.tolist() == [1.0, 1.0, 9.0, 9.0] + [3.0] * SIZE


def test_a_server_dies_between_the_rows_of_an_answer_and_their_values():
    """Its successor sends all parameters."""
    dies = [rows_of(FIRST, 1), PeerLeft(FIRST, 0, "killed"), PeerBack(FIRST, 1)]
    client, box = client_of(x(SECOND, 1, 2.0), *dies, x(FIRST, 1, 1.0))
    client.push(G, 1)
    assert client.x.tolist() == [1.0] * SIZE + [2.0] * SIZE
    assert box.script == []


def test_rows_of_an_earlier_answer_are_no_longer_meant():
    client, _ = client_of(rows_of(FIRST, 7), x(FIRST, 1, 1.0), x(SECOND, 1, 2.0))
    client.push(G, 1)
    assert client.x.tolist() == [1.0] * SIZE + [2.0] * SIZE


def test_steps_of_ones_own_keep_the_values_of_rows_alone():
    """All else comes with every answer; a step on all of the parameters needs an answer of all."""
    client, _ = client_of()
    for _ in range(20):
        client.before_own_step(ROWS.rows)
    assert sum(len(values) for _, values in client._copy._rows_before) == 20 * 2
    assert client._copy.held(0) == 0
    client.before_own_step(None)
    client.before_own_step(ROWS.rows)
    assert (client._copy._rows_before, client._copy.held(0)) == ([], -1)
