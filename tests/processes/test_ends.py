"""How runs end other than by reaching their last batch: errors, divergence, targets."""

import json
import time
from functools import partial

import numpy as np
import pytest

import paceline as pl
from paceline.memory.failpoints import ENVIRONMENT_VARIABLE
from paceline.run.config import TrainConfig
from processes import programs

BACKENDS = pytest.mark.parametrize("backend", ["processes", "threads"])
METHODS = ["lockstep", "locked", "hogwild", "leashed"]


@pytest.mark.parametrize(
    ("algorithm", "backend"),
    [("hogwild", "processes"), ("hogwild", "threads"), ("locked", "processes"), ("leashed", "threads")],
)
@pytest.mark.parametrize(
    ("train", "message"),
    [
        (programs.fails_before_attach, "ValueError: the data are not where I thought"),
        (programs.fails_in_the_middle, "KeyError: 'label 17'"),
        (programs.fails_in_the_optimizer, "ArithmeticError: no step today"),
    ],
)
def test_an_exception_in_the_users_function(train, message, algorithm, backend):
    with pytest.raises(pl.PacelineError) as raised:
        pl.launch(train, workers=2, algorithm=algorithm, backend=backend)
    text = str(raised.value)
    raised.value.__traceback__ = None  # it would hold the run
    assert message in text
    assert f"in {train.__name__}" in text
    assert "Worker " in text
    assert not isinstance(raised.value, pl.UsageError)


def test_a_function_that_leaves_python_before_attach_is_named_and_makes_no_run(tmp_path):
    with pytest.raises(pl.PacelineError, match="ended with exit code 2 before training began"):
        pl.launch(programs.exits_before_attach, workers=2, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("method", METHODS)
def test_a_task_that_diverges(method):
    run = pl.train(TrainConfig(algorithm=method, workers=2, learning_rate=1e30, epochs=100))
    assert run.result["outcome"] == "diverged"
    assert "at step" in run.result["outcome_reason"] or "at version" in run.result["outcome_reason"]


@pytest.mark.parametrize(
    ("method", "train"),
    [*((method, programs.diverges) for method in METHODS), ("lockstep", programs.diverges_silently),
     ("hogwild", programs.diverges_silently)],
)  # fmt: skip
def test_a_loop_that_diverges(method, train):
    run = pl.launch(train, workers=2, algorithm=method)
    assert run.result["outcome"] == "diverged"
    assert "at step" in run.result["outcome_reason"]


@pytest.mark.parametrize("method", ["locked", "hogwild", "leashed", "lockstep"])
def test_a_target_loss_ends_the_run(method):
    config = TrainConfig(algorithm=method, workers=2, epochs=1000, target_loss=0.5)
    run = pl.train(config)
    assert run.result["outcome"] == "converged"
    assert run.result["steps_to_target"] <= run.result["steps"] < 1000 * (90 if method == "lockstep" else 180)
    assert 0 < run.result["time_to_target_s"] <= run.result["wall_s"]


@pytest.mark.parametrize("method", ["locked", "lockstep"])
def test_a_target_accuracy_ends_the_run(method):
    run = pl.train(TrainConfig(algorithm=method, workers=2, epochs=1000, target_accuracy=0.9))
    assert run.result["outcome"] == "converged"
    assert run.result["steps"] < 1000 * (90 if method == "lockstep" else 180)
    assert max(one["test_accuracy"] for one in run.evaluations) >= 0.9


def test_a_target_that_is_not_reached():
    run = pl.train(TrainConfig(workers=2, epochs=1, target_accuracy=1.0))
    assert run.result["outcome"] == "stopped"
    assert run.result["time_to_target_s"] is None


@BACKENDS
@pytest.mark.parametrize(
    ("train", "algorithm", "workers", "parts"),
    [
        (programs.names_locked, "hogwild", 2, ["locked", "hogwild", "one place"]),
        (programs.two_shapes, "locked", 3, ["the same model"]),
        (programs.plain, "sequential", 2, ["sequential", "1 worker, not 2"]),
        (programs.plain, "locked", 0, ["workers must be 1 or more, not 0"]),
    ],
)
def test_what_cannot_be_launched(train, algorithm, workers, parts, backend):
    begun_s = time.monotonic()
    with pytest.raises(pl.UsageError) as raised:
        pl.launch(train, workers=workers, algorithm=algorithm, backend=backend)
    text = str(raised.value)
    raised.value.__traceback__ = None
    assert [part for part in parts if part not in text] == []
    assert time.monotonic() - begun_s < 200, "that is not at once; a worker that waited would do so for 300 s"


def test_a_lambda_cannot_be_sent():
    with pytest.raises(pl.UsageError, match="top level of a module") as raised:
        pl.launch(lambda: None, workers=2, algorithm="hogwild")
    raised.value.__traceback__ = None


def test_unknown_backend_and_bad_fail_point(monkeypatch):
    with pytest.raises(pl.UsageError, match="processes or threads"):
        pl.launch(programs.plain, workers=2, backend="mpi")
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "nowhere@1#2")
    with pytest.raises(pl.UsageError, match="name@worker_id#hit") as raised:
        pl.launch(programs.plain, workers=2)
    raised.value.__traceback__ = None


def test_the_algorithm_may_be_named_in_attach():
    run = pl.launch(programs.names_lockstep, workers=2)
    assert run.result["algorithm"] == "lockstep"
    assert run.result["steps"] == run.result["version"] == 2 * 16
    assert run.result["staleness"]["max"] == 0


@BACKENDS
def test_a_function_may_return_what_it_likes(backend):
    run = pl.launch(programs.returns_its_model, workers=2, backend=backend)
    assert run.result["outcome"] == "stopped"


