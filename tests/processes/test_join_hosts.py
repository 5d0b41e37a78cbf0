"""Several machines, as networks of this one, of which some are cut off."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import time

import pytest

import leftovers
import soak_results
from paceline.transport.keys import create_keys
from processes.join_programs import Crew, free_address, placed

HOSTS = ("10.231.77.1", "10.231.77.2", "10.231.77.3")
LOCKSTEP = ["all-reduce", "local-sgd(period=3)", "da-sgd(period=3, delay=1)", "diloco(period=3)", "d-psgd"]


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextlib.contextmanager
def connected(number):
    """Network namespaces with an address each, joined by a switch; returns them, and the wire of each."""
    if shutil.which("ip") is None:
        pytest.skip("this machine has no `ip` (iproute2) to make networks with")
    names = [f"paceline-{os.getpid()}-{side}" for side in range(number)]
    wires = [f"pl{os.getpid() % 100_000}-{side}" for side in range(number)]
    switch = f"paceline-{os.getpid()}-switch"
    try:
        try:
            for name in (*names, switch):
                ip("netns", "add", name)
            ip("-n", switch, "link", "add", "switch", "type", "bridge")
            ip("-n", switch, "link", "set", "switch", "up")
            for name, wire in zip(names, wires, strict=True):
                ip("link", "add", wire, "netns", name, "type", "veth", "peer", "name", wire, "netns", switch)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        for name, wire, host in zip(names, wires, HOSTS, strict=False):
            ip("-n", switch, "link", "set", wire, "master", "switch", "up")
            ip("-n", name, "address", "add", f"{host}/24", "dev", wire)
            ip("-n", name, "link", "set", wire, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names, wires
    finally:
        for name in (*names, switch):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@pytest.fixture
def networks():
    with connected(2) as found:
        yield found


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


class Partition:
    """Workers in three networks, of which one or two are cut off, while a worker may be killed."""

    def __init__(self, number, names, wires, folder):
        draws = self.draws = random.Random(f"partition {number}")
        self.names, self.wires = names, wires
        self.algorithm = draws.choice(LOCKSTEP)
        self.sizes = [draws.choice([1, 1, 2]) for _ in names]
        self.cut = draws.sample(range(3), draws.choice([1, 1, 1, 2]))
        self.blinks = draws.random() < 0.25  # shorter than the others wait
        self.kills = draws.random() < 0.4
        folder.mkdir()
        create_keys(folder / "run.key")
        environment = {"PACELINE_OF": str(sum(self.sizes)), "PACELINE_KEY": str(folder / "run.key")}
        self.crew = Crew(free_address(HOSTS[0]), **environment)

    def link(self, up):
        for side in self.cut:
            ip("-n", self.names[side], "link", "set", self.wires[side], "up" if up else "down")

    def run(self):
        """Returns by worker what became of it: "result", an error's name or "killed"; and those that were killed."""
        draws, self.killed = self.draws, None
        with self.crew as crew:
            crew.hold(namespace=self.names[0])
            wishes = {"algorithm": self.algorithm, "silence_s": 2.0, "batches": 30}
            sides = [
                crew.start(number, namespace=name, **wishes)
                for number, name in zip(self.sizes, self.names, strict=True)
            ]
            workers = placed([one for side in sides for one in side])
            self.side_of = {one.worker_id: number for number, side in enumerate(sides) for one in side}
            for one in workers.values():
                one.trains_on(draws.randrange(5, 40))
            if self.kills and draws.random() < 0.5:
                self.kill(workers)
                time.sleep(draws.choice([0.0, 0.02, 0.2]))
            self.link(up=False)
            if self.kills and self.killed is None:
                time.sleep(draws.choice([0.0, 0.02, 0.2]))
                self.kill(workers)
            if self.blinks:
                time.sleep(draws.uniform(0.05, 0.4))  # TCP sends again after up to three times as long
                self.link(up=True)
            else:
                self.wait_for_the_end_of_a_side(workers)
                if draws.random() < 0.5:
                    self.link(up=True)
            crew.finish()
            found = {}
            for worker, one in workers.items():
                if worker == self.killed:
                    found[worker] = ("killed", None)
                else:
                    assert one.connection.poll(60), f"worker {worker} does not end"
                    found[worker] = one.connection.recv()
        self.link(up=True)
        return found

    def kill(self, workers):
        self.killed = self.draws.choice(sorted(workers))
        workers[self.killed].signal(signal.SIGKILL)

    def wait_for_the_end_of_a_side(self, workers):
        """Until each worker has ended or, with all others of a majority, trains on."""
        begun = {worker: one.steps for worker, one in workers.items()}
        last_s = time.monotonic() + 30

        def is_settled():
            ends = [worker == self.killed or one.connection.poll(0) for worker, one in workers.items()]
            return any(ends) and all(
                has_ended or one.steps > begun[worker] + 40
                for has_ended, (worker, one) in zip(ends, workers.items(), strict=True)
            )

        leftovers.wait_until(lambda: is_settled() or time.monotonic() > last_s, "the sides are apart")

    def check(self, found):
        """One line of models; and, where it is certain who goes on, these do."""
        models = [value["x"] for kind, value in found.values() if kind == "result"]
        assert all(one == models[0] for one in models)
        assert {kind for kind, _ in found.values()} <= {"result", "killed", "ExcludedError", "WorkerLostError"}
        connected = [worker for worker, side in self.side_of.items() if side not in self.cut]
        groups = [connected, *([w for w, side in self.side_of.items() if side == cut] for cut in self.cut)]
        if self.killed is None:
            num_workers = len(self.side_of)
            goes_on = [
                group
                for group in groups
                if 2 * len(group) > num_workers or (2 * len(group) == num_workers and 0 in group)
            ]
            expected = set(self.side_of) if self.blinks else set(goes_on[0]) if goes_on else set()
            assert {worker for worker, (kind, _) in found.items() if kind == "result"} == expected
        return bool(models)


@pytest.mark.soak
def test_a_hundred_partitions(tmp_path):
    """Writes what became of them to PACELINE_SOAK_RESULTS."""
    begun_s, went_on, kills, blinks = time.monotonic(), 0, 0, 0
    number_of_runs = int(os.environ.get("PACELINE_PARTITIONS", "100"))
    with connected(3) as (names, wires):
        for number in range(number_of_runs):
            one = Partition(number, names, wires, tmp_path / str(number))
            found = one.run()
            went_on += one.check(found)
            kills, blinks = kills + (one.killed is not None), blinks + one.blinks
    figures = {"runs": number_of_runs, "went on": went_on, "killed": kills, "shorter than the deadline": blinks}
    took_s = round(time.monotonic() - begun_s, 1)
    soak_results.keep("soak_partitions", "lockstep methods", {**figures, "took_s": took_s})
