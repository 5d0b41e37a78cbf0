"""Timelines of a placed run's workers in one of its steps, shown beside the simulated ones."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.model_parallel.graph.partition import MOST_READERS
from paceline.model_parallel.graph.plan import Plan
from paceline.model_parallel.graph.recorder import FORMAT, path_of
from paceline.model_parallel.graph.schedule import Event
from paceline.system.plain_files import read_table


def read_measured(folder: Path) -> tuple[Plan, tuple[Event, ...]]:
    """A placed run's plan, and the events of its recorded step with the median time.

    A transfer lasts from its send to the end of its receive, that is, until the receiver needs it.

    Raises:
        UsageError: the folder is not of a placed run that has ended.
    """
    try:
        first = _read(folder, 0)
        plan = Plan.from_json(first["plan"])
        workers = [first["steps"], *(_read(folder, worker)["steps"] for worker in range(1, plan.workers))]
        common = [one for one in first["steps"] if all(one in steps for steps in workers)]
        steps = [_events(plan, [one[at] for one in workers]) for at in common]
        lasts = [max(e.end_s for e in own) for own in steps]
        middle = statistics.median_low(lasts) if lasts else 0.0
        return plan, steps[lasts.index(middle)] if lasts else ()
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{folder} holds no readable times of a placed run: run it again.") from error


def _events(plan: Plan, workers: list[dict[str, Any]]) -> tuple[Event, ...]:
    sizes = {one.node: one.num_bytes for one in plan.problem.tensors}
    begun_s = min(one[3] for own in workers for one in own["groups"])
    found = [
        Event(kind, name, worker, -1, begin_s - begun_s, end_s - begun_s, microbatch)
        for worker, own in enumerate(workers)
        for kind, name, microbatch, begin_s, end_s in own["groups"]
    ]
    read_s = {tuple(m[1:6]): m[7] for own in workers for m in own["messages"] if m[0] == "in"}
    per_call = {"move": len(plan.transfers()), "return": len(plan.transfers()) * MOST_READERS}
    first = min((m[3] // per_call[m[1]] for own in workers for m in own["messages"]), default=0)
    for side, kind, node, number, source, to, begin_s, _ in (m for own in workers for m in own["messages"]):
        end_s = read_s.get((kind, node, number, source, to))
        if side == "out" and end_s is not None:
            microbatch = number // per_call[kind] - first
            found.append(Event(kind, node, source, to, begin_s - begun_s, end_s - begun_s, microbatch, sizes[node]))
    return tuple(sorted(found, key=lambda one: (one.start_s, one.place, one.to)))


def _read(folder: Path, worker: int) -> Any:
    path = path_of(folder, worker)
    if not path.is_file():
        raise UsageError(
            f"{folder} holds no times of a placed run: give launch out= and a plan, and let the run end; or name a "
            "model, such as path/to/file.py:function."
        )
    values = read_table(path, "The file of a placed run")
    if values["paceline_placed"] != FORMAT:
        raise ValueError("another format")
    return values
