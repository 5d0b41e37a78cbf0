"""Every contract holds over the whole table, and leaves nothing behind."""

import pytest

from paceline.tasks.base import keep_data


@pytest.fixture(scope="module", autouse=True)
def _data_is_read_once():
    with keep_data():
        yield


@pytest.fixture(autouse=True)
def _nothing_left(nothing_left):
    pass
