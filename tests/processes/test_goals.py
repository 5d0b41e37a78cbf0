"""Targets and limits of launched loops, and which process evaluates them."""

import time

import pytest
import torch

import forked
import paceline as pl
from contracts.runs import run_function
from processes.goal_programs import Loop, X

FOREVER = 100_000


@pytest.mark.parametrize(
    ("algorithm", "backend"),
    [("hogwild", "processes"), ("lockstep", "processes"), ("all-reduce", "threads"), ("ad-psgd", "threads")],
)
def test_a_run_ends_at_its_target_and_loops_go_on_after_it(algorithm, backend):
    loop = Loop(FOREVER)
    limit_s = forked.AGAINST_HANGS_S
    run = pl.launch(loop, workers=2, algorithm=algorithm, backend=backend, target_accuracy=0.9, limit_s=limit_s)
    result, evaluations = run.result, run.evaluations
    assert result["outcome"] == "converged"
    first = next(one for one in evaluations if one["test_accuracy"] >= 0.9)
    assert result["time_to_target_s"] == first["elapsed_s"]
    assert [one["elapsed_s"] for one in evaluations] == sorted(one["elapsed_s"] for one in evaluations)
    assert evaluations[-1]["samples"] == result["samples"]
    assert result["test_accuracy"] == evaluations[-1]["test_accuracy"]
    assert result["test_loss"] == 1.5
    assert first.keys() >= {"elapsed_s", "samples", "train_loss", "test_loss", "test_accuracy", "version"}
    if backend == "threads":
        assert sorted(loop.after) == [0, 1], "also those that waited for others"
    if algorithm == "all-reduce":
        assert torch.equal(loop.after[0], loop.seen[-1])


def test_the_mean_of_all_models_is_evaluated():
    loop = Loop(2)
    run, parameters = run_function(
        loop, workers=3, algorithm="local-sgd(period=1000)", backend="threads", limit_samples=100
    )
    assert run.result["consensus_distance"] > 1e-6
    at = 0
    for shape in [(8, 6), (8,), (1, 8), (1,)]:  # each begins at a multiple of 16 elements, the first at 16
        size = torch.Size(shape).numel()
        start = 16 + sum(-(-n // 16) * 16 for n in [48, 8, 8, 1][: [48, 8, 8, 1].index(size)]) if size != 8 else None
        if start is not None:
            evaluated = loop.seen[-1][at : at + size]
            assert torch.equal(evaluated, parameters.x[start : start + size])
        at += size


def test_evaluating_draws_no_random_number_of_the_worker():
    runs = [
        run_function(Loop(3, evaluate=kind), workers=1, algorithm="locked", evaluate_every_samples=30)
        for kind in (None, "right")
    ]
    assert not runs[0][0].evaluations
    assert len(runs[1][0].evaluations) >= 2
    assert torch.equal(runs[0][1].x, runs[1][1].x)


@pytest.mark.parametrize(("limit", "value"), [("limit_s", 0.2), ("limit_samples", 500)])
def test_limits(limit, value):
    begun_s = time.monotonic()
    run = pl.launch(Loop(FOREVER, evaluate=None), workers=2, algorithm="leashed", backend="threads", **{limit: value})
    took_s = time.monotonic() - begun_s - run.result["ready_after_s"]
    assert run.result["outcome"] == "stopped"
    assert run.config[limit] == value
    # Not to the last step's end: a busy machine may make none before the limit.
    assert (took_s if limit == "limit_s" else run.result["samples"]) >= value
    assert run.result["samples"] < 0.1 * FOREVER * len(X)


def test_a_target_loss():
    run = pl.launch(Loop(FOREVER, evaluate=None), workers=2, algorithm="locked", backend="threads", target_loss=0.4)
    assert run.result["outcome"] == "converged"
    assert run.result["train_loss"] < 0.45


def test_evaluations_end_with_worker_0_and_the_run_says_so(tmp_path):
    """Worker 1 trains until it has been said."""

    def tell(progress):
        if "Evaluations have ended" in (progress.message or ""):
            (tmp_path / "said").touch()

    loop = Loop(FOREVER, dies_at=20, until=tmp_path / "said")
    run = pl.launch(loop, workers=2, algorithm="hogwild", evaluate_every_samples=10, on_progress=tell)
    assert run.result["outcome"] == "stopped"
    assert run.result["workers_lost"] == [0]
    assert "Evaluations have ended with worker 0." in run.result["notes"]


def test_a_new_worker_0_goes_on_evaluating():
    loop = Loop(FOREVER, evaluate="incarnation", dies_at=20)
    run = pl.launch(loop, workers=2, algorithm="hogwild", restarts=1, evaluate_every_samples=10, target_accuracy=0.5)
    assert run.result["outcome"] == "converged"
    assert run.evaluations[-1]["samples"] == run.result["samples"]


def test_an_evaluation_that_fails_ends_the_run_with_its_traceback():
    with pytest.raises(pl.PacelineError, match=r"evaluate raised KeyError: 'no such label'(.|\n)*goal_programs\.py"):
        pl.launch(Loop(FOREVER, evaluate="raises"), workers=2, algorithm="hogwild", evaluate_every_samples=10)


def test_a_target_that_nobody_can_judge():
    with pytest.raises(pl.UsageError, match="give attach a function of the model"):
        pl.launch(Loop(evaluate=None), workers=2, algorithm="hogwild", backend="threads", target_accuracy=0.9)
