"""Processes of a user's loader that end with the worker that they fetch for."""

from __future__ import annotations

import copy
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.utils.data import DataLoader


def ending_with_worker(loader: DataLoader[Any]) -> DataLoader[Any]:
    """A copy of a loader that has not started its processes; they end when this process ends, however it does."""
    twin = copy.copy(loader)
    twin._iterator = None
    if loader.num_workers:
        twin.worker_init_fn = partial(_begin, loader.worker_init_fn)
    return twin


def _begin(init: Callable[[int], None] | None, worker_id: int) -> None:
    """Begins a loader process.

    PyTorch checks its parent only every five seconds, and never if a fork server started the process. Until then the process
    would keep what it has inherited, such as the connections by which other workers know that this one is alive.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor or the worker handles it
    threading.Thread(target=end_with_parent, name="paceline-worker-watch", daemon=True).start()
    if init is not None:
        init(worker_id)


def end_with_parent() -> None:
    """Ends this process when its parent ends."""
    parent: Any = multiprocessing.parent_process()
    parent.join()
    os._exit(1)
