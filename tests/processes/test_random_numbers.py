"""Real workers that seed alike and draw for themselves, however they were started."""

import os
from functools import partial

import pytest

import forked
import paceline as pl
from processes import drawing
from processes.drawing import STEPS, drawn


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    drawing.loop(folder)
    return drawn(folder)["0-0"]


def check(folder, alone, number):
    found = drawn(folder)
    batches = [total for seen, _ in found.values() for total in seen]
    assert len(set(batches)) == len(batches) == number
    assert len({last for _, last in found.values()}) == len(found)
    assert found["0-0"] == alone


def test_launched_workers_and_the_successor_of_a_killed_one(tmp_path, alone):
    run = pl.launch(partial(drawing.loop, tmp_path, dies_at=4), workers=2, algorithm="hogwild", restarts=1)
    assert run.result["workers_lost"] == [1]
    assert set(drawn(tmp_path)) == {"0-0", "1-0", "1-1"}
    check(tmp_path, alone, 4 + 2 * STEPS)


@pytest.mark.filterwarnings("ignore:All 2 workers had the same inputs")  # if one seeds it after the other's last draw
def test_threads_share_one_generator_which_stays(tmp_path):
    states = []

    def program():
        states.append(drawing.loop(tmp_path)._membership.random_states)

    pl.launch(program, workers=2, algorithm="hogwild", backend="threads")
    assert states == [(), ()]


def test_workers_of_torchrun(tmp_path, alone):
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", drawing.__file__, tmp_path]
    done = forked.run(words, environment={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    check(tmp_path, alone, 3 * STEPS)


def test_workers_that_join(tmp_path, alone):
    words = ["-m", "paceline", "launch", "--workers", "2", "--algorithm", "ad-psgd", "--", drawing.__file__, tmp_path]
    done = forked.run(words, tmp_path)
    assert done.returncode == 0, done.stderr
    check(tmp_path, alone, 2 * STEPS)
