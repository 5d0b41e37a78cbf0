"""Replays of one's own loop in real processes."""

import importlib
import json
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import paceline as pl
from paceline.cli.app import app
from paceline.optim.flat import FlatBinding
from paceline.specs.file_loop import load_loop
from processes import replay_programs as programs

SHARED = ["locked", "locked(kind=rwlock)", "leashed"]
SERVED = [
    "parameter-server(mode=async)",
    "parameter-server(mode=async,shards=2)",
    "parameter-server(mode=bounded(clock_bound=1))",
]
SERVED += ["parameter-server", "downpour(push=2,fetch=2)", "downpour", "adaptive-revision"]
ROUNDS = ["lockstep", "all-reduce", "local-sgd(period=3)", "da-sgd", "diloco(period=3)", "d-psgd"]
GOSSIP = ["ad-psgd"]


def launched(folder, algorithm, train=programs.plain, workers=2, **named):
    return pl.launch(train, workers=workers, algorithm=algorithm, out=folder, **named)


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory):
    """The folder of a run of `programs.plain` under an algorithm, which tests share: replays leave it as it is."""
    folders = {}

    def of(algorithm):
        if algorithm not in folders:
            folders[algorithm] = tmp_path_factory.mktemp("plain") / "run"
            launched(folders[algorithm], algorithm)
        return folders[algorithm]

    return of


@pytest.mark.parametrize("algorithm", [*SHARED, *SERVED, *ROUNDS, *GOSSIP])
def test_equal_bit_for_bit(plain_run, algorithm):
    run = pl.RunData.load(plain_run(algorithm))
    assert (run.result["replayable"], run.result["replayable_reason"]) == (True, "")
    replayed = pl.replay(plain_run(algorithm), programs.plain)
    assert replayed.steps == sum(map(len, run.records.values()))
    assert replayed.checkpoint is not None


def test_a_lone_worker(tmp_path):
    launched(tmp_path / "run", "sequential", workers=1)
    assert pl.replay(tmp_path / "run", programs.plain).checkpoint is not None


@pytest.mark.parametrize("algorithm", ["leashed", "downpour(push=2,fetch=2)", "all-reduce", "ad-psgd"])
@pytest.mark.parametrize(
    "train",
    [programs.reports_late, programs.fetches_own, programs.loads_in_processes, programs.keeps_loading_in_processes],
)
def test_habits_of_loops(tmp_path, algorithm, train):
    launched(tmp_path / "run", algorithm, train)
    assert pl.replay(tmp_path / "run", train).checkpoint is not None


@pytest.mark.parametrize("algorithm", ["leashed", "parameter-server(mode=async)", "all-reduce", "ad-psgd"])
def test_a_run_that_its_goal_ended(tmp_path, algorithm):
    run = launched(tmp_path / "run", algorithm, programs.longer, limit_samples=programs.SAMPLES)
    assert run.result["replayable"], run.result["replayable_reason"]
    assert run.result["samples"] < 1000 * programs.SAMPLES, "which the loop would train on"
    assert pl.replay(tmp_path / "run", programs.longer).checkpoint is not None


@pytest.mark.parametrize("algorithm", ["leashed", "all-reduce"])
def test_a_longer_loop_is_found_if_the_limit_came_after_the_end(tmp_path, algorithm):
    run = launched(tmp_path / "run", algorithm, limit_samples=2 * programs.SAMPLES + 1)
    assert run.result["samples"] == 2 * programs.SAMPLES
    assert pl.replay(tmp_path / "run", programs.plain).checkpoint is not None
    with pytest.raises(pl.ReplayMismatchError):
        pl.replay(tmp_path / "run", programs.longer)


@pytest.mark.parametrize("algorithm", ["leashed", "parameter-server(mode=async)"])
@pytest.mark.parametrize("train", [programs.diverges, programs.diverges_early])
def test_a_run_that_diverged(tmp_path, algorithm, train):
    run = launched(tmp_path / "run", algorithm, train)
    assert run.result["outcome"] == "diverged"
    assert pl.replay(tmp_path / "run", train).steps == sum(map(len, run.records.values()))


