"""The benchmark of all-reduce trains DistributedDataParallel's model inside our `with`, and has nothing to warn of."""

import json
import os
from pathlib import Path

import forked

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "all_reduce.py"


def test_both_sides_are_measured_without_a_word():
    command = [SCRIPT, "--rounds", "1", "--steps", "1", "--only", "mlp", "--json"]
    done = forked.run(command, environment={**os.environ, "PYTHONWARNINGS": "default"})
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    (figures,) = json.loads(done.stdout).values()
    assert figures["ratio"] > 0
