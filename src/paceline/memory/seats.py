"""Who exchanges messages with whom in a run with servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Seat(NamedTuple):
    """A participant's part of the model, and its number among those that have this part: first workers, then servers."""

    part: int
    member: int


@dataclass(frozen=True)
class Seats:
    """Divides a run's participants into groups, one for each part of a model whose parts have servers of their own.

    Consecutive workers have the parts of one replica, so that the members of a group are the replicas.

    >>> [Seats(num_parts=2, num_workers=4, num_servers=2).of(one) for one in (3, 4, 5)]
    [Seat(part=1, member=1), Seat(part=0, member=2), Seat(part=1, member=2)]
    """

    num_parts: int
    num_workers: int
    num_servers: int

    @property
    def workers(self) -> int:
        """Of one part."""
        return self.num_workers // self.num_parts

    @property
    def servers(self) -> int:
        """Of one part."""
        return self.num_servers // self.num_parts

    def mates(self, worker: int) -> range:
        """The workers with the parts of one replica, of which this worker is one."""
        first = worker - worker % self.num_parts
        return range(first, first + self.num_parts)

    def of(self, participant: int) -> Seat:
        """A participant's seat; an observer, after all servers, has one beside the first part."""
        if participant >= self.num_workers + self.num_servers or self.num_parts == 1:
            return Seat(0, min(participant, self.workers + self.servers))
        if participant < self.num_workers:
            return Seat(participant % self.num_parts, participant // self.num_parts)
        part, server = divmod(participant - self.num_workers, self.servers)
        return Seat(part, self.workers + server)
