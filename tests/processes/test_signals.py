"""Ctrl-C and SIGTERM, by which batch systems and containers end what they run: everybody ends in order, and says so."""

import contextlib
import json
import os
import re
import signal
import subprocess
import textwrap
from functools import partial
from pathlib import Path

import pytest

import forked
import leftovers
import paceline as pl
from paceline.records import checkpoint_contents as checkpoint
from paceline.records import checkpoint_files
from paceline.study.table import load_table
from paceline.system import interrupts
from paceline.system.interrupts import noted, noted_by
from processes.scripts import started

COMMAND = """
    from paceline.__main__ import main

    if __name__ == "__main__":
        main()
"""
LOOP = """
    import torch
    from torch import nn

    import paceline as pl

    def train():
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        batches = [(torch.randn(2, 4), torch.randn(2, 1)) for _ in range(50)]
        with pl.attach(model, optimizer) as worker:
            for _ in range(100_000):
                for x, y in worker.batches(batches):
                    open(f"training-{worker.worker_id}", "w").close()
                    optimizer.zero_grad()
                    loss = nn.functional.mse_loss(model(x), y)
                    loss.backward()
                    optimizer.step()
                    worker.report(loss)

    if __name__ == "__main__":
        train()
"""
ENDLESS = ["--epochs", "100000"]


def ended(process, signum, *, whole_group=False):
    """Sends the signal, and waits for the end of the process and of all its family; returns its output."""
    family = leftovers.descendants(process.pid)
    (os.killpg if whole_group else os.kill)(process.pid, signum)
    output, errors = process.communicate(timeout=forked.AGAINST_HANGS_S)
    assert "Traceback" not in errors, errors
    leftovers.wait_until(lambda: not family & leftovers.parents().keys(), "the end of all its processes")
    return output, errors


def steps(folder, least=400):
    """Waits until worker 0 has trained so many steps."""
    spool = folder / "events-0.bin"
    leftovers.wait_until(lambda: spool.exists() and spool.stat().st_size > 160 * least, f"{least} steps in {folder}")


def check_interrupted(folder, by="SIGTERM", *, has_checkpoint=True):
    """The folder is that of a run that has ended, and holds its last parameters."""
    run = pl.RunData.load(folder)
    assert run.result["outcome"] == "stopped"
    assert run.result["outcome_reason"] == f"Interrupted by {by}."
    assert not list(folder.glob("events-*.bin"))
    assert not list(folder.glob(".*"))
    assert (folder / "report.html").exists()
    if has_checkpoint:
        saved = checkpoint.load_parameters(checkpoint_files.newest(folder / "checkpoint"))
        assert saved.version == run.result["version"] > 0
    return run


