"""Loops as users write them: what they report, skip, break out of and do twice."""

from functools import partial

import numpy as np
import pytest
import torch

import paceline as pl
from loops import coder
from processes import programs


@pytest.mark.parametrize("algorithm", ["hogwild", "leashed", "lockstep"])
def test_a_loss_reported_after_the_step_belongs_to_that_step(algorithm):
    run = pl.launch(programs.reports_after_the_step, workers=2, algorithm=algorithm, backend="threads")
    losses = np.concatenate([rows["loss"] for rows in run.records.values()])
    assert len(losses) == 32
    assert np.isfinite(losses).all()
    assert run.result["train_loss"] is not None


@pytest.mark.parametrize("algorithm", ["hogwild", "hogwild(reads=copy)", "locked(kind=rwlock)", "leashed", "lockstep"])
def test_a_loop_may_skip_the_step_of_its_last_batch(algorithm):
    run = pl.launch(programs.skips_the_last_step, workers=1, algorithm=algorithm, backend="threads")
    assert run.result["steps"] == 31


def test_a_lockstep_loop_may_break_out_of_an_epoch():
    run = pl.launch(programs.breaks_out_of_epochs, workers=2, algorithm="lockstep", backend="threads")
    assert run.result["updates_per_worker"] == [15, 15]


@pytest.mark.parametrize(("algorithm", "backend"), [("lockstep", "threads"), ("all-reduce", "processes")])
def test_evaluations_of_a_closure_are_rounds_of_all_workers(algorithm, backend):
    run = pl.launch(programs.minimizes_by_a_line_search, workers=3, algorithm=algorithm, backend=backend)
    assert run.result["samples"] == 40


def test_unequal_evaluations_of_a_closure_end_the_run():
    with pytest.raises(pl.UsageError, match="decide by the closure's return value") as raised:
        pl.launch(programs.minimizes_unequally, workers=3, algorithm="all-reduce")
    raised.value.__traceback__ = None


def test_attaching_twice_in_one_launch_is_refused():
    with pytest.raises(pl.UsageError, match="call launch again for another training"):
        pl.launch(programs.attaches_twice, workers=1, algorithm="hogwild", backend="threads")


@pytest.mark.parametrize(
    "wrong", [{"workers": 0}, {"workers": 1, "backend": "fibers"}, {"workers": 1, "placement": "bind(node=977)"}]
)
def test_what_cannot_be_launched_writes_nothing(wrong, tmp_path):
    with pytest.raises(pl.UsageError):
        pl.launch(programs.plain, algorithm="hogwild", out=tmp_path / "run", **wrong)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("spec", ["constant(base=-1)", "exponential(cap=-3)", "linear(jitter=2)"])
def test_backoff_refuses_times_that_cannot_be(spec):
    with pytest.raises(pl.UsageError, match=r"must be|from 0 to 1"):
        pl.launch(programs.plain, workers=1, algorithm=f"leashed(backoff={spec})")


@pytest.mark.parametrize("algorithm", ["lockstep", "all-reduce", "d-psgd", "downpour(push=3, fetch=2)"])
def test_a_loop_that_calls_parts_of_its_model_trains_them(algorithm, tmp_path):
    run = pl.launch(partial(programs.calls_parts, str(tmp_path)), workers=2, algorithm=algorithm)
    assert run.result["samples"] == 2 * 20 * 4
    assert run.result["records_lost"] == 0
    for worker in range(2):
        assert coder.held_out_loss(torch.load(tmp_path / f"{worker}.pt")) < 0.9 * coder.held_out_loss(coder.initial())
