"""A user's loader whose processes prefetch the batches that a worker has claimed."""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader

from paceline.data.claims import WorkerClaims
from paceline.data.ending_processes import ending_with_worker
from paceline.data.plan import derived_seed
from paceline.data.sources import ABSENT, END

_MOST_AHEAD = 128  # batches; shared memory has room for twice as many
_STOP_DEADLINE_S = 10.0  # from a SIGTERM to a whole job, loaders' processes included, until the run is being stopped
_DEATH_DEADLINE_S = 5.0  # from a connection's end until the death of the process is known
_LOOK_EVERY_S = 0.01
_now_s = time.monotonic


class LoaderProcesses:
    """A copy of a DataLoader, with all its settings, whose sampler is a worker's claims.

    Batches are claimed when the loader asks for them, `prefetch_factor * num_workers` ahead (at most 128), and arrive in the
    order of the claims. Towards the end of an epoch, each of several asynchronous workers claims fewer, so that none ends much
    later than the others, but one for each loader process that the loop waits for. If the loop leaves the epoch or the run is
    stopped, claimed batches that were not handed out are given back.

    Args:
        draws_as: numbers of this worker that its loader's random numbers depend on, besides the loader's `generator`, which
            is the same on all workers if it is seeded; empty: they depend on that alone.
        has_processes: whether to use the loader's processes; else batches are fetched in this process.
    """

    def __init__(
        self, loader: DataLoader[Any], num_workers: int, *, draws_as: tuple[int, ...] = (), has_processes: bool = True
    ) -> None:
        self._order = _ClaimedOrder(num_workers, loader.num_workers, loader.prefetch_factor or 1)
        self._twin = ending_with_worker(loader)
        self._twin.__dict__["sampler" if loader.batch_sampler is None else "batch_sampler"] = self._order
        self._twin.in_order = True
        if not has_processes:
            self._twin.num_workers, self._twin.timeout = 0, 0
        if draws_as and loader.generator is not None:
            drawn = torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
            self._twin.generator = torch.Generator().manual_seed(derived_seed(int(drawn), *draws_as))
        self.is_in_use = False

    def epoch(self, claims: WorkerClaims, stopped: Callable[[], bool]) -> Generator[tuple[int, Callable[[], Any]]]:
        """Numbers of batches, or ABSENT, each with a function that fetches the batch."""
        order, self.is_in_use = self._order, True
        order.begin(claims)
        try:
            for batch in order.timed(until_stopped(self._twin, stopped, order.go_under_way)):
                yield order.claimed.popleft(), lambda batch=batch: batch
            # Rounds without a batch, and batches that others have given back since this loader ended.
            while not stopped() and (number := order.claimed.popleft() if order.claimed else claims.next()) != END:
                yield number, partial(claims.batches.fetch, claims.place(number))
        finally:
            claims.give_back(order.claimed, is_left=not stopped())
            order.claimed.clear()
            self.is_in_use = False


class _ClaimedOrder:
    """The sampler of the loader: claims batches when the loader asks for them."""

    def __init__(self, num_workers: int, num_processes: int, prefetch_factor: int) -> None:
        self._num_workers = num_workers
        self._num_processes = num_processes
        self._most = min(num_processes * prefetch_factor, _MOST_AHEAD)
        self._claims: WorkerClaims | None = None
        self.claimed: deque[int] = deque()

    def begin(self, claims: WorkerClaims) -> None:
        self._claims = claims
        self._left: int | None = None  # unclaimed batches of the epoch, as far as this worker knows
        self.claimed.clear()
        self._is_under_way = False  # whether the loader asks while it hands out the first claimed batch
        self._waited_share = 0.0  # share of the epoch's time so far that the loop waited for the loader

    def go_under_way(self) -> None:
        """Records that the loader has its first batches, and from now on asks when it hands one out."""
        self._is_under_way = True

    def timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same batches; measures the share of the time that the loop waits for them."""
        waited_s, begun_s = 0.0, _now_s()
        asked_s = begun_s
        for batch in batches:
            came_s = _now_s()
            waited_s += came_s - asked_s
            self._waited_share = waited_s / max(came_s - begun_s, 1e-9)
            yield batch
            asked_s = _now_s()

    def __iter__(self) -> _ClaimedOrder:
        return self

    def __next__(self) -> Any:
        """The next batch's indices; more may follow after a StopIteration, as the loader asks again with each batch."""
        assert self._claims is not None
        ahead, most = len(self.claimed) - self._is_under_way, self._most
        if self._left is not None and self._num_workers > 1:
            busy = round(self._num_processes * self._waited_share)
            most = min(most, max(busy, -(-self._left // self._num_workers)))
        if ahead >= max(1, most) or ABSENT in self.claimed:
            raise StopIteration
        number = self._claims.next()
        if number == END:
            raise StopIteration
        self.claimed.append(number)
        if number == ABSENT:  # nothing remains to fetch, or a newcomer begins, which then fetches without processes
            raise StopIteration
        self._claims.hold(number)
        batches, place = self._claims.batches, self._claims.place(number)
        if self._claims.is_shared and batches.length is not None:
            self._left = max(0, batches.length - place - 1)
        return batches.indices(place)


def until_stopped(
    loader: DataLoader[Any], stopped: Callable[[], bool], begun: Callable[[], object] = lambda: None
) -> Iterator[Any]:
    """A loader's batches; ends early if its processes were terminated together with the whole job.

    `stopped` tells whether the run is being stopped; `begun` is called once the loader has asked for its first batches.
    """
    batches: Iterator[Any] | None = None
    while True:
        try:
            if batches is None:
                batches = iter(loader)
                _Terminated.installed()
                begun()
            batch = next(batches)
        except StopIteration:
            return
        except (RuntimeError, OSError, EOFError):  # for example of a connection to a dead process
            terminated = _Terminated.installed()
            if stopped() or (terminated is not None and terminated.are_stopped(stopped)):
                return
            raise
        yield batch


class _Terminated:
    """PyTorch's SIGCHLD handler, which raises an error when a loader process is killed, except by SIGTERM.

    When a job is terminated, all its processes get a SIGTERM, and the loop must end in order.
    """

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self._handler = handler
        self._error: RuntimeError | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        try:
            self._handler(number, frame)
        except RuntimeError as error:
            if f"{signal.strsignal(signal.SIGTERM)}" not in str(error):
                raise
            self._error = error

    @staticmethod
    def installed() -> _Terminated | None:
        """Replaces PyTorch's handler, which a loader with processes installs; None outside the main thread."""
        handler = signal.getsignal(signal.SIGCHLD)
        if threading.current_thread() is threading.main_thread() and callable(handler):
            if not isinstance(handler, _Terminated):
                handler = _Terminated(handler)
                signal.signal(signal.SIGCHLD, handler)
            return handler
        return None

    def are_stopped(self, stopped: Callable[[], bool]) -> bool:
        """Whether a batch is missing because the run is being stopped; waits, as that may become known later.

        Raises:
            RuntimeError: PyTorch's error, if a process got a SIGTERM and the run continues.
        """
        begun_s = time.monotonic()
        while time.monotonic() < begun_s + (_STOP_DEADLINE_S if self._error is not None else _DEATH_DEADLINE_S):
            if stopped():
                return True
            time.sleep(_LOOK_EVERY_S)
        if self._error is not None:
            raise self._error
        return False
