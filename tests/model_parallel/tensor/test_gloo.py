"""Real processes over Gloo: three steps with dropout and clipping are those of one worker, in float64 to 1e-12."""

import contextlib
import re
import signal
from pathlib import Path

import pytest
import torch

import forked
from model_parallel.tensor.gloo_worker import RUNS
from model_parallel.tensor.model import assert_equal, trained
from paceline.model_parallel.tensor.mesh import Mesh
from paceline.model_parallel.tensor.shapes import Line

SCRIPT = Path(__file__).with_name("gloo_worker.py")


@pytest.mark.parametrize("workers", RUNS)
def test_processes_are_one_worker(workers, tmp_path, nothing_left):
    with contextlib.ExitStack() as stack:
        words = [[SCRIPT, tmp_path / "store", rank, workers, tmp_path / f"{rank}.pt"] for rank in range(workers)]
        processes = [stack.enter_context(forked.Python(one)) for one in words]
        for process in processes:
            assert process.communicate(forked.AGAINST_HANGS_S) == ("", "")
    expected = {
        optimizer: trained(Mesh.open(Line(1)), optimizer, max_norm=1.0, dropout=0.1)
        for optimizer in ("adamw", "momentum")
    }
    for rank in range(workers):
        everything = torch.load(tmp_path / f"{rank}.pt")
        peaks = {key[1:]: everything.pop(key) for key in list(everything) if key[0] == "peak bytes"}
        for (_, _, optimizer), found in everything.items():
            assert_equal(found, expected[optimizer])
        for shape, mode in peaks:
            if mode == "summa":
                assert peaks[shape, mode] < 0.8 * peaks[shape, "allgather"]


@pytest.mark.parametrize("shape", ["2x2", "line 4"])
def test_a_killed_worker_is_named_by_all_others(shape, tmp_path, nothing_left):
    """On a grid one of them shares neither row nor column with it."""
    with contextlib.ExitStack() as stack:
        words = [[SCRIPT, tmp_path / "store", rank, 4, tmp_path / "none", 3, shape] for rank in range(4)]
        processes = [stack.enter_context(forked.Python(one)) for one in words]
        printed = [process.communicate(forked.AGAINST_HANGS_S)[0] for process in processes]
    assert processes[3].returncode == -signal.SIGKILL
    for rank, text in enumerate(printed[:3]):
        assert re.match(r"[a-z-]+ \d+: workers? .* arrived, worker 3 did not", text), rank
        assert "Start all workers again from the last checkpoint" in text
