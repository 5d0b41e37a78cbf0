"""Who made a simulated run slow: 200 ms injected into one worker's gradient or input, or into a link."""

import dataclasses
import json

import numpy as np
import pytest
from typer.testing import CliRunner

import paceline as pl
from paceline.advice.remedies import remedy
from paceline.algorithms import registry
from paceline.cli.app import app
from paceline.observe.blame import blame, sentence
from paceline.observe.waits import blockers, critical_path, steps_of

ROUNDS = ["lockstep", "all-reduce", "local-sgd(period=4)", "da-sgd", "diloco(period=8)", "parameter-server"]
WAITING = [*ROUNDS, "d-psgd", "parameter-server(mode=bounded(clock_bound=3))"]
FREE = [
    "ad-psgd", "parameter-server(mode=async)", "parameter-server(mode=rennala(gradients=4))", "downpour", "hogwild", "locked",
    "leashed",
]  # fmt: skip
FAULT_S = 0.2
CLUSTER = pl.Cluster(workers=4, compute_s=0.02, bandwidth_bytes_per_s=1e8)


def simulated(algorithm, cluster=CLUSTER, steps=48, **more):
    config = pl.TrainConfig(algorithm=algorithm, steps=steps, workers=cluster.workers)
    return pl.simulate_task(config, cluster=cluster, timing_only=True, **more)


def with_input(run, worker):
    """The run as if what this worker slept before its gradients had been waiting for input, which is not simulated."""
    rows = run.records[worker].copy()
    rows["input_s"] += FAULT_S
    rows["gradient_started_s"] += FAULT_S
    run.records[worker] = rows
    return run


@pytest.mark.parametrize("algorithm", WAITING + FREE)
@pytest.mark.parametrize("worker", [0, 2])
def test_a_slow_gradient_is_blamed_on_its_worker(algorithm, worker):
    cause = blame(simulated(algorithm, CLUSTER.idle(worker=worker, idle_s=FAULT_S))).cause
    assert (cause.worker, cause.activity) == (worker, "computing")
    assert cause.own_s == pytest.approx(0.22, rel=0.01)
    assert cause.others_s == pytest.approx(0.02, rel=0.01)
    if algorithm in WAITING:
        assert cause.rounds == 1
        assert cause.lost > 0.85


@pytest.mark.parametrize("algorithm", WAITING + FREE)
def test_slow_input_is_blamed_on_its_worker(algorithm):
    cause = blame(with_input(simulated(algorithm, CLUSTER.idle(worker=1, idle_s=FAULT_S)), 1)).cause
    assert (cause.worker, cause.activity) == (1, "input")
    assert cause.own_s == pytest.approx(FAULT_S)
    assert cause.others_s == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize(
    "algorithm", ["all-reduce", "local-sgd(period=4)", "da-sgd", "diloco(period=8)", "d-psgd", "ad-psgd"]
)
def test_a_slow_link_is_named(algorithm):
    cause = blame(simulated(algorithm, CLUSTER.slow_link(1, 2, 250))).cause
    assert (cause.link, cause.worker, cause.activity) == ((1, 2), None, "communicating")
    assert cause.own_s > 0.08


@pytest.mark.parametrize("link", [(0, 1), (0, 2), (1, 2)])
def test_a_partner_that_is_busy_on_a_slow_link_is_not_slow_itself(link):
    """It holds requests of a third worker until its own exchange is over."""
    cluster = pl.Cluster(workers=3, compute_s=0.02, bandwidth_bytes_per_s=1e8).slow_link(*link, 250)
    cause = blame(simulated("ad-psgd", cluster)).cause
    assert cause.link == link
    assert cause.others_s < 0.01


@pytest.mark.parametrize(("idle_s", "expected"), [(0.015, (None, (1, 2))), (1.0, (3, None))])
def test_exchanges_are_compared_with_what_takes_a_workers_time(idle_s, expected):
    cause = blame(simulated("ad-psgd", CLUSTER.slow_link(1, 2, 250).idle(worker=3, idle_s=idle_s))).cause
    assert (cause.worker, cause.link) == expected


