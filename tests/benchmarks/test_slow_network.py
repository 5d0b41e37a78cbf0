"""Links with a rate, and the arithmetic of what was measured on them."""

import math
import multiprocessing
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import slow_network
from links import page
from links.methods import ALONE, METHODS, SILENT
from links.network import BURST, Network

sys.path.pop()

RATE_MBIT, NUM_BYTES = 8.0, 2_000_000
RECEIVE = f"""
import socket, sys
with socket.create_server(("0.0.0.0", 29512)) as server:
    print("listening", flush=True)
    connection, _ = server.accept()
    left = {NUM_BYTES}
    while left:
        left -= len(connection.recv(min(left, 1 << 16)))
    connection.sendall(b"k")
"""
SEND = f"""
import socket, sys
with socket.create_connection((sys.argv[1], 29512)) as connection:
    connection.sendall(bytes({NUM_BYTES}))
    connection.recv(1)
"""


def namespaces():
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


def test_a_link_is_no_faster_than_its_rate_and_counts_what_it_sends():
    if shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("this machine has no `ip` and `tc` (iproute2) to make links with")
    before = namespaces()
    try:
        network = Network(2, RATE_MBIT).__enter__()
    except OSError as error:
        pytest.skip(f"no network namespaces here: {error}")
    try:
        host = network.command(1, [sys.executable, "-c", RECEIVE])
        with subprocess.Popen(host, stdout=subprocess.PIPE, text=True) as receiver:
            assert receiver.stdout.readline() == "listening\n"
            sent, started_s = network.sent_bytes(0), time.monotonic()
            subprocess.run(network.command(0, [sys.executable, "-c", SEND, network.address(1)]), check=True)
            took_s = time.monotonic() - started_s
        assert receiver.returncode == 0
        least_s = (NUM_BYTES - int(BURST.removesuffix("kb")) * 1024) * 8 / (RATE_MBIT * 1e6)
        assert took_s >= least_s
        assert NUM_BYTES <= network.sent_bytes(0) - sent <= 1.2 * NUM_BYTES, (
            "payload, with headers and what was sent again"
        )
    finally:
        network.__exit__()
    assert namespaces() == before


def addresses():
    return subprocess.run(["ip", "-4", "-o", "address"], capture_output=True, text=True, check=True).stdout


def entered(network, host, answer):
    network.enter(host)
    answer.send(addresses())


def test_a_process_that_enters_a_host_has_its_address_alone():
    if shutil.which("ip") is None:
        pytest.skip("this machine has no `ip` (iproute2) to make links with")
    try:
        network = Network(2).__enter__()
    except OSError as error:
        pytest.skip(f"no network namespaces here: {error}")
    try:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=entered, args=(network, 1, theirs))
        process.start()
        found = ours.recv()
        process.join()
        assert network.address(1) in found
        assert network.address(0) not in found
        assert network.address(1) not in addresses()
    finally:
        network.__exit__()


def test_networks_that_cannot_be_made_leave_nothing(monkeypatch):
    if shutil.which("ip") is None:
        pytest.skip("this machine has no `ip` (iproute2) to make links with")
    before = namespaces()
    monkeypatch.setattr("links.network.BURST", "no size")
    with pytest.raises(OSError, match=r"`(tc|ip) .*` failed: "), Network(2, RATE_MBIT):
        pass
    assert namespaces() == before


def record(method, *, rate=0.1, curve=(), part="tune", step_s=0.1, seed=0, updates=480):
    curve = [(step, step * step_s, accuracy) for step, accuracy in curve]
    given = {"method": method, "learning_rate": rate, "curve": curve, "part": part, "step_s": step_s, "seed": seed}
    return {
        **given,
        "target": 0.5,
        "sent_bytes": 1e6,
        "updates": updates,
        "rate_mbit": 100.0,
        "quiet": True,
        "protocol": 1,
    }


def test_a_target_is_reached_when_it_first_is():
    assert page.reached(record("all-reduce", curve=[(10, 0.4), (20, 0.5), (30, 0.45)])) == (20, 2.0)
    assert page.reached(record("all-reduce", curve=[(10, 0.4)])) is None
    assert page.reached({"target": 0.5, "failed": "lost"}) is None


