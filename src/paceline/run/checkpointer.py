"""Schedules a run's checkpoints: requests them at epochs' beginnings, and marks them complete once they are written."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.errors import NotWrittenError
from paceline.records import checkpoint_contents as checkpoint
from paceline.records import checkpoint_files
from paceline.run.supervisor import Supervisor
from paceline.worker.supervised import survivors

LAST_STEP = "The other workers have written a checkpoint of the last step: a resumed run goes on from there."

NO_LAST_STEP = (
    "The last step has no checkpoint because a worker did not end it in time. A resumed run starts from the previous"
    " checkpoint, if it exists."
)

_AHEAD_S = 0.1  # after which a step that was asked for begins

About = Callable[[int, list[int]], dict[str, Any]]
"""Gives, by a checkpoint's number and workers, what a resumed run must know besides, as JSON."""


class Checkpointer:
    """Keeps the newest complete checkpoint of a run.

    Args:
        every_s: at most one in this time; 0: at every epoch. Of workers with parts of one model, at any step.
        resumed: the checkpoint from which the run starts. It stays to the end, since late or replaced workers still read it,
            and beyond it for tasks: replays begin there.
    """

    def __init__(self, folder: Path, every_s: float, resumed: Path | None = None) -> None:
        self._folder = folder.resolve()
        self._every_s = every_s
        self._last_s = 0.0
        self._resumed = resumed.resolve() if resumed is not None else None
        # By checkpoint, when the last part was written: each worker's number of records, and the workers without a part.
        self._written: dict[int, tuple[dict[int, int], list[int]]] = {}
        checkpoint_files.clear(self._folder, keep=self._resumed)

    def tick(self, supervisor: Supervisor, elapsed_s: float, epochs_done: float, about: About) -> None:
        """Call after every drain of the records."""
        assert supervisor.arena is not None
        running = [worker.worker_id for worker in supervisor.workers if worker.takes_part]
        lost = [one.worker_id for one in supervisor.workers if one.lost or one.waits] if supervisor.goes_on else []
        mates = supervisor.arena.plan.seats.mates  # a replica needs the parts of all its workers, or of none
        needed = sorted({mate for one in running for mate in mates(one)})
        if _needs_all(supervisor):
            needed = [worker.worker_id for worker in supervisor.workers]
        for number in checkpoint_files.numbers(self._folder):
            if checkpoint_files.is_complete(self._folder, number) or not (running if lost else needed):
                continue
            if number in supervisor.outcome.left_out:  # a part of it could not be written: room for the next one
                checkpoint_files.remove(self._folder, number)
            elif self._recorded(supervisor, number, running if lost else needed, running, lost):
                wrote, lacking = self._written[number]
                if lacking:
                    checkpoint.save_successors(self._folder / str(number), lacking, min(wrote), have_programs=True)
                self._complete(supervisor, number, needed, about(number, needed), self._resumed)
        if self._every_s == 0:
            supervisor.arena.store("checkpoint_epoch", -1)
        elif elapsed_s - self._last_s >= self._every_s:
            self._last_s = elapsed_s
            if supervisor.algorithm is not None and supervisor.algorithm.same_batches:
                # Likewise for steps; one that some workers have missed leaves an incomplete checkpoint, and has a successor.
                step = supervisor.arena.furthest_round
                supervisor.arena.store("checkpoint_step", step + 2 + int(_AHEAD_S * step / elapsed_s))
                return
            epoch_s = elapsed_s / epochs_done if epochs_done else math.inf
            # No worker may have entered the requested epoch; if epochs are short, leave one in between.
            supervisor.arena.store("checkpoint_epoch", int(epochs_done) + (1 if epoch_s > 1.0 else 2))

    def _complete(
        self, supervisor: Supervisor, number: int, workers: list[int], about: dict[str, Any], keep: Path | None = None
    ) -> None:
        assert supervisor.arena is not None
        num_servers = supervisor.arena.plan.num_servers
        try:
            checkpoint_files.complete(self._folder, number, workers, about, keep=keep, num_servers=num_servers)
        except NotWrittenError as error:
            supervisor.outcome.leave_out(number, str(error))

    def _recorded(
        self, supervisor: Supervisor, number: int, needed: list[int], running: list[int], lost: list[int]
    ) -> bool:
        """Whether the records of all updates in a checkpoint are on disk, so that a kill cannot separate the two.

        A worker makes an update visible before it writes the update's record. Once all parts of the checkpoint exist and the
        worker has then written another record, the records of all updates in the checkpoint are written.
        """
        if number not in self._written:
            assert supervisor.arena is not None
            if not checkpoint_files.all_there(self._folder, number, needed, supervisor.arena.plan.num_servers):
                return False
            self._written[number] = {worker: supervisor.spool.num_written(worker) for worker in running}, lost
        before, _ = self._written[number]
        return not supervisor.spool.failure and all(
            supervisor.spool.num_read(worker) > before.get(worker, -1) for worker in running
        )

    def end(self, supervisor: Supervisor, parameters: checkpoint.Parameters, about: About) -> None:
        """Writes the last checkpoint from what the workers saved when they ended.

        If it needs all workers' parts, it stays incomplete when a worker did not end the last round in time. A lost worker's
        part is made from a survivor's, if these have all of it.

        Raises:
            NotWrittenError: the checkpoint, or a part of it, cannot be written; the last complete one is unchanged.
        """
        left_out = supervisor.outcome.left_out
        try:
            if None in left_out:
                raise NotWrittenError(left_out[None])
            number = checkpoint.end(self._folder, parameters)
        except NotWrittenError as error:
            supervisor.outcome.leave_out(None, str(error))
            checkpoint_files.remove(self._folder, None)
            raise
        inside = self._folder / str(number)
        workers = survivors(supervisor.workers)
        if _needs_all(supervisor):
            lost = sorted({one.worker_id for one in supervisor.workers} - set(workers))
            if not checkpoint.same_round(inside, workers):
                supervisor.outcome.notes += [] if lost else [NO_LAST_STEP]
                return
            goes_on = supervisor.goes_on
            if lost and not checkpoint.save_successors(inside, lost, workers[0], have_programs=goes_on):
                return
            supervisor.outcome.notes += [LAST_STEP] if lost and supervisor.outcome.kind else []
            workers = sorted(workers + lost)
        keeps = supervisor.loop.task is not None
        self._complete(supervisor, number, workers, about(number, workers), self._resumed if keeps else None)
        if number in left_out:
            raise NotWrittenError(left_out[number])


def _needs_all(supervisor: Supervisor) -> bool:
    return supervisor.algorithm is not None and supervisor.algorithm.in_rounds