def test_a_function_that_never_attaches():
    with pytest.raises(pl.UsageError, match=r"never_attaches never called paceline.attach") as raised:
        pl.launch(programs.never_attaches, workers=2)
    raised.value.__traceback__ = None


@BACKENDS
@pytest.mark.parametrize(
    ("train", "message"), [(programs.exits, "SystemExit: 3"), (programs.is_interrupted_by_itself, "KeyboardInterrupt")]
)
def test_a_function_that_ends_with_a_base_exception(backend, train, message):
    with pytest.raises(pl.PacelineError, match=message) as raised:
        pl.launch(train, workers=2, algorithm="hogwild", backend=backend)
    raised.value.__traceback__ = None


@pytest.mark.parametrize(
    ("algorithm", "backend"),
    [
        ("hogwild", "processes"),
        ("all-reduce", "processes"),
        ("parameter-server(mode=async)", "processes"),
        ("hogwild", "threads"),
    ],
)
@pytest.mark.parametrize("train", [programs.exits_when_trained, programs.exits_while_training])
def test_sys_exit_ends_a_function_as_return_does(train, algorithm, backend):
    """In the middle of its loop, too."""
    run = pl.launch(train, workers=2, algorithm=algorithm, backend=backend)
    assert run.result["outcome"] == "stopped"
    assert run.result["workers_lost"] == []
    assert run.result["steps"] > 0


@BACKENDS
def test_a_lockstep_worker_that_ends_early_is_not_waited_for(backend):
    with pytest.raises(pl.WorkerLostError, match="worker 0 did not") as raised:
        pl.launch(programs.ends_early, workers=2, algorithm="lockstep", backend=backend)
    raised.value.__traceback__ = None


@BACKENDS
def test_a_checkpoint_of_another_model_is_refused_at_once(backend, tmp_path):
    """Also with several workers: those that wait for the first one's memory must not wait for ever."""
    pl.train(TrainConfig(workers=3, epochs=1), out=tmp_path)
    begun_s = time.monotonic()
    with pytest.raises(pl.UsageError, match="elements") as raised:
        pl.launch(programs.plain, workers=3, algorithm="hogwild", resume=tmp_path, out=tmp_path, backend=backend)
    raised.value.__traceback__ = None
    assert time.monotonic() - begun_s < 200, "that is not at once; a worker that waited would do so for 300 s"


@pytest.mark.parametrize("algorithm", ["lockstep", "all-reduce"])
def test_rounds_resume_with_more_or_fewer_workers(algorithm, tmp_path):
    pl.train(TrainConfig(algorithm=algorithm, workers=2, epochs=1), out=tmp_path)
    for epochs, workers in ((2, 3), (3, 1)):
        run = pl.train(TrainConfig(algorithm=algorithm, workers=workers, epochs=epochs), resume=tmp_path)
        assert run.result["samples"] == epochs * 1437
    assert run.result["version"] == 90 + 60 + 180


def test_resuming_with_more_or_fewer_workers(tmp_path):
    pl.train(TrainConfig(algorithm="locked", workers=2, epochs=1), out=tmp_path)
    more = pl.train(TrainConfig(algorithm="locked", workers=3, epochs=2), resume=tmp_path)
    assert more.result["version"] == 360
    fewer = pl.train(TrainConfig(algorithm="locked", workers=1, epochs=3), resume=tmp_path)
    assert fewer.result["version"] == 540
    versions = np.concatenate([rows["applied_version"] for rows in fewer.records.values()])
    assert sorted(versions) == list(range(1, 541))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"algorithm": "local-sgd"}, "the state of 2 workers, .* one for each of its 3: give it 2 workers"),
        ({"algorithm": "locked", "partition": "fixed"}, "with 2"),
    ],
)
def test_what_depends_on_the_number_of_workers_resumes_with_the_same(settings, words, tmp_path):
    pl.train(TrainConfig(workers=2, epochs=1, **settings), out=tmp_path)
    with pytest.raises(pl.UsageError, match=words) as raised:
        pl.train(TrainConfig(workers=3, epochs=2, **settings), resume=tmp_path)
    raised.value.__traceback__ = None
    same = pl.train(TrainConfig(workers=2, epochs=2, **settings), resume=tmp_path)
    assert same.result["outcome"] == "stopped"
    assert same.result["samples"] == 2 * 1437


@pytest.mark.parametrize("algorithm", ["lockstep", "all-reduce", "local-sgd", "d-psgd", "hogwild", "parameter-server"])
def test_a_run_whose_workers_have_all_died_is_no_success(algorithm, tmp_path):
    with pytest.raises(
        pl.PacelineError, match=r"Worker [01] ended with exit code [34]\..* no worker is left"
    ) as raised:
        pl.launch(programs.exits_in_the_middle, workers=2, algorithm=algorithm, out=tmp_path / "run")
    raised.value.__traceback__ = None
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["outcome"] == "crashed"
    assert result["workers_lost"] in ([0, 1], [1, 0])


def test_a_worker_that_is_stopped_for_less_than_the_deadline_is_waited_for():
    """Once, its connections counted as broken after 5 to 6 s, for any deadline."""
    run = pl.launch(partial(programs.is_stopped, 9), workers=3, algorithm="d-psgd(deadline_s=500.0)")
    assert (run.result["outcome"], run.result["steps"], run.result["workers_lost"]) == ("stopped", 32, [])


def test_a_worker_that_is_stopped_for_good_ends_the_run_and_is_named():
    with pytest.raises(pl.WorkerLostError, match=r"^Worker 1 stalled\. D-PSGD round \d: worker \d did not") as raised:
        pl.launch(programs.is_stopped, workers=3, algorithm="d-psgd(deadline_s=10.0)")
    raised.value.__traceback__ = None
