"""`paceline calibrate` as a function: this machine, measured, as a cluster that the simulator reads.

`measure` takes times, `as_cluster` interprets them, `write` makes the file. Workers of several machines share these
functions: `cluster.py`.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from paceline.advice.calibration import probes
from paceline.advice.calibration.codecs import CodecRate, codec_table, measure_codecs
from paceline.advice.calibration.measurements import (
    QUICK,
    SMALL_BYTES,
    ColdSteps,
    Effort,
    MemoryTimes,
    Quartiles,
    Steps,
    fit_cold,
    fit_link,
    named_quartiles,
    rounded,
)
from paceline.memory.shared_store import SharedStore
from paceline.optim.flat import FlatBinding
from paceline.ports.ports import Mailbox
from paceline.simulator import Cluster
from paceline.system import files
from paceline.system.machine import machine, num_cores, versions
from paceline.system.torch_random import torch_undisturbed
from paceline.tasks.base import Task
from paceline.tasks.load import load_task
from paceline.transport.mailbox import ZmqMailbox

_CONNECT_S = 60.0
_LONG_TRIP_S = 1.0  # a link on which a message takes this long gets no longer messages


@dataclass(frozen=True)
class Calibration:
    """Measurements; times in seconds."""

    task: str
    batch_size: int  # of the step that the cluster describes
    vector_bytes: int
    compute_s: dict[int, Quartiles]  # by batch size, a step without its update: input, forward, backward
    update_s: Quartiles  # one plain SGD step of the optimizer
    memory: MemoryTimes  # times of copies, atomic additions and wake-ups
    round_trips_s: dict[int, list[float]] = field(repr=False)  # by message bytes, between two processes of this machine
    handed_copy_s: Quartiles  # copying the vector after another process has written it and before that process reads it
    cores: int
    lone_step_s: Quartiles  # a full step on a few samples, in one process
    crowded_steps_s: list[Quartiles]  # the same in as many processes as there are cores, concurrently
    spin_s: Quartiles  # how long a process spins on a word before it sleeps, if each worker has a core
    #: How long a process computes at a stretch if processes outnumber cores by one; None: longer than was measured.
    slice_s: Quartiles | None
    cold_steps_s: ColdSteps = field(repr=False)  # full steps after pauses, in one process
    few_cold_steps_s: ColdSteps = field(repr=False)  # the same with a quarter of the batch
    codecs: dict[str, CodecRate]  # by name, how fast one core encodes and decodes

    def spreads(self) -> dict[str, Quartiles]:
        found = named_quartiles(self.compute_s, self.update_s, self.memory) | {
            "copy of what another process has written": self.handed_copy_s,
            "step on a few samples": self.lone_step_s,
            f"step on a few samples, {len(self.crowded_steps_s)} at once": self.crowded_steps_s[0],
            "spin before sleep": self.spin_s,
        }
        if self.slice_s is not None:
            found["time slice"] = self.slice_s
        for pause_s, pairs in self.cold_steps_s.items():
            found[f"step after a pause of {1e3 * pause_s:g} ms"] = Quartiles.of([after_s for after_s, _ in pairs])
        return found | {
            f"round trip, {num_bytes:,} bytes": Quartiles.of(times_s)
            for num_bytes, times_s in self.round_trips_s.items()
        }

    def as_cluster(self, workers: int | None = None) -> Cluster:
        """The cluster that a calibration describes; unmeasured fields have the simulator's defaults.

        A simulated step is compute time, then memory traffic of `update_vectors` shared vectors; both medians are reproduced
        exactly.
        """
        link = fit_link(self.round_trips_s)
        figures = replace(self.memory, copy_s=self.handed_copy_s).figures(self.vector_bytes)
        vectors = self.update_s.median_s * figures["core_bytes_per_s"] / self.vector_bytes
        crowded_s = statistics.fmean(one.median_s for one in self.crowded_steps_s)
        figures |= {"spin_s": self.spin_s.median_s, "crowding": max(1.0, crowded_s / self.lone_step_s.median_s)}
        if self.slice_s is not None:
            figures["slice_s"] = self.slice_s.median_s
        figures |= dataclasses.asdict(fit_cold(self.cold_steps_s, self.few_cold_steps_s))
        shared: dict[str, Any] = {name: rounded(value) for name, value in figures.items()}
        return Cluster(
            cores=self.cores,
            workers=workers or max(2, len(self.memory.crowded_copies_s)),
            compute_s=rounded(self.compute_s[self.batch_size].median_s),
            update_vectors=rounded(vectors),
            latency_s=rounded(link.latency_s),
            bandwidth_bytes_per_s=rounded(link.bandwidth_bytes_per_s),
            codecs=codec_table(self.codecs),
            **shared,
        )

    def summary(self, _: Cluster) -> list[str]:
        return [f"{name}: {spread}" for name, spread in self.spreads().items()]

    def comments(self, cluster: Cluster) -> list[str]:
        """Comments on the sources of a cluster file's numbers."""
        about, package = machine(), versions()
        where = f"{about['processor']}, {about['cores']} cores, {about['system']}, PyTorch {package['torch']}"
        return [
            f"Measured by `paceline calibrate` on {where}.",
            f"compute_s and update_vectors are those of {self.task} with batches of {self.batch_size}, plain SGD, one"
            " thread per worker.",
            "Workers talk over loopback here: between machines, put in your network's latency_s and bandwidth_bytes_per_s,",
            "and leave out cores, slice_s, spin_s, crowding, cold_s, cold_factor and cooling_s: without them every worker has",
            "a core to itself.",
            "Under [codecs], what one core codes and decodes in a second, in bytes of a float32 vector.",
            "Not measured, but the simulator's defaults: racing_blocks, detection_s.",
            "",
            "What was measured: median, and the middle half.",
            *(f"  {line}" for line in self.summary(cluster)),
        ]

    def as_json(self, cluster: Cluster, out: Path) -> dict[str, Any]:
        return {
            "file": str(out),
            "task": self.task,
            "batch_size": self.batch_size,
            "cluster": cluster.as_table(),
            "measured": {name: dataclasses.asdict(spread) for name, spread in self.spreads().items()},
            "codecs": {name: rate._asdict() for name, rate in self.codecs.items()},
            "machine": machine(),
            "versions": versions(),
        }


