"""A layout on real Gloo processes, as torchrun starts them."""

from functools import partial
from pathlib import Path

import torch

import paceline as pl
from model_parallel import gloo_workers
from model_parallel.hybrid.cut_loops import found, loop

PROGRAM = Path(__file__).parent / "gloo_program.py"


def ends(folder, groups, *kill, epochs=2, **variables):
    """Return code and errors of each of four workers."""
    return gloo_workers.ends(PROGRAM, [folder, groups, epochs, *kill], 4, **variables)


def test_workers_of_torchrun_end_like_those_on_shared_memory(tmp_path):
    (tmp_path / "gloo").mkdir()
    (tmp_path / "shared").mkdir()
    codes, said = ends(tmp_path / "gloo", 2)
    assert codes == [0] * 4, said
    pl.launch(partial(loop, 2, tmp_path / "shared", rows=48, clip=0.5), workers=4, backend="threads")
    check_same(tmp_path / "gloo", tmp_path / "shared")


def check_same(folder, expected):
    expected = found(expected)
    for worker in range(4):
        one = found(folder, worker)
        assert one["shapes"]["5.0.weight"] == (24, 64)
        for name, value in expected["model"].items():
            torch.testing.assert_close(one["model"][name], value, rtol=0, atol=1e-12)
        for name, state in expected["state"].items():
            torch.testing.assert_close(one["state"][name]["exp_avg"], state["exp_avg"], rtol=0, atol=1e-12)


def test_a_killed_worker_of_torchrun_is_named(tmp_path):
    codes, said = ends(tmp_path, 2, 3, 2)
    assert codes[3] == -9
    assert all(code == 1 for code in codes[:3])
    missing = [gloo_workers.says_missing(one, 3) for one in said[:3]]
    assert all(is_said or "common store is gone" in one for is_said, one in zip(missing, said, strict=False)), said
    assert any(missing)


def test_what_is_started_again_after_a_kill_ends_as_if_there_had_been_none(tmp_path):
    """Three rounds an epoch; worker 3 is killed in the last but one, when all have saved the third epoch's beginning."""
    saved = {"PACELINE_CHECKPOINT": str(tmp_path / "checkpoint")}
    (tmp_path / "killed").mkdir()
    (tmp_path / "undisturbed").mkdir()
    codes, said = ends(tmp_path / "killed", 2, 3, 7, epochs=3, **saved)
    assert codes == [1, 1, 1, -9], said
    codes, said = ends(tmp_path / "killed", 2, epochs=3, **saved)
    assert codes == [0] * 4, said
    assert len(found(tmp_path / "killed")["norms"]) == 3, "the third epoch's"
    pl.launch(partial(loop, 2, tmp_path / "undisturbed", rows=48, epochs=3, clip=0.5), workers=4, backend="threads")
    check_same(tmp_path / "killed", tmp_path / "undisturbed")
