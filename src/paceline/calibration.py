"""`paceline calibrate` as a function: this machine, measured, as a cluster that the simulator reads.

`measure` takes times, `as_cluster` says what they mean, `write` makes the file. Measures of several machines (a compute time
per worker, a round trip per pair) fit between the first two: `Cluster.slowness` and `link_factors` take them.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline import probes
from paceline.errors import PacelineError
from paceline.flat import FlatBinding
from paceline.peers import host_store
from paceline.simulator import Cluster
from paceline.simulator.core import COPY_VECTORS
from paceline.system import machine, versions
from paceline.tasks.load import load_task
from paceline.transport.mailbox import ZmqMailbox

__all__ = ["Calibration", "Link", "Spread", "as_cluster", "as_json", "describe", "fit_link", "measure", "write"]

_SMALL_BYTES = 100
_CONNECT_S = 60.0


@dataclass(frozen=True)
class Spread:
    """Single measurements of one quantity: their median, and between which values the middle half lies."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float] | np.ndarray) -> Spread:
        """Of at least one value."""
        low, median, high = (float(one) for one in np.percentile(values, [25, 50, 75]))
        return cls(median, low, high, len(values))


@dataclass(frozen=True)
class Link:
    """A message of b bytes takes `latency_s + b / bandwidth_bytes_per_s` from one program to another."""

    latency_s: float
    bandwidth_bytes_per_s: float


@dataclass(frozen=True)
class Effort:
    """How long is measured."""

    steps: int = 50  # at least, for each batch size
    steps_s: float = 2.0
    copies_s: float = 1.0
    repeats: int = 200  # of what takes microseconds
    large_repeats: int = 20
    large_bytes: tuple[int, ...] = (1_000_000, 2_000_000, 4_000_000, 8_000_000)
    slices_s: float = 1.0


QUICK = Effort(
    steps=10, steps_s=0.1, copies_s=0.05, slices_s=0.1, repeats=20, large_repeats=4, large_bytes=(1_000_000, 4_000_000)
)


@dataclass(frozen=True)
class Calibration:
    """What was measured; times in seconds.

    Attributes:
        task: whose steps.
        batch_size: of the step that the cluster gets.
        vector_bytes: size of the task's parameters.
        compute_s: by batch size, a step without its update: input, forward, backward.
        update_s: one plain SGD step of the optimizer.
        copy_s: of one vector, by one process alone.
        crowded_copies_s: the same for each of several processes, all copying at once.
        atomic_s: one addition to a word that two processes add to.
        wake_s: from a word's change until a process that slept on it runs.
        round_trips_s: by message bytes, between two processes of this machine.
        handed_copy_s: of the vector, by a process after another has written it and before that reads it.
        cores: that processes may use; None: not measured, as in what follows.
        lone_step_s: a full step on a few samples, in one process.
        crowded_steps_s: the same in as many processes as there are cores, all at once.
        spin_s: how long a process waits for a word before it sleeps, where each worker has a core.
        slice_s: what a process computes at a stretch where there is one more than cores.
    """

    task: str
    batch_size: int
    vector_bytes: int
    compute_s: dict[int, Spread]
    update_s: Spread
    copy_s: Spread
    crowded_copies_s: list[Spread]
    atomic_s: Spread
    wake_s: Spread
    round_trips_s: dict[int, list[float]] = field(repr=False)
    handed_copy_s: Spread | None = None
    cores: int | None = None
    lone_step_s: Spread | None = None
    crowded_steps_s: list[Spread] = field(default_factory=list)
    spin_s: Spread | None = None
    slice_s: Spread | None = None

    def spreads(self) -> dict[str, Spread]:
        """Everything measured, by name."""
        found = {f"step without update, batch {size}": spread for size, spread in self.compute_s.items()}
        found["update"] = self.update_s
        found["copy of the parameters"] = self.copy_s
        if self.handed_copy_s is not None:
            found["copy of what another process has written"] = self.handed_copy_s
        found |= {f"copy, {len(self.crowded_copies_s)} at once": self.crowded_copies_s[0]}
        found |= {"atomic addition": self.atomic_s, "wake-up": self.wake_s}
        if self.lone_step_s is not None and self.crowded_steps_s:
            found["step on a few samples"] = self.lone_step_s
            found[f"step on a few samples, {len(self.crowded_steps_s)} at once"] = self.crowded_steps_s[0]
        if self.spin_s is not None:
            found["spin before sleep"] = self.spin_s
        if self.slice_s is not None:
            found["time slice"] = self.slice_s
        return found | {
            f"round trip, {num_bytes:,} bytes": Spread.of(times_s) for num_bytes, times_s in self.round_trips_s.items()
        }


