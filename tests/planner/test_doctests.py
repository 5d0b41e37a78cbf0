"""What the models' docstrings show is what they say."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize("name", ["balance", "order_statistics"])
def test_the_doctests_hold(name):
    found = doctest.testmod(importlib.import_module(f"paceline.planner.{name}"))
    assert found.failed == 0 < found.attempted
