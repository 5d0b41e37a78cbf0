"""Messages between simulated workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from typing import Any

from paceline.errors import PeerLostError
from paceline.ports.matching import fits
from paceline.ports.ports import Counts, Event, Message, PeerBack, PeerLeft, Received
from paceline.simulator.network import HEADER_BYTES, Network
from paceline.simulator.program import Program
from paceline.simulator.scheduler import Scheduler

_new: Any = tuple.__new__  # a named tuple's constructor is a Python function, which takes twice as long, per message


class SimulatedMailbox:
    """A worker's mailbox; implements `Mailbox`.

    A message to another worker goes through the network; one to this worker itself arrives at once. Vectors are copied at
    `send`, and leave after the copy. Peer events come from workers that this worker has exchanged messages with or waited for.

    Attributes:
        waited_s: seconds that `Algorithm.work` itself has waited here (not a further program); the caller reads it and
            resets it to 0.
    """

    __slots__ = (
        "_copy_s_per_byte", "_counts", "_declared_bytes", "_departures", "_incarnation", "_items", "_left", "_network",
        "_num_workers", "_peers", "_reached", "_scheduler", "_timer_at_s", "_waiters", "_worker_id", "waited_s",
    )  # fmt: skip

    def __init__(
        self,
        scheduler: Scheduler,
        network: Network,
        *,
        worker_id: int,
        num_workers: int,
        counts: Counts,
        declared_bytes: int | None,  # size of every vector if vectors are empty (timing only); None: their own size
        incarnation: int,  # of this worker; above 0, it knows from the start which peers have left
        copy_s_per_byte: float,  # time of copying a vector; 0: the network's time per byte includes it
    ) -> None:
        self.waited_s = 0.0
        self._scheduler = scheduler
        self._network = network
        self._worker_id = worker_id
        self._num_workers = num_workers
        self._counts = counts
        self._declared_bytes = declared_bytes
        self._items: list[Event] = []  # usually empty, and then smaller than a deque
        self._waiters: tuple[_Receiver, ...] = ()
        self._timer_at_s = math.inf
        self._reached: set[int] = set()  # peers met that have not left
        self._left: dict[int, PeerLeft] = {}
        self._peers = _Others(num_workers, frozenset((worker_id,)))
        self._incarnation = incarnation
        self._copy_s_per_byte = copy_s_per_byte
        self._departures = _Departures(network)
        for left in network.departed() if incarnation else ():
            self._is_news(left)
            network.contacts[left.peer].add(worker_id)  # so that it hears of the peer's successor

    def send(self, to: int, message: Message) -> None:
        x = message.x
        num_bytes = HEADER_BYTES
        if x is not None:
            if self._declared_bytes is None or x.numel():
                message = message._replace(x=x.clone())
                num_bytes += x.numel() * x.element_size()
            else:
                num_bytes += round(self._declared_bytes * getattr(x, "share", 1.0))
        me, counts = self._worker_id, self._counts
        received: Received = _new(Received, (me, self._incarnation, message))
        if to == me:
            program = self._put(received)
            if program is not None:
                self._scheduler.wake(program)
            return
        if to not in self._reached:
            self._reach(to)
        if num_bytes > HEADER_BYTES and self._copy_s_per_byte:
            self._scheduler.take(self._copy_s_per_byte * (num_bytes - HEADER_BYTES))
        counts.messages += 1
        counts.sent_bytes += num_bytes
        ahead_s = self._scheduler.current.ahead_s
        if ahead_s:
            self._scheduler.call_at(self._scheduler.now_s + ahead_s, (self._departures, (me, to, received, num_bytes)))
        else:
            self._network.send(me, to, received, num_bytes)

    def receive(
        self,
        timeout_s: float | None = None,
        *,
        kind: str | tuple[str, ...] | None = None,
        sender: int | None = None,
        number: int | None = None,
    ) -> Event | None:
        """The next matching message, or the next event of a peer; None after `timeout_s`.

        If `sender` has left and no message of its remains, returns that event again.
        """
        kinds = (kind,) if isinstance(kind, str) else kind
        if self._items:
            item = self._take(kinds, sender, number)
            if item is not None:
                return item
        if sender is not None:
            item = self._left.get(sender)
            if item is not None:
                return item
        if timeout_s is not None and timeout_s <= 0:
            return None
        if sender is not None and sender not in self._network.contacts[self._worker_id]:
            self._reach(sender)
            if self._network.is_gone(sender):
                self._network.tell_gone(self._worker_id, sender)
        scheduler = self._scheduler
        if scheduler.current.ahead_s:
            scheduler.catch_up()
            item = self._take(kinds, sender, number) if self._items else None
            if item is not None or (timeout_s is not None and timeout_s <= 0):
                return item
        begun_s = scheduler.now_s
        waiter = _Receiver(kinds, sender, number)
        waiter.program = scheduler.current
        self._await(waiter, math.inf if timeout_s is None else timeout_s)
        scheduler.wait("a message")
        if waiter.program.is_main:
            waited_s = scheduler.now_s - begun_s
            self.waited_s += waited_s
            if type(waiter.item) is Received:
                self._counts.note_partner(waiter.item.sender, waited_s)
        return waiter.item

    def serve(self, kinds: tuple[str, ...], handle: Callable[[Event | None], float | None]) -> Program:
        service = _Service(self, kinds, handle)
        service.program = self._scheduler.start_serving(self._worker_id, service.go_on)
        return service.program

    def peers(self) -> Set[int]:
        return self._peers

    def arrive(self, item: Event) -> Program | None:
        """Receives an item from the network; the program that waited for it resumes at once."""
        network = self._network
        if not network.is_calm and not (
            network.boxes[self._worker_id] is self and network.lets_through(self._worker_id, item)
        ):
            return None
        if type(item) is not Received and not self._is_news(item):
            return None
        return self._put(item)

    def _reach(self, peer: int) -> None:
        """From now on the two workers learn of each other's end."""
        if peer in self._left:
            raise PeerLostError(peer, self._left[peer].reason)
        self._reached.add(peer)
        self._network.contacts[self._worker_id].add(peer)
        self._network.contacts[peer].add(self._worker_id)

    def _is_news(self, event: Event) -> bool:
        if isinstance(event, PeerLeft):
            if event.peer in self._left:
                return False
            self._left[event.peer] = event
            self._reached.discard(event.peer)
        elif isinstance(event, PeerBack) and self._left.pop(event.peer, None) is None:
            return False
        self._peers = _Others(self._num_workers, frozenset((*self._left, self._worker_id)))
        return True

    def _put(self, item: Event) -> Program | None:
        """Gives an item to the first program that waits for it, or keeps it."""
        waiters = self._waiters
        for waiter in waiters:
            if fits(item, waiter.kinds, waiter.sender, waiter.number):
                self._waiters = tuple(one for one in waiters if one is not waiter) if len(waiters) > 1 else ()
                waiter.item = item
                busy_s = waiter.busy_until_s - self._scheduler.now_s
                if busy_s <= 0:
                    return waiter.program
                self._scheduler.wake(waiter.program, busy_s)
                return None
        self._items.append(item)
        return None

    def _take(self, kinds: tuple[str, ...] | None, sender: int | None, number: int | None) -> Event | None:
        for place, item in enumerate(self._items):
            if fits(item, kinds, sender, number):
                del self._items[place]
                return item
        return None

    def _await(self, waiter: _Receiver, timeout_s: float) -> None:
        """From now on matching items go to this waiter."""
        self._waiters = (*self._waiters, waiter) if self._waiters else (waiter,)
        waiter.until_s = self._scheduler.now_s + timeout_s
        if waiter.until_s < self._timer_at_s:
            self._set_timer(waiter.until_s)

    # One timer per mailbox: most waits end long before their deadline, and a timer for each would fill the event queue.

    def _set_timer(self, at_s: float) -> None:
        if at_s < self._timer_at_s:
            self._timer_at_s = at_s
            self._scheduler.call_at(at_s, self._time_is_up)

    def _time_is_up(self) -> None:
        now_s = self._scheduler.now_s
        if now_s < self._timer_at_s:
            return  # replaced by an earlier one, which has set the next
        self._timer_at_s = math.inf
        due = [waiter for waiter in self._waiters if waiter.until_s <= now_s]
        self._waiters = tuple(waiter for waiter in self._waiters if waiter.until_s > now_s)
        for waiter in due:
            self._scheduler.wake(waiter.program, max(0.0, waiter.busy_until_s - now_s))
        self._set_timer(min((waiter.until_s for waiter in self._waiters), default=math.inf))


