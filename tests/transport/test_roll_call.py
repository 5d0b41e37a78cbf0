"""Who is missing: whoever has said nothing for longer than the workers have lately computed."""

import pytest
from torch import distributed as dist

from paceline.transport import roll_call
from paceline.transport.roll_call import RollCall


class Clock:
    """Time that passes only while somebody sleeps; at `speaks_s`, worker 1 comes out of its gradient and answers."""

    def __init__(self, store, speaks_s):
        self.now_s, self._store, self._speaks_s = 0.0, store, speaks_s

    def monotonic(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds
        if self.now_s >= self._speaks_s:
            self._store.set("there/1", "1")


@pytest.mark.parametrize(
    ("step_s", "speaks_s", "waits_s", "present"),
    [
        (0.1, 1.9, 2.0, {0, 1}),
        (0.1, 2.2, 2.0, {0}),
        (3.0, 5.8, 6.0, {0, 1}),
        (3.0, 6.2, 6.0, {0}),
        (300.0, 61.0, 60.0, {0}),
    ],
)
def test_who_computes_a_long_gradient_is_not_missing(step_s, speaks_s, waits_s, present, monkeypatch):
    """Worker 2 is dead, and never answers."""
    store = dist.HashStore()
    own = RollCall(store, 0, 3)
    clock = Clock(store, float("inf"))
    monkeypatch.setattr(roll_call, "time", clock)
    for _ in range(3):
        own.operation_ended()
        clock.now_s += step_s
    begun_s = clock.now_s
    clock._speaks_s = begun_s + speaks_s
    assert own.give_up() == (present, set())
    assert clock.now_s - begun_s == pytest.approx(waits_s, abs=0.02)


def test_one_long_pause_is_forgotten(monkeypatch):
    store = dist.HashStore()
    own, clock = RollCall(store, 0, 2), Clock(store, float("inf"))
    monkeypatch.setattr(roll_call, "time", clock)
    for step_s in (30.0, *16 * [0.1]):
        own.operation_ended()
        clock.now_s += step_s
    own.operation_ended()
    begun_s = clock.now_s
    assert own.give_up() == ({0}, set())
    assert clock.now_s - begun_s == pytest.approx(2.0, abs=0.02)
