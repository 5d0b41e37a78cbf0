"""The steps of a run, the worker for whom each one waited, and the critical path through them.

A wait ends because of an event elsewhere: the last worker of a round arrives, or a neighbour sends its model. The critical
path goes back from the end of the run: through a worker's own step to its wait, and from there to that event.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from paceline.records.run_data import RunData

ACTIVITIES = ("computing", "input", "updating", "loop", "communicating")
COMPUTING, INPUT, UPDATING, LOOP, COMMUNICATING = range(len(ACTIVITIES))
_MOST_STEPS = 50_000  # of a path: a second
_MOST_WORKERS = 256  # whose progress is compared at every wait
_EVENT_S = 1e-9
_LEAST_WAIT = 0.1  # of the time between sending a model and the wait for it


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps of all workers, one entry each, by worker and time."""

    rows: np.ndarray
    worker: np.ndarray  # who made each step
    begun_s: np.ndarray  # when the step before ended, if the same process made it
    arrived_s: np.ndarray  # when the worker began to wait
    released_s: np.ndarray  # when it went on
    took_s: np.ndarray  # (steps, activities) without waiting; `COMMUNICATING` is 0

    @property
    def waited_s(self) -> np.ndarray:
        return self.released_s - self.arrived_s


def steps_of(records: Mapping[int, np.ndarray]) -> Steps:
    """All steps of a run.

    A gradient's time is the worker's own: if a loop made several backward passes, waits lie between them, and are subtracted.
    """
    lanes = [(worker, own[np.argsort(own["started_s"], kind="stable")]) for worker, own in sorted(records.items())]
    rows = np.concatenate([own for _, own in lanes])
    worker = np.repeat([one for one, _ in lanes], [len(own) for _, own in lanes])
    begun = np.concatenate([[own["started_s"][0], *own["ended_s"][:-1]] if len(own) else [] for _, own in lanes])
    is_next = (np.diff(rows["incarnation"], prepend=-1) == 0) & (np.diff(worker, prepend=-1) == 0)
    begun = np.where(is_next, np.minimum(begun, rows["started_s"]), rows["started_s"])  # no worker was there before
    wait, apply, input_s = (np.maximum(rows[f"{name}_s"], 0) for name in ("wait", "apply", "input"))
    own_s = np.maximum(rows["ended_s"] - rows["started_s"], 0)
    wait = np.minimum(wait, own_s)
    gradient = rows["gradient_ended_s"] - rows["gradient_started_s"]
    own_code = np.clip(own_s - input_s - wait - apply, 0, None)
    computing = np.clip(np.minimum(gradient, own_code), 0, None)
    released = rows["ended_s"] - np.clip(rows["ended_s"] - rows["gradient_ended_s"] - wait, 0, apply)
    loop = rows["started_s"] - begun + own_code - computing
    took = np.stack([computing, input_s, apply, loop, np.zeros(len(rows))], axis=1)
    return Steps(rows, worker, begun, released - wait, released, took)


def is_divided(run: RunData) -> bool:
    """Whether workers have parts of one model, and so wait within groups; records do not show these waits."""
    return run.config.get("layout") is not None or run.result.get("waits_for") is None


def waits_of(run: RunData) -> tuple[Steps, np.ndarray, np.ndarray] | None:
    """A run's steps and `blockers`; None without steps, or if it is not known for whom workers wait."""
    if is_divided(run) or not any(map(len, run.records.values())):
        return None
    waits_for = run.result["waits_for"]
    steps = steps_of(run.records)
    return steps, *blockers(steps, waits_for, own_models=bool(run.result.get("gossip")))


def blockers(steps: Steps, waits_for: str, *, own_models: bool) -> tuple[np.ndarray, np.ndarray]:
    """The worker whose event ended each step's wait, and when that event was; -1: no other worker's.

    `own_models`: each worker counts its own versions.
    """
    rows, made = steps.rows, steps.rows["applied_version"]
    blocker, since_s = np.full(len(rows), -1), np.full(len(rows), -np.inf)
    if waits_for in ("everyone", "quorum"):
        round_ = rows["read_version"] + 1 if own_models else np.where(made >= 1, made, rows["read_version"] + 1)
        # Collectives release all at once: the last worker waits least. A server's answers travel for different times.
        is_last = steps.waited_s if waits_for == "everyone" else -steps.arrived_s
        order = np.lexsort((is_last, round_))
        order = order[(made >= 1)[order]] if waits_for == "quorum" else order
        _, first, place = np.unique(round_[order], return_index=True, return_inverse=True)
        last = order[first[place]]
        blocker[order], since_s[order] = steps.worker[last], steps.arrived_s[last]
        if waits_for == "everyone":  # an average that is merged later was released before its last worker needed it
            travelled_s = np.maximum(steps.waited_s[last], _EVENT_S)
            since_s[order] = np.minimum(since_s[order], steps.released_s[order] - travelled_s)
    elif waits_for == "neighbours":
        for at, found in _same_round(steps):
            blocker[at], since_s[at] = steps.worker[found], rows["gradient_started_s"][found]  # when it had sent
    elif waits_for == "slowest":
        _slowest(steps, blocker, since_s)
    is_own = (blocker == steps.worker) | (since_s >= steps.released_s)
    if waits_for == "neighbours":  # else the model was there already, and only had to be taken
        is_own |= steps.waited_s < _LEAST_WAIT * (steps.arrived_s - since_s)
    else:
        is_own |= since_s <= steps.arrived_s
    blocker[is_own | (steps.waited_s <= 0)] = -1
    return blocker, since_s