@pytest.mark.parametrize("algorithm", ["leashed", "parameter-server", "ad-psgd"])
def test_sigterm_to_all_of_a_job(algorithm, tmp_path):
    """As Slurm sends it: to the command, to the fork server and to every worker."""
    words = ["train", *ENDLESS, "--algorithm", algorithm, "--workers", 2, "--out", "run"]
    with started(tmp_path, COMMAND, *words, TMPDIR=str(tmp_path)) as process:
        steps(tmp_path / "run")
        assert len(leftovers.descendants(process.pid)) >= 3
        _, errors = ended(process, signal.SIGTERM, whole_group=True)
    assert process.returncode == 143
    assert errors.endswith("Resume from the last checkpoint: paceline train --resume run\npaceline: Stopped.\n")
    run = check_interrupted(tmp_path / "run", has_checkpoint=algorithm != "ad-psgd")
    if algorithm == "leashed":
        versions = sorted(
            version for rows in run.records.values() for version in rows["applied_version"] if version > 0
        )
        assert versions == list(range(1, run.result["version"] + 1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "script.py"]


@pytest.mark.parametrize(("signum", "code", "by"), [(signal.SIGTERM, 143, "SIGTERM"), (signal.SIGINT, 130, "Ctrl-C")])
def test_launch_of_a_function(signum, code, by, tmp_path):
    (tmp_path / "loop.py").write_text(textwrap.dedent(LOOP))
    words = ["launch", "loop.py:train", "--algorithm", "locked", "--out", "run"]
    with started(tmp_path, COMMAND, *words) as process:
        steps(tmp_path / "run")
        ended(process, signum)
    assert process.returncode == code
    check_interrupted(tmp_path / "run", by)


def test_launch_of_a_script(tmp_path):
    """Workers that join a run have no supervisor: the agent tells them, and they write what they have."""
    (tmp_path / "loop.py").write_text(textwrap.dedent(LOOP))
    words = ["launch", "--workers", 2, "--algorithm", "ad-psgd", "--out", "run", "--", "loop.py"]
    with started(tmp_path, COMMAND, *words) as process:
        folder = tmp_path / "run"
        leftovers.wait_until(lambda: len(list(tmp_path.glob("training-*"))) == 2, "both workers")
        _, errors = ended(process, signal.SIGTERM)
    assert process.returncode == 143, errors
    run = check_interrupted(folder, has_checkpoint=False)
    assert run.result["workers_here"] == [0, 1]
    assert run.result["workers_lost"] == []
    assert (folder / "model.pt").exists()


def test_an_agents_workers_hold_its_folder(tmp_path):
    """They go on when the agent is killed, so nobody else may write there."""
    (tmp_path / "loop.py").write_text(textwrap.dedent(LOOP))
    folder = tmp_path / "run"
    words = ["launch", "--workers", 1, "--algorithm", "ad-psgd", "--out", "run", "--", "loop.py"]
    with started(tmp_path, COMMAND, *words, anew=True) as process:
        leftovers.wait_until(lambda: list(folder.glob("worker-*.json")), "the worker")
        (worker,) = [json.loads(path.read_text())["pid"] for path in folder.glob("worker-*.json")]
        try:
            process.kill()
            process.wait(60)
            with pytest.raises(pl.UsageError, match=f"run is in use by process {process.pid}"):
                pl.train(pl.TrainConfig(steps=1), out=folder)
        finally:
            os.kill(worker, signal.SIGKILL)
        leftovers.wait_until(lambda: not leftovers.alive(worker), "the worker's end")


def test_simulate(tmp_path):
    words = [
        "simulate",
        "--algorithm",
        "hogwild",
        "--timing-only",
        "--steps",
        100_000_000,
        "--parameters",
        1000,
        "--out",
        "run",
    ]
    with started(tmp_path, COMMAND, *words) as process:
        leftovers.wait_until((tmp_path / "run" / ".lock").exists, "the simulation's beginning")
        begun_s = leftovers.cpu_s(process.pid)  # nothing else outside tells that some of it is simulated
        leftovers.wait_until(lambda: leftovers.cpu_s(process.pid) > begun_s + 0.5, "some of the simulation")
        ended(process, signal.SIGTERM)
    assert process.returncode == 143
    run = check_interrupted(tmp_path / "run", has_checkpoint=False)
    assert run.result["steps"] == len(run.records[0]) + len(run.records[1])


def test_compare(tmp_path):
    words = ["compare", "--algorithm", "hogwild,parameter-server", "--epochs", 60, "--out", "runs"]
    second = tmp_path / "runs" / "2-parameter-server-2-workers"  # 60 epochs of which take by far longer
    with started(tmp_path, COMMAND, *words) as process:
        steps(second, 20)
        output, _ = ended(process, signal.SIGTERM)
    assert process.returncode == 143
    assert pl.RunData.load(tmp_path / "runs" / "1-hogwild-2-workers").result["outcome_reason"] == ""
    assert "hogwild" in output
    check_interrupted(second)
    assert (tmp_path / "runs" / "report.html").exists()
    assert not (tmp_path / "runs" / ".lock").exists()


def test_study(tmp_path):
    words = ["study", "run", "--algorithm", "hogwild,locked", "--seeds", 50, "--epochs", 2, "--out", "study"]
    with started(tmp_path, COMMAND, *words) as process:
        trials = tmp_path / "study" / "trials"
        leftovers.wait_until(lambda: len(list(trials.glob("[0-9a-f]*"))) >= 2, "two trials")
        _, errors = ended(process, signal.SIGTERM)
    assert process.returncode == 143
    assert "the same command continues from there" in errors
    assert len(load_table(tmp_path / "study")) == len(list(trials.glob("[0-9a-f]*"))) >= 2
    assert (tmp_path / "study" / "table.parquet").exists()
    assert not list(trials.glob(".*"))


def test_advise(tmp_path):
    words = ["advise", "digits-mlp", "--target-accuracy", 0.95, "--budget", "10m", "--out", "advice"]
    with started(tmp_path, COMMAND, *words) as process:
        leftovers.wait_until(lambda: len(leftovers.descendants(process.pid)) >= 3, "workers of a short run")
        ended(process, signal.SIGTERM)
    assert process.returncode == 143
    assert not (tmp_path / "advice").exists()


def test_a_program_is_ended_by_sigterm_once_its_run_is_written(tmp_path):
    """As it would have been at once: what comes after the run is not done."""
    script = """
        from pathlib import Path

        import paceline as pl

        if __name__ == "__main__":
            pl.train(pl.TrainConfig(algorithm="locked", epochs=100_000), out=Path("run"))
            Path("after").touch()
    """
    with started(tmp_path, script) as process:
        steps(tmp_path / "run")
        _, errors = ended(process, signal.SIGTERM)
    assert process.returncode == -signal.SIGTERM
    assert errors == ""
    check_interrupted(tmp_path / "run")
    assert not (tmp_path / "after").exists()


STUCK = """
    import time

    import torch
    from torch import nn

    import paceline as pl

    def train():
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with pl.attach(model, optimizer) as worker:
            for x in worker.batches([torch.randn(2, 4) for _ in range(50)]):
                open(f"stuck-{worker.worker_id}", "w").close()
                time.sleep(600)
"""


def hears(pid, signum):
    """Whether a process has a handler for the signal."""
    caught = re.search(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)[1]
    return bool(int(caught, 16) >> (signum - 1) & 1)


@pytest.mark.parametrize(
    "inside", [noted, partial(noted, patient=True), contextlib.nullcontext], ids=["a run", "a job's", "the command"]
)
def test_what_a_loop_forks_has_the_signals_of_plain_python(inside):
    """`Pool.terminate` waits for processes that it has sent a SIGTERM."""
    interrupts.install()
    try:
        with inside():
            is_as_in_python = forked.call(
                lambda: (
                    signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
                    and signal.getsignal(signal.SIGINT) is signal.default_int_handler
                    and not noted_by()
                )
            )
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert is_as_in_python


def test_a_signal_ends_a_process_that_has_just_been_forked():
    """The loss of that signal made `Pool.terminate` wait for ever."""
    waits, goes_on = os.pipe()
    with noted(), os.fdopen(waits, "rb"):
        children = []
        for _ in range(50):
            if not (pid := os.fork()):
                os.close(goes_on)
                os.read(waits, 1)
                os._exit(0)
            os.kill(pid, signal.SIGTERM)
            children.append(pid)
        os.close(goes_on)
        ends = [os.waitpid(pid, 0)[1] for pid in children]
    assert set(map(os.waitstatus_to_exitcode, ends)) == {-signal.SIGTERM}


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_the_second_signal_ends_at_once(signum, tmp_path):
    (tmp_path / "loop.py").write_text(textwrap.dedent(STUCK))
    with started(tmp_path, COMMAND, "launch", "loop.py:train", "--algorithm", "locked") as process:
        leftovers.wait_until(lambda: len(list(tmp_path.glob("stuck-*"))) == 2, "both workers")
        os.kill(process.pid, signum)
        leftovers.wait_until(lambda: not hears(process.pid, signum), "it has noted the first")  # two at once are one
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.0)  # it waits for the workers, which do not answer
        ended(process, signum)
    assert process.returncode == -signum, "after the time that workers are given, it would have said so itself"


