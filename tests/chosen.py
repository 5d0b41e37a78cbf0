"""Values and combinations of values for tests, of which some are left to `make soak`."""

from itertools import product

import pytest


def soaked(*values):
    """These values of one argument, or tuples of several, for `parametrize`: for `make soak` only."""
    return [pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=pytest.mark.soak) for one in values]


def each_value(*axes):
    """All combinations, for `parametrize`; those that are no marathon's have each value of each axis at least once.

    Values at the same place of two axes meet, the shorter axis again from its beginning: an axis's order says what meets what.
    """
    longest = max(map(len, axes))
    chosen = {tuple(place % len(axis) for axis in axes) for place in range(longest)}
    return [
        pytest.param(
            *(axis[place] for axis, place in zip(axes, places, strict=True)),
            marks=() if places in chosen else pytest.mark.soak,
        )
        for places in product(*(range(len(axis)) for axis in axes))
    ]
