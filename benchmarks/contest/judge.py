"""What a run was worth, from the diaries and snapshots that its workers have left."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from contest.course import Settings, load_data, make_model

NUM_EVALUATIONS = 32  # points of a curve, evenly over the run; around the target every snapshot is evaluated


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One process of a worker: when it began, and its steps."""

    worker_id: int
    began_s: float
    ended_s: float
    num_samples: int


@dataclass(frozen=True)
class Snapshot:
    """A worker's parameters at a time."""

    at_s: float
    worker_id: int
    path: Path

    def parameters(self) -> np.ndarray:
        """The vector."""
        return np.fromfile(self.path, dtype=np.float32)


def attempts(folder: Path) -> list[Attempt]:
    """All processes that trained, in the order in which they began."""
    found = []
    for path in folder.glob("steps-*"):
        rows = np.fromfile(path, dtype=np.float64).reshape(-1, 2)
        worker_id = int(path.name.split("-")[1])
        found.append(
            Attempt(worker_id=worker_id, began_s=rows[0, 0], ended_s=rows[-1, 0], num_samples=int(rows[:, 1].sum()))
        )
    return sorted(found, key=lambda one: one.began_s)


def snapshots(folder: Path) -> list[Snapshot]:
    """All snapshots, in order."""
    named = ((path.name.split("-"), path) for path in folder.glob("at-*"))
    return sorted((Snapshot(float(at), int(who), path) for (_, at, who), path in named), key=lambda one: one.at_s)


def models(
    found: Iterable[Snapshot], *, mean: bool, died: tuple[int, float] | None
) -> Iterator[tuple[float, list[Snapshot]]]:
    """Whose parameters make the model, at every snapshot of worker 0: its own, or the newest of all that live."""
    newest: dict[int, Snapshot] = {}
    for snapshot in found:
        newest[snapshot.worker_id] = snapshot
        if snapshot.worker_id != 0:
            continue
        if died is not None and died[0] in newest and newest[died[0]].at_s <= died[1] < snapshot.at_s:
            del newest[died[0]]
        yield snapshot.at_s, list(newest.values()) if mean else [snapshot]


def needed(found: list[Attempt], workers: int, finished: bool, in_time: bool) -> str:
    """What it took to go on after the kill, as the processes show."""
    if not in_time:
        return "not done in time"
    if not finished:
        return "everything lost"
    again = {one.worker_id for one in found[workers:]}
    return "nothing" if len(again) <= 1 else "all started again from a checkpoint"


class Evaluator:
    """Test accuracy of parameters."""

    def __init__(self, settings: Settings) -> None:
        self.model = make_model(settings)
        self.x, self.y = load_data(settings.data, "test")

    def accuracy(self, parts: list[Snapshot]) -> float:
        """Of the mean of these parameters."""
        vector = np.mean([one.parameters() for one in parts], axis=0, dtype=np.float64)
        with torch.no_grad():
            nn.utils.vector_to_parameters(torch.tensor(vector, dtype=torch.float32), self.model.parameters())
            return float((self.model(self.x).argmax(1) == self.y).float().mean())


def judge(settings: Settings, *, mean: bool, target: float, finished: bool, in_time: bool = True) -> dict[str, Any]:
    """A run's figures; times are from when all workers stood ready.

    Returns:
        `time_to_target_s` (None: never) and its `share_of_run`, `final_accuracy`, `wall_s`, `useful_samples` (each of the plan
        counts once, and those of dropped gradients not), `goodput` in useful samples per second, `processes`, `after_kill`,
        and `curve`, pairs of seconds and accuracies.
    """
    folder = Path(settings.folder)
    found = attempts(folder)
    first = found[: settings.workers]
    if len(first) < settings.workers:
        return {"finished": False}
    start_s = max(one.began_s for one in first)
    wall_s = max(one.ended_s for one in found) - start_s
    said = json.loads((folder / "said.json").read_text()) if (folder / "said.json").exists() else {}
    trained = sum(one.num_samples for one in found)
    used = min(settings.planned_samples, trained)
    if len(found) == settings.workers and trained >= settings.planned_samples:
        finished = (
            True  # a launcher can fail after the last step: on a busy machine Gloo aborts at times as it is shut down
        )
    useful = used - said.get("dropped_gradients", 0) * settings.batch_size
    mark = folder / "killed"
    died = (settings.workers - 1, float(mark.read_text())) if mark.exists() else None
    points = list(models(snapshots(folder), mean=mean, died=died))
    evaluator = Evaluator(settings)
    known: dict[int, float] = {}

    def accuracy(index: int) -> float:
        if index not in known:
            known[index] = evaluator.accuracy(points[index][1])
        return known[index]

    coarse = sorted({round(index) for index in np.linspace(0, len(points) - 1, NUM_EVALUATIONS)})
    reached = next((index for index in coarse if accuracy(index) >= target), None)
    if reached is not None:
        before = max((index for index in coarse if index < reached), default=-1)
        reached = next(index for index in range(before + 1, reached + 1) if accuracy(index) >= target)
    for index in coarse:
        accuracy(index)
    curve = [(round(points[index][0] - start_s, 3), round(value, 4)) for index, value in sorted(known.items())]
    time_s = points[reached][0] - start_s if reached is not None else None
    return {
        "finished": finished,
        "time_to_target_s": time_s,
        "share_of_run": time_s / wall_s if time_s is not None else None,
        "final_accuracy": curve[-1][1],
        "wall_s": wall_s,
        "useful_samples": useful,
        "goodput": useful / wall_s,
        "processes": len(found),
        "after_kill": needed(found, settings.workers, finished, in_time) if settings.scene == "killed" else None,
        "curve": curve,
    }
