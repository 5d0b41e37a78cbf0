"""What a calibration makes of its measurements, and the command in a real process."""

import dataclasses
import json
import math
import random

import pytest
from typer.testing import CliRunner

import forked
import paceline as pl
from paceline.advice.calibration.codecs import CodecRate, measure_codecs
from paceline.advice.calibration.machine import Calibration, write_file
from paceline.advice.calibration.measurements import MemoryTimes, Quartiles, fit_cold, fit_link
from paceline.cli.app import app
from paceline.compression.qsgd import QSGD
from paceline.compression.registry import codec_registry
from paceline.errors import PacelineError
from paceline.simulator import Cluster


def planted_trips(latency_s, bandwidth, sizes=(100, 1_000_000, 2_000_000, 4_000_000, 8_000_000), spikes=0.3):
    """Round trips over a link like that: a little noise, and now and then one that took ten times as long."""
    draw, trips_s = random.Random(1), {}
    for num_bytes in sizes:
        exact_s = 2 * (latency_s + (num_bytes if num_bytes > 1000 else 0) / bandwidth)
        trips_s[num_bytes] = [
            exact_s * (10 if draw.random() < spikes else draw.uniform(0.99, 1.01)) for _ in range(101)
        ]
    return trips_s


def write(measured, cluster, file):
    return write_file(cluster, measured.comments(cluster), file)


def planted(**changes):
    """A machine: 10 ms and 0.5 ms a step, 10 GB/s alone and 15 GB/s for two, a link of 80 us and 1 GB/s."""
    always = {
        name: Quartiles(value, value, value, 9)
        for name, value in {"update": 0.5e-3, "atomic": 5e-8, "wake": 9e-6}.items()
    }
    machine = Calibration(
        task="digits-mlp",
        batch_size=16,
        vector_bytes=1_000_000,
        compute_s={4: Quartiles.of([0.004]), 16: Quartiles.of([0.010, 0.009, 0.2]), 64: Quartiles.of([0.03])},
        update_s=always["update"],
        memory=MemoryTimes(
            copy_s=Quartiles.of([0.2e-3]),
            crowded_copies_s=[Quartiles.of([0.25e-3]), Quartiles.of([0.2857142857e-3])],
            atomic_s=always["atomic"],
            wake_s=always["wake"],
        ),
        round_trips_s=planted_trips(80e-6, 1e9),
        handed_copy_s=Quartiles.of([0.2e-3]),
        cores=2,
        lone_step_s=Quartiles.of([0.010]),
        crowded_steps_s=[Quartiles.of([0.010])],
        spin_s=Quartiles.of([1e-5]),
        slice_s=None,
        cold_steps_s=planted_pauses(0.0, 1e-3, 0.02, spike_s=0.0),
        few_cold_steps_s=planted_pauses(0.0, 1e-3, 0.001, spike_s=0.0),
        codecs={},
    )
    return dataclasses.replace(machine, **changes)


@pytest.mark.parametrize("latency_s", [2e-6, 80e-6, 0.03])
@pytest.mark.parametrize("bandwidth", [1e7, 1e9, 5e10])
def test_a_planted_link_is_found_again(latency_s, bandwidth):
    link = fit_link(planted_trips(latency_s, bandwidth, sizes=(100, 10**8, 2 * 10**8, 4 * 10**8)))
    assert link.latency_s == pytest.approx(latency_s, rel=0.01)
    assert link.bandwidth_bytes_per_s == pytest.approx(bandwidth, rel=0.05)


def test_one_disturbed_size_does_not_spoil_the_bandwidth():
    trips_s = planted_trips(80e-6, 1e9, spikes=0.0)
    trips_s[2_000_000] = [5 * one for one in trips_s[2_000_000]]
    assert fit_link(trips_s).bandwidth_bytes_per_s == pytest.approx(1e9, rel=0.5)
    with pytest.raises(PacelineError, match="try again when it is idle"):
        fit_link({100: [1e-4], 1_000_000: [0.01], 4_000_000: [0.01]})


