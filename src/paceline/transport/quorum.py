"""Which workers may continue without others that may be alive."""

from __future__ import annotations

from collections.abc import Collection, Sequence


class Quorum:
    """Decides whether workers may continue without others that may be alive. At most one side of a cut network may.

    They need a majority in the last view that all its members are known to have begun, and in every later one that this worker
    has begun. A majority is more than half of the workers of a view that have not ended, or half of them with the lowest id.

    >>> quorum = Quorum([(0, 1, 2, 3)])
    >>> quorum.missing({0, 1}, alive={0, 1, 2, 3}), quorum.missing({2, 3}, alive={0, 1, 2, 3})
    ([], [0, 1])
    >>> quorum.missing({3}, alive={3})
    []

    Reference: dynamic linear voting; Yeger Lotem, Keidar and Dolev, "Dynamic voting for consistent primary components", 1997.
    """

    def __init__(self, views: Collection[Sequence[int]]) -> None:
        self.views = list(views)

    def begin(self, members: Sequence[int]) -> None:
        self.views.append(members)

    def has_begun(self, members: Sequence[int]) -> None:
        self.views = [members]

    def missing(self, members: Collection[int], alive: Collection[int]) -> list[int]:
        """Workers without which the members must not go on; empty: they are a majority of those that may be alive."""
        for view in self.views:
            voters = [one for one in view if one in alive]
            votes = [one for one in voters if one in members]
            if 2 * len(votes) < len(voters) or (2 * len(votes) == len(voters) and votes[:1] != voters[:1]):
                return [one for one in voters if one not in members]
        return []
