"""Real workers, real signals; whatever happens to them, nothing is left behind."""

import signal

import pytest

from paceline.tasks.base import keep_data


@pytest.fixture(scope="module", autouse=True)
def _data_is_read_once():
    with keep_data():
        yield


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c():
    """Programs that the tests start hear Ctrl-C, also where the tests run in the background of a shell, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def _nothing_left(nothing_left):
    pass