def test_all_members_of_a_round_wait_for_a_slow_link():
    """Each names the worker from which it has heard last: the others always one of the two at the link."""
    run = simulated("all-reduce", CLUSTER.slow_link(1, 2, 250))
    for worker in (0, 3):
        rows = run.records[worker] = run.records[worker].copy()
        rows["partner"], rows["partner_s"] = 1, 1.01 * run.records[1]["partner_s"]
    cause = blame(run).cause
    assert (cause.link, cause.others_s) == ((1, 2), None)


@pytest.mark.parametrize("algorithm", ["parameter-server", "parameter-server(mode=bounded(clock_bound=3))", *FREE[1:4]])
def test_a_slow_way_to_the_server_is_blamed_on_its_worker(algorithm):
    cluster = pl.Cluster(workers=4, compute_s=0.02, bandwidth_bytes_per_s=1e8)
    object.__setattr__(cluster, "link_factors", ((2, 4, 250.0),))  # 4 is the server, whose links no option slows down
    cause = blame(simulated(algorithm, cluster)).cause
    assert (cause.worker, cause.activity) == (2, "communicating")
    assert cause.own_s > 0.1


@pytest.mark.parametrize("algorithm", ["lockstep", "all-reduce", "d-psgd", *FREE])
def test_equal_workers_are_not_blamed(algorithm):
    found = blame(simulated(algorithm))
    assert found.cause is None
    assert "No worker was clearly slower" in sentence(found)


def test_communication_of_all_is_no_workers_fault():
    cluster = pl.Cluster(workers=4, compute_s=0.02, bandwidth_bytes_per_s=2e6)
    for algorithm in ("all-reduce", "parameter-server", "d-psgd"):
        cause = blame(simulated(algorithm, cluster)).cause
        assert (cause.activity, cause.worker, cause.link) == ("communicating", None, None)


@pytest.mark.parametrize("algorithm", WAITING + FREE)
def test_a_worker_that_becomes_slow_is_blamed_from_that_step_on(algorithm):
    faults = pl.Faults().slow(worker=3, factor=11, step=25)
    found = blame(simulated(algorithm, faults=faults))
    assert (found.cause.worker, found.cause.since_step, found.cause.until_step) == (3, 25, None)
    assert found.cause.own_s == pytest.approx(0.22, rel=0.01)
    assert "from step 25 on" in sentence(found)


@pytest.mark.parametrize(("last", "when"), [(20, " in step 20:"), (22, " from step 20 to step 22:")])
def test_a_slow_moment_is_named_by_its_steps(last, when):
    run = simulated("hogwild")
    rows = run.records[3] = run.records[3].copy()
    late_s = 2.0 * (rows["step"].clip(19, last) - 19)
    for name in ("gradient_ended_s", "ended_s"):
        rows[name] += late_s
    for name in ("started_s", "gradient_started_s"):
        rows[name][1:] += late_s[:-1]
    assert when in sentence(blame(run))


@pytest.mark.parametrize("algorithm", WAITING)
def test_the_critical_path_is_as_long_as_the_run(algorithm):
    """No instant is on it twice, and none is missing but what no record accounts for."""
    run = simulated(algorithm, CLUSTER.idle(worker=2, idle_s=0.03).slow_link(0, 1, 20))
    steps = steps_of(run.records)
    found = blockers(steps, registry.build(algorithm).waits_for, own_models=run.result["gossip"])
    path = critical_path(steps, *found)
    assert path.took_s.sum() == pytest.approx(run.result["wall_s"], rel=0.02)
    assert (path.took_s >= 0).all()


@pytest.mark.parametrize("algorithm", ROUNDS)
def test_shares_say_for_whom_each_worker_waited(algorithm):
    found = blame(simulated(algorithm, CLUSTER.idle(worker=2, idle_s=FAULT_S)))
    for share in found.shares:
        total = sum(share.waiting_for.values()) + share.computing + share.communicating + share.updating + share.loop
        assert total == pytest.approx(1, abs=0.01)
        assert list(share.waiting_for) == ([] if share.worker == 2 else [2])
    assert found.shares[2].critical > 0.99


