"""The whole advice on programs whose best candidate is known."""

import math

import pytest
from advice.planted import Law, Planted
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.advice.advise import advise
from paceline.advice.answer import Candidate, Circumstances, Target
from paceline.errors import UsageError
from paceline.simulator import Cluster

HERE = Cluster(workers=2)


@pytest.fixture(autouse=True)
def measured_machine(monkeypatch):
    monkeypatch.setattr("paceline.advice.advise.this_machine", lambda program, shape, on_progress: (HERE, []))


def advice(program, accuracy=0.9, most=4, **more):
    target = more.pop("target", None) or Target(accuracy=accuracy)
    algorithms = more.pop("algorithms", ["sequential", *(one for one in program.laws if one != "sequential")])
    return advise(program, target=target, max_workers=most, algorithms=algorithms, processes=0, **more)


def truth(program, gap, most):
    """Seconds of every candidate."""
    found = {}
    for algorithm, law in program.laws.items():
        for m in range(1, most + 1):
            one = Candidate(algorithm=algorithm if m > 1 else "sequential", workers=m)
            if m == 1 and program.law(one) is not law:
                continue
            found[one] = law.seconds(gap, m)
    return found


laws = st.builds(
    Law,
    cost=st.floats(0.0, 1.0),
    worse=st.floats(0.0, 1.0),
    speed=st.floats(500.0, 2000.0),
    scale=st.floats(500.0, 2000.0),
)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(laws, laws)
def test_the_first_is_the_planted_best_and_its_interval_holds_the_time(hogwild, leashed):
    program = Planted({"hogwild": hogwild, "leashed": leashed}, every=10)
    times_s = truth(program, 0.1, 3)
    found = advice(program, 0.9, 3)
    best = found.best
    assert best is not None
    assert best.time_s is not None
    assert times_s[best.candidate] <= 1.03 * min(times_s.values())  # the grid of evaluations, and 1 % of the rate
    assert best.time_s.low <= times_s[best.candidate] <= best.time_s.high
    assert best.time_s.value == pytest.approx(times_s[best.candidate], rel=0.06)
    assert [one.time_s.value for one in found.ranked if one.time_s] == sorted(
        one.time_s.value for one in found.ranked if one.time_s
    )
    assert len(found.reasons) == 3
    assert found.command.startswith(f"go {best.candidate.algorithm} {best.candidate.workers} ")
