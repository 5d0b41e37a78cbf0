"""One repetition of a recorded run, of a task or of a loop of one's own: its workers' programs, in the recorded order."""

from __future__ import annotations

import dataclasses
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.algorithms import registry
from paceline.errors import AlgorithmWarning, ClippingWarning, PacelineError, UsageError
from paceline.optim.flat import FlatBinding
from paceline.records import checkpoint_contents
from paceline.records.order import Exchange, Process, order_of
from paceline.records.run_data import RunData
from paceline.records.step_record import RECORD_DTYPE
from paceline.run.config import TrainConfig
from paceline.run.gossip_order import AverageOrder, Averages, Silence
from paceline.run.recorded_order import ReplayMismatchError, StepOrder, Turns, order_check
from paceline.run.recorded_views import RecordedMembers, RecordedRounds
from paceline.run.replayable import (
    Resumption,
    by_process,
    exchanges_in,
    is_own_loop,
    obstacle,
    recorded_part,
    since_resumed,
)
from paceline.run.resumed_start import ResumedStart
from paceline.run.served_order import OrderedMailbox
from paceline.run.view_changes import ViewChanges
from paceline.simulator.cluster import Cluster
from paceline.simulator.machine import SimulatedMachine
from paceline.simulator.mailbox import SimulatedMailbox
from paceline.simulator.program import DeadlockError
from paceline.simulator.scheduler import Scheduler


@dataclass(frozen=True)
class Update:
    """One update of a replayed run: the model after it, and the steps whose gradients it applied.

    Attributes:
        version: of the parameters after it.
        model: with these parameters; its buffers are those of the worker that computed last.
        steps: for each gradient `worker`, `step`, `batch`, `samples` (indices into the training set, int64; None: not known),
            `read_version`, `staleness`, `loss` and `gradient`, the flat vector (P,).
    """

    version: int
    model: nn.Module = field(repr=False)
    steps: list[dict[str, Any]]


class Recorded:
    """What a replay reads of a run. Args and Raises: as of `RecordedRun`."""

    def __init__(self, folder: str | Path, data: Path | None = None, *, train: Callable[[], Any] | None = None) -> None:
        self.folder = Path(folder)
        whole = RunData.load(self.folder)
        run = since_resumed(whole)
        last = max((int(rows["incarnation"].max(initial=0)) for rows in run.records.values()), default=0)
        if run.result and last > run.result.get("restarts", 0):
            raise UsageError(f"{folder} is damaged: its events have more restarts of a worker than its result.")
        if why := obstacle(whole):
            raise UsageError(f"{folder} cannot be replayed: {why}.")
        self.algorithm = registry.build(whole.config["algorithm"])
        run, _ = recorded_part(whole, self.algorithm)
        is_own = is_own_loop(run)
        if is_own and train is None:
            called = run.config["task"] if run.config["task"].isidentifier() else "your function"
            raise UsageError(
                f'{folder} is a run of your own loop: replay it in Python, with paceline.replay("{folder}", {called}).'
            )
        if not is_own and train is not None:
            raise UsageError(f"{folder} is a run of paceline train, whose loop is Paceline's: leave out your function.")
        if is_own and not callable(train):
            raise UsageError(f"train is the function that launch called, not {train!r}.")
        if is_own and data is not None:
            raise UsageError("data is for runs of paceline train: your function loads its own, so leave it out.")
        self.train, self.part = train, run  # a loop of one's own; the part of the run that a replay repeats
        self.is_cut = _may_be_cut(run)
        own = {one.name: run.config[one.name] for one in dataclasses.fields(TrainConfig) if one.name in run.config}
        here = {"data": data or own.get("data"), "placement": "first-touch", "slow": None}
        goals = dict.fromkeys(("target_loss", "target_accuracy", "target_fraction", "limit_s"))  # records have the end
        self.config, self.changes = TrainConfig(**{**own, **here, **goals}), ViewChanges.of(run)
        # Rounds with deaths are in the machine's memory, as in the run.
        self.cluster = Cluster(workers=self.config.workers, collective="memory" if self.changes else None)
        resumed = Resumption.of(run)
        self.start = ResumedStart(self.folder / resumed.checkpoint, self.algorithm) if resumed.checkpoint else None
        taken = self.start.taken if self.start is not None and self.algorithm.lockstep else 0
        # In lockstep, the most of any worker.
        self.num_rounds = taken + max(int(rows["step"].max(initial=0)) for rows in run.records.values())
        self.processes = by_process(run.records)
        self.applied = np.concatenate([rows["applied_version"] for rows in run.records.values()])
        # When each update of a worker's own model was recorded, its process, and the version that it made.
        self._of_own_models: list[tuple[float, Process, int]] = []
        self.first_update = 1 + resumed.version
        self.updates = int(self.applied.max())
        if self.algorithm.gossip and not self.algorithm.lockstep:  # versions count averages, too
            for worker, order in run.order.items():  # a last process may have copied a model, and made no step
                for incarnation in range(1 + int(order["incarnation"].max())):
                    self.processes.setdefault((worker, incarnation), run.records[worker][:0])
            self._of_own_models = sorted(
                (ended_s, (worker, incarnation), version)
                for worker, rows in whole.records.items()
                for ended_s, incarnation, version in rows[["ended_s", "incarnation", "applied_version"]].tolist()
                if version > 0
            )
            self.updates = len(self._of_own_models)
            self.first_update = 1 + self.updates - int(np.count_nonzero(self.applied))


