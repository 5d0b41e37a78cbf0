"""Replays of recorded runs: equal bit for bit, or the step at which they differ."""

import dataclasses
import json
import math
import re

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset
from typer.testing import CliRunner

import paceline as pl
from paceline.cli.app import app
from paceline.run.recorded_order import ReplayMismatchError
from paceline.run.task_replay import TaskReplay
from run.replay_task import SPARSE_TASK, TASK, rewrite, simulated, trained, write_task


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return write_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def locked(tmp_path_factory, task):
    return trained(tmp_path_factory.mktemp("runs") / "locked", task, "locked")


def change_records(folder, change):
    return rewrite(folder, lambda run: change(run.records))


def worker_of(records, version):
    """Who made an update; timing decides it."""
    return next(worker for worker, rows in records.items() if (rows["applied_version"] == version).any())


def change_loss(records, version=12):
    rows = records[worker_of(records, version)]
    rows["loss"][rows["applied_version"] == version] += 1e-7


@pytest.mark.parametrize(
    "algorithm",
    [
        "locked",
        "locked(kind=rwlock,step_size=inverse)",
        "leashed",
        "parameter-server(mode=async)",
        "parameter-server(mode=bounded(clock_bound=1))",
        "parameter-server(mode=sync(backups=1))",
        "parameter-server(mode=sync,shards=2)",
        "parameter-server(mode=sync(backups=1),shards=3)",
        "parameter-server(mode=sync(backups=1,quorum=per-shard),shards=2)",
        "parameter-server(mode=async,shards=3)",
        "parameter-server(mode=bounded(clock_bound=1),shards=2)",
        "parameter-server(mode=async,shards=2,codec=qsgd)",
        "parameter-server(mode=ringmaster(threshold=1))",
        "adaptive-revision(revision_state=snapshot)",
        "adaptive-revision(shards=2)",
        "downpour",
        "downpour(push=2,fetch=3)",
        "downpour(push=3,fetch=2,shards=2,apply=user,warm_start_steps=5)",
        "downpour(overlap=true)",
        "downpour(overlap=true,push=2,fetch=2,shards=3)",
        "lockstep",
        "all-reduce",
        "local-sgd",
        "da-sgd",
        "diloco",
        "d-psgd",
        "ad-psgd",
        "ad-psgd(topology=complete,peers=rotate)",
    ],
)
def test_a_replay_is_equal_bit_for_bit(tmp_path, task, algorithm):
    momentum = None if algorithm.startswith(("adaptive", "downpour")) else 0.9
    recorded = pl.RecordedRun(trained(tmp_path / "run", task, algorithm, momentum=momentum))
    replayed = recorded.replay()
    assert replayed.steps == sum(map(len, pl.RunData.load(tmp_path / "run").records.values()))
    assert replayed.checkpoint is not None
    assert replayed.warnings == ()


def test_retries_of_leashed_are_replayed(tmp_path, task):
    """A simulation makes them without chance; its records are those of a real run."""
    config = pl.TrainConfig(task=task, algorithm="leashed", workers=6, momentum=0.9)
    run = pl.simulate_task(config, cluster=pl.Cluster(workers=6, core_bytes_per_s=1e6))
    assert sum(int((rows["failed_publishes"] > 0).sum()) for rows in run.records.values()) > 10
    run.config["backend"] = "processes"
    run.save(tmp_path / "run")
    assert pl.RecordedRun(tmp_path / "run").replay().checkpoint is None


