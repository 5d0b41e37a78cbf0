"""Updates per second of an asynchronous parameter server without computing: against bare messages, and against Ray.

    python benchmarks/parameter_server.py [--rounds 3] [--out FILE]
    pip install "paceline[bench]" beforehand, for the rows of Ray

Two workers of our own launcher send a gradient that is always the same and get the parameters back. The bare peer's two
clients send arrays of the same size to one ROUTER, which sends them back and does nothing else: no update, no model.
Ray's is the asynchronous parameter server of its documentation: an actor that holds weights and applies gradients, and two
worker actors whose results `ray.wait` hands over one by one; the gradient is constant there, too. Rounds alternate in one run.

The server's memory is what its process's resident size grows by, at its peak, from a vector of 16 elements to one of 40 MB.
Prints tables and writes benchmarks/results/parameter_server.md.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import statistics
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch
import zmq
from torch import nn

import paceline as pl
from paceline.run.supervisor import Supervisor
from paceline.system.machine import machine, versions

RESULTS = Path(__file__).parent / "results"
SIZES = {"100 kB": (25_000, 1500), "4 MB": (1_000_000, 150), "40 MB": (10_000_000, 20)}
RAY_SIZES = {"1 MB": (250_000, 300), "10 MB": (2_500_000, 40)}
WORKERS = 2
LARGEST = 10_000_000
ABOUT_SHORT_MESSAGES = (
    "At 100 kB it is not the messages that take the time. Under cProfile a worker spends about 0.6 ms of Python per step (the"
    " loop's hooks, the optimizer's wrappers, copies, the record) and 0.5 ms in handing its message to ZeroMQ, and the server"
    " 0.2 ms and 0.3 ms; the bare peers do nothing between two messages."
)

ABOUT_RAY = (
    "At 10 MB Ray's actors find arrays in shared memory, where ours get them through loopback TCP, as they would from another"
    " machine. The last column is what the bytes alone allow: bare peers that send a message and get it back, and do nothing"
    " else, are no faster than these updates. Of 12.4 ms of CPU time that an update took in the three processes together, the"
    " kernel used 7.0 to copy 40 MB in and out of sockets; fresh memory cost nothing (11 page faults), and a copy of 10 MB in"
    " cache takes 0.3 ms. More would need gradients and parameters in shared memory where all are on one machine."
)
ABOUT_MEMORY = (
    "The target is 3 vectors, the optimizer's state and one message per worker: 5 vectors with SGD, met, and 7 with "
    "Adam, missed by two: those that PyTorch's Adam needs for a moment (its step by itself, in a process of its own, "
    "grows by 6.1 vectors: parameters, gradient, state, and these two). With SGD the vectors are the parameters, a "
    "message of each worker, the snapshot's copy while it is written, and what malloc could not use again. All "
    "threads of a server allocate from one arena: with one for each, which keeps the most that it ever had, it was 7 "
    "and 13 vectors, and 10 MB and 40 MB were slower (105 and 18 updates per second instead of 109 and 24, medians of "
    "three, in turn)."
)


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
    optimizer: str = "SGD"

    def __call__(self) -> None:
        """Runs until all steps are made."""
        model = Constant(self.size)
        optimizer = getattr(torch.optim, self.optimizer)(model.parameters(), lr=1e-3)
        gradient = torch.ones(self.size)
        with pl.attach(model, optimizer) as worker:
            for _ in worker.batches([0] * (self.steps * WORKERS)):
                model.x.grad = gradient
                optimizer.step()


def ours(size: int, steps: int, shards: int, durability: Literal["snapshot", "replica"] = "snapshot") -> float:
    """Updates per second of all workers together."""
    algorithm = pl.ParameterServer(mode=pl.Async(), shards=shards, durability=durability)
    result = pl.launch(Push(size, steps), workers=WORKERS, algorithm=algorithm).result
    assert result["outcome"] == "stopped"
    return result["steps"] / result["wall_s"]


def peak_bytes(size: int, optimizer: str) -> list[int]:
    """Peak resident bytes of the server, and of its second copy where it has one, as the kernel counts them."""
    durability, _, name = optimizer.rpartition(" ")
    algorithm = pl.ParameterServer(mode=pl.Async(), durability="replica" if durability else "snapshot")
    peaks: dict[int, int] = {}

    class Watched(Supervisor):
        def _wait_for_news(self) -> None:
            super()._wait_for_news()
            for state in self.servers.states:
                with contextlib.suppress(OSError, AttributeError, ValueError, IndexError):
                    status = Path(f"/proc/{state.handle.pid}/status").read_text()
                    peaks[state.worker_id] = 1024 * int(status.partition("VmHWM:")[2].split()[0])

    with mock.patch("paceline.run.driver.Supervisor", Watched):
        pl.launch(Push(size, 20, name), workers=WORKERS, algorithm=algorithm)
    return [peaks[server] for server in sorted(peaks)]


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


def ray_actors(size: int, steps: int) -> float:
    """Updates per second of the asynchronous parameter server of Ray's documentation."""
    import ray  # not at the top: an extra

    if not ray.is_initialized():
        ray.init(num_cpus=WORKERS + 1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")

    @ray.remote
    class Server:
        def __init__(self, size: int) -> None:
            torch.set_num_threads(1)
            self.model = Constant(size)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

        def apply_gradients(self, gradient: np.ndarray) -> np.ndarray:
            self.optimizer.zero_grad()
            self.model.x.grad = torch.from_numpy(gradient.copy())  # what Ray hands over must not be written
            self.optimizer.step()
            return self.get_weights()

        def get_weights(self) -> np.ndarray:
            return self.model.x.detach().numpy()

    @ray.remote
    class Worker:
        def __init__(self, size: int) -> None:
            torch.set_num_threads(1)
            self.model, self.gradient = Constant(size), np.ones(size, np.float32)

        def compute_gradients(self, weights: np.ndarray) -> np.ndarray:
            with torch.no_grad():
                self.model.x.copy_(torch.from_numpy(weights.copy()))
            return self.gradient

    server, workers = Server.remote(size), [Worker.remote(size) for _ in range(WORKERS)]
    weights = server.get_weights.remote()
    ray.get([worker.compute_gradients.remote(weights) for worker in workers])
    begun_s = time.monotonic()
    gradients = {worker.compute_gradients.remote(weights): worker for worker in workers}
    for _ in range(steps * WORKERS):
        (ready,), _ = ray.wait(list(gradients))
        worker = gradients.pop(ready)
        weights = server.apply_gradients.remote(ready)
        gradients[worker.compute_gradients.remote(weights)] = worker
    ray.get(weights)
    took_s = time.monotonic() - begun_s
    for actor in (server, *workers):
        ray.kill(actor)
    return steps * WORKERS / took_s


def against_bare(rounds: int) -> list[str]:
    """The first table."""
    lines = [
        "| size of the vector | shards | updates per second | bare round trips per second | ratio |",
        "|---|---|---|---|---|",
    ]
    for name, (size, steps) in SIZES.items():
        for shards in (1, 2):
            pairs = [(ours(size, steps, shards), bare(size, steps)) for _ in range(rounds)]
            own, peer = (statistics.median(values) for values in zip(*pairs, strict=True))
            lines.append(f"| {name} | {shards} | {own:,.0f} | {peer:,.0f} | {_ratio(pairs)} |")
            print(lines[-1], flush=True)
    return [*lines, "", *textwrap.wrap(ABOUT_SHORT_MESSAGES, 127)]


def against_ray(rounds: int) -> list[str]:
    """The second table; a sentence where Ray is not installed."""
    try:
        import ray
    except ImportError:
        return ["Ray is not installed: `pip install ray`."]
    lines = [
        "| size of the vector | updates per second | Ray's actors | ratio | bare round trips per second |",
        "|---|---|---|---|---|",
    ]
    for name, (size, steps) in RAY_SIZES.items():
        triples = [(ours(size, steps, 1), ray_actors(size, steps), bare(size, steps)) for _ in range(rounds)]
        own, peer, wire = (statistics.median(values) for values in zip(*triples, strict=True))
        pairs = [(one, other) for one, other, _ in triples]
        lines.append(f"| {name} | {own:,.0f} | {peer:,.0f} | {_ratio(pairs)} | {wire:,.0f} |")
        print(lines[-1], flush=True)
    ray.shutdown()
    return [*lines, "", f"Ray {ray.__version__}.", "", *textwrap.wrap(ABOUT_RAY, 127)]


def of_the_second_copy(rounds: int) -> list[str]:
    """The third table."""
    lines = ["| size of the vector | `snapshot` | `replica` | ratio |", "|---|---|---|---|"]
    for name in ("100 kB", "4 MB"):
        size, steps = SIZES[name]
        pairs = [(ours(size, steps, 1, "replica"), ours(size, steps, 1)) for _ in range(rounds)]
        own, peer = (statistics.median(values) for values in zip(*pairs, strict=True))
        lines.append(f"| {name} | {peer:,.0f} | {own:,.0f} | {_ratio(pairs)} |")
        print(lines[-1], flush=True)
    return lines


def memory() -> list[str]:
    """The last table."""
    vector_bytes = 4 * LARGEST
    lines = ["| optimizer | its state | growth of the server | of its second copy |", "|---|---|---|---|"]
    for optimizer, state in (("SGD", 0), ("Adam", 2), ("replica SGD", 0), ("replica Adam", 2)):
        small, large = peak_bytes(16, optimizer), peak_bytes(LARGEST, optimizer)
        grown = [(after - before) / vector_bytes for before, after in zip(small, large, strict=True)]
        cells = [f"{one:.1f} vectors" for one in grown] + ["none"] * (2 - len(grown))
        lines.append(f"| {optimizer} | {state} vectors | {cells[0]} | {cells[1]} |")
        print(lines[-1], flush=True)
    return [*lines, "", *textwrap.wrap(ABOUT_MEMORY, 127)]


def _ratio(pairs: list[tuple[float, float]]) -> str:
    ratios = sorted(a / b for a, b in pairs)
    return f"**{statistics.median(ratios):.2f}** ({ratios[0]:.2f} to {ratios[-1]:.2f})"


PARTS = {
    "bare": ("Against a bare ping-pong of the same bytes", against_bare),
    "ray": ("Against Ray's actors", against_ray),
    "replica": ("What a second copy costs", of_the_second_copy),
    "memory": ("Memory of a server with 2 workers, above that of an empty one", lambda _: memory()),
}


def main() -> None:
    """Measures and writes the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=PARTS, help="one table, printed and not written")
    parser.add_argument("--out", type=Path, default=RESULTS / "parameter_server.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    here, library = machine(), versions()
    lines = [
        "# Asynchronous parameter server",
        "",
        f"{WORKERS} workers, {here['processor']}, {here['cores']} cores, torch {library['torch']}; medians of {options.rounds}"
        " rounds, in brackets the lowest and the highest ratio. Command: `python benchmarks/parameter_server.py`.",
    ]
    for name, (title, measure) in PARTS.items():
        if options.only in (None, name):
            print(f"## {title}", flush=True)
            lines += ["", f"## {title}", "", *measure(options.rounds)]
            if options.only is None:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
