"""Workers that come and go: they meet at a join point, take a place in the run, and from then on need only each other.

A run has N places, 0 to N - 1, and training begins once all are taken. A worker that comes later takes the place of a dead
one, with a higher incarnation and what the others have; if all are alive, it is refused. The process that holds the join point
may die: the workers know each other's addresses by then, and deal out the unclaimed batches by worker ids.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Sequence

import torch

from paceline.algorithms import Algorithm, registry
from paceline.errors import UsageError, WorkerLostError
from paceline.membership.claims import JoinedClaims
from paceline.membership.environment import Invitation
from paceline.membership.final_mean import receive_vector
from paceline.membership.heir import Heir
from paceline.membership.join_point import JoinPoint, JoinPointLostError, endpoint
from paceline.membership.peers import Peers
from paceline.membership.tables import StoredTables
from paceline.optim.model_state import digest, from_bytes, to_bytes
from paceline.ports.ports import Counts, Mailbox, Message
from paceline.system.interrupts import Interruption, ended_by_system, noted
from paceline.transport.directory import read_incarnation, read_peer
from paceline.transport.local_socket import answer_of, is_endpoint

_PLACE_DEADLINE_S = 5.0  # how long a late comer looks for a place whose worker has died
_LATE_CONNECT_S = 3.0
_LOOK_EVERY_S = 2.0
_SILENCE_S = 40.0  # for which a worker that cannot be reached is waited for at most
_HEARTBEATS_OF = 8  # parts of that time: a silent peer is lost after one, and its end is certain for four
_joined = False  # places are taken by processes


def trains_in_rounds(algorithm: Algorithm) -> bool:
    """Whether workers that join train in rounds of messages, without those that have died."""
    return algorithm.survivors_continue and (algorithm.needs.collectives or algorithm.needs.views)


def check_joinable(algorithm: Algorithm, num_workers: int = 1) -> None:
    """Refuses algorithms that cannot continue without a worker, or that need shared memory or servers."""
    needs, spec = algorithm.needs, registry.spec(algorithm)
    needs_servers = needs.servers > 0 and num_workers > 1
    if (
        algorithm.same_batches
        or trains_in_rounds(algorithm)
        or ("kill" in algorithm.tolerates and needs.mailbox and not needs_servers)
    ):
        return
    why = "works on memory that all workers share"
    if needs_servers:
        why = "needs servers, which workers that join do not start"
    elif needs.kind == "replicated":
        why = "waits for every worker" if algorithm.lockstep else "has no messages to send"
    raise UsageError(
        f"{spec} {why}, so workers cannot come and go: choose all-reduce or ad-psgd, or start {spec} with"
        f" {'torchrun' if needs.kind == 'replicated' else 'paceline.launch'}."
    )


def num_places(join_point: JoinPoint, of: int | None, own: int) -> int:
    """How many workers the run has, as the first worker to join decided: `of`, or by default the number that it brought.

    Raises:
        UsageError: `of` differs from the number agreed on.
    """
    agreed = read_incarnation(join_point.agree("of", str(own if of is None else of)))
    if not agreed:
        raise JoinPointLostError(join_point.address)
    if of is not None and of != agreed:
        raise UsageError(
            f"The run at {join_point.address} has {agreed} workers in all, not {of}: give the same --of on every "
            "machine (PACELINE_OF), or choose another port for another run."
        )
    return agreed


class JoinedRun:
    """One worker's side of a run that it joined.

    Attributes:
        silence_s: how long a worker that cannot be reached is waited for in rounds; `deadline_s`, but 40 s at most.
        worker_id: its place in the run.
        num_workers: places in all.
        min_workers: if fewer than this many workers are left, they wait for replacements.
        incarnation: how many workers have had the place before.
        is_late: whether training had begun without it.
        is_stale: whether its parameters are not those that the others began with.
        own_data: whether the workers' batches are not shared out.
        tables: what the workers tell each other.
        counts: of what it communicates.
        notes: what the user may want to know at the end.

    Raises:
        UsageError: this worker does not fit into the run, or the run has no free place.
        WorkerLostError: the others did not arrive within the deadline.
    """

    def __init__(
        self,
        invitation: Invitation,  # where to go, and how long to wait for the others
        algorithm: Algorithm,
        model_words: str,  # the model's size and shapes, which all must agree on
        plan: str = "none",  # likewise, a placed model's plan, as text that differs from other plans'
        place: int | None = None,  # the only one that this worker takes; None: the first free one
    ) -> None:
        global _joined
        if _joined:
            raise UsageError("A process can join only one run: start a new process, with another --join, for each run.")
        _joined = True
        check_joinable(algorithm)
        self._algorithm, self.min_workers = algorithm, invitation.min_workers
        self.deadline_s, self.silence_s = invitation.deadline_s, min(invitation.deadline_s, _SILENCE_S)
        self._join_point = JoinPoint(invitation.address, invitation.key, self.deadline_s)
        self.spec = registry.spec(algorithm)
        self.own_data = invitation.own_data
        self.notes: list[str] = []
        self.counts = Counts()
        self.is_stale = False
        self._silent: dict[str, float] = {}  # silent addresses, and since when
        self._signals, self._coming = contextlib.ExitStack(), contextlib.ExitStack()
        self._interruption = Interruption()
        try:
            self.num_workers = num_places(self._join_point, invitation.of, own=1)
            algorithm.check(self.num_workers)
            algorithm.check_min_workers(invitation.min_workers, self.num_workers)
            check_joinable(algorithm, self.num_workers)
            least = str(invitation.min_workers)
            self._agree({"algorithm": self.spec, "model": model_words, "plan": plan, "min_workers": least})
            places = range(self.num_workers) if place is None else [place]
            self.worker_id, self.incarnation, self.is_late = self._take_place(places)
        except BaseException:
            self.close()
            raise
        self.tables = StoredTables(self._join_point, self.worker_id, self.num_workers)

    def meet(self, state: Sequence[torch.Tensor], random_states: tuple[int, ...] = ()) -> Peers:
        """Waits for the others; all start with worker 0's tensors. A late worker keeps its own until it asks a neighbour."""
        if not self.is_late:  # before it can be reached
            self.tables.tell_random_states(random_states)
        algorithm = self._algorithm
        peers = Peers(
            self._join_point,
            self.worker_id,
            self.num_workers,
            self.counts,
            lambda: self.leaves,
            incarnation=self.incarnation,
            host=self._join_point.host,
            key=self._join_point.key,
            connect=False,
            patience_s=algorithm.patience_s if algorithm.same_batches else self.silence_s / _HEARTBEATS_OF,
        )
        self._coming.close()
        try:
            if self.is_late:
                self._connect_late(peers)
                self.is_stale = True
            else:
                self._connect_all(peers)
                with contextlib.suppress(JoinPointLostError):
                    self._join_point.set("started", "1")
                self.is_stale = not self._start_alike(peers.mailbox, state)
                self.counts.messages = self.counts.sent_bytes = 0
        except BaseException:
            peers.close()
            self.close()
            raise
        if trains_in_rounds(algorithm):
            self._coming.enter_context(contextlib.closing(Heir(self._join_point, peers.ends.addresses)))
        return peers

    def claims(self, mailbox: Mailbox) -> JoinedClaims:
        return JoinedClaims(self._join_point, mailbox, self.worker_id, self.num_workers, self.notes)

    def heed_signals(self, stop: Callable[[], object]) -> None:
        """Makes Ctrl-C and SIGTERM end this worker's training cleanly, by `stop`; the others continue without it."""
        self._signals.enter_context(ended_by_system())
        self._interruption = self._signals.enter_context(noted(patient=True))
        self._signals.enter_context(self._interruption.calls(stop))

    @property
    def leaves(self) -> bool:
        """Whether this worker has been told to end, and the others have not."""
        return bool(self._interruption)

    def end(self, *, has_taken_part: bool) -> None:
        """Says that the data is used up, so that no more workers join.

        Args:
            has_taken_part: whether this worker was there from the beginning, or has averaged with another.

        Raises:
            WorkerLostError: this worker came so late that it never averaged with another.
        """
        if self.num_workers > 1 and not has_taken_part:
            raise WorkerLostError(f"Worker {self.worker_id} joined too late to take part: the others had ended.")
        self._coming.close()
        with contextlib.suppress(JoinPointLostError):
            self._join_point.set("ending", "1")

    def close(self) -> None:
        """Leaves the join point, which ends if this process holds it. Raises a pending interruption, if a signal came."""
        self._coming.close()
        self._join_point.close()
        self._signals.close()

    # At the join point

    def _agree(self, words: dict[str, str]) -> None:
        agreed = self._join_point.agree_words("hello", words)
        for what, mine in words.items():
            if agreed.get(what) != mine:
                raise UsageError(
                    f"This worker's {what} is {mine}, and the run at {self._join_point.address} has {agreed.get(what)}: build"
                    " the same model and give the same options everywhere, or choose another port for another run."
                )

    def _take_place(self, places: Sequence[int]) -> tuple[int, int, bool]:
        """The first free one of these places; else the first whose worker has died.

        Returns:
            worker, incarnation, whether training has begun.
        """
        join_point = self._join_point
        coming = self._coming.enter_context(join_point.listen())
        token = f"{secrets.token_hex(8)} {endpoint(coming.getsockname())}"
        until_s = time.monotonic() + _PLACE_DEADLINE_S
        while True:
            self._silent_before, self._silent = self._silent, {}
            late = join_point.check(["started"])
            if join_point.check(["ending"]):
                raise UsageError(f"The run at {join_point.address} is about to end and takes no more workers.")
            for worker_id in places:
                key = f"place/{worker_id}"
                holder = join_point.get(key).decode() if join_point.check([key]) else ""
                told, _, coming = holder.rpartition(" ")
                incarnation = (read_incarnation(told.partition(" ")[0]) or 0) + 1 if holder else 0
                if holder and not self._has_died(worker_id, incarnation - 1, coming):
                    continue
                mine = f"{incarnation} {token}"
                if join_point.compare_set(key, holder, mine).decode() == mine:
                    return worker_id, incarnation, late
            if time.monotonic() > until_s and not self._silent:
                taken = f"All {len(places)} places of the run at {join_point.address} are taken"
                if len(places) == 1:
                    taken = f"The run at {join_point.address} has a worker {places[0]} already"
                raise UsageError(
                    f"{taken}: a worker can join when another has died; for more workers, start the run with a higher --of."
                )
            time.sleep(_LOOK_EVERY_S / 4)

    def _has_died(self, worker_id: int, incarnation: int, coming: str) -> bool:
        """Whether no process listens at a worker's address any more.

        Until a worker has published its mailbox's address, it listens at `coming`, which is part of its claim to the place.
        """
        where = self._mailbox_of(worker_id, incarnation)
        if where is None:
            if not is_endpoint(coming) or self._may_listen(coming):
                return False
            where = self._mailbox_of(worker_id, incarnation)  # it may have been published since
        return where is None or not self._may_listen(where)

    def _may_listen(self, where: str) -> bool:
        """Whether a process may listen there. The kernel answers for a suspended one, too.

        A worker whose machine does not answer keeps its place as long as the others wait for it.
        """
        answer = answer_of(where)
        if answer == "silence":
            self._silent[where] = self._silent_before.get(where, time.monotonic())
            return time.monotonic() - self._silent[where] < self.silence_s
        return answer != "refusal"

    def _mailbox_of(self, worker_id: int, incarnation: int) -> str | None:
        key = f"peer/{worker_id}"
        told = read_peer(self._join_point.get(key)) if self._join_point.check([key]) else None
        return told[1] if told is not None and told[0] >= incarnation else None

    # The start

    def _connect_all(self, peers: Peers) -> None:
        until_s = time.monotonic() + self.deadline_s
        while True:
            left_s = until_s - time.monotonic()
            try:
                peers.connect(min(_LOOK_EVERY_S, max(0.0, left_s)))
                return
            except WorkerLostError as error:
                if self._join_point.lost:
                    raise WorkerLostError(
                        f"The join point {self._join_point.address} ended before all {self.num_workers} workers had "
                        "joined: start them again."
                    ) from None
                if left_s <= 0:
                    raise WorkerLostError(
                        f"{error} The run needs {self.num_workers} workers; --of says how many."
                    ) from None

    def _connect_late(self, peers: Peers) -> None:
        peers.connect(_LATE_CONNECT_S, needs_all=False)
        if self.num_workers > 1 and not peers.mailbox.peers():
            raise WorkerLostError(
                f"None of the other workers of the run at {self._join_point.address} can be reached: start it again."
            )

    def _start_alike(self, mailbox: Mailbox, state: Sequence[torch.Tensor]) -> bool:
        """Worker 0 sends each worker the tensors that differ; returns False if it died before this worker had all."""
        own = torch.tensor(list(map(digest, state))).view(-1)
        others = mailbox.peers() if self.worker_id == 0 else [0]
        theirs = None
        for other in others:
            with contextlib.suppress(WorkerLostError):
                mailbox.send(other, Message("digests", x=own))
        for other in others:
            theirs = receive_vector(mailbox, self.deadline_s, "digests", other, own)
            if theirs is None:
                continue
            for number in (theirs[0] != own).view(-1, 2).any(dim=1).nonzero().flatten().tolist():
                if self.worker_id == 0:
                    with contextlib.suppress(WorkerLostError):
                        mailbox.send(other, Message("start", number, x=to_bytes(state[number])))
                    continue
                raw = torch.empty(int(theirs[0][2 * number]), dtype=torch.uint8, device="meta")
                answer = receive_vector(mailbox, self.deadline_s, "start", other, raw, number)
                if answer is None:
                    return False
                from_bytes(state[number], answer[0])
        return self.worker_id == 0 or theirs is not None
