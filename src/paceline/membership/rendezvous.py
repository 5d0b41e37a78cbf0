"""How workers that another launcher started find each other: torch's store, and the address at which a worker is reached."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from paceline.errors import UsageError, WorkerLostError, name_workers
from paceline.membership.environment import LaunchedEnvironment
from paceline.system.torch_internals import default_store

_FAREWELL_S = 5.0
_dist: Any = dist  # its type stubs do not name the stores
_store: Any = None  # the store that this process has made


def common_store(environment: LaunchedEnvironment, what: str = "call paceline.attach") -> Any:
    """The user's process group's store; else the launcher's; else one at MASTER_ADDR and MASTER_PORT, which worker 0 holds.

    `what` completes the error message: what worker 0 failed to do.
    """
    global _store
    if dist.is_initialized():
        return default_store()
    if _store is not None:
        return _store
    deadline, timeout = f"{environment.deadline_s:g} s", timedelta(seconds=environment.deadline_s)
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    holds_it = environment.worker_id == 0
    try:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            found = _dist.rendezvous("env://", environment.worker_id, environment.num_workers, timeout=timeout)
            _store, *_ = next(found)
        else:
            _store = _dist.TCPStore(host, int(port), is_master=holds_it, timeout=timeout, wait_for_workers=False)
    except (RuntimeError, ValueError) as error:
        if holds_it or isinstance(error, ValueError):
            raise UsageError(
                f"Worker 0 cannot listen at MASTER_PORT={port} ({str(error).splitlines()[0]}): choose a free port."
            ) from error
        raise WorkerLostError(
            f"start: worker 0, which the others meet at {host}:{port}, did not {what} within {deadline}. See its "
            "output, and check that MASTER_ADDR and MASTER_PORT are the same everywhere."
        ) from error
    return _store


def own_part(store: Any, name: str) -> Any:
    """A part of the common store for one purpose.

    torchrun's own store outlives the workers that it restarts: entries of the dead ones must not count.
    """
    return _dist.PrefixStore(f"paceline/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{name}", store)


def address_of(store: Any, worker_id: int, num_workers: int, deadline_s: float) -> tuple[str | None, Path | None]:
    """The address by which the others reach this worker, and the key file; neither is needed on one machine.

    Raises:
        UsageError: the workers are on several machines and have no key file.
        WorkerLostError: a worker did not arrive within the deadline.
    """
    key = os.environ.get("PACELINE_KEY")
    store.set(f"machine/{worker_id}", machine_of_this())
    keys = [f"machine/{worker}" for worker in range(num_workers)]
    if missing := missing_keys(store, keys, deadline_s):
        wait_for_readers(store, "absent", worker_id, sorted({*range(num_workers)} - {*missing}))
        raise WorkerLostError(
            f"start: {name_workers(missing)} did not arrive within {deadline_s:g} s. See its output; it may have "
            "ended before."
        )
    machines = {store.get(one).decode() for one in keys}
    if len(machines) == 1:
        return None, None
    wait_for_readers(store, "machine", worker_id, range(num_workers))
    if not key:
        raise UsageError(
            "The workers are on several machines, so traffic between them must be encrypted: make a key with "
            "`paceline key FILE`, copy it to every machine, and set PACELINE_KEY=FILE for every worker."
        )
    with socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), deadline_s) as probe:
        return probe.getsockname()[0], Path(key)


def machine_of_this() -> str:
    """An opaque id that differs between machines, and between the containers of one machine."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return " ".join([boot, *(str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in ("net", "pid"))])


def wait_for_readers(store: Any, what: str, worker_id: int, workers: Sequence[int]) -> None:
    """Marks this worker as done reading; the store's holder waits, up to 5 s, until all `workers` are, before it may end."""
    store.set(f"read/{what}/{worker_id}", "1")
    if worker_id == 0:
        missing_keys(store, [f"read/{what}/{worker}" for worker in workers], _FAREWELL_S)


def missing_keys(
    store: Any, keys: Sequence[str], within_s: float, on_wait: Callable[[], object] = lambda: None
) -> list[int]:
    """Waits until all keys are there, and calls `on_wait`; returns the positions of those still missing after `within_s`."""
    until_s = time.monotonic() + within_s
    missing = list(range(len(keys)))
    while True:
        missing = [index for index in missing if not store.check([keys[index]])]
        if not missing or time.monotonic() > until_s:
            return missing
        on_wait()
        time.sleep(0.005)
