"""What real workers print, and figures that they bring together."""

import json
import os
import subprocess
import sys

import pytest

import forked
from processes import printing


def test_lines_of_launched_workers_are_whole_and_tagged():
    done = forked.run([printing.__file__, "prints"], errors=None)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 9
    for worker in range(3):
        own = [line.removeprefix(f"[{worker}] ") for line in lines if line.startswith(f"[{worker}] ")]
        assert own == [f"out of worker {worker}", "step made", "the end"]
        assert f"[{worker}] errors of worker {worker}" in done.stderr.splitlines()


def test_a_killed_worker_is_not_waited_for():
    done = forked.run([printing.__file__, "launched"], errors=None)
    assert sorted(done.stdout.splitlines()) == ["111.0 [2.0]"] * 2, done.stderr


def test_workers_of_torchrun_bring_figures_together():
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", printing.__file__, "adds"]
    done = forked.run(words, environment={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.stdout.splitlines() == ["111.0 [2.0]"] * 3, done.stderr


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_run_whose_streams_are_closed_is_evaluated_to_its_end(closed, tmp_path):
    words = [sys.executable, printing.__file__, "evaluated", str(tmp_path), "processes", "threads"]
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", *words], timeout=forked.AGAINST_HANGS_S, check=False
    )
    assert done.returncode == 0
    for backend in ("processes", "threads"):
        result = json.loads((tmp_path / backend / "result.json").read_text())
        assert (result["outcome"], result["steps"], result["test_accuracy"]) == ("stopped", 2, 0.5)


@pytest.mark.parametrize("closed", ["2>&-", "2>/dev/full"])
def test_a_refusal_that_cannot_be_printed_keeps_its_exit_code_and_goes_nowhere_else(closed):
    program = """
from paceline.errors import UsageError
from paceline.system.uncaught import say_alone
say_alone()
raise UsageError("refused")
"""
    words = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", program]
    done = subprocess.run(words, stdout=subprocess.PIPE, timeout=forked.AGAINST_HANGS_S, check=False)
    assert (done.returncode, done.stdout) == (2, b"")
