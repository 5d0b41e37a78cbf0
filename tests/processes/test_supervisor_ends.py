"""The whole program is interrupted or killed, or is written in a way that cannot work."""

import json
import os
import signal

import pytest

import forked
import leftovers
import paceline as pl
from paceline.records.step_record import RECORD_DTYPE
from paceline.run.config import TrainConfig
from processes.scripts import COMMAND, started

ENDLESS = 100_000  # epochs


def end(process):
    return process.communicate(timeout=forked.AGAINST_HANGS_S)


def checkpoints(folder):
    return [int(path.parent.name) for path in folder.glob("checkpoint/*/complete.json")]


def resume(folder, algorithm, workers, accuracy):
    """Goes on with the run until it is this good; its records must be whole."""
    config = TrainConfig(algorithm=algorithm, workers=workers, epochs=ENDLESS, target_accuracy=accuracy)
    run = pl.train(config, resume=folder)
    assert run.result["outcome"] == "converged", run.result["outcome_reason"]
    versions = [version for rows in run.records.values() for version in rows["applied_version"].tolist() if version > 0]
    wanted = list(range(1, run.result["version"] + 1)) * (workers if algorithm == "lockstep" else 1)
    assert sorted(versions) == sorted(wanted)
    assert not list(folder.glob("events-*.bin"))
    assert json.loads((folder / "result.json").read_text())["outcome"] == "converged"
    return run


@pytest.mark.parametrize(
    ("algorithm", "whole_group"), [("locked(kind=rwlock)", True), ("leashed", False), ("lockstep", True)]
)
def test_ctrl_c(algorithm, whole_group, tmp_path):
    words = ["train", "--epochs", ENDLESS, "--workers", 3, "--out", "run", "--algorithm", algorithm]
    folder = tmp_path / "run"

    def far_enough():
        spools = list(folder.glob("events-*.bin"))
        return len(spools) == 3 and min(spool.stat().st_size for spool in spools) > RECORD_DTYPE.itemsize * 400

    with started(tmp_path, COMMAND, *words, anew=not whole_group) as process:
        leftovers.wait_until(far_enough, "400 steps of each worker")
        family = leftovers.descendants(process.pid)
        assert len(family) >= 4  # fork server and three workers
        (os.killpg if whole_group else os.kill)(process.pid, signal.SIGINT)
        output, errors = end(process)
        assert process.returncode == 130, errors
        assert "paceline train --resume run" in errors
        assert "Traceback" not in errors
        assert output == ""
        leftovers.wait_until(lambda: not family & leftovers.parents().keys(), "the end of all its processes")
    # What was trained is kept, although the first interval between checkpoints has not passed.
    assert max(checkpoints(folder)) > 0
    run = resume(folder, algorithm, 3, accuracy=0.5)
    assert run.result["steps"] > (400 if algorithm == "lockstep" else 3 * 400)


DRIVER = """
    import sys
    from pathlib import Path

    import paceline as pl

    if __name__ == "__main__":
        algorithm, out = sys.argv[1:]
        config = pl.TrainConfig(algorithm=algorithm, workers=3, epochs=100_000, checkpoint_every_s=0)
        pl.train(config, out=Path(out))
"""


@pytest.mark.parametrize("algorithm", ["lockstep", "locked", "leashed"])
def test_kill_9_of_the_supervisor(algorithm, tmp_path):
    folder = tmp_path / "run"
    with started(tmp_path, DRIVER, algorithm, "run") as process:
        leftovers.wait_until(lambda: max(checkpoints(folder), default=0) >= 360, "a checkpoint of the third epoch")
        family = leftovers.descendants(process.pid)
        assert len(family) >= 4
        process.kill()
        leftovers.wait_until(lambda: not family & leftovers.parents().keys(), "the end of all its processes")
    run = resume(folder, algorithm, 3, accuracy=0.9)
    assert run.result["version"] > 360 / 3


def test_launch_without_a_main_guard(tmp_path):
    """Every worker imports the script and would launch workers that launch workers."""
    script = """
        import paceline as pl

        def train():
            pass

        pl.launch(train, workers=2, algorithm="hogwild")
    """
    with started(tmp_path, script) as process:
        _, errors = end(process)
    assert process.returncode == 1
    assert "if __name__ == '__main__':" in errors.splitlines()[-1]


def test_two_launches_in_one_script(tmp_path):
    script = """
        import torch
        from torch import nn

        import paceline as pl

        def train():
            torch.manual_seed(0)
            model = nn.Linear(4, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            batches = [(torch.randn(2, 4), torch.randn(2, 1)) for _ in range(20)]
            with pl.attach(model, optimizer) as worker:
                for x, y in worker.batches(batches):
                    optimizer.zero_grad()
                    nn.functional.mse_loss(model(x), y).backward()
                    optimizer.step()

        if __name__ == "__main__":
            for algorithm in ("locked", "leashed"):
                print(pl.launch(train, workers=2, algorithm=algorithm).result["version"])
    """
    with started(tmp_path, script) as process:
        output, errors = end(process)
    assert (process.returncode, output.split(), errors) == (0, ["20", "20"], "")
