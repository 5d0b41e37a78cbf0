"""Whether a run can be replayed: a run writes the answer into its result, and `paceline replay` refuses by the same rule."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.algorithms import Algorithm, registry
from paceline.data.batches import DRAWN_EPOCH
from paceline.errors import UsageError
from paceline.records.order import NONE, ORDER_DTYPE, Exchange, Process, exchanges_of, order_of
from paceline.records.run_data import RunData
from paceline.run.recorded_order import first_step
from paceline.run.unrecorded import UNKNOWN, with_unrecorded
from paceline.run.view_changes import unrecorded_changes

_UNSUPPORTED = {
    "optimizer state that workers share": lambda config: config.get("optimizer_state") == "shared",
    "layouts": lambda config: config.get("layout") is not None,
    "injected staleness": lambda config: config.get("inject_staleness") is not None,
}


@dataclass(frozen=True)
class Resumption:
    """The beginning of a resumed run, as `result.json` has it in `resumed`.

    Attributes:
        checkpoint: its folder, relative to the run's folder if it lies there; "": the run was not resumed.
        events: by worker, its number of events before.
        version: of the parameters that all workers share.
        versions: by worker, of its own model, if each has one.
    """

    checkpoint: str = ""
    events: dict[int, int] = field(default_factory=dict)
    version: int = 0
    versions: dict[int, int] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        both = ({str(worker): one for worker, one in each.items()} for each in (self.events, self.versions))
        return vars(self) | dict(zip(("events", "versions"), both, strict=True))

    @classmethod
    def of(cls, run: RunData) -> Resumption:
        if "resumed" not in run.result:
            return cls()
        match run.result["resumed"]:
            case {"checkpoint": str(path), "events": dict(events), "version": int(version), "versions": dict(versions)}:
                are_numbers = all(isinstance(one, int) for one in (*events.values(), *versions.values()))
                if path and are_numbers and all(map(str.isdecimal, (*events, *versions))):
                    by_worker = ({int(worker): one for worker, one in each.items()} for each in (events, versions))
                    return cls(path, next(by_worker), version, next(by_worker))
        raise UsageError(f"The run's result.json is damaged: its resumed is {run.result['resumed']!r}.")


def replayability(run: RunData) -> dict[str, Any]:
    """What `result.json` says about it."""
    why = obstacle(run)
    return {"replayable": not why, "replayable_reason": f"{why[0].upper()}{why[1:]}." if why else ""}


def obstacle(run: RunData) -> str:
    """Why a run cannot be replayed, as a part of a sentence; "" if it can."""
    if run.config.get("backend") not in ("processes", "threads") or not run.config.get("algorithm"):
        return "only finished runs of paceline train and of paceline.launch can be replayed"
    if not run.result:
        return "it has not ended, as it has no result.json: resume it first"
    if is_own_loop(run) and (why := _unsupported_in_own_loops(run)):
        return f"replays of your own loops do not support {why}"
    algorithm = registry.build(run.config["algorithm"])
    if why := algorithm.unrecorded(run.config["workers"]):
        return f"with {run.config['algorithm']}, its records do not have {why}"
    for what in (one for one, is_there in _UNSUPPORTED.items() if is_there(run.config)):
        return f"replays do not support {what}"
    computed = sum(np.count_nonzero(rows["samples"]) for rows in run.records.values())
    run, why = recorded_part(run, algorithm)
    why = why or _missing(algorithm, run)
    if not why and is_own_loop(run) and not algorithm.in_rounds:
        why = _unnamed_batches(run)
    if not why and computed != run.result.get("computed_gradients"):
        return "it lacks records of steps"
    is_ordered = algorithm.needs.order and not algorithm.lockstep and run.config["workers"] > 1
    if why or not is_ordered:
        return why
    return _missing_averages(run) if algorithm.gossip else _missing_answers(algorithm, run)


def is_own_loop(run: RunData) -> bool:
    """Whether `launch` made it, from a function of the user's."""
    return "inject_staleness" not in run.config


