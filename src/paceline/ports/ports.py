"""The ports: the interfaces through which a worker program reaches the world outside its own replica.

A worker program (`Algorithm.work`) is plain blocking code in the order of the paper. It never opens a socket, creates a lock,
reads a clock or starts a thread; it uses one of these ports. Real backends and the simulator implement the same ports, so the
same program runs on both.

Shapes: `x` and every vector here is flat, `(P,)`, one element per parameter of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from random import Random
from typing import Any, Generic, NamedTuple, Protocol, TypedDict, TypeVar

import torch

from paceline.ports.newcomers import Newcomers
from paceline.ports.shared import ServedParameters, SharedParameters, StalenessCounts
from paceline.ports.views import Views

S_co = TypeVar("S_co", bound=SharedParameters, covariant=True)


class Clock(Protocol):
    """Time as the worker sees it: monotonic in real runs, virtual in simulated ones."""

    def now_s(self) -> float:
        """Seconds since an arbitrary origin that all workers of the run share."""
        ...

    def sleep_s(self, duration_s: float) -> None:
        """Waits; precise even for microseconds (back-off is counted in update times)."""


NUM_NUMBERS = 4  # that travel with a mean, and are added up
NO_NUMBERS = (0.0,) * NUM_NUMBERS


class Collectives(Protocol):
    """Operations that every worker of the run joins, in the same order.

    Attributes:
        members: the workers, in the order of their ids, whose parts the last operation contains: all of the run, except dead
            workers without which the others continue. Equal on all workers that have the result.
    """

    @property
    def members(self) -> Sequence[int]: ...

    def all_reduce_mean(
        self, vector: torch.Tensor, weight: float, numbers: Sequence[float] = NO_NUMBERS
    ) -> list[float]:
        """Replaces `vector` (P,) by the mean over all workers, weighted by `weight` (0: takes part, adds nothing).

        Summed in the order of worker ids, so that every worker gets the same bits. A single worker with a weight keeps
        its vector bit for bit. Returns the sums of `numbers` (4) over all workers, independent of their weights.

        Raises:
            WorkerLostError: a worker left; the message names the workers that arrived and those that are missing.
        """
        ...

    def start_all_reduce(self, vector: torch.Tensor) -> Handle:
        """Begins replacing `vector` (n,) by the sum over all workers; it must not be touched before the handle's `wait`."""
        ...

    def start_reduce_scatter(self, vector: torch.Tensor, part: torch.Tensor) -> Handle:
        """Begins summing `vector` (n,) over all workers; `part` (n / num_workers,) becomes this worker's piece of the sum.

        Pieces go to the workers in the order of their ids.
        """
        ...

    def start_all_gather(self, part: torch.Tensor, vector: torch.Tensor) -> Handle:
        """Begins collecting every worker's `part` (n / num_workers,), in the order of their ids, in `vector` (n,).

        Does not change the parts of workers that are not members.
        """
        ...

    def start_all_to_all(self, given: torch.Tensor, taken: torch.Tensor) -> Handle:
        """Begins sending piece k of `given` (n,) to worker k, for every k; `taken` (n,) receives the pieces for this worker.

        Pieces have n / num_workers elements and are ordered by worker id; both vectors may be bytes. Those of workers that are
        no members stay as they are.
        """
        ...


class Handle(Protocol):
    """A collective operation under way."""

    def wait(self) -> Sequence[int]:
        """Waits until its result is in place; returns the workers whose parts the result contains, as in `members`.

        Raises:
            WorkerLostError: a worker left, or did not arrive within the deadline.
        """
        ...


class Message(NamedTuple):
    """A message from one worker to another."""

    kind: str  # its meaning to the algorithm: 1 to 16 ASCII characters
    number: int = 0  # a round, a version: 64 bits, signed
    weight: float = 0.0
    x: torch.Tensor | None = None  # flat, (n,), or nothing
    version: int = 0  # of the parameters that it refers to: 64 bits, signed


class Received(NamedTuple):
    """An incoming message."""

    sender: int
    incarnation: int  # of the sender: 0 for its first process
    message: Message  # its vector belongs to the receiver


class PeerLeft(NamedTuple):
    """A peer has ended, died or become unreachable; messages to it raise errors from now on."""

    peer: int
    incarnation: int
    reason: str  # "ended", or why it is taken for dead


class PeerBack(NamedTuple):
    """A peer that had left, or that joins late, is reachable (again)."""

    peer: int
    incarnation: int


Event = Received | PeerLeft | PeerBack


class Shards(NamedTuple):
    """If the workers of a group hold a model together: this worker's own elements, and the workers with the same ones."""

    first: int  # the elements of `x` from here on
    collectives: Collectives | None  # of the workers with the same shards, one in each group; None: there are no others
    samples: Callable[[int], float]  # of the group, given this worker's: the weight of its shards' gradients


class Filter(TypedDict, total=False):
    """The messages that a `Mailbox.receive` waits for; a missing key, or None, matches any."""

    kind: str | tuple[str, ...] | None  # one, or several
    sender: int | None
    number: int | None


class Mailbox(Protocol):
    """Messages between any two workers of the run; those of one sender to one receiver keep their order.

    Messages are never lost silently: if one cannot be delivered, `send` raises an error, or the receiver is reported as left.
    """

    def send(self, to: int, message: Message) -> None:
        """Sends a copy: the vector (n,) can be overwritten at once. `to` may be this worker itself.

        Raises:
            PeerLostError: `to` has left, or does not accept the message within the transport's deadline.
        """

    def receive(
        self,
        timeout_s: float | None = None,
        *,
        kind: str | tuple[str, ...] | None = None,
        sender: int | None = None,
        number: int | None = None,
    ) -> Event | None:
        """The next message that fits, or the next event of a peer; None once `timeout_s` have passed (None: no limit).

        Messages that do not fit wait for another call. With `sender`, only that peer's events end the wait.
        """
        ...

    def peers(self) -> Set[int]:
        """The workers that are reachable now, without this one."""
        ...


