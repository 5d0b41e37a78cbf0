"""Supervises servers: starts them, replaces one that dies, ends them when the workers have ended."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.algorithms import registry
from paceline.memory.arena import Arena
from paceline.run.handshake import Handshake
from paceline.run.starter import Starter
from paceline.system import files
from paceline.system.exit_codes import how_ended
from paceline.system.limits import temporary_folder
from paceline.worker.process import Done, Failure, NotSaved, Ready
from paceline.worker.server_process import Restored, ServerMain, TakeOver, TookOver
from paceline.worker.supervised import Outcome, WorkerState

_FRUITLESS_RESTARTS = 3  # consecutive restarts without an update in between


class Servers:
    """The servers of a run; none if its algorithm has none.

    A server that dies is restarted from its last snapshot. The updates that it had applied since are lost: `lost` names them
    by shard and version. If it has a second copy, that takes its place at once without loss. Another copy starts then, and
    also when a copy dies.
    """

    def __init__(
        self,
        *,
        starter: Starter,
        handshake: Handshake,
        fail: Callable[[str, Failure], None],
        outcome: Outcome,
    ) -> None:
        self.states: list[WorkerState] = []  # of each server, then of each second copy
        self.lost: list[tuple[int, int, int]] = []  # (shard, first version, last version) of lost updates
        self.restarts = 0  # deaths that were answered by a restart
        self._starter, self._handshake, self._fail, self._outcome = starter, handshake, fail, outcome
        self._main: ServerMain | None = None
        self._arena: Arena  # from `begin` on
        self._folder: Path | None = None  # the run's
        self._own_folder: str | None = None
        self._restarted_at: dict[int, list[int]] = {}  # shard -> its version at each restart

    @property
    def all_ready(self) -> bool:
        return all(state.ready for state in self.states)

    def begin(self, arena: Arena, folder: Path | None) -> None:
        """Starts as many as the run's memory has room for."""
        self._arena, self._folder = arena, folder
        if not arena.plan.num_servers:
            return
        snapshots = None
        copies = arena.plan.needs.copies > 1
        if self._starter.own_processes and not copies:
            with files.writing(folder or Path(temporary_folder())):
                if folder is None:
                    folder = Path(tempfile.mkdtemp(prefix="paceline-"))
                    self._own_folder = str(folder)
                snapshots = folder.resolve() / "servers"
                shutil.rmtree(snapshots, ignore_errors=True)
                snapshots.mkdir(parents=True)
        assert self._handshake.algorithm is not None
        self._main = ServerMain(registry.spec(self._handshake.algorithm), snapshots)
        for server in range(arena.plan.num_server_programs):
            self.states.append(WorkerState(arena.plan.num_workers + server))
            self._start(self.states[-1])

    def _start(self, state: WorkerState) -> None:
        assert self._main is not None
        self._starter.start(state, self._handshake.algorithm, server=self._main)
        self._handshake.send_plan(state)  # it waits there until training begins

    def hear(self, state: WorkerState, message: Any) -> None:
        match message:
            case Ready():
                state.ready = True
            case NotSaved(is_snapshot=True):
                self._outcome.count_failed_snapshot(message.why)
            case NotSaved():
                self._outcome.leave_out(message.number, message.why)
            case Done():
                state.ended = True
            case Failure():
                state.ended = True
                if self._outcome.kind == "worker-lost":  # a worker that waited for this server reported the loss first
                    self._outcome.kind = ""
                self._fail(f"{self._name(state)}: ", message)
            case TookOver(shard_id=shard):
                self._outcome.notes.append(f"The second copy of shard {shard} took over; no update is lost.")
                self._restart(self._copy_of(state))
            case Restored(shard_id=shard, first_lost=first, last_lost=last):
                if last >= first:
                    self.lost.append((shard, first, last))
                self._outcome.notes.append(
                    f"Shard {shard} of the server was replaced; {last - first + 1} updates are lost."
                )

    def lose(self, state: WorkerState, *, run_ends: bool) -> None:
        """Replaces a dead server, unless earlier restarts were fruitless."""
        shard = self._shard(state)
        how = how_ended(state.exit_code)
        self._outcome.notes.append(f"{self._name(state)} {how}.")
        versions = self._restarted_at.setdefault(state.worker_id, [])
        versions.append(self._arena.shared.counts()[shard]["version"])
        fruitless = len(versions) > _FRUITLESS_RESTARTS and len(set(versions[-_FRUITLESS_RESTARTS - 1 :])) == 1
        if run_ends or not self.all_ready or fruitless:
            self._give_up(state)
            if not run_ends:
                when = "again and again" if fruitless else "before training began"
                self._fail(f"{self._name(state)} ", Failure("error", f"{how} {when}."))
            return
        self.restarts += 1
        copy = self._copy_of(state) if self._arena.plan.needs.copies > 1 else state
        if state is copy:
            self._restart(state)
        elif not self._take_over(state, copy):
            self._give_up(state)
            why = f"{how} while its second copy was dead or not up to date, so updates are lost"
            remedy = "start a new run with an out folder, which keeps checkpoints to resume from."
            if (folder := self._folder) is not None:
                remedy = f"resume from the last checkpoint in {folder}, by resume= in Python or --resume on the command line."
            self._fail(f"{self._name(state)} ", Failure("error", f"{why}: {remedy}"))

    def _give_up(self, state: WorkerState) -> None:
        """Leaves a dead server without a successor, and ends the write in which it was killed, for which others would wait."""
        state.lost = True
        self._outcome.torn_updates += self._arena.shared.recover(state.worker_id, state.incarnation)

    def _restart(self, state: WorkerState) -> None:
        state.incarnation += 1
        self._start(state)
        state.ready = True  # the run has begun: it does not wait

    def _take_over(self, dead: WorkerState, copy: WorkerState) -> bool:
        """Makes the copy's process the server if it has every answered update; returns whether it has.

        The next copy starts only once that process is published as the server; otherwise it would look for the dead one.
        """
        shard = self._shard(dead)
        if not copy.running or self._arena.shared.named_copy(shard) != copy.incarnation:
            return False
        self._arena.shared.name_copy(None, shard)
        dead.connection.close()
        dead.connection, dead.handle = copy.connection, copy.handle
        copy.connection, copy.handle, copy.lost = None, None, True
        dead.incarnation += 1
        with contextlib.suppress(OSError):  # it is dead, too: its end is the next news
            dead.connection.send(TakeOver(dead.incarnation))
        return True

    def close(self) -> None:
        """Removes the snapshots that are no longer needed."""
        if self._main is not None and self._main.snapshots is not None:
            shutil.rmtree(self._own_folder or self._main.snapshots, ignore_errors=True)
        del self._fail  # a cycle through the supervisor, which would keep the run's memory

    def _copy_of(self, server: WorkerState) -> WorkerState:
        return self.states[self._shard(server) + self._arena.plan.num_servers]

    def _shard(self, state: WorkerState) -> int:
        return (state.worker_id - self._arena.plan.num_workers) % self._arena.plan.num_servers

    def _name(self, state: WorkerState) -> str:
        plan, shard = self._arena.plan, self._shard(state)
        is_copy = state.worker_id >= plan.num_workers + plan.num_servers
        return f"The second copy of shard {shard}" if is_copy else f"Shard {shard} of the server"
