"""The supervisor's part for servers: starts them, replaces one that dies, ends them when the workers have ended."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.algorithms import registry
from paceline.arena import Arena
from paceline.server_process import Restored, ServerMain
from paceline.supervised import Outcome, WorkerState
from paceline.worker_process import Done, Failure, Ready

__all__ = ["Servers"]

_FRUITLESS_RESTARTS = 3  # in a row, without an update in between


class Servers:
    """The servers of a run; none where its algorithm has none.

    A server that dies is started again and goes on from its last snapshot. The updates that it had applied since are lost:
    `lost` names them by shard and version.

    Args:
        launch: starts a process (or thread) for a server with this main function.
        admit: sends it the run's memory.
        fail: ends the run with a reason.
        outcome: what happens is noted there.

    Attributes:
        states: of each server.
        lost: (shard, first version, last version) of lost updates.
        restarts: deaths that were answered.
    """

    def __init__(
        self,
        *,
        launch: Callable[[WorkerState, ServerMain], None],
        admit: Callable[[WorkerState], None],
        fail: Callable[[str, Failure], None],
        outcome: Outcome,
    ) -> None:
        self.states: list[WorkerState] = []
        self.lost: list[tuple[int, int, int]] = []
        self.restarts = 0
        self._launch = launch
        self._admit = admit
        self._fail = fail
        self._outcome = outcome
        self._main: ServerMain | None = None
        self._arena: Arena | None = None
        self._own_folder: str | None = None
        self._restarted_at: dict[int, list[int]] = {}  # shard -> its version at each restart

    @property
    def all_ready(self) -> bool:
        """Whether every server has mapped the run's memory."""
        return all(state.ready for state in self.states)

    def begin(self, algorithm: Any, arena: Arena, folder: Path | None, *, own_processes: bool) -> None:
        """Starts as many as the run's memory has room for."""
        self._arena = arena
        if not arena.plan.num_servers:
            return
        snapshots = None
        if own_processes:
            if folder is None:
                folder = Path(tempfile.mkdtemp(prefix="paceline-"))
                self._own_folder = str(folder)
            snapshots = folder.resolve() / "servers"
            shutil.rmtree(snapshots, ignore_errors=True)
            snapshots.mkdir(parents=True)
        self._main = ServerMain(registry.spec(algorithm), snapshots)
        for shard in range(arena.plan.num_servers):
            self.states.append(WorkerState(arena.plan.num_workers + shard))
            self._start(self.states[-1])

    def _start(self, state: WorkerState) -> None:
        assert self._main is not None
        self._launch(state, self._main)
        self._admit(state)

    def hear(self, state: WorkerState, message: Any) -> None:
        """Takes one message."""
        match message:
            case Ready():
                state.ready = True
            case Done():
                state.ended = True
            case Failure():
                state.ended = True
                self._fail(f"Shard {self._shard(state)} of the server: ", message)
            case Restored(shard_id=shard, first_lost=first, last_lost=last):
                if last >= first:
                    self.lost.append((shard, first, last))
                self._outcome.notes.append(
                    f"Shard {shard} of the server was replaced; {last - first + 1} updates are lost."
                )

    def lose(self, state: WorkerState, *, run_ends: bool) -> None:
        """A server died: another takes its place, unless that has not helped so far."""
        shard = self._shard(state)
        assert self._arena is not None
        code = state.handle.exitcode
        how = f"was ended by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
        self._outcome.notes.append(f"Shard {shard} of the server {how}.")
        versions = self._restarted_at.setdefault(shard, [])
        versions.append(self._arena.shared.counts()[shard]["version"])
        fruitless = len(versions) > _FRUITLESS_RESTARTS and len(set(versions[-_FRUITLESS_RESTARTS - 1 :])) == 1
        if run_ends or not self.all_ready or fruitless:
            state.lost = True
            if not run_ends:
                when = "again and again" if fruitless else "before training began"
                self._fail(f"Shard {shard} of the server: ", Failure("error", f"{how} {when}."))
            return
        self.restarts += 1
        state.incarnation += 1
        self._start(state)
        state.ready = True  # the run has begun: it does not wait

    def close(self) -> None:
        """Removes the snapshots, which nobody will go on from."""
        if self._main is not None and self._main.snapshots is not None:
            shutil.rmtree(self._own_folder or self._main.snapshots, ignore_errors=True)

    def _shard(self, state: WorkerState) -> int:
        assert self._arena is not None
        return state.worker_id - self._arena.plan.num_workers