def measure(
    task_reference: str = "digits-mlp",  # built-in name, or `path/to/file.py:function`
    *,
    batch_size: int | None = None,  # None: the task's; also measures steps with a quarter of it and four times as much
    data: Path | None = None,  # folder with data sets; None: the folder in PACELINE_DATA
    quick: bool = False,  # takes a few seconds and is less exact
    vector_bytes: int | None = None,  # of the vector whose copies are measured; None: that of the task's parameters
    on_progress: Callable[[str], None] = lambda _: None,  # called with the name of each measurement
) -> Calibration:
    """Measures this machine with one task's steps; takes about half a minute on an idle machine.

    Raises:
        UsageError: no such task or data, or a batch is larger than the data set.
        PacelineError: a measurement failed, or was too disturbed to be meaningful.
    """
    effort = QUICK if quick else Effort()
    task = load_task(task_reference)
    on_progress(f"{task.name}: loading")
    train_set, _ = task.load(data)
    steps = measure_steps(task, train_set, batch_size, effort, on_progress)
    steps = replace(steps, vector_bytes=vector_bytes or steps.vector_bytes)
    on_progress(f"{task.name}: steps after pauses")
    after_pauses = partial(probes.cold_steps_s, pauses_s=effort.pauses_s, at_least=effort.pauses, for_s=effort.steps_s)
    cold_steps_s = after_pauses(task, train_set, steps.batch_size)
    few_cold_steps_s = after_pauses(task, train_set, min(steps.compute_s))
    on_progress("starting processes")
    cores = num_cores()
    with probes.ProcessTeam(1 + max(2, cores), steps.vector_bytes) as team:
        memory = measure_memory(team, steps.vector_bytes, effort, on_progress)
        on_progress("copies of a vector that another process has written")
        handed_s = probes.handed_copies_s(team, steps.vector_bytes, effort.repeats)
        samples = probes.few_samples(train_set, 4 * steps.batch_size)
        work = {"task_reference": task_reference, "samples": samples, "batch_size": steps.batch_size}
        crowd = partial(team.together, probes.steps_s, for_s=effort.steps_s, **work)
        on_progress(f"{steps.task}: steps, one process")
        lone_steps_s = crowd(1)[0]
        on_progress(f"{steps.task}: steps, {cores} at once")
        crowded_steps_s = crowd(cores)
        on_progress("time slices")
        slices_s = [one for all_s in team.together(probes.slices_s, 1 + cores, for_s=effort.slices_s) for one in all_s]
        spins_s = team.together(probes.spins_s, 1, repeats=effort.repeats)[0]
        on_progress("messages between two processes")
        trips_s = _round_trips_s(team, effort)
    on_progress("codecs")
    codecs = measure_codecs(effort.codec_s)
    return Calibration(
        task=steps.task,
        batch_size=steps.batch_size,
        vector_bytes=steps.vector_bytes,
        compute_s={size: Quartiles.of(times_s) for size, times_s in steps.compute_s.items()},
        update_s=Quartiles.of(steps.update_s),
        memory=memory,
        round_trips_s=trips_s,
        cold_steps_s=cold_steps_s,
        few_cold_steps_s=few_cold_steps_s,
        codecs=codecs,
        handed_copy_s=Quartiles.of(handed_s),
        cores=cores,
        lone_step_s=Quartiles.of(lone_steps_s),
        crowded_steps_s=[Quartiles.of(one) for one in crowded_steps_s],
        spin_s=Quartiles.of(spins_s),
        slice_s=Quartiles.of(slices_s) if slices_s else None,
    )


