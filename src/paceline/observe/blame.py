"""Finds which worker made a run slow, why, and since when, from the critical path through its steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from paceline.observe.document import Table
from paceline.observe.waits import ACTIVITIES, COMMUNICATING, COMPUTING, INPUT, Path, Steps, critical_path, waits_of
from paceline.observe.words import ABSENT, capital, percent_text, seconds_text, whole_percent_text
from paceline.records.run_data import RunData

_LEAST_LOST = 0.05  # of the time: below it, no worker is named
_CLEARLY = 2.0  # times as long as the next
_CLEARLY_SLOWER_WORKER = {False: 1.1, True: 1.5}  # by whether workers do not wait for each other
_CLEARLY_SERVED = 1.5  # the others wait for the slow way once, its worker twice: there and back
_MOST_ROWS = 48
_LEAST_SHOWN = 0.005
NOTE = (
    "Shares of each worker's time. Loop: the loop's own code, such as logging. Waiting: for the workers in the next column;"
    " messages: all other waiting. Path: its share of the critical path."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Where one worker's time went, as shares of it."""

    worker: int
    computing: float
    input: float
    updating: float
    loop: float
    waiting_for: dict[int, float]  # by worker, the time until that one came
    communicating: float  # other waiting: messages under way, a server's answer, a lock
    critical: float | None  # the worker's share of the critical path; None: workers do not wait for each other


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """The activity that made the run slow."""

    activity: str  # one of `ACTIVITIES`
    worker: int | None = None  # whose; None: all workers alike, or a link
    link: tuple[int, int] | None = None  # the two workers at a slow link
    lost: float  # share of the time that it took more than at the other workers
    #: Share of the steps from `since_step` to `until_step` (None: the end) in which the worker was on the critical path;
    #: None: workers do not wait for each other, or it is no worker.
    rounds: float | None = None
    since_step: int = 1
    until_step: int | None = None
    own_s: float  # median time per step, at this worker or link
    others_s: float | None = None  # the same at the others


@dataclass(frozen=True, kw_only=True, slots=True)
class Blame:
    """What `paceline blame` says."""

    waits_for: str  # as `Algorithm.waits_for` says
    shares: tuple[Share, ...]
    path: dict[str, float]  # shares of the critical path by activity; empty if workers do not wait for each other
    cause: Cause | None  # None: all workers took about equally long
    updates: dict[int, float]  # each worker's share of the updates

    @property
    def is_free(self) -> bool:
        """Whether no worker waits for another."""
        return self.waits_for in ("none", "lock") and len(self.shares) > 1


def blame(run: RunData) -> Blame | None:
    """Reads a run's records; None if they have no step, or the result does not say for whom workers wait.

    Costs some microseconds per step.
    """
    found = waits_of(run)
    if found is None:
        return None
    steps, blocker, since_s = found
    workers, waits_for = np.unique(steps.worker).tolist(), run.result["waits_for"]
    path = None if len(workers) > 1 and waits_for in ("none", "lock") else critical_path(steps, blocker, since_s)
    event_s = np.where(blocker >= 0, np.maximum(since_s, steps.arrived_s), steps.arrived_s)
    made = {worker: int((own["applied_version"] >= 1).sum()) for worker, own in run.records.items()}
    sums_s = path.took_s.sum(axis=0) if path is not None else np.zeros(0)
    cause = _cause(steps, path, steps.released_s - event_s, waits_for)
    if path is None and (slow := _slow_exchanges(steps)) is not None:  # which take no worker's time
        causes = [one for one in (cause, slow) if one is not None]
        cause = max(causes, key=lambda one: one.own_s - (one.others_s or 0.0))
    return Blame(
        waits_for=waits_for,
        shares=tuple(_share(steps, blocker, event_s, path, worker) for worker in workers),
        path={name: float(one / (sums_s.sum() or 1)) for name, one in zip(ACTIVITIES, sums_s, strict=False)},
        cause=cause,
        updates={worker: number / max(1, sum(made.values())) for worker, number in made.items()},
    )