def test_steps_that_are_cut_off_are_not_compared(tmp_path):
    """Such a loop would still have reported its loss."""
    launched(tmp_path / "run", "ad-psgd", programs.reports_late)
    recorded = pl.RecordedRun(tmp_path / "run", train=programs.reports_late)
    for version in range(1, recorded.updates + 1):
        assert recorded.at(version).version == version
    with pytest.raises(pl.ReplayMismatchError) as caught:
        pl.replay(tmp_path / "run", programs.faster_late)
    assert "nan" not in str(caught.value)


def test_a_worker_that_ends_early_is_found(plain_run):
    with pytest.raises(pl.ReplayMismatchError, match=r"ended before step \d+ of worker \d"):
        pl.replay(plain_run("all-reduce"), programs.leaves)


@pytest.mark.parametrize("algorithm", ["leashed", "parameter-server(mode=async)", "all-reduce", "ad-psgd"])
@pytest.mark.parametrize(
    "changed", [programs.faster, programs.reordered, programs.swapped, programs.longer, programs.shorter]
)
def test_a_changed_loop_is_found(plain_run, algorithm, changed):
    with pytest.raises(pl.PacelineError) as caught:
        pl.replay(plain_run(algorithm), changed)
    if changed in (programs.faster, programs.reordered, programs.swapped):
        assert re.search(r"at the gradient of update \d+, step \d+ of worker \d: loss", str(caught.value))


@pytest.mark.parametrize("algorithm", ["leashed", "parameter-server(mode=async,shards=2)", "lockstep", "ad-psgd"])
def test_the_state_at_an_update(tmp_path, algorithm):
    """Its loss is that of the batch at the parameters which the gradient was computed at."""
    launched(tmp_path / "run", algorithm, programs.without_dropout)
    recorded = pl.RecordedRun(tmp_path / "run", train=programs.without_dropout)
    update = recorded.at(11)
    assert update.version == 11
    assert len(update.steps) == (2 if algorithm == "lockstep" else 1)
    x, y = programs.data().tensors
    for step in update.steps:
        assert len(step["samples"]) == programs.BATCH_SIZE
        if algorithm == "ad-psgd" or not step["read_version"]:  # versions of the worker's own model count averages
            continue
        model = recorded.at(step["read_version"]).model
        if algorithm == "parameter-server(mode=async,shards=2)":  # shards may have been read at other versions
            continue
        model.zero_grad()  # the replayed loop may have left gradients
        loss = nn.functional.cross_entropy(model(x[step["samples"]]), y[step["samples"]])
        loss.backward()
        assert loss.item() == step["loss"]
        binding = FlatBinding(model.parameters())
        binding.gather_gradients(gradient := binding.zeros())
        assert torch.equal(gradient, step["gradient"])


def test_bisection(plain_run):
    recorded = pl.replay(plain_run("leashed"), programs.plain)

    def parameters(model):
        return nn.utils.parameters_to_vector(model.parameters()).detach().clone()

    late = [parameters(recorded.at(version).model) for version in range(17, recorded.updates + 1)]
    update = recorded.first(lambda model: any(torch.equal(parameters(model), one) for one in late))
    assert update is not None
    assert update.version == 17


def test_random_numbers_without_seeds_are_found(tmp_path):
    launched(tmp_path / "run", "leashed", programs.draws)
    with pytest.raises(pl.ReplayMismatchError, match=r"step 1 of worker \d: loss") as caught:
        pl.replay(tmp_path / "run", programs.draws)
    assert caught.value.worker_id in (0, 1)


def refused(folder, train=programs.plain):
    with pytest.raises(pl.UsageError, match="cannot be replayed") as caught:
        pl.replay(folder, train)
    result = pl.RunData.load(folder).result
    assert not result["replayable"]
    assert result["replayable_reason"][1:] in str(caught.value)
    return str(caught.value)