@pytest.mark.parametrize("algorithm", ["locked", "leashed"])
@pytest.mark.parametrize("last", [False, True])
def test_killed_workers_and_their_replacements_are_replayed(tmp_path, task, algorithm, last):
    """Worker 1 dies twice, in the middle; or worker 2 is alone at the end, when its replacement takes over."""
    config = pl.TrainConfig(task=task, algorithm=algorithm, workers=3, momentum=0.9, restarts=3, partition="fixed")
    faults = pl.Faults().kill(worker=1, step=4).kill(worker=1, at_s=0.07).slow(worker=0, factor=3, step=1)
    if last:
        faults = pl.Faults().kill(worker=2, step=18)
    cluster = pl.Cluster(workers=3, detection_s=0.01, restart_s=1.0 if last else 0.01)
    run = pl.simulate_task(config, cluster=cluster, faults=faults)
    of_replaced = run.records[2 if last else 1]
    assert (of_replaced["incarnation"] == of_replaced["incarnation"].max()).sum() > 1
    assert run.result["restarts"] == (1 if last else 2)
    run.config["backend"] = "processes"
    run.save(tmp_path / "run")
    recorded = pl.RecordedRun(tmp_path / "run")
    replayed = recorded.replay()
    assert replayed.steps == sum(map(len, run.records.values()))
    before_death = of_replaced[of_replaced["incarnation"] == 0][-1]
    (step,) = recorded.at(int(before_death["applied_version"])).steps
    assert step["gradient"].norm() > 0
    (step,) = recorded.at(int(of_replaced["applied_version"][-1])).steps
    assert step["gradient"].norm() > 0


def test_a_replacement_begins_with_the_models_own_buffers(tmp_path, task):
    """Batches that its normalization has counted."""
    faults, cluster = pl.Faults().kill(worker=1, step=4), pl.Cluster(workers=3, detection_s=0.01, restart_s=0.01)
    folder = simulated(tmp_path / "run", task, "locked", cluster=cluster, faults=faults, restarts=1)
    recorded = pl.RecordedRun(folder)
    replay = TaskReplay(recorded, None)
    replay.replay()
    replica = replay.replicas[1, 1]
    replica._buffers.enter(1)
    assert 0 < int(replay.model[1].num_batches_tracked) == len(recorded.processes[1, 1])


def test_a_checkpoint_is_named_as_its_folder(tmp_path, task):
    """In rounds of three workers it is three times the number of updates."""
    replayed = pl.RecordedRun(trained(tmp_path / "run", task, "lockstep", steps=4)).replay()
    assert (replayed.updates, replayed.checkpoint) == (4, 12)
    assert (tmp_path / "run" / "checkpoint" / "12").is_dir()


def test_a_replay_that_ends_before_the_records_is_not_equal(locked, monkeypatch):
    from paceline.run import task_replay

    monkeypatch.setattr(task_replay.TaskReplay, "_work", lambda *_: None)
    recorded = pl.RecordedRun(locked)
    with pytest.raises(pl.UsageError, match=r"contradict each other\. The replay ended after 0 of 60 steps"):
        recorded.replay()
    with pytest.raises(pl.UsageError, match=r"contradict each other\. The replay ended before update 5"):
        recorded.at(5)


def test_two_updates_in_the_other_order_are_noticed(locked):
    def swap(records):
        places = [
            (rows, int(place)) for rows in records.values() for place in np.flatnonzero(rows["applied_version"] == 9)
        ]
        others = [
            (rows, int(place)) for rows in records.values() for place in np.flatnonzero(rows["applied_version"] == 10)
        ]
        for rows, place in places:
            rows["applied_version"][place] = 10
        for rows, place in others:
            rows["applied_version"][place] = 9

    with pytest.raises((ReplayMismatchError, pl.UsageError), match=r"differs from the run at|contradict each other"):
        pl.RecordedRun(change_records(locked, swap)).replay()


def test_the_first_step_that_differs_is_named(locked):
    with pytest.raises(
        ReplayMismatchError, match=r"at the gradient of update 12, step \d+ of worker \d: loss"
    ) as caught:
        pl.RecordedRun(change_records(locked, change_loss)).replay()
    assert caught.value.version == 12


def test_parameters_that_differ_are_noticed(locked, monkeypatch):
    from paceline.records import checkpoint_contents

    load = checkpoint_contents.load_parameters

    def changed(checkpoint):
        parameters = load(checkpoint)
        parameters.x[3] += 1e-6
        return parameters

    monkeypatch.setattr(checkpoint_contents, "load_parameters", changed)
    with pytest.raises(ReplayMismatchError, match="All steps are equal, but 1 of"):
        pl.RecordedRun(locked).replay()


