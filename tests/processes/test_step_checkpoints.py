"""Under torchrun, survivors write a checkpoint of the last step, from which any number of workers goes on."""

import json
import os
import random
import signal
import time
from dataclasses import asdict
from pathlib import Path

import pytest

import forked
import leftovers
import paceline
import soak_results
from exact_codec import CODED
from free_ports import free_port
from processes import step_checkpoints
from processes.step_checkpoints import Loop, check, notes

PROGRAM = Path(step_checkpoints.__file__)
PACKAGE = str(Path(paceline.__file__).parent)  # not its name alone, which a checkout may have, too
OPTIONS = [
    {"per_step": 2, "num_batches": 12, "at": 5},
    {"ahead": True},
    {"data": "processes"},
    {"data": "stream"},
    {"data": "drawn"},
    {"sums": True, "optimizer": "adam"},
    {"on_device": True, "optimizer": "adam"},
    {"algorithm": CODED},
]


def environment(loop, **more):
    told = {"PACELINE_TEST_LOOP": json.dumps(asdict(loop)), "PACELINE_CHECKPOINT": str(folder_of(loop))}
    return {"OMP_NUM_THREADS": "1", **told, **more}


def folder_of(loop):
    return Path(loop.folder, "checkpoint")


def started(loop, num_workers, life=0):
    """Workers by themselves, as of a launcher that lets the others live."""
    port = str(free_port())
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(num_workers)}
    common["PACELINE_TEST_LIFE"] = str(life)
    return forked.running([PROGRAM], [environment(loop, RANK=str(rank), **common) for rank in range(num_workers)])


def ended(workers):
    """(code, output, errors) of each."""
    outputs = [one.communicate(forked.AGAINST_HANGS_S) for one in workers]
    return [(one.returncode, *texts) for one, texts in zip(workers, outputs, strict=True)]


def live(loop, num_workers, life=0):
    with started(loop, num_workers, life) as workers:
        return ended(workers)


def said(results):
    return [line for _, _, errors in results for line in errors.splitlines() if "has written a checkpoint" in line]


def go_on(loop, num_workers, begins, life=1):
    """The next life sees it through."""
    results = live(loop, num_workers, life)
    assert [code for code, *_ in results] == [0] * num_workers, results
    check(loop, num_workers, begins)


def torchrun(loop, *options, num_workers=3):
    words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_workers}", *options, PROGRAM]
    return forked.Python(words, environment={**os.environ, **environment(loop)})


@pytest.mark.parametrize("event", ["kill", "raise"])
def test_torchrun_goes_on_from_the_last_step(event, tmp_path):
    """Worker 1 dies in the seventh round, the third of the second epoch: an epoch's checkpoint would be after the fourth."""
    loop = Loop(str(tmp_path), event)
    with torchrun(loop, "--max-restarts=1") as agent:
        ((code, output, errors),) = ended([agent])
    assert code == 0, errors
    assert output.count("has ended") == 3
    (line,) = said([(code, output, errors)])
    assert line.endswith("The next start resumes there, with any number of workers.")
    assert PACKAGE not in errors or event == "raise"  # as in a traceback
    check(loop, 3, [0, 6])


@pytest.mark.parametrize(
    ("event", "before", "after"),
    [
        ("kill", 3, 2),
        ("kill", 3, 1),
        ("kill after", 2, 5),
        *(pytest.param(*one, marks=pytest.mark.soak) for one in [("kill", 2, 3), ("kill", 2, 5), ("kill after", 3, 2)]),
    ],
)
def test_any_number_of_workers_goes_on(event, before, after, tmp_path):
    loop = Loop(str(tmp_path), event, at=5, optimizer="adam")
    results = live(loop, before)
    assert [code for code, *_ in results] == [1, -signal.SIGKILL, *[1] * (before - 2)]
    (line,) = said(results)
    assert line.startswith("paceline: A worker was lost: worker ")
    go_on(loop, after, [0, 5 + (event == "kill after")])


def test_an_epochs_checkpoint_takes_any_number_too(tmp_path):
    """The worker that writes the last step's checkpoint is killed as it does: the second epoch's beginning counts."""
    loop = Loop(str(tmp_path), "kill", saver=2, dies_writing=True)
    results = live(loop, 3)
    assert [code for code, *_ in results] == [1, -signal.SIGKILL, -signal.SIGKILL]
    assert not said(results)
    go_on(loop, 2, [0, 4])


@pytest.mark.parametrize("saver", [0, 2])
def test_survivors_that_are_a_step_apart(saver, tmp_path):
    """Worker 2 has not got the mean of the sixth step, and worker 0 has; either writes a whole checkpoint."""
    loop = Loop(str(tmp_path), "kill after", at=5, behind=2, saver=saver)
    assert len(said(live(loop, 3))) == 1
    go_on(loop, 2, [0, 6 if saver == 0 else 5])


def terminated(loop, num_workers):
    """Sends SIGTERM to all workers once each is in the middle of its loop."""
    with started(loop, num_workers) as workers:
        leftovers.wait_until(lambda: len(list(Path(loop.folder).glob("here-*"))) == num_workers, "all workers")
        for one in workers:
            one.terminate()
        return ended(workers)


@pytest.mark.parametrize(
    ("event", "at", "num_workers"),
    [
        ("terminate", 6, 3),
        ("terminate", 4, 2),
        ("terminate at end", 8, 3),
        ("terminate", 3, 1),
        ("terminate at end", 20, 1),
    ],
)
def test_sigterm_to_all(event, at, num_workers, tmp_path):
    """Each ends as by the signal itself: while it waits for others, or after its step if it is alone."""
    loop = Loop(str(tmp_path), event, at=at)
    results = terminated(loop, num_workers)
    assert [code for code, *_ in results] == [-signal.SIGTERM] * num_workers
    (line,) = said(results)
    assert line.startswith("paceline: SIGTERM: worker ")
    assert all("Traceback" not in errors for *_, errors in results)
    go_on(loop, 2, [0, at + ((event, num_workers) == ("terminate", 1))])