def _share(steps: Steps, blocker: np.ndarray, event_s: np.ndarray, path: Path | None, worker: int) -> Share:
    own = steps.worker == worker
    total_s = float(steps.rows["ended_s"][own].max() - steps.begun_s[own].min()) or 1.0
    computing, input_s, updating, loop, _ = (steps.took_s[own].sum(axis=0) / total_s).tolist()
    until_s = (event_s - steps.arrived_s)[own]
    waits = ((other, until_s[blocker[own] == other].sum() / total_s) for other in np.unique(blocker[own]).tolist())
    on_path_s = path.took_s[steps.worker[path.step] == worker].sum() if path is not None else 0.0
    return Share(
        worker=worker, computing=computing, input=input_s, updating=updating, loop=loop,
        waiting_for={other: float(share) for other, share in waits if share > 0},
        communicating=float((steps.waited_s[own].sum() - until_s.sum()) / total_s),
        critical=float(on_path_s / (path.took_s.sum() or 1.0)) if path is not None else None,
    )  # fmt: skip


def _cause(steps: Steps, path: Path | None, travelled_s: np.ndarray, waits_for: str) -> Cause | None:
    """The worker's activity, the link, or the activity of all, without which the path would lose most.

    If workers do not wait for each other, all steps are looked at. Each process's first step is not: it includes one-time
    initialisation.
    """
    is_warm, is_free = steps.rows["step"] > 1, path is None
    waited_s = np.where(np.arange(len(ACTIVITIES)) == COMMUNICATING, steps.waited_s[:, None], 0) if is_free else 0
    times_s = steps.took_s + waited_s
    if path is None:
        path = Path(np.arange(len(is_warm)), times_s, np.full(len(is_warm), -1))
    path = Path(*(column[is_warm[path.step]] for column in (path.step, path.took_s, path.sender)))
    total_s, at_worker, own = float(path.took_s.sum()), steps.worker[path.step], path.sender < 0
    warm = {worker: is_warm & (steps.worker == worker) for worker in np.unique(steps.worker).tolist()}
    medians = {worker: np.median(times_s[of_it], axis=0) for worker, of_it in warm.items() if of_it.any()}
    best, lost_s = None, _LEAST_LOST * total_s
    for worker in medians if len(medians) > 1 else ():
        others = _others(medians, worker)
        rows = path.took_s[own & (at_worker == worker)]
        for activity, more_s in enumerate((rows - others).sum(axis=0).tolist()[: None if is_free else COMMUNICATING]):
            if more_s > lost_s and rows[:, activity].mean() > _CLEARLY_SLOWER_WORKER[is_free] * others[activity]:
                best, lost_s = (activity, worker), more_s
    behind_s = np.minimum(path.took_s[:, COMMUNICATING], steps.waited_s[path.step])  # the rest is hidden by computing
    for activity, of_all_s in ((INPUT, path.took_s[:, INPUT].sum()), (COMMUNICATING, behind_s.sum())):
        if of_all_s > lost_s and (best is None or best[0] != activity):
            best, lost_s = (activity, None), float(of_all_s)
    if best is None:
        return None
    activity, worker = best
    name, lost = ACTIVITIES[activity], lost_s / total_s
    if worker is None and activity == COMMUNICATING and not is_free:
        return _communication(steps, path, travelled_s, lost, in_rounds=waits_for != "neighbours")
    if worker is None:
        return Cause(activity=name, lost=lost, own_s=float(np.median(times_s[:, activity])))
    others_s, is_own = float(_others(medians, worker)[activity]), at_worker[own] == worker
    visited, took_s = path.step[own], np.where(is_own, path.took_s[own][:, activity], others_s)
    if is_free:
        visited, took_s = visited[is_own], took_s[is_own]
    first, last, own_s = _stretch(took_s, others_s)
    return Cause(
        activity=name, worker=worker, lost=lost, rounds=None if is_free else float(is_own[first:last].mean()),
        since_step=_step(steps, visited, first) if first else 1,
        until_step=_step(steps, visited, last - 1) if last < len(visited) else None,
        own_s=own_s, others_s=others_s,
    )  # fmt: skip