@pytest.mark.parametrize("mine", [float("nan"), 0.5])
@pytest.mark.parametrize("theirs", [float("nan"), float("inf"), 0.5])
def test_checkpoints_of_diverged_runs_are_compared(locked, monkeypatch, mine, theirs):
    from paceline.records import checkpoint_contents, checkpoint_files

    recorded = pl.RecordedRun(locked)
    checkpoint = checkpoint_files.newest(locked / "checkpoint")
    parameters = checkpoint_contents.load_parameters(checkpoint)
    simulation = TaskReplay(recorded, parameters.version)
    simulation.kept[None] = parameters.x.clone()
    simulation.kept[None][3], parameters.x[3] = mine, theirs
    monkeypatch.setattr(checkpoint_contents, "load_parameters", lambda _: parameters)
    if mine == theirs or (math.isnan(mine) and math.isnan(theirs)):
        assert simulation.compare_with(checkpoint)
    else:
        with pytest.raises(ReplayMismatchError, match=r"1 of 208 parameters differ .* at most inf"):
            simulation.compare_with(checkpoint)


def test_a_checkpoint_of_another_model_is_not_equal(locked, monkeypatch):
    from paceline.records import checkpoint_contents

    parameters = checkpoint_contents.load_parameters(next((locked / "checkpoint").iterdir()))
    parameters = dataclasses.replace(parameters, x=parameters.x[:-1])
    monkeypatch.setattr(checkpoint_contents, "load_parameters", lambda _: parameters)
    with pytest.raises(ReplayMismatchError, match=r"the model has 208 parameters, and .* has 207"):
        pl.RecordedRun(locked).replay()


def test_an_update_is_that_of_its_record(locked):
    recorded = pl.RecordedRun(locked)
    update = recorded.at(20)
    (step,) = update.steps
    rows = pl.RunData.load(locked).records[step["worker"]]
    (row,) = rows[rows["applied_version"] == 20]
    assert (step["step"], step["batch"], step["loss"]) == (row["step"], row["batch"], row["loss"])
    assert step["staleness"] == 19 - row["read_version"]
    assert (
        step["samples"].tolist()
        == recorded.config.plan(TensorDataset(torch.zeros(240))).indices(int(row["batch"])).tolist()
    )
    before = torch.cat([one.detach().flatten().clone() for one in recorded.at(19).model.parameters()])
    after = torch.cat([one.detach().flatten() for one in update.model.parameters()])
    assert step["gradient"].norm() > 0
    assert not torch.equal(before, after)


def test_bisection_finds_the_first_update(locked):
    recorded = pl.RecordedRun(locked)
    norms = {}

    def norm(model):
        return float(torch.cat([one.detach().flatten() for one in model.parameters()]).norm())

    versions = range(1, recorded.updates + 1)
    for version in (30, 31):
        norms[version] = norm(recorded.at(version).model)
    tried = []
    bound = norms[31]
    update = recorded.first(lambda model: norm(model) >= bound, told=lambda version, answer: tried.append(version))
    assert update is not None
    assert norm(update.model) >= bound
    assert update.version == 1 or norm(recorded.at(update.version - 1).model) < bound
    assert len(tried) <= 1 + int(np.ceil(np.log2(len(versions))))
    assert recorded.first(lambda model: False) is None


@pytest.mark.parametrize(
    ("algorithm", "why"),
    [
        ("hogwild", "single elements"),
        ("leashed(persistence=2)", "dropped"),
        ("locked(step_size=tail)", "numbers of late updates"),
        ("parameter-server(mode=sync(backups=auto))", "number of backup workers followed"),
        ("parameter-server(mode=async(rate=rescaled))", "weights followed"),
        ("parameter-server(mode=rennala)", "waited"),
        ("all-reduce(shares=auto)", "speeds"),
        ("da-sgd(delay=auto)", "speeds"),
        ("diloco(delay=auto)", "speeds"),
    ],
)
def test_what_records_do_not_have_is_refused(locked, algorithm, why, tmp_path):
    run = pl.RunData.load(locked)
    run.config["algorithm"] = algorithm
    run.save(tmp_path / "run")
    with pytest.raises(pl.UsageError, match=rf"cannot be replayed: with {re.escape(algorithm.split('(')[0])}.*{why}"):
        pl.RecordedRun(tmp_path / "run")


