"""The order in which pairs of workers measure their links, so that tests never share a machine."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product

Pair = tuple[int, int]


def round_robin(num_machines: int) -> list[list[Pair]]:
    """Rounds in which each pair of machines meets once, and each machine is in at most one pair; the circle method.

    One machine stays and the others move on by one place each round; with an odd number, one rests.

    >>> round_robin(4)
    [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    """
    places: list[int | None] = [*range(num_machines), *([None] if num_machines % 2 else [])]
    rounds = []
    for _ in range(len(places) - 1):
        facing = zip(places[: len(places) // 2], reversed(places), strict=False)
        rounds.append(sorted((min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None))
        places = [places[0], places[-1], *places[1:-1]]
    return [pairs for pairs in rounds if pairs]


def link_rounds(machines: Sequence[int]) -> list[list[Pair]]:
    """Rounds in which each pair of workers meets once, and each machine has at most one pair.

    >>> link_rounds([0, 0, 1])
    [[(0, 1)], [(0, 2)], [(1, 2)]]
    """
    members = [[worker for worker, its in enumerate(machines) if its == one] for one in sorted(set(machines))]
    at_once: list[list[list[Pair]]] = [[list(combinations(workers, 2)) for workers in members]]
    for meetings in round_robin(len(members)):
        at_once.append([[(min(p), max(p)) for p in product(members[a], members[b])] for a, b in meetings])
    rounds = []
    for lines in at_once:  # the pairs of each line one after the other, all lines at the same time
        for turn in range(max(map(len, lines), default=0)):
            rounds.append([line[turn] for line in lines if turn < len(line)])
    return rounds


def sample(rounds: Sequence[list[Pair]], most: int) -> list[list[Pair]]:
    """At most `most` of the rounds, evenly spaced."""
    if len(rounds) <= most:
        return list(rounds)
    return [rounds[index * len(rounds) // most] for index in range(most)]
