"""Replays of methods with servers: each shard gets messages in its recorded order."""

import numpy as np
import pytest
import torch

import paceline as pl
from run.replay_task import check_noticed, rewrite, simulated, trained, write_task


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return write_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory, task):
    folder = tmp_path_factory.mktemp("runs") / "sharded"
    return simulated(folder, task, "parameter-server(mode=async,shards=2)", momentum=0.9)


@pytest.mark.parametrize(
    "algorithm",
    [
        "parameter-server(mode=async,shards=2)",
        "parameter-server(mode=async,durability=replica,shards=2)",
        "parameter-server(mode=bounded(clock_bound=0),shards=2)",
        "parameter-server(mode=bounded(clock_bound=2))",
        "parameter-server(mode=sync(backups=1),shards=3)",
        "parameter-server(mode=sync(backups=1,quorum=per-shard),shards=2)",
        "adaptive-revision(shards=3)",
        "downpour(push=3,fetch=2,shards=2)",
        "downpour(overlap=true,push=2,fetch=3)",
    ],
)
@pytest.mark.parametrize("workers", [2, 3])
def test_unequal_workers_are_replayed(tmp_path, task, algorithm, workers):
    """In the replay workers are equally fast: without the recorded order it would differ."""
    cluster = pl.Cluster(workers=workers, slowness=((0, 1.7), (1, 2.9)))
    folder = simulated(tmp_path / "run", task, algorithm, cluster=cluster, workers=workers)
    recorded = pl.RecordedRun(folder)
    assert recorded.replay().updates == recorded.updates > 20


@pytest.mark.parametrize(
    "algorithm",
    [
        "parameter-server(mode=async)",
        "parameter-server(mode=async,shards=2)",
        "parameter-server(mode=ringmaster)",
        "adaptive-revision(shards=2)",
        "downpour(push=2,fetch=2)",
    ],
)
def test_killed_workers_and_their_replacements_are_replayed(tmp_path, task, algorithm):
    faults = pl.Faults().kill(worker=1, step=4).kill(worker=2, step=3)
    cluster = pl.Cluster(workers=3, detection_s=0.01, restart_s=0.01)
    folder = simulated(tmp_path / "run", task, algorithm, cluster=cluster, faults=faults, restarts=1)
    run = pl.RunData.load(folder)
    assert len(run.result["workers_lost"]) == 2
    assert sum(rows["incarnation"].max() for rows in run.records.values()) == 1
    assert pl.RecordedRun(folder).replay().steps == sum(map(len, run.records.values()))


@pytest.mark.parametrize("options", ["clock_bound=0)", "clock_bound=2)", "clock_bound=1),shards=2"])
@pytest.mark.parametrize("step", [1, 2, 4, 7])
def test_others_go_on_where_a_dead_worker_held_them_up(tmp_path, task, options, step):
    cluster = pl.Cluster(
        workers=3, slowness=((0, 1.7), (1, 2.9)), detection_s=0.01, bandwidth_bytes_per_s=3e5
    )  # the others wait for worker 1 when it dies
    faults = pl.Faults().kill(worker=1, step=step)
    named = {"cluster": cluster, "faults": faults, "momentum": 0.9}
    folder = simulated(tmp_path / "run", task, f"parameter-server(mode=bounded({options})", **named)
    run = pl.RunData.load(folder)
    assert run.result["workers_lost"] == [1]
    recorded = pl.RecordedRun(folder)
    assert recorded.replay().steps == sum(map(len, run.records.values()))


def test_a_dead_workers_gradient_without_a_record_is_noticed(tmp_path, task):
    def lose_last(run):
        run.records[1] = run.records[1][:-1]
        run.result["computed_gradients"] -= 1

    faults = pl.Faults().kill(worker=1, at_s=0.05)
    folder = simulated(tmp_path / "run", task, "parameter-server(mode=bounded(clock_bound=2))", faults=faults)
    with pytest.raises(pl.UsageError, match=r"update \d+ has no record, as after a worker was killed"):
        pl.RecordedRun(rewrite(folder, lose_last))


IN_ROUNDS = [
    "parameter-server(mode=sync)",
    "parameter-server(mode=sync(backups=1))",
    "parameter-server(mode=sync,shards=2)",
    "parameter-server(mode=sync(backups=1),shards=3)",
    "parameter-server(mode=sync(backups=1,quorum=per-shard),shards=2)",
]


