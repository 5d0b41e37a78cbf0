"""The measurements on GPUs, rehearsed on a CPU: every one gives its rows."""

import os
from pathlib import Path

import forked

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


def test_every_measurement_gives_rows():
    done = forked.run([SCRIPT, "--rehearse"], environment={**os.environ})
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    for what in (
        "tests that",
        "`all-reduce`",
        "a lone",
        "`parameter-server",
        "a gradient",
        "the same",
        "`worker.batches",
    ):
        assert any(row.startswith(f"| {what}") for row in rows), done.stdout


def test_without_a_gpu_it_says_so(monkeypatch):
    done = forked.run([SCRIPT], environment={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 2
    assert "finds no GPU here; --rehearse" in done.stderr
