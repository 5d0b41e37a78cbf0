"""Workers that join a run at an address; what test_join.py and test_join_hosts.py run in processes of their own."""

import ctypes
import multiprocessing
import os
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import forked
import leftovers
import paceline as pl
import paceline.membership.elastic
import paceline.worker.memberships.memory
from free_ports import free_port
from lazy_copies import LazyCopies
from paceline.membership.elastic import JoinedRun
from paceline.membership.join_point import JoinPoint

CONTEXT: Any = multiprocessing.get_context("forkserver")
DEADLINE_S = forked.AGAINST_HANGS_S
UNTRAINED = ["shift", "0.shift", "fixed", "0.fixed"]
STEP_S = 0.002  # added to every step: without it a worker would be through before the others have begun


def free_address(host="127.0.0.1"):
    return f"{host}:{free_port()}"


def enter_namespace(name):
    """Moves this thread, and those that it starts, to another network."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/var/run/netns/{name}").open() as namespace:
        if libc.setns(namespace.fileno(), 0):
            raise OSError(ctypes.get_errno(), "setns")


def work(environment, namespace, wishes, folder, connection):
    """One worker: trains until there is a file `done`, or for `epochs`; tells its number, and its result or error.

    With a wish for `train`, it calls that.
    """
    os.environ.update(environment)
    torch.set_num_threads(1)
    if namespace is not None:
        enter_namespace(namespace)
    try:
        connection.send(("result", wishes.get("train", _train)(wishes, folder, connection)))
    except pl.PacelineError as error:
        connection.send((type(error).__name__, str(error)))


def _train(wishes, folder, connection):
    if "silence_s" in wishes:
        paceline.membership.elastic._SILENCE_S = wishes["silence_s"]
    if wishes.get("on_device"):  # the model counts as one on a device whose copies take their time
        copies = LazyCopies()
        paceline.worker.memberships.memory.device_copies = lambda device: copies
    if "dies_at" in wishes:
        setattr(JoinedRun, wishes["dies_at"], lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    torch.manual_seed(os.getpid())  # everyone begins elsewhere: the run begins where worker 0 does
    model = nn.Sequential(nn.Linear(8, wishes.get("width", 4)), nn.BatchNorm1d(wishes.get("width", 4)))
    for one in (model, model[0]):  # what is not trained, and random, too
        one.register_buffer("shift", torch.randn(3))
        one.fixed = nn.Parameter(torch.randn(2), requires_grad=False)
    rate = wishes.get(
        "lr", 0.01
    )  # where all meet, nobody's model moves before: a late worker begins where all others did
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0 if "meet_at" in wishes else rate)
    seen, count = [], os.open(folder / f"steps-{os.getpid()}", os.O_WRONLY | os.O_CREAT)
    batches = list(range(wishes.get("batches", 64)))
    epochs = wishes.get("epochs", 1_000_000)
    with pl.attach(model, optimizer, algorithm=wishes.get("algorithm", "ad-psgd")) as worker:
        start = [one.flatten().tolist() for one in (model[0].weight, *(model.state_dict()[name] for name in UNTRAINED))]
        connection.send(("place", (worker.worker_id, worker.num_workers)))
        for _ in range(epochs):
            is_done = "epochs" not in wishes and (folder / "done").exists()
            in_rounds = not wishes.get("algorithm", "ad-psgd").startswith("ad-psgd")
            if worker.sum(int(is_done)) if in_rounds else is_done:  # all end together
                break
            for batch in worker.batches(batches):
                optimizer.zero_grad()
                model(torch.full((2, 8), float(batch + 1)) + torch.randn(2, 8)).square().mean().backward()
                optimizer.step()
                seen.append(batch)
                os.pwrite(count, len(seen).to_bytes(8, "little"), 0)
                time.sleep(STEP_S)
                if len(seen) == wishes.get("meet_at"):  # however late one is to the machine's cores, it takes part
                    leftovers.wait_until(lambda: _met(folder, worker.num_workers, len(seen)), "all meet")
                    optimizer.param_groups[0]["lr"] = rate
    figures = worker.summary()
    return {
        "worker": worker.worker_id,
        "start": start,
        "x": [p.flatten().tolist() for p in model.parameters() if p.requires_grad],
        "seen": seen if epochs == 1 else [],
        "peer_failures": figures["peer_failures"],
        "averages_per_step": figures["averages_per_step"],
        "consensus_distance": figures["consensus_distance"],
    }


def _met(folder, num_workers, steps):
    made = [int.from_bytes(path.read_bytes(), "little") for path in folder.glob("steps-*")]
    return len(made) == num_workers and min(made) >= steps


def hold(address, key, namespace, connection):
    """Holds the join point, and nothing else."""
    if namespace is not None:
        enter_namespace(namespace)
    join_point = JoinPoint(address, Path(key) if key else None, 10)
    connection.send(join_point.holds)
    signal.pause()


@dataclass
class Hand:
    """A worker's process, and what it has told."""

    process: Any
    connection: Any
    folder: Path
    worker_id: int = -1

    @property
    def steps(self):
        """How many it has made."""
        path = self.folder / f"steps-{self.process.pid}"
        return int.from_bytes(path.read_bytes(), "little") if path.exists() else 0

    def hear(self, expected):
        """Its next word, which must be of this kind."""
        assert self.connection.poll(DEADLINE_S), f"no {expected} within {DEADLINE_S} s"
        kind, value = self.connection.recv()
        assert kind == expected, value
        if kind == "place":
            self.worker_id = value[0]
        return value

    def trains_on(self, more=30):
        """Waits until it has made so many further steps."""
        enough = self.steps + more
        leftovers.wait_until(lambda: self.steps >= enough or self.connection.poll(0), f"{more} more steps")
        assert self.steps >= enough, self.connection.recv()

    def signal(self, number):
        os.kill(self.process.pid, number)
        if number == signal.SIGKILL:
            self.process.join()


class Crew:
    """Starts workers, and leaves none of them behind."""

    def __init__(self, address, **environment):
        self.address = address
        self.environment = {"PACELINE_JOIN": address, "PACELINE_DEADLINE_S": "590", **environment}
        self.hands = []
        self._temporary = tempfile.TemporaryDirectory()
        self.folder = Path(self._temporary.name)

    def finish(self):
        """Lets all end with the epoch."""
        (self.folder / "done").touch()

    def start(self, number=1, *, namespace=None, environment=(), **wishes):
        """New workers."""
        fresh = []
        for _ in range(number):
            ours, theirs = CONTEXT.Pipe()
            environment = {**self.environment, **dict(environment)}
            process = CONTEXT.Process(target=work, args=(environment, namespace, wishes, self.folder, theirs))
            process.start()
            theirs.close()
            fresh.append(Hand(process, ours, self.folder))
        self.hands += fresh
        return fresh

    def hold(self, *, namespace=None):
        """A process that holds the join point."""
        ours, theirs = CONTEXT.Pipe()
        key = self.environment.get("PACELINE_KEY")
        process = CONTEXT.Process(target=hold, args=(self.address, key, namespace, theirs))
        process.start()
        theirs.close()
        keeper = Hand(process, ours, self.folder)
        self.hands.append(keeper)
        assert ours.poll(DEADLINE_S)
        assert ours.recv() is True
        return keeper

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        for hand in self.hands:
            hand.process.kill()
            hand.process.join()
            hand.process.close()
            hand.connection.close()
        self._temporary.cleanup()


def placed(hands):
    """The workers by their numbers, once they have them."""
    for hand in hands:
        hand.hear("place")
    return {hand.worker_id: hand for hand in hands}