def test_a_lone_worker_has_no_order_to_record(tmp_path, task):
    folder = trained(tmp_path / "run", task, "hogwild", workers=1)
    assert pl.RecordedRun(folder).replay().checkpoint is not None


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("layout", "tensor(line=3)", "layouts"),
        ("optimizer_state", "shared", "optimizer state"),
        ("inject_staleness", 3, "injected staleness"),
    ],
)
def test_what_replays_do_not_support_is_refused(locked, name, value, why, tmp_path):
    run = pl.RunData.load(locked)
    run.config[name] = value
    run.save(tmp_path / "run")
    with pytest.raises(pl.UsageError, match=f"replays do not support {why}"):
        pl.RecordedRun(tmp_path / "run")


def drop_last_row(records, version):
    worker = worker_of(records, version)
    records[worker] = records[worker][:-1]


def end_before(records, version):
    for worker, rows in records.items():
        records[worker] = rows[rows["applied_version"] < version]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda records: drop_last_row(records, 9), "has no record|lacks records"),
        (lambda records: end_before(records, 40), "lacks records of steps"),
        (lambda records: records[worker_of(records, 9)]["step"].__iadd__(1), "lacks records of steps"),
        (lambda records: records.clear(), "no updates"),
    ],
)
def test_missing_records_are_refused(locked, change, why):
    with pytest.raises(pl.UsageError, match=why):
        pl.RecordedRun(change_records(locked, change))


def test_missing_records_of_rounds_are_refused(tmp_path, task):
    folder = trained(tmp_path / "run", task, "local-sgd")
    events = folder / "events-1.jsonl"
    events.write_text("".join(events.read_text().splitlines(keepends=True)[:-4]))
    with pytest.raises(pl.UsageError, match="lacks records of steps"):
        pl.RecordedRun(folder)


def test_a_half_written_update_is_refused(locked, tmp_path):
    run = pl.RunData.load(locked)
    run.result["torn_updates"] = 1
    run.save(tmp_path / "run")
    with pytest.raises(pl.UsageError, match="killed while it wrote an update"):
        pl.RecordedRun(tmp_path / "run")


def test_more_restarts_than_the_run_had_are_refused(locked):
    def change(records):
        records[0]["incarnation"][-1] = 10**9

    with pytest.raises(pl.UsageError, match="more restarts"):
        pl.RecordedRun(change_records(locked, change))


@pytest.mark.parametrize("algorithm", ["parameter-server(mode=async)", "lockstep", "leashed", "local-sgd"])
def test_sparse_gradients_are_replayed(tmp_path, algorithm):
    """Under plain SGD, workers that step by themselves add a row's gradients one by one, and servers their sum."""
    task = write_task(tmp_path, SPARSE_TASK)
    folder = trained(tmp_path / "run", task, algorithm, momentum=None, workers=2, steps=4)
    recorded = pl.RecordedRun(folder)
    assert recorded.replay().checkpoint is not None
    if algorithm == "leashed":
        (step,) = recorded.at(2).steps
        change = flat(recorded.at(2).model) - flat(recorded.at(1).model)
        assert float(change.norm()) == pytest.approx(float(3.0 * step["gradient"].norm()), rel=1e-3)  # the task's rate


def flat(model):
    return torch.cat([one.detach().flatten().clone() for one in model.parameters()])


def test_a_run_without_a_result_is_refused(locked):
    (locked / "result.json").rename(locked / "kept.json")
    refused = cli(locked)
    (locked / "kept.json").rename(locked / "result.json")
    assert refused.exit_code == 2
    assert "it has not ended, as it has no result.json: resume it first" in " ".join(refused.stderr.split())


def test_other_runs_are_refused(tmp_path, task):
    run = pl.simulate_task(pl.TrainConfig(task=task, algorithm="locked", workers=2, steps=3))
    run.save(tmp_path / "simulated")
    with pytest.raises(pl.UsageError, match="only finished runs of paceline train"):
        pl.RecordedRun(tmp_path / "simulated")


def test_a_target_ends_the_replay_where_it_ended_the_run(tmp_path, task):
    for algorithm in ("locked", "all-reduce"):
        folder = trained(tmp_path / algorithm, task, algorithm, epochs=50, target_loss=0.6)
        assert pl.RunData.load(folder).result["outcome"] == "converged"
        assert pl.RecordedRun(folder).replay().checkpoint is not None


def cli(*words):
    return CliRunner().invoke(app, ["replay", *map(str, words)])


