"""Shared-memory training against plain PyTorch, on mnist-mlp: ratios, ours and the peer's measured in turn in one run.

    python benchmarks/shared_memory.py [--repeats 7] [--seconds 2] [--only one-worker,two-workers,...]

Needs MNIST in the folder that PACELINE_DATA names. Appends to benchmarks/results/shared_memory.jsonl, of which
`python benchmarks/pages.py shared_memory` makes the page. A ratio above 1 means that Paceline is faster. Warm-up is excluded:
the first sixth of every measurement.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from handover import handover_us
from measurements import Measurements, in_turn
from plain_loop import ShuffledBatches, make_model, plain_steps_per_s
from shared_memory_page import COSTS, EIGHT, SPEED, TIME_TO_LOSS, TWO_WORKERS

import paceline as pl
from paceline.loop.base_replica import BaseReplica
from paceline.tasks.load import load_task

RESULTS = Path(__file__).parent / "results"
BATCH_SIZES = (512, 64, 16)
NUM_PARAMETERS = 134_794
STEPS_IN_TURN = 20  # of a loop under attach, and of the loop without
STEPS_PER_S = {512: 240, 64: 1500, 16: 3200}  # roughly, to size runs in steps


def data() -> Path:
    """The folder with MNIST."""
    if not os.environ.get("PACELINE_DATA"):
        raise SystemExit("Set PACELINE_DATA to a folder with mnist/*-ubyte.gz; see docs/command_line.md, Tasks.")
    return Path(os.environ["PACELINE_DATA"])


# The peer, in processes of its own that live as long as the benchmark


class PlainWorkers:
    """Plain loops in `count` processes, started together on request."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            context.Process(target=_plain_worker, args=(theirs,), daemon=True).start()
            self._pipes.append(ours)
        for pipe in self._pipes:
            pipe.recv()

    def samples_per_s(self, batch_size: int, seconds: float, count: int) -> float:
        """Of `count` loops at the same time, together."""
        for pipe in self._pipes[:count]:
            pipe.send((batch_size, seconds))
        return sum(pipe.recv() for pipe in self._pipes[:count]) * batch_size


def _plain_worker(pipe: Any) -> None:
    torch.set_num_threads(1)
    train_set, _ = load_task("mnist-mlp").load(data())
    inputs, targets = train_set.tensors
    pipe.send("ready")
    while True:
        try:
            batch_size, seconds = pipe.recv()
        except EOFError:  # the benchmark is over
            return
        pipe.send(plain_steps_per_s(inputs, targets, batch_size, seconds))


# Ours


def steady_samples_per_s(records: dict[int, np.ndarray]) -> float:
    """Samples per second from a sixth of the run on, until the first worker ends."""
    rows = {worker: own for worker, own in records.items() if len(own)}
    end_s = min(float(own["ended_s"][-1]) for own in rows.values())
    start_s = end_s / 6
    samples = sum(
        int(own["samples"][(own["ended_s"] > start_s) & (own["ended_s"] <= end_s)].sum()) for own in rows.values()
    )
    return samples / (end_s - start_s)


def train_samples_per_s(algorithm: str, workers: int, batch_size: int, seconds: float) -> float:
    """Samples per second of `paceline train` on mnist-mlp."""
    return steady_samples_per_s(train_run(algorithm, workers, batch_size, seconds).records)


def train_run(algorithm: str, workers: int, batch_size: int, seconds: float) -> pl.RunData:
    """`paceline train` on mnist-mlp for about so long."""
    return pl.train(
        pl.TrainConfig(
            task="mnist-mlp",
            algorithm=algorithm,
            workers=workers,
            steps=int(STEPS_PER_S[batch_size] * 1.2 * seconds / max(1, workers / 2)),
            batch_size=batch_size,
            learning_rate=0.05,
            data=data(),
        )
    )


def steps_of_the_loop(batch_size: int, *, attached: bool) -> Iterator[None]:
    """The plain loop's code with, or without, the two lines that attach adds; pauses after every step."""
    train_set, _ = load_task("mnist-mlp").load(data())
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = ShuffledBatches(*train_set.tensors, batch_size)
    with pl.attach(model, optimizer) if attached else nullcontext() as worker:
        while True:
            for x, y in worker.batches(loader) if worker is not None else loader:
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                yield


def samples_per_cpu_s(steps: Iterator[None], batch_size: int) -> float:
    """Of the next few steps, by the thread's CPU time: other programs change it by what they take of the caches only."""
    next(steps)  # whose caches are the other loop's
    begun_s = time.thread_time()
    for _ in range(STEPS_IN_TURN):
        next(steps)
    return batch_size * STEPS_IN_TURN / (time.thread_time() - begun_s)


# The sections


