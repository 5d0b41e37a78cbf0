"""A run that made no update, or whose workers have all died, is no success; one that was stopped, or had nothing left, is."""

import pytest
import torch

import paceline as pl
from loops import families
from loops.coder import batches, loss_of, made

NONE = "have ended without an update"


def given(data):
    def loop():
        model, optimizer = made()
        with pl.attach(model, optimizer) as worker:
            for x in worker.batches(data) if data else []:
                optimizer.zero_grad()
                loss_of(model, x).backward()
                optimizer.step()

    return loop


@pytest.mark.parametrize("algorithm", families.ALL)
def test_loops_without_a_batch(algorithm, tmp_path):
    with pytest.raises(pl.PacelineError, match=NONE):
        pl.launch(given([]), workers=2, algorithm=algorithm, backend="threads", out=tmp_path / "run")
    assert pl.RunData.load(tmp_path / "run").result["outcome"] == "crashed"
    with pytest.raises(pl.PacelineError, match=NONE):
        pl.simulate(given([]), workers=2, algorithm=algorithm)


def test_a_run_that_is_resumed_after_its_end(tmp_path):
    data = torch.utils.data.DataLoader(torch.cat(batches(4)), batch_size=4)
    first = pl.launch(given(data), workers=2, algorithm="hogwild", backend="threads", out=tmp_path / "run")
    again = pl.launch(given(data), workers=2, algorithm="hogwild", backend="threads", resume=tmp_path / "run")
    assert again.result["outcome"] == "stopped"
    assert again.result["steps"] == first.result["steps"] == 4


def test_a_run_that_is_stopped_before_its_first_update():
    simulated = pl.simulate(given(batches(4)), workers=2, algorithm="hogwild", limit_s=1e-9)
    assert (simulated.result["outcome"], simulated.result["steps"]) == ("stopped", 0)


@pytest.mark.parametrize("algorithm", ["hogwild", "ad-psgd"])
def test_simulated_workers_that_are_all_killed(algorithm):
    faults = pl.Faults().kill(worker=0, step=2).kill(worker=1, step=3)
    with pytest.raises(pl.WorkerLostError, match="no worker is left"):
        pl.simulate(given(batches(40)), workers=2, algorithm=algorithm, faults=faults)
    run = pl.simulate(given(batches(40)), workers=2, algorithm=algorithm, faults=pl.Faults().kill(worker=0, step=2))
    assert run.result["outcome"] == "stopped"
