"""Every contract holds over the whole table, and leaves nothing behind."""

import pytest


@pytest.fixture(autouse=True)
def _nothing_left(nothing_left):
    pass
