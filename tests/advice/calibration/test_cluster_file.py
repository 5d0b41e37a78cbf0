"""What workers have measured becomes a cluster file: planted measurements, without any process."""

import dataclasses
import json
import random

import pytest

from paceline.advice.calibration.cluster_file import MeasuredCluster, MeasuredWorker
from paceline.advice.calibration.codecs import CodecRate
from paceline.advice.calibration.machine import write_file
from paceline.advice.calibration.measurements import MemoryTimes, Quartiles
from paceline.errors import PacelineError
from paceline.simulator import Cluster

ABOUT = {"processor": "A", "cores": 1, "memory_gib": 1.0, "system": "Linux"}


def memory(bytes_per_s):
    copy_s = Quartiles.of([2e6 / bytes_per_s])
    return MemoryTimes(copy_s, [copy_s], Quartiles.of([5e-8]), Quartiles.of([9e-6]))


def worker(factor=1.0, machine=0, measures=None, seed=0):
    draw = random.Random(seed)
    steps_s = [0.01 * factor * draw.uniform(0.99, 1.01) for _ in range(100)]
    return MeasuredWorker(
        machine=machine,
        host=f"host-{machine}",
        about=ABOUT,
        compute_s={16: Quartiles.of(steps_s)},
        steps_s=steps_s,
        update_s=Quartiles.of([0.5e-3]),
        memory=measures,
    )


def test_speeds_of_codecs_are_medians_over_the_machines_that_have_them():
    measured = planted()
    assert measured.as_cluster().codecs == ()
    rates = [{"qsgd": CodecRate(one, 2 * one)} for one in (1e9, 3e9, 4e9)]
    rates[0]["sign"] = CodecRate(1.0, 1.0)
    first, second, third, fourth = measured.workers
    workers = [
        dataclasses.replace(first, codecs=rates[0]), second,
        dataclasses.replace(third, codecs=rates[1]), dataclasses.replace(fourth, codecs=rates[2]),
    ]  # fmt: skip
    assert planted(workers=workers).as_cluster().codecs == (("qsgd", 3e9, 6e9),)


def trips(latency_s, bandwidth):
    return {100: [2 * latency_s] * 3} | {size: [2 * (latency_s + size / bandwidth)] * 3 for size in (10**6, 4 * 10**6)}


PAIRS = [(a, b) for a in range(4) for b in range(a + 1, 4)]
TRIPS = {pair: trips(80e-6, 1e9) for pair in PAIRS} | {(2, 3): trips(160e-6, 2e8)}


def planted(round_trips_s=TRIPS, workers=None):
    """Workers 0 and 1 on one machine and two more; worker 2 is slow, and so is the way between 2 and 3."""
    workers = workers or [
        worker(measures=memory(10e9)),
        worker(seed=1),
        worker(1.5, machine=1, measures=memory(12e9), seed=2),
        worker(machine=2, measures=memory(11e9), seed=3),
    ]
    for number, one in enumerate(workers):
        one.round_trips_s.update({b: times_s for (a, b), times_s in round_trips_s.items() if a == number})
    return MeasuredCluster(task="digits-mlp", batch_size=16, vector_bytes=1_000_000, workers=workers)


def test_a_cluster_of_planted_measurements():
    cluster = planted().as_cluster()
    assert cluster.workers == 4
    assert cluster.compute_s == pytest.approx(0.01, rel=0.01)
    assert cluster.slowness == ((2, pytest.approx(1.5, rel=0.01)),)
    assert cluster.core_bytes_per_s == pytest.approx(11e9), "the median machine's"
    assert cluster.update_vectors == pytest.approx(0.5e-3 * 11e9 / 1e6, rel=1e-4)
    assert cluster.latency_s == pytest.approx(80e-6)
    assert 1 / cluster.bandwidth_bytes_per_s + 2 / cluster.core_bytes_per_s == pytest.approx(
        1e-9, rel=1e-5
    )  # wire and copy
    assert cluster.link_factors == ((2, 3, pytest.approx((160e-6 + 5e-3) / (80e-6 + 1e-3), rel=1e-4)),)


@pytest.mark.parametrize("suffix", ["toml", "json"])
@pytest.mark.parametrize("hosts", [False, True])
def test_the_file_is_read_back_and_names_hosts_only_if_wanted(tmp_path, suffix, hosts):
    measured = dataclasses.replace(planted(), names_hosts=hosts)
    cluster = measured.as_cluster()
    file = write_file(cluster, measured.comments(cluster), tmp_path / f"c.{suffix}")
    assert Cluster.load(file) == cluster
    told = json.dumps(measured.as_json(cluster, file))
    assert ("host-1" in told) == hosts
    if suffix == "toml":
        text = file.read_text()
        assert ("(host-1)" in text) == hosts
        assert "# worker 2: its steps take 1.50 times the median worker's" in text
        assert "#   workers 0 and 1 on one machine" in text
        assert "# Workers 0 and 1 share 1 core: their steps include waiting for each other." in text
        assert "Links: 6 of 6 pairs" in text


def test_a_disturbed_link_is_said_to_be_and_others_count():
    disturbed = {100: [1e-4], 10**6: [0.01], 4 * 10**6: [0.01]}
    sampled = {pair: times_s for pair, times_s in TRIPS.items() if pair != (0, 2)}
    measured = planted(sampled | {(0, 3): disturbed})
    cluster = measured.as_cluster()
    assert cluster.latency_s == pytest.approx(80e-6)
    comments = "\n".join(measured.comments(cluster))
    assert "Links: 5 of 6 pairs" in comments
    assert "taken as usual: links 0-3." in comments
    with pytest.raises(PacelineError, match="try again when it is idle"):
        planted(round_trips_s={(0, 1): disturbed}).as_cluster()