@pytest.mark.parametrize(
    ("event", "options"),
    [
        *(("kill", one) for one in OPTIONS),
        # A signal comes to the loader's processes, too, and between a step's batches; what is saved depends on no event.
        *(("terminate", one) for one in OPTIONS[:3]),
        *(pytest.param("terminate", one, marks=pytest.mark.soak) for one in OPTIONS[3:]),
    ],
    ids=str,
)
def test_with(event, options, tmp_path):
    loop = Loop(str(tmp_path), event, **options)
    results = terminated(loop, 3) if event == "terminate" else live(loop, 3)
    assert len(said(results)) == 1, results
    go_on(loop, 2, [0, loop.at // loop.per_step])


def test_torchrun_takes_sigterm_from_itself_and_from_the_job(tmp_path):
    """As Slurm sends it, to all processes: the agent then sends it once more."""
    loop = Loop(str(tmp_path), "terminate")
    with torchrun(loop) as agent:
        leftovers.wait_until(lambda: len(list(tmp_path.glob("here-*"))) == 3, "all workers")
        for pid in [*leftovers.descendants(agent.pid), agent.pid]:
            os.kill(pid, signal.SIGTERM)
        results = ended([agent])
    assert results[0][0] != 0
    (line,) = said(results)
    assert line.startswith("paceline: SIGTERM: worker ")
    go_on(loop, 2, [0, 6])


def test_torchrun_goes_on_if_the_last_steps_are_made(tmp_path):
    """Worker 0 dies after its loop, as others wait for its weights: they have all that there is."""
    loop = Loop(str(tmp_path), "kill at end", at=8, victim=0)
    with torchrun(loop, "--max-restarts=1") as agent:
        results = ended([agent])
    assert results[0][0] == 0, results
    assert len(said(results)) == 1
    check(loop, 3, [0, 8])


def test_torchrun_ends_workers_that_wait_in_a_sum_and_their_loaders(tmp_path):
    """A worker dies after the epoch's last step, as the others wait in `worker.sum`."""
    loop = Loop(str(tmp_path), "kill after", at=3, sums=True, data="processes")
    with torchrun(loop, "--max-restarts=1") as agent:
        results = ended([agent])
    assert results[0][0] == 0, results
    assert len(said(results)) == 1
    check(loop, 3, [0, 4])


def test_a_loop_on_a_loader_of_its_own_has_no_such_checkpoint(tmp_path):
    """Paceline does not know where in it the loop is."""
    loop = Loop(str(tmp_path), "terminate", own=True)
    results = terminated(loop, 2)
    assert [code for code, *_ in results] == [-signal.SIGTERM] * 2
    assert not said(results)
    assert not list(folder_of(loop).glob("[0-9]*"))


def disturbed(loop, num_workers, life, draws):
    """A life in which some workers get signals at a drawn instant."""
    signals = draws.choice([[signal.SIGKILL], [signal.SIGTERM], [signal.SIGTERM] * num_workers, [signal.SIGKILL] * 2])
    victims = draws.sample(range(num_workers), min(len(signals), num_workers - (signals[0] == signal.SIGKILL)))
    path = Path(loop.folder, f"notes-{life}-{victims[0]}.jsonl")
    num_steps, pause_s = draws.randrange(40), draws.random() * 0.01
    with started(loop, num_workers, life) as workers:
        leftovers.wait_until(lambda: workers[0].poll() is not None or num_lines(path) > num_steps, "the drawn instant")
        time.sleep(pause_s)
        for victim, signum in zip(victims, signals, strict=False):
            workers[victim].send_signal(signum)
        return ended(workers)


def num_lines(path):
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.soak
def test_a_hundred_runs_with_signals_at_any_instant(tmp_path, monkeypatch):
    """Survivors lose one step at most; each run goes on with another number of workers, twice, and is seen through."""
    monkeypatch.setenv("PACELINE_DEADLINE_S", "30")  # worker 0 waits as long for one that dies after its loop
    before, begun_s, num_saved = leftovers.everything(), time.monotonic(), 0
    for number in range(100):
        draws, folder = random.Random(f"step checkpoints {number}"), tmp_path / str(number)
        folder.mkdir()
        loop = Loop(str(folder), optimizer=draws.choice(["sgd", "adam"]), num_batches=60, epochs=3)
        saved = []
        for life in range(2):
            num_workers = draws.randint(2, 4)
            results = disturbed(loop, num_workers, life, draws)
            if all(code == 0 for code, *_ in results):
                break
            lines = said(results)
            assert len(lines) <= 1, (number, results)
            saved.append(len(lines))
        num_workers = draws.randint(1, 4)
        results = live(loop, num_workers, life=2)
        assert [code for code, *_ in results] == [0] * num_workers, (number, results)
        lives = [list(one.values()) for _, one in sorted(notes(folder).items())]
        begins = [life[0][0] for life in lives]
        check(loop, num_workers, begins)
        for life, has_saved, begun in zip(lives, saved, begins[1:], strict=False):
            assert not has_saved or begun >= min(max(versions, default=0) for _, versions in life) - 1, number
        num_saved += sum(saved)
    leftovers.assert_nothing_new(before)
    took_s = round(time.monotonic() - begun_s, 1)
    soak_results.keep("soak_step_checkpoints", "all-reduce", {"runs": 100, "saved": num_saved, "took_s": took_s})
