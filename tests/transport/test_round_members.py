"""Members that cannot be reached: who excludes whom, and who hears of it."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from paceline.errors import ExcludedError
from paceline.ports.ports import Message, PeerBack, PeerLeft, Received
from paceline.transport.message_collectives import MessageCollectives
from paceline.transport.round_members import Progress, RoundMembers, Status

DEADLINE_S = 10.0


class World:
    """A time, and which workers have ended."""

    def __init__(self, ended=()):
        self.now, self.ended = 100.0, ended

    def has_ended(self, worker_id, incarnation):
        return worker_id in self.ended

    def heard_s(self, worker_id):
        return self.now

    def now_s(self):
        return self.now


def members_of(worker_id, num_workers, world):
    return RoundMembers(worker_id, num_workers, cast(Any, world), (), DEADLINE_S, world.now_s)


def exclude(members, world, *silent):
    for one in silent:
        members.disconnect(one, 0, has_ended=False)
    world.now += DEADLINE_S / 2
    assert members.absent() == {}
    world.now += DEADLINE_S / 2 + 1
    found = members.absent()
    assert found == dict.fromkeys(silent, Status.EXCLUDED)
    members.lose(found)


def said(standings, prepared=-1):
    """A proposal with these statuses of first incarnations."""
    return torch.tensor([prepared, *(number for status in standings for number in (0, status))])


def test_a_silent_worker_is_excluded_after_the_deadline():
    world = World()
    members = members_of(0, 3, world)
    exclude(members, world, 2)
    assert (members.living, members.listeners, members.missing()) == ([0, 1], [1, 2], [])


def test_a_worker_that_notices_late_waits_whether_the_others_come_back():
    """It may have computed, or been stopped, for longer than the deadline."""
    world = World()
    members = members_of(0, 3, world)
    members.disconnect(2, 0, has_ended=False)
    members._unreachable[2, 0] = members._unreachable[2, 0]._replace(heard_s=-1e9)
    world.now += 0.2 * DEADLINE_S
    assert members.absent() == {}
    world.now += 0.1 * DEADLINE_S
    assert members.absent() == {2: Status.EXCLUDED}


def test_an_excluded_worker_may_be_alive_even_if_it_says_bye():
    """It may have gone on without this worker until then."""
    world = World()
    members = members_of(2, 3, world)
    exclude(members, world, 0, 1)
    assert members.missing() == [0, 1]
    for incarnation in (0, 1):
        members.leave(0, incarnation)
        assert members.missing() == [0, 1]


def test_nothing_is_heard_from_excluded_workers():
    world = World()
    members = members_of(0, 3, world)
    exclude(members, world, 2)
    assert members.hear(2, 0, members.proposed, 1, said([1, 1, 0]))
    assert members.living == [0, 1]


def test_the_successor_of_an_excluded_worker_is_heard():
    world = World()
    members = members_of(0, 3, world)
    exclude(members, world, 2)
    told = torch.tensor([-1, 0, 0, 0, Status.GONE, 1, 0])
    assert members.hear(2, 1, members.proposed, 1, told)
    assert members.living == [0, 2]


def test_the_absence_of_an_excluded_worker_is_not_its_successors():
    """Another member excludes it first, and the successor is let in before this one looks at who is absent again."""
    world = World()
    members = members_of(1, 3, world)
    members.disconnect(0, 0, has_ended=False)
    world.now += 2 * DEADLINE_S
    assert members.hear(2, 0, 1, 1, said([Status.EXCLUDED, 0, 0]))
    members.let_in({0: 1})
    assert members.absent() == {}
    assert members.living == [0, 1, 2]
    members.disconnect(0, 1, has_ended=False)
    world.now += 2 * DEADLINE_S
    assert members.absent() == {0: Status.EXCLUDED}


@pytest.mark.parametrize(("accuser", "accused", "stays"), [(1, 2, 1), (2, 1, 1)])
def test_of_two_workers_that_cannot_reach_each_other_the_first_stays(accuser, accused, stays):
    members = members_of(0, 3, World())
    standings = [0, 0, 0]
    standings[accused] = Status.EXCLUDED
    assert members.hear(accuser, 0, 1, 1, said(standings))
    assert members.living == [0, stays]


def test_a_worker_that_this_one_cannot_reach_either_is_excluded():
    members = members_of(0, 3, World())
    members.disconnect(1, 0, has_ended=False)
    assert members.hear(2, 0, 1, 1, said([0, Status.EXCLUDED, 0]))
    assert members.living == [0, 2]


def test_a_view_begins_once_the_others_have_agreed_to_leave_the_excluded_worker_out():
    """They may have proposed it before they heard of the exclusion, and may reach that worker."""
    world = World()
    members = members_of(2, 3, world)
    exclude(members, world, 1)
    own = Progress(members.proposed, 1, -1)
    assert members.hear(0, 0, own.view, 1, said([Status.MEMBER] * 3))
    assert not members.is_agreed(own)
    assert members.hear(0, 0, own.view, 1, said([Status.MEMBER, Status.EXCLUDED, Status.MEMBER]))
    assert members.is_agreed(own)


def test_a_worker_hears_that_it_is_excluded():
    assert not members_of(1, 3, World()).hear(0, 0, 1, 1, said([0, Status.EXCLUDED, 0]))


def test_the_first_of_two_workers_goes_on_without_one_that_excludes_it():
    """The other one has no quorum: it ends, just as this one can be reached again."""
    members = members_of(0, 2, World())
    assert members.hear(1, 0, 1, 1, said([Status.EXCLUDED, 0]))
    assert (members.living, members.missing()) == ([0], [])
    members.leave(1, 0)
    members.disconnect(1, 0, has_ended=True)
    assert members.failed == []


def test_a_worker_does_not_go_on_without_a_majority_that_knows_of_a_death():
    """Two of the three that are left, of which this one has not heard that they are three."""
    members = members_of(0, 4, World())
    assert not members.hear(2, 0, 1, 1, said([Status.EXCLUDED, Status.GONE, 0, 0]))


def test_a_death_that_only_the_accuser_knows_gives_no_majority():
    """The dead worker may have gone on with the accuser, which is then the majority."""
    world = World()
    members = members_of(1, 3, world)
    exclude(members, world, 0)
    assert not members.hear(2, 0, members.proposed + 1, 1, said([Status.GONE, Status.EXCLUDED, 0]))


def test_the_second_of_two_workers_does_not_go_on_without_the_first():
    assert not members_of(1, 2, World()).hear(0, 0, 1, 1, said([0, Status.EXCLUDED]))


def collectives_of(worker_id, num_workers, events, peers, ended=()):
    """Whose mailbox has these events; with what it sends."""
    sent, queue = [], list(events)
    mailbox = SimpleNamespace(
        send=lambda to, message: sent.append((to, message)),
        peers=lambda: set(peers),
        receive=lambda timeout_s, **wanted: queue.pop(0) if queue else None,
    )
    world = World(ended)
    collectives = MessageCollectives(
        cast(Any, mailbox), worker_id, num_workers, ends=cast(Any, world), deadline_s=DEADLINE_S, now_s=world.now_s
    )
    return collectives, sent


def excluding(worker, x, view=1):
    return Received(worker, 0, Message("round view", 1, x=x, version=view))


def test_what_a_worker_has_said_counts_before_its_end():
    """It has gone on without this worker, and ended; its machine refuses connections by now."""
    events = [PeerLeft(0, 0, "silent"), PeerBack(0, 0), PeerLeft(0, 0, "silent"), excluding(0, said([0, 1]), view=9)]
    collectives, sent = collectives_of(1, 2, events, peers={0}, ended={0})
    with pytest.raises(ExcludedError, match="have gone on without this worker"):
        collectives.all_reduce_mean(torch.zeros(4), 1.0)
    assert sent[-1][1].kind == "round bye", "so that nobody takes its end for an error in its loop"


def test_a_worker_that_another_one_excludes_hears_it_from_all_that_reach_it():
    """Also from one that has proposed the same view before it knew."""
    events = [
        excluding(1, said([0, 0, 0])),
        excluding(1, said([0, 0, Status.EXCLUDED])),
        Received(1, 0, Message("round pieces", 1, x=None, version=1)),
    ]
    collectives, sent = collectives_of(0, 3, [PeerLeft(2, 0, "silent"), PeerBack(2, 0), *events], peers={1, 2})
    with pytest.raises(Exception, match="another version"):  # of the pieces, which are none
        collectives.all_reduce_mean(torch.zeros(4), 1.0)
    told = [message.x.tolist() for to, message in sent if to == 2 and message.kind == "round view"]
    assert told == [[-1, 0, 0, 0, 0, 0, 0], [-1, 0, 0, 0, 0, 0, Status.EXCLUDED]]


@pytest.mark.parametrize("when", ["it can be reached again", "this worker leaves"])
def test_an_excluded_worker_hears_it_as_soon(when):
    collectives, sent = collectives_of(0, 3, [PeerBack(2, 0)], peers={1, 2})
    collectives._next.lose({2: Status.EXCLUDED})
    if when == "this worker leaves":
        collectives.leave()
    else:
        collectives._hear()
    to, message = sent[-1 if when != "this worker leaves" else -2]
    assert (to, message.kind, message.x.tolist()[1:]) == (2, "round view", [0, 0, 0, 0, 0, Status.EXCLUDED])