def _others(medians: Mapping[int, np.ndarray], without: int) -> np.ndarray:
    return np.median([times for worker, times in medians.items() if worker != without], axis=0)


def _step(steps: Steps, visited: np.ndarray, place: int) -> int:
    """The number of a step on the path, as all incarnations of its worker count it."""
    at = int(visited[place])
    return 1 + at - int(np.searchsorted(steps.worker, steps.worker[at]))


def _stretch(times_s: np.ndarray, others_s: float) -> tuple[int, int, float]:
    """From where to where most times are far above the others', to the end if nearly; and their median there."""
    more_s = np.maximum(times_s - others_s, 0)
    is_long = more_s > (more_s**2).sum() / (more_s.sum() or 1) / 2
    sums = np.concatenate([[0], np.cumsum(np.where(is_long, 1, -1))])
    last = int(np.argmax(sums - np.minimum.accumulate(sums)))
    first = int(np.argmin(sums[: last + 1]))
    near = 1 + len(times_s) // 20
    first, last = 0 if first <= near else first, len(times_s) if last >= len(times_s) - near else last
    return first, last, float(np.median(times_s[first:last][is_long[first:last]]))


def _communication(steps: Steps, path: Path, travelled_s: np.ndarray, lost: float, *, in_rounds: bool) -> Cause:
    """Communication on the path: over one link, of one worker with its servers, or of all."""
    on_path = path.took_s[:, COMMUNICATING] > 0
    times_s, activity = path.took_s[on_path, COMMUNICATING], ACTIVITIES[COMMUNICATING]
    of_all = Cause(activity=activity, lost=lost, own_s=float(np.median(times_s)))
    if not (steps.rows["partner"] > steps.worker.max()).any():  # there are no servers
        times_s = np.minimum(steps.rows["partner_s"], travelled_s)
        return slow_link(steps, times_s, lost, in_rounds=in_rounds) or of_all
    at = np.where(path.sender >= 0, path.sender, steps.worker[path.step])[on_path]
    sums = {worker: float(times_s[at == worker].sum()) for worker in np.unique(at).tolist()}
    most = max(sums, key=lambda worker: sums[worker])
    own_s = float(np.median(steps.waited_s[(steps.worker == most) & (steps.waited_s > 0)]))
    others = [travelled_s[(steps.worker == one) & (travelled_s > 0)] for one in np.unique(steps.worker) if one != most]
    others_s = max((float(np.median(one)) for one in others if len(one)), default=np.inf)
    is_clear = 2 * sums[most] > sum(sums.values()) and own_s > _CLEARLY_SERVED * others_s
    return Cause(activity=activity, worker=most, lost=lost, own_s=own_s) if is_clear else of_all


def _slow_exchanges(steps: Steps) -> Cause | None:
    """The pair of workers whose exchanges of models take longer than a gradient, and than those of the others."""
    found = slow_link(steps, steps.rows["partner_s"])
    is_slow = found is not None and found.others_s is not None and found.own_s > np.median(steps.took_s[:, COMPUTING])
    return found if is_slow else None


