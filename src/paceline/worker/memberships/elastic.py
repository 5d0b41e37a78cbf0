"""A worker in a run whose workers come and go: it has its own memory, sends messages, and the others continue without it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import nn

from paceline.algorithms import Algorithm
from paceline.errors import DivergedError, ExcludedError, NotReplacedError, UsageError, WorkerLostError, first_line
from paceline.membership.claims import JoinedClaims
from paceline.membership.elastic import JoinedRun, trains_in_rounds
from paceline.membership.final_mean import BatchesTaken, FinalMean, LeftWeights
from paceline.membership.peers import Peers
from paceline.optim.flat import FlatBinding
from paceline.optim.model_state import dense_buffers, from_bytes, state_of, to_bytes
from paceline.records.step_record import PackedRecords
from paceline.transport.device import StagedCollectives, StagedMailbox
from paceline.transport.message_collectives import MessageCollectives
from paceline.transport.message_newcomers import MessageNewcomers
from paceline.transport.message_views import MessageViews
from paceline.transport.round_header import Purpose
from paceline.worker.gathering import Call, CollectiveGatherer, Gatherer
from paceline.worker.memberships.membership import BatchShare, Membership
from paceline.worker.memberships.memory import WorkerMemory, copies_of, own_arena
from paceline.worker.memberships.written import write_end, write_state


def report(run: JoinedRun, folder: Path | None, state: str, **figures: Any) -> None:
    """Writes a worker's state for `paceline launch` into its folder, if there is one."""
    if folder is None:
        return
    figures |= {"algorithm": run.spec, "notes": run.notes, "unresolved_exchanges": run.counts.unresolved_exchanges}
    write_state(folder, run.worker_id, run.incarnation, state, **figures)


