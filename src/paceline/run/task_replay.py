"""The replay of a run of a task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from paceline.data.plan import BatchPlan
from paceline.errors import PacelineError, UsageError
from paceline.ports.ports import Ports
from paceline.run.inputs import inputs_of
from paceline.run.recorded_order import RecordedClaims, RecordedReplica
from paceline.run.repetition import Recorded, Repetition
from paceline.run.simulate_task import TaskSimulation
from paceline.simulator.program import ProgramError


class TaskReplay(Repetition, TaskSimulation):
    """One repetition of a run of `paceline train`. Args: as for `Repetition`."""

    def __init__(self, run: Recorded, version: int | None, shards: Sequence[int] = (), **named: Any) -> None:
        TaskSimulation.__init__(self, run.config, run.cluster, evaluates=False)
        self.has_own_buffers = True
        Repetition.__init__(self, run, version, shards, **named)
        before, now = run.part.result.get("inputs") or {}, inputs_of(run.config.task, self.train_set)
        if any(before.get(name, now[name]) != now[name] for name in ("samples", "data")):
            raise UsageError(
                f"{run.folder} cannot be replayed: its training set ({before['samples']:,} samples) differs from this one "
                f"({now['samples']:,} samples): give the run's data folder with --data."
            )
        if self.algorithm.lockstep:
            self._most_steps = run.num_rounds
        if run.start is not None:
            assert self.model is not None
            run.start.initialise(self.machine.shared, self.binding, self.model)
            self._left = run.start.left()
        self.order_programs(self.machine)

    def run_programs(self) -> None:
        self.run()

    def _further_ports(self, worker_id: int, incarnation: int) -> dict[str, Any]:
        found, shard = super()._further_ports(worker_id, incarnation), worker_id - self.config.workers
        if self._run.start is not None and shard < 0:
            found["storage"] = self._run.start.storage(worker_id)
        elif self._run.start is not None:
            ranges = self.machine.shared.ranges
            found["storage"] = self._run.start.server_state(*ranges[shard % len(ranges)])
        return found

    # Parts of the simulation

    def _run_programs(self) -> None:
        try:
            self.scheduler.run()
        except ProgramError as error:
            raise error.cause if isinstance(error.cause, PacelineError) else error from None

    def _claims(self, plan: BatchPlan, ports: Ports[Any], claim_batch: Callable[[], int], taken: int) -> Any:
        if self._turns is None and self._averages is None and not self._exchanges:
            return super()._claims(plan, ports, claim_batch, taken)
        return RecordedClaims(plan, self._rows((ports.worker_id, ports.incarnation)))

    def _replica(self, claims: Any, *task: Any, **base: Any) -> RecordedReplica:
        worker_id, incarnation = process = base["core"].worker_id, base["incarnation"]
        replica = self.replicas[process] = RecordedReplica(*task, plan=claims.plan, **self.recorded(process), **base)
        if self._run.start is not None:
            base["random_states"].enter(worker_id)
            has_own = self.algorithm.gossip and not incarnation
            own_model = self.machine.shared.workers[worker_id] if has_own else None
            claims.taken = self._run.start.begin_worker(worker_id, replica, own_model)
        return replica

    def _start(self, ports: Ports[Any], work: Callable[[], None]) -> None:
        if ports.incarnation and self.members is None:
            work()  # in the program of the process before, as the end of a program ends all that its worker has
        else:
            super()._start(ports, work)

    def _work(self, replica: Any, ports: Ports[Any]) -> None:
        super()._work(replica, ports)
        successor = ports.worker_id, ports.incarnation + 1
        if self.members is None and successor in self._run.processes:
            self.machine.lives.start_again(*successor)
