"""The processes of loaders of real workers: every sample once, whoever dies, and none of them is left behind."""

import contextlib
import json
import os
import signal
import textwrap
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

import forked
import leftovers
import paceline as pl
from free_ports import free_port
from processes.loader_programs import (
    BATCH_SIZE,
    SAMPLES,
    Breaks,
    Killed,
    Late,
    Loop,
    Paused,
    Stream,
    described,
    fails_at_17,
)
from processes.scripts import COMMAND, started

BATCHES = SAMPLES // BATCH_SIZE


def told(folder):
    """What each worker was given."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("[0-9].json"))]


def given(workers, epoch):
    return [about for one in workers for about in one["epochs"][epoch]]


def indices(batches):
    return sorted(index for about in batches for index in about["indices"])


def loading(folder):
    """The processes of all loaders so far."""
    return {int(path.name.removeprefix("loading-")) for path in folder.glob("loading-*")}


def wait_for_end_of(processes):
    assert processes
    leftovers.wait_until(lambda: not processes & leftovers.parents().keys(), "the end of the loaders")


def numbers_of(run):
    return [int(number) for rows in run.records.values() for number in rows["batch"] if number >= 0]


@pytest.mark.parametrize(
    ("algorithm", "seed"),
    [(one, None) for one in ("hogwild", "all-reduce", "d-psgd", "ad-psgd", "parameter-server(mode=async)")]
    + [("hogwild", 5), ("all-reduce", 5)],
)
def test_a_loaders_processes_fetch_every_sample_once(algorithm, seed, tmp_path):
    """With a function without a name, as a fork allows; whatever the loader's generator, no two processes draw the same."""
    settings = {"timeout": 60, "prefetch_factor": 3, "pin_memory": True}
    run = pl.launch(Loop(tmp_path, settings, seed=seed), workers=2, algorithm=algorithm)
    assert (run.result["outcome"], run.result["samples"]) == ("stopped", 2 * SAMPLES)
    assert sorted(numbers_of(run)) == list(range(2 * BATCHES))
    workers = told(tmp_path)
    for epoch in range(2):
        assert indices(given(workers, epoch)) == list(range(SAMPLES))
        seeds = {about["process"]: about["seed"] for about in given(workers, epoch)}
        assert not seeds.keys() & {one["process"] for one in workers}
        assert len({*seeds.values()}) == len(seeds), "their random numbers are their own"


def test_persistent_processes_last_until_the_loop_leaves(tmp_path):
    pl.launch(Loop(tmp_path, {"persistent_workers": True}, epochs=3), workers=2, algorithm="local-sgd(period=2)")
    for one in told(tmp_path):
        assert len({about["process"] for epoch in one["epochs"] for about in epoch}) == 2
    assert len(loading(tmp_path)) == 4 + 4, "and two in each worker that compare samples"


@pytest.mark.parametrize("persistent", [False, True])
def test_a_break_ends_the_processes_or_keeps_them(persistent, tmp_path):
    run = pl.launch(Breaks(tmp_path, {"persistent_workers": persistent}), workers=2, algorithm="hogwild")
    assert run.result["outcome"] == "stopped"
    assert [[len(batches) for batches in one["epochs"]] for one in told(tmp_path)] == [[3, 3]] * 2
    wait_for_end_of(loading(tmp_path))


@pytest.mark.parametrize("algorithm", ["hogwild", "parameter-server(mode=async)"])
def test_what_a_killed_worker_had_claimed_ahead_is_trained_on_by_the_others(algorithm, tmp_path):
    """But for the batch that it was at."""

    def tell(progress):
        if not progress.workers[1].alive:
            (tmp_path / "lost").touch()

    run = pl.launch(Killed(tmp_path, epochs=1), workers=2, algorithm=algorithm, on_progress=tell)
    assert run.result["workers_lost"] == [1]
    numbers = Counter(numbers_of(run))
    assert set(numbers.values()) == {1}
    assert len(numbers) == BATCHES - 1
    wait_for_end_of(loading(tmp_path))


def test_a_stopped_run_goes_on_with_what_was_claimed_ahead(tmp_path):
    """Every batch is trained on once, in the first part or in the second."""
    limit = 2 * 3 * BATCH_SIZE  # both are at their fourth batch

    def tell(progress):
        if progress.samples >= limit:  # and so the run has been told to stop
            (tmp_path / "stopping").touch()

    settings = {"workers": 2, "algorithm": "hogwild", "out": tmp_path / "run"}
    first = pl.launch(Paused(tmp_path), limit_samples=limit, on_progress=tell, **settings)
    assert len(numbers_of(first)) == 2 * 4
    run = pl.launch(Paused(tmp_path), resume=tmp_path / "run", **settings)
    assert sorted(numbers_of(run)) == list(range(2 * BATCHES))
    assert run.result["batches_repeated"] == run.result["batches_missed"] == 0


