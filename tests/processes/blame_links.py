"""Workers on hosts of their own, joined by real links of which one is slow; what test_blame.py runs."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

import paceline as pl
from paceline.algorithms import registry
from paceline.membership.environment import LaunchedEnvironment, current_environment, set_environment
from paceline.records.run_data import RunData, read_events
from paceline.run.joined_result import joined_result
from paceline.transport.keys import create_keys
from processes.join_programs import Crew, free_address

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from links.network import Network as Network

sys.path.pop()

NUM_HOSTS = 3
STEP_S = 0.01


def slow_down(network, hosts, bytes_per_s):
    """Gives two hosts a wire of their own, which has this rate in both directions."""
    a, b = hosts
    wires = {a: f"to-{b}", b: f"to-{a}"}
    ip("link", "add", wires[a], "netns", network.name(a), "type", "veth", "peer", wires[b], "netns", network.name(b))
    for host, other in ((a, b), (b, a)):
        name, wire = network.name(host), wires[host]
        ip("-n", name, "link", "set", wire, "up")
        ip("-n", name, "route", "add", network.address(other), "dev", wire, "src", network.address(host))
        shape = f"root tbf rate {8 * bytes_per_s:.0f}bit burst 16kb latency 2s".split()
        _run("tc", "-n", name, "qdisc", "add", "dev", wire, *shape)


def ip(*words):
    _run("ip", *words)


def _run(*words):
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"`{' '.join(words)}` failed: {done.stderr.strip()}")


def train(wishes, folder, connection):
    """The loop of one worker, as `join_programs.work` calls it; returns the worker's number."""
    launched = current_environment()
    if isinstance(launched, LaunchedEnvironment):  # another launcher's run keeps no records
        set_environment(replace(launched, out=folder))
    torch.manual_seed(0)
    model = nn.Linear(wishes["size"], wishes["size"], bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    with pl.attach(model, optimizer, algorithm=wishes["algorithm"], same_random=True) as worker:
        for _ in range(wishes["steps"]):
            optimizer.zero_grad()
            output = model(torch.ones(1, wishes["size"]))
            output.register_hook(lambda _: time.sleep(STEP_S))
            output.square().mean().backward()
            optimizer.step()
        return worker.worker_id


def run_over(network, algorithm, *, steps, size, has_servers):
    """A run with one worker on each host, and the number of each host's worker."""
    of, host = {"train": train, "algorithm": algorithm, "steps": steps, "size": size}, network.address(0)
    with Crew(free_address(host)) as crew:
        create_keys(crew.folder / "run.key")
        crew.environment |= {"PACELINE_KEY": str(crew.folder / "run.key"), "PACELINE_OF": str(NUM_HOSTS)}
        if has_servers:  # which are threads of the first worker
            crew.environment |= {
                **{"PACELINE_JOIN": "", "MASTER_ADDR": host, "MASTER_PORT": crew.address.rpartition(":")[2]},
                **{"WORLD_SIZE": str(NUM_HOSTS), "GLOO_SOCKET_IFNAME": "wire"},
            }
        else:
            crew.environment["PACELINE_OUT"] = str(crew.folder)
            crew.hold(namespace=network.name(0))
        hands = [
            crew.start(1, namespace=network.name(one), environment={"RANK": str(one)} if has_servers else (), **of)[0]
            for one in range(NUM_HOSTS)
        ]
        workers = [one.hear("result") for one in hands]
        return _run_in(crew.folder), workers


def _run_in(folder):
    own = [json.loads(path.read_text()) for path in folder.glob("worker-*.json")]
    records = {one["worker"]: read_events(folder / f"events-{one['worker']}.jsonl") for one in own}
    algorithm = registry.build(own[0]["algorithm"])
    about = {"algorithm": own[0]["algorithm"], "workers": NUM_HOSTS}
    return RunData(about, joined_result(about, own, records, gossip=algorithm.gossip, notes=[], restarts=0), records)
