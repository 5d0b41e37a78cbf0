"""A tensor layout on real Gloo processes, as torchrun starts them; who is killed there, and in `launch`, is named."""

import os
from functools import partial
from pathlib import Path

import pytest

import forked
import paceline as pl
from chosen import soaked
from model_parallel import gloo_workers
from model_parallel.tensor.run_loops import alone, check_same, found, last_steps, loop

PROGRAM = Path(__file__).with_name("run_program.py")


def ends(folder, workers, *words, **variables):
    """Return code and errors of each worker."""
    return gloo_workers.ends(PROGRAM, [folder, *words], workers, **variables)


@pytest.mark.parametrize(
    ("layout", "workers", "replicas", "optimizer"),
    [
        ("tensor(q=2)", 4, 1, "adamw"),
        ("tensor(line=2)", 4, 2, "adamw"),
        ("tensor(line=3)", 3, 1, "momentum"),
        *soaked(("tensor(q=2, depth=2, mode=summa)", 8, 1, "momentum")),  # which test_gloo.py trains without `attach`
    ],
)
def test_three_steps_are_one_process(layout, workers, replicas, optimizer, tmp_path):
    codes, said = ends(tmp_path, workers, layout, "all-reduce", replicas, {"optimizer": optimizer})
    assert codes == [0] * workers, said
    expected = alone(optimizer, replicas=replicas)
    for worker in range(workers):
        check_same(found(tmp_path, worker), expected, replicas=replicas, replica=worker * replicas // workers)


@pytest.mark.parametrize("algorithm", ["local-sgd(period=2)", "da-sgd(period=2)", "all-reduce(codec=qsgd(bits=8))"])
def test_across_replicas_it_is_what_launch_comes_to(algorithm, tmp_path):
    for name in ("gloo", "shared"):
        (tmp_path / name).mkdir()
    codes, said = ends(tmp_path / "gloo", 4, "tensor(line=2)", algorithm, 2)
    assert codes == [0] * 4, said
    settings = {"algorithm": algorithm, "replicas": 2, "clip": None}
    pl.launch(partial(loop, "tensor(line=2)", tmp_path / "shared", **settings), workers=4, backend="threads")
    for worker in range(4):
        check_same(found(tmp_path / "gloo", worker), found(tmp_path / "shared", worker))


def test_a_killed_worker_of_torchrun_is_named(tmp_path):
    codes, said = ends(tmp_path, 4, "tensor(q=2)", "all-reduce", 1, {"kill": (3, 1)})
    assert codes[3] == -9
    assert all(code == 1 for code in codes[:3])
    missing = [gloo_workers.says_missing(one, 3) for one in said[:3]]
    assert all(is_said or "common store is gone" in one for is_said, one in zip(missing, said, strict=False)), said
    assert any(missing)


@pytest.mark.parametrize(("layout", "replicas"), [(pl.TensorParallel(q=2), 1), (pl.TensorParallel(line=2), 2)], ids=str)
def test_a_killed_worker_of_launch_is_named(layout, replicas, tmp_path, nothing_left):
    with pytest.raises(pl.WorkerLostError, match="Worker 3 was ended by signal 9"):
        pl.launch(partial(loop, layout, tmp_path, replicas=replicas, kill=(3, 1)), workers=4)


@pytest.mark.parametrize(
    ("layout", "algorithm", "replicas"),
    [
        ("tensor(line=2)", "all-reduce", 2),
        # Below, torchrun starts the workers of a square again.
        *soaked(("tensor(q=2, mode=summa)", "all-reduce", 1), ("tensor(line=2)", "da-sgd(period=2, delay=1)", 2)),
    ],
)
def test_what_is_started_again_after_a_kill_ends_as_if_there_had_been_none(layout, algorithm, replicas, tmp_path):
    """Twelve steps, three epochs; worker 3 dies in the last step but one, when all have saved the last epoch's beginning."""
    killed = tmp_path / "killed"
    killed.mkdir()
    # Nobody waits for the lost worker as long as that, though under da-sgd the first replica misses it at the very end only.
    saved = {"PACELINE_CHECKPOINT": str(tmp_path / "checkpoint"), "PACELINE_DEADLINE_S": "3600"}
    settings = {"steps": 4, "epochs": 3, "clip": 1.0 if algorithm == "all-reduce" else None}
    codes, said = ends(killed, 4, layout, algorithm, replicas, {**settings, "kill": (3, 10)}, **saved)
    assert codes == [1, 1, 1, -9], said
    codes, said = ends(killed, 4, layout, algorithm, replicas, settings, **saved)
    assert codes == [0] * 4, said
    (tmp_path / "undisturbed").mkdir()
    pl.launch(
        partial(loop, layout, tmp_path / "undisturbed", algorithm=algorithm, replicas=replicas, **settings),
        workers=4,
        backend="threads",
    )
    for worker in range(4):
        one, other = found(killed, worker), found(tmp_path / "undisturbed", worker)
        # Where replicas need not wait for each other, worker 0 may have been ahead, and have seen the second's only.
        assert len(one["losses"]) in ((4,) if algorithm == "all-reduce" else (4, 8))
        check_same(one, last_steps(other, len(one["losses"])))


def test_torchrun_starts_them_again(tmp_path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 4, "--max-restarts", 1]
    words = [PROGRAM, tmp_path, "tensor(q=2)", "all-reduce", 1, {"steps": 2, "epochs": 3, "kill": (3, 5)}]
    environment = {**os.environ, "PACELINE_CHECKPOINT": str(tmp_path / "checkpoint"), "PACELINE_DEADLINE_S": "60"}
    with forked.Python([*launcher, *words], environment=environment, errors=None) as process:
        _, errors = process.communicate(forked.AGAINST_HANGS_S)
        assert process.returncode == 0, errors
    one, expected = found(tmp_path), alone(steps=2, epochs=3)
    assert len(one["losses"]) == 2, "the third epoch's"
    check_same(one, last_steps(expected, 2))


def test_another_layouts_checkpoint_is_refused(tmp_path):
    saved = {"PACELINE_CHECKPOINT": str(tmp_path / "checkpoint")}
    codes, said = ends(tmp_path, 4, "tensor(q=2)", "all-reduce", 1, {"steps": 2, "epochs": 2}, **saved)
    assert codes == [0] * 4, said
    codes, said = ends(tmp_path, 4, "tensor(line=4)", "all-reduce", 1, {"steps": 2, "epochs": 3}, **saved)
    assert all(code != 0 for code in codes)
    assert all("Resume with the task, the layout" in one for one in said)
