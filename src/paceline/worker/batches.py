"""The batches of a loop under `attach`: one epoch after the other, shared with the other workers."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from paceline.algorithms import Algorithm
from paceline.data.claims import WorkerClaims
from paceline.data.ending_processes import ending_with_worker
from paceline.data.loader_batches import LoaderBatches, cannot_be_cut, shared_batches
from paceline.data.loader_processes import LoaderProcesses, until_stopped
from paceline.data.plan import length_of, samples_in
from paceline.data.same_data import check_same
from paceline.data.sources import ABSENT, END
from paceline.data.stream_batches import StreamBatches
from paceline.errors import UsageError
from paceline.loop.run_progress import RunProgress
from paceline.membership.final_mean import BatchesTaken
from paceline.ports.round_shares import RoundShares
from paceline.system.global_randomness import SeparateRandomness
from paceline.transport.device import moving_to
from paceline.worker.memberships.membership import BatchShare, LoopState, Membership
from paceline.worker.own_rounds import in_own_rounds

_TWO_AT_ONCE = (
    "The loop iterates worker.batches twice at once, as in zip(worker.batches(a), worker.batches(b)), but workers share only"
    " one epoch at a time: give it the loader that defines the epoch and iterate the other loader itself, or combine both"
    " data sets, for example with StackDataset."
)


_NO_GRADIENTS = (
    "The loop went through worker.batches with gradients disabled and made no step, as in an evaluation, but worker.batches is"
    " for training data only: evaluate on the loader itself, or on islice(loader, worker.worker_id, None, worker.num_workers)."
)


class WorkerBatches:
    """Hands out a worker's batches, begins a step with each, and saves the worker's part of a checkpoint before an epoch.

    Attributes:
        deferred: for a loop that fetches ahead: for each batch handed out, its number of samples, and a function that begins
            its step. None: a step begins when its batch is handed out.
    """

    def __init__(
        self,
        *,
        membership: Membership,
        algorithm: Algorithm,
        replica: Any,  # the worker's; each batch begins one of its steps
        optimizer: torch.optim.Optimizer,  # the user's, whose state is saved
        taken: int,  # batches that this worker took before (a resumed run, or an earlier incarnation)
        progress: RunProgress,  # counts what is handed out
        bind_newest: Callable[[], None],  # binds the model to a copy of the newest parameters
        randomness: Callable[[int], SeparateRandomness],  # makes an epoch's random states, equal on all workers
    ) -> None:
        # With the same batches, each worker takes all, as if it were alone.
        self.worker_id, self.num_workers = (0, 1) if algorithm.same_batches else membership.dealt
        self.algorithm = algorithm
        self._membership = membership
        self._replica = replica
        self._shares = RoundShares(self.num_workers) if algorithm.by_speed and self.num_workers > 1 else None
        self._optimizer, self._taken, self._progress = optimizer, taken, progress
        self._bind_newest = bind_newest
        self._randomness = randomness
        self._known: tuple[Any, LoaderBatches] | None = None
        self._share: BatchShare | None = None
        self._claims: WorkerClaims | None = None
        self._processes: tuple[Any, LoaderProcesses] | None = None  # of the last loader
        self._stream: tuple[Any, DataLoader[Any]] | None = None  # likewise
        self._epoch = 0
        self._not_begun: deque[int] = deque()  # numbers of the batches that the loop has got ahead of their steps
        self.deferred: deque[tuple[int, Callable[[], None]]] | None = None
        self._is_epoch_told = self._is_begun = self._has_entered = self._takes_part = False
        self._entry: dict[str, Any] | None = None  # what the others have given this newcomer

    @property
    def is_behind(self) -> bool:
        """Whether this newcomer has neither had a batch nor begun a step: its loop has not reached the others' epoch."""
        has_begun = self._takes_part or self._replica.step > 0
        return self._entry is not None or (self._membership.incarnation > 0 and not has_begun)

    def take_part(self) -> None:
        """The others wait for this worker from now on, for example in `worker.sum`."""
        if not self._takes_part:
            self._takes_part = True
            self._membership.take_part(max(0, self._epoch - 1))

    @property
    def given(self) -> BatchesTaken:
        """The batches that the loop got from a shared counter, or claimed ahead and left."""
        claims = self._claims
        if claims is None:
            return BatchesTaken()
        is_known = claims.reached is not None and claims.batches.length == claims.batches.epoch_numbers
        return BatchesTaken(claims.num_claimed, claims.reached or 0) if is_known else BatchesTaken(-1)

    def batches_of(self, loader: Iterable[Any]) -> LoaderBatches:
        if self._known is None or self._known[0] is not loader:
            self._replica.shares = self._shares
            batches = shared_batches(loader, self._membership.seed, self._shares)
            self._known = loader, self._streamed(loader) if batches is None else batches
        return self._known[1]

    def _streamed(self, loader: Iterable[Any]) -> StreamBatches:
        if self._shares is not None:
            raise cannot_be_cut(f"a {type(loader).__name__} that can only be iterated")
        run = self._membership
        reads_alike = run.num_workers > 1 and run.streams is None
        return StreamBatches(
            loader,
            partial(self._stream_of, loader),
            randomness=self._randomness if reads_alike else None,
            round_size=self.num_workers if self.algorithm.lockstep else 1,
            num_compared=self.num_workers if reads_alike else 0,
            readers=run.streams,
        )

    def length(self, loader: Any, *, own: bool = False) -> int:
        """The rounds of an epoch in lockstep, else the most batches that a worker can get; `TypeError`: it is unknown."""
        if own or not self._membership.deals_batches:
            return len(loader)
        whole = self.batches_of(loader).length
        if whole is None:
            raise TypeError(f"{type(loader).__name__} does not tell how many batches it has")
        return -(-whole // self.num_workers) if self.algorithm.lockstep else whole

    def epoch(self, loader: Iterable[Any], *, own: bool = False) -> Iterator[Any]:
        if own or not self._membership.deals_batches:
            if self._membership.num_workers == 1:
                return self._whole(loader, iter(loader))  # drawn now, as the loader's own iterator is
            return self._own(loader)
        return self._shared_epoch(loader)

    def _shared_epoch(self, loader: Iterable[Any]) -> Iterator[Any]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        self._not_begun.clear()
        if self._epoch > 1 and self._membership.stopped():  # a loop goes through the epochs that are left
            self._membership.raise_if_terminated()
            return
        self._membership.reach_epoch(epoch)
        batches = self.batches_of(loader)
        claims = self._claims_for(batches)
        claims.begin(epoch, len(self._unstepped()))
        if not self._enter(claims):
            return
        move = moving_to(batches.device) if batches.device is not None else None
        batch: Any = None
        started_s, step = self._replica.now_s(), self._replica.step
        for number, fetch in self._handed_out(claims, epoch):
            if number != ABSENT:
                batch = fetch()
            elif batch is None:
                batch = batches.fetch(claims.places_of_round()[0])
            if move is not None:
                batch = move(batch)
            samples = 0
            if number != ABSENT:
                place = claims.place(number)
                # The loader's number first: a batch's first tensor may hold edges, or have time as its first dimension.
                samples = batches.samples(place) or length_of(batch) or 1
                if not self._is_epoch_told and batches.length is not None:
                    self._is_epoch_told = True
                    self._membership.tell_epoch(batches.length * samples)
                if batches.shares is not None:
                    samples = len(batches.indices(place))
            self._begin(started_s, number if samples else -1, samples, claims.taken)
            yield batch
            if self._epoch != epoch + 1 and not self._membership.stopped():
                raise UsageError(_TWO_AT_ONCE)
            started_s = self._replica.now_s()
        self._membership.raise_if_terminated()
        self._tell_end()
        if self._replica.step == step + 1 and not (self._replica.idle or torch.is_grad_enabled()):
            raise UsageError(_NO_GRADIENTS)
        # Between two epochs the loop, for example in an evaluation, uses a copy that no other worker writes.
        if self._replica.idle:
            self._bind_newest()
        if self._replica.step == 0 and epoch == 0 and (batches.length or self.num_workers) < self.num_workers:
            warnings.warn(
                f"This worker got no batch: {batches.length} batches an epoch are too few for {self.num_workers} workers.",
                stacklevel=3,
            )

    def _enter(self, claims: WorkerClaims) -> bool:
        """Enters a run as a dead worker's replacement; returns whether the others are in this epoch, too."""
        if self._has_entered:
            return True
        if self._membership.incarnation:
            self._replica.prepare_to_enter()
        if self._entry is None:
            self._entry = self._membership.enter(claims.epoch)
        if self._entry is None or self._entry.get("deal", {}).get("epoch", 0) > claims.epoch:
            return False
        if self._entry:
            claims.enter(self._entry["deal"])
            self._replica.enter(self._entry)
        self._has_entered, self._entry = True, None
        return True

    def _begin(self, started_s: float, number: int, samples: int, round: int) -> None:
        self._not_begun.append(number)
        if self.deferred is None:
            self._begin_step(started_s, number, samples, round)
        else:
            self.deferred.append((samples, partial(self._begin_step, started_s, number, samples, round)))

    def _begin_step(self, started_s: float, number: int, samples: int, round: int) -> None:
        if self._replica.deal is not None:
            self._replica.deal.begun = round
        self._replica.begin(started_s, number, samples)
        self._not_begun.popleft()

    def _tell_end(self) -> None:
        if self._replica.awaited is not None:
            self._replica.awaited.came_to_end = True

    def _handed_out(self, claims: WorkerClaims, epoch: int) -> Generator[tuple[int, Callable[[], Any]]]:
        """Number of each batch for the loop, or ABSENT, and a function that fetches it."""
        first = True
        with closing(self._claimed(claims)) as source:
            while not self._membership.stopped():
                number, fetch = next(source, (END, None))
                if first and (number != END or epoch == 0):  # the others may have had the whole first epoch
                    self._check_same(claims.batches, epoch)
                if number == END or fetch is None:
                    return
                if first:
                    first = False
                    self.take_part()
                    leads = self._leads(claims, number)
                    first_batch = epoch * claims.batches.epoch_numbers
                    state = LoopState(self._optimizer, claims.taken, claims.left_at_epoch())
                    step = self._replica.step + 1 if self.algorithm.same_batches else 0
                    self._membership.begin_epoch(epoch, first_batch, state, leads=leads, step=step)
                elif self.algorithm.same_batches and not (self._replica.is_under_way or self._not_begun):
                    state = LoopState(self._optimizer, claims.taken, claims.left())
                    self._membership.begin_epoch(
                        None, number, state, leads=self._leads(claims, number), step=self._replica.step + 1
                    )
                self._membership.before_batch()
                claims.hand_out(number)
                self._tell_progress(claims, epoch, number)
                yield number, fetch

    def _leads(self, claims: WorkerClaims, number: int) -> bool:
        """Whether this worker saves the parameters, given its first batch of an epoch."""
        if not self.algorithm.in_rounds:
            return claims.place(number) == 0
        return self._membership.worker_id == (claims.deal.members[0] if self.algorithm.lockstep and claims.deal else 0)

    def _check_same(self, batches: LoaderBatches, epoch: int) -> None:
        """Compares the epoch's data with the other workers'; if processes fetch, only in the first epoch."""
        processes = self._membership.has_own_process and getattr(batches.loader, "num_workers", 0) > 0
        if self._membership.num_workers > 1 and not (processes and epoch):
            own = batches.fingerprint(in_processes=processes)
            check_same(own, self._get_share().counts.agree(epoch, own.numbers))

    def _claimed(self, claims: WorkerClaims) -> Generator[tuple[int, Callable[[], Any]]]:
        """Fetches in the loader's own processes, if it has some and this worker has its own process; else in this process."""
        is_stream = isinstance(claims.batches, StreamBatches)
        processes = self._processes_of(claims.batches.loader) if not is_stream else None
        if processes is None:
            self._membership.begin_fetching(claims.batches.loader)
            claim = claims.next if claims.is_shared else claims.dealt
            while (number := claim()) != END:
                yield number, partial(claims.batches.fetch, claims.place(number))
            return
        with closing(processes.epoch(claims, self._membership.stopped)) as source:
            if claims.is_shared:
                yield from source
                return
            while True:
                number, fetch = next(source, (END, None))
                dealt = claims.dealt()
                if dealt == END:
                    return
                if fetch is None or dealt != number:  # a worker has died since the batch was claimed
                    fetch = partial(claims.batches.fetch, claims.place(dealt))
                yield dealt, fetch

    def _processes_of(self, loader: Any) -> LoaderProcesses | None:
        """None: the loader has no processes and pins no memory, or batches must not be fetched ahead."""
        run = self._membership
        if not isinstance(loader, DataLoader) or not run.fetches_ahead:
            return None
        if not (loader.pin_memory or (loader.num_workers and run.has_own_process)):
            return None
        if self._processes is None or self._processes[0] is not loader or self._processes[1].is_in_use:
            who = self.worker_id, run.incarnation
            draws_as = who if any(who) and run.random_states else ()
            made = LoaderProcesses(loader, self.num_workers, draws_as=draws_as, has_processes=run.has_own_process)
            self._processes = loader, made
        return self._processes[1]

    def _stream_of(self, loader: Any) -> Iterator[Any]:
        """Iterates a loader that cannot be indexed; its processes, if it has some, end with this one."""
        is_plain = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
        if not (is_plain and loader.num_workers and self._membership.has_own_process):
            return iter(loader)
        if self._stream is None or self._stream[0] is not loader:
            self._stream = loader, ending_with_worker(loader)
        return until_stopped(self._stream[1], self._membership.stopped)

    def close(self) -> None:
        """Ends the loader's own processes, and drops the reference to the worker."""
        self._bind_newest = lambda: None
        self._processes = self._stream = None

    def _tell_progress(self, claims: WorkerClaims, epoch: int, number: int) -> None:
        """Counts the batches that this worker gets, or, in lockstep, all workers in one of an epoch's rounds."""
        batches = claims.batches
        if not self.algorithm.lockstep:
            if batches.length is not None:
                self._progress.hand_out(epoch * batches.length + claims.place(number))
            return
        self._replica.round, places = claims.taken, claims.places_of_round()
        sizes = list(map(batches.samples, places))
        if not self._is_begun:
            self._is_begun = True
            done = epoch * batches.length + places[0] if batches.length is not None else 0
            self._progress.begin_at(done, done * batches.samples(0))
        self._progress.hand_out_round(len(sizes), sum(sizes) if all(sizes) else 0)

    def at_end(self, *, is_cut: bool) -> LoopState | None:
        """The loop's state, with batches left whose step the run's end has cut short; None: those left are unknown."""
        if (claims := self._claims) is None:
            share = self._get_share() if self.algorithm.in_rounds else None
            return LoopState(self._optimizer, self._taken, share.left if share is not None else None)
        if is_cut:
            for number in self._unstepped():
                claims.take_back(number)
        left = claims.left()
        return None if left is None and claims.deal is not None else LoopState(self._optimizer, claims.taken, left)

    def _unstepped(self) -> list[int]:
        """Numbers of the batches that the loop has got for a step that is not over."""
        return [*(self._replica.batches_of_step if self._replica.is_under_way else ()), *self._not_begun]

    def _get_share(self) -> BatchShare:
        self._share = self._share or self._membership.batches()
        return self._share

    def _claims_for(self, batches: LoaderBatches) -> WorkerClaims:
        """The claims on one data set; a second data set of another size would need its own counts."""
        if self._claims is None:
            self._claims = WorkerClaims(
                batches,
                worker_id=self.worker_id,
                num_workers=self.num_workers,
                lockstep=self.algorithm.in_rounds,
                tracks=self.algorithm.survivors_continue,
                taken=self._taken,
                **self._get_share()._asdict(),
            )
            self._replica.claims = self._claims
        elif self._claims.batches.key != batches.key:
            raise UsageError(
                "worker.batches was given loaders of different sizes: use it for the training data only. To make "
                "batches larger during training, accumulate gradients."
            )
        self._claims.batches = batches
        if self.algorithm.lockstep:
            self._replica.deal = self._claims.deal
        return self._claims

    def _own(self, loader: Any) -> Iterator[Any]:
        """The batches of a loader whose samples no other worker has."""
        whole = self._whole(loader, iter(loader))
        if self.algorithm.lockstep:
            run = self._membership
            whole = in_own_rounds(whole, loader, self._replica, run.gatherer.gather, run.stopped)
        yield from whole
        if self._replica.idle:
            self._bind_newest()

    def _whole(self, loader: Any, own: Iterator[Any]) -> Iterator[Any]:
        batch_size = getattr(loader, "batch_size", None)
        begin, now_s, is_stopped = self._replica.begin, self._replica.now_s, self._membership.stopped
        started_s = now_s()
        for batch in own:
            begin(started_s, -1, samples_in(batch, batch_size) or 1)  # a batch of unknown length counts as one sample
            yield batch
            if is_stopped():
                break
            started_s = now_s()
        self._tell_end()