def slow_link(steps: Steps, times_s: np.ndarray, lost: float = 0.0, *, in_rounds: bool = False) -> Cause | None:
    """The two workers between which steps waited, or exchanged models, clearly longer than between the next two.

    In rounds, all members wait equally long, but only the two at the slow link wait for each other.
    """
    partner, size = steps.rows["partner"], int(steps.worker.max()) + 1
    known = (times_s > 0) & (partner >= 0) & (partner < size) & (partner != steps.worker)
    links = (np.minimum(steps.worker, partner) * size + np.maximum(steps.worker, partner))[known]
    times_s, is_lower = times_s[known], (steps.worker < partner)[known]

    def time_s(link: int) -> float:
        if not in_rounds:
            return float(np.median(times_s[links == link]))
        return float(min(times_s[(links == link) & (is_lower == side)].sum() for side in (False, True)))

    sizes = {link: time_s(link) for link in np.unique(links).tolist()}
    ordered = sorted(sizes, key=lambda link: -sizes[link])
    if not any(sizes.values()) or (ordered[1:] and sizes[ordered[0]] < _CLEARLY * sizes[ordered[1]]):
        return None
    is_slow, has_others = links == ordered[0], bool(ordered[1:]) and not in_rounds
    return Cause(
        activity=ACTIVITIES[COMMUNICATING], link=divmod(ordered[0], size), lost=lost,
        own_s=float(np.median(times_s[is_slow])), others_s=float(np.median(times_s[~is_slow])) if has_others else None,
    )  # fmt: skip


# In words

_WORDS = {
    "computing": "forward and backward", "input": "input", "updating": "update", "loop": "own code",
    "communicating": "communication",
}  # fmt: skip


def sentence(found: Blame) -> str:
    """Who made the run slow, and by what."""
    cause, free = found.cause, found.is_free
    begin = "No worker waits for another with this method. " if free else ""
    if cause is None:
        share, activity = max(((share, name) for name, share in found.path.items()), default=(0.0, ""))
        most = f"; {_WORDS[activity]} takes {whole_percent_text(share)} of the critical path" if activity else ""
        return f"{begin}No worker was clearly slower than the others{most}."
    what, own_s, others_s = _WORDS[cause.activity], seconds_text(cause.own_s), cause.others_s
    if found.waits_for == "lock" and cause.activity == "communicating":
        what = "wait for the lock"
    lost = "" if free else f"; this cost {whole_percent_text(cause.lost)} of the run's time"
    if cause.link is not None:
        others = f", other links {seconds_text(others_s)}" if others_s is not None else ""
        what, took = ("Exchanges", "took") if free else ("The link", "held a step up for")
        return f"{begin}{what} between workers {cause.link[0]} and {cause.link[1]} {took} {own_s}{others}{lost}."
    if cause.worker is None:
        return f"{begin}{capital(what)} took {own_s} of a step at all workers{lost}."
    took = f"its {what} took {own_s}" + (f", the others' {seconds_text(others_s)}" if others_s is not None else "")
    since = f" from step {cause.since_step:,}" if cause.since_step > 1 else ""
    since += f" to step {cause.until_step:,}" if cause.until_step is not None else " on" if since else ""
    if cause.until_step == cause.since_step:
        since = f" in step {cause.since_step:,}"
    if free:
        updates = percent_text(found.updates.get(cause.worker, 0))
        return f"{begin}Worker {cause.worker} was the slowest{since}: {took}. It made {updates} of the updates."
    if cause.rounds is None:
        return f"Worker {cause.worker} held up the others: {took}{lost}."
    in_rounds = found.waits_for in ("everyone", "quorum")
    was = "last in {} of the rounds" if in_rounds else "on the critical path in {} of the steps"
    return f"Worker {cause.worker} was {was.format(whole_percent_text(cause.rounds))}{since}: {took}{lost}."


def table(found: Blame) -> Table:
    """Shares of the first 48 workers' time, and for whom they waited."""
    rows = []
    for one in found.shares[:_MOST_ROWS]:
        most = sorted(one.waiting_for.items(), key=lambda item: -item[1])
        for_whom = [f"{other} ({whole_percent_text(share)})" for other, share in most[:3] if share >= _LEAST_SHOWN]
        parts = (one.computing, one.input, one.updating, one.loop, one.communicating, sum(one.waiting_for.values()))
        critical = ABSENT if one.critical is None else whole_percent_text(one.critical)
        rows.append([str(one.worker), *map(whole_percent_text, parts), ", ".join(for_whom) or ABSENT, critical])
    communication = "lock" if found.waits_for == "lock" else "messages"
    return Table(rows, ["worker", "computing", "input", "update", "loop", communication, "waiting", "for", "path"])
