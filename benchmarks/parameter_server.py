"""Updates per second of an asynchronous parameter server without computing, against a bare pyzmq ping-pong of the same bytes.

    python benchmarks/parameter_server.py [--rounds 3] [--out FILE]

Two workers of our own launcher send a gradient that is always the same and get the parameters back; the peer's two clients
send arrays of the same size to one ROUTER, which sends them back and does nothing else: no update, no model, no record. Rounds
of both alternate in one run. Prints a table and writes benchmarks/results/parameter_server.md.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zmq
from torch import nn

import paceline as pl
from paceline.system import machine, versions

RESULTS = Path(__file__).parent / "results"
SIZES = {"100 kB": (25_000, 1500), "4 MB": (1_000_000, 150), "40 MB": (10_000_000, 20)}
WORKERS = 2


class Constant(nn.Module):
    """A model that is its parameters."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(size))


@dataclass(frozen=True)
class Push:
    """A worker: `steps` times the same gradient."""

    size: int
    steps: int

    def __call__(self) -> None:
        """Runs until all steps are made."""
        model = Constant(self.size)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        gradient = torch.ones(self.size)
        with pl.attach(model, optimizer) as worker:
            for _ in worker.batches([0] * (self.steps * WORKERS)):
                model.x.grad = gradient
                optimizer.step()


def ours(size: int, steps: int, shards: int) -> float:
    """Updates per second of all workers together."""
    result = pl.launch(
        Push(size, steps), workers=WORKERS, algorithm=pl.ParameterServer(mode="async", shards=shards)
    ).result
    assert result["outcome"] == "stopped"
    return result["steps"] / result["wall_s"]


def _echo(pipe: Any) -> None:
    router = zmq.Context.instance().socket(zmq.ROUTER)
    pipe.send(router.bind_to_random_port("tcp://127.0.0.1"))
    ended = 0
    while ended < WORKERS:
        name, message = router.recv(), router.recv(copy=True)
        if len(message) == 0:
            ended += 1
            continue
        router.send(name, zmq.SNDMORE)
        router.send(message, copy=True)
    router.close(linger=0)


def _ping(port: int, size: int, steps: int, pipe: Any) -> None:
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(f"tcp://127.0.0.1:{port}")
    array = np.ones(size, np.float32)
    socket.send(array, copy=True)
    socket.recv()
    pipe.send("ready")
    pipe.recv()
    begun_s = time.monotonic()
    for _ in range(steps):
        socket.send(array, copy=True)
        socket.recv(copy=True)
    pipe.send((begun_s, time.monotonic()))
    socket.send(b"")
    socket.close(linger=1000)


def bare(size: int, steps: int) -> float:
    """Round trips per second of both clients together."""
    context = multiprocessing.get_context("spawn")
    mine, its = context.Pipe()
    echo = context.Process(target=_echo, args=(its,))
    echo.start()
    port = mine.recv()
    pipes, clients = [], []
    for _ in range(WORKERS):
        here, there = context.Pipe()
        clients.append(context.Process(target=_ping, args=(port, size, steps, there)))
        clients[-1].start()
        pipes.append(here)
    for pipe in pipes:
        pipe.recv()
    for pipe in pipes:
        pipe.send("go")
    times = [pipe.recv() for pipe in pipes]
    for process in [*clients, echo]:
        process.join()
    return WORKERS * steps / (max(end for _, end in times) - min(begin for begin, _ in times))


def main() -> None:
    """Measures and writes the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "parameter_server.md")
    options = parser.parse_args()
    here, library = machine(), versions()
    lines = [
        "# Asynchronous parameter server against a bare ping-pong",
        "",
        f"2 workers, {here['processor']}, {here['cores']} cores, torch {library['torch']}; medians of {options.rounds}.",
        "",
        "| size of the vector | shards | updates per second | bare round trips per second | ratio |",
        "|---|---|---|---|---|",
    ]
    for name, (size, steps) in SIZES.items():
        for shards in (1, 2):
            pairs = [(ours(size, steps, shards), bare(size, steps)) for _ in range(options.rounds)]
            own, peer = (statistics.median(values) for values in zip(*pairs, strict=True))
            ratio = statistics.median(a / b for a, b in pairs)
            lines.append(f"| {name} | {shards} | {own:.0f} | {peer:.0f} | {ratio:.2f} |")
            print(lines[-1], flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
