"""The measurements of `paceline calibrate`: steps of a task, copies, atomic operations, wake-ups, messages, in seconds.

Every function skips its warm-up and returns all single times; `machine.py` evaluates them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Self

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from paceline.data.plan import BatchPlan
from paceline.data.sources import BatchClaims, DatasetBatches
from paceline.errors import PacelineError, PeerLostError, UsageError
from paceline.loop.task_replica import TaskReplica
from paceline.memory import atomics
from paceline.memory.segment import LINE_BYTES, Segment
from paceline.memory.shared_store import SharedStore
from paceline.memory.waiting import spin_patiently, wait_briefly, wake
from paceline.optim.flat import FlatBinding
from paceline.ports.ports import Mailbox, Message, PeerLeft, Received
from paceline.records.step_record import PackedRecords
from paceline.run.fork_server import fork_server_context
from paceline.specs.registry import build_optimizer
from paceline.system.machine import intra_op_threads
from paceline.system.torch_random import torch_undisturbed
from paceline.tasks.base import Task
from paceline.tasks.load import load_task
from paceline.transport.mailbox import ZmqMailbox

_DEADLINE_S = 60.0
_START_TOGETHER_S = 0.005
_WARM_UP = 0.2  # share of the repeats
_FELL_ASLEEP_S = 0.002  # longer than a waiter spins
_ATOMICS_AT_ONCE = 100_000
_OFF_THE_CORE_S = 0.0005  # longer than an interrupt, shorter than a time slice
_WORD, _READY, _CROWDED, _TURN, _IDLE = (place * LINE_BYTES for place in range(5))  # the words of a team: offsets
_WORDS = 5


# Steps


def steps(
    task: Task, train_set: Any, batch_size: int, *, at_least: int, for_s: float, pauses_s: Sequence[float] = (0.0,)
) -> np.ndarray:
    """Records of full steps of `sequential`, `RECORD_DTYPE`: input, forward, backward, update; one intra-op thread.

    Before every step it sleeps for one of `pauses_s`, in turn.
    """
    if batch_size > len(train_set):
        raise UsageError(f"{task.name} has {len(train_set)} training samples; choose --batch-size up to that.")
    with intra_op_threads(1), torch_undisturbed(), torch.no_grad():
        torch.manual_seed(0)
        rows = _all_steps(task, train_set, batch_size, at_least, for_s, pauses_s)
    return rows[rows["samples"] == batch_size]  # an epoch's last batch may be shorter


def cold_steps_s(
    task: Task, train_set: Any, batch_size: int, pauses_s: Sequence[float], *, at_least: int, for_s: float
) -> dict[float, list[tuple[float, float]]]:
    """By pause, pairs: a full step after it, and the second step after that one, without a pause in between."""
    pattern = [one for pause_s in pauses_s for one in (pause_s, 0.0, 0.0)]
    rows = steps(task, train_set, batch_size, at_least=at_least * len(pattern), for_s=for_s, pauses_s=pattern)
    took_s = dict(zip(rows["step"].tolist(), (rows["ended_s"] - rows["started_s"]).tolist(), strict=True))
    found: dict[float, list[tuple[float, float]]] = {pause_s: [] for pause_s in pauses_s}
    for step in took_s:
        place = step % len(pattern)
        if place % 3 == 0 and step + 2 in took_s:
            found[pattern[place]].append((took_s[step], took_s[step + 2]))
    return found


def _all_steps(
    task: Task, train_set: Any, batch_size: int, at_least: int, for_s: float, pauses_s: Sequence[float]
) -> np.ndarray:
    model = task.new_model()
    binding = FlatBinding(model.parameters())
    x = torch.empty(binding.num_elements, dtype=binding.dtype)
    binding.read(x)

    def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return build_optimizer("sgd", parameters, task.learning_rate, None)

    plan = BatchPlan(num_samples=len(train_set), batch_size=batch_size)
    claims = BatchClaims(plan, worker_id=0, lockstep=False, counter=itertools.count().__next__)
    records, batches = PackedRecords(), DatasetBatches(train_set, claims)
    waits = {"recorder": records, "waits": [], "staleness": None, "stopped": lambda: False}
    replica = TaskReplica(model, task.loss, make_optimizer, batches, binding=binding, **waits)
    warm_up = 2 + round(_WARM_UP * at_least)
    begun_s = time.monotonic()
    model.train()
    for step in replica.steps():
        if step == warm_up:
            begun_s = time.monotonic()
        replica.gradient(at=x, version=step - 1)
        replica.apply(to=x)
        replica.applied(step, gradient_version=step - 1)
        if pauses_s[(step + 1) % len(pauses_s)]:
            time.sleep(pauses_s[(step + 1) % len(pauses_s)])
        if step >= warm_up + at_least and time.monotonic() - begun_s >= for_s:
            break
    return records.array()[warm_up:]


# Concurrent processes


class ProcessTeam:
    """Processes that do the same work at the same time."""

    def __init__(self, size: int, vector_bytes: int = 0) -> None:
        self.store_at = _WORDS * LINE_BYTES + vector_bytes  # the offset in it at which two processes find each other
        # Five shared words, zero at first, each on its own cache line; then the vector.
        self.segment = Segment.create(self.store_at + SharedStore.size_bytes(2))
        context = fork_server_context()
        self._lines: list[Connection] = []
        self._processes = []
        for _ in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, self.segment), daemon=True)
            process.start()
            theirs.close()
            self._lines.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        for line in self._lines:
            line.close()  # the process closes its own end of the line
        for process in self._processes:
            process.join(_DEADLINE_S if error is None else 0.0)
            if process.exitcode is None:
                process.kill()
                process.join()
            process.close()
        self.segment.close()

    def start(self, *jobs: Callable[..., Any], **arguments: Any) -> None:
        """Starts one job in each process, from the first on, all at the same time."""
        begin_s = time.monotonic() + _START_TOGETHER_S
        for line, job in zip(self._lines, jobs, strict=False):
            with contextlib.suppress(BrokenPipeError):  # its process has ended, which `results` detects
                line.send((job, arguments, begin_s))

    def results(self, number: int) -> list[Any]:
        """The results of the first `number` processes, once all have returned."""
        found = []
        for line in self._lines[:number]:
            if not line.poll(_DEADLINE_S):
                raise PacelineError(f"A measurement process did not answer within {_DEADLINE_S:.0f} s; try again.")
            try:
                found.append(line.recv())
            except (EOFError, ConnectionResetError):
                raise PacelineError("A measurement process has ended; run `paceline doctor`.") from None
        return found

    def together(self, job: Callable[..., Any], number: int, **arguments: Any) -> list[Any]:
        """The results of the first `number` processes for the same job."""
        self.start(*[job] * number, **arguments)
        return self.results(number)


def _work(line: Connection, segment: Segment) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            job, arguments, begin_s = line.recv()
        except EOFError:
            return
        while time.monotonic() < begin_s:
            pass
        line.send(job(segment, **arguments))


def few_samples(train_set: Any, number: int) -> bytes:
    """Pickles the first samples, at most `number`."""
    number = min(number, len(train_set))
    if type(train_set) is TensorDataset:
        return pickle.dumps(TensorDataset(*(one[:number].clone() for one in train_set.tensors)))
    return pickle.dumps([train_set[index] for index in range(number)])


def steps_s(segment: Segment, task_reference: str, samples: bytes, batch_size: int, for_s: float) -> list[float]:
    """Makes full steps on a few samples; seconds per step."""
    rows = steps(load_task(task_reference), pickle.loads(samples), batch_size, at_least=3, for_s=for_s)
    return (rows["ended_s"] - rows["started_s"]).tolist()


def slices_s(segment: Segment, for_s: float) -> list[float]:
    """Computes continuously; returns the durations between two times at which others had its core."""
    times_s, until_s = [], time.perf_counter() + for_s
    last_s = began_s = 0.0  # the first stretch began before
    while last_s < until_s:
        now_s = time.perf_counter()
        if now_s - last_s > _OFF_THE_CORE_S:
            if began_s:
                times_s.append(last_s - began_s)
            began_s = now_s
        last_s = now_s
    return times_s[1:]


def spins_s(segment: Segment, repeats: int) -> list[float]:
    """Spins on a word that does not change; seconds until a waiter with its own core goes to sleep."""
    times_s = []
    for _ in range(repeats):
        begun_s = time.perf_counter()
        spin_patiently(segment.address + _IDLE, 0)
        times_s.append(time.perf_counter() - begun_s)
    return times_s[round(_WARM_UP * repeats) :]


def copies_s(segment: Segment, num_bytes: int, for_s: float) -> list[float]:
    """Copies a vector of `num_bytes`; seconds per copy, each the mean over about 0.1 ms of copies."""
    x, y = torch.ones(max(1, num_bytes // 4)), torch.zeros(max(1, num_bytes // 4))
    begun_s = time.perf_counter()
    for _ in range(3):
        y.copy_(x)
    at_once = max(1, round(1e-4 / ((time.perf_counter() - begun_s) / 3)))
    times_s, until_s = [], time.perf_counter() + for_s
    while (begun_s := time.perf_counter()) < until_s or not times_s:
        for _ in range(at_once):
            y.copy_(x)
        times_s.append((time.perf_counter() - begun_s) / at_once)
    return times_s[round(_WARM_UP * len(times_s)) :]


def handed_copies_s(team: ProcessTeam, num_bytes: int, repeats: int) -> list[float]:
    """Two processes take turns copying the shared vector that the other has just written, and writing it; seconds per copy.

    Workers access shared vectors like this: most of each is in another core's cache and has to be transferred.
    Call it once per team.
    """
    team.start(*(partial(_take_turns, mine=mine) for mine in (0, 1)), num_bytes=num_bytes, repeats=repeats)
    return [one for times_s in team.results(2) for one in times_s[round(_WARM_UP * repeats) :]]


def _take_turns(segment: Segment, num_bytes: int, repeats: int, mine: int) -> list[float]:
    shared = segment.tensor(_WORDS * LINE_BYTES, num_bytes // 4, torch.float32)
    own, turn, times_s = torch.zeros(num_bytes // 4), segment.address + _TURN, []
    for number in range(repeats):
        while atomics.load(turn) < 2 * number + mine:
            os.sched_yield()
        begun_s = time.perf_counter()
        own.copy_(shared)
        shared.copy_(own)
        times_s.append((time.perf_counter() - begun_s) / 2)
        atomics.store(turn, 2 * number + mine + 1)
    return times_s


@atomics.kernel("void(int64, int64)")
def _add(address: int, count: int) -> None:
    for _ in range(count):
        atomics.fetch_add(address, 1)


def atomics_s(segment: Segment, repeats: int) -> list[float]:
    """Adds to a word to which the whole team adds; seconds per addition."""
    times_s, address = [], segment.address + _CROWDED
    for _ in range(repeats):
        begun_s = time.perf_counter()
        _add(address, _ATOMICS_AT_ONCE)
        times_s.append((time.perf_counter() - begun_s) / _ATOMICS_AT_ONCE)
    return times_s[round(_WARM_UP * repeats) :]


def wake_ups_s(team: ProcessTeam, repeats: int) -> list[float]:
    """From changing a word until a process that slept on it runs; call it once per team."""
    team.start(_sleeper, _waker, repeats=repeats)
    woken_s, woke_s = team.results(2)
    return [after - before for after, before in zip(woken_s, woke_s, strict=True)][round(_WARM_UP * repeats) :]


def _sleeper(segment: Segment, repeats: int) -> list[float]:
    word, ready = segment.address + _WORD, segment.address + _READY
    times_s = []
    for number in range(repeats):
        atomics.store(ready, number + 1)
        while wait_briefly(word, number) == number:
            pass
        times_s.append(time.monotonic())
    return times_s


def _waker(segment: Segment, repeats: int) -> list[float]:
    word, ready = segment.address + _WORD, segment.address + _READY
    times_s = []
    for number in range(repeats):
        while atomics.load(ready) <= number:
            time.sleep(1e-4)
        time.sleep(_FELL_ASLEEP_S)
        times_s.append(time.monotonic())
        atomics.store(word, number + 1)
        wake(word)
    return times_s


# Messages

ENOUGH = Message("enough")  # ends a peer's part


def round_trips_s(mailbox: Mailbox, peer: int, num_bytes: int, repeats: int) -> list[float]:
    """Round-trip times of messages of `num_bytes` to a peer that returns them."""
    x, times_s = torch.ones(max(1, num_bytes // 4)), []
    for number in range(repeats + max(1, round(_WARM_UP * repeats))):
        begun_s = time.perf_counter()
        mailbox.send(peer, Message("there", number, x=x))
        received = mailbox.receive(_DEADLINE_S, kind="there", sender=peer, number=number)
        times_s.append(time.perf_counter() - begun_s)
        if isinstance(received, PeerLeft):
            raise PeerLostError(peer, received.reason)
        if not isinstance(received, Received):
            raise PacelineError(f"Worker {peer} did not send message {number} of {num_bytes:,} bytes back.")
    return times_s[-repeats:]


def echo(segment: Segment, store_at: int) -> None:
    """The peer of `round_trips_s`, until worker 0 ends."""
    with ZmqMailbox(SharedStore(segment, store_at, 2), 1, 2) as mailbox:
        mailbox.connect(_DEADLINE_S)
        while isinstance(received := mailbox.receive(_DEADLINE_S), Received):
            mailbox.send(0, received.message)