class Repetition(ABC):
    """The part of a replay that tasks and loops of one's own have in common; comes before the class of a simulation.

    Args:
        run: what to repeat.
        version: of the parameters to keep; None: none are.
        shards: their version at each shard, if servers have them; known from the records if the replay ends there.
        ends_there: whether the replay ends with that version.
        maker: worker and incarnation whose own model has that version, if each worker has a model; None: all share one.
        others: the same of other workers, and the versions of their models to keep.

    Attributes:
        kept: these parameters (P,), once the replay has come to them; by the process that has the model, None: all share it.
    """

    algorithm: Any
    binding: FlatBinding
    machine: Any
    model: Any
    scheduler: Scheduler

    def __init__(
        self,
        run: Recorded,
        version: int | None,
        shards: Sequence[int] = (),
        *,
        ends_there: bool = False,
        maker: Process | None = None,
        others: Mapping[Process, int] | None = None,
    ) -> None:
        self._run, self._version, self._ends_there, self._maker = run, version, ends_there, maker
        self._not_kept = {maker: version, **(others or {})}  # models to keep that are not kept yet
        self.kept: dict[Process | None, torch.Tensor] = {}
        self.replicas: dict[Process, Any] = {}  # by worker and incarnation
        self._turns: Turns | None = None
        self._exchanges: list[dict[Process, list[Exchange]]] = []  # with servers, by shard
        self._averages: Averages | None = None  # in pairs
        self.members: RecordedMembers | None = None  # of rounds with deaths
        self._rounds: RecordedRounds | None = None  # with deaths, of neighbours
        self._to_keep: dict[int, int] = dict(enumerate(shards))  # shard -> version of the parameters to keep
        self._kept_parts: dict[int, torch.Tensor] = {}  # of these parameters, by shard

    @abstractmethod
    def run_programs(self) -> None:
        """Runs the programs of all workers."""

    def order_programs(self, machine: SimulatedMachine) -> None:
        """Prescribes the recorded order; call it before any program runs."""
        run, needs = self._run, self.algorithm.needs
        machine.further_ports = self._further_ports
        if run.config.workers == 1:
            return
        if run.changes:
            members = self.members = RecordedMembers(machine, run.changes, run.config.min_workers)
            machine.lives.newcomers = members
            if needs.views:
                rounds = RecordedRounds(self.scheduler, run.changes, members, run.config.workers, run.part.order)
                self._rounds = machine.views = rounds
        elif needs.kind in ("locked", "slots"):  # each step reads and updates the memory of all workers
            self._turns = Turns(self.scheduler, run.processes.values(), self._applied)
        elif needs.kind == "served":
            exchanges = exchanges_in(run.part, self.algorithm) or {}
            for number, shard in enumerate(machine.shared.shards):
                self._exchanges.append({process: shards[number] for process, shards in exchanges.items()})
                shard.on_update = partial(self._shard_updated, number)
            machine.new_mailbox = self._mailbox
            if self._ends_there:  # the first shard counts the updates
                steps = chain.from_iterable(zip(*own, strict=True) for own in exchanges.values())
                made = next((shards for shards in steps if shards[0].of == self._version), ())
                self._to_keep = {number: one.of or one.at or 0 for number, one in enumerate(made)}
        elif needs.order and not self.algorithm.lockstep:
            orders = {process: order_of(run.part.order, process) for process in run.processes}
            self._averages = Averages(self.scheduler, orders)

    def recorded(self, process: Process) -> dict[str, Any]:
        """Arguments of the replica of a worker's process, beyond those of a simulation."""
        keeps = self._version if self._ends_there and self._maker in (None, process) else None
        return {"rows": self._rows(process), "keeps": keeps, "order": self._step_order(process)}

    def _step_order(self, process: Process) -> StepOrder:
        if self._turns is not None:
            return self._turns
        on_applied = partial(self._applied, process=process)
        if self._averages is not None:
            return AverageOrder(self._averages, process, self.machine.shared.workers[process[0]], on_applied)
        return StepOrder(on_applied if not self._exchanges else None)

    def _further_ports(self, worker_id: int, incarnation: int) -> dict[str, Any]:
        """Of a worker, or of a server, which comes after the workers."""
        if self._rounds is not None:
            return {"mailbox": self._rounds}
        if self._averages is not None:  # recorded averages need no messages
            return {"mailbox": Silence(), "concurrency": Silence()}
        process = worker_id, incarnation
        checks = self._exchanges and self.algorithm.needs.order
        return {"decided": order_check(process, order_of(self._run.part.order, process))} if checks else {}

    def _mailbox(self, *args: Any, worker_id: int, **named: Any) -> SimulatedMailbox:
        shard = worker_id - self._run.config.workers
        if not 0 <= shard < len(self._exchanges):
            return SimulatedMailbox(*args, worker_id=worker_id, **named)
        named |= {"shard": self.machine.shared.shards[shard], "exchanges": self._exchanges[shard]}
        return OrderedMailbox(*args, worker_id=worker_id, waits=self.algorithm.notices_deaths, **named)

    def replay(self) -> None:
        """Runs all workers.

        Raises:
            ReplayMismatchError: a step differs from its record.
        """
        with suppress(DeadlockError), warnings.catch_warnings():  # the messages below say it in the terms of the run
            for kind in (AlgorithmWarning, ClippingWarning):  # which the run has given
                warnings.simplefilter("ignore", kind)
            self.run_programs()
        if self._ends_there and self._not_kept:
            raise self._contradiction(f"The replay ended before update {self._version}.")
        compared = sum(one.compared for one in self.replicas.values())
        if not self._ends_there and compared < len(self._run.applied):
            raise self._contradiction(f"The replay ended after {compared} of {len(self._run.applied)} steps.")

    def _contradiction(self, why: str) -> PacelineError:
        return UsageError(f"{self._run.folder} cannot be replayed: its records contradict each other. {why}")

    def compare_with(self, checkpoint: Path) -> bool:
        """Compares the parameters with a checkpoint's; returns whether the replay came to them."""
        parameters = checkpoint_contents.load_parameters(checkpoint)
        if self.algorithm.gossip:
            # Checkpoints have successors of the dead, too.
            alive = self._run.part.records.keys() & self.machine.shared.model_ids()
            if self.members is not None:  # a worker that died after its last round is still there
                alive = {one for one in alive if not self.members.has_died(one)}
            models = [(worker, checkpoint_contents.load_model(checkpoint, worker)) for worker in sorted(alive)]
            now, saved = self.machine.shared.workers, [(worker, one) for worker, one in models if one is not None]
            if any(version != now[worker].version for worker, (version, _, _) in saved):
                return False
            pairs = [(worker, now[worker].x, x) for worker, (_, _, x) in saved]
        elif None in self.kept:
            pairs = [(None, self.kept[None], parameters.x)]
        else:
            return False
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
            raise ReplayMismatchError(f"All steps are equal, but {why}.", parameters.version, worker)
        return True

    def update(self, number: int) -> Update:
        """The kept update, under its number in the run."""
        assert self.model is not None
        self.binding.bind(self.kept[self._maker])
        steps = [step for _, replica in sorted(self.replicas.items()) for step in replica.kept.values()]
        return Update(number, self.model, steps)

    def any_model(self, holds: Callable[[nn.Module], bool]) -> bool:
        """Whether it holds for one of the kept models."""
        for x in self.kept.values():
            self.binding.bind(x)
            if holds(self.model):
                return True
        return False

    def _rows(self, process: Process) -> np.ndarray:
        return self._run.processes.get(process, np.empty(0, RECORD_DTYPE))

    def _shard_updated(self, number: int, version: int) -> None:
        if self._to_keep.get(number) != version:
            return
        shared = self.machine.shared
        self._kept_parts[number] = shared.x[slice(*shared.ranges[number])].clone()
        del self._to_keep[number]
        if not self._to_keep:
            self._keep(torch.cat([part for _, part in sorted(self._kept_parts.items())]))

    def _applied(self, version: int, process: Process | None = None) -> None:
        """Keeps the model after an update, if it is one to keep; `process` has made it, if each worker has a model."""
        owner = process if process in self._not_kept else None
        if self._not_kept.get(owner) != version:
            return
        shared, x = self.machine.shared, self.binding.zeros()
        if process is not None and self.algorithm.needs.kind == "replicated":
            # Others may not have made this update yet.
            shared.model(process[0], x)
        else:
            shared.snapshot(x)
        self._keep(x, owner)

    def _keep(self, x: torch.Tensor, owner: Process | None = None) -> None:
        del self._not_kept[owner]
        self.kept[owner] = x
        if self._ends_there and not self._not_kept:
            self.scheduler.cut()


def _may_be_cut(run: RunData) -> bool:
    """Whether the run may have ended before its loops did; whether a time or a target loss has ended it is not recorded."""
    config, result, num_samples = run.config, run.result, run.config.get("limit_samples")
    return (
        result["outcome"] != "stopped"  # as after a target accuracy
        or bool(result["outcome_reason"])
        or (num_samples is not None and result["samples"] >= num_samples)
        or any(config.get(one) is not None for one in ("target_loss", "limit_s"))
    )
