"""Ranges of elements of a flat vector."""

from __future__ import annotations

from itertools import pairwise

import torch

Ranges = tuple[tuple[int, int], ...]  # each: the first element, and the one after the last


def numbered(ranges: Ranges, num_elements: int) -> torch.Tensor:
    """The number of each element's range (n,), from 1; 0 outside. So shards of a snapshot can be joined.

    >>> numbered(((1, 2), (2, 4)), 5)
    tensor([0, 1, 2, 2, 0], dtype=torch.int32)
    """
    numbers = torch.zeros(num_elements, dtype=torch.int32)
    for number, (first, last) in enumerate(ranges, start=1):
        numbers[first:last] = number
    return numbers


def ranges_of(numbers: torch.Tensor | None) -> Ranges:
    """The inverse of `numbered`; None: no ranges."""
    if numbers is None or not len(numbers):
        return ()
    ends = [0, *(numbers.diff().nonzero().flatten() + 1).tolist(), len(numbers)]
    return tuple(own for own in pairwise(ends) if numbers[own[0]])


def outside(ranges: Ranges, begin: int, end: int) -> list[slice]:
    """The elements from `begin` to `end` that are in none of these ascending ranges.

    >>> outside(((0, 4), (6, 9)), 3, 10)
    [slice(4, 6, None), slice(9, 10, None)]
    """
    parts = []
    for first, last in (*ranges, (end, end)):
        if begin < min(first, end):
            parts.append(slice(begin, min(first, end)))
        begin = max(begin, last)
    return parts


def within(ranges: Ranges, begin: int, end: int) -> Ranges:
    """The parts of ranges within elements `begin` to `end`, counted from there.

    >>> within(((0, 4), (6, 9)), 3, 8)
    ((0, 1), (3, 5))
    """
    cut = ((max(first, begin) - begin, min(last, end) - begin) for first, last in ranges)
    return tuple((first, last) for first, last in cut if first < last)
