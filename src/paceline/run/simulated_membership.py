"""One simulated worker's part in the run of the user's own function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from paceline.algorithms import Algorithm
from paceline.data.epoch_claims import LocalEpochClaims
from paceline.membership.final_mean import BatchesTaken, FinalMean, LeftWeights, take_final_mean
from paceline.membership.tables import SharedTables, local_tables
from paceline.optim.flat import FlatBinding
from paceline.optim.model_state import dense_buffers, from_bytes, state_of, to_bytes
from paceline.run.simulated_driver import survivors_in
from paceline.run.simulated_replica import SimulatedAttachedReplica
from paceline.run.simulation_record import SimulationRecord
from paceline.simulator.backward import AfterBackward
from paceline.simulator.gathering import SimulatedGathering
from paceline.simulator.machine import SimulatedMachine, never
from paceline.simulator.scheduler import Scheduler
from paceline.worker.gathering import Call
from paceline.worker.memberships.membership import BatchShare, Membership

_DEADLINE_S = 600.0  # of virtual time, for the mean at the end


class SimulatedRun:
    """The common state of the workers in one run of `simulate`.

    Attributes:
        gathering: where they gather values, and meet at the start.
        ending: where they wait for each other at the end.
        after_backward: where they wait after a backward pass.
        model: worker 0's, with the initial state of all workers.
        buffers: running statistics by name: shared by all workers, or, if each has its own, those of the leading one.
        left: the weights that the leading worker's loop has left in its model.
        mean: of the workers' own models at the end (P,).
    """

    def __init__(self, scheduler: Scheduler, num_workers: int, seed: int) -> None:
        self.scheduler, self.seed = scheduler, seed
        self.gathering = SimulatedGathering(
            scheduler, num_workers, "all workers to attach, or to call worker.sum or worker.mean"
        )
        self.ending = SimulatedGathering(scheduler, num_workers, "all workers to end")
        self.epoch_claims = LocalEpochClaims()
        self.after_backward = AfterBackward()
        self.algorithm: Algorithm | None = None
        self.machine: SimulatedMachine | None = None
        self.record: SimulationRecord | None = None
        self.model: nn.Module
        self.buffers: dict[str, torch.Tensor] = {}
        self.own_buffers: dict[int, dict[str, torch.Tensor]] = {}
        self.tables = local_tables(num_workers)
        self.left: LeftWeights | None = None
        self.mean: torch.Tensor | None = None
        self._epoch_is_known = False

    @property
    def leading(self) -> int:
        """The worker whose buffers, and weights that its loop has left, are the run's: the first one that is alive, or 0."""
        assert self.algorithm is not None
        assert self.machine is not None
        return self.machine.shared.model_ids()[0] if self.algorithm.survivors_continue else 0

    def new_replica(
        self, member: SimulatedMembership, optimizer: torch.optim.Optimizer, **base: Any
    ) -> SimulatedAttachedReplica:
        return SimulatedAttachedReplica(optimizer, **base)

    def leave(self, worker_id: int) -> None:
        """A worker has ended or died: the others no longer wait for its values, and the next one may lead."""
        if self.leading:
            self.buffers.update(self.own_buffers[self.leading])
        self.gathering.leave(worker_id)

    def come_back(self, worker_id: int, epoch: int) -> None:
        """A dead worker's replacement has its first batch, in this epoch: the others wait for it, too, and it may lead."""
        if self.algorithm is not None and self.algorithm.survivors_continue:
            self.buffers.update(self.own_buffers[self.leading])
        self.gathering.come_back(worker_id, epoch)
        self.ending.come_back(worker_id, 0)

    def tell_epoch(self, samples: int) -> None:
        """Notes about how many samples an epoch of the loop has, from the first worker with a batch."""
        if not self._epoch_is_known and self.record is not None:
            self._epoch_is_known = True
            self.record.know_epoch(samples)

    @cached_property
    def last_buffers(self) -> Sequence[torch.Tensor]:
        """The run's buffers once all workers have ended, or those that the leading worker's loop has left."""
        return self.left.buffers if self.left is not None else [one.detach().clone() for one in self.buffers.values()]