def _same_round(steps: Steps) -> list[tuple[int, int]]:
    """Pairs of a step that waited for a neighbour, and that neighbour's step in the same round."""
    rows = steps.rows
    place = {key: at for at, key in enumerate(zip(steps.worker.tolist(), rows["read_version"].tolist(), strict=True))}
    waited = np.flatnonzero((rows["partner_s"] > 0) & (steps.waited_s > 0)).tolist()
    keys = zip(rows["partner"][waited].tolist(), rows["read_version"][waited].tolist(), strict=True)
    return [(at, place[key]) for at, key in zip(waited, keys, strict=True) if key in place]


def _slowest(steps: Steps, blocker: np.ndarray, since_s: np.ndarray) -> None:
    """The worker that was furthest behind when a wait ended, and its last arrival until then."""
    workers = np.unique(steps.worker)
    if len(workers) > _MOST_WORKERS:
        return
    least = np.full(len(blocker), np.iinfo(np.int64).max)
    for one in workers.tolist():
        arrived_s = np.sort(steps.arrived_s[steps.worker == one])
        number = np.searchsorted(arrived_s, steps.released_s - _EVENT_S)
        last_s = np.where(number > 0, arrived_s[np.maximum(number, 1) - 1], -np.inf)
        behind = (steps.worker != one) & ((number < least) | ((number == least) & (last_s > since_s)))
        blocker[behind], since_s[behind], least[behind] = one, last_s[behind], number[behind]


@dataclass(frozen=True, slots=True)
class Path:
    """The critical path, in order of time."""

    step: np.ndarray  # index of each step on it
    took_s: np.ndarray  # (steps, activities): the part of it that is on the path
    #: Of the message that the path followed to this step; -1: there is none, or communication had no sender.
    sender: np.ndarray


def critical_path(steps: Steps, blocker: np.ndarray, since_s: np.ndarray) -> Path:
    """Goes back from the last update, 50,000 steps at most."""
    rows = steps.rows
    ended_s = rows["ended_s"].tolist()
    begun_s, arrived_s, released_s = steps.begun_s.tolist(), steps.arrived_s.tolist(), steps.released_s.tolist()
    started_s, gradient_s = rows["started_s"].tolist(), rows["gradient_started_s"].tolist()
    worker = steps.worker.tolist()
    took, blocks, events_s = steps.took_s.tolist(), blocker.tolist(), since_s.tolist()
    first = {one: int(np.searchsorted(steps.worker, one)) for one in np.unique(steps.worker).tolist()}
    ends = {one: rows["ended_s"][steps.worker == one] for one in first}
    visited: list[int] = []
    parts: list[list[float]] = []
    senders: list[int] = []
    made = rows["applied_version"] >= 1  # a dropped gradient may come after the last update
    at = int(np.argmax(np.where(made, rows["ended_s"], -np.inf) if made.any() else rows["ended_s"]))
    now_s = ended_s[at]
    while len(visited) < _MOST_STEPS:
        part = [0.0] * len(ACTIVITIES)
        visited.append(at)
        parts.append(part)
        senders.append(-1)
        if now_s > arrived_s[at]:
            part[UPDATING] = max(0.0, now_s - released_s[at])
            until_s = min(now_s, released_s[at])
            other, event_s = blocks[at], events_s[at]
            if other >= 0 and event_s < until_s:
                part[COMMUNICATING], senders[-1] = until_s - event_s, other
                place = min(int(np.searchsorted(ends[other], event_s)), len(ends[other]) - 1)
                at, now_s = first[other] + place, event_s
                continue
            part[COMMUNICATING] = until_s - arrived_s[at]
            now_s = arrived_s[at]
        left_s = max(0.0, now_s - begun_s[at])
        computing, input_s, _, loop, _ = took[at]
        before_s = min(started_s[at] - begun_s[at], left_s)
        part[INPUT] = min(input_s, left_s - before_s)
        part[COMPUTING] = min(computing, max(0.0, min(now_s - gradient_s[at], left_s - before_s - part[INPUT])))
        part[LOOP] = min(loop, left_s - part[INPUT] - part[COMPUTING])
        if at == first[worker[at]]:
            break
        at -= 1
        now_s = ended_s[at]
    order = slice(None, None, -1)
    return Path(np.array(visited)[order], np.array(parts)[order], np.array(senders)[order])
