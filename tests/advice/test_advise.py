"""The whole advice on programs whose best candidate is known."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advice.planted import Law, Planted
from paceline.advice.advise import advise
from paceline.advice.answer import Candidate, Circumstances, Target
from paceline.advice.words import name, verdict
from paceline.errors import UsageError
from paceline.run.config import TrainConfig
from paceline.run.simulate_task import simulate_task
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
            if program.law(one) is law:
                found[one] = law.seconds(gap, m)
    return found


laws = st.builds(
    Law,
    cost=st.floats(0.0, 1.0),
    worse=st.floats(0.0, 1.0),
    speed=st.floats(500.0, 2000.0),
    scale=st.floats(500.0, 2000.0),
)


@settings(max_examples=4, deadline=None, derandomize=True)
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
    values = [one.time_s.value for one in found.ranked if one.time_s]
    assert values == sorted(values)
    assert len(found.reasons) == 1
    assert found.command == f"go {best.candidate.algorithm} {best.candidate.workers} [] 0"


def test_the_best_number_of_workers_is_interior_and_depends_on_the_target():
    """Many workers are fast, and end on a higher floor: an easy target wants many, a hard one few."""

    class Floors(Law):
        def samples(self, gap, m):
            return (
                -self.scale * math.log((gap - self._floor(m)) / (1 - self._floor(m)))
                if gap > self._floor(m)
                else math.inf
            )

        def gap(self, samples, m):
            return self._floor(m) + (1 - self._floor(m)) * super().gap(samples, 1)

        def _floor(self, m):
            return 0.02 * (m - 1)

    chosen = {}
    for accuracy in (0.8, 0.95, 0.975):
        program = Planted({"hogwild": Floors(cost=0.1, floor=0.0, worse=0.0)}, every=10)
        found = advice(program, accuracy)
        assert found.best is not None
        chosen[accuracy] = found.best.candidate.workers
        times_s = truth(program, 1 - accuracy, 4)
        assert found.best.candidate == min(times_s, key=lambda one: times_s[one])
        for one in found.ranked:
            if math.isinf(times_s[one.candidate]):
                assert one.time_s is None or one.extrapolation
    assert chosen == {0.8: 4, 0.95: 3, 0.975: 2}


def test_noise_of_speeds_and_seeds_is_in_the_interval(monkeypatch):
    """Planted noise of 10 % each: 90 % intervals hold about nine of ten runs to come."""
    monkeypatch.setattr(
        "paceline.advice.prediction.fit", lambda arguments: None
    )  # models have no part in it, and take long
    held, runs = 0, 0
    for seed in range(20):
        program = Planted({"hogwild": Law()}, noise=0.1, every=10)
        best = advice(program, 0.9, 2, seed=100 * seed).best
        assert best is not None
        assert best.time_s is not None
        for again in range(10):
            one = program.run(best.candidate, Target(accuracy=0.9), for_s=1e3, seed=10**6 + again, slow={})
            runs += 1
            held += best.time_s.low <= one.reached_s <= best.time_s.high
    assert 0.8 <= held / runs <= 0.99


def test_a_slow_worker_makes_lockstep_last():
    program = Planted({"hogwild": Law(worse=0.3), "lockstep": Law(worse=0.0, scale=900.0)})
    without = advice(program, 0.9, 3)
    assert without.best is not None
    assert without.best.candidate == Candidate(algorithm="lockstep", workers=3)
    found = advice(program, 0.9, 3, circumstances=Circumstances(slow={0: 10.0}))
    assert found.best is not None
    assert found.best.candidate == Candidate(algorithm="hogwild", workers=3)
    law, m = program.laws["hogwild"], 3
    expected_s = law.seconds(0.1, m) / ((m - 1 + 0.1) / m)
    assert found.best.time_s is not None
    assert found.best.time_s.value == pytest.approx(expected_s, rel=0.06)
    assert found.command.endswith("[(0, 10.0)] 0")


def test_a_slow_worker_that_few_candidates_have_is_not_averaged_away():
    """Up to 3 workers there is none: Ernest's features cannot say that a fourth makes lockstep ten times as slow."""
    program = Planted({"lockstep": Law(worse=0.0, cost=0.0)})
    found = advice(program, 0.9, 4, circumstances=Circumstances(slow={3: 10.0}))
    assert found.best is not None
    assert found.best.candidate == Candidate(algorithm="lockstep", workers=3)
    (four,) = (one for one in found.ranked if one.candidate.workers == 4)
    assert "by the fitted models" in four.extrapolation, "its simulation was cut off"
    assert four.time_s is not None
    assert four.time_s.value == pytest.approx(10 * program.laws["lockstep"].seconds(0.1, 4), rel=0.15)


def test_kills_cost_lockstep_its_way_from_checkpoint_to_checkpoint():
    laws = {"hogwild": Law(speed=9.0), "lockstep": Law(speed=11.0)}
    calm = advice(Planted(laws), 0.9, 2)
    assert calm.best is not None
    assert calm.best.candidate.algorithm == "lockstep"
    killed = advice(Planted(laws), 0.9, 2, circumstances=Circumstances(kills_per_s=1 / 10))
    assert killed.best is not None
    assert killed.best.candidate.algorithm == "hogwild"
    assert killed.best.time_s is not None
    assert killed.best.time_s.value == pytest.approx(laws["hogwild"].seconds(0.1, 2) * (1 + 2.0 / 10), rel=0.05)
    assert int(killed.command.split()[-1]) >= 2 * killed.best.time_s.value / 10
    assert any("The cost of kills is computed, not simulated" in one for one in killed.warnings)