def test_a_search_counts_updates_and_ignores_runs_that_were_too_short():
    records = [
        record("all-reduce", rate=0.1, curve=[(10, 0.1), (20, 0.6)], updates=100),
        record("all-reduce", rate=0.2, curve=[(10, 0.6)]),
        record("all-reduce", rate=0.4, curve=[(10, 0.2)]),
        record("all-reduce", rate=0.05, curve=[(10, 0.2)], updates=100),
        record("ad-psgd", rate=0.4, curve=[(10, 0.2)]),
    ]
    assert page.rates_of(records, "all-reduce").tried == {0.1: {0: 20}, 0.2: {0: 10}, 0.4: {0: math.inf}}
    found = page.rates_of(records, "all-reduce", runs=1)
    assert (found.used, found.best) == (0.2, 0.2)
    assert page.updates_needed(records, "all-reduce") == 10
    assert page.updates_needed(records, "ad-psgd") is None


def test_the_plan_searches_rates_first_and_trains_at_the_largest_that_always_arrives():
    records, made = [], []
    for wanted in slow_network.plan(["tune", "full"], [SILENT, ALONE, "da-sgd, half as often"], records):
        at = 20 if wanted.method == SILENT else 10
        curve = [(at, 0.5 if wanted.learning_rate <= 0.2 else 0.1)]
        made.append(wanted)
        records.append(
            record(wanted.method, rate=wanted.learning_rate, seed=wanted.seed, part=wanted.part, curve=curve)
        )
        records[-1]["rate_mbit"] = wanted.rate_mbit
        assert wanted.updates == page.UPDATES
        assert len(made) < 1000
    full = [one for one in made if one.part == "full"]
    assert {one.method for one in full} == {SILENT, ALONE}, "the other one is not trained on slow links"
    assert all(one.learning_rate == 0.2 and one.rate_mbit == 100.0 for one in full)
    seeds = {part: {one.seed for one in made if one.part == part} for part in ("tune", "full")}
    assert len(seeds["full"]) == 5
    assert not seeds["full"] & seeds["tune"], "a rate is not judged by the runs that chose it"
    assert slow_network.settings_of(full[-1]).workers == METHODS[full[-1].method].workers
    assert not list(slow_network.plan(["tune", "full"], [SILENT, ALONE], records)), "nothing is made twice"


def test_a_step_that_counts_comes_after_two_averages_and_whole_periods_are_timed():
    periods = 0
    for name, method in METHODS.items():
        period = int((re.findall(r"period\W+(\d+)", method.spec) or ["1"])[0])
        if name != SILENT and period > 1:
            periods += 1
            assert (method.every, method.warm_up, method.timed) == (period, 2 * period, 2 * period)
    assert periods >= 4


def full(method, *seconds):
    return [
        record(method, part="full", step_s=one / 10, curve=[(10, 0.5 if math.isfinite(one) else 0.1)], seed=seed)
        if math.isfinite(one) else record(method, part="full", curve=[(10, 0.1)], seed=seed, updates=180)
        for seed, one in enumerate(seconds)
    ]  # fmt: skip


def test_the_headline_names_no_communication_first_and_who_is_sooner():
    never = math.inf
    records = [
        *full("DistributedDataParallel", 100.0, 90.0, never),
        *full("da-sgd", 10.0, 20.0, 1.0),
        *full("torchft DiLoCo", 15.0, 50.0, 60.0),
        *full("all-reduce", never),
        *full(SILENT, 21.0, 22.0, 23.0),
    ]
    said = page.summary(records)
    assert said.startswith("On 100 Mbit/s, workers that never communicate reach 50 % after 22 (21 to 23) s (3 runs).")
    ahead, _, behind = said.partition("All others are not, so that communication is not shown to help there:")
    assert "in seconds: da-sgd 10.0 (1.0 to 20.0)." in ahead
    assert "torchft DiLoCo 50.0 (15.0 to 60.0)" in behind, "it overlaps"
    assert "DistributedDataParallel 100.0 (90.0 to never, 1 of 3 did not arrive)" in behind
    assert "Of the 3 runs of DistributedDataParallel, 1 ended at 180 updates before it was there" in behind
    assert any(line.startswith("| all-reduce | Paceline | did not arrive |") for line in page.full_table(records))


def test_without_full_runs_the_control_is_known_by_its_steps():
    records = [
        record(SILENT, curve=[(40, 0.5)]),
        record(SILENT, part="steps", step_s=0.5),
        *full("da-sgd", 30.0),
    ]
    for one in records:
        one["protocol"] = None
    assert page.summary(records).startswith(
        "On 100 Mbit/s, workers that never communicate reach 50 % after 20 s (40 updates of 500 ms; no run of it"
    )
    lacks = page.lacks(records)
    assert "full runs of the controls (no communication, one worker alone)" in lacks
    assert "5 runs of each row (there are 1)" in lacks
    assert "the lowest or highest tried of no communication" in lacks
