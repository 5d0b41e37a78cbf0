"""The benchmark of shared memory makes a worker's parts by itself, and so must follow their constructors."""

from pathlib import Path

import forked
from real_data import needs_mnist

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "shared_memory.py"


@needs_mnist
def test_what_events_cost_can_be_measured(tmp_path):
    runs = tmp_path / "runs.jsonl"
    done = forked.run([SCRIPT, "--only", "events", "--repeats", "1", "--seconds", "0.05", "--runs", runs])
    assert done.returncode == 0, done.stderr
    assert runs.read_text().count("events and counters, batch") == 2