def test_a_cluster_of_planted_measurements():
    cluster = planted().as_cluster()
    assert cluster.workers == 2
    assert cluster.compute_s == 0.010  # the median: one step of 0.2 s changes nothing
    assert cluster.core_bytes_per_s == pytest.approx(10e9)
    assert cluster.bus_bytes_per_s == pytest.approx(15e9)
    assert cluster.update_vectors == pytest.approx(5.0)
    assert (cluster.atomic_s, cluster.wake_s) == (5e-8, 9e-6)
    assert cluster.latency_s == pytest.approx(80e-6, rel=0.01)
    assert cluster.bandwidth_bytes_per_s == pytest.approx(1e9, rel=0.01)
    assert planted().as_cluster(workers=16).workers == 16
    disturbed = dataclasses.replace(planted().memory, crowded_copies_s=[Quartiles.of([0.3e-3])])
    alone = planted(memory=disturbed).as_cluster()
    assert alone.bus_bytes_per_s == alone.core_bytes_per_s


def test_a_machine_whose_cores_were_measured_shares_them(tmp_path):
    crowded = [Quartiles.of([0.011]), Quartiles.of([0.013])]
    shared = {
        "cores": 2,
        "lone_step_s": Quartiles.of([0.010]),
        "crowded_steps_s": crowded,
        "slice_s": Quartiles.of([0.004]),
    }
    measured = planted(handed_copy_s=Quartiles.of([0.4e-3]), spin_s=Quartiles.of([1e-4]), **shared)
    cluster = measured.as_cluster(workers=4)
    assert (cluster.workers, cluster.cores, cluster.slice_s, cluster.spin_s) == (4, 2, 0.004, 1e-4)
    assert cluster.crowding == pytest.approx(1.2)
    assert cluster.core_bytes_per_s == pytest.approx(5e9)  # of what another process has written
    update_s = cluster.update_vectors * measured.vector_bytes / cluster.core_bytes_per_s
    assert update_s == pytest.approx(measured.update_s.median_s)
    assert (
        planted(**{**shared, "crowded_steps_s": [Quartiles.of([0.009])]}).as_cluster().crowding == 1.0
    )  # disturbed meanwhile
    file = write(measured, cluster, tmp_path / "here.toml")
    assert Cluster.load(file) == cluster
    text = file.read_text()
    assert "# and leave out cores, slice_s, spin_s, crowding, cold_s" in text
    assert "#   time slice: 4 ms" in text


# Codecs


def test_every_codec_but_power_is_measured_on_the_given_clock(monkeypatch):
    """A clock on which qsgd takes 3 s to code 400 bytes and 2 s to decode them, and all others 1 s."""
    now = [0.0]

    def now_s():
        now[0] += 1.0
        return now[0]

    class Slow(QSGD):
        def encode(self, gradient, memory, key=0):
            now[0] += 2.0 if key else 1000.0  # the first time it is compiled
            return super().encode(gradient, memory, key)

        def decode(self, encoded, num_elements, dtype):
            now[0] += 1.0
            return super().decode(encoded, num_elements, dtype)

    monkeypatch.setitem(codec_registry._classes, "qsgd", Slow)
    rates = measure_codecs(10.0, num_elements=100, now_s=now_s)
    assert rates.pop("qsgd") == (pytest.approx(400 / 3), pytest.approx(400 / 2))
    assert set(rates.values()) == {(400.0, 400.0)}
    assert {"qsgd", *rates} == set(codec_registry) - {"none", "power"}


def test_what_was_measured_of_codecs_is_in_the_file_and_read_back(tmp_path):
    measured = planted(codecs={"sign": CodecRate(3.00000049e9, 7e9), "qsgd": CodecRate(1e9, 2e9)})
    cluster = measured.as_cluster()
    assert cluster.codecs == (("qsgd", 1e9, 2e9), ("sign", 3e9, 7e9))
    for suffix in ("toml", "json"):
        file = write(measured, cluster, tmp_path / f"here.{suffix}")
        assert Cluster.load(file) == cluster
    assert "[codecs]\nqsgd = [1000000000.0, 2000000000.0]\n" in (tmp_path / "here.toml").read_text()
    plain = write(planted(), planted().as_cluster(), tmp_path / "plain.toml")
    assert "[codecs]\n" not in plain.read_text()
    assert Cluster.load(plain).codecs == (), "as files of before"


