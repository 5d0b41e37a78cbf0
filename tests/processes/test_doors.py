"""On one machine nobody but the user's own processes can reach a run: it has no port at all."""

import json
import os
import socket
from pathlib import Path

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.algorithms import registry

pytestmark = pytest.mark.usefixtures("nothing_left")
WITH_MAILBOX = [name for name in registry.names() if registry.build(name).needs.mailbox]
LISTENING = "0A"


def tree(root):
    """A process and all below it."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):  # it has just ended
            continue
    found, fresh = set(), {root}
    while fresh:
        found |= fresh
        fresh = {child for child, parent in parents.items() if parent in fresh} - found
    return found


def ports(processes):
    """The addresses at which they listen, as the kernel writes them."""
    own = set()
    for pid in processes:
        for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                own.add(str(descriptor.readlink()))
            except OSError:
                continue
    lines = [
        line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]
    ]
    return sorted(words[1] for words in lines if words[3] == LISTENING and f"socket:[{words[9]}]" in own)


class Looks:
    """Trains; whichever worker has the first batch, when all have come, looks for ports of the run's processes."""

    def __init__(self, supervisor, folder):
        self.supervisor, self.folder = supervisor, folder

    def __call__(self):
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with pl.attach(model, optimizer) as worker:
            for number, x in enumerate(worker.batches([torch.ones(4, 3)] * 40)):
                if number == 0:
                    processes = tree(self.supervisor)
                    found = json.dumps([len(processes), ports(processes)])
                    (self.folder / f"found-{worker.worker_id}").write_text(found)
                optimizer.zero_grad()
                model(x).mean().backward()
                optimizer.step()


def test_a_port_would_be_seen():
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert any(one.endswith(f":{server.getsockname()[1]:04X}") for one in ports(tree(os.getpid())))


@pytest.mark.parametrize("algorithm", WITH_MAILBOX)
def test_a_launched_run_has_no_port(algorithm, tmp_path):
    run = pl.launch(Looks(os.getpid(), tmp_path), workers=2, algorithm=algorithm)
    assert run.result["steps"] > 0
    looks = [json.loads(path.read_text()) for path in tmp_path.iterdir()]
    assert looks
    for num_processes, open_ports in looks:
        assert num_processes >= 4, "this one, the fork server and two workers"
        assert open_ports == []