def measure(
    task_reference: str = "digits-mlp",
    *,
    batch_size: int | None = None,
    data: Path | None = None,
    quick: bool = False,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Calibration:
    """Measures this machine with one task's steps; takes about half a minute on an idle machine.

    Args:
        task_reference: built-in name, or `path/to/file.py:function`.
        batch_size: None: the task's; steps are also measured with a quarter of it and four times as much.
        data: folder with data sets; None: what PACELINE_DATA names.
        quick: in a few seconds, less exactly.
        on_progress: told what is being measured.

    Raises:
        UsageError: no such task or data, or a batch is larger than the data set.
        PacelineError: a measurement failed, or was too disturbed to mean anything.
    """
    effort = QUICK if quick else Effort()
    task = load_task(task_reference)
    on_progress(f"{task.name}: loading")
    train_set, _ = task.load(data)
    chosen = batch_size or task.batch_size
    rows = {}
    for size in sorted({max(1, chosen // 4), chosen, 4 * chosen}):
        if size == chosen or size <= len(train_set):  # type: ignore[arg-type]
            on_progress(f"{task.name}: steps of batch {size}")
            rows[size] = probes.steps(task, train_set, size, at_least=effort.steps, for_s=effort.steps_s)
    vector_bytes = _vector_bytes(task.model)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    on_progress("starting processes")
    with probes.Team(1 + max(2, cores), vector_bytes) as team:
        copies = partial(team.together, probes.copies_s, num_bytes=vector_bytes, for_s=effort.copies_s)
        on_progress("copies of the parameters, one process")
        alone_s = copies(1)[0]
        on_progress(f"copies of the parameters, {cores} at once")
        crowded_s = copies(cores)
        on_progress("copies of a vector that another process has written")
        handed_s = probes.handed_copies_s(team, vector_bytes, effort.repeats)
        samples = probes.few_samples(train_set, 4 * chosen)
        crowd = partial(
            team.together, probes.steps_s, task_reference=task_reference, samples=samples, batch_size=chosen
        )
        on_progress(f"{task.name}: steps, one process")
        lone_steps_s = crowd(1, for_s=effort.steps_s)[0]
        on_progress(f"{task.name}: steps, {cores} at once")
        crowded_steps_s = crowd(cores, for_s=effort.steps_s)
        on_progress("time slices")
        slices_s = [
            one for times_s in team.together(probes.slices_s, 1 + cores, for_s=effort.slices_s) for one in times_s
        ]
        on_progress("atomic operations and wake-ups")
        atomics_s = team.together(probes.atomics_s, min(2, cores), repeats=effort.repeats)
        spins_s = team.together(probes.spins_s, 1, repeats=effort.repeats)[0]
        wake_ups_s = probes.wake_ups_s(team, effort.repeats)
        on_progress("messages between two processes")
        trips_s = _round_trips_s(team, effort)
    return Calibration(
        task=task.name,
        batch_size=chosen,
        vector_bytes=vector_bytes,
        compute_s={size: Spread.of(of["ended_s"] - of["started_s"] - of["apply_s"]) for size, of in rows.items()},
        update_s=Spread.of(rows[chosen]["apply_s"]),
        copy_s=Spread.of(alone_s),
        crowded_copies_s=[Spread.of(one) for one in crowded_s],
        atomic_s=Spread.of([one for times_s in atomics_s for one in times_s]),
        wake_s=Spread.of(wake_ups_s),
        round_trips_s=trips_s,
        handed_copy_s=Spread.of(handed_s),
        cores=cores,
        lone_step_s=Spread.of(lone_steps_s),
        crowded_steps_s=[Spread.of(one) for one in crowded_steps_s],
        spin_s=Spread.of(spins_s),
        slice_s=Spread.of(slices_s) if slices_s else None,
    )


def _vector_bytes(make: Callable[[], torch.nn.Module]) -> int:
    with torch.random.fork_rng(devices=[]):
        binding = FlatBinding(make().parameters())
    return binding.num_elements * binding.dtype.itemsize


def _round_trips_s(team: probes.Team, effort: Effort) -> dict[int, list[float]]:
    store = host_store()
    team.start(probes.echo, port=store.port)
    with ZmqMailbox(store, 0, 2) as mailbox:
        mailbox.connect(_CONNECT_S)
        trips_s = {_SMALL_BYTES: probes.round_trips_s(mailbox, 1, _SMALL_BYTES, effort.repeats)}
        for num_bytes in effort.large_bytes:
            trips_s[num_bytes] = probes.round_trips_s(mailbox, 1, num_bytes, effort.large_repeats)
    team.results(1)
    return trips_s


def fit_link(round_trips_s: Mapping[int, Sequence[float]]) -> Link:
    """Latency and bandwidth of a link from round trips by message bytes; the medians count.

    Latency: half the round trip of the smallest message. Bandwidth: the slope of half the round trips of all others over their
    bytes, as the median of the slopes between any two sizes, so that one disturbed size does not spoil it.

    Raises:
        PacelineError: longer messages did not take longer.
    """
    medians_s = {num_bytes: statistics.median(times_s) / 2 for num_bytes, times_s in sorted(round_trips_s.items())}
    small, *large = medians_s
    slopes = [(medians_s[b] - medians_s[a]) / (b - a) for a, b in combinations(large, 2)]
    s_per_byte = statistics.median(slopes)
    if s_per_byte <= 0:
        raise PacelineError(
            "Longer messages took no longer: the machine is too busy to measure; try again when it is idle."
        )
    return Link(medians_s[small], 1 / s_per_byte)


def as_cluster(measured: Calibration, workers: int | None = None) -> Cluster:
    """The cluster that a calibration describes; what it did not measure has the simulator's defaults.

    A step is simulated as compute time, then `update_vectors` vectors of memory traffic; both medians are met exactly. What
    moves are shared vectors, at the rate at which a core copies what another has written. The workers share the machine's
    cores, where these were measured.
    """
    link = fit_link(measured.round_trips_s)
    copy_s = measured.copy_s if measured.handed_copy_s is None else measured.handed_copy_s
    rate = COPY_VECTORS * measured.vector_bytes / copy_s.median
    crowded = sum(COPY_VECTORS * measured.vector_bytes / one.median for one in measured.crowded_copies_s)
    shared: dict[str, Any] = {"cores": measured.cores} if measured.cores is not None else {}
    if measured.spin_s is not None:
        shared["spin_s"] = _rounded(measured.spin_s.median)
    if measured.slice_s is not None:
        shared["slice_s"] = _rounded(measured.slice_s.median)
    if measured.lone_step_s is not None and measured.crowded_steps_s:
        crowded_s = statistics.fmean(one.median for one in measured.crowded_steps_s)
        shared["crowding"] = _rounded(max(1.0, crowded_s / measured.lone_step_s.median))
    return Cluster(
        workers=workers or max(2, len(measured.crowded_copies_s)),
        compute_s=_rounded(measured.compute_s[measured.batch_size].median),
        core_bytes_per_s=_rounded(rate),
        bus_bytes_per_s=_rounded(max(rate, crowded)),
        update_vectors=_rounded(measured.update_s.median * rate / measured.vector_bytes),
        atomic_s=_rounded(measured.atomic_s.median),
        wake_s=_rounded(max(0.0, measured.wake_s.median)),
        latency_s=_rounded(link.latency_s),
        bandwidth_bytes_per_s=_rounded(link.bandwidth_bytes_per_s),
        **shared,
    )


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def write(measured: Calibration, cluster: Cluster, out: Path) -> Path:
    """Writes the cluster file, whole or not at all; a TOML file says in comments what was measured."""
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".calibration-") as folder:
        draft = cluster.save(Path(folder) / out.name)
        if out.suffix == ".toml":
            draft.write_text("\n".join([*_comments(measured), "", draft.read_text(encoding="utf-8")]), encoding="utf-8")
        draft.replace(out)
    return out


def as_json(measured: Calibration, cluster: Cluster, out: Path) -> dict[str, Any]:
    """Everything as plain data."""
    from paceline.simulator.cluster_file import as_table

    return {
        "file": str(out),
        "task": measured.task,
        "batch_size": measured.batch_size,
        "cluster": as_table(cluster),
        "measured": {name: _in_seconds(spread) for name, spread in measured.spreads().items()},
        "machine": machine(),
        "versions": versions(),
    }


def _comments(measured: Calibration) -> list[str]:
    about, package = machine(), versions()
    where = f"{about['processor']}, {about['cores']} cores, {about['system']}, PyTorch {package['torch']}"
    lines = [
        f"Measured by `paceline calibrate` on {where}.",
        f"compute_s and update_vectors are those of {measured.task} with batches of {measured.batch_size}, plain SGD, one"
        " thread per worker.",
        "Workers talk over loopback here: between machines, put in your network's latency_s and bandwidth_bytes_per_s, and",
        "leave out cores, slice_s, spin_s and crowding: without them every worker has a core to itself.",
        "Not measured, but the simulator's defaults: racing_blocks, detection_s.",
        "",
        "What was measured: median, and the middle half.",
        *(f"  {name}: {describe(spread)}" for name, spread in measured.spreads().items()),
    ]
    return [f"# {line}".rstrip() for line in lines]


def _in_seconds(spread: Spread) -> dict[str, float]:
    return {"median_s": spread.median, "low_s": spread.low, "high_s": spread.high, "count": spread.count}


def describe(spread: Spread) -> str:
    """A median time with its spread, for people."""
    unit, name = next(((u, n) for u, n in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")) if spread.median >= u), (1e-9, "ns"))
    median, low, high = (f"{one / unit:.3g}" for one in (spread.median, spread.low, spread.high))
    return f"{median} {name} (middle half {low} to {high}, {spread.count} times)"