@pytest.mark.parametrize(
    "algorithm",
    [*IN_ROUNDS, "parameter-server(mode=sync,on_death=wait)", "parameter-server(mode=bounded(clock_bound=1))"],
)
@pytest.mark.parametrize("bandwidth", [3e5, 1e9])
@pytest.mark.parametrize("steps", [{1: 4}, {0: 3, 2: 6}])
def test_replacements_are_replayed_where_servers_notice_deaths(tmp_path, task, algorithm, bandwidth, steps):
    faults, slow = pl.Faults(), ((0, 1.7), (1, 2.9))
    for worker, step in steps.items():
        faults = faults.kill(worker=worker, step=step)
    cluster = pl.Cluster(workers=3, slowness=slow, detection_s=0.01, restart_s=0.01, bandwidth_bytes_per_s=bandwidth)
    named = {"cluster": cluster, "faults": faults, "momentum": 0.9, "restarts": len(steps)}
    folder = simulated(tmp_path / "run", task, algorithm, **named)
    run = pl.RunData.load(folder)
    assert sum(rows["incarnation"].max() for rows in run.records.values()) == len(steps)
    assert pl.RecordedRun(folder).replay().steps == sum(map(len, run.records.values()))


@pytest.mark.parametrize("algorithm", IN_ROUNDS)
def test_a_killed_workers_gradient_without_a_record_is_replayed(tmp_path, task, algorithm):
    """Killed at many instants, a worker dies before its gradient leaves, while it waits, and before it records the answer."""
    found = set()
    for killed_s in [0.06 + 0.0137 * place for place in range(6)]:
        cluster = pl.Cluster(workers=3, slowness=((0, 1.7), (1, 2.9)), detection_s=0.01, bandwidth_bytes_per_s=3e6)
        faults = pl.Faults().kill(worker=2, at_s=killed_s)
        folder = simulated(tmp_path / f"{killed_s:g}", task, algorithm, faults=faults, cluster=cluster, momentum=0.9)
        run = pl.RunData.load(folder)
        applied = sum(int((rows["applied_version"] > 0).sum()) for rows in run.records.values())
        missing = run.result["shards"][0]["held"] - applied
        found.add(missing)
        assert pl.RecordedRun(folder).replay().steps == sum(map(len, run.records.values())) + missing
    assert found == {0, 1}


def lose_another(run):
    run.records[0] = run.records[0][:-1]
    run.result["computed_gradients"] -= 1


def forget_count(run):
    for shard in run.result["shards"]:
        del shard["held"]


@pytest.mark.parametrize("change", [lose_another, forget_count])
def test_a_step_without_all_its_gradients_is_refused(tmp_path, task, change):
    faults = pl.Faults().kill(worker=2, step=4)
    folder = simulated(tmp_path / "run", task, "parameter-server(mode=sync)", faults=faults)
    with pytest.raises(pl.UsageError, match="gradient of a killed worker is in an update and has no record"):
        pl.RecordedRun(rewrite(folder, change))


def test_a_replacement_that_held_others_up_without_a_record_is_refused(tmp_path, task):
    def die_again(run):
        run.result["workers_lost"] += [1]

    faults, cluster = pl.Faults().kill(worker=1, step=4), pl.Cluster(workers=3, detection_s=0.01, restart_s=60.0)
    algorithm = "parameter-server(mode=bounded(clock_bound=2))"
    folder = simulated(tmp_path / "run", task, algorithm, faults=faults, cluster=cluster, restarts=1)
    assert pl.RecordedRun(folder).replay().steps > 20
    with pytest.raises(pl.UsageError, match="a replacement died before its first record"):
        pl.RecordedRun(rewrite(folder, die_again))


def test_deaths_that_others_notice_are_refused(tmp_path, task):
    faults, cluster = pl.Faults().kill(worker=1, step=4), pl.Cluster(workers=3, detection_s=0.01)
    algorithm = "adaptive-revision(revision_state=snapshot)"
    folder = simulated(tmp_path / "run", task, algorithm, faults=faults, cluster=cluster)
    with pytest.raises(pl.UsageError, match="a worker died, and the records do not have when"):
        pl.RecordedRun(folder)


