"""Averages in pairs over real sockets, between threads and between processes: the sum is exact however late answers are."""

import multiprocessing
import os
import signal
import threading

import pytest
from torch.distributed import TCPStore

from processes.late_programs import DEADLINE_S, average


@pytest.fixture
def start():
    """Starts worker after worker; ends those that a test leaves running."""
    # libuv's server would leave a pipe open in this process for good
    stores, started = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=False)], []
    port, context = stores[0].port, multiprocessing.get_context("forkserver")

    def start(worker_id, num_workers, *, longest_s, deadline_s, as_thread=False):
        ours, theirs = context.Pipe()
        kind = threading.Thread if as_thread else context.Process
        one = kind(target=average, args=(port, worker_id, num_workers, longest_s, deadline_s, theirs), daemon=True)
        one.start()
        if not as_thread:
            theirs.close()
        started.append((one, ours, theirs))
        return one, ours

    yield start
    for one, ours, theirs in started:
        one.join(DEADLINE_S if isinstance(one, threading.Thread) else 0)
        if not isinstance(one, threading.Thread):
            one.kill()
            one.join()
            one.close()
        ours.close()
        theirs.close()
    stores.clear()


def hear(connection):
    """The next word; None: the worker has closed its mailbox, and ends."""
    assert connection.poll(DEADLINE_S), "it says nothing"
    try:
        return connection.recv()
    except EOFError:
        return None


def wait_for(word, connection):
    while hear(connection) != word:
        pass


def check(connections):
    """Ends all workers; their models must come to what they were and what each has added to its own."""
    for connection in connections:
        connection.send("end")
    ends = []
    for connection in connections:
        while isinstance(said := hear(connection), str):
            pass
        ends.append(said)
    for connection in connections:
        connection.send("close")
        assert hear(connection) is None
    models, planted, averages, unresolved = zip(*ends, strict=True)
    assert abs(sum(models) - sum(planted) - sum(range(len(models)))).max() < 1e-9
    assert unresolved == (0,) * len(models)
    assert min(averages) > 0


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("as_thread", [True, False], ids=["threads", "processes"])
def test_the_sum_is_exact_where_answers_come_late(start, workers, as_thread):
    started = [start(one, workers, longest_s=0.02, deadline_s=0.002, as_thread=as_thread) for one in range(workers)]
    for worker, (_, connection) in enumerate(started):
        if workers % 2 or worker % 2:  # of an even ring's, half only answer
            for _ in range(5):
                wait_for("late", connection)
    check([connection for _, connection in started])


def test_the_sum_is_exact_with_a_worker_that_stands_still_for_a_while(start):
    started = [start(one, 3, longest_s=0.0, deadline_s=0.05) for one in range(3)]
    sleeper, connections = started[1][0], [connection for _, connection in started]
    wait_for("averaged", connections[1])
    os.kill(sleeper.pid, signal.SIGSTOP)
    while connections[0].poll():
        connections[0].recv()
    wait_for("late", connections[0])
    os.kill(sleeper.pid, signal.SIGCONT)
    check(connections)