class ElasticMembership(Membership):
    """A worker with its own model; the run's model is the mean of all.

    A worker that joins late begins with a neighbour's model or, in rounds, with what the others have when they let it in.

    Raises:
        WorkerLostError: the others did not arrive within the deadline.
    """

    def __init__(
        self,
        run: JoinedRun,
        folder: Path | None,  # for its records and model; None: nothing is written
        model: nn.Module,
        algorithm: Algorithm,
        random_states: tuple[int, ...] = (),
        *_: Any,
    ) -> None:
        self._run = run
        self._folder = folder
        self.worker_id, self.num_workers, self.incarnation = run.worker_id, run.num_workers, run.incarnation
        self.random_states = random_states
        self.deals_batches = not run.own_data
        self.tables = run.tables
        self.gatherer: Gatherer = _NobodyToWaitFor()
        self.binding = FlatBinding(model.parameters(), on_any_device=True)
        self._untrained = [one for one in state_of(model).values() if not one.requires_grad]
        copies, buffers = copies_of(self.binding, algorithm), dense_buffers(model)
        peers = run.meet(list(state_of(model).values()), random_states)
        if run.is_stale and not run.is_late and trains_in_rounds(algorithm):
            peers.close()
            raise WorkerLostError("start: worker 0 ended before all workers had its model: start them again.")
        arena = own_arena(self.binding, algorithm, is_private=copies is not None)
        self._records = records = PackedRecords()
        incarnation = run.incarnation
        self._memory = memory = WorkerMemory(
            self.binding, buffers, algorithm, arena, incarnation=incarnation, recorder=records, copies=copies
        )
        memory.ports = replace(
            memory.ports,
            worker_id=run.worker_id,
            num_workers=run.num_workers,
            random=Random(f"{self.seed}/{run.worker_id}"),
            counts=run.counts,
            untrained=[*buffers.values(), *(one for one in model.parameters() if not one.requires_grad)],
        )
        memory.has_met(peers, max(1, run.incarnation) if run.is_stale else 0)
        self._collectives: MessageCollectives | None = None
        self._has_entered, self._has_written = not run.is_late, False
        if trains_in_rounds(algorithm):
            rounds: Any = self._collectives_over(peers)
            rounds.counts = run.counts
            self._collectives = rounds
            self._newcomers = self._newcomers_over(peers, rounds)
            views: Any = rounds if algorithm.needs.views else None
            staged = StagedCollectives(rounds, copies) if copies is not None else rounds
            mailbox = StagedMailbox(views, copies) if copies is not None and views is not None else views
            memory.ports = replace(
                memory.ports, mailbox=mailbox, views=views, collectives=staged, newcomers=self._newcomers
            )
            self.gatherer = CollectiveGatherer(
                rounds, run.worker_id, run.num_workers, lambda: run.leaves, lambda: not self._has_entered
            )
        self._algorithm = algorithm
        self.ports, self.replica, self.own_records = memory.ports, memory.replica, records.array
        self.stopped, self.snapshot = memory.stopped, memory.snapshot
        run.heed_signals(lambda: arena.store("abort", 1))
        self._claims: JoinedClaims | None = None

    def _collectives_over(self, peers: Peers) -> MessageCollectives:
        run = self._run
        rounds = MessageViews if self._memory.algorithm.needs.views else MessageCollectives
        return rounds(
            peers.mailbox,
            run.worker_id,
            run.num_workers,
            ends=peers.ends,
            incarnations=[peers.incarnation(one) for one in range(run.num_workers)],
            deadline_s=run.silence_s,
            stopped=lambda: run.leaves,
        )

    def _newcomers_over(self, peers: Peers, collectives: MessageCollectives) -> MessageNewcomers:
        run, shared, untrained = self._run, self._memory.ports.shared, self._untrained
        return MessageNewcomers(
            peers.mailbox,
            collectives,
            run.incarnation,
            model=lambda: {"version": shared.version, "model": [to_bytes(one) for one in (shared.x, *untrained)]},
            deadline_s=run.deadline_s,
            stopped=lambda: run.leaves,
            min_workers=run.min_workers,
        )

    @property
    def leads(self) -> bool:
        """As in `Membership`: in rounds every worker, as those before it may die before the end."""
        return self._collectives is not None or not self.worker_id

    def batches(self) -> BatchShare:
        """As in `Membership`: in rounds from the first batch on, else the next batch number of all workers."""
        assert self._memory.peers is not None
        self._claims = self._run.claims(self._memory.peers.mailbox)
        if self._collectives is not None:
            return BatchShare(self._claims, survivors=self._collectives if self._algorithm.loses_steps else None)
        return BatchShare(self._claims)

    def enter(self, epoch: int) -> dict[str, Any] | None:
        if self._collectives is None:
            assert self._claims is not None
            return None if epoch < self._claims.newest() else {}
        if self._has_entered:
            return {}
        given = self._newcomers.enter(epoch)
        if given is None:
            return None
        shared = self._memory.ports.shared
        x = torch.empty_like(shared.x)
        for tensor, value in zip([x, *self._untrained], given["model"], strict=True):
            from_bytes(tensor, value)
        shared.restore(given["version"], x)
        self._collectives.enter(given["group"])
        self._has_entered = True
        return given

    def has_updates(self) -> bool:
        """As in `Membership`: the worker's own memory says nothing about others' models."""
        return False

    def final_model(self, out: torch.Tensor, given: BatchesTaken, left: LeftWeights | None) -> FinalMean | None:
        self.snapshot(out)
        if self._run.leaves:
            return FinalMean(out, float("nan"), 1)  # the others go on without this one
        self._run.end(has_taken_part=self._has_entered or self._run.counts.averages > 0)
        if self._collectives is not None:
            return self._end_in_rounds(self._collectives, out, left)
        # Whether every batch that this worker's place was given was claimed at the join point, by this process.
        counts_all = not self._run.is_late and (self._claims is None or not self._claims.by_ids)
        return self._memory.final_mean(out, self._run.deadline_s, given if counts_all else BatchesTaken(-1), left)

    def _end_in_rounds(self, collectives: MessageCollectives, out: torch.Tensor, left: LeftWeights | None) -> FinalMean:
        """The mean of all models, or the weights and buffers that the first living worker's loop has left."""
        collectives.purpose = Purpose.END
        distance = torch.zeros(1, dtype=torch.float64)
        if self._algorithm.gossip:
            own, vectors = out.clone(), self.ports.collectives
            assert vectors is not None
            vectors.all_reduce_mean(out, weight=1.0)
            distance += float((own.double() - out).square().sum())
            collectives.all_reduce_mean(distance, weight=1.0)
        tensors = [out, *(one.detach() for one in self._memory.buffers.values())]
        is_taken = False
        while not is_taken:
            has_left = torch.zeros(self.num_workers)
            has_left[self.worker_id] = left is not None
            collectives.start_all_reduce(has_left).wait()
            lead = collectives.members[0]
            if not has_left[lead]:
                break
            given = [left.x, *left.buffers] if left is not None and lead == self.worker_id else None
            raw = [torch.zeros(one.nbytes, dtype=torch.uint8) for one in tensors]
            if given is not None:
                raw = [to_bytes(one).clone() for one in given]
            for handle in [collectives.start_all_reduce(one) for one in raw]:
                handle.wait()
            if is_taken := lead in collectives.members:  # else it has died, and all have zeros
                for tensor, value in zip(tensors, raw, strict=True):
                    from_bytes(tensor, value)
        return FinalMean(out, float(distance), len(collectives.members))

    def write_end(self, model: nn.Module, mean: FinalMean | None) -> None:
        if mean is not None:
            if self._folder is not None:  # every worker has the same model
                self._write_end(self._folder, model)
            figures = {"consensus_distance": mean.consensus_distance, "models_in_mean": mean.num_models}
            report(self._run, self._folder, "ended", **figures, batches_not_given=mean.num_not_given)

    def close(self, *, failed: bool) -> None:
        """As in `Membership`; raises a pending interruption. If an error ends the worker, its records are kept."""
        error = sys.exc_info()[1]
        match error:
            case NotReplacedError():
                self._end_early("not let in" if error.can_try_again else "not replaced", error.why)
            case ExcludedError():
                self._end_early("excluded", error.why)
            case DivergedError():
                self._end_early("diverged", str(error))
            case WorkerLostError():
                self._end_early("without others", str(error))
            case Exception() if failed:
                self._end_early("failed", f"{type(error).__name__}: {first_line(error)}.")
            case _:
                pass
        if self._collectives is not None and (
            self._run.leaves
            or not self._has_entered
            or self._collectives.has_left
            or isinstance(error, NotReplacedError)
        ):
            self._collectives.leave()
        self._memory.close()
        self._run.close()

    def _end_early(self, state: str, why: str) -> None:
        if self._folder is not None and not self._has_written and len(self._records.array()):
            self._write_end(self._folder, None)
        report(self._run, self._folder, state, reason=why)

    def _write_end(self, folder: Path, model: nn.Module | None) -> None:
        write_end(folder, self.worker_id, self._records.array(), model, incarnation=self.incarnation)
        self._has_written = True


class _NobodyToWaitFor:
    def gather(self, value: Any, call: Call | None = None) -> list[Any]:
        raise UsageError(
            "Workers that join a run come and go, so worker.sum and worker.mean cannot know which workers to wait "
            "for: print each worker's own figure, or start the workers with paceline.launch or torchrun."
        )

    def leave(self) -> None:
        pass
