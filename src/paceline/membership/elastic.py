"""Workers that come and go: they meet at a join point, take a place in the run, and from then on need only each other.

The rules. A run has N places, 0 to N - 1, and training begins once all are taken. A worker that comes later takes the place of
one that has died, with a higher incarnation and a neighbour's model; where all are alive it is refused. Who holds the join
point may die: addresses were exchanged before, and the batches that nobody has claimed by then are dealt out by worker ids.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.algorithms import Algorithm, registry
from paceline.errors import NotWrittenError, PacelineError, UsageError, WorkerLostError
from paceline.membership.board import StoreBoard
from paceline.membership.claims import JoinedClaims
from paceline.membership.environment import Invitation, WorkerEnvironment
from paceline.membership.join_point import Meeting, MeetingLostError
from paceline.membership.peers import Peers
from paceline.ports.checks import MalformedMessageError, checked_vector
from paceline.ports.ports import Counts, Mailbox, Message, PeerBack, Ports, Received
from paceline.records.run_data import write_events, write_json
from paceline.storage import tensor_files
from paceline.system.interrupts import Interruption, ended_by_system, noted
from paceline.transport.directory import read_incarnation, read_peer
from paceline.transport.way_in import is_heard

__all__ = ["JoinedRun", "check_joinable", "num_places"]

_PLACE_DEADLINE_S = 5.0  # how long a late comer looks for a place whose worker has died
_LATE_CONNECT_S = 3.0
_LOOK_EVERY_S = 2.0
_joined = False  # places are taken by processes


def check_joinable(algorithm: Algorithm) -> None:
    """Refuses algorithms that cannot go on without a worker, or that need shared memory.

    Raises:
        UsageError: with the remedy.
    """
    if "kill" not in algorithm.tolerates or not algorithm.memory.mailbox:
        spec = registry.spec(algorithm)
        why = (
            "waits for every worker"
            if algorithm.memory.kind == "replicated"
            else "works on memory that all workers share"
        )
        raise UsageError(
            f"{spec} {why}, so workers cannot come and go: choose ad-psgd, or start {spec} with"
            f" {'torchrun' if algorithm.memory.kind == 'replicated' else 'paceline.launch'}."
        )


def num_places(meeting: Meeting, of: int | None, own: int) -> int:
    """How many workers the run has: what the first to come said, which is how many it brought unless it said more.

    Raises:
        UsageError: another number was agreed on.
    """
    agreed = read_incarnation(meeting.agree("of", str(own if of is None else of)))
    if not agreed:
        raise MeetingLostError(meeting.address)
    if of is not None and of != agreed:
        raise UsageError(
            f"The run at {meeting.address} has {agreed} workers in all, and not {of}: give the same --of on every machine"
            " (PACELINE_OF), or choose another port for another run."
        )
    return agreed


@dataclass(frozen=True)
class _Place:
    """A worker's number in the run, for as long as it lives."""

    worker_id: int
    incarnation: int
    late: bool  # training has begun without it


