"""The replay of a run of one's own loop under `launch`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

import torch
from torch.utils.data import DataLoader

from paceline.data.epoch_claims import LocalEpochClaims
from paceline.errors import DivergedError, PacelineError, WorkerLostError
from paceline.membership.final_mean import BatchesTaken, FinalMean, LeftWeights
from paceline.records.order import Process
from paceline.run.recorded_order import RepeatingReplica, ReplayMismatchError
from paceline.run.recorded_views import RecordedMembers
from paceline.run.repetition import Recorded, Repetition
from paceline.run.simulate import LoopSimulation
from paceline.run.simulated_membership import SimulatedGatherer, SimulatedMembership
from paceline.run.simulated_replica import SimulatedAttachedReplica
from paceline.simulator.faults import Faults
from paceline.simulator.machine import SimulatedMachine
from paceline.simulator.program import DeadlockError, ProgramError
from paceline.simulator.scheduler import Scheduler
from paceline.specs.goal import Goal
from paceline.system.machine import intra_op_threads
from paceline.worker.gathering import Call


class RecordedBatches(LocalEpochClaims):
    """Gives the loop that runs the batches that its worker trained on, in their order, where workers claim them."""

    def __init__(self, scheduler: Scheduler, run: Recorded) -> None:
        super().__init__()
        self._scheduler = scheduler
        of_each = {worker: rows["batch"] for (worker, _), rows in run.processes.items()}
        self._numbers = {worker: numbers[numbers >= 0][::-1].tolist() for worker, numbers in of_each.items()}
        # Above the numbers of all workers' batches; an epoch from there on is one that the run did not have.
        self._end = math.inf if run.is_cut else 1 + max(int(one.max(initial=-1)) for one in of_each.values())

    def claim(self, epoch: int) -> None:
        """Does nothing: which batches a worker takes is recorded."""

    def take_released(self, first: int, end: int) -> int | None:
        if first >= self._end:
            raise ReplayMismatchError("The replay differs from the run: the loop begins one more epoch.", -1)
        numbers = self._numbers.get(self._scheduler.current.worker_id)
        return numbers.pop() if numbers and first <= numbers[-1] < end else None


class RecordedLoop(RepeatingReplica, SimulatedAttachedReplica):
    """A loop's worker that repeats its recorded steps."""

    def gradient(self, at: torch.Tensor, version: int, *in_backward: Any, **named: Any) -> None:
        super().gradient(at, version, *in_backward, **named)
        if self._row is None and not self._may_go_on:
            raise self._one_more()
        self._keep()
        self._computed()

    def _samples(self) -> torch.Tensor | None:
        if self.claims is None or self.batch < 0:
            return None
        found = self.claims.batches.indices(self.claims.place(self.batch))  # None: there is no sampler
        return torch.tensor(found) if found is not None else None


class _ReplayedMembership(SimulatedMembership):
    _run: LoopReplay

    def __init__(self, run: LoopReplay, *args: Any) -> None:
        super().__init__(run, *args)
        if run.members is not None:
            self.gatherer = _MortalGatherer(self.sums, run.members)
        self.random_states = self.random_states if run.has_processes else ()
        self.stopped = partial(run.is_over, (self.worker_id, self.incarnation))
        self._loader: Any = None  # whose batches were fetched last

    def begin_fetching(self, loader: Any) -> None:
        """Draws what the run's iterator of this loader drew as it was made: a seed for its processes."""
        if self._run.has_processes and isinstance(loader, DataLoader) and (loader.num_workers or loader.pin_memory):
            if loader.generator is None and not (loader.persistent_workers and loader is self._loader):
                torch.empty((), dtype=torch.int64).random_()
            self._loader = loader

    def final_model(self, out: torch.Tensor, given: BatchesTaken, left: LeftWeights | None) -> FinalMean | None:
        """As in `Membership`; the mean of workers' own models needs no messages."""
        run, shared = self._run, cast(Any, self._machine.shared)
        if self._algorithm.gossip:
            run.replicas[self.worker_id, self.incarnation].order.end()
            run.left = left or run.left
            run.ending.gather(self.worker_id, None)
            if run.left is not None:
                shared.replace(run.left.x)
            shared.snapshot(out)
            return None
        return super().final_model(out, given, left)


