"""Makes and ends ZeroMQ contexts and sockets safely when signals may arrive at any instant."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

import zmq

_END_MARGIN_S = 2.0


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Blocks signals to this thread: necessary while sockets are bound, connected or monitored, and contexts end.

    If a handler interrupts one of these calls, ZeroMQ returns an error and pyzmq does not retry; a context whose termination
    is interrupted counts as ended and keeps its threads and descriptors for good. PyTorch's loaders handle SIGCHLD.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_context(context: zmq.Context, linger_s: float) -> None:
    """Ends a context whose sockets are closed; waits for unsent messages, but not much longer than their `linger_s`.

    After a peer is killed at an unlucky instant, libzmq 4.3.5 sometimes waits forever. Its threads then stay until the
    process ends.
    """
    ending = threading.Thread(target=_end, args=(context,), name="mailbox-end", daemon=True)
    ending.start()
    ending.join(linger_s + _END_MARGIN_S)


def _end(context: zmq.Context) -> None:
    with uninterrupted():
        context.term()
