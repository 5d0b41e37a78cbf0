"""hivemind's Optimizer on the course, with local updates and averages in the background, its mode that waits least.

It averages after 64 steps of each peer: with 8, as the others do, forming groups takes longer than training between two
averages (in one run of each 447 samples a second, against 3,140 with 64).

hivemind is not among the project's dependencies: this runs in an environment of its own (see `head_to_head.py`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import hivemind
import torch

from contest.course import Settings, Worker, batches_of, load_data, make_model, make_optimizer

PERIOD, PEER, ADDRESSES = 64, "HEAD_TO_HEAD_PEER", "HEAD_TO_HEAD_ADDRESSES"
LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]
LOOK_EVERY_STEPS = 5
MATCHMAKING_S = 0.5


def launch(settings: Settings) -> int:
    """Starts a first node of the hash table and the peers, each again if it dies by a signal; the worst exit code."""
    dht = hivemind.DHT(host_maddrs=LOOPBACK, start=True)
    addresses = json.dumps([str(address) for address in dht.get_visible_maddrs()])
    command = [sys.executable, "-m", "contest.hivemind_peers"]

    def start(peer: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, env={**os.environ, PEER: str(peer), ADDRESSES: addresses})

    running = {peer: start(peer) for peer in range(settings.workers)}
    worst = 0
    while running:
        for peer, process in list(running.items()):
            code = process.poll()
            if code is None:
                continue
            if code < 0:
                running[peer] = start(peer)
            else:
                worst = max(worst, code)
                del running[peer]
        time.sleep(0.1)
    dht.shutdown()
    return worst


def train(settings: Settings, peer: int) -> None:
    """One peer: trains on samples in an order of its own until all have used the plan's samples together."""
    model = make_model(settings)
    dht = hivemind.DHT(host_maddrs=LOOPBACK, initial_peers=json.loads(os.environ[ADDRESSES]), start=True)
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id="head-to-head",
        target_batch_size=PERIOD * settings.workers * settings.batch_size,
        batch_size_per_step=settings.batch_size,
        optimizer=make_optimizer(settings, model),
        use_local_updates=True,
        delay_state_averaging=True,
        matchmaking_time=MATCHMAKING_S,
        averager_opts={"request_timeout": 0.4},
        averaging_timeout=5.0,
        load_state_timeout=10.0,
    )
    came_back = (Worker(settings, peer).folder / "killed").exists()
    if came_back:
        optimizer.load_state_from_peers()
    data = load_data(settings.data, "train")
    orders = torch.Generator().manual_seed(1000 * settings.seed + peer + 100 * came_back)
    worker = Worker(settings, peer)
    worker.line_up()
    done = False
    while not done:
        order = torch.randperm(len(data[0]), generator=orders).tolist()
        for x, y in batches_of(settings, order, data):
            optimizer.zero_grad()
            worker.gradient(model, x, y)
            optimizer.step()
            worker.stepped(model, len(x))
            done = worker.num_steps % LOOK_EVERY_STEPS == 0 and worker.samples_of_all() >= settings.planned_samples
            if done:
                break
    optimizer.shutdown()
    dht.shutdown()


def main() -> None:
    """The launcher, or a peer."""
    settings = Settings.here()
    if PEER in os.environ:
        train(settings, int(os.environ[PEER]))
        return
    sys.exit(launch(settings))


if __name__ == "__main__":
    main()
