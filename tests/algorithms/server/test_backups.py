"""The choice of backup workers: order statistics, the optimum, and the controller that follows the times it sees."""

import numpy as np
import pytest

from paceline.algorithms.server.backups import BackupController, StepsModel, choose_backups, learning_rate_factor


def test_a_step_takes_as_long_as_its_last_needed_gradient():
    arrivals_s = np.array([[4.0, 1.0, 2.0, 3.0], [1.0, 2.0, 9.0, 2.0]])
    choice = choose_backups(arrivals_s, StepsModel(half_efficient=float("inf")), max_backups=3)
    assert [row.step_s for row in choice.rows] == [6.5, 2.5, 2.0, 1.0]
    assert [row.total for row in choice.rows] == pytest.approx([1, 2.5 * 4 / 3 / 6.5, 2.0 * 2 / 6.5, 4 / 6.5])
    assert choice.best.backups == 1
    assert choice.rows[1].discounted_speed_up == pytest.approx(6.5 / 2.5 * 3 / 4)


def test_exponential_times_have_the_means_of_the_closed_form():
    M = 20
    arrivals_s = 1.0 + np.random.default_rng(1).exponential(0.5, (20_000, M))
    choice = choose_backups(arrivals_s, max_backups=M - 1)
    for row in choice.rows:
        N = M - row.backups
        expected = 1.0 + 0.5 * sum(1 / k for k in range(M - N + 1, M + 1))
        assert row.step_s == pytest.approx(expected, rel=0.01)


def test_equal_workers_need_no_backup_and_one_straggler_needs_one():
    even = np.ones((10, 8))
    assert choose_backups(even).best.backups == 0
    even[:, 3] = 5.0
    assert choose_backups(even).best.backups == 1
    even[:, 5] = np.inf  # never came
    choice = choose_backups(even)
    assert choice.best.backups == 2
    assert np.isinf(choice.rows[0].step_s)


def test_few_machines_may_have_one_backup_a_single_one_none_and_no_arrivals_are_refused():
    assert [row.backups for row in choose_backups(np.array([[1.0, 9.0, 1.0]])).rows] == [0, 1]
    assert [row.backups for row in choose_backups(np.array([[9.0]])).rows] == [0]
    with pytest.raises(ValueError, match="arrival times"):
        choose_backups(np.empty((0, 4)))
    with pytest.raises(ValueError, match="half_efficient"):
        StepsModel(half_efficient=-1)


def test_steps_nearly_halve_when_workers_double():
    steps = StepsModel()
    assert 1.7 < steps.steps(50) / steps.steps(100) < 1.9
    assert StepsModel(half_efficient=float("inf")).steps(4) == 0.25


def test_the_controller_follows_a_worker_that_becomes_slow_and_recovers():
    controller = BackupController(8, every_steps=10, window=20)
    chosen = []
    for step in range(120):
        for worker in range(8):
            controller.arrived(worker, 10.0 if worker == 2 and 40 <= step < 80 else 1.0 + 0.01 * worker)
        chosen.append(controller.step_done(step))
    assert set(chosen[:39]) == {0}
    assert 1 in chosen[40:80]
    assert set(chosen[-20:]) == {0}
    assert chosen.index(1) % 10 == 9, "only every tenth step"


def test_the_controller_stays_within_a_quarter_and_waits_until_all_have_sent():
    controller = BackupController(8, every_steps=1)
    for worker in range(7):
        controller.arrived(worker, 100.0 if worker < 5 else 1.0)
    assert controller.step_done(0) == 0
    controller.arrived(7, 1.0)
    assert controller.step_done(1) <= 2
    assert len(controller.choice().rows) == 3


def test_a_worker_that_leaves_is_no_machine_any_more():
    controller = BackupController(4, every_steps=1)
    for worker in range(4):
        controller.arrived(worker, 5.0 if worker == 0 else 1.0)
    assert controller.step_done(0) == 1
    controller.left(0)
    assert controller.backups == 1, "until it chooses again"
    assert controller.step_done(1) == 0
    controller.joined()
    assert controller.step_done(2) == 0  # the new one has sent nothing yet
    controller.arrived(9, 5.0)
    assert controller.step_done(3) == 1


def test_of_a_hundred_machines_with_rare_stragglers_three_to_eight_are_backups():
    from_seed = np.random.default_rng(0)
    arrivals_s = from_seed.gamma(100, 0.0152, (4000, 100))
    slow = from_seed.random((4000, 100)) < 0.01
    arrivals_s[slow] *= from_seed.pareto(1.1, int(slow.sum())) + 1
    choice = choose_backups(np.minimum(arrivals_s, 310.0))
    assert 3 <= choice.best.backups <= 8
    assert choice.rows[0].total > 1.5 * choice.best.total


def test_learning_rate_rules():
    assert learning_rate_factor("linear", 32) == 32.0
    assert learning_rate_factor("none", 32) == 1.0
