"""One simulated run of every algorithm has the same bytes as on the day on which it was recorded.

Only times are simulated, and none is drawn, so that no processor's way of rounding is in them. To change runs on purpose
record them anew, and say so: `python tests/contracts/test_recorded_runs.py`.
"""

import hashlib
import json
import tempfile
from pathlib import Path

import pytest

import paceline as pl
from paceline.algorithms import registry
from paceline.simulator import Cluster

RECORDED = Path(__file__).with_suffix(".json")
ALGORITHMS = (
    "sequential", "lockstep", "lockstep(shares=auto)", "all-reduce", "all-reduce(sharded=true)", "all-reduce(shares=auto)",
    "all-reduce(sharded=true, shares=auto)", "all-reduce(codec=qsgd)", "all-reduce(codec=power)",
    "parameter-server(mode=async, codec=sign)", "locked", "locked(kind=rwlock)", "hogwild",
    "hogwild(reads=copy)", "leashed", "leashed(backoff=exponential)", "local-sgd", "da-sgd", "da-sgd(delay=auto)",
    "da-sgd(delay=3, merge=corrected)", "diloco(period=5)", "diloco(period=10, fragments=3, delay=2)", "d-psgd",
    "d-psgd(topology=exponential)", "ad-psgd", "ad-psgd(topology=complete)", "parameter-server",
    "parameter-server(mode=sync(backups=1))",
    "parameter-server(mode=async)", "parameter-server(mode=async(rate=rescaled))",
    "parameter-server(mode=bounded(clock_bound=2))", "parameter-server(mode=rennala(gradients=3))",
    "parameter-server(mode=ringmaster(threshold=2))", "parameter-server(mode=ringleader)", "downpour", "adaptive-revision",
)  # fmt: skip


def digest_of(spec, folder):
    """Of the files of a run of workers of which two are slow."""
    workers = 1 if spec == "sequential" else 4
    config = pl.TrainConfig(task="digits-mlp", algorithm=spec, workers=workers, steps=25, seed=7)
    slowness = ((0, 3.0), (1, 1.37)) if workers > 1 else ()
    cluster = Cluster(workers=workers, compute_s=0.01, slowness=slowness)
    run = pl.simulate_task(config, cluster=cluster, timing_only=True, num_parameters=5_000, out=folder)
    assert run.result["outcome"] != "crashed", run.result["outcome_reason"]
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.name not in ("host.json", "report.html"):  # dates and paths
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def test_every_algorithm_is_recorded():
    assert {spec.partition("(")[0] for spec in ALGORITHMS} == {name for name, _ in registry.items()}
    assert json.loads(RECORDED.read_text()).keys() == set(ALGORITHMS)


@pytest.mark.parametrize("spec", ALGORITHMS)
def test_a_simulated_run_has_the_bytes_that_were_recorded(spec, tmp_path):
    assert digest_of(spec, tmp_path / "run") == json.loads(RECORDED.read_text())[spec]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        found = {spec: digest_of(spec, Path(made) / str(number)) for number, spec in enumerate(ALGORITHMS)}
    RECORDED.write_text(json.dumps(found, indent=1) + "\n")
