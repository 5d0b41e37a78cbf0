"""What tests of all folders share: one thread per operation, the fork server, and a look at what is left behind."""

from multiprocessing import forkserver

import pytest
import torch

import forked
import leftovers

# Whichever test starts this process's fork server, what it has loaded is the same: it stays for all tests that follow.
forkserver.set_forkserver_preload(list(forked.PRELOAD))
forkserver.set_forkserver_preload = lambda modules: None


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Two test processes, each with a thread per core, would wait for each other's; and they may round otherwise."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def fork_server():
    import paceline.training  # noqa: F401  (before the collector is told that what is loaded stays)
    from paceline.tasks.load import load_task

    load_task("digits-mlp").load()
    leftovers.start_fork_server()


@pytest.fixture
def nothing_left(fork_server):
    before = leftovers.everything()
    yield
    leftovers.assert_nothing_new(before)
