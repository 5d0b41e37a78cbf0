"""How a process ended, in words."""

import pytest

from paceline.system import exit_codes


@pytest.mark.parametrize(
    ("code", "words"),
    [(None, "ended without a word"), (3, "ended with exit code 3"), (-11, "was ended by signal 11")],
)
def test_exit_codes(code, words):
    assert exit_codes.how_ended(code) == words


def test_one_death_for_each_kill_by_the_system_is_for_lack_of_memory(tmp_path, monkeypatch):
    counters = tmp_path / "vmstat"
    counters.write_text("pgfault 12\noom_kill 3\n")
    monkeypatch.setattr(exit_codes, "_COUNTERS", counters)
    monkeypatch.setattr(exit_codes, "_memory_kills", 2)
    words = [exit_codes.how_ended(-9) for _ in range(2)]
    assert words[0] == "was ended by signal 9, as the system kills processes for lack of memory (see paceline doctor)"
    assert words[1] == "was ended by signal 9"
