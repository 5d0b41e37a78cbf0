"""Starts workers on this machine, watches them, and collects their results."""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing import connection as mp_connection
from pathlib import Path
from typing import Any

import torch

from paceline.algorithms import Algorithm, registry
from paceline.errors import PacelineError
from paceline.memory.arena import Arena
from paceline.memory.waiting import wake
from paceline.ports.newcomers import STOPPED
from paceline.records.checkpoint_contents import Parameters
from paceline.run.earlier_part import EarlierPart
from paceline.run.handshake import Handshake
from paceline.run.loops import Loop
from paceline.run.servers import Servers
from paceline.run.spool import Spool
from paceline.run.starter import Starter
from paceline.run.view_changes import came, left
from paceline.system.exit_codes import how_ended
from paceline.system.interrupts import noted_by
from paceline.worker.gathering import Contribution, Entered, Gathering, Left
from paceline.worker.process import Done, Failure, Hello, NotSaved, Ready
from paceline.worker.supervised import Outcome, WorkerState, hung, is_replica_lost

_POLL_S = 0.05
_INTERRUPTED_GRACE_S = 15.0  # Slurm and Kubernetes give half a minute, in which files are written, too
_LAST_ROUND_S = 10.0  # of these 15 s, in which workers can end the last round together
_RUN_HAS_ENDED = "The run has ended."
_HINT = "; what it printed says why. A script that launches must do so under `if __name__ == '__main__':`."
_SERVERS_DEADLINE_S = 30.0
_START_DEADLINE_S = 300.0  # importing the user's modules and loading data; a hang beyond it is an error