def test_accumulated_gradients_are_refused_where_workers_claim_batches(tmp_path):
    launched(tmp_path / "run", "leashed", programs.accumulates)
    assert "accumulated gradients" in refused(tmp_path / "run", programs.accumulates)


def test_accumulated_gradients_in_rounds(tmp_path):
    launched(tmp_path / "run", "all-reduce", programs.accumulates)
    assert pl.replay(tmp_path / "run", programs.accumulates).checkpoint is not None


def test_torn_reads_are_refused(tmp_path):
    launched(tmp_path / "run", "hogwild")
    assert "hogwild" in refused(tmp_path / "run")


def repeated(folder, program, algorithm, *lost, replaced=(), **named):
    """Replays a run that has lost these workers, and in which these processes trained besides the first ones."""
    run = launched(folder, algorithm, program, workers=3, **named)
    made = {(worker, n) for worker, rows in run.records.items() for n in rows["incarnation"].tolist() if n}
    assert (sorted(run.result["workers_lost"]), made) == (sorted(lost), {*replaced})
    assert run.result["replayable"], run.result["replayable_reason"]
    replayed = pl.replay(folder, program)
    assert replayed.steps == sum(map(len, run.records.values()))
    assert replayed.checkpoint is not None


@pytest.mark.parametrize(
    ("algorithm", "how"), [*((one, {}) for one in ROUNDS), ("all-reduce", {"ends": True}), ("d-psgd", {"processes": 1})]
)
def test_others_go_on_in_rounds(tmp_path, algorithm, how):
    repeated(tmp_path / "run", programs.Killed(tmp_path / "run", {(1, 0): 9}, **how), algorithm, 1)


@pytest.mark.parametrize("program", [programs.dies_after_its_last_batch, programs.dies_after_its_loop])
@pytest.mark.parametrize("algorithm", ["all-reduce", "diloco(period=3)", "d-psgd"])
def test_a_death_after_the_last_round(tmp_path, algorithm, program):
    repeated(tmp_path / "run", program, algorithm, 1)


@pytest.mark.parametrize("algorithm", ["all-reduce", "d-psgd"])
def test_sums_with_and_without_a_dead_worker(tmp_path, algorithm):
    repeated(tmp_path / "run", programs.Killed(tmp_path / "run", {(0, 0): 9}, sums=True), algorithm, 0)


@pytest.mark.parametrize("algorithm", ["lockstep", "diloco(period=3)"])
def test_others_wait_for_replacements_in_rounds(tmp_path, algorithm):
    """One dies again, another one is the first of the others."""
    program = programs.Killed(tmp_path / "run", {(1, 0): 4, (1, 1): 3, (0, 0): 9}, sums=True)
    replaced = [(0, 1), (1, 1), (1, 2)]
    repeated(tmp_path / "run", program, algorithm, 0, 1, 1, replaced=replaced, restarts=3, min_workers=3)


@pytest.mark.parametrize("algorithm", ["all-reduce", "local-sgd(period=3)", "d-psgd"])
def test_others_train_until_the_replacement_comes(tmp_path, algorithm):
    """It is in a later epoch."""
    program = programs.Killed(tmp_path / "run", {(1, 0): 4}, epochs=25, sums=True)
    repeated(tmp_path / "run", program, algorithm, 1, replaced=[(1, 1)], restarts=1)


def test_a_dead_worker_is_refused(tmp_path):
    launched(tmp_path / "run", "leashed", programs.dies)
    assert "runs with dead workers" in refused(tmp_path / "run")


def test_a_resumed_run_is_refused(tmp_path):
    launched(tmp_path / "run", "leashed", programs.shorter)
    launched(None, "leashed", programs.plain, resume=tmp_path / "run")
    assert "resumed runs" in refused(tmp_path / "run")