def test_an_error_in_a_loaders_process_arrives(tmp_path):
    with pytest.raises(pl.PacelineError, match=r"(?s)KeyError: Caught KeyError in DataLoader worker process.*label 17"):
        pl.launch(Loop(tmp_path, {"collate_fn": fails_at_17}), workers=2, algorithm="ad-psgd")
    wait_for_end_of(loading(tmp_path))


def test_a_worker_without_a_batch_in_the_first_epoch_compares_its_data_too(tmp_path):
    with pytest.raises(pl.UsageError, match="different samples than another worker's"):
        pl.launch(Late(tmp_path), workers=2, algorithm="hogwild")
    wait_for_end_of(loading(tmp_path))


def test_each_process_has_its_part_of_a_stream(tmp_path):
    loop = Loop(tmp_path, {"collate_fn": described}, dataset=Stream)
    assert pl.launch(loop, workers=2, algorithm="hogwild").result["outcome"] == "stopped"
    workers = told(tmp_path)
    for epoch in range(2):
        assert indices(given(workers, epoch)) == list(range(SAMPLES))
    assert len(loading(tmp_path)) == 2 * 2 * 2 + 2, "and two that read once more what differs between the workers"


def test_workers_that_are_threads_or_simulated_fetch_by_themselves(tmp_path):
    """A fork of one thread may inherit locks of others."""
    for start in (partial(pl.launch, backend="threads"), pl.simulate):
        start(Loop(tmp_path), workers=2, algorithm="hogwild")
        workers = told(tmp_path)
        assert {about["process"] for epoch in range(2) for about in given(workers, epoch)} == {os.getpid()}
        assert indices(given(workers, 0)) == list(range(SAMPLES))


SCRIPT = f"""
    import sys
    from pathlib import Path

    sys.path.insert(0, {str(Path(__file__).parents[1])!r})
    from processes.loader_programs import Endless, Loop

    FORKED = {{"multiprocessing_context": "fork"}}  # the tests' programs would use a fork server

    def train():
        Endless(Path.cwd(), {{"persistent_workers": True, **FORKED}})()

    if __name__ == "__main__":
        Loop(Path.cwd(), FORKED)() if "two-epochs" in sys.argv else train()
"""


@contextlib.contextmanager
def training(folder, *words):
    """The command that has launched two workers whose loaders have two processes each."""
    (folder / "loop.py").write_text(textwrap.dedent(SCRIPT))
    with started(folder, COMMAND, "launch", "--out", "run", "--workers", 2, *words) as process:
        leftovers.wait_until(lambda: len(list(folder.glob("training-*"))) == 2, "both workers")
        leftovers.wait_until(
            lambda: len(loading(folder)) == 4 + 4, "loaders, and two in each worker that compare samples"
        )
        yield process


LAUNCHED, JOINED = ["--algorithm", "hogwild", "loop.py:train"], ["--algorithm", "ad-psgd", "--", "loop.py"]


@pytest.mark.parametrize("words", [LAUNCHED, JOINED], ids=["launched", "joined"])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_of_a_job_ends_the_run_in_order(words, signum, tmp_path):
    """The loaders' processes get it, too."""
    with training(tmp_path, *words) as process:
        os.killpg(process.pid, signum)
        _, errors = process.communicate(forked.AGAINST_HANGS_S)
        assert process.returncode == 128 + signum, errors
        assert "Traceback" not in errors
        wait_for_end_of(loading(tmp_path))
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["outcome"] == "stopped", result["outcome_reason"]


def test_kill_9_of_the_supervisor(tmp_path):
    with training(tmp_path, *LAUNCHED) as process:
        family = leftovers.descendants(process.pid)
        assert len(family & loading(tmp_path)) == 4
        process.kill()
        wait_for_end_of(family)


@pytest.mark.parametrize("words", [LAUNCHED, JOINED], ids=["launched", "joined"])
def test_kill_9_of_a_worker(words, tmp_path):
    with training(tmp_path, *words) as process:
        parents = leftovers.parents()
        parent = parents[next(iter(loading(tmp_path) & parents.keys()))]
        family = leftovers.descendants(parent)
        assert len(family & loading(tmp_path)) == 2
        os.kill(parent, signal.SIGKILL)
        wait_for_end_of(family)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(forked.AGAINST_HANGS_S)
        assert process.returncode == 130, errors


@pytest.mark.parametrize("algorithm", ["all-reduce", "ad-psgd"])
def test_workers_of_another_launcher(algorithm, tmp_path):
    (tmp_path / "loop.py").write_text(textwrap.dedent(SCRIPT))
    meeting = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "PACELINE_ALGORITHM": algorithm,
    }
    environments = [{**meeting, "RANK": str(rank)} for rank in range(2)]
    with forked.running(["loop.py", "two-epochs"], environments, folder=tmp_path) as processes:
        for process in processes:
            _, errors = process.communicate(forked.AGAINST_HANGS_S)
            assert process.returncode == 0, errors
    for epoch in range(2):
        assert indices(given(told(tmp_path), epoch)) == list(range(SAMPLES))
    wait_for_end_of(loading(tmp_path))