def planted_pauses(cold_s, cooling_s, alone_s, factor=math.inf, spike_s=0.5):
    """Steps after pauses, in pairs, of which one is disturbed."""
    found = {}
    for pause_s in (0.001, 0.003, 0.01, 0.03):
        longer_s = min(cold_s * (1 - math.exp(-pause_s / cooling_s)), alone_s * (factor - 1))
        found[pause_s] = [(alone_s + longer_s, alone_s)] * 6 + [(alone_s + spike_s, alone_s)]
    return found


@pytest.mark.parametrize(("cold_s", "cooling_s"), [(0.002, 0.002), (0.0015, 0.010), (0.004, 0.0005)])
def test_what_a_pause_costs_is_found_again(cold_s, cooling_s):
    few = planted_pauses(cold_s, cooling_s, 0.001, factor=2.2)
    cold = fit_cold(planted_pauses(cold_s, cooling_s, 0.02), few)
    assert cold.cold_s == pytest.approx(cold_s, rel=0.01)
    assert cold.cooling_s == pytest.approx(cooling_s, rel=0.12)  # a step of the grid
    assert cold.cold_factor == pytest.approx(2.2)


def test_a_worker_that_is_no_slower_after_a_pause_has_nothing_to_make_up_for():
    faster = {pause_s: [(0.009, 0.010)] * 5 for pause_s in (0.001, 0.01)}
    cold = fit_cold(faster, faster)
    assert (cold.cold_s, cold.cold_factor) == (0.0, 1.0)
    measured = planted(
        cores=2, cold_steps_s=planted_pauses(2e-3, 2e-3, 0.02), few_cold_steps_s=faster | {0.03: [(0.01, 0.01)]}
    )
    cluster = measured.as_cluster()
    assert cluster.cold_s == pytest.approx(2e-3, rel=0.01)
    assert cluster.cold_factor == pytest.approx(1.1, rel=0.01)


@pytest.mark.parametrize("suffix", ["toml", "json"])
def test_the_file_is_read_back_and_its_steps_take_the_measured_time(tmp_path, suffix):
    measured = planted()
    file = write(measured, measured.as_cluster(workers=1), tmp_path / f"here.{suffix}")
    assert [one.name for one in tmp_path.iterdir()] == [file.name]  # no draft is left
    cluster = Cluster.load(file)
    assert cluster == measured.as_cluster(workers=1)
    config = pl.TrainConfig(algorithm="sequential", steps=50, batch_size=16)
    run = pl.simulate_task(config, cluster=cluster, timing_only=True, num_parameters=measured.vector_bytes // 4)
    assert run.result["wall_s"] / 50 == pytest.approx(0.010 + 0.5e-3, rel=1e-4)


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    file = tmp_path / "here.toml"
    file.write_text("workers = 3\n")

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr("paceline.advice.calibration.machine.Calibration.comments", full)
    with pytest.raises(OSError, match="no space"):
        write(planted(), planted().as_cluster(), file)
    assert file.read_text() == "workers = 3\n"
    assert [one.name for one in tmp_path.iterdir()] == ["here.toml"]


def test_calibrate_then_simulate(tmp_path, fork_server):
    done = forked.run(["-m", "paceline", "calibrate", "--quick", "--out", "here.toml", "--json"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Measuring messages between two processes" in done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    measured = found["measured"]
    assert set(found["codecs"]) == set(codec_registry) - {"none", "power"}
    assert all(rate > 0 for rates in found["codecs"].values() for rate in rates.values())
    step_s = measured["step without update, batch 8"]["median_s"] + measured["update"]["median_s"]
    for name, spread in measured.items():
        assert 0 < spread["low_s"] <= spread["median_s"] <= spread["high_s"], name
    file = tmp_path / "here.toml"
    assert "# Measured by `paceline calibrate`" in file.read_text()
    assert {name for name, *_ in Cluster.load(file).codecs} == set(found["codecs"])

    words = f"simulate --cluster {file} --workers 1 --algorithm sequential --steps 40 --timing-only --json".split()
    simulated = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "run")])
    assert simulated.exit_code == 0, simulated.output
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["wall_s"] / 40 == pytest.approx(step_s, rel=1e-3)
