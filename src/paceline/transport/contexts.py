"""A ZeroMQ context and its sockets, where signals may come at any instant."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

import zmq

__all__ = ["end_context", "uninterrupted"]

_END_MARGIN_S = 2.0


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Within, signals to this thread wait, as they must while sockets are bound, connected or watched, and a context ends.

    What a handler interrupts is an error of ZeroMQ's that pyzmq does not try again; and a context whose end it interrupts is
    taken for ended, and keeps its threads and descriptors for good. PyTorch's loaders install a handler of SIGCHLD.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_context(context: zmq.Context, linger_s: float) -> None:
    """Ends a context whose sockets are closed; waits for what is under way, but not much longer than their `linger_s`.

    Where a peer was killed at an unlucky instant, libzmq 4.3.5 has been seen to wait for ever. Its threads are then left to
    the end of the process.
    """
    ending = threading.Thread(target=_end, args=(context,), name="mailbox-end", daemon=True)
    ending.start()
    ending.join(linger_s + _END_MARGIN_S)


def _end(context: zmq.Context) -> None:
    with uninterrupted():
        context.term()
