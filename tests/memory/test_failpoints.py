import pytest

from memory import programs
from paceline.errors import UsageError
from paceline.memory import failpoints
from paceline.memory.atomics import load
from paceline.memory.segment import Layout, Segment


@pytest.mark.parametrize("wanted", ["slots.claimed", "slots.claimed@1", "slots.claimed@1#0", "slots.clamed@1#2"])
def test_what_names_no_fail_point_is_an_error_that_shows_the_form(monkeypatch, wanted):
    monkeypatch.setenv(failpoints.ENVIRONMENT_VARIABLE, wanted)
    with pytest.raises(UsageError, match=r"slots\.claimed@2#40"):
        failpoints.arm(1)


def test_only_the_named_worker_in_its_first_life_is_armed(monkeypatch):
    monkeypatch.setenv(failpoints.ENVIRONMENT_VARIABLE, "slots.claimed@1#1")
    failpoints.arm(0)
    failpoints.arm(1, incarnation=1)
    failpoints.fail_point("slots.claimed")  # would end the tests
    monkeypatch.delenv(failpoints.ENVIRONMENT_VARIABLE)
    failpoints.arm(1)
    failpoints.fail_point("slots.claimed")


def test_the_kill_comes_at_the_hit_that_was_asked_for(workers):
    layout = Layout()
    start, lock, word = layout.words("start", 1), layout.words("lock", 1), layout.words("word", 1)
    segment = Segment.create(layout.size_bytes)
    workers.run_killed(programs.count_under_mutex, segment, start, lock, word, 0, 1, 100, fail_point="lock.taken#7")
    assert load(segment.address + word) == 6