def measure_steps(
    task: Task, train_set: Any, batch_size: int | None, effort: Effort, on_progress: Callable[[str], None]
) -> Steps:
    """The part of `measure` that computes in this process."""
    chosen = batch_size or task.batch_size
    rows = {}
    for size in sorted({max(1, chosen // 4), chosen, 4 * chosen}):
        if size == chosen or size <= len(train_set):
            on_progress(f"{task.name}: steps of batch {size}")
            rows[size] = probes.steps(task, train_set, size, at_least=effort.steps, for_s=effort.steps_s)
    compute_s = {size: of["ended_s"] - of["started_s"] - of["apply_s"] for size, of in rows.items()}
    with torch_undisturbed():
        binding = FlatBinding(task.new_model().parameters())
    vector_bytes = binding.num_elements * binding.dtype.itemsize
    return Steps(task.name, chosen, vector_bytes, compute_s, rows[chosen]["apply_s"])


def measure_memory(
    team: probes.ProcessTeam, vector_bytes: int, effort: Effort, on_progress: Callable[[str], None]
) -> MemoryTimes:
    """The part of `measure` in which processes of this machine share memory; `team` has at least two."""
    cores = num_cores()
    copies = partial(team.together, probes.copies_s, num_bytes=vector_bytes, for_s=effort.copies_s)
    on_progress("copies of the parameters, one process")
    alone_s = copies(1)[0]
    on_progress(f"copies of the parameters, {cores} at once")
    crowded_s = copies(cores)
    on_progress("atomic operations and wake-ups")
    atomics_s = team.together(probes.atomics_s, min(2, cores), repeats=effort.repeats)
    wake_ups_s = probes.wake_ups_s(team, effort.repeats)
    return MemoryTimes(
        copy_s=Quartiles.of(alone_s),
        crowded_copies_s=[Quartiles.of(one) for one in crowded_s],
        atomic_s=Quartiles.of([one for times_s in atomics_s for one in times_s]),
        wake_s=Quartiles.of(wake_ups_s),
    )


def _round_trips_s(team: probes.ProcessTeam, effort: Effort) -> dict[int, list[float]]:
    store = SharedStore(team.segment, team.store_at, 2)
    store.begin()
    team.start(probes.echo, store_at=team.store_at)
    with ZmqMailbox(store, 0, 2) as mailbox:
        mailbox.connect(_CONNECT_S)
        trips_s = measure_link(mailbox, 1, effort)
    team.results(1)
    return trips_s


def measure_link(mailbox: Mailbox, peer: int, effort: Effort) -> dict[int, list[float]]:
    """Round trips to a peer that returns messages, by message bytes; skips longer messages on a slow link."""
    trips_s = {SMALL_BYTES: probes.round_trips_s(mailbox, peer, SMALL_BYTES, effort.repeats)}
    for num_bytes in effort.large_bytes:
        if len(trips_s) > 2 and min(next(reversed(trips_s.values()))) > _LONG_TRIP_S:
            break
        trips_s[num_bytes] = probes.round_trips_s(mailbox, peer, num_bytes, effort.large_repeats)
    return trips_s


def write_file(cluster: Cluster, comments: Sequence[str], out: Path) -> Path:
    """Writes a cluster file atomically, with comments at the top if it is TOML."""
    lines = [f"# {line}".rstrip() for line in comments] + [""] if out.suffix == ".toml" else []
    files.write_text(out, "\n".join([*lines, cluster.as_text(out)]))
    return out
