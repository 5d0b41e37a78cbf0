"""`threshold=auto` and `gradients=auto`: numbers from noise that is known, and from what shows none."""

import math

import pytest
import torch

import paceline as pl
from paceline.algorithms.server.admission import Verdict
from paceline.algorithms.server.gathering import Pool
from paceline.algorithms.server.modes import Rennala, Ringmaster
from paceline.algorithms.server.noise import NoiseMeter
from paceline.algorithms.server.update import UpdateInfo, WaitingGradient
from paceline.simulator import Cluster

SIZE, GROUPS = 500, 20


def gradients(scale, number, seed=0, dtype=torch.float64):
    """Gradients of squared norm 1 plus noise of squared norm `scale`."""
    draws = torch.Generator().manual_seed(seed)
    mean = torch.full((SIZE,), SIZE**-0.5, dtype=torch.float64)
    noise = torch.randn(number, SIZE, dtype=torch.float64, generator=draws) * math.sqrt(scale / SIZE)
    return (mean + noise).to(dtype)


def meter(workers, ones):
    found = NoiseMeter(workers)
    for one in ones:
        found.take(one)
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("workers", [2, 3, 5, 8])
def test_the_noise_that_is_there_is_found(workers, dtype):
    found = meter(workers, gradients(30.0, 12 * GROUPS * workers, dtype=dtype))
    assert 20 < found.gradients < 45


@pytest.mark.parametrize("workers", [2, 5])
def test_without_noise_the_number_of_workers_stays(workers):
    assert meter(workers, gradients(0.0, 5 * GROUPS * workers)).gradients == workers


def test_nothing_is_chosen_before_there_are_groups_enough():
    ones = gradients(1000.0, GROUPS * 4)
    assert meter(4, ones[:-1]).gradients == 4
    assert meter(4, ones).gradients == 8, "at most twice as many"


def test_the_largest_number_is_64_for_each_worker():
    assert meter(2, gradients(5000.0, 40 * GROUPS * 2)).gradients <= 128


def test_where_noise_hides_the_gradient_the_number_stays():
    ones = gradients(1.0, GROUPS * 2)
    ones[::2] *= -1  # the mean of each group is about none, and its square is below what noise alone would leave
    assert meter(2, ones).gradients == 2


@pytest.mark.parametrize("wrong", [math.nan, math.inf, 1e200])
def test_a_gradient_that_is_not_finite_is_left_out(wrong):
    ones = list(gradients(30.0, 12 * GROUPS * 4))
    with_wrong = [*ones[:403], torch.full((SIZE,), wrong, dtype=torch.float64), *ones[403:]]
    found = meter(4, with_wrong)
    assert 20 < found.gradients < 45
    assert bool(torch.isfinite(found.state()).all())


def test_a_successor_goes_on_with_what_was_measured():
    ones = gradients(30.0, 3 * GROUPS * 4)
    first, second = meter(4, ones[: 4 * 30]), NoiseMeter(4)
    second.load(first.state())
    assert first.gradients > 4
    for one in ones[4 * 30 :]:
        first.take(one)
        second.take(one)
        assert first.gradients == second.gradients
    other = NoiseMeter(3)
    other.load(first.state())
    assert other.gradients == 3, "groups of another number of workers mean something else"


def held(number, gradient):
    about = UpdateInfo(worker_id=number % 2, sequence=number, step=0, version_read=0, version=0, num_samples=8)
    return WaitingGradient(about, 0, gradient.clone())


def test_a_step_of_rennala_takes_as_many_as_are_measured():
    pool, sizes, since = Pool(NoiseMeter(2), range(2)), [], 0
    for number, one in enumerate(gradients(30.0, 16 * GROUPS * 2)):
        since += 1
        due = pool.take(held(number, one))
        if due is not None:
            assert due.update.num_samples == 8 * since
            sizes.append(since)
            since = 0
    assert sizes[0] == 2
    assert 20 < sizes[-1] < 45
    again = Pool(NoiseMeter(2), range(2))
    again.load(pool.state(), torch.float64)
    assert torch.equal(again.state()["gathered.noise"], pool.state()["gathered.noise"])


