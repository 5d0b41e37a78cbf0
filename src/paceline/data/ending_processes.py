"""Processes of a user's loader that end with the worker that they fetch for."""

from __future__ import annotations

import copy
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader


def ending_with_worker(loader: DataLoader[Any]) -> DataLoader[Any]:
    """A copy of a loader, without processes as yet; those that it will have end with this one, however that ends."""
    twin = copy.copy(loader)
    twin._iterator = None
    if loader.num_workers:
        twin.worker_init_fn = _Begin(loader.worker_init_fn)
    return twin


@dataclass(frozen=True)
class _Begin:
    """A loader process's beginning.

    PyTorch's own look at its parent comes every five seconds, and never where a fork server started the process. Until then it
    would keep what it has inherited, such as the connections by which other workers know that this one is alive.
    """

    init: Callable[[int], None] | None

    def __call__(self, worker_id: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the supervisor's, or the worker's, to heed
        threading.Thread(target=end_with_parent, name="paceline-worker-watch", daemon=True).start()
        if self.init is not None:
            self.init(worker_id)


def end_with_parent() -> None:
    """Waits for the end of this process's parent, and ends this process."""
    parent: Any = multiprocessing.parent_process()
    parent.join()
    os._exit(1)
