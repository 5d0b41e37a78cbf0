"""How a model's tensors are distributed over fragments, which are averaged one after the other."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from paceline.algorithms.means import Layout
from paceline.errors import UsageError
from paceline.optim.ranges import Ranges
from paceline.ports.replica import Replica


class Fragment(NamedTuple):
    """Some elements of the flat vector, in order."""

    ranges: Ranges

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """The fragment's elements of `x` (P,): a view if they are contiguous, else a copy."""
        parts = [x[begin:end] for begin, end in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def put(self, x: torch.Tensor, values: torch.Tensor) -> None:
        at = 0
        for begin, end in self.ranges:
            x[begin:end].copy_(values[at : at + end - begin])
            at += end - begin


def cut(ranges: Ranges, num_elements: int, num_fragments: int) -> list[Fragment]:
    """Distributes whole tensors over fragments: the largest first, each to the smallest fragment so far.

    >>> [one.ranges for one in cut(((0, 50), (50, 60), (60, 100)), 100, 2)]
    [((0, 50),), ((50, 60), (60, 100))]

    Raises:
        UsageError: there are fewer tensors than fragments.
    """
    if num_fragments == 1:
        return [Fragment(((0, num_elements),))]
    if num_fragments > len(ranges):
        raise UsageError(
            f"A model of {len(ranges)} parameter tensors cannot be split into {num_fragments} fragments: write "
            f"fragments={len(ranges)} or less."
        )
    dealt: list[list[tuple[int, int]]] = [[] for _ in range(num_fragments)]
    sizes = [0] * num_fragments
    for begin, end in sorted(ranges, key=lambda one: (one[0] - one[1], one[0])):
        smallest = sizes.index(min(sizes))
        dealt[smallest].append((begin, end))
        sizes[smallest] += end - begin
    return [Fragment(tuple(sorted(own))) for own in dealt]


def layouts(fragments: list[Fragment], replica: Replica) -> list[Layout]:
    """The layouts of the fragments' vectors (n,); a single fragment is the whole flat vector."""
    if len(fragments) == 1:
        return [Layout(replica.ranges, replica.shapes, is_flat=True)]
    shapes = dict(zip(replica.ranges, replica.shapes, strict=True))
    found = []
    for fragment in fragments:
        ends = list(accumulate(end - begin for begin, end in fragment.ranges))
        own = tuple(pairwise([0, *ends]))
        found.append(Layout(own, [shapes[one] for one in fragment.ranges]))
    return found
