"""One repetition of a recorded run: the simulation of its workers' programs, in the recorded order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import nn

from paceline.data.plan import BatchPlan
from paceline.errors import PacelineError, UsageError
from paceline.ports.ports import Ports
from paceline.records import checkpoint_contents
from paceline.records.order import Exchange
from paceline.records.step_record import RECORD_DTYPE
from paceline.run.config import TrainConfig
from paceline.run.gossip_order import Averages, AveragingReplica, Silence
from paceline.run.inputs import inputs_of
from paceline.run.recorded_order import (
    OrderCheck,
    OrderedReplica,
    RecordedClaims,
    RecordedReplica,
    ReplayMismatchError,
    Turns,
)
from paceline.run.resumed_start import ResumedStart
from paceline.run.served_order import OrderedMailbox, ShardOrder
from paceline.run.simulate_task import TaskSimulation
from paceline.simulator.mailbox import SimulatedMailbox
from paceline.simulator.program import DeadlockError, ProgramError

_SHARED = ("locked", "slots")  # kinds of parameters that each step reads and updates in the memory of all workers


@dataclass(frozen=True)
class Update:
    """One update of a replayed run: the model after it, and the steps whose gradients it applied.

    Attributes:
        version: of the parameters after it.
        model: with these parameters; its buffers are those of the worker that computed last.
        steps: for each gradient `worker`, `step`, `batch`, `samples` (indices into the training set, int64), `read_version`,
            `staleness`, `loss` and `gradient`, the flat vector (P,).
    """

    version: int
    model: nn.Module = field(repr=False)
    steps: list[dict[str, Any]]


class Recorded(Protocol):
    """What a replay reads of a run; `RecordedRun` has it."""

    folder: Path
    config: TrainConfig
    inputs: dict[str, Any]
    start: ResumedStart | None  # None: it was not resumed
    processes: dict[int, list[np.ndarray]]  # by worker: the records of each of its processes
    applied: np.ndarray  # the versions that all steps made

    def order_of(self, worker: int, incarnation: int) -> np.ndarray: ...

    def exchanges(self) -> dict[tuple[int, int], list[list[Exchange]]]: ...


class TaskReplay(TaskSimulation):
    """One repetition of a run.

    Args:
        run: what to repeat.
        version: of the parameters to keep; None: none are.
        shards: their version at each shard, if servers have them.
        ends_there: whether the replay ends with that version.
        maker: worker and incarnation whose own model has that version, if each worker has a model; None: all share one.
        others: the same of other workers, and the versions of their models to keep.

    Attributes:
        kept: these parameters (P,), once the replay has come to them.
        kept_others: those of the others' models.
    """

    def __init__(
        self,
        run: Recorded,
        version: int | None,
        shards: Sequence[int] = (),
        *,
        ends_there: bool = False,
        maker: tuple[int, int] | None = None,
        others: Mapping[tuple[int, int], int] | None = None,
    ) -> None:
        super().__init__(run.config, evaluates=False)
        before, now = run.inputs, inputs_of(run.config.task, self.train_set)
        if any(before.get(name, now[name]) != now[name] for name in ("samples", "data")):
            raise UsageError(
                f"{run.folder} cannot be replayed: its training set had {before['samples']:,} samples, and this one has "
                f"{now['samples']:,}, or others; --data names the folder of the run's."
            )
        self._run, self._version, self._ends_there, self._maker = run, version, ends_there, maker
        self._own_claims: dict[int, Any] = {}  # the newest of each worker
        self.machine.further_ports = self._further_ports
        if run.start is not None:
            assert self.model is not None
            run.start.initialise(self.machine.shared, self.binding, self.model)
            self._left = run.start.left()
        self._others, self.kept_others = dict(others or {}), list[torch.Tensor]()
        self.kept: torch.Tensor | None = None
        self._replicas: dict[tuple[int, int], RecordedReplica] = {}  # by worker and incarnation
        needs, is_alone = self.algorithm.needs, self.config.workers == 1
        self._turns: Turns | None = None
        self._orders: list[ShardOrder] = []  # of servers
        self._averages: Averages | None = None  # in pairs
        self._to_keep: dict[int, int] = {}  # shard -> version of the parameters to keep
        self._kept_parts: torch.Tensor | None = None
        if needs.kind in _SHARED and not is_alone:
            self._turns = Turns(self.scheduler, self._updated)
            for rows in chain.from_iterable(run.processes.values()):
                self._turns.expect(rows, retries=needs.kind == "slots")
            self._turns.begin()
        elif needs.kind == "served" and not is_alone:
            self._order_servers(shards)
        elif needs.order and not is_alone:
            orders = {(one, n): run.order_of(one, n) for one, own in run.processes.items() for n in range(len(own))}
            self._averages = Averages(self.scheduler, orders)

    def _order_servers(self, versions: Sequence[int]) -> None:
        exchanges = self._run.exchanges()
        for number, shard in enumerate(self.machine.shared.shards):
            own = {process: shards[number] for process, shards in exchanges.items()}
            self._orders.append(ShardOrder(own, waits=self.algorithm.notices_deaths))
            shard.on_update = partial(self._shard_updated, number)
        self.machine.new_mailbox = self._mailbox
        self._to_keep = dict(enumerate(versions))

    def _further_ports(self, worker_id: int, incarnation: int) -> dict[str, Any]:
        """Of a worker, or of a server, which comes after the workers."""
        found: dict[str, Any] = {}
        process, shard = (worker_id, incarnation), worker_id - self.config.workers
        if self._orders and self.algorithm.needs.order:
            found["decided"] = OrderCheck(process, self._run.order_of(*process))
        if self._run.start is not None and shard < 0:
            found["storage"] = self._run.start.storage(worker_id)
        elif self._run.start is not None:
            ranges = self.machine.shared.ranges
            found["storage"] = self._run.start.server_state(*ranges[shard % len(ranges)])
        return found

    def _mailbox(self, *args: Any, worker_id: int, **named: Any) -> SimulatedMailbox:
        shard = worker_id - self.config.workers
        if not 0 <= shard < len(self._orders):
            return SimulatedMailbox(*args, worker_id=worker_id, **named)
        about = {"order": self._orders[shard], "shard": self.machine.shared.shards[shard]}
        return OrderedMailbox(*args, worker_id=worker_id, **about, **named)

    def replay(self) -> None:
        """Runs all workers.

        Raises:
            ReplayMismatchError: a step differs from its record.
        """
        with suppress(DeadlockError):  # the messages below say it in the terms of the run
            self.run()
        if self._ends_there:
            if self.kept is None or self._others:
                raise self._contradiction(f"The replay ended before update {self._version}.")
            return
        compared = sum(one.compared for one in self._replicas.values())
        if compared < len(self._run.applied):
            raise self._contradiction(f"The replay ended after {compared} of {len(self._run.applied)} steps.")

    def _contradiction(self, why: str) -> UsageError:
        return UsageError(f"{self._run.folder} cannot be replayed: its records contradict each other. {why}")

    def compare_with(self, checkpoint: Path) -> bool:
        """Compares the parameters with a checkpoint's; returns whether the replay came to them."""
        if self.algorithm.gossip:
            saved = {worker: checkpoint_contents.load_model(checkpoint, worker) for worker in self._run.processes}
            now = self.machine.shared.workers
            there = {worker: one for worker, one in saved.items() if one is not None}
            if any(one[0] != now[worker].version for worker, one in there.items()):
                return False
            pairs = [(worker, now[worker].x, one[2]) for worker, one in there.items()]
            version = checkpoint_contents.load_parameters(checkpoint).version
        else:
            parameters = checkpoint_contents.load_parameters(checkpoint)
            if self.kept is None:
                return False
            pairs, version = [(None, self.kept, parameters.x)], parameters.version
        for worker, mine, theirs in pairs:
            if mine.shape != theirs.shape:
                why = f"the model has {len(mine)} parameters, and {checkpoint} has {len(theirs)}"
            elif count := int((~torch.isclose(mine, theirs, rtol=0, atol=0, equal_nan=True)).sum()):
                most = float((mine - theirs).abs().nan_to_num(torch.inf, torch.inf).max())
                own = f" of worker {worker}" if worker is not None else ""
                why = (
                    f"{count} of {len(theirs)} parameters{own} differ from those of {checkpoint}, by at most {most:.3g}"
                )
            else:
                continue
            raise ReplayMismatchError(f"All steps are equal, but {why}.", version, worker)
        return True

    def update(self, number: int) -> Update:
        """The kept update, under its number in the run."""
        assert self.kept is not None
        assert self.model is not None
        assert self._version is not None
        self.binding.bind(self.kept)
        steps = [
            self._step(worker, row)
            for worker, processes in self._run.processes.items()
            for incarnation, rows in enumerate(processes)
            for row in rows[rows["applied_version"] == self._version]
            if self._is_maker((worker, incarnation))
        ]
        return Update(number, self.model, steps)

    def any_model(self, holds: Callable[[nn.Module], bool]) -> bool:
        """Whether it holds for one of the kept models."""
        assert self.kept is not None
        assert self.model is not None
        found = False
        for x in (*self.kept_others, self.kept):
            self.binding.bind(x)
            found = bool(holds(self.model)) or found
        return found

    def _is_maker(self, process: tuple[int, int]) -> bool:
        return self._maker in (None, process)

    def _step(self, worker: int, row: np.void) -> dict[str, Any]:
        assert self.plan is not None
        return {
            "worker": worker,
            **{name: row[name].item() for name in ("step", "batch", "read_version", "loss")},
            "staleness": int(row["applied_version"] - row["read_version"]) - 1,
            "samples": self.plan.indices(int(row["batch"])),
            "gradient": self._replicas[worker, int(row["incarnation"])].kept[int(row["step"])],
        }

    # Parts of the simulation

    def _run_programs(self) -> None:
        try:
            self.scheduler.run()
        except ProgramError as error:
            raise error.cause if isinstance(error.cause, PacelineError) else error from None

    def _claims(self, plan: BatchPlan, ports: Ports[Any], claim_batch: Callable[[], int], taken: int) -> Any:
        if self._turns is None and self._averages is None and not self._orders:
            claims: Any = super()._claims(plan, ports, claim_batch, taken)
        else:
            claims = RecordedClaims(plan, self._rows(ports.worker_id, ports.incarnation))
        self._own_claims[ports.worker_id] = claims
        return claims

    def _own_buffers(self) -> bool:
        return True

    def _replica(self, *task: Any, **base: Any) -> RecordedReplica:
        worker_id = base["core"].worker_id
        process = worker_id, base["incarnation"]
        keeps = self._version if self._ends_there and self._is_maker(process) else None
        base |= {"rows": self._rows(*process), "keeps": keeps}
        if self._averages is not None:
            shared = self.machine.shared.workers[worker_id]
            on_own = partial(self._applied, worker_id) if process == self._maker else None
            on_own = partial(self._applied_other, process) if process in self._others else on_own
            replica = AveragingReplica(*task, averages=self._averages, shared=shared, on_own=on_own, **base)
        elif self._turns is None:
            on_applied = partial(self._applied, worker_id) if not self._orders else None
            replica = RecordedReplica(*task, on_applied=on_applied, **base)
        else:
            replica = OrderedReplica(*task, turns=self._turns, on_applied=self._turns.updated, **base)
        self._replicas[worker_id, base["incarnation"]] = replica
        if self._run.start is not None:
            base["random_states"].enter(worker_id)
            has_own = self.algorithm.gossip and not base["incarnation"]
            own_model = self.machine.shared.workers[worker_id] if has_own else None
            self._own_claims[worker_id].taken = self._run.start.begin_worker(worker_id, replica, own_model)
        return replica

    def _start(self, ports: Ports[Any], work: Callable[[], None]) -> None:
        if ports.incarnation:
            work()  # in the program of the process before, as the end of a program ends all that its worker has
        else:
            super()._start(ports, work)

    def _work(self, replica: Any, ports: Ports[Any]) -> None:
        worker_id = ports.worker_id
        if self._averages is not None:
            ports = dataclasses.replace(ports, mailbox=cast(Any, Silence()), concurrency=cast(Any, Silence()))
        super()._work(replica, ports)
        if ports.incarnation + 1 < len(self._run.processes[worker_id]):
            self.machine.lives.start_again(worker_id, ports.incarnation + 1)

    def _rows(self, worker_id: int, incarnation: int) -> np.ndarray:
        processes = self._run.processes.get(worker_id, [])
        return processes[incarnation] if incarnation < len(processes) else np.empty(0, RECORD_DTYPE)

    def _shard_updated(self, number: int, version: int) -> None:
        if self._to_keep.get(number) != version:
            return
        shared, part = self.machine.shared, slice(*self.machine.shared.ranges[number])
        if self._kept_parts is None:
            self._kept_parts = self.binding.zeros()
        self._kept_parts[part] = shared.x[part]
        del self._to_keep[number]
        if not self._to_keep:
            self._keep(self._kept_parts)

    def _updated(self, version: int) -> None:
        if version == self._version:
            x = self.binding.zeros()
            self.machine.shared.snapshot(x)
            self._keep(x)

    def _applied(self, worker_id: int, version: int) -> None:
        if version == self._version and self.kept is None:
            shared = self.machine.shared
            is_own = self.algorithm.needs.kind == "replicated"  # others may not have made this update yet
            x = self.binding.zeros()
            (partial(shared.model, worker_id) if is_own else shared.snapshot)(x)
            self._keep(x)

    def _applied_other(self, process: tuple[int, int], version: int) -> None:
        if version == self._others.get(process):
            x = self.binding.zeros()
            self.machine.shared.model(process[0], x)
            self.kept_others.append(x)
            del self._others[process]
            self._end_if_kept()

    def _keep(self, x: torch.Tensor) -> None:
        self.kept = x
        self._end_if_kept()

    def _end_if_kept(self) -> None:
        if self._ends_there and self.kept is not None and not self._others:
            self.scheduler.cut()
