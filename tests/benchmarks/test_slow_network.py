"""Links with a rate, and the arithmetic of what was measured on them."""

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from links import page
from links.methods import METHODS, SILENT
from links.network import BURST, Network

sys.path.pop()  # it has modules that are called like folders of tests

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


def test_networks_that_cannot_be_made_leave_nothing(monkeypatch):
    if shutil.which("ip") is None:
        pytest.skip("this machine has no `ip` (iproute2) to make links with")
    before = namespaces()
    monkeypatch.setattr("links.network.BURST", "no size")
    with pytest.raises(OSError, match=r"`(tc|ip) .*` failed: "), Network(2, RATE_MBIT):
        pass
    assert namespaces() == before


def record(method, *, rate=0.1, curve=(), part="tune", step_s=0.1):
    curve = [(step, step * step_s, accuracy) for step, accuracy in curve]
    given = {"method": method, "learning_rate": rate, "curve": curve, "part": part, "step_s": step_s}
    return {**given, "target": 0.5, "sent_bytes": 1e6, "updates": 100, "rate_mbit": 100.0, "quiet": True}


def test_a_target_is_reached_when_it_first_is():
    assert page.reached(record("all-reduce", curve=[(10, 0.4), (20, 0.5), (30, 0.45)])) == (20, 2.0)
    assert page.reached(record("all-reduce", curve=[(10, 0.4)])) is None
    assert page.reached({"target": 0.5, "failed": "lost"}) is None


def test_the_rate_with_the_fewest_updates_is_taken():
    records = [
        record("all-reduce", rate=0.1, curve=[(10, 0.1), (20, 0.6)]),
        record("all-reduce", rate=0.2, curve=[(10, 0.6)]),
        record("all-reduce", rate=0.4, curve=[(10, 0.2)]),
        record("ad-psgd", rate=0.4, curve=[(10, 0.2)]),
    ]
    assert (page.best_rate(records, "all-reduce"), page.updates_needed(records, "all-reduce")) == (0.2, 10)
    assert (page.best_rate(records, "ad-psgd"), page.updates_needed(records, "ad-psgd")) == (None, None)


def test_a_step_that_counts_comes_after_two_averages_and_whole_periods_are_timed():
    periods = 0
    for name, method in METHODS.items():
        period = int((re.findall(r"period\W+(\d+)", method.spec) or ["1"])[0])
        if name != SILENT and period > 1:
            periods += 1
            assert (method.every, method.warm_up, method.timed) == (period, 2 * period, 2 * period)
    assert periods >= 4


def test_the_headline_takes_medians_and_says_what_never_came():
    def runs(method, *seconds):
        return [record(method, part="full", step_s=one / 10, curve=[(10, 0.5)]) for one in seconds]

    records = [*runs("DistributedDataParallel", 100.0, 90.0, 300.0), *runs("da-sgd", 10.0, 20.0, 1.0)]
    records += [*runs("torchft DiLoCo", 15.0), record("all-reduce", part="full", curve=[(10, 0.1)])]
    said = page.summary(records, 0.5)
    assert "took 100 s" in said
    assert "da-sgd, 10 s: 10.0 and 1.50 times sooner" in said
    assert any(line.startswith("| all-reduce | Paceline | never |") for line in page.full_table(records))
