"""Combinations of values, of which each value occurs in a test, and the others in `make soak`."""

from itertools import product

import pytest


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
