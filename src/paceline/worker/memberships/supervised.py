"""A worker of `launch` or `train`: a process or thread on shared memory, watched by a supervisor."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from paceline.algorithms import Algorithm, registry
from paceline.data.round_deal import Left
from paceline.errors import PeerLostError
from paceline.membership.environment import SupervisedEnvironment, call_at_end
from paceline.membership.final_mean import BatchesTaken, FinalMean, LeftWeights
from paceline.membership.tables import SharedTables, table_shapes
from paceline.memory.arena import Arena
from paceline.memory.collectives import SharedMemoryCollectives
from paceline.optim.flat import FlatBinding
from paceline.optim.frozen import FrozenParameters
from paceline.optim.half_types import sum_type
from paceline.optim.model_state import dense_buffers, digest, from_bytes, to_bytes, untrained
from paceline.optim.sharding import REPLICAS
from paceline.ports.ports import Message
from paceline.ports.shared import AVERAGE
from paceline.records.accruals import WithoutSamples
from paceline.records.step_record import Recorder
from paceline.worker.evaluation_channel import EvaluationChannel
from paceline.worker.evaluation_process import begin_evaluations
from paceline.worker.gathering import Entered, SupervisedGatherer
from paceline.worker.memberships.layout_part import Division, LayoutPart
from paceline.worker.memberships.membership import BatchShare, LoopState, Membership
from paceline.worker.memberships.memory import WorkerMemory, copies_in_launch, put_on_device
from paceline.worker.process import Hello, join_run
from paceline.worker.storage import WorkerStorage
from paceline.worker.user_evaluation import Evaluate, loop_evaluator

_STOPPED_DEADLINE_S = 20.0  # longest wait for the others once the run is being stopped
_LOOK_EVERY_S = 1e-3


class SupervisedMembership(Membership):
    """A worker whose model lies in the run's shared memory.

    Buffers (running statistics) are one shared copy that all workers write, the last writer winning; in lockstep and on GPUs
    every worker keeps its own, and worker 0's are the run's.

    Attributes:
        part: of the model, under a layout.

    Raises:
        UsageError: the model is on a GPU that the algorithm does not support; or the launcher wants a target accuracy, and
            there is no `evaluate`.
    """

    def __init__(
        self,
        environment: SupervisedEnvironment,
        model: nn.Module,  # its trainable parameters become views of the shared vector
        algorithm: Algorithm,
        random_states: tuple[int, ...] = (),  # of the generators; not compared between threads, which share them
        # The loop's; worker 0 starts the evaluator that calls it, if the launcher wants evaluations.
        evaluate: Evaluate | None = None,
        # Shapes of optimizer state that all workers share, by name; empty: each keeps its own.
        shared_state: dict[str, tuple[tuple[int, ...], torch.dtype]] | None = None,
        is_evaluated_elsewhere: bool = False,  # the supervisor's side evaluates, and needs no `evaluate`
        layout: Division | None = None,  # how the model is divided among workers; None: it is not
    ) -> None:
        self._environment = environment
        self._algorithm = algorithm
        self.worker_id, self.num_workers = environment.worker_id, environment.num_workers
        self.incarnation, self.seed = environment.incarnation, environment.seed
        self.has_own_process, self.done_before = environment.own_process, environment.done_before
        self.streams = None if environment.own_process else environment.streams
        self.random_states = random_states if environment.own_process else ()
        self.resumed_from = environment.resume.name if environment.resume is not None else ""
        self.binding = FlatBinding(model.parameters(), on_any_device=True)
        self._whole_binding = self.binding
        copies = copies_in_launch(self.binding, algorithm, self.num_workers, is_divided=layout is not None)
        goal, evaluator = environment.goal, None
        if goal is not None and not is_evaluated_elsewhere:
            goal.check(evaluate)
            if evaluate is not None and self.worker_id == 0:
                evaluator = loop_evaluator(model, evaluate, needs_accuracy=goal.target_accuracy is not None)
        is_evaluated = is_evaluated_elsewhere or (goal is not None and evaluate is not None)
        self._untrained = untrained(model)  # before a layout divides the model
        if layout is not None:
            self.part = layout.part(model, self.worker_id, self.num_workers, self.seed)
            self.binding = self.part.binding
            self.streams = self.streams if self.dealt[1] == self.num_workers else None  # others take the same batches
        self.saves_after_loss = algorithm.survivors_have_all and self.part is None
        self._served_parts = self.part.sharding if self.part is not None and algorithm.serves_parts else None
        self._any_number = (self.part is None or algorithm.serves_parts) and algorithm.takes_any_workers
        self.fetches_ahead = self._served_parts is None  # parts agree on each batch as the loop gets it
        self._entered_in = -1  # the epoch in whose middle this worker has entered
        self._shared_state = shared_state or {}
        self._buffers = dense_buffers(model)
        self._averages = [n for n, b in self._buffers.items() if b.is_floating_point() and algorithm.needs.averaged]
        resume, folder, tell = environment.resume, environment.checkpoint, environment.supervisor.send
        alike, frozen = algorithm.survivors_have_all, FrozenParameters(model) if self.part is None else None
        self._storage = WorkerStorage(self.worker_id, resume, folder, tell, makes_same_updates=alike, frozen=frozen)
        hello = self._hello(EvaluationChannel.EXTRA if is_evaluated else {})
        self.arena = join_run(environment, hello, self._write_initial, self._tell)
        keeps_own = self.worker_id > 0 and (algorithm.lockstep or (self.part is not None and not self.part.is_placed))
        self._has_own_buffers = copies is not None or keeps_own
        self._live = self._buffers.copy() if copies is not None else {}
        if copies is not None:
            put_on_device(self.arena, self.binding, copies)
        for name, buffer in self._buffers.items():
            if self._has_own_buffers:
                buffer.copy_(self.arena.extra(name))
            else:
                buffer.data = self.arena.extra(name)
        for one in (self._untrained, untrained(evaluator.model) if evaluator is not None else {}):
            for name in (one.keys() & self.arena.plan.extra.keys()) if self.worker_id or self.incarnation else ():
                from_bytes(one[name], self.arena.extra(name))
        slow = environment.slow if environment.plan is None else {}  # a part is slow by itself
        self._memory = memory = WorkerMemory(
            self.binding,
            self._buffers,
            algorithm,
            self.arena,
            self.seed,
            self.incarnation,
            self._storage,
            self._recorder(),
            slow.get(self.worker_id, 1.0),
            copies,
            frozen,
        )
        if self.arena.newcomers is not None:
            self.arena.newcomers.min_workers = environment.min_workers
        if algorithm.needs.mailbox:
            patience_s = environment.step_deadline_s if algorithm.same_batches else None
            memory.meet(self.arena.shared_store(), patience_s=patience_s)
        memory.ports = replace(memory.ports, untrained=[*self._untrained.values()])
        if self.part is not None:
            if self.arena.plan.mates:
                self.part.mates = memory.meet_mates(environment.step_deadline_s)
            axes = self._axes()
            for one in (self.arena.collectives, *axes.values()):
                if one is not None:
                    one.counts = memory.ports.counts
            memory.ports = self.part.begin(memory.ports, axes, algorithm)
        self.ports, self.replica, self.base_arguments = memory.ports, memory.replica, memory.base_arguments
        self.stopped, self.snapshot = memory.stopped, memory.snapshot
        self.gatherer = self._sums = SupervisedGatherer(environment.supervisor, self.stopped)
        if is_evaluated:
            self.tell_epoch = EvaluationChannel(self.arena).tell_epoch
        if evaluator is not None:
            evaluator.live = self._live
            own_process, on_gpu = environment.own_process, copies is not None
            call_at_end(begin_evaluations(self.arena, evaluator, own_process=own_process, on_gpu=on_gpu))

    # The beginning

    def _hello(self, extra: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> Hello:
        extra = {name: (tuple(b.shape), b.dtype) for name, b in self._buffers.items()} | extra | self._shared_state
        extra |= {AVERAGE + name: (extra[name][0], sum_type(extra[name][1])) for name in self._averages}
        return Hello(
            algorithm=registry.spec(self._algorithm),
            num_elements=self._whole_binding.num_elements,
            num_parameters=self._whole_binding.num_parameters,
            dtype=self.binding.dtype,
            memory_order=self._whole_binding.memory_order,
            shapes=(*self._whole_binding.describe(), *((name, *one.shape) for name, one in self._untrained.items())),
            extra=extra | table_shapes(self.num_workers),
            sharding=self.part.sharding if self.part is not None else None,
            untrained=tuple((name, *digest(one)) for name, one in self._untrained.items()),
        )

    def _recorder(self) -> Recorder:
        ring = self.arena.ring(self.worker_id)
        if self.part is None or self.part.is_recorded:
            return ring
        return WithoutSamples(ring, counts_updates=self._served_parts is None)

    def _axes(self) -> dict[str, SharedMemoryCollectives]:
        """Collectives along the layout's axes; if it cuts nothing, all workers are replicas and share one set."""
        if self.arena.axes is not None:
            return self.arena.axes.along
        return {REPLICAS: self.arena.collectives} if self.arena.collectives is not None else {}

    def _write_initial(self, arena: Arena, x: torch.Tensor) -> None:
        """The parameters that the run starts from, into `x` (P,): the model's own, or the checkpoint's."""
        buffers = self._buffers
        same_workers = None if self._any_number else self.num_workers
        saved = self._storage.load_parameters(self._whole_binding, buffers, same_workers, self._served_parts)
        if saved is not None:
            x.copy_(saved.x)
            buffers = saved.buffers
            if self._shared_state:
                self._storage.load_shared_state({name: arena.extra(name) for name in self._shared_state})
        elif self.part is not None and self.part.whole is not None:
            x.copy_(self.part.whole)
        else:
            self._whole_binding.read(x)
        for name, buffer in buffers.items():
            arena.extra(name).copy_(buffer)
        for name in self._untrained.keys() & arena.plan.extra.keys():
            arena.extra(name).copy_(to_bytes(self._untrained[name]))
        for name in self._averages:
            arena.extra(AVERAGE + name).copy_(buffers[name])

    def _tell(self, arena: Arena) -> None:
        self.tables = SharedTables(arena.extra, self.worker_id)
        self.tables.tell_random_states(self.random_states)

    def share_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Puts the optimizer's state into shared memory: one momentum, one Adam step for all workers."""
        for name in self._shared_state:
            _, index, key = name.split(" ")
            parameter = optimizer.param_groups[0]["params"][int(index)]
            optimizer.state[parameter][key] = self.arena.extra(name)

    def restore(self, optimizer: torch.optim.Optimizer, expect: Callable[[int], None] = lambda _: None) -> int:
        """As in `Membership`; first calls `expect` with the number of parameters that the first group had."""
        return self._environment.taken + self._storage.load_worker(
            optimizer,
            self.arena.shared if not self.incarnation else None,
            expect,
            sizes=not self._algorithm.splits_update,
        )

    def batches(self) -> BatchShare:
        first = self.arena.load("next_batch")
        left = self._storage.left(first) if self._algorithm.in_rounds else Left(first, [])
        survivors = self.arena.group if self._algorithm.loses_steps else None
        share = BatchShare(self.arena.epoch_claims(), left, self._environment.batches_done, survivors=survivors)
        return share if self.part is None else share._replace(agreed=self.part.agreed)

    def enter(self, epoch: int) -> dict[str, Any] | None:
        arena = self.arena
        if not self.incarnation:
            return {}
        if arena.newcomers is None:
            return None if epoch < arena.epoch_claims().newest() else {}
        group = arena.group
        given = arena.newcomers.enter(
            epoch,
            newest=lambda: arena.load("epoch"),
            is_over=lambda: bool(arena.load("abort")) or arena.all_ended(),
            is_dead=group.is_dead,
        )
        if given is None:
            return None
        last = arena.shared.last_version_of(self.worker_id)
        recorded = max(arena.ring(self.worker_id).newest_version, arena.load("initial_version"))
        arena.shared.enter(given["giver"])
        arena.add("unrecorded", int((arena.shared.version if last is None else last) > recorded))
        group.enter(given["group"])
        arena.mark_back(self.worker_id)
        self._entered_in = given["deal"]["epoch"]
        return given

    @property
    def _has_entered(self) -> bool:
        newcomers = self.arena.newcomers
        return newcomers is None or newcomers.has_entered(self.worker_id, self.incarnation)

    # Checkpoints

    def reach_epoch(self, epoch: int) -> None:
        self._sums.epoch = epoch

    def take_part(self, epoch: int) -> None:
        if self.incarnation:
            self._environment.supervisor.send(Entered(epoch))

    def begin_epoch(self, epoch: int | None, first_batch: int, state: LoopState, *, leads: bool, step: int = 0) -> None:
        if epoch is not None:
            self.arena.store("epoch", max(epoch, self.arena.load("epoch")))
            if self.worker_id == 0:
                self._put_buffers()  # for workers that replace others
        if epoch != 0 and self._environment.checkpoint is not None:
            self.save_epoch(epoch, first_batch, state, parameters=leads, step=step)

    def save_epoch(self, epoch: int | None, number: int, state: LoopState, *, parameters: bool, step: int = 0) -> None:
        """Saves this worker's part of checkpoint `number`, if the supervisor wants one as this epoch or step begins."""
        is_due = epoch is not None and self.arena.load("checkpoint_epoch") in (-1, epoch)
        is_due |= 0 < step == self.arena.load("checkpoint_step")
        if self._environment.checkpoint is None or not is_due or epoch == self._entered_in:  # it began before
            return
        kept = self.arena.epoch_claims().least_kept()  # claimed ahead by a worker that is still in the epoch before
        next_batch = min(number, number if kept is None else kept, number if state.left is None else state.left.least)
        is_first = self.part is None or self.part.is_recorded
        values = (lambda: self._memory.parameters(next_batch)) if parameters and is_first else None
        if self._storage.save(number, state, self._own_model, values) and parameters:
            for server in range(self.ports.num_servers):
                assert self.ports.mailbox is not None
                with contextlib.suppress(PeerLostError):  # this checkpoint then stays incomplete
                    self.ports.mailbox.send(self.ports.num_workers + server, Message("save", number))

    def save_end(self, state: LoopState) -> None:
        """As in `Membership`; the supervisor saves the parameters."""
        if self._environment.checkpoint is not None and self._has_entered:
            self._storage.save(None, state, self._own_model)

    @property
    def _own_model(self) -> Any:
        return self.arena.shared if self._algorithm.gossip else None

    # The end

    def has_updates(self) -> bool:
        """As in `Membership`; versions of workers' own models count averages, too."""
        shared = self.arena.shared
        return any(shared.updates()) if self._algorithm.gossip else shared.version > self.arena.load("initial_version")

    def final_model(self, out: torch.Tensor, given: BatchesTaken, left: LeftWeights | None) -> FinalMean | None:
        """As in `Membership`; does not wait for dead workers without a replacement, nor over 20 s in a stopped run."""
        arena, until_s = self.arena, float("inf")

        def wait_for(is_over: Callable[[], Any]) -> None:
            nonlocal until_s
            while not is_over():
                if self.stopped():
                    until_s = min(until_s, time.monotonic() + _STOPPED_DEADLINE_S)
                if time.monotonic() > until_s:
                    return
                time.sleep(_LOOK_EVERY_S)

        if not self.ports.num_servers:
            # Servers write their last checkpoint when all workers have left, with the run's result.
            self._memory.close_peers()
        arena.mark_lost(self.worker_id, self.incarnation)  # workers that wait in a round for this one stop waiting
        arena.mark_ended(self.worker_id)
        wait_for(arena.all_ended)
        if self.leads:
            self._put_final(left)
            arena.store("final", 1)
        wait_for(lambda: arena.load("final"))
        with torch.no_grad():
            for name, buffer in self._buffers.items():
                buffer.copy_(arena.extra(name))
        self._live.clear()
        is_common = self._algorithm.needs.kind == "replicated" and not self._algorithm.gossip
        if is_common and arena.plan.sharding is None:
            first, *_ = arena.shared.model_ids()  # in a stopped run, another may have made one more update
            arena.shared.model(first, out)
        else:
            self.snapshot(out)
        return None

    def make_whole(self, part: LayoutPart) -> None:
        """As in `Membership`: from shared memory, even if the run was stopped between two workers' updates."""
        if self.arena.plan.sharding is not None:
            whole = torch.empty(self.arena.plan.num_elements, dtype=self.binding.dtype)
            self.arena.shared.snapshot(whole)
            part.take_whole(whole)

    @property
    def leads(self) -> bool:
        return self.worker_id == (self.arena.shared.model_ids()[0] if self._algorithm.survivors_continue else 0)

    def _put_final(self, left: LeftWeights | None) -> None:
        if left is None:
            self._put_buffers()
            return
        self.arena.shared.replace(left.x)
        for name, value in zip(self._buffers, left.buffers, strict=True):
            for place in (name, AVERAGE + name):
                if place in self.arena.plan.extra:
                    self.arena.extra(place).copy_(value)

    def _put_buffers(self) -> None:
        for name, buffer in self._buffers.items() if self._has_own_buffers else ():
            self.arena.extra(name).copy_(buffer)

    def close(self, *, failed: bool = False) -> None:
        """As in `Membership`; the shared memory is freed with its last user."""
        self.arena.add("unresolved_exchanges", self.ports.counts.unresolved_exchanges)
        self.arena.store("delay", self.ports.counts.delay)
        self._memory.close()
        if not (failed and self.incarnation):  # else the supervisor decides what the others do
            self.arena.mark_gone(self.worker_id, self.incarnation)
        for buffer in self._buffers.values():
            buffer.data = buffer.data.clone()
