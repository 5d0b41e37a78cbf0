"""The controller of `backups=auto`, which follows the times that it sees."""

from paceline.algorithms.server.backups import BackupController


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
    assert len(controller.times_to_target()) == 3


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
