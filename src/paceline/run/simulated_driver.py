"""The common part of all simulated runs: the machine, the host that simulates it, the folder."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from paceline.algorithms import Algorithm
from paceline.observe.report import write_run
from paceline.ports.ports import Ports
from paceline.ports.views import Survivors
from paceline.records.run_data import RunData
from paceline.simulator.cluster import Cluster
from paceline.simulator.collectives import SimulatedCollectives
from paceline.simulator.machine import SimulatedMachine
from paceline.simulator.scheduler import Scheduler
from paceline.system.folder_lock import run_folder
from paceline.system.interrupts import Interruption, noted
from paceline.system.machine import machine, versions
from paceline.system.paths import check_new_folder


class Simulation(Protocol):
    """A simulated run that is ready to begin."""

    scheduler: Scheduler
    machine: Any  # None if no worker has attached

    def run(self, interruption: Interruption) -> RunData:
        """Runs its programs until they end or a signal stops them."""
        ...


def drive(
    make: Callable[[], Simulation],
    out: Path | None,
    *,
    command: str = "",
    host: Mapping[str, Any] | None = None,
) -> RunData:
    """Makes a simulation and runs it; writes its folder, in which only `host.json` and the report depend on the host.

    `make` refuses a wrong simulation before anything is written; `host` is more content for `host.json`.
    """
    if out is not None:
        check_new_folder(out, str(out))
    with run_folder(out):
        simulation = make()
        began, began_s = time.time(), time.perf_counter()
        with noted() as interruption, interruption.calls(simulation.scheduler.cut), _released(simulation):
            run = simulation.run(interruption)
            if out is not None:
                write_run(
                    run,
                    out,
                    title=f"{run.config['task']}: {run.config['algorithm']}, simulated",
                    command=command,
                    host={
                        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)),
                        "simulated_in_s": time.perf_counter() - began_s,
                        "events": simulation.scheduler.num_events,
                        "out": str(out),
                        **(host or {}),
                        "machine": machine(),
                        "versions": versions(),
                    },
                )
            return run


@contextlib.contextmanager
def _released(simulation: Simulation) -> Iterator[None]:
    """Frees the simulation's memory at the end, without a garbage collection."""
    try:
        yield
    finally:
        if simulation.machine is not None:
            simulation.machine.release()
        vars(simulation.scheduler).clear()
        vars(simulation).clear()


def machine_for(
    algorithm: Algorithm, cluster: Cluster, *, x: torch.Tensor, restarts: int, **named: Any
) -> SimulatedMachine:
    """The machines of a cluster as this algorithm needs them; `named` are further arguments of `SimulatedMachine`."""
    rule = algorithm.server_rule
    # Where the others go on in rounds, replacements need the exchanges of real values.
    can_replace = "kill" in algorithm.tolerates or (algorithm.survivors_continue and x.numel() > 0)
    return SimulatedMachine(
        cluster,
        algorithm.needs,
        x=x,
        restarts=restarts if can_replace else 0,
        is_gossip=algorithm.gossip,
        survivors_continue=algorithm.survivors_continue,
        update_vectors=None if rule is None else rule.update_vectors,
        **named,
    )


def survivors_in(algorithm: Algorithm, ports: Ports[Any]) -> Survivors | None:
    """What `RoundDeal` asks; None: these workers do not continue without dead ones, or lose no steps with them."""
    collectives = ports.collectives if isinstance(ports.collectives, SimulatedCollectives) else None
    return (ports.views or collectives) if algorithm.loses_steps else None
