"""Shared-memory training against plain PyTorch, on mnist-mlp: ratios, ours and the peer's measured in turn in one run.

    python benchmarks/shared_memory.py [--pairs 7] [--seconds 2] [--only one-worker,two-workers,...]

Needs MNIST in the folder that PACELINE_DATA names. Prints a table and writes benchmarks/results/shared_memory.md.
A ratio above 1 means that Paceline is faster. Every figure is the median over interleaved pairs; the interval is the range
of the middle half. Warm-up is excluded: the first sixth of every measurement.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from plain_loop import ShuffledBatches, make_model, plain_steps_per_s

import paceline as pl
from paceline.loop.base_replica import BaseReplica
from paceline.system.machine import machine, versions
from paceline.tasks.load import load_task

RESULTS = Path(__file__).parent / "results"
BATCH_SIZES = (512, 64, 16)
ABOUT = (
    "The ratios are of this machine. The control of the rows with two workers is two plain loops that share nothing. What"
    " the cores need to hand the shared vector to each other decides how near `hogwild` and `leashed` come to it, and is not"
    " measured here: machines of one kind differ. The raw runs are not in the repository."
)
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


class Table:
    """Rows of the result, printed as they come."""

    def __init__(self) -> None:
        self.rows: list[str] = []

    def add(self, what: str, ours: str, peer: str, ratio: str, target: str) -> None:
        """One row of the table."""
        row = f"| {what} | {ours} | {peer} | {ratio} | {target} |"
        self.rows.append(row)
        print(row, flush=True)

    def ratio(self, what: str, pairs: list[tuple[float, float]], target: str, unit: str = "samples/s") -> None:
        """One row from pairs of (ours, peer)."""
        ratios = sorted(ours / peer for ours, peer in pairs)
        low, high = np.percentile(ratios, [25, 75])
        ours, peer = (statistics.median(pair[i] for pair in pairs) for i in (0, 1))
        self.add(
            what, f"{ours:,.0f} {unit}", f"{peer:,.0f} {unit}",
            f"**{statistics.median(ratios):.2f}** ({low:.2f} to {high:.2f}, {len(pairs)} pairs)", target,
        )  # fmt: skip


def pairs_of(count: int, ours: Callable[[], float], peer: Callable[[], float]) -> list[tuple[float, float]]:
    """Interleaved measurements; who goes first alternates."""
    found = []
    for index in range(count):
        if index % 2:
            second = peer()
            found.append((ours(), second))
        else:
            first = ours()
            found.append((first, peer()))
    return found


def one_worker(table: Table, plain: PlainWorkers, pairs: int, seconds: float) -> None:
    """`paceline train`, one worker, against the plain loop."""
    targets = {512: "1.00", 64: "1.05", 16: "1.10"}
    for batch_size in BATCH_SIZES:
        table.ratio(
            f"`paceline train`, 1 worker, batch {batch_size}, against the plain loop",
            pairs_of(
                pairs,
                partial(train_samples_per_s, "sequential", 1, batch_size, seconds),
                partial(plain.samples_per_s, batch_size, seconds, 1),
            ),
            targets[batch_size],
        )


def attach(table: Table, plain: PlainWorkers, pairs: int, seconds: float) -> None:
    """A user's loop under attach against the same loop without, a few steps of each in turn, in one thread."""
    targets = {512: "0.97", 64: "0.95", 16: "0.93"}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for batch_size in BATCH_SIZES:
        ours, peer = (
            partial(samples_per_cpu_s, steps_of_the_loop(batch_size, attached=attached), batch_size)
            for attached in (True, False)
        )
        pairs_of(5, ours, peer)  # warm-up
        table.ratio(
            f"the plain loop under `attach`, 1 worker, batch {batch_size}, against itself without, by CPU time",
            pairs_of(int(pairs * seconds * STEPS_PER_S[batch_size] / STEPS_IN_TURN), ours, peer),
            targets[batch_size],
        )
    torch.set_num_threads(threads)


def two_workers(table: Table, plain: PlainWorkers, pairs: int, seconds: float) -> None:
    """Hogwild! and Leashed-SGD against two independent plain loops at the same time."""
    for algorithm in ("hogwild", "leashed"):
        for batch_size in BATCH_SIZES:
            table.ratio(
                f"`{algorithm}`, 2 workers, batch {batch_size}, against two plain loops at once",
                pairs_of(
                    pairs,
                    partial(train_samples_per_s, algorithm, 2, batch_size, seconds),
                    partial(plain.samples_per_s, batch_size, seconds, 2),
                ),
                "0.93",
            )


def leashed_backoff(table: Table, plain: PlainWorkers, pairs: int, seconds: float) -> None:
    """Leashed-SGD with back-off at batch 16, where updates are as long as gradients, against Hogwild!."""
    for backoff in ("none", "exponential"):
        table.ratio(
            f"`leashed(backoff={backoff})` against `hogwild`, 2 workers, batch 16",
            pairs_of(
                pairs,
                partial(train_samples_per_s, f"leashed(backoff={backoff})", 2, 16, seconds),
                partial(train_samples_per_s, "hogwild", 2, 16, seconds),
            ),
            "0.90" if backoff == "exponential" else "",
        )


