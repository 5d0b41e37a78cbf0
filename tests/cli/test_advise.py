"""`paceline advise layers`: the balance equations of a task's model."""

import json

import pytest
from typer.testing import CliRunner

from paceline.cli.app import app


def layers(*arguments):
    result = CliRunner().invoke(app, ["advise", "layers", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_layers_of_a_built_in_task():
    code, out, error = layers("--workers", "8", "--flops-per-s", "1e10", "--json")
    assert code == 0, error
    found = json.loads(out)
    weights = [one["weights"] for one in found["layers"]]
    assert weights == [64 * 64, 64 * 64, 640]
    # 1.5 operations per byte and point, all fully connected: 10 GFLOP/s over 1.25 GB/s are 8 per byte.
    assert (found["machine_flops_per_byte"], found["min_points_per_worker"]) == (8.0, 6)
    assert found["max_workers"] == 8 * 8 // 6
    first = found["layers"][0]
    assert first["data_parallel_bytes"] == 4 * 64 * 64
    assert first["exposed_s"] == pytest.approx(4 * 64 * 64 / 1.25e9)
    assert first["sent_bytes"] <= first["data_parallel_bytes"]


def test_the_table_and_a_cluster_whose_step_says_how_fast_a_worker_is(tmp_path):
    (tmp_path / "here.toml").write_text("workers = 4\ncompute_s = 0.001\n")
    code, out, error = layers("--cluster", str(tmp_path / "here.toml"))
    assert code == 0, error
    assert "4 workers with 8 samples each, 0.4 GFLOP/s" in out  # 6 x 8 x 8,832 operations in a millisecond
    assert "Computation hides data parallelism with 1 samples per worker or more" in out
    assert "hybrid" in out or "data" in out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--workers 0", "--workers must be 1 or more, not 0"),
        ("--flops-per-s 0", "--flops-per-s must be 1 or more"),
        ("--overlap 2", "--overlap must be from 0 to 1, not 2.0"),
        ("--task digits", "Did you mean 'digits-mlp'?"),
        ("--cluster missing.toml", "missing.toml does not exist"),
    ],
)
def test_refused(options, says):
    code, out, error = layers("--flops-per-s", "1e9", *options.split())
    assert (code, out) == (2, "")
    assert says in error
    assert error.count("\n") == 1