def test_a_target_that_nobody_reaches_is_refused_with_what_the_best_came_to():
    found = advice(Planted({"hogwild": Law(floor=0.2), "leashed": Law(floor=0.1)}, ends=2e4), 0.95, 2)
    assert found.best is None
    assert found.command == ""
    (why,) = found.reasons
    assert "0.9," in why
    assert "leashed with 2 workers" in why
    assert {one.candidate.workers for one in found.ranked} == {1, 2}
    assert all("the program itself ends before" in one.why_not for one in found.ranked)


def test_a_deadline_puts_first_what_meets_it_and_else_what_is_best_by_then():
    program = Planted({"hogwild": Law(cost=1.0, worse=0.0), "leashed": Law(cost=0.0, worse=1.0)}, every=10)
    times_s = truth(program, 0.1, 3)
    soonest = min(times_s.values())
    met = advice(program, most=3, target=Target(accuracy=0.9, deadline_s=1.2 * soonest))
    assert met.best is not None
    assert times_s[met.best.candidate] == soonest
    missed = advice(program, most=3, target=Target(accuracy=0.9, deadline_s=0.5 * soonest))
    assert missed.best is not None
    assert missed.best.at_deadline is not None
    one = missed.best.candidate
    law = program.law(one)
    assert missed.best.at_deadline.value == pytest.approx(
        1 - law.gap(law.rate(one.workers) * 0.5 * soonest, one.workers), abs=0.02
    )
    assert verdict(missed).startswith(f"Take {name(one)}: a test accuracy of ")


def test_with_a_cluster_nothing_is_run_here(tmp_path):
    file = Cluster(workers=3, compute_s=0.05).save(tmp_path / "cluster.toml")
    program = Planted({"hogwild": Law(worse=0.0), "lockstep": Law(worse=0.5)})
    found = advise(
        program,
        target=Target(accuracy=0.9),
        max_workers=3,
        circumstances=Circumstances(cluster=str(file)),
        algorithms=["sequential", "hogwild", "lockstep"],
        processes=0,
    )
    assert program.ran == []
    assert found.measured == ()
    assert any(one.startswith("No real runs were made") for one in found.not_tried)
    assert found.best is not None
    assert found.best.candidate == Candidate(algorithm="hogwild", workers=3)
    assert found.best.samples_per_s.value == pytest.approx(3 * 10 / 0.05, rel=0.01)


def test_an_algorithm_that_does_not_run_is_left_out_with_the_reason():
    found = advice(Planted({"hogwild": Law(), "leashed": Law()}, broken=("leashed",)), 0.9, 2)
    assert {one.candidate.algorithm for one in found.ranked} == {"sequential", "hogwild"}
    assert "leashed: It broke." in found.not_tried
    found = advice(Planted({"hogwild": Law(), "leashed": Law()}, broken=("leashed 3",)), 0.9, 3)
    assert Candidate(algorithm="leashed", workers=3) not in {one.candidate for one in found.ranked}
    assert Candidate(algorithm="leashed", workers=2) in {one.candidate for one in found.ranked}
    assert "leashed with 3 workers: It broke." in found.not_tried
    with pytest.raises(UsageError, match=r"No algorithm could be run here: It broke\.$"):
        advice(Planted({"hogwild": Law()}, broken=("hogwild", "sequential")), 0.9, 2)


def test_a_loss_is_a_target_too():
    program = Planted({"hogwild": Law(cost=0.1)})
    found = advice(program, most=3, target=Target(loss=0.1))
    assert found.best is not None
    assert found.best.time_s is not None
    assert found.best.time_s.value == pytest.approx(min(truth(program, 0.1, 3).values()), rel=0.06)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"budget_s": 3.0}, "A budget of 3 s is too small for 2 short runs: give 5 s or more"),
        ({"algorithms": ["hogwilt"]}, "hogwild"),
        ({"most": 1, "algorithms": ["hogwild"]}, "None of hogwild can run with up to 1 workers"),
    ],
)
def test_what_cannot_be_asked_is_one_sentence(asked, words):
    with pytest.raises(UsageError, match=words) as refused:
        advice(Planted({"hogwild": Law()}), **asked)
    assert "\n" not in str(refused.value)


def test_a_built_in_task_is_simulated_to_its_target_in_the_time_that_one_simulation_takes(tmp_path):
    """Nothing is planted: what is advised is what `simulate_task` finds, and the command has epochs enough for it."""
    file = Cluster(workers=2, compute_s=0.002).save(tmp_path / "cluster.toml")
    found = advise(
        "digits-mlp",
        target=Target(loss=1.2),
        max_workers=2,
        circumstances=Circumstances(cluster=str(file)),
        algorithms=["sequential", "hogwild"],
        processes=0,
        budget_s=120.0,
    )
    best = found.best
    assert best is not None
    assert best.candidate == Candidate(algorithm="hogwild", workers=2)
    config = TrainConfig(algorithm="hogwild", target_loss=1.2)
    run = simulate_task(config, cluster=Cluster.load(file))
    assert best.simulated_s[0] == pytest.approx(run.result["time_to_target_s"])
    assert len(best.simulated_s) == 3
    assert best.time_s is not None
    assert best.time_s.low < min(best.simulated_s) <= max(best.simulated_s) < best.time_s.high
    expected = "paceline train --task digits-mlp --algorithm hogwild --workers 2 --epochs 30 --target-loss 1.2"
    assert found.command == expected
