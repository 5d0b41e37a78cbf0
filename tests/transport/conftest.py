"""Mailboxes between threads of one process; nothing is left behind."""

import threading
from contextlib import ExitStack

import pytest
from torch.distributed import TCPStore

import forked
import leftovers
from paceline.transport.mailbox import ZmqMailbox

DEADLINE_S = forked.AGAINST_HANGS_S


@pytest.fixture
def store():
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def mailboxes(store):
    """A function that makes and connects mailboxes of workers 0 to n - 1."""
    before = leftovers.everything()
    with ExitStack() as stack:

        def make(num_workers, **options):
            made = [
                stack.enter_context(ZmqMailbox(store, worker, num_workers, **options)) for worker in range(num_workers)
            ]
            assert connect(*made) == [None] * num_workers
            return made

        yield make
    leftovers.assert_nothing_new(before)


def connect(*mailboxes, timeout_s=DEADLINE_S):
    """All at the same time; returns what each ended with."""
    ends = [None] * len(mailboxes)

    def run(index):
        try:
            mailboxes[index].connect(timeout_s)
        except Exception as error:
            ends[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(mailboxes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ends
