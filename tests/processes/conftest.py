"""Real workers, real signals; whatever happens to them, nothing is left behind."""

import signal

import pytest
import torch

import leftovers


@pytest.fixture(scope="session", autouse=True)
def _fork_server():
    import paceline.training  # noqa: F401  (before the collector is told that what is loaded stays)
    from paceline.tasks.load import load_task

    load_task("digits-mlp").load()
    leftovers.start_fork_server()


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c():
    """Programs that the tests start hear Ctrl-C, also where the tests run in the background of a shell, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def _nothing_left():
    intra_op_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    before = leftovers.everything()
    yield
    leftovers.assert_nothing_new(before)
    torch.set_num_threads(intra_op_threads)