def test_several_backward_passes_are_the_workers_own_time():
    """Where a loop makes two, the first one's wait lies between the gradient's beginning and its end."""
    run = simulated("all-reduce", CLUSTER.idle(worker=2, idle_s=FAULT_S))
    rows = run.records[0].copy()
    rows["gradient_ended_s"] = rows["gradient_started_s"] + 0.21  # of it 0.2 s in the first wait
    run.records[0] = rows
    assert blame(run).shares[0].computing == pytest.approx(0.09, abs=0.01)
    assert blame(run).cause.worker == 2


@pytest.mark.parametrize("algorithm", ["lockstep", "all-reduce", "leashed"])
@pytest.mark.parametrize("after", ["backward", "step"])
def test_other_code_of_a_loop_is_blamed_on_its_worker(algorithm, after):
    run = simulated(algorithm, CLUSTER.idle(worker=1, idle_s=FAULT_S))
    rows = run.records[1] = run.records[1].copy()
    if after == "backward":
        rows["gradient_ended_s"] -= FAULT_S
    else:
        rows["started_s"] += FAULT_S
        rows["gradient_started_s"] += FAULT_S
    cause = blame(run).cause
    assert (cause.worker, cause.activity) == (1, "loop")
    assert cause.own_s == pytest.approx(FAULT_S, rel=0.01)


def test_a_backup_worker_does_not_hold_up_rounds():
    config = pl.TrainConfig(algorithm="parameter-server(mode=sync(backups=1))", workers=4, epochs=1)
    run = pl.simulate_task(config, cluster=CLUSTER.idle(worker=2, idle_s=FAULT_S), timing_only=True)
    found = blame(run)
    assert found.cause is None or (found.cause.activity, found.cause.worker) == ("communicating", None)
    assert not [share for share in found.shares if 2 in share.waiting_for]


def test_dead_and_replaced_workers():
    config = pl.TrainConfig(algorithm="ad-psgd", workers=4, epochs=1, restarts=1)
    cluster = dataclasses.replace(CLUSTER, detection_s=0.05, restart_s=0.1)
    run = pl.simulate_task(config, cluster=cluster, faults=pl.Faults().kill(worker=1, step=10))
    assert run.records[1]["incarnation"][-1] == 1
    assert run.result["restarts"] == 1
    assert blame(run).shares[1].loop == pytest.approx(0, abs=1e-9)  # nobody was there
    run = pl.simulate_task(
        pl.TrainConfig(algorithm="lockstep", workers=4, steps=40), cluster=CLUSTER.idle(worker=2, idle_s=FAULT_S),
        faults=pl.Faults().kill(worker=1, step=10),
    )  # fmt: skip
    assert blame(run).cause.worker == 2


@pytest.mark.parametrize(
    ("algorithm", "spec"),
    [
        ("all-reduce", "all-reduce(shares=auto)"),
        ("lockstep", "lockstep(shares=auto)"),
        ("d-psgd", "ad-psgd"),
        ("local-sgd(period=4)", "ad-psgd"),
        ("parameter-server", "parameter-server(mode=sync(backups=1))"),
        ("parameter-server(mode=bounded(clock_bound=3))", "parameter-server(mode=async)"),
    ],
)
def test_the_remedy_takes_the_time_that_the_speeds_allow(algorithm, spec):
    run = simulated(algorithm, CLUSTER.idle(worker=2, idle_s=FAULT_S))
    found = remedy(run, blame(run))
    assert registry.spec(registry.build(found.spec)) == registry.spec(registry.build(spec))
    ideal = (4 / 0.22) / (3 / 0.02 + 1 / 0.22)  # speed now over the speed of all workers without waiting
    assert ideal * 0.9 < found.relative_time < ideal * 1.3


