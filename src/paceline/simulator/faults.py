"""Faults of a simulation, and when they happen: a script that reads like a sentence."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from paceline.errors import UsageError
from paceline.specs.bounds import COUNT, COUNT_FROM_0, FACTOR, SECONDS, SECONDS_ABOVE_0


@dataclass(frozen=True, kw_only=True)
class Kill:
    """A worker dies: all its programs end at that instant."""

    worker: int
    step: int | None = None
    at_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Slow:
    """From then on a worker computes `factor` times as long as the cluster specifies."""

    worker: int
    factor: float
    step: int | None = None
    at_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class DropLink:
    """From then on no message passes between two workers."""

    a: int
    b: int
    at_s: float


@dataclass(frozen=True, kw_only=True)
class Pause:
    """A worker stops for a while, as if stopped by a signal."""

    worker: int
    at_s: float
    for_s: float


@dataclass(frozen=True)
class Faults:
    """Faults of a simulated run; each method returns a longer script.

    A step is reached when the worker begins that step's gradient, counted from 1; a time is virtual. A killed worker's
    messages arrive if they had left its NIC; the others learn of its death `Cluster.detection_s` later. If restarts are left,
    its next incarnation begins `Cluster.restart_s` after that. A paused worker neither computes nor receives, and its
    computation ends that much later; transfers of its memory and NIC continue.

    >>> Faults().kill(worker=2, step=40).slow(worker=0, factor=10, at_s=1.5).workers
    (0, 2)
    """

    script: tuple[Kill | Slow | DropLink | Pause, ...] = ()

    def kill(self, *, worker: int, step: int | None = None, at_s: float | None = None) -> Faults:
        """A worker dies at a step or a time."""
        _check_when("kill", step, at_s)
        return self._with(Kill(worker=worker, step=step, at_s=at_s))

    def slow(self, *, worker: int, factor: float, step: int | None = None, at_s: float | None = None) -> Faults:
        """A worker computes `factor` times as long, from a step or a time on."""
        _check_when("slow", step, at_s)
        FACTOR.check("The factor of slow", factor)
        return self._with(Slow(worker=worker, factor=factor, step=step, at_s=at_s))

    def drop_link(self, a: int, b: int, *, at_s: float) -> Faults:
        """The link between two workers is cut."""
        _check_when("drop_link", None, at_s)
        if a == b:
            raise UsageError(f"drop_link cuts the link between two workers, not from {a} to itself.")
        return self._with(DropLink(a=a, b=b, at_s=at_s))

    def pause(self, *, worker: int, at_s: float, for_s: float) -> Faults:
        """A worker stops for `for_s`."""
        _check_when("pause", None, at_s)
        SECONDS_ABOVE_0.check("for_s of pause", for_s)
        return self._with(Pause(worker=worker, at_s=at_s, for_s=for_s))

    @classmethod
    def given(cls, faults: Faults | None) -> Faults:
        """The caller's faults; None: no faults.

        Raises:
            UsageError: it is something else.
        """
        if faults is not None and not isinstance(faults, cls):
            raise UsageError(
                f"faults must be a script such as pl.Faults().kill(worker=1, step=40), not a {type(faults).__name__}."
            )
        return faults or cls()

    @property
    def workers(self) -> tuple[int, ...]:
        named = {
            worker for one in self.script for worker in ((one.a, one.b) if isinstance(one, DropLink) else (one.worker,))
        }
        return tuple(sorted(named))

    def check(self, num_workers: int) -> None:
        for worker in self.workers:
            COUNT_FROM_0.check("A fault's worker", worker)
            if not 0 <= worker < num_workers:
                raise UsageError(
                    f"A fault names worker {worker}: the {num_workers} workers are numbered from 0 to "
                    f"{num_workers - 1}."
                )

    def as_record(self) -> dict[str, list[dict[str, Any]]]:
        """For a run's `config.json`; empty without faults."""
        script = [{"fault": type(one).__name__, **dataclasses.asdict(one)} for one in self.script]
        return {"faults": script} if script else {}

    def _with(self, fault: Kill | Slow | DropLink | Pause) -> Faults:
        return dataclasses.replace(self, script=(*self.script, fault))


class Disturbances:
    """The effect of faults on one worker's computing."""

    def __init__(self, faults: Faults, worker_id: int) -> None:
        mine = [one for one in faults.script if not isinstance(one, DropLink) and one.worker == worker_id]
        self._pauses = sorted((one.at_s, one.at_s + one.for_s) for one in mine if isinstance(one, Pause))
        self._slow = [one for one in mine if isinstance(one, Slow)]
        kill_steps = [one.step for one in mine if isinstance(one, Kill) and one.step is not None]
        self._kill_step = min(kill_steps, default=None)
        self._step = 0

    @property
    def any(self) -> bool:
        return bool(self._pauses or self._slow or self._kill_step)

    def begin_step(self) -> bool:
        """Counts a step; returns whether the worker dies as it begins."""
        self._step += 1
        return self._step == self._kill_step

    def stretched_s(self, begin_s: float, duration_s: float) -> float:
        """The duration of a computation that takes `duration_s` undisturbed; a factor applies to those that begin after it."""
        for one in self._slow:
            if (one.step is not None and self._step >= one.step) or (one.at_s is not None and begin_s >= one.at_s):
                duration_s *= one.factor
        end_s = begin_s + duration_s
        for from_s, until_s in self._pauses:
            if begin_s < until_s and end_s > from_s:
                end_s += until_s - max(from_s, begin_s)
        return end_s - begin_s


def _check_when(what: str, step: int | None, at_s: float | None) -> None:
    if (step is None) == (at_s is None):
        raise UsageError(f"{what} happens at a step or at a time: give either step or at_s.")
    if step is not None:
        COUNT.check(f"The step of {what}", step)
    if at_s is not None:
        SECONDS.check(f"at_s of {what}", at_s)