def time_to_loss(table: Table, plain: PlainWorkers, pairs: int, seconds: float) -> None:
    """Time until the training loss is 5 % of the initial one, with two workers at batch 64."""
    algorithms = ("locked(kind=mutex)", "locked(kind=rwlock)", "hogwild", "leashed", "lockstep")
    times: dict[str, list[float]] = {algorithm: [] for algorithm in algorithms}
    for seed in range(pairs):
        for algorithm in algorithms:
            run = pl.train(
                pl.TrainConfig(
                    task="mnist-mlp", algorithm=algorithm, workers=2, batch_size=64, learning_rate=0.2, epochs=8,
                    target_loss=0.115, seed=seed, data=data(),
                )
            )  # fmt: skip
            times[algorithm].append(run.result["time_to_fraction_s"]["0.05"] or float("inf"))
    for algorithm, found in times.items():
        low, high = np.percentile(found, [25, 75])
        table.add(
            f"`{algorithm}`: time to 5 % of the initial loss, 2 workers, batch 64, learning rate 0.2",
            f"{statistics.median(found):.2f} s ({low:.2f} to {high:.2f}, {len(found)} seeds)", "-", "-", "",
        )  # fmt: skip


def start(table: Table, plain: PlainWorkers, pairs: int, seconds: float) -> None:
    """How long three workers take from the call to their first step, with the fork server up."""
    ready = []
    for _ in range(pairs + 1):
        run = pl.train(pl.TrainConfig(task="digits-mlp", algorithm="hogwild", workers=3, steps=5))
        ready.append(run.result["ready_after_s"])
    table.add(
        "three workers ready (the first, with the fork server's own start, and later ones)",
        f"{ready[0]:.2f} s; {statistics.median(ready[1:]):.2f} s", "-", "-", "0.5 s once torch is loaded",
    )  # fmt: skip


def events(table: Table, plain: PlainWorkers, pairs: int, seconds: float) -> None:
    """What clock readings, counters and the record cost, measured inside real steps."""
    for batch_size in (64, 16):
        with_events, without = [], []
        for index in range(2 * pairs):
            silent = bool(index % 2)
            (without if silent else with_events).append(_steps_in_process(batch_size, seconds / 2, silent=silent))
        cost = statistics.median(1 / ours - 1 / bare for ours, bare in zip(with_events, without, strict=True))
        share = cost * statistics.median(without)
        table.add(
            f"events and counters, batch {batch_size}",
            f"{cost * 1e6:.1f} us a step",
            "-",
            f"**{share:.1%}** of a step",
            "2 %",
        )


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


def memory(table: Table, plain: PlainWorkers, pairs: int, seconds: float) -> None:
    """Parameter vectors that leashed touched, gradients included, against 3 m."""
    for workers in (1, 2, 4, 8):
        result = train_run("leashed", workers, 16, seconds / 2).result
        vectors = result["vectors_touched"] + workers
        table.add(
            f"`leashed`, {workers} workers: vectors used, gradients included",
            f"{vectors}",
            "-",
            "-",
            f"{3 * workers} (3 m)",
        )


def oversubscribed(table: Table, plain: PlainWorkers, pairs: int, seconds: float) -> None:
    """Eight workers on however many cores there are."""
    for algorithm in ("locked(kind=mutex)", "locked(kind=rwlock)", "hogwild", "leashed", "lockstep"):
        for batch_size in (512, 64):
            run = train_run(algorithm, 8, batch_size, seconds)
            speed, result = steady_samples_per_s(run.records), run.result
            staleness = result["staleness"]
            table.add(
                f"`{algorithm}`, 8 workers, batch {batch_size}",
                f"{speed:,.0f} samples/s; waiting {result['waiting_share']:.0%}; staleness mean {staleness['mean']:.1f},"
                f" most {staleness['max']}",
                "-", "-", "",
            )  # fmt: skip


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
    """Runs the sections that were asked for and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=7, help="interleaved pairs per ratio (default 7)")
    parser.add_argument("--seconds", type=float, default=2.0, help="about how long each measurement lasts (default 2)")
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"sections, of {', '.join(SECTIONS)}")
    parser.add_argument("--out", type=Path, default=RESULTS / "shared_memory.md", help="where the table is written")
    arguments = parser.parse_args()
    data()  # says what is missing before processes start
    table = Table()
    plain = PlainWorkers(2)
    train_samples_per_s("hogwild", 2, 64, 0.5)  # starts the fork server
    for name in arguments.only.split(","):
        SECTIONS[name](table, plain, arguments.pairs, arguments.seconds)
    about = machine()
    package = versions()
    head = [
        "# Shared-memory training against plain PyTorch (mnist-mlp, 134,794 parameters, float32)",
        "",
        ABOUT,
        "",
        f"Machine: {about['processor']}, {about['cores']} cores, {about['memory_gib']} GiB, {about['system']}."
        f" Python {package['python']}, PyTorch {package['torch']}, Paceline {package['paceline']}.",
        f"Command: `python benchmarks/shared_memory.py --pairs {arguments.pairs} --seconds {arguments.seconds:g}`.",
        "Medians over interleaved pairs; in brackets the middle half. The plain loop is `benchmarks/plain_loop.py`.",
        "",
        "| what | ours | peer | ratio | target |",
        "|---|---|---|---|---|",
    ]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text("\n".join([*head, *table.rows, ""]))


if __name__ == "__main__":
    main()