def _unsupported_in_own_loops(run: RunData) -> str:
    result = run.result
    if result.get("waits_for") is None:
        return "layouts and placed models"
    if result.get("resumed"):
        return "resumed runs"
    is_any_lost = result.get("workers_lost") or result.get("restarts")
    is_recorded = registry.build(run.config["algorithm"]).survivors_continue
    return f"runs with dead workers under {run.config['algorithm']}" if is_any_lost and not is_recorded else ""


def _unnamed_batches(run: RunData) -> str:
    """Of the batches that a step took from `worker.batches`, its record names the first.

    Workers that end within a step leave a batch each without a record.
    """
    taken = np.concatenate([rows["batch"][rows["batch"] >= 0] for rows in run.records.values()])
    epochs, places = np.divmod(np.unique(taken), DRAWN_EPOCH)
    num_missing = sum(1 + int(own.max()) - len(own) for own in (places[epochs == one] for one in np.unique(epochs)))
    if num_missing > (run.config["workers"] if run.result["outcome"] in ("diverged", "crashed") else 0):
        return (
            "it has batches that its records do not name, as if its loop accumulated gradients or left an epoch early"
        )
    return ""


def since_resumed(run: RunData) -> RunData:
    """The run, without the steps and the workers before it was resumed."""
    resumed = Resumption.of(run)
    if not resumed.checkpoint:
        return run
    workers = range(run.config["workers"])
    records = {one: rows[resumed.events.get(one, 0) :] for one, rows in run.records.items() if one in workers}
    return dataclasses.replace(run, records=records)


def recorded_part(run: RunData, algorithm: Algorithm) -> tuple[RunData, str]:
    """What a replay repeats: the run since it was resumed, with the gradients of killed workers that other records tell of.

    Returns:
        that, and why it cannot be replayed, as a part of a sentence; "" if nothing says so yet.
    """
    run = since_resumed(run)
    died_in_quorum = algorithm.waits_for == "quorum" and run.result.get("workers_lost") and run.result.get("shards")
    return with_unrecorded(run) if died_in_quorum else (run, "")


def _missing(algorithm: Algorithm, run: RunData) -> str:
    """What the records of one run do not have, although they should."""
    result, records = run.result, run.records
    applied = np.concatenate([*(rows["applied_version"] for rows in records.values()), np.zeros(0, np.int64)])
    updates = int(applied.max(initial=0))
    if not updates:
        return "it has no updates"
    for (_, incarnation), rows in by_process(records).items():
        first = first_step(rows) if incarnation and algorithm.survivors_continue else 1
        if (rows["step"] != np.arange(first, first + len(rows))).any():
            return "it lacks records of steps"
    resumed, waits_for, lost = Resumption.of(run), algorithm.waits_for, Counter(result["workers_lost"])
    if algorithm.survivors_continue and (why := unrecorded_changes(run, algorithm)):
        return why
    is_noticed = algorithm.notices_deaths and not algorithm.survivors_continue
    if lost and is_noticed and waits_for not in ("quorum", "slowest"):
        return "a worker died, and the records do not have when the others learnt of it"
    died = ((records[worker], number) for worker, deaths in lost.items() for number in range(1, deaths))
    if waits_for == "slowest" and not all((rows["incarnation"] == number).any() for rows, number in died):
        return "a replacement died before its first record, and so nothing tells for how long the others waited for it"
    if result.get("server_restarts"):
        return "a server died, and the records do not have which messages its successor got"
    missing = _first_missing(applied, resumed.version, updates)
    if missing and not algorithm.lockstep and not algorithm.gossip:
        return f"update {missing} has no record, as after a worker was killed"
    counts_averages = algorithm.gossip and not algorithm.lockstep
    if updates != ((not counts_averages and result.get("version")) or updates):
        return "it lacks records of steps"
    if result.get("torn_updates") and not algorithm.survivors_continue:
        return "a worker was killed while it wrote an update, and the records do not have what it wrote"
    return ""