class JoinedRun:
    """What one worker holds of a run that it joined.

    Args:
        invitation: where to go.
        algorithm: how the workers agree.
        model_words: the model's size and shapes, which all must agree on.
        deadline_s: how long to wait for the others.

    Attributes:
        environment: this worker, as the rest of Paceline knows workers.
        notes: what the user may want to know at the end.

    Raises:
        UsageError: this worker does not fit into the run, or there is no place for it.
        WorkerLostError: the others did not come within the deadline.
    """

    def __init__(self, invitation: Invitation, algorithm: Algorithm, model_words: str, deadline_s: float) -> None:
        global _joined
        _complain_in_one_sentence()
        if _joined:
            raise UsageError("A process joins a run once: start a new one, with another --join, for every training.")
        _joined = True
        check_joinable(algorithm)
        self.deadline_s = deadline_s
        self.notes: list[str] = []
        self._out = invitation.out
        self._spec = registry.spec(algorithm)
        self._meeting = Meeting(invitation.address, invitation.key, deadline_s)
        self._counts = Counts()
        self._claims: JoinedClaims | None = None
        self._stale = False  # its parameters are not the others'
        self._signals = contextlib.ExitStack()
        self._interruption = Interruption()
        try:
            num_workers = num_places(self._meeting, invitation.of, own=1)
            algorithm.check(num_workers)
            self._agree({"algorithm": registry.spec(algorithm), "model": model_words})
            place = self._take_place(num_workers)
        except BaseException:
            self._meeting.close()
            raise
        self._late = place.late
        self.environment = WorkerEnvironment(
            worker_id=place.worker_id,
            num_workers=num_workers,
            incarnation=place.incarnation,
            algorithm=None,
            seed=0,
            connection=None,
            deadline_s=deadline_s,
            joined=self,
        )

    def meet(self, tensors: Iterable[torch.Tensor]) -> Peers:
        """Waits for the others; all start with worker 0's tensors. A late comer keeps its own for now."""
        environment, meeting = self.environment, self._meeting
        self._board = StoreBoard(meeting, "random", environment.worker_id, environment.num_workers)
        if not self._late and environment.random_states:  # before it can be reached
            self._board.put(environment.random_states)
        worker_id, num_workers = environment.worker_id, environment.num_workers
        peers = Peers(
            meeting,
            worker_id,
            num_workers,
            self._counts,
            lambda: self.leaves,
            incarnation=environment.incarnation,
            host=meeting.host,
            key=meeting.key,
            connect=False,
        )
        try:
            if self._late:
                self._connect_late(peers)
                self._stale = True
            else:
                self._connect_all(peers)
                with contextlib.suppress(MeetingLostError):
                    meeting.set("started", "1")
                self._stale = not self._start_alike(peers.mailbox, list(tensors))
                self._counts.messages = self._counts.sent_bytes = 0
        except BaseException:
            peers.close()
            raise
        return peers

    def random_states(self) -> list[list[int]] | None:
        """What the workers that began said of their generators; None: some said nothing, or nobody can be asked."""
        return self._board.rows()

    def ports(self, ports: Ports, peers: Peers) -> Ports:
        """The ports of a worker alone in its memory, made those of one among many."""
        environment = self.environment
        return dataclasses.replace(
            ports,
            worker_id=environment.worker_id,
            num_workers=environment.num_workers,
            random=Random(f"{environment.seed}/{environment.worker_id}"),
            counts=self._counts,
            mailbox=peers.mailbox,
            concurrency=peers.concurrency,
            incarnation=max(1, environment.incarnation) if self._stale else 0,
        )

    def claims(self, peers: Peers) -> JoinedClaims:
        """Claims of the next batch number of all workers."""
        environment = self.environment
        self._claims = JoinedClaims(
            self._meeting, peers.mailbox, environment.worker_id, environment.num_workers, self.notes
        )
        return self._claims

    @property
    def counts_all(self) -> bool:
        """Whether every batch that this worker's place was given was claimed at the join point, by this process."""
        return not self._late and (self._claims is None or not self._claims.by_ids)

    def heed_signals(self, stop: Callable[[], object]) -> None:
        """From now on Ctrl-C and SIGTERM let this worker end its training in order, by `stop`; the others go on without it."""
        self._signals.enter_context(ended_by_system())
        self._interruption = self._signals.enter_context(noted(patient=True))
        self._signals.enter_context(self._interruption.calls(stop))

    @property
    def store(self) -> Meeting:
        """The join point."""
        return self._meeting

    @property
    def leaves(self) -> bool:
        """Whether this worker has been told to end, and the others have not."""
        return bool(self._interruption)

    def end(self) -> None:
        """Says that the data is used up, so that nobody comes in any more.

        Raises:
            WorkerLostError: this worker came so late that it has no model to bring.
        """
        with contextlib.suppress(MeetingLostError):
            self._meeting.set("ending", "1")
        if self._late and self.environment.num_workers > 1 and not self._counts.averages:
            raise WorkerLostError(
                f"Worker {self.environment.worker_id} came when the others were about to end, and averaged with none of them:"
                " the run's result does not need it."
            )

    def write(self, state: str, model: nn.Module, records: np.ndarray | None = None, **figures: Any) -> None:
        """Writes what `paceline launch` wants to know into its folder: who this is, and at the end what it did.

        Where that cannot be written, the user's program goes on all the same: it may have a model to save.
        """
        if self._out is None:
            return
        try:
            self._write(self._out, state, model, records, **figures)
        except NotWrittenError as error:
            warnings.warn(str(error), stacklevel=2)

    def _write(
        self, out: Path, state: str, model: nn.Module, records: np.ndarray | None = None, **figures: Any
    ) -> None:
        worker_id = self.environment.worker_id
        if records is not None:
            write_events(out / f"events-{worker_id}.jsonl", records)
            tensor_files.save(out / "model.pt", _on_cpu(model.state_dict()))  # every worker has the same
        about = {"worker": worker_id, "incarnation": self.environment.incarnation, "pid": os.getpid(), "state": state}
        about |= {"algorithm": self._spec, "notes": self.notes, **figures}
        about["unresolved_exchanges"] = self._counts.unresolved_exchanges
        write_json(out / f"worker-{worker_id}-{self.environment.incarnation}.json", about)

    def close(self, *, failed: bool) -> None:
        """Leaves the join point; whoever holds it takes it along. Raises what a signal has left to be raised."""
        self._meeting.close()
        self._signals.close()

    # At the join point

    def _agree(self, words: dict[str, str]) -> None:
        agreed = self._meeting.agree_words("hello", words)
        for what, mine in words.items():
            if agreed.get(what) != mine:
                raise UsageError(
                    f"This worker's {what} is {mine}, and the run at {self._meeting.address} has {agreed.get(what)}: build the"
                    " same model and name the same algorithm everywhere, or choose another port for another run."
                )

    def _take_place(self, num_workers: int) -> _Place:
        """The first free place; else the first whose worker has died."""
        meeting, token = self._meeting, secrets.token_hex(8)
        until_s = time.monotonic() + _PLACE_DEADLINE_S
        while True:
            late = meeting.check(["started"])
            if meeting.check(["ending"]):
                raise UsageError(f"The run at {meeting.address} is about to end: it takes no more workers.")
            for worker_id in range(num_workers):
                key = f"place/{worker_id}"
                holder = meeting.get(key).decode() if meeting.check([key]) else ""
                incarnation = (read_incarnation(holder.split()[0]) or 0) + 1 if holder.split() else 0
                if holder and not self._has_died(worker_id, incarnation - 1):
                    continue
                mine = f"{incarnation} {token}"
                if meeting.compare_set(key, holder, mine).decode() == mine:
                    return _Place(worker_id, incarnation, late)
            if time.monotonic() > until_s:
                raise UsageError(
                    f"All {num_workers} places of the run at {meeting.address} are taken: a worker can come when another has"
                    " died; for more workers, start the run with a higher --of."
                )
            time.sleep(_LOOK_EVERY_S / 4)

    def _has_died(self, worker_id: int, incarnation: int) -> bool:
        """Whether nobody listens any more where a worker said that it would; the kernel of its machine knows first."""
        if not self._meeting.check([f"peer/{worker_id}"]):
            return False  # it is just coming
        told = read_peer(self._meeting.get(f"peer/{worker_id}"))
        if told is None or told[0] < incarnation:
            return False  # likewise, in the place of one that has died
        return not is_heard(told[1])

    # The start

    def _connect_all(self, peers: Peers) -> None:
        until_s = time.monotonic() + self.deadline_s
        while True:
            left_s = until_s - time.monotonic()
            try:
                peers.connect(min(_LOOK_EVERY_S, max(0.0, left_s)))
                return
            except WorkerLostError as error:
                if self._meeting.lost:
                    raise WorkerLostError(
                        f"The join point {self._meeting.address} ended before all {self.environment.num_workers} workers had"
                        " come: start them again."
                    ) from None
                if left_s <= 0:
                    raise WorkerLostError(
                        f"{error} The run needs {self.environment.num_workers} workers; --of says how many."
                    ) from None

    def _connect_late(self, peers: Peers) -> None:
        peers.connect(_LATE_CONNECT_S, needs_all=False)
        if self.environment.num_workers > 1 and not peers.mailbox.peers():
            raise WorkerLostError(
                f"None of the other workers of the run at {self._meeting.address} can be reached: start it again."
            )

    def _start_alike(self, mailbox: Mailbox, tensors: list[torch.Tensor]) -> bool:
        """Worker 0 sends its tensors to all; False: it died before this worker had them."""
        for index, tensor in enumerate(tensors):
            if self.environment.worker_id == 0:
                raw = tensor.contiguous().view(-1).view(torch.uint8)
                for other in mailbox.peers():
                    with contextlib.suppress(WorkerLostError):
                        mailbox.send(other, Message("start", index, x=raw))
                continue
            raw = torch.empty(tensor.nbytes, dtype=torch.uint8, device="meta")  # as it was sent: bytes
            while True:
                answer = mailbox.receive(self.deadline_s, kind="start", sender=0, number=index)
                if isinstance(answer, PeerBack):
                    continue
                if not isinstance(answer, Received):
                    return False
                with contextlib.suppress(MalformedMessageError):  # the right one may follow
                    tensor.copy_(checked_vector(answer, raw).view(tensor.dtype).view(tensor.shape))
                    break
        return True


def _on_cpu(state: dict[str, Any]) -> dict[str, Any]:
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            state[name] = value.cpu()
    return state  # with what PyTorch keeps beside its items


def _complain_in_one_sentence() -> None:
    """Lets errors that say what to do end a joined worker's process with just that, as on the command line."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if not isinstance(error, PacelineError):
            before(kind, error, trace)
            return
        print(f"paceline: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2 if isinstance(error, UsageError) else 1)

    sys.excepthook = hook
