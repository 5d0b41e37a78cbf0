"""A tensor layout on real Gloo processes, as torchrun starts them; who is killed there, and in `launch`, is named."""

from functools import partial
from pathlib import Path

import pytest

import forked
import paceline as pl
from free_ports import free_port
from model_parallel.tensor.run_loops import alone, check_same, found, loop

PROGRAM = Path(__file__).with_name("run_program.py")


def ends(folder, workers, *words):
    """Return code and errors of each worker."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(workers)}
    environments = [{**place, "RANK": str(rank), "PACELINE_DEADLINE_S": "60"} for rank in range(workers)]
    with forked.running([PROGRAM, folder, *map(str, words)], environments) as running:
        said = [one.communicate(forked.AGAINST_HANGS_S)[1] for one in running]
        return [one.returncode for one in running], said


@pytest.mark.parametrize(
    ("layout", "workers", "replicas", "optimizer"),
    [
        ("tensor(q=2)", 4, 1, "adamw"),
        ("tensor(line=2)", 4, 2, "adamw"),
        ("tensor(line=3)", 3, 1, "momentum"),
        ("tensor(q=2, depth=2)", 8, 1, "adamw"),
        ("tensor(q=2, mode=summa)", 4, 1, "adamw"),
        ("tensor(q=2, mode=summa)", 4, 1, "momentum"),
        ("tensor(q=2, depth=2, mode=summa)", 8, 1, "momentum"),
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
    assert all("worker 3 did not" in one or "common store is gone" in one for one in said[:3]), said
    assert any("worker 3 did not" in one for one in said[:3])


@pytest.mark.parametrize(("layout", "replicas"), [(pl.Tensor(q=2), 1), (pl.Tensor(line=2), 2)], ids=str)
def test_a_killed_worker_of_launch_is_named(layout, replicas, tmp_path, nothing_left):
    with pytest.raises(pl.WorkerLostError, match="Worker 3 was ended by signal 9"):
        pl.launch(partial(loop, layout, tmp_path, replicas=replicas, kill=(3, 1)), workers=4)