def test_ringmaster_admits_what_is_fewer_updates_late_than_is_measured():
    admission, gathering = Ringmaster(threshold="auto").parts(2)
    late = UpdateInfo(worker_id=0, sequence=1, step=0, version_read=0, version=15, num_samples=1)
    assert admission(0).admit(late) is Verdict.DROP
    for number, one in enumerate(gradients(30.0, 12 * GROUPS * 2)):
        assert torch.equal(gathering.take(held(number, one)).gradient, one), "nothing is changed"
    assert admission(0).admit(late) is Verdict.APPLY


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(
    ("auto", "plain"), [(Rennala(gradients="auto"), Rennala()), (Ringmaster(threshold="auto"), Ringmaster())]
)
def test_until_noise_is_measured_the_number_is_that_of_the_workers(auto, plain, workers):
    def run(mode):
        config = pl.TrainConfig(algorithm=pl.spec(pl.ParameterServer(mode=mode)), steps=15)
        cluster = Cluster(workers=workers, compute_s=0.01, slowness=((0, 3.0),))
        run = pl.simulate_task(config, cluster=cluster)
        return [one["test_loss"] for one in run.evaluations], run.result["dropped_updates"]

    assert run(auto) == run(plain)


def test_what_is_chosen_changes_a_run():
    def updates(mode):
        config = pl.TrainConfig(algorithm=f"parameter-server(mode={mode})", workers=2, epochs=3, learning_rate=0.02)
        run = pl.simulate_task(config, cluster=Cluster(workers=2, compute_s=0.01))
        return max(rows["applied_version"].max() for rows in run.records.values())

    assert updates("rennala(gradients=auto)") < 0.9 * updates("rennala")


# What a result says of it


@pytest.mark.parametrize("mode", ["rennala(gradients=auto)", "ringmaster(threshold=auto)"])
@pytest.mark.parametrize("backend", ["simulator", "threads"])
def test_the_result_has_what_was_chosen(mode, backend, monkeypatch):
    """Every number that the server's meter has had is in the range, and the last one is the last."""
    had, take = [], NoiseMeter.take

    def watched(self, gradient):
        take(self, gradient)
        had.append(self.gradients)

    monkeypatch.setattr(NoiseMeter, "take", watched)
    config = pl.TrainConfig(
        algorithm=f"parameter-server(mode={mode})", workers=2, epochs=3, learning_rate=0.02, backend=backend
    )
    if backend == "simulator":
        result = pl.simulate_task(config, cluster=Cluster(workers=2, compute_s=0.01)).result
    else:
        result = pl.train(config).result
    assert result["chosen_gradients"] == {"last": had[-1], "fewest": 2, "most": max(had)}
    assert max(had) > 2, "else it would say nothing"


@pytest.mark.parametrize(("mode", "workers"), [("rennala", 2), ("rennala(gradients=auto)", 1), ("ringleader", 2)])
def test_where_nothing_is_chosen_a_result_says_nothing_of_it(mode, workers):
    config = pl.TrainConfig(algorithm=f"parameter-server(mode={mode})", workers=workers, steps=15, backend="threads")
    assert "chosen_gradients" not in pl.train(config).result
    assert "chosen_gradients" not in pl.simulate_task(config).result


def test_a_resumed_run_says_what_it_goes_on_with(tmp_path):
    config = {"algorithm": "parameter-server(mode=rennala(gradients=auto))", "workers": 2, "learning_rate": 0.02}
    first = pl.train(pl.TrainConfig(epochs=3, backend="threads", **config), out=tmp_path).result["chosen_gradients"]
    later = pl.train(pl.TrainConfig(epochs=4, backend="threads", **config), resume=tmp_path).result["chosen_gradients"]
    assert first["last"] > 2
    assert later["fewest"] > 2
    assert later["fewest"] <= first["last"] <= later["most"]
