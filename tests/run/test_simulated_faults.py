"""Faults, and loops that end early, in the user's own loop on simulated workers."""

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.simulator import Cluster, Faults

WORKERS = 3
STEP_S = 0.01  # the default cluster's
BATCHES = [torch.randn(4, 6, generator=torch.Generator().manual_seed(number)) for number in range(30)]


def simulated(algorithm, faults=None, *, leave=None, cleaned=None):
    """A run over BATCHES; worker `leave` breaks out of its loop after two; `cleaned` gets the workers whose loops ended."""

    def train():
        torch.manual_seed(0)
        model = nn.Linear(6, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        steps = 0
        with pl.attach(model, optimizer) as worker:
            try:
                for x in worker.batches(BATCHES):
                    optimizer.zero_grad()
                    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
                    loss.backward()
                    optimizer.step()
                    worker.report(loss)
                    steps += 1
                    if worker.worker_id == leave and steps == 2:
                        break
            finally:
                if cleaned is not None:
                    cleaned.append(worker.worker_id)
        return steps

    return pl.simulate(train, workers=WORKERS, algorithm=algorithm, faults=faults)


def durations_s(run, worker):
    rows = run.records[worker]
    return rows["gradient_ended_s"] - rows["gradient_started_s"]


@pytest.mark.parametrize("algorithm", ["ad-psgd", "parameter-server(mode=async)", "leashed", "hogwild"])
def test_others_go_on_without_a_killed_worker(algorithm):
    cleaned = []
    run = simulated(algorithm, Faults().kill(worker=1, step=3), cleaned=cleaned)
    assert run.result["workers_lost"] == [1]
    assert len(run.records[1]) == 2  # dead as it began its third gradient
    assert sorted(run.returned) == [0, 2]
    assert run.returned[0] + run.returned[2] == len(BATCHES) - 3  # the batch that it was at is lost with it
    assert sorted(cleaned) == [0, 1, 2]
    assert run.config["faults"] == [{"fault": "Kill", "worker": 1, "step": 3, "at_s": None}]


def test_a_kill_at_a_time_gives_the_same_run_each_time():
    first, again = (simulated("ad-psgd", Faults().kill(worker=2, at_s=4.5 * STEP_S)) for _ in range(2))
    assert first.result == again.result
    assert all((first.records[one] == again.records[one]).all() for one in range(WORKERS))
    assert first.records[2]["ended_s"].max() < 4.5 * STEP_S < first.result["wall_s"]


@pytest.mark.parametrize(
    "algorithm",
    [
        *("all-reduce", "all-reduce(sharded=true)", "local-sgd(period=2)", "d-psgd"),
        *("da-sgd(period=2)", "diloco(period=4, fragments=2, delay=1)"),
    ],
)
def test_lockstep_names_the_killed_worker(algorithm):
    with pytest.raises(pl.WorkerLostError, match=r"worker 1 .*killed at 0\.0\d+ s"):
        simulated(algorithm, Faults().kill(worker=1, step=3))


@pytest.mark.parametrize(
    "algorithm",
    [
        *("lockstep", "all-reduce", "all-reduce(sharded=true)", "local-sgd(period=2)", "d-psgd"),
        *("da-sgd(period=2)", "diloco(period=4, fragments=2, delay=1)"),
    ],
)
def test_lockstep_names_a_worker_whose_loop_ends_early(algorithm):
    with pytest.raises(pl.WorkerLostError, match=r"worker 1 (\(its loop has ended\)|did not send its model)"):
        simulated(algorithm, leave=1)


@pytest.mark.parametrize("algorithm", ["ad-psgd", "leashed"])
def test_others_take_the_batches_of_one_whose_loop_ends_early(algorithm):
    run = simulated(algorithm, leave=1)
    assert run.returned[1] == 2
    assert sum(run.returned.values()) == len(BATCHES)


def test_slow_from_a_step_or_a_time_on():
    run = simulated("ad-psgd", Faults().slow(worker=0, factor=5, step=3).slow(worker=1, factor=2, at_s=2.5 * STEP_S))
    assert durations_s(run, 0)[:3] == pytest.approx([STEP_S, STEP_S, 5 * STEP_S])
    late = run.records[1]["gradient_started_s"] >= 2.5 * STEP_S
    assert durations_s(run, 1) == pytest.approx([2 * STEP_S if one else STEP_S for one in late])
    assert durations_s(run, 2) == pytest.approx([STEP_S] * len(durations_s(run, 2)))


def test_a_paused_worker_holds_lockstep_for_as_long():
    undisturbed = simulated("all-reduce").result["wall_s"]
    run = simulated("all-reduce", Faults().pause(worker=2, at_s=2.5 * STEP_S, for_s=0.7))
    assert run.result["wall_s"] == pytest.approx(undisturbed + 0.7, rel=1e-6)
    assert durations_s(run, 2)[2] == pytest.approx(0.7 + STEP_S)


def test_a_dropped_link_ends_lockstep_and_not_gossip():
    cut = Faults().drop_link(0, 1, at_s=2.5 * STEP_S)
    with pytest.raises(pl.WorkerLostError, match=r"link between 0 and 1 was cut at 0\.025 s"):
        simulated("all-reduce", cut)
    with pytest.raises(pl.WorkerLostError, match=r"worker [01] .*the link was cut at 0\.025 s"):
        simulated("d-psgd", cut)
    run = simulated("ad-psgd", cut)
    assert run.result["workers_lost"] == []
    assert sum(run.returned.values()) == len(BATCHES)


@pytest.mark.parametrize("algorithm", ["leashed", "lockstep"])
def test_workers_that_share_memory_have_no_link_to_drop(algorithm):
    with pytest.raises(pl.UsageError, match="no link to drop"):
        simulated(algorithm, Faults().drop_link(0, 1, at_s=0.0))


def test_a_fault_of_a_worker_that_does_not_exist():
    with pytest.raises(pl.UsageError, match="A fault names worker 7"):
        simulated("ad-psgd", Faults().kill(worker=7, step=1))


def test_a_program_that_is_cut_off_leaves_torch_as_it_was():
    """Servers run without gradients, and one that waits for ever is ended there."""
    with pytest.raises(pl.PacelineError, match=r"Deadlock .* shard 0 of the server waits for a message"):
        simulated("downpour(warm_start_steps=20, on_death=wait)", Faults().kill(worker=0, step=5))
    assert torch.is_grad_enabled()


ANSWERED = ["adaptive-revision", "downpour(push=1)", "parameter-server(mode=async, shards=2)"]  # every gradient


@pytest.mark.parametrize("algorithm", [*ANSWERED, "parameter-server", "leashed", "hogwild", "locked"])
def test_every_version_is_counted_whenever_a_worker_is_killed(algorithm):
    """Also one that its worker did not live to hear of."""
    cluster = Cluster(workers=3, compute_s=0.001)
    lost = set()
    for number in range(30):  # more than a step, in less than a message's latency each, so that one answer is under way
        faults = Faults().kill(worker=1, at_s=0.01 + 0.9 * cluster.latency_s * number)
        run = pl.simulate_task(
            pl.TrainConfig(algorithm=algorithm, workers=3, steps=20),
            cluster=cluster,
            faults=faults,
            timing_only=True,
            num_parameters=1000,
        )
        named = {int(version) for rows in run.records.values() for version in rows["applied_version"] if version > 0}
        assert run.result["workers_lost"] == [1]
        assert run.result["steps"] == run.result["version"]
        assert run.result["records_lost"] == run.result["version"] - len(named)
        lost.add(run.result["records_lost"])
    assert max(lost) > 0 or algorithm not in ANSWERED