def test_the_remedy_for_slow_links_and_input():
    run = simulated("all-reduce", CLUSTER.slow_link(1, 2, 250))
    found = remedy(run, blame(run))
    assert registry.build(found.spec) == pl.LocalSGD(period=8)
    assert found.relative_time == pytest.approx((8 * 0.02 + 0.21) / (8 * 0.23), rel=0.1)
    run = with_input(simulated("all-reduce", CLUSTER.idle(worker=1, idle_s=FAULT_S)), 1)
    found = remedy(run, blame(run))
    assert found.spec == ""
    assert found.relative_time == pytest.approx(0.2 / 0.22, rel=0.03)
    run = simulated("hogwild", CLUSTER.idle(worker=1, idle_s=FAULT_S))
    assert remedy(run, blame(run)) is None


def test_the_command_says_so(tmp_path):
    simulated("all-reduce", CLUSTER.idle(worker=2, idle_s=FAULT_S)).save(tmp_path / "run")
    shown = CliRunner().invoke(app, ["blame", str(tmp_path / "run")])
    assert shown.exit_code == 0
    assert (
        "Worker 2 was last in 100 % of the rounds: its forward and backward took 220 ms, the others' 20.0 ms"
        in shown.output
    )
    assert "`all-reduce(shares=auto)` would take 0.1" in shown.output
    as_json = CliRunner().invoke(app, ["blame", str(tmp_path / "run"), "--json"])
    answer = json.loads(as_json.stdout.splitlines()[-1])
    assert answer["cause"]["worker"] == 2
    assert answer["remedy"]["spec"] == "all-reduce(shares=auto)"
    assert [share["worker"] for share in answer["shares"]] == [0, 1, 2, 3]


def test_the_command_reads_a_run_that_was_killed(tmp_path):
    """It has no result."""
    simulated("d-psgd", CLUSTER.idle(worker=2, idle_s=FAULT_S)).save(tmp_path / "run")
    whole = CliRunner().invoke(app, ["blame", str(tmp_path / "run")])
    (tmp_path / "run" / "result.json").unlink()
    assert CliRunner().invoke(app, ["blame", str(tmp_path / "run")]).output == whole.output


@pytest.mark.parametrize("kept", ["nothing", "no events"])
def test_the_command_refuses_folders_without_steps(tmp_path, kept):
    if kept == "no events":
        run = simulated("hogwild", steps=2)
        run.records = {worker: rows[:0] for worker, rows in run.records.items()}
        run.save(tmp_path / "run")
    shown = CliRunner().invoke(app, ["blame", str(tmp_path / "run")])
    assert shown.exit_code == 2
    assert "Traceback" not in shown.output


def test_records_without_partners_still_name_the_round():
    """Runs of earlier versions, and lone workers."""
    run = simulated("d-psgd", CLUSTER.slow(worker=2, factor=11))
    for worker, rows in run.records.items():
        old = rows.copy()
        old["partner"] = old["partner_s"] = 0
        run.records[worker] = old
    assert blame(run) is not None
    alone = pl.simulate_task(pl.TrainConfig(algorithm="sequential", workers=1, steps=20), timing_only=True)
    assert blame(alone).cause is None
    assert np.isclose(blame(alone).shares[0].critical, 1)


def test_a_worker_that_wakes_late_at_the_end_does_not_end_the_path():
    """The system may let a released worker run only when the last one has made its next steps, or has ended."""
    run = simulated("all-reduce", CLUSTER.idle(worker=2, idle_s=FAULT_S))
    rows = run.records[0].copy()
    rows["ended_s"][-1] += 0.1
    rows["wait_s"][-1] += 0.1
    run.records[0] = rows
    cause = blame(run).cause
    assert (cause.worker, cause.activity, cause.rounds) == (2, "computing", 1)


def test_taking_a_model_that_is_there_already_is_no_wait_for_its_sender():
    """A real worker spends some microseconds on that, also the slowest one."""
    run = simulated("d-psgd", CLUSTER.idle(worker=2, idle_s=FAULT_S))
    rows = run.records[2].copy()
    rows["wait_s"] = rows["partner_s"] = 1e-4
    rows["partner"] = 1
    rows["gradient_ended_s"] -= 1e-4
    run.records[2] = rows
    cause = blame(run).cause
    assert (cause.worker, cause.activity, cause.link) == (2, "computing", None)
