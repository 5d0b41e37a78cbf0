"""Where workers died, and where replacements came, in rounds without servers: what replays need to know of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.algorithms import Algorithm
from paceline.errors import UsageError
from paceline.records.order import NONE, Process
from paceline.records.run_data import RunData

if TYPE_CHECKING:
    from paceline.memory.arena import Arena
    from paceline.worker.supervised import WorkerState

_LEAST_BUCKET_BYTES = 2**16  # so large, all buckets of a step are reduced in one round of barriers


def came(arena: Arena | None, worker: WorkerState) -> list[dict[str, int]]:
    """The entry of `view_changes` for a replacement that the others have accepted; none if they have not."""
    newcomers = arena.newcomers if arena is not None else None
    at = newcomers.take_acceptance(worker.worker_id) if newcomers is not None else None
    return [] if at is None else [{"worker": worker.worker_id, "incarnation": worker.incarnation, "came_at": at}]


def left(
    arena: Arena,
    worker: WorkerState,
    num_sums: int,  # how many of its values for `worker.sum` and `worker.mean` the others have
) -> list[dict[str, int]]:
    """The entries for a worker that has died; call it once the others go on."""
    own = {"worker": worker.worker_id, "incarnation": worker.incarnation, "num_sums": num_sums}
    return [*(came(arena, worker) if worker.waits else []), own | arena.group.end_of(worker.worker_id)]


@dataclass(frozen=True)
class ViewChanges:
    """What `view_changes` in a run's result says."""

    left: Mapping[Process, Mapping[str, int]]  # of processes that have died: how many barriers or rounds each came to
    # Of replacements that the others accepted: the barriers before, or each one's first round.
    came: Mapping[Process, int]

    @classmethod
    def of(cls, run: RunData) -> ViewChanges:
        """Raises `UsageError` if the result is damaged."""
        left, came = dict[Process, Mapping[str, int]](), dict[Process, int]()
        for one in run.result.get("view_changes") or ():
            match one:
                case {"worker": int(worker), "incarnation": int(incarnation), "came_at": int(at)}:
                    came[worker, incarnation] = at
                case {"worker": int(worker), "incarnation": int(incarnation), "left_at": int(), "num_sums": int()}:
                    left[worker, incarnation] = one
                case _:
                    raise UsageError(f"The run's result.json is damaged: its view_changes have {one!r}.")
        if any("first_without" in one for one in left.values()):  # neighbours agree on a round
            came = dict[Process, int]()
            for rows in run.order.values():
                own = rows[rows["of"] != NONE][["moment", "peer", "peer_incarnation"]]
                came |= {(worker, incarnation): round for round, worker, incarnation in own.tolist()}
        return cls(left, came)

    def __bool__(self) -> bool:
        return bool(self.left or self.came)

    def left_at(self, process: Process) -> float:
        """Infinity: it has not died."""
        return self.left[process]["left_at"] if process in self.left else float("inf")

    def took_part(self, process: Process) -> bool:
        """Whether a replacement that the others have accepted has come to their rounds, before it died."""
        return process in self.came and self.left_at(process) > self.came[process]

    def successor(self, process: Process) -> int | None:
        """The incarnation of the worker that takes part next; None: none does."""
        worker, incarnation = process
        later = (n for one, n in self.came if one == worker and n > incarnation and self.took_part((worker, n)))
        return min(later, default=None)


def unrecorded_changes(run: RunData, algorithm: Algorithm) -> str:
    """What a run with deaths in such rounds has not recorded of them, as a part of a sentence; "" if nothing is missing."""
    lost, changes = Counter(run.result["workers_lost"]), ViewChanges.of(run)
    if not lost and not changes:
        return ""
    trained = {(worker, n) for worker, rows in run.records.items() for n in set(rows["incarnation"].tolist()) if n > 0}
    if lost - Counter(worker for worker, _ in changes.left) or trained - changes.came.keys():
        return "a worker died, and the records do not have when the others learnt of it"
    if run.result["outcome"] == "crashed":
        return "a worker died, and so the run failed"
    if algorithm.needs.bucket_bytes < _LEAST_BUCKET_BYTES:
        return f"a worker died, and with bucket_bytes below {_LEAST_BUCKET_BYTES:,} the records do not have in which bucket"
    return ""
