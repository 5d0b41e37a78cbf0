import itertools
import random

from paceline.ports.ports import Message, PeerBack, PeerLeft, Received
from paceline.transport.matching import Arrivals, fits


def received(sender, kind="a", number=0):
    return Received(sender, 0, Message(kind, number))


def taken(arrivals, **filters):
    return list(iter(lambda: arrivals.take(**filters), None))


def filled(*items):
    arrivals = Arrivals()
    for item in items:
        arrivals.add(item)
    return arrivals


def test_without_filters_everything_comes_in_order():
    items = [received(1), PeerLeft(1, 0, "ended"), PeerBack(1, 1), received(2, "b", 5)]
    arrivals = filled(*items)
    assert len(arrivals) == 4
    assert taken(arrivals) == items
    assert len(arrivals) == 0


def test_what_does_not_fit_waits_in_order():
    first, second, third = received(1, "a", 1), received(2, "b", 1), received(1, "b", 2)
    arrivals = filled(first, second, third)
    assert arrivals.take(kind="b", sender=1) == third
    assert arrivals.take(number=2) is None
    assert taken(arrivals) == [first, second]


def test_number_zero_and_worker_zero_are_filters():
    wanted = received(0, "a", 0)
    arrivals = filled(received(1, "a", 0), received(0, "a", 1), wanted)
    assert arrivals.take(sender=0, number=0) == wanted


def test_events_end_waits_without_a_sender():
    left, back = PeerLeft(3, 0, "ended"), PeerBack(3, 1)
    arrivals = filled(left, back)
    assert arrivals.take(kind="a", number=7) == left
    assert arrivals.take() == back


def test_with_a_sender_only_its_events_end_the_wait():
    arrivals = filled(PeerLeft(3, 0, "ended"), PeerLeft(2, 0, "ended"))
    assert arrivals.take(kind="a", sender=1) is None
    assert arrivals.take(kind="a", sender=2) == PeerLeft(2, 0, "ended")
    assert len(arrivals) == 1


def test_messages_before_a_leave_are_taken_before_it():
    arrivals = filled(received(1, "a", 1), received(1, "a", 2), PeerLeft(1, 0, "ended"))
    assert [arrivals.take(kind="a", sender=1) for _ in range(3)] == [
        received(1, "a", 1),
        received(1, "a", 2),
        PeerLeft(1, 0, "ended"),
    ]


def test_any_order_of_filters_loses_and_doubles_nothing():
    draw = random.Random(0)
    items = [received(draw.randrange(3), draw.choice("ab"), number) for number in range(200)]
    arrivals = filled(*items)
    filters = list(itertools.product((None, "a", "b"), (None, 0, 1, 2)))
    found = []
    while len(arrivals):
        kind, sender = draw.choice(filters)
        left = [item for item in items if item not in found]
        arrival = arrivals.take(kind=kind, sender=sender)
        assert arrival == next((item for item in left if fits(item, kind, sender)), None)
        found += [] if arrival is None else [arrival]
    assert sorted(item.message.number for item in found) == list(range(200))