def one_worker(measurements: Measurements, plain: PlainWorkers, seconds: float) -> None:
    """`paceline train`, one worker, against the plain loop."""
    targets = {512: "1.00", 64: "1.05", 16: "1.10"}
    for batch_size in BATCH_SIZES:
        measurements.measure(
            f"`paceline train`, 1 worker, batch {batch_size}, against the plain loop",
            in_turn(
                ours=partial(train_samples_per_s, "sequential", 1, batch_size, seconds),
                peer=partial(plain.samples_per_s, batch_size, seconds, 1),
            ),
            section=SPEED, target=targets[batch_size],
        )  # fmt: skip


def attach(measurements: Measurements, plain: PlainWorkers, seconds: float) -> None:
    """A user's loop under attach against the same loop without, a few steps of each in turn, in one thread."""
    targets = {512: "0.97", 64: "0.95", 16: "0.93"}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for batch_size in BATCH_SIZES:
        pair = in_turn(
            ours=partial(samples_per_cpu_s, steps_of_the_loop(batch_size, attached=True), batch_size),
            peer=partial(samples_per_cpu_s, steps_of_the_loop(batch_size, attached=False), batch_size),
        )
        for number in range(5):  # warm-up
            pair(number)
        pairs = int(seconds * STEPS_PER_S[batch_size] / STEPS_IN_TURN)
        measurements.measure(
            f"the plain loop under `attach`, 1 worker, batch {batch_size}, against itself without, by CPU time",
            partial(medians_of, pair, pairs), section=SPEED, target=targets[batch_size],
        )  # fmt: skip
    torch.set_num_threads(threads)


def medians_of(pair: Callable[[int], dict[str, float]], count: int, _: int) -> dict[str, float]:
    """The medians of many short measurements, as one."""
    found = [pair(number) for number in range(count)]
    return {name: statistics.median(one[name] for one in found) for name in found[0]}


def two_workers(measurements: Measurements, plain: PlainWorkers, seconds: float) -> None:
    """Hogwild! and Leashed-SGD against two plain loops at the same time, and what it costs to hand the vector over."""
    for algorithm in ("hogwild", "leashed"):
        for batch_size in BATCH_SIZES:
            measurements.measure(
                f"`{algorithm}`, 2 workers, batch {batch_size}, against two plain loops at once",
                in_turn(
                    ours=partial(train_samples_per_s, algorithm, 2, batch_size, seconds),
                    handover_us=partial(handover_us, NUM_PARAMETERS),
                    peer=partial(plain.samples_per_s, batch_size, seconds, 2),
                ),
                section=TWO_WORKERS, target="0.93",
            )  # fmt: skip


def leashed_backoff(measurements: Measurements, plain: PlainWorkers, seconds: float) -> None:
    """Leashed-SGD with back-off at batch 16, where updates are as long as gradients, against Hogwild!."""
    for backoff in ("none", "exponential"):
        measurements.measure(
            f"`leashed(backoff={backoff})` against `hogwild`, 2 workers, batch 16",
            in_turn(
                ours=partial(train_samples_per_s, f"leashed(backoff={backoff})", 2, 16, seconds),
                peer=partial(train_samples_per_s, "hogwild", 2, 16, seconds),
            ),
            section=SPEED, target="0.90" if backoff == "exponential" else "",
        )  # fmt: skip


def time_to_loss(measurements: Measurements, plain: PlainWorkers, seconds: float) -> None:
    """Time until the training loss is 5 % of the initial one, with two workers at batch 64."""

    def time_s(algorithm: str, seed: int) -> dict[str, float]:
        config = pl.TrainConfig(
            task="mnist-mlp", algorithm=algorithm, workers=2, batch_size=64, learning_rate=0.2, epochs=8,
            target_loss=0.115, seed=seed, data=data(),
        )  # fmt: skip
        return {"ours": pl.train(config).result["time_to_fraction_s"]["0.05"] or math.inf}

    for algorithm in ("locked(kind=mutex)", "locked(kind=rwlock)", "hogwild", "leashed", "lockstep"):
        measurements.measure(f"`{algorithm}`", partial(time_s, algorithm), section=TIME_TO_LOSS)


def start(measurements: Measurements, plain: PlainWorkers, seconds: float) -> None:
    """How long three workers take from the call to their first step, with the fork server up."""
    config = pl.TrainConfig(task="digits-mlp", algorithm="hogwild", workers=3, steps=5)
    pl.train(config)  # starts the fork server
    measurements.measure(
        "three workers are ready", lambda _: {"ours": pl.train(config).result["ready_after_s"]},
        section=COSTS, unit="s", target="0.5",
    )  # fmt: skip


def events(measurements: Measurements, plain: PlainWorkers, seconds: float) -> None:
    """What clock readings, counters and the record cost, measured inside real steps."""
    for batch_size in (64, 16):
        times_s = {
            name: lambda silent=silent, batch_size=batch_size: (
                1 / _steps_in_process(batch_size, seconds / 2, silent=silent)
            )
            for name, silent in (("with_events", False), ("without", True))
        }
        measurements.measure(
            f"events and counters, batch {batch_size}, of a step's time",
            lambda number, times_s=times_s: share_of_events(in_turn(**times_s)(number)),
            section=COSTS, unit="%", target="2",
        )  # fmt: skip


