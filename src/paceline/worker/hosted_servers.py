"""Servers as threads of worker 0, for launchers that start workers but no servers."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from paceline.algorithms import Algorithm
from paceline.errors import RunStopped
from paceline.membership.peers import Peers
from paceline.memory.arena import Arena
from paceline.system.clock import RealClock
from paceline.transport.keys import Keys


@dataclass(eq=False)
class HostedServers:
    """The servers of a run, in this process. They end with it and have no successors."""

    algorithm: Algorithm  # that needs the servers
    arena: Arena  # this worker's; its vector is the run's
    store: Any  # where the members of the run meet
    seed: int
    _: KW_ONLY
    host: str | None  # address of this machine by which the workers reach it; None: they are on this machine
    key: Path | Keys | None  # the run's key file, or its contents; needed with `host`

    def __post_init__(self) -> None:
        self._ending = threading.Event()
        self._errors: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._run, args=(shard,), name=f"paceline-server-{shard}", daemon=True)
            for shard in range(self.arena.plan.num_servers)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, shard_id: int) -> None:
        plan = self.arena.plan
        view = Arena(self.arena.segment, plan, plan.num_workers + shard_id)
        ports = view.server_ports(RealClock(), self.seed)
        try:
            peers = Peers(
                self.store,
                view.participant_id,
                plan.num_workers,
                ports.counts,
                self._ending.is_set,
                num_servers=plan.num_servers,
                host=self.host,
                key=self.key,
            )
            with contextlib.closing(peers), torch.no_grad(), contextlib.suppress(RunStopped):
                self.algorithm.serve(shard_id, replace(ports, mailbox=peers.mailbox))
        except BaseException as error:  # its closed mailbox has told the workers; `close` says why
            self._errors.append(error)

    def close(self) -> None:
        """Ends the servers once no worker needs them; raises the error of a server that failed."""
        self._ending.set()
        for thread in self._threads:
            thread.join()
        if self._errors:
            raise self._errors[0]