class _Receiver:
    """A program that waits for a message or an event."""

    __slots__ = ("busy_until_s", "item", "kinds", "number", "program", "sender", "until_s")

    def __init__(self, kinds: tuple[str, ...] | None, sender: int | None, number: int | None) -> None:
        self.kinds = kinds
        self.sender = sender
        self.number = number
        self.until_s = math.inf
        self.busy_until_s = 0.0  # it resumes no sooner
        self.item: Event | None = None
        self.program: Program


class _Service(_Receiver):
    """A program that only handles incoming items, in a loop."""

    __slots__ = ("_handle", "_mailbox")

    def __init__(
        self, mailbox: SimulatedMailbox, kinds: tuple[str, ...], handle: Callable[[Event | None], float | None]
    ) -> None:
        super().__init__(kinds, None, None)
        self._mailbox = mailbox
        self._handle = handle

    def go_on(self) -> None:
        """Handles received items, or a timeout, until none is left."""
        mailbox, item = self._mailbox, self.item
        scheduler, program = mailbox._scheduler, self.program
        self.item = None
        while True:
            timeout_s = self._handle(item)
            if timeout_s is None:
                scheduler.catch_up()
                scheduler.finish(program)
                return
            item = mailbox._take(self.kinds, None, None) if mailbox._items else None
            if item is None and timeout_s > 0:
                self.busy_until_s, program.ahead_s = scheduler.now_s + program.ahead_s, 0.0
                mailbox._await(self, timeout_s)
                return
            scheduler.catch_up()


@dataclass(eq=False, slots=True)
class _Departures:
    """Holds messages whose sender is ahead of the clock; a `Box` of the scheduler's."""

    network: Network

    def arrive(self, item: Any) -> None:
        self.network.send(*item)


class _Others(Set[int]):
    """All workers except some; thousands of mailboxes cannot each hold a set of thousands."""

    __slots__ = ("_num_workers", "_without")

    def __init__(self, num_workers: int, without: frozenset[int]) -> None:
        self._num_workers = num_workers
        self._without = without

    def __contains__(self, worker: object) -> bool:
        return worker not in self._without and isinstance(worker, int) and 0 <= worker < self._num_workers

    def __iter__(self) -> Iterator[int]:
        return (worker for worker in range(self._num_workers) if worker not in self._without)

    def __len__(self) -> int:
        return self._num_workers - len(self._without)

    @classmethod
    def _from_iterable(cls, it: object) -> frozenset[int]:
        return frozenset(it)  # type: ignore[call-overload]