def test_a_servers_death_is_refused(sharded):
    def change(run):
        run.result["server_restarts"] = 1

    with pytest.raises(pl.UsageError, match="a server died"):
        pl.RecordedRun(rewrite(sharded, change))


def flat(model):
    return torch.cat([one.detach().flatten().clone() for one in model.parameters()])


def test_an_update_is_in_all_shards(sharded):
    """With plain SGD at the servers, the model moves by the gradient and by updates that other shards have made before."""
    recorded = pl.RecordedRun(sharded)
    last = recorded.at(recorded.updates)
    (step,) = last.steps
    assert step["gradient"].norm() > 0
    assert not torch.equal(flat(last.model), flat(recorded.at(recorded.updates - 1).model))


def test_each_accrued_gradient_is_shown(tmp_path, task):
    recorded = pl.RecordedRun(simulated(tmp_path / "run", task, "downpour(push=3,fetch=3,shards=2)"))
    steps = recorded.at(4).steps
    assert [one["step"] - steps[0]["step"] for one in steps] == [0, 1, 2]
    assert len({float(one["gradient"].norm()) for one in steps}) == 3


def of_shard(rows, shard):
    return np.flatnonzero(rows["peer"] == shard)


def drop(run):
    run.order[1] = np.delete(run.order[1], 20)


def drop_worker(run):
    del run.order[2]


def drop_last_exchange(run):
    run.order[1] = run.order[1][:-2]


def swap_updates(run):
    """Two workers' gradients, in the other order at the second shard."""
    made = {int(row["of"]): row for rows in run.order.values() for row in rows[of_shard(rows, 1)]}
    workers = {int(of): worker for worker, rows in run.order.items() for of in rows["of"][of_shard(rows, 1)]}
    version = next(one for one in range(10, len(made)) if workers[one] != workers[one + 1])
    for name in ("at", "of"):
        first, second = made[version][name].copy(), made[version + 1][name].copy()
        made[version][name], made[version + 1][name] = second, first
        for rows, value, old in ((workers[version], second, first), (workers[version + 1], first, second)):
            own = run.order[rows]
            own[name][of_shard(own, 1)[own[name][of_shard(own, 1)] == old][:1]] = value


def change_read(run):
    rows = run.order[0]
    rows["at"][of_shard(rows, 1)[5]] += 1


def change_update(run):
    rows = run.order[0]
    rows["of"][of_shard(rows, 1)[5]] += 1


def change_shard(run):
    rows = run.order[0]
    rows["peer"][10:12] = rows["peer"][11:9:-1]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (drop, "lacks records of the order"),
        (drop_worker, "lacks records of the order"),
        (drop_last_exchange, r"update \d+ of shard \d has no record"),
        (change_update, r"update \d+ of shard 1 has no record"),
        (change_shard, "lacks records of the order"),
    ],
)
def test_a_damaged_order_is_refused(sharded, change, why):
    with pytest.raises(pl.UsageError, match=why):
        pl.RecordedRun(rewrite(sharded, change))


@pytest.mark.parametrize("change", [swap_updates, change_read])
def test_another_order_is_noticed(sharded, change):
    check_noticed(rewrite(sharded, change))


def test_a_file_that_holds_no_order_is_refused(sharded, tmp_path):
    folder = rewrite(sharded, lambda run: None)
    (folder / "order.npz").write_bytes(b"no archive")
    with pytest.raises(pl.UsageError, match=r"order\.npz is not a readable NPZ file"):
        pl.RecordedRun(folder)
    np.savez(folder / "order.npz", **{"0": np.zeros(3)})
    with pytest.raises(pl.UsageError, match="does not hold the recorded order of events"):
        pl.RecordedRun(folder)


def test_an_order_takes_16_bytes_for_each_shard(tmp_path, task):
    folder = trained(tmp_path / "run", task, "parameter-server(mode=async,shards=2)")
    run = pl.RunData.load(folder)
    assert sum(rows.nbytes for rows in run.order.values()) <= 32 * (run.result["steps"] + 3)
    assert not (trained(tmp_path / "one", task, "parameter-server(mode=async)") / "order.npz").exists()