class SimulatedMembership(Membership):
    """A worker under a virtual clock.

    Buffers are one copy that all workers write; in lockstep every worker keeps its own.
    """

    fetches_ahead = has_own_process = False

    def __init__(
        self,
        run: SimulatedRun,
        model: nn.Module,
        binding: FlatBinding,
        worker_id: int,
        random_states: tuple[int, ...],
    ) -> None:
        machine, record, algorithm = run.machine, run.record, run.algorithm
        assert machine is not None
        assert record is not None
        assert algorithm is not None
        self.worker_id, self.num_workers, self.seed = worker_id, machine.cluster.workers, run.seed
        self.binding = binding
        self.random_states = random_states
        self.gatherer = self.sums = SimulatedGatherer(run.gathering, self.worker_id)
        self.tables = SharedTables(run.tables.__getitem__, self.worker_id)
        self.tables.tell_random_states(random_states)
        self._run, self._machine, self._record, self._algorithm = run, machine, record, algorithm
        self._core = machine.core(self.worker_id)
        self.ports = machine.ports(self._core)
        self.incarnation = self.ports.incarnation
        self.sums.has_entered = not self.incarnation
        has_replica = machine.needs.kind == "replicated" and not algorithm.gossip
        shared: Any = self.ports.shared if has_replica else machine.shared
        self.snapshot, self.stopped, self.tell_epoch = shared.snapshot, never, run.tell_epoch
        self.own_records = partial(record.records_of, self.worker_id)
        self._buffers = dense_buffers(model)
        for own, first in zip(state_of(model).values(), state_of(run.model).values(), strict=True):
            if (worker_id or self.incarnation) and own is not first and not own.requires_grad:
                from_bytes(own, to_bytes(first))
        for name, buffer in self._buffers.items() if not algorithm.lockstep else ():
            buffer.data = run.buffers[name]
        run.own_buffers[worker_id] = self._buffers

    @property
    def leads(self) -> bool:
        return self.worker_id == self._run.leading

    def replica(self, optimizer: torch.optim.Optimizer) -> SimulatedAttachedReplica:
        """As in `Membership`; its operations take the cluster's time."""
        base = self._machine.base_arguments(self.ports)
        base |= {"binding": self.binding, "recorder": self._record.recorder(self.worker_id)}
        base |= {"core": self._core, "after_backward": self._run.after_backward}
        alone, lockstep = self.num_workers == 1, self._algorithm.lockstep
        return self._run.new_replica(self, optimizer, alone=alone, lockstep=lockstep, **base)

    def batches(self) -> BatchShare:
        return BatchShare(self._run.epoch_claims, survivors=survivors_in(self._algorithm, self.ports))

    def enter(self, epoch: int) -> dict[str, Any] | None:
        if self.sums.has_entered:
            return {}
        if self._machine.lives.newcomers is None:
            return None if epoch < self._run.epoch_claims.newest() else {}
        if (given := self._machine.lives.enter(self.worker_id, epoch)) is None:
            return None
        shared: Any = self._machine.shared
        end = shared.ends[self.worker_id]
        shared.enter(self.worker_id, given["giver"])
        self._record.count_unrecorded_of(self.worker_id, self.ports.shared.version if end is None else end)
        group: Any = self.ports.views or self.ports.collectives
        group.enter(given["group"])
        self._come_back(0)
        return given

    def _come_back(self, epoch: int) -> None:
        self._run.come_back(self.worker_id, epoch)
        self.sums.has_entered = True

    def reach_epoch(self, epoch: int) -> None:
        self.sums.epoch = epoch

    def take_part(self, epoch: int) -> None:
        if not self.sums.has_entered:
            self._come_back(epoch)

    def begin_epoch(self, epoch: int | None, *about: Any, **named: Any) -> None:
        if epoch is not None and self._machine.lives.newcomers is not None:
            self._machine.lives.newcomers.begin_epoch(epoch)

    def has_updates(self) -> bool:
        shared: Any = self._machine.shared
        return any(shared.updates()) if self._algorithm.gossip else shared.version > 0

    def final_model(self, out: torch.Tensor, given: BatchesTaken, left: LeftWeights | None) -> FinalMean | None:
        """As in `Membership`: workers with models of their own send them to each other."""
        run, machine, mean = self._run, self._machine, None
        was_let_in = self.sums.has_entered or machine.lives.newcomers is None
        run.left = left or run.left
        if self._algorithm.gossip and run.mean is None and was_let_in:
            out.copy_(self.ports.shared.x)
            mean = take_final_mean(self.ports, out, _DEADLINE_S)
            run.mean = out.clone()
        machine.scheduler.call_at(machine.scheduler.now_s, partial(machine.lives.trains_no_more, self.worker_id))
        run.ending.gather(self.worker_id, None)
        if run.left is not None:
            machine.shared.replace(run.left.x)
            out.copy_(run.left.x)
        elif run.mean is not None:
            out.copy_(run.mean)
        else:
            (self.snapshot if was_let_in else machine.shared.snapshot)(out)
        for buffer, value in zip(self._buffers.values(), run.last_buffers, strict=True):
            buffer.data.copy_(value)
        return mean

    def close(self, *, failed: bool) -> None:
        if not self._machine.lives.awaits(self.worker_id):
            self._run.ending.leave(self.worker_id)
        self.binding.release()
        for buffer in self._buffers.values():
            buffer.data = buffer.data.clone()


@dataclass
class SimulatedGatherer:
    """Implements `Gatherer` for one worker."""

    gathering: SimulatedGathering
    worker_id: int
    epoch: int = 0  # that the worker's loop has reached
    has_entered: bool = True  # it replaces no worker, or has reached the others, which let it in where they must

    def gather(self, value: Any, call: Call | None = None) -> list[Any]:
        value = value.clone() if isinstance(value, torch.Tensor) else value
        return self.gathering.gather(self.worker_id, value, self.epoch) if self.has_entered else [value]

    def leave(self) -> None:
        self.gathering.leave(self.worker_id)