def test_a_killed_supervisor_leaves_no_file_in_the_temporary_folder(tmp_path):
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    words = ["train", *ENDLESS, "--algorithm", "parameter-server", "--out", "run"]
    with started(tmp_path, COMMAND, *words, TMPDIR=str(scratch)) as process:
        steps(tmp_path / "run")
        family = leftovers.descendants(process.pid)
        process.kill()
        leftovers.wait_until(lambda: not family & leftovers.parents().keys(), "the end of all its processes")
    assert not list(scratch.iterdir())


# During imports an exception may get lost, or come out as a traceback of somebody else's code.

AT_IMPORT = """
    import os
    import sys

    class AtImport:
        def find_spec(self, name, path=None, target=None):
            if name == os.environ["AT_IMPORT"] and os.getpid() == PROCESS:
                os.kill(PROCESS, int(os.environ["SIGNAL"]))

    if __name__ == "__main__":
        PROCESS = os.getpid()
        sys.meta_path.insert(0, AtImport())
        from paceline.__main__ import main

        main()
"""


@pytest.mark.parametrize(
    ("module", "signum"),
    [
        ("typer", signal.SIGINT),
        ("paceline.cli.study", signal.SIGTERM),
        ("torch", signal.SIGINT),
        ("paceline.run.task_worker", signal.SIGTERM),
    ],
)
def test_a_signal_during_imports(module, signum, tmp_path):
    words = ["train", "--steps", "1"]
    with started(tmp_path, AT_IMPORT, *words, anew=True, AT_IMPORT=module, SIGNAL=str(int(signum))) as process:
        output, errors = process.communicate(timeout=forked.AGAINST_HANGS_S)
    assert (process.returncode, output, errors) == (128 + signum, "", "paceline: Stopped.\n")
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]