def share_of_events(step_s: Mapping[str, float]) -> dict[str, float]:
    """What events add to a step without them, in percent."""
    return {"ours": 100 * (step_s["with_events"] / step_s["without"] - 1)}


def _steps_in_process(batch_size: int, seconds: float, *, silent: bool) -> float:
    """Steps per second of a TaskReplica in this process, with or without its bookkeeping."""
    from paceline.algorithms import Sequential
    from paceline.data.plan import BatchPlan
    from paceline.data.sources import BatchClaims, DatasetBatches
    from paceline.loop.task_replica import TaskReplica
    from paceline.optim.flat import FlatBinding
    from paceline.worker.memberships.memory import WorkerMemory, own_arena

    class SilentReplica(TaskReplica):
        def _record(self, *fields: int) -> None:
            pass

        def applied(self, version: int, gradient_version: int, failed_publishes: int = 0) -> None:
            pass

        def _count_apply(self, begun_s: float) -> None:
            pass

    torch.set_num_threads(1)
    task = load_task("mnist-mlp")
    train_set, _ = task.load(data())
    model = task.model()
    binding = FlatBinding(model.parameters())
    memory = WorkerMemory(binding, {}, Sequential(), own_arena(binding, Sequential()))
    steps = int(STEPS_PER_S[batch_size] * seconds)
    claims = BatchClaims(
        BatchPlan(num_samples=60_000, batch_size=batch_size), worker_id=0, lockstep=False,
        counter=memory.arena.address("next_batch"), max_steps=steps,
    )  # fmt: skip
    kind: type[BaseReplica] = SilentReplica if silent else TaskReplica
    replica = kind(
        model, task.loss, lambda parameters: torch.optim.SGD(parameters, lr=0.05), DatasetBatches(train_set, claims),
        **memory.base_arguments(),
    )  # type: ignore[call-arg]  # fmt: skip
    begun_s = time.perf_counter()
    with torch.no_grad():
        Sequential().work(replica, memory.ports)
    return steps / (time.perf_counter() - begun_s)


def memory(measurements: Measurements, plain: PlainWorkers, seconds: float) -> None:
    """Parameter vectors that leashed touched, gradients included, against 3 m."""

    def vectors(workers: int, _: int) -> dict[str, float]:
        return {"ours": train_run("leashed", workers, 16, seconds / 2).result["vectors_touched"] + workers}

    for workers in (1, 2, 4, 8):
        measurements.measure(
            f"`leashed`, workers: {workers}", partial(vectors, workers),
            section=COSTS, unit="vectors, gradients included", target=f"{3 * workers} (3 m)",
        )  # fmt: skip


def oversubscribed(measurements: Measurements, plain: PlainWorkers, seconds: float) -> None:
    """Eight workers on however many cores there are."""

    def found(algorithm: str, batch_size: int, _: int) -> dict[str, float]:
        run = train_run(algorithm, 8, batch_size, seconds)
        result = run.result
        return {
            "ours": steady_samples_per_s(run.records), "waiting_share": result["waiting_share"],
            "staleness": result["staleness"]["mean"], "most_staleness": result["staleness"]["max"],
        }  # fmt: skip

    for algorithm in ("locked(kind=mutex)", "locked(kind=rwlock)", "hogwild", "leashed", "lockstep"):
        for batch_size in (512, 64):
            measurements.measure(
                f"`{algorithm}`, batch {batch_size}", partial(found, algorithm, batch_size), section=EIGHT
            )


SECTIONS = {
    "one-worker": one_worker,
    "attach": attach,
    "two-workers": two_workers,
    "leashed-backoff": leashed_backoff,
    "time-to-loss": time_to_loss,
    "start": start,
    "events": events,
    "memory": memory,
    "oversubscribed": oversubscribed,
}


def main() -> None:
    """Measures what is missing of the sections that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7, help="measurements per row (default 7)")
    parser.add_argument("--seconds", type=float, default=2.0, help="about how long each measurement lasts (default 2)")
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"sections, of {', '.join(SECTIONS)}")
    parser.add_argument(
        "--runs", type=Path, default=RESULTS / "shared_memory.jsonl", help="where measurements are kept"
    )
    arguments = parser.parse_args()
    data()  # says what is missing before processes start
    measurements, plain = Measurements(arguments.runs, arguments.repeats), PlainWorkers(2)
    train_samples_per_s("hogwild", 2, 64, 0.5)  # starts the fork server
    for name in arguments.only.split(","):
        SECTIONS[name](measurements, plain, arguments.seconds)


if __name__ == "__main__":
    main()