def test_the_command_line_compares_and_shows_an_update(locked, tmp_path):
    whole = json.loads(cli(locked, "--json").stdout)
    assert whole["equal"]
    assert whole["updates"] == whole["checkpoint"] == pl.RunData.load(locked).result["steps"]
    saved = tmp_path / "update.pt"
    shown = cli(locked, "--until", 20, "--save", saved)
    assert "Update 20 of 60" in shown.stdout
    content = torch.load(saved)
    assert content["version"] == 20
    assert f"gradient norm {content['steps'][0]['gradient'].norm():.4g}" in shown.stdout
    refused = cli(locked, "--until", 20, "--save", tmp_path / "missing" / "update.pt")
    assert refused.exit_code == 2
    assert "make it first" in refused.stderr


def test_the_command_line_bisects(locked, tmp_path):
    check = tmp_path / "check.py"
    check.write_text(
        "def grown(model):\n    return model[0].weight.abs().sum() > 0\n\n\ndef never(model):\n    return False\n"
    )
    found = json.loads(cli(locked, "--bisect", f"{check}:grown", "--json").stdout)
    assert found["version"] == 1
    never = cli(locked, "--bisect", f"{check}:never")
    assert never.exit_code == 2
    assert "false after the run's last update" in never.stderr


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--until", 0), "updates 1 to 60"),
        (("--until", 2, "--bisect", "a.py:f"), "not both"),
        (("--save", "a.pt"), "--save needs an update"),
        (("--bisect", "check"), "does not name a function"),
    ],
)
def test_wrong_options_give_one_sentence(locked, words, why):
    result = cli(locked, *words)
    assert result.exit_code == 2
    assert why in result.stderr


def test_a_difference_is_reported_with_exit_code_1(locked):
    result = cli(change_records(locked, change_loss), "--json")
    assert result.exit_code == 1
    assert not json.loads(result.stdout)["equal"]
    assert "differs from the run at" in result.stderr


@pytest.fixture
def moved(locked, task, tmp_path):
    """A copy of the run, and of its task's file, which can be changed."""
    path = tmp_path / "signs.py"
    path.write_text(TASK)

    def change(run):
        run.config["task"] = f"{path}:task"

    return rewrite(locked, change), path


def test_a_changed_script_is_named(moved):
    folder, path = moved
    path.write_text(TASK.replace("nn.ReLU()", "nn.Tanh()"))
    result = cli(folder)
    assert result.exit_code == 1
    assert "signs.py has changed since the run" in result.stderr
    assert "differs from the run at the gradient of update 1" in result.stderr
    path.write_text(f"{TASK}\n# a comment\n")
    result = cli(folder)
    assert result.exit_code == 0
    assert "signs.py has changed since the run" in result.stderr


@pytest.mark.parametrize(("now", "samples"), [("randn(200", "200"), ("randn(240, 6) + torch.randn(240", "240")])
def test_another_training_set_is_refused(moved, now, samples):
    folder, path = moved
    path.write_text(TASK.replace("randn(240", now))
    result = cli(folder)
    assert result.exit_code == 2
    assert f"its training set (240 samples) differs from this one ({samples} samples)" in result.stderr


@pytest.mark.parametrize(
    "lost",
    [
        lambda path: path.unlink(),
        lambda path: path.write_text(TASK.replace("x = torch.randn", "x = open(folder / 'x.npy'); torch.randn")),
        lambda path: path.write_text(TASK.replace("def model", "def other")),
    ],
)
def test_missing_data_and_scripts_are_refused(moved, lost):
    folder, path = moved
    lost(path)
    result = cli(folder)
    assert result.exit_code == 2
    assert "Traceback" not in result.stderr
    assert "signs.py" in result.stderr


@pytest.mark.parametrize(
    ("where", "name", "told"),
    [
        ("versions", "paceline", "paceline 0.0.1"),
        ("versions", "torch", "torch 0.0.1"),
        ("machine", "processor", "processor 0.0.1"),
    ],
)
def test_other_versions_and_machines_are_named(locked, where, name, told):
    def change(run):
        run.result[where][name] = "0.0.1"

    result = cli(rewrite(locked, change))
    assert result.exit_code == 0
    assert f"The run was made with {told}, and this is " in " ".join(result.stderr.split())
