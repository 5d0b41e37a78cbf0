"""Who made a run slow, in real processes: 200 ms in one worker's backward pass, in its input, or on a link."""

import contextlib
import random
import shutil
import time
from functools import partial

import numpy as np
import pytest

import paceline as pl
import soak_results
from paceline.observe.blame import blame, sentence
from processes.blame_links import NUM_HOSTS, Network, run_over, slow_down
from processes.blame_programs import SLEEP_S, train

WAITING = ["all-reduce", "d-psgd", "parameter-server"]
METHODS = [*WAITING, "ad-psgd", "parameter-server(mode=async)", "hogwild"]


def launched(algorithm, fault, **more):
    return pl.launch(partial(train, 1, fault, **more), workers=3, algorithm=algorithm)


@pytest.mark.parametrize("algorithm", METHODS)
@pytest.mark.parametrize("fault", ["computing", "input"])
def test_a_sleep_is_blamed_on_the_worker_that_slept(algorithm, fault):
    cause = blame(launched(algorithm, fault)).cause
    assert (cause.worker, cause.activity) == (1, fault)
    assert cause.own_s >= SLEEP_S


def test_input_of_a_loop_with_its_own_batches():
    run = launched("all-reduce", "input", deals_batches=False)
    assert np.median(run.records[1]["input_s"]) >= SLEEP_S
    cause = blame(run).cause
    assert (cause.worker, cause.activity) == (1, "input")


def test_workers_count_the_time_that_they_wait_for_servers():
    """Two of three workers wait for the third one's gradient, in which it sleeps."""
    run = launched("parameter-server", "computing")
    for worker in (0, 2):
        rows = run.records[worker][1:-1]
        assert np.median(rows["wait_s"]) > SLEEP_S / 2
        assert (rows["partner"] == 3).all()  # the server
        assert (rows["partner_s"] <= rows["wait_s"] + 1e-3).all()


RUNS = 20
FAMILIES = {
    "shared memory": ["hogwild", "locked", "leashed"],
    "servers": [
        "parameter-server", "parameter-server(mode=async)", "parameter-server(mode=bounded(clock_bound=2))", "downpour",
    ],
    "lockstep rounds": ["lockstep", "all-reduce"],
    "periodic averaging": ["local-sgd(period=4)", "da-sgd", "diloco(period=4)"],
    "gossip": ["d-psgd", "ad-psgd"],
}  # fmt: skip
LINKED = {**FAMILIES, "lockstep rounds": ["all-reduce"]}  # where each worker can have a host of its own
del LINKED["shared memory"]
AVERAGED = ("all-reduce", "local-sgd", "da-sgd", "diloco")  # messages have a part of the vector for each worker
STEPS = {"local-sgd": 32, "da-sgd": 32, "diloco": 32, "ad-psgd": 160}  # of the others: 10


def with_sleep(draw, algorithm, fault, number):
    """A run, and the worker, the link and the activity to blame."""
    workers, deals_batches = 2 + number // 2 % 2, number % 4 != 3
    slow = draw.randrange(workers)
    train_slowly = partial(train, slow, fault, deals_batches=deals_batches, steps=12)
    return pl.launch(train_slowly, workers=workers, algorithm=algorithm), (slow, None, fault)


def with_link(draw, algorithm):
    name, size, has_servers = algorithm.partition("(")[0], draw.choice([400, 720]), algorithm in FAMILIES["servers"]
    hosts = (0, draw.randrange(1, NUM_HOSTS)) if has_servers else sorted(draw.sample(range(NUM_HOSTS), 2))
    message_bytes = 4 * size**2 / (NUM_HOSTS if name in AVERAGED else 1)
    with contextlib.ExitStack() as stack:
        try:
            network = stack.enter_context(Network(NUM_HOSTS))
            slow_down(network, hosts, message_bytes / SLEEP_S)
        except OSError as error:
            pytest.skip(f"no shaped links between network namespaces here: {error}")
        run, workers = run_over(network, algorithm, steps=STEPS.get(name, 10), size=size, has_servers=has_servers)
    if has_servers:
        return run, (workers[hosts[1]], None, "communicating")
    return run, (None, tuple(sorted(workers[one] for one in hosts)), "communicating")


@pytest.mark.soak
@pytest.mark.parametrize(
    ("family", "fault"),
    [*((family, fault) for family in FAMILIES for fault in ("computing", "input")), *((one, "link") for one in LINKED)],
)
def test_twenty_faults_are_attributed(family, fault, capsys):
    if fault == "link" and not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("this machine has no `ip` and `tc` (iproute2) to make links with")
    draw, begun_s, wrong = random.Random(f"{family} {fault}"), time.monotonic(), []
    methods = (LINKED if fault == "link" else FAMILIES)[family]
    for number in range(RUNS):
        algorithm = methods[number % len(methods)]
        if fault == "link":
            run, expected = with_link(draw, algorithm)
        else:
            run, expected = with_sleep(draw, algorithm, fault, number // len(methods))
        found = blame(run)
        cause = found.cause
        if cause is None or (cause.worker, cause.link, cause.activity) != expected:
            wrong.append({"algorithm": algorithm, "expected": expected, "said": sentence(found)})
        with capsys.disabled():
            print(f"{number + 1} of {RUNS}: {family}, {fault}, {algorithm}: {sentence(found)}", flush=True)
    took_s = round(time.monotonic() - begun_s, 1)
    figures = {"runs": RUNS, "right": RUNS - len(wrong), "wrong": wrong, "took_s": took_s}
    soak_results.keep("soak_blame", f"{family}, {fault}", figures)
    assert not wrong
