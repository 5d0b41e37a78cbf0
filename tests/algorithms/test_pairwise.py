"""The averaging program by itself: what it says in answer to what comes, on a mailbox that only remembers."""

import math
from contextlib import nullcontext
from random import Random
from types import SimpleNamespace

import pytest
import torch

from paceline.algorithms.pairwise import PairwiseAveraging
from paceline.algorithms.topology import Ring
from paceline.errors import PeerLostError
from paceline.ports.ports import Counts, Message, PeerLeft, Received

ONES = torch.ones(2, dtype=torch.float64)
TURN, INVITE, LAST_INVITE = Message("turn"), Message("invite"), Message("invite", 1)
DONE, GONE, END, END_AFTER_ONE_MORE = Message("done"), Message("gone"), Message("end"), Message("end", 1)


class Said:
    """A mailbox that delivers nothing."""

    def __init__(self, others):
        self.others, self.sent, self.messages = frozenset(others), [], []

    def send(self, to, message):
        if to not in self.others:
            raise PeerLostError(to, "it has left")
        x = None if message.x is None else message.x.clone()
        self.sent.append((to, message.kind, message.number))
        self.messages.append((to, message._replace(x=x)))

    def peers(self):
        return self.others

    def take(self):
        said, self.sent = self.sent, []
        return said


class Averaging:
    """Worker `me`, whose clock stands at `now_s`; of a ring of four 0 and 2 only answer, 1 and 3 request."""

    def __init__(self, me, topology=Ring(), workers=4, x=0.0, incarnation=0):  # noqa: B008
        self.me, self.now_s, self.x = me, 0.0, torch.full((2,), x, dtype=torch.float64)
        self.box, self.counts = Said({*range(workers)} - {me}), Counts()
        shared = SimpleNamespace(x=self.x, version=0, writing=nullcontext, advance=lambda updates: 1)
        ports = SimpleNamespace(
            worker_id=me, num_workers=workers, incarnation=incarnation, mailbox=self.box, shared=shared, counts=self.counts,
            random=Random(1), clock=SimpleNamespace(now_s=lambda: self.now_s), moved=lambda _: None,
            decided=lambda *_, **__: None,
        )  # fmt: skip
        self.program = PairwiseAveraging(topology, "random", ports, nullcontext())

    def hear(self, sender, message):
        wait_s = self.program.handle(Received(sender, 0, message))
        return wait_s, self.box.take()

    def sees(self, event):
        """A peer leaves or is back; what is said then."""
        self.box.others = (
            self.box.others - {event.peer} if isinstance(event, PeerLeft) else self.box.others | {event.peer}
        )
        self.program.handle(event)
        return self.box.take()

    def waits(self, until_s):
        """Its deadline passes."""
        self.now_s = until_s
        self.program.handle(None)
        return self.box.take()


def test_a_worker_that_requests_averages_once_more_and_stays_until_its_neighbours_are_done():
    one = Averaging(1)
    wait_s, said = one.hear(1, END_AFTER_ONE_MORE)
    assert wait_s > 0
    ((partner, kind, number),) = said
    assert (partner in {0, 2}, kind) == (True, "request")
    wait_s, said = one.hear(partner, Message("answer", number, x=ONES))
    assert (wait_s, said) == (1.0, [(0, "done", 0), (2, "done", 0)])
    assert one.x.tolist() == [0.5, 0.5]
    one.now_s = 0.25
    assert one.hear(2, DONE) == (0.75, [])
    assert one.hear(0, LAST_INVITE) == (10.0, [(0, "request", 2)])
    one.now_s = 0.5
    assert one.hear(0, Message("answer", 2, x=ONES)) == (0.5, [])
    assert one.hear(0, DONE) == (None, [])  # nobody is left to be told


@pytest.mark.parametrize("is_invited_done", [False, True])
def test_a_worker_that_stays_for_a_second_in_vain_says_that_it_is_gone(is_invited_done):
    one = Averaging(0)
    _, ((invited, _, _),) = one.hear(0, END_AFTER_ONE_MORE)
    done = invited if is_invited_done else 4 - invited
    one.hear(1, Message("request", 5, x=ONES))
    one.hear(done, DONE)
    one.now_s = 1.0
    assert one.program.handle(None) is None
    expected = {4 - done, invited}  # it may have been done before it heard of the invitation
    assert one.box.take() == [(peer, "gone", 0) for peer in sorted(expected)]


def test_a_worker_that_requests_asks_the_other_where_one_is_gone_and_nobody_where_both_are():
    one = Averaging(1)
    _, ((partner, _, _),) = one.hear(1, END_AFTER_ONE_MORE)
    other = 2 - partner
    wait_s, said = one.hear(partner, GONE)
    assert (wait_s > 0, said) == (True, [(other, "request", 2)])
    wait_s, _ = one.hear(other, GONE)
    assert wait_s is None
    assert one.counts.peer_failures == 0


def test_a_worker_that_answers_waits_for_the_request_that_it_has_invited():
    one = Averaging(0)
    wait_s, ((partner, kind, number),) = one.hear(0, END_AFTER_ONE_MORE)
    assert (wait_s, partner in {1, 3}, kind, number) == (10.0, True, "invite", 1)
    one.now_s = 4.0
    assert one.hear(partner, DONE)[0] == 6.0  # it stays, and has not answered the invitation yet
    other = 4 - partner
    wait_s, said = one.hear(other, Message("request", 5, x=ONES))  # the other neighbour's will do
    assert (wait_s, said) == (1.0, [(other, "answer", 5), (1, "done", 0), (3, "done", 0)])
    assert one.x.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("gone", [GONE, None])
def test_a_worker_that_answers_invites_the_other_where_one_is_gone_and_ends_where_both_are(gone):
    one = Averaging(0)
    _, ((partner, _, _),) = one.hear(0, END_AFTER_ONE_MORE)

    def goes(peer):
        if gone is not None:
            return one.hear(peer, gone)
        one.box.others -= {peer}
        wait_s = one.program.handle(PeerLeft(peer, 0, "killed"))
        return wait_s, one.box.take()

    assert goes(partner) == (10.0, [(4 - partner, "invite", 1)])
    assert goes(4 - partner)[0] is None


def test_a_worker_that_answers_waits_no_longer_than_its_deadline():
    one = Averaging(0)
    one.hear(0, END_AFTER_ONE_MORE)
    one.now_s = 10.0
    assert one.program.handle(None) == 1.0
    assert one.counts.peer_failures == 1
    one.now_s = 11.0
    assert one.program.handle(None) is None


@pytest.mark.parametrize("me", [0, 1])
def test_after_an_exception_it_ends_once_the_exchange_under_way_is_over(me):
    one = Averaging(me)
    wait_s, ((partner, kind, _),) = one.hear(me, TURN)
    assert (wait_s, kind) == ((math.inf, "invite") if me == 0 else (10.0, "request"))
    wait_s, said = one.hear(me, END)
    if me:
        assert (wait_s, said) == (10.0, [])
        wait_s, said = one.hear(partner, Message("answer", 1, x=ONES))
    assert (wait_s, sorted(said)) == (None, [(peer, "gone", 0) for peer in sorted({0, 1, 2, 3} - {me, me ^ 2})])