def test_a_run_needs_its_own_loop(tmp_path):
    launched(tmp_path / "loop", "leashed")
    with pytest.raises(pl.UsageError, match=r'paceline\.replay\(".*loop", plain\)'):
        pl.replay(tmp_path / "loop")
    pl.train(pl.TrainConfig(epochs=0.1), out=tmp_path / "task")
    with pytest.raises(pl.UsageError, match="leave out your function"):
        pl.replay(tmp_path / "task", programs.plain)


def test_a_function_that_never_attaches_is_refused(plain_run):
    with pytest.raises(pl.UsageError, match=r"never called paceline\.attach"):
        pl.replay(plain_run("leashed"), lambda: None)


def test_another_algorithm_is_refused(plain_run):
    with pytest.raises(pl.UsageError, match="all-reduce"):
        pl.replay(plain_run("leashed"), programs.names_another)


def test_wrong_arguments_are_refused(tmp_path):
    launched(tmp_path / "run", "leashed", partial(programs.trained, dropout=0.0))
    recorded = pl.RecordedRun(tmp_path / "run", train=partial(programs.trained, dropout=0.0))
    assert recorded.warnings() == ()
    with pytest.raises(pl.UsageError, match=r"updates 1 to 40, not 1\.5"):
        recorded.at(1.5)
    with pytest.raises(pl.UsageError, match="not 'train'"):
        pl.replay(tmp_path / "run", "train")
    with pytest.raises(pl.UsageError, match="leave it out"):
        pl.replay(tmp_path / "run", programs.plain, data=tmp_path)


def test_threads(tmp_path):
    launched(tmp_path / "run", "parameter-server(mode=async)", programs.without_dropout, backend="threads")
    assert pl.replay(tmp_path / "run", programs.without_dropout).checkpoint is not None


def test_a_difference_names_a_changed_script(tmp_path, monkeypatch):
    path = tmp_path / "loops_of_mine.py"
    path.write_text(Path(programs.__file__).read_text())
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("loops_of_mine")
    launched(tmp_path / "run", "leashed", module.plain)
    assert pl.replay(tmp_path / "run", module.plain).warnings == ()
    path.write_text(path.read_text().replace("learning_rate=0.05,", "learning_rate=0.0625,"))
    module = importlib.reload(module)
    with pytest.raises(pl.ReplayMismatchError, match=r"at the gradient of update .* has changed since the run"):
        pl.replay(tmp_path / "run", module.plain)
    assert "has changed" in pl.RecordedRun(tmp_path / "run", train=module.plain).warnings()[0]


def test_the_command_finds_the_function_of_a_file(tmp_path):
    path = tmp_path / "loops_of_mine.py"
    path.write_text(Path(programs.__file__).read_text())
    run, runner = str(tmp_path / "run"), CliRunner()
    launched(run, "leashed", load_loop(f"{path}:plain"))
    shown = runner.invoke(app, ["replay", run])
    assert "Equal, bit for bit: 40 updates" in shown.output, shown.output
    shown = runner.invoke(app, ["replay", run, "--until", "11", "--json"])
    (step,) = json.loads(shown.stdout.splitlines()[-1])["steps"]
    assert len(step["samples"]) == programs.BATCH_SIZE
    path.write_text(path.read_text().replace("learning_rate=0.05,", "learning_rate=0.0625,"))
    shown = runner.invoke(app, ["replay", run])
    assert shown.exit_code == 1
    assert "The replay differs from the run at the gradient of update" in shown.output
    assert "has changed since the run" in shown.output
    path.unlink()
    shown = runner.invoke(app, ["replay", run])
    assert shown.exit_code == 2
    assert "replay it in Python, with paceline.replay" in shown.output


def test_the_command_shows_updates_of_a_loop_without_a_sampler(tmp_path):
    path = tmp_path / "loops_of_mine.py"
    path.write_text(Path(programs.__file__).read_text())
    launched(tmp_path / "run", "leashed", load_loop(f"{path}:fetches_own"))
    shown = CliRunner().invoke(app, ["replay", str(tmp_path / "run"), "--until", "3"])
    assert "Update 3 of" in shown.output, shown.output
    assert "samples" not in shown.output
