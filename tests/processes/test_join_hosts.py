"""Two machines, as two networks of this one: one of them is cut off, and both sides go on."""

import contextlib
import os
import shutil
import signal
import subprocess

import pytest

from paceline.transport.keys import create_keys
from processes.join_programs import Crew, free_address, placed

HOSTS = ("10.231.77.1", "10.231.77.2")


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def networks():
    """Two network namespaces with an address each, joined by one wire; removed afterwards."""
    if shutil.which("ip") is None:
        pytest.skip("this machine has no `ip` (iproute2) to make networks with")
    names = [f"paceline-{os.getpid()}-{side}" for side in "ab"]
    wires = [f"pl{os.getpid() % 100_000}{side}" for side in "ab"]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", wires[0], "netns", names[0], "type", "veth", "peer", "name", wires[1], "netns", names[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        for name, wire, host in zip(names, wires, HOSTS, strict=True):
            ip("-n", name, "address", "add", f"{host}/24", "dev", wire)
            ip("-n", name, "link", "set", wire, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names, wires
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def test_a_machine_that_is_cut_off(networks, tmp_path):
    """The join point and two workers on one side, two workers on the other; messages are encrypted."""
    names, wires = networks
    create_keys(tmp_path / "run.key")
    with Crew(free_address(HOSTS[0]), PACELINE_OF="4", PACELINE_KEY=str(tmp_path / "run.key")) as crew:
        crew.hold(namespace=names[0])
        hands = [
            hand for name in names for hand in crew.start(2, namespace=name, algorithm="ad-psgd(topology=complete)")
        ]
        sides = [hands[:2], hands[2:]]
        placed(hands)
        for one in hands:
            one.trains_on()
        ip("-n", names[0], "link", "set", wires[0], "down")
        for one in hands:
            one.trains_on(600)
        crew.finish()
        results = [[one.hear("result") for one in side] for side in sides]
    for side in results:
        assert side[0]["x"] == side[1]["x"], "each side ends with the mean of its own models"
        assert all(one["averages_per_step"] > 0 for one in side)
    assert results[0][0]["x"] != results[1][0]["x"]


def both_sides(networks, folder, sizes, **wishes):
    """So many workers in each network, which have made some steps; the join point is in the first one."""
    create_keys(folder / "run.key")
    crew = Crew(free_address(HOSTS[0]), PACELINE_OF=str(sum(sizes)), PACELINE_KEY=str(folder / "run.key"))
    with contextlib.ExitStack() as stack:
        stack.enter_context(crew)
        crew.hold(namespace=networks[0])
        sides = [crew.start(number, namespace=name, **wishes) for number, name in zip(sizes, networks, strict=True)]
        for one in placed([*sides[0], *sides[1]]).values():
            one.trains_on()
        stack.pop_all()
    return crew, sides


@pytest.mark.parametrize(
    ("sizes", "algorithm"), [((2, 1), "all-reduce"), ((1, 2), "d-psgd"), ((2, 2), "all-reduce")], ids=str
)
def test_only_the_majority_trains_on_in_rounds(sizes, algorithm, networks, tmp_path):
    """Or, of two halves, the one with worker 0; the others end with an error after the deadline."""
    names, wires = networks
    crew, sides = both_sides(names, tmp_path, sizes, algorithm=algorithm, silence_s=3.0)
    with crew:
        ip("-n", names[0], "link", "set", wires[0], "down")
        winners, losers = sorted(sides, key=lambda side: (-len(side), min(one.worker_id for one in side)))
        for one in losers:
            assert "could not be reached for 3 s" in one.hear("ExcludedError")
        for one in winners:
            one.trains_on()
        crew.finish()
        first, *others = [one.hear("result")["x"] for one in winners]
    assert all(other == first for other in others)


def test_a_worker_takes_the_place_of_one_whose_machine_has_failed(networks, tmp_path):
    """It comes before the others have excluded that one."""
    names, wires = networks
    options = {"algorithm": "all-reduce", "silence_s": 3.0}
    crew, (others, (lost,)) = both_sides(names, tmp_path, (2, 1), **options)
    with crew:
        ip("-n", names[0], "link", "set", wires[0], "down")
        lost.signal(signal.SIGKILL)
        (newcomer,) = crew.start(1, namespace=names[0], **options)
        assert newcomer.hear("place") == (lost.worker_id, 3)
        for one in (newcomer, *others):
            one.trains_on()
        crew.finish()
        results = [one.hear("result")["x"] for one in (newcomer, *others)]
    assert results[0] == results[1] == results[2]


def test_a_newcomer_gives_a_minority_no_majority(networks, tmp_path):
    """It takes the place of a worker that is cut off and trains on with the majority."""
    names, wires = networks
    crew, ((alone,), majority) = both_sides(names, tmp_path, (1, 2), algorithm="all-reduce", silence_s=16.0)
    with crew:
        ip("-n", names[0], "link", "set", wires[0], "down")
        (newcomer,) = crew.start(1, namespace=names[0], algorithm="all-reduce", silence_s=1.0)  # does not wait for it
        newcomer.hear("place")
        assert "could not be reached for 16 s" in alone.hear("ExcludedError")
        for one in majority:
            one.trains_on()
        crew.finish()
        results = [one.hear("result")["x"] for one in majority]
    assert results[0] == results[1]


def launched(names, wires, program_key, address):
    """Workers as torchrun would start them on two machines."""
    host, port = address.split(":")
    with Crew(address) as crew:
        hands = []
        for rank, (name, wire) in enumerate(zip(names, wires, strict=True)):
            environment = {
                **{"PACELINE_JOIN": "", "MASTER_ADDR": host, "MASTER_PORT": port, "RANK": str(rank), "WORLD_SIZE": "2"},
                **{"GLOO_SOCKET_IFNAME": wire, "PACELINE_KEY": program_key},
            }
            hands += crew.start(1, namespace=name, environment=environment, algorithm="d-psgd", batches=20, epochs=1)
        yield from hands


def test_workers_of_another_launcher_on_two_machines(networks, tmp_path):
    create_keys(tmp_path / "run.key")
    hands = launched(*networks, str(tmp_path / "run.key"), free_address(HOSTS[0]))
    results = [one.hear("place") and one.hear("result") for one in hands]
    assert results[0]["x"] == results[1]["x"]
    for one in launched(*networks, "", free_address(HOSTS[0])):
        assert "set PACELINE_KEY=FILE for every worker" in one.hear("UsageError")


def test_without_a_key_nobody_talks_between_machines(networks):
    names, _ = networks
    with Crew(free_address(HOSTS[0]), PACELINE_OF="2") as crew:
        (worker,) = crew.start(1, namespace=names[1])
        assert f"Other machines can reach {crew.address}" in worker.hear("UsageError")