def _missing_averages(run: RunData) -> str:
    """What the order of averages between updates does not have: a version of a worker's model that nothing has made."""
    resumed = Resumption.of(run)
    for worker, rows in run.records.items():
        order = run.order.get(worker, np.empty(0, ORDER_DTYPE))
        applied, is_copy = rows["applied_version"], order["of"] == NONE
        made = np.concatenate([applied[applied > 0], order["moment"][~is_copy].astype(np.int64)])
        after = resumed.versions.get(worker, resumed.version)
        if len(np.unique(made)) < len(made) or _first_missing(np.concatenate([made, order["moment"][is_copy]]), after):
            return f"it lacks records of the averages of worker {worker}"
    return ""


def _missing_answers(algorithm: Algorithm, run: RunData) -> str:
    """What the order of messages at several shards, or of several kinds, does not have."""
    processes = exchanges_in(run, algorithm)
    if processes is None:
        return "it lacks records of the order in which servers answered"
    after, num_shards = Resumption.of(run).version, algorithm.needs.servers
    counts = [one["version"] for one in run.result.get("shards", ())] or [0] * num_shards
    for shard, version in zip(range(num_shards), counts, strict=True):
        made = [one.of for exchanges in processes.values() for one in exchanges[shard] if one.of]
        if missing := _first_missing(np.array(made, np.int64), after, version):
            return f"update {missing} of shard {shard} has no record, as after a worker was killed"
    return ""


def exchanges_in(run: RunData, algorithm: Algorithm) -> dict[Process, list[list[Exchange]]] | None:
    """By worker and incarnation, and then by shard: its requests, and how they were answered; None: some are missing."""
    num_shards = algorithm.needs.servers if run.config["workers"] > 1 else 0
    found = {}
    for process, rows in by_process(run.records).items() if num_shards else ():
        exchanges = [exchanges_of(rows)]
        if algorithm.needs.order:
            exchanges = _ordered_exchanges(order_of(run.order, process), rows, num_shards)
        if exchanges is None or (len(rows) and not exchanges[0]):
            return None
        found[process] = exchanges
    return found


def _ordered_exchanges(order: np.ndarray, rows: np.ndarray, num_shards: int) -> list[list[Exchange]] | None:
    """By shard, with that of a process's last gradient if it has no record; None: some are missing.

    Leaves out requests for parameters after the last gradient: a killed worker made them in steps that have no records.
    """
    pushes = np.flatnonzero(order["of"][::num_shards])
    order = order[: num_shards * (1 + int(pushes.max(initial=0)))]
    if len(order) % num_shards:
        return None
    order = order.reshape(-1, num_shards)
    in_order = np.arange(1, len(order) + 1)[:, None] == order["moment"]
    if not in_order.all() or (order["peer"] != np.arange(num_shards)).any():
        return None
    is_recorded = not len(rows) or rows["samples"][-1] != UNKNOWN
    last = [] if is_recorded else [Exchange(None, int(rows["applied_version"][-1]))]
    made = (order[["at", "of"]][:, shard].tolist() for shard in range(num_shards))
    return [[*(Exchange(at, 0 if of == NONE else of) for at, of in own), *last] for own in made]


def _first_missing(made: np.ndarray, after: int, last: int = 0) -> int:
    """The first version from `after` up to `last`, or to the last one made, that is missing; 0: none is."""
    made = np.unique(made[made > 0])
    gaps = np.flatnonzero(made != np.arange(after + 1, after + len(made) + 1))
    end = after + len(made)
    return after + int(gaps[0]) + 1 if len(gaps) else (end + 1 if end < last else 0)


def by_process(records: Mapping[int, np.ndarray]) -> dict[Process, np.ndarray]:
    """The records of each process."""
    return {
        (worker, incarnation): rows[rows["incarnation"] == incarnation]
        for worker, rows in records.items()
        for incarnation in range(int(rows["incarnation"].max(initial=-1)) + 1)
    }