class _MortalGatherer:
    """Implements `Gatherer` for a worker that may die before the others have its value."""

    def __init__(self, gatherer: SimulatedGatherer, members: RecordedMembers) -> None:
        self._gatherer, self._members, self._num_gathered = gatherer, members, 0
        self.leave = gatherer.leave

    def gather(self, value: Any, call: Call | None = None) -> list[Any]:
        if self._gatherer.has_entered:
            self._members.gather(self._gatherer.worker_id, self._num_gathered)
            self._num_gathered += 1
        return self._gatherer.gather(value)


class LoopReplay(Repetition, LoopSimulation):
    """One repetition of a run of one's own loop. Args: as for `Repetition`."""

    member_kind = _ReplayedMembership

    def __init__(self, run: Recorded, version: int | None, shards: Sequence[int] = (), **named: Any) -> None:
        Repetition.__init__(self, run, version, shards, **named)
        assert run.train is not None
        train = partial(_until_diverged, run.train) if run.is_cut else run.train
        seed = run.config.seed
        LoopSimulation.__init__(self, train, run.cluster, run.algorithm, seed, Faults(), Goal(), is_evaluated=False)
        if not run.algorithm.in_rounds and run.config.workers > 1:
            self.epoch_claims = RecordedBatches(self.scheduler, run)
        self.has_processes = run.config.backend == "processes"
        self._waits = ""  # for what its workers wait, if none can go on

    def run_programs(self) -> None:
        try:
            with intra_op_threads(self._run.config.intra_op_threads):
                self.run_loops()
        except DeadlockError as error:
            self._waits = error.waits
            raise
        except ProgramError as error:
            if isinstance(error.cause, WorkerLostError):  # its loop has ended before the others', and not as in the run
                raise self._contradiction("A worker's loop ends before those of the others.") from None
            raise error.cause from None
        if self.machine is None:
            raise self.never_attached()
        if not self._ends_there and self._version == self.machine.shared.version and not self.algorithm.gossip:
            self.kept[None] = self.binding.zeros()  # with what the loop has left in its model
            self.machine.shared.snapshot(self.kept[None])

    def _contradiction(self, why: str) -> PacelineError:
        """The loop is not that of the run: names the first step that it has not made."""
        left = [(one.next_row, worker) for (worker, _), one in self.replicas.items()]
        rows = [(row["applied_version"].item(), row["step"].item(), worker) for row, worker in left if row is not None]
        if not rows:
            return super()._contradiction(why)
        version, step, worker_id = min(rows)
        ended = f"its workers wait for each other ({self._waits})" if self._waits else "it ended"
        return ReplayMismatchError(
            f"The replay differs from the run: {ended} before step {step} of worker {worker_id}"
            f"{f', the gradient of update {version}' if version > 0 else ''}.",
            version,
            worker_id,
        )

    def order_programs(self, machine: SimulatedMachine) -> None:
        self.binding = self._wanted
        super().order_programs(machine)

    def leave(self, worker_id: int) -> None:
        super().leave(worker_id)
        self.ending.leave(worker_id)

    def is_over(self, process: Process) -> bool:
        """Whether the run has ended before its loops, and the worker has made its last step."""
        replica = self.replicas.get(process)
        if not self._run.is_cut or replica is None:
            return False
        last = self._run.num_rounds if self.algorithm.in_rounds else len(self._rows(process))
        return replica.step + replica.idle > last

    def new_replica(
        self, member: SimulatedMembership, optimizer: torch.optim.Optimizer, **base: Any
    ) -> SimulatedAttachedReplica:
        process = member.worker_id, member.incarnation
        may_go_on = self._run.is_cut or process in self._run.changes.left
        base |= {"stopped": member.stopped, "may_go_on": may_go_on}
        replica = self.replicas[process] = RecordedLoop(optimizer, **self.recorded(process), **base)
        return replica


def _until_diverged(train: Callable[[], Any]) -> Any:
    """A `DivergedError` ends its worker without failing the replay, as in a run."""
    with suppress(DivergedError):
        return train()