class Lock(Protocol):
    """A lock between the programs of one worker."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *exception: object) -> None: ...


class Concurrency(Protocol):
    """Additional programs of the same worker besides `work`: AD-PSGD's communication, a server's loop."""

    def start(self, program: Callable[[], None], name: str) -> Joinable:
        """Starts a program, which ends with the run at the latest; an exception in it ends this worker with that error."""
        ...

    def serve(
        self, mailbox: Mailbox, kinds: tuple[str, ...], handle: Callable[[Event | None], float | None], name: str
    ) -> Joinable:
        """Starts a program that only handles messages and events.

        `handle` is called with None at once, and then with each message of these kinds and each event of a peer. It returns
        how many seconds to wait for the next one before it is called with None (infinity: no limit); or None to end the
        program.
        """
        ...

    def lock(self) -> Lock: ...


class Joinable(Protocol):
    """A program that `Concurrency` started."""

    def failed(self) -> bool:
        """Whether it has ended with an exception."""
        ...

    def join(self) -> None:
        """Waits for its end; raises what it raised."""


class Storage(Protocol):
    """Storage for state that must survive a server's or a worker's program."""

    def restore(self) -> dict[str, Any] | None:
        """The newest state kept by an earlier process or by the run that this one resumes."""
        ...

    def keep(self, state: Callable[[], dict[str, Any]], version: int) -> None:
        """Keeps a snapshot if one is due: calls `state` at once and writes the result in the background.

        The state consists of plain containers, numbers and tensors; the tensors must not change afterwards.
        """

    def checkpoint(self, state: Callable[[], dict[str, Any]], number: int | None) -> None:
        """Writes this server's part of checkpoint `number`; None: the run's last. Calls `state` only if the run has any."""


@dataclass(slots=True)
class Counts:
    """A worker's communication so far; the record of each step takes the difference.

    The transports count messages and bytes; the algorithm counts averages and failures.
    """

    messages: int = 0  # sent to other workers
    sent_bytes: int = 0  # in them, headers included
    averages: int = 0  # of this worker's parameters with others', whichever worker began them
    peer_failures: int = 0  # exchanges given up because a peer had left or did not answer in time
    coded_elements: int = (
        0  # of vectors that codecs have made payloads of, and the payloads' bytes with all that frames them
    )
    coded_bytes: int = 0
    codec_s: float = 0.0  # that coding and decoding has taken
    unresolved_exchanges: int = 0  # of these, those in which it is unknown whether the peer has averaged
    delay: int = 0  # steps that averages arrive late, if the program has chosen it
    # Of the longest wait or exchange since the last record: the other worker, or the server, and the time.
    partner: int = 0
    partner_s: float = 0.0

    def note_partner(self, partner: int, took_s: float) -> None:
        """A wait for this member, or an exchange of models with it, has ended."""
        if took_s > self.partner_s:
            self.partner, self.partner_s = partner, took_s


@dataclass(frozen=True)
class Ports(Generic[S_co]):
    """The ports of one worker program; `S_co` is the kind of shared parameters that its algorithm needs.

    A program that reads and writes vectors itself reports the number of reads plus writes by `moved`, in vectors as long as
    `shared.x` or `of`: in virtual time, these take time. Replica, collectives and mailbox count their own.
    """

    worker_id: int
    num_workers: int
    clock: Clock
    random: Random  # seeded by the run's seed and the worker's id
    shared: S_co  # of the kind that `Algorithm.needs` names
    staleness: StalenessCounts
    moved: Callable[..., None] = lambda *_, **__: None  # (vectors, of=None); real time has passed by itself
    fetched: Callable[[torch.Tensor], None] = lambda x: None  # takes a copy (P,) that has come from the servers
    collectives: Collectives | None = None
    newcomers: Newcomers | None = None  # replacements of dead workers; None: there are none
    mailbox: Mailbox | None = None
    views: Views | None = None  # who takes part in a round; None: the others do not go on without a dead worker
    concurrency: Concurrency | None = None
    counts: Counts = field(default_factory=Counts)
    # Takes what timing has decided, as `records.order.OrderWriter` does.
    decided: Callable[..., None] = lambda *_, **__: None
    incarnation: int = 0  # above 0: this worker replaces a dead one, or joins late; its parameters may be stale
    num_servers: int = 0  # in the mailbox, servers' ids come after the workers'
    codec_moves: Mapping[str, tuple[float, float]] = field(
        default_factory=dict
    )  # by name: what coding and decoding moves
    shards: Shards | None = None  # of a layout that shards parameters; None: every worker has all of them
    storage: Storage | None = None  # this server's or worker's; None: its state is not kept
    untrained: Sequence[torch.Tensor] = ()  # of the model: a worker that joins late copies them from a neighbour


@dataclass(frozen=True)
class ServerPorts(Ports[ServedParameters]):
    """The ports of one server's program, or of the second copy of its shard."""

    copies: bool = False  # each server's shard has a second copy, at the member `num_servers` after it
    promoted: Callable[[], ServerPorts | None] | None = None  # a copy's: its server's ports, once it takes over

    @property
    def is_copy(self) -> bool:
        """Whether this is a second copy of a shard."""
        return self.worker_id >= self.num_workers + self.num_servers
