"""Worker processes begin with worker 0's state, and one that replaces a dead one with the run's."""

from functools import partial

import pytest

import paceline as pl
from loops import unseeded


@pytest.mark.parametrize("algorithm", ["all-reduce", "hogwild"])
def test_processes_begin_with_worker_0s_model(algorithm, tmp_path):
    pl.launch(partial(unseeded.loop, tmp_path), workers=2, algorithm=algorithm)
    found = unseeded.begun(tmp_path)
    assert found.keys() == {"0-0", "1-0"}
    check(found)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_replaced_worker_begins_with_what_the_run_began_with(victim, tmp_path):
    run = pl.launch(
        partial(unseeded.loop, tmp_path, victim=victim),
        workers=2,
        algorithm="hogwild",
        restarts=1,
        out=tmp_path / "run",
    )
    assert run.result["restarts"] == 1
    found = unseeded.begun(tmp_path)
    assert f"{victim}-1" in found
    check(found)
    first = found["0-0"][0]["features.weight"]
    assert run.evaluations[-1]["test_loss"] == pytest.approx(sum(first).real, rel=1e-4), "so does who evaluates"


def check(found):
    first, _ = found["0-0"]
    for name, (own, begun) in found.items():
        assert name == "0-0" or own["features.weight"] != first["features.weight"]
        assert begun == {what: value for what, value in first.items() if what in begun}, name
