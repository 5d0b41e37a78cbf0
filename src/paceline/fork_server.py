"""The process that workers are forked from: it has PyTorch, the kernels and the task machinery loaded.

Knows nothing of them itself, so that a command can start it before it imports PyTorch, and both load at the same time.
"""

from __future__ import annotations

import multiprocessing
import signal
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

__all__ = ["fork_server_context"]


def fork_server_context() -> ForkServerContext:
    """The context to start workers with; starts the fork server if it does not run yet, without waiting for it.

    A program that had started multiprocessing's fork server for itself before keeps it: workers then start slower.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["paceline.preload"])
    # The server ignores Ctrl-C, but only once it has loaded everything; started with the signal blocked, it never sees it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context
