import itertools
import random

from paceline.ports.matching import PendingEvents, fits
from paceline.ports.ports import Message, PeerBack, PeerLeft, Received


def received(sender, kind="a", number=0):
    return Received(sender, 0, Message(kind, number))


def taken(pending, **filters):
    return list(iter(lambda: pending.take(**filters), None))


def filled(*items):
    pending = PendingEvents()
    for item in items:
        pending.add(item)
    return pending


def test_without_filters_everything_comes_in_order():
    items = [received(1), PeerLeft(1, 0, "ended"), PeerBack(1, 1), received(2, "b", 5)]
    pending = filled(*items)
    assert len(pending) == 4
    assert taken(pending) == items
    assert len(pending) == 0


def test_what_does_not_fit_waits_in_order():
    first, second, third = received(1, "a", 1), received(2, "b", 1), received(1, "b", 2)
    pending = filled(first, second, third)
    assert pending.take(kind="b", sender=1) == third
    assert pending.take(number=2) is None
    assert taken(pending) == [first, second]


def test_number_zero_and_worker_zero_are_filters():
    wanted = received(0, "a", 0)
    pending = filled(received(1, "a", 0), received(0, "a", 1), wanted)
    assert pending.take(sender=0, number=0) == wanted


def test_events_end_waits_without_a_sender():
    left, back = PeerLeft(3, 0, "ended"), PeerBack(3, 1)
    pending = filled(left, back)
    assert pending.take(kind="a", number=7) == left
    assert pending.take() == back


def test_with_a_sender_only_its_events_end_the_wait():
    pending = filled(PeerLeft(3, 0, "ended"), PeerLeft(2, 0, "ended"))
    assert pending.take(kind="a", sender=1) is None
    assert pending.take(kind="a", sender=2) == PeerLeft(2, 0, "ended")
    assert len(pending) == 1


def test_messages_before_a_leave_are_taken_before_it():
    pending = filled(received(1, "a", 1), received(1, "a", 2), PeerLeft(1, 0, "ended"))
    assert [pending.take(kind="a", sender=1) for _ in range(3)] == [
        received(1, "a", 1),
        received(1, "a", 2),
        PeerLeft(1, 0, "ended"),
    ]


def test_any_order_of_filters_loses_and_doubles_nothing():
    draw = random.Random(0)
    items = [received(draw.randrange(3), draw.choice("ab"), number) for number in range(200)]
    pending = filled(*items)
    filters = list(itertools.product((None, "a", "b"), (None, 0, 1, 2)))
    found = []
    while len(pending):
        kind, sender = draw.choice(filters)
        left = [item for item in items if item not in found]
        event = pending.take(kind=kind, sender=sender)
        assert event == next((item for item in left if fits(item, kind and (kind,), sender)), None)
        found += [] if event is None else [event]
    assert sorted(item.message.number for item in found) == list(range(200))