class Supervisor:
    """Runs a loop in every worker and sees it through to the end.

    It notices a death at once (a process's sentinel), repairs what the dead worker held, and continues with the others if the
    algorithm can; it may restart the dead one. It never computes gradients.

    Args:
        folder: the run's folder, for the spool of records and checkpoints; None keeps records in memory only.
        on_tick: called about every 50 ms with the supervisor; may call `stop`.
        on_end: called once when all workers and servers have ended, possibly before their processes have.
    """

    def __init__(
        self,
        loop: Loop,
        folder: Path | None,
        earlier: EarlierPart,
        *,
        on_tick: Callable[[Supervisor], None] | None,
        on_end: Callable[[Supervisor], None] | None,
    ) -> None:
        config = loop.config
        self.loop = loop
        self.num_workers = config.workers
        self.outcome = Outcome()
        self.spool = Spool(folder, config.workers, self.outcome.notes.append)
        self.started_s: float | None = None  # when all workers were ready and were told to go
        self.ready_after_s: float | None = None  # how long that took
        self.workers = [WorkerState(worker_id) for worker_id in range(config.workers)]
        self._gathering = Gathering(self.workers)
        self._starter = Starter(loop, folder, earlier)
        self._restarts_left = config.restarts
        self._on_tick = on_tick
        self._on_end = on_end
        self._handshake = Handshake(self.workers, loop, earlier.saved)
        self.servers = Servers(starter=self._starter, handshake=self._handshake, fail=self.fail, outcome=self.outcome)
        self._folder = folder
        self._first_death, self._failed_s = "", float("inf")

    # Life of the run

    def run(self) -> None:
        """Starts the workers and returns when all have ended; `outcome` says how. Ctrl-C stops them and is raised again.

        A signal that `interrupts.noted` has noted is raised here, between two checks of the workers.
        """
        begun_s = time.monotonic()
        interruption = noted_by()
        intra_op_threads = torch.get_num_threads()
        try:
            if not self._starter.own_processes:
                torch.set_num_threads(self._starter.environment.intra_op_threads)
            for worker in self.workers:
                self._start(worker)
            while any(worker.running for worker in self.workers):
                self._wait_for_news()
                interruption.raise_if_any()
                if self.started_s is None and time.monotonic() - begun_s > _START_DEADLINE_S:
                    missing = [worker.worker_id for worker in self.workers if not worker.ready]
                    raise PacelineError(
                        f"Workers {missing} were not ready within {_START_DEADLINE_S:.0f} s; check what they import "
                        "and load."
                    )
                if self.ready_after_s is None and self.started_s is not None:
                    self.ready_after_s = self.started_s - begun_s
                if time.monotonic() - self._failed_s > _INTERRUPTED_GRACE_S:
                    self.outcome.name_hung(hung(self.workers, self.arena))
                    self._end_all(grace_s=0.0)
                self.spool.drain()
                if self._on_tick is not None and self.started_s is not None:
                    self._on_tick(self)
            self._end_servers()
            if self._on_end is not None and self.started_s is not None:
                self.spool.drain()
                self._on_end(self)
        except BaseException:
            self._interrupt()
            raise
        finally:
            self.spool.drain()
            self._end_all(grace_s=30.0)
            self.servers.close()
            self.spool.close()
            self._on_tick = self._on_end = None  # they hold the run that holds us, and so its shared memory
            torch.set_num_threads(intra_op_threads)

    @property
    def algorithm(self) -> Algorithm | None:
        """How the workers agree; None until worker 0 names it, if the launcher does not."""
        return self._handshake.algorithm

    @property
    def arena(self) -> Arena | None:
        """The workers' shared memory; None until worker 0 has described its model."""
        return self._handshake.arena

    @property
    def goes_on(self) -> bool:
        """Whether workers in rounds go on without a dead one."""
        algorithm, arena = self.algorithm, self.arena
        return algorithm is not None and algorithm.survivors_continue and arena is not None and arena.axes is None

    def _has_entered(self, worker: WorkerState) -> bool:
        newcomers = self.arena.newcomers if self.arena is not None else None
        return newcomers is None or newcomers.has_entered(worker.worker_id, worker.incarnation)

    def stop(self, *, at_once: bool = False) -> None:
        """Asks every worker to end at its next step or wait; those in rounds end after the same one, unless `at_once`."""
        if self.arena is not None:
            in_rounds = self.arena.plan.seats.num_parts > 1 or (self.algorithm and self.algorithm.in_rounds)
            self.arena.stop(at_once=at_once or not (self.started_s and in_rounds))

    def _interrupt(self) -> None:
        """Stops a run in the middle; workers that are training end as they would at the end, and say so."""
        begun_s = time.monotonic()
        self.stop()
        self._restarts_left = 0
        if self.started_s is not None:
            self._wait_for(self.workers, begun_s + _LAST_ROUND_S)
            self.stop(at_once=True)
            self._wait_for(self.workers, begun_s + _INTERRUPTED_GRACE_S)
        self._end_servers()
        self._end_all(grace_s=0.0)

    def parameters(self, next_batch: int, of: int | None = None) -> Parameters:
        """A copy of the current parameters and buffers, for a checkpoint that continues at `next_batch`.

        With `of`, the parameters are those of this worker's copy of the model.
        """
        assert self.arena is not None
        x, version = self.arena.checkpointed(of)
        buffers = {name: self.arena.extra(name).clone() for name in self.arena.plan.extra if name.startswith("buffer ")}
        return Parameters(x, version, next_batch, buffers, self.arena.division, self.arena.plan.memory_order)

    def _end_servers(self) -> None:
        """Lets the servers end once they have written the workers' last messages."""
        if self.arena is None:
            return
        self.arena.store("workers_done", 1)
        self._wait_for(self.servers.states, time.monotonic() + _SERVERS_DEADLINE_S)

    def _start(self, worker: WorkerState) -> None:
        worker.waits = worker.incarnation > 0 and self.goes_on
        taken = self.spool.num_written(worker.worker_id) if worker.incarnation else 0
        self._starter.start(worker, self.algorithm, taken=taken)

    def _wait_for(self, states: list[WorkerState], until_s: float) -> None:
        """Receives messages from all workers until they have ended, or until `until_s`."""
        while time.monotonic() < until_s and any(one.running for one in states):
            self._wait_for_news()

    def _wait_for_news(self) -> None:
        sources: dict[Any, WorkerState] = {}
        for worker in [*self.workers, *self.servers.states]:
            if worker.running:
                sources[worker.connection] = worker
                if self._starter.own_processes:
                    sources[worker.handle.sentinel] = worker
        news = mp_connection.wait(list(sources), timeout=_POLL_S)
        for worker in self.workers:
            if worker.waits and self._has_entered(worker):
                worker.waits = False
                self.outcome.view_changes += came(self.arena, worker)
                self.outcome.notes.append(f"Worker {worker.worker_id} was replaced.")
        for source in news:
            worker = sources[source]
            if worker.running:
                self._hear(worker)
        self._gathering.settle()
        self._expect_newcomers()

    def _hear(self, worker: WorkerState) -> None:
        """Handles one message; a closed connection without a goodbye is a death."""
        try:
            if not worker.connection.poll():
                if self._starter.own_processes and not worker.handle.is_alive() and not worker.connection.poll():
                    self._lose(worker)
                return
            message = worker.connection.recv()
        except (EOFError, ConnectionResetError):
            self._lose(worker)
            return
        if worker in self.servers.states:
            self.servers.hear(worker, message)
            self._start_when_ready()
            return
        match message:
            case Hello():
                self._welcome(worker, message)
            case Ready():
                worker.ready = True
                self._handshake.count_ready(worker)
                self._start_when_ready()
            case NotSaved():
                self.outcome.leave_out(message.number, message.why)
            case Contribution() | Entered() | Left():
                self._gathering.hear(worker, message)
            case Done():
                worker.ended = True
                self._tell_waiters(worker)
                self._handshake.answer()
            case Failure():
                if worker.waits or message.kind in ("not let in", "not replaced"):
                    worker.handle.join()
                    self._lose_newcomer(worker, message)
                    return
                mates = self.arena.plan.seats.mates(worker.worker_id) if self.arena is not None else range(0)
                if message.kind == "worker-lost" and is_replica_lost(self.workers, mates):
                    self._lose(worker, "left, as another worker of its replica is lost")
                    return
                worker.ended, worker.failure = True, message
                self.fail(f"Worker {worker.worker_id}: ", message)
                self._tell_waiters(worker)

    # Start

    def _welcome(self, worker: WorkerState, hello: Hello) -> None:
        if self.outcome.kind:
            self._handshake.refuse(worker, _RUN_HAS_ENDED)
            return
        known = self.arena
        self._handshake.welcome(worker, hello)
        if self.arena is not known:
            assert self.arena is not None
            self.spool.open(self.arena)
            own = self.algorithm.note(len(self.workers)) if self.algorithm is not None else ""
            self.outcome.notes += [note for note in (self._handshake.note, own) if note]
            self.servers.begin(self.arena, self._folder)

    def _start_when_ready(self) -> None:
        all_ready = all(one.ready or not one.running for one in self.workers) and self.servers.all_ready
        if self.started_s is None and all_ready:
            assert self.arena is not None
            self.started_s = time.monotonic()
            self.arena.store("go", 1)
            wake(self.arena.address("go"))

    # Ends, good and bad

    def fail(self, who: str, failure: Failure) -> None:
        """Ends the run. The first failure is its outcome; the cause of a loss replaces an earlier report of the loss."""
        if failure.kind == "worker-lost" or (self.algorithm is not None and self.algorithm.same_batches):
            # Another worker may hang.
            self._failed_s = min(self._failed_s, time.monotonic())
        deaths = [] if self.goes_on else self.outcome.workers_lost  # that can explain why a worker is missing
        is_missed = self.outcome.kind == "worker-lost" and not deaths
        if self.outcome.kind == "" or (is_missed and failure.kind != "worker-lost"):
            self.outcome.name = "diverged" if failure.kind == "diverged" else "crashed"
            self.outcome.kind = failure.kind
            self.outcome.reason = ("" if failure.kind in ("worker-lost", "usage") else who) + failure.message
            if failure.kind == "worker-lost" and deaths:
                # The reporting worker may have waited for a survivor.
                self.outcome.reason = f"{' '.join(self.outcome.notes)} {failure.message}"
            self.outcome.trace = failure.trace
        self._handshake.refuse_waiting(_RUN_HAS_ENDED)
        if self.arena is None:
            self._end_all(grace_s=0.0)
        self.stop(at_once=True)

    def _lose(self, worker: WorkerState, how: str = "") -> None:
        """Repairs a dead worker's locks; then continues, restarts the worker, or ends the run with its name."""
        worker.handle.join()
        if worker in self.servers.states:
            self.servers.lose(worker, run_ends=self.outcome.kind != "" or not any(one.running for one in self.workers))
            return
        worker.lost = True
        self.outcome.workers_lost.append(worker.worker_id)
        who, code = f"Worker {worker.worker_id}: ", worker.exit_code
        how = how or how_ended(code)
        self.outcome.notes.append(note := f"Worker {worker.worker_id} {how}.")
        self._first_death = self._first_death or note
        if self.outcome.kind == "worker-lost":  # a worker that waited for it, directly or not, reported the loss first
            self.outcome.reason = f"{note} {self.outcome.reason}"
        if self.arena is None or self.started_s is None:
            hint = _HINT if code is not None and code > 0 else "."
            self.fail(who, Failure("error", f"{how} before training began{hint}"))
            return
        self._handshake.lose(worker)
        assert self.algorithm is not None
        self._repair(worker)
        if "kill" in self.algorithm.tolerates or self.goes_on:
            self._go_on_without(worker)
        elif self.num_workers == 1 or (self.arena.collectives is None and not self.algorithm.needs.mailbox):
            self.fail(who, Failure("error", f"{how}; {registry.spec(self.algorithm)} cannot continue without it."))
        if worker.lost and not self.goes_on:  # errors of those who cannot go on say what they were waiting for
            self.arena.mark_gone(worker.worker_id)
        if not any(one.takes_part or (one.ended and not one.waits) for one in self.workers):
            self.fail("", Failure("error", f"{self._first_death} By now no worker is left."))

    def _lose_newcomer(self, worker: WorkerState, message: Failure) -> None:
        worker.lost = True
        self._repair(worker)
        is_final = message.kind in ("not replaced", "usage")
        self._restarts_left += message.kind == "not let in"  # it was another worker that failed
        what = " is not replaced" if is_final else "'s replacement could not join"
        self.outcome.notes.append(f"Worker {worker.worker_id}{what}: {message.message.rstrip('.')}.")
        self._go_on_without(worker, replace=not is_final)

    def _repair(self, worker: WorkerState) -> None:
        assert self.arena is not None
        if self.arena.shared.recover(worker.worker_id, worker.incarnation):
            self.outcome.torn_updates += not worker.waits
        self.arena.epoch_claims().release(worker.worker_id, None, is_left=False)

    def _go_on_without(self, worker: WorkerState, *, replace: bool = True) -> None:
        """Lets the others go on, and starts a replacement if there may be one."""
        assert self.arena is not None
        are_others_left = not self.goes_on or any(one.takes_part for one in self.workers)
        is_replaced = replace and self._restarts_left > 0 and are_others_left
        self._expect_newcomers(more=is_replaced)
        if self.goes_on and worker.waits:  # they may have let it in already
            self.arena.group.mark_lost(worker.worker_id, worker.incarnation, is_dead=True)
            self.arena.mark_ended(worker.worker_id)
        elif self.goes_on:
            self.arena.mark_gone(worker.worker_id, worker.incarnation, others_continue=True)
        if self.goes_on:
            self.outcome.view_changes += left(self.arena, worker, self._gathering.num_answered(worker))
        if is_replaced:
            self._restarts_left -= 1
            self.outcome.restarts += 1
            worker.incarnation += 1
            self._start(worker)

    def _expect_newcomers(self, *, more: bool = False) -> None:
        """Tells workers how many replacements they can wait for; `more`: one that is about to start, too."""
        if self.arena is not None and self.arena.newcomers is not None:
            number = more + sum(one.waits and one.running for one in self.workers)
            self.arena.newcomers.expect(STOPPED if self.arena.is_stopped else number)

    def _tell_waiters(self, worker: WorkerState) -> None:
        """Wakes workers that wait, in lockstep or at the end, for a worker that has left."""
        if self.arena is not None:
            self.arena.mark_gone(worker.worker_id, worker.incarnation)

    def _end_all(self, grace_s: float) -> None:
        """Joins every worker; those that do not end within `grace_s` are killed."""
        until_s = time.monotonic() + grace_s
        for worker in [*self.workers, *self.servers.states]:
            worker.join(until_s, is_process=self._starter.own_processes)
