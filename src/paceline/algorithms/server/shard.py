"""One shard of a parameter server: receives gradients, applies the admitted ones, and answers with parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.algorithms.server.admission import Verdict
from paceline.algorithms.server.announced import Announced
from paceline.algorithms.server.answers import Answers
from paceline.algorithms.server.average import SharedAverage, without_average
from paceline.algorithms.server.choices import Choices
from paceline.algorithms.server.gathering import tell_choice, without_gathered
from paceline.algorithms.server.incoming import check_form, read_choice, read_gradient, read_settings, read_state
from paceline.algorithms.server.requests import Meetings, Requests
from paceline.algorithms.server.served import ShardRules
from paceline.algorithms.server.standby_log import CopyLink
from paceline.algorithms.server.update import (
    COUNTED,
    DROPPED,
    DecidedUpdate,
    UpdateInfo,
    WaitingGradient,
    as_one,
    info_of,
)
from paceline.algorithms.server.user import UserApplier
from paceline.compression.measured import moves_in
from paceline.errors import PeerLostError, WorkerLostError
from paceline.optim.rows import Selection
from paceline.optim.settings import OptimizerSettings
from paceline.ports.checks import MalformedMessageError
from paceline.ports.ports import Message, PeerBack, PeerLeft, Received, ServerPorts
from paceline.system.torch_internals import tree_map

_FIRST_DEADLINE_S = 60.0  # for workers to report; later ones count as dead until they do
RETURN_DEADLINE_S = 10.0  # the same, at the successor of a dead shard


class Shard:
    """A shard's program.

    Every update carries its worker's incarnation and a sequence number; an update that is not newer than the last is a
    duplicate: it is answered but not applied. Snapshots hold the last numbers of all workers with the parameters, so that a
    successor knows which updates they include.

    Costs: the parameters, the rule's state, and one message per worker; a mean is summed up in the first of them.
    """

    def __init__(self, shard_id: int, rules: ShardRules, ports: ServerPorts) -> None:
        assert ports.mailbox is not None
        self._id, self._rules = shard_id, rules
        self._decoding_moves = moves_in(ports, rules.codec).decoding
        self._ports, self._mailbox, self._shared = ports, ports.mailbox, ports.shared
        self._x: Tensor = ports.shared.x
        self._link: CopyLink | None = None  # to the second copy, if there is one
        self._admission = rules.admission(shard_id)
        self._applier, self._gathering = rules.apply.start(len(self._x), self._x.dtype), rules.gathering
        decay = rules.average
        self._average = SharedAverage(ports, decay, with_buffers=not shard_id) if decay is not None else None
        self._user = user if isinstance(user := self._applier.innermost, UserApplier) else None
        if self._user is not None:
            self._user.begin = ports.shared.ranges[shard_id][0]
        self._choices = Choices(ports, are_made=rules.chooses and not shard_id)
        self._settings: dict[int, OptimizerSettings] = {}
        self._known: dict[int, DecidedUpdate] = {}
        self._held: dict[int, WaitingGradient] = {}
        self._announced = Announced(self._x, ports.shared.ranges[shard_id], takes_rows=rules.takes_rows)
        self._answers = Answers(ports, shard_id, self._announced)
        self._requests, self._meetings = Requests(), Meetings()
        self._present = set(range(ports.num_workers))
        self._said_goodbye, self._gone = set[int](), set[int]()
        self._not_back, self._patience_s = set(self._present), _FIRST_DEADLINE_S  # workers that have not reported yet
        self._counted = {"backups": 0, "incomplete": 0}  # the admission's counts, as last reported to the run
        self._given_s: dict[int, float] = {}  # worker -> when it was sent the parameters for its next gradient

    def run(self) -> None:
        """Serves until all workers have said goodbye and left."""
        self._begin()
        storage = self._ports.storage
        try:
            while len(self._said_goodbye & self._gone) < self._ports.num_workers:
                if storage is not None:
                    storage.keep(self.state, self._shared.version)
                self._take_next()
                self._settle()
        finally:
            if storage is not None:
                storage.checkpoint(self.state, None)

    def _take_next(self) -> None:
        """Handles one message or event; releases an applied gradient's memory, which its answer needs."""
        match self._mailbox.receive(self._patience_s if self._not_back else None):
            case event if self._link is not None and self._link.is_about(event):
                self._link.hear(event)
            case Received() as received:
                try:
                    self._hear(received)
                except MalformedMessageError:
                    self._shared.count("malformed")
            case PeerLeft(peer=peer, reason=reason):
                self._left(peer, reason)
            case PeerBack(peer=peer):
                self._back(peer)
            case None:
                for worker in sorted(self._not_back):
                    self._left(worker, "it did not come")
                self._not_back.clear()

    # State that survives the server

    def state(self) -> dict[str, Any]:
        """The state for a successor, or for a later run with another number of shards."""
        state = self._state()
        is_copy = self._applier.copies_state and self._average is None  # as large as the parameters
        kept = {"rule": state.pop("rule")} if is_copy else {}
        return tree_map(lambda one: one.clone() if isinstance(one, Tensor) else one, state) | kept

    def _state(self) -> dict[str, Any]:
        return {
            "range": self._shared.ranges[self._id],
            "x": self._x,
            "version": self._shared.version,
            "known": {worker: tuple(one) for worker, one in self._known.items()},
            "present": sorted(self._present),
            "goodbye": sorted(self._said_goodbye),
            "backups": self._counted["backups"],
            "admission": self._admission.state(),
            "meetings": self._meetings.state(),
            "settings": {worker: settings.to_tensor() for worker, settings in self._settings.items()},
            "choice": self._choices.state(),
            "rule": self._applier.state() | self._gathering.state() | (self._average.state() if self._average else {}),
        }

    def _begin(self) -> None:
        kept = self._ports.storage.restore() if self._ports.storage is not None else None
        if kept is not None and "known" in kept:
            self._load(kept)
            self._not_back, self._patience_s = set(self._present), RETURN_DEADLINE_S
            self._choices.take_over(self._shared.version, self._mailbox)
        elif kept is not None:
            self._load_rule(kept["rule"])
        self._admission.over(self._shared.version)
        tell_choice(self._gathering, self._shared)
        if self._ports.copies:
            self._link = CopyLink(self._ports, self._id, self._state_and_reads)
            self._link.begin(_FIRST_DEADLINE_S)

    def _load(self, kept: dict[str, Any]) -> None:
        self._load_rule(kept["rule"])
        self._counted["backups"] = kept["backups"]
        self._known = {worker: DecidedUpdate(*one) for worker, one in kept["known"].items()}
        self._said_goodbye, self._present = set(kept["goodbye"]), set(kept["present"])
        for worker in set(range(self._ports.num_workers)) - self._present:
            self._admission.leave(worker)
            self._gathering.leave(worker)
        self._admission.load(kept["admission"])
        self._admission.absent = self._meetings.load(kept["meetings"])
        self._settings = {worker: OptimizerSettings.from_tensor(one) for worker, one in kept["settings"].items()}
        self._choices.load(kept["choice"])

    def _load_rule(self, state: dict[str, Tensor]) -> None:
        self._applier.load(without_gathered(without_average(state)))
        self._gathering.load(state, self._x.dtype)
        if self._average is not None:
            self._average.load(state)

    def _state_and_reads(self) -> dict[str, Any]:
        return {**self._state(), "reads": self._applier.reads()}

    # Messages

    def _hear(self, received: Received) -> None:
        sender, incarnation, message = received
        check_form(received, self._ports.num_workers)
        is_away = sender in self._admission.absent
        self._not_back.discard(sender)
        self._requests.hear(sender, message)
        self._answers.hear(received)
        self._admission.absent = self._meetings.hear(sender, message)
        match message.kind:
            case "push" | "push-only":
                selection = self._announced.selection(sender, message.number)
                self._push(received, read_gradient(received, self._rules.codec, self._x, selection), selection)
            case "settings":
                self._settings[sender] = read_settings(received, self._settings, self._shared.ranges)
                self._log("copy-settings", message.x, about=sender)
            case "state" if self._user is not None:
                self._user.begin_with(read_state(received, self._x))
                self._log("copy-loaded", message.x, about=sender)
            case "rows" | "lookup" | "echo":
                self._announced.hear(received)
            case "join" if message.number:  # the worker is a member already and adopts another shard's clock
                self._hear_clock(sender, message.number)
            case "join" if self._requests.joins(sender, incarnation, is_away=is_away):
                self._join(sender, 0)
            case "meet":
                self._log("copy-meet", about=sender, weight=message.number)
            case "bye":
                self._said_goodbye.add(sender)
                self._log("copy-bye", about=sender)
                self._leave(sender)
            case "fetch" if message.version > self._shared.version:
                self._admission.past(sender)
            case "clock":
                self._hear_clock(sender, message.number)
            case "choice":
                self._admission.choose(message.number, read_choice(received, self._ports.num_workers))
            case "save" if self._ports.storage is not None:
                self._ports.storage.checkpoint(self.state, message.number)

    def _push(self, received: Received, gradient: Tensor, selection: Selection | None) -> None:
        sender, incarnation, message = received
        if sender not in self._settings:
            return  # the predecessor had them: once the worker notices the change, it sends both again
        if sender not in self._present:  # it was wrongly taken for dead
            self._join(sender, message.number)
        known, held = self._known.get(sender), self._held.get(sender)
        if held is not None and (held.incarnation, held.update.sequence) == (incarnation, message.number):
            self._shared.count("duplicate")  # its answer comes when the step is complete
            return
        if known is not None and (incarnation, message.number) <= known[:2]:
            self._shared.count("duplicate")
            self._requests.decided[sender] = (message.number, known.applied_version)
            return
        if sender in self._given_s:
            self._admission.timed(sender, self._ports.clock.now_s() - self._given_s.pop(sender))
        self._ports.moved(self._decoding_moves)
        missing, echo = self._settings[sender].missing, self._announced.finish(sender)
        update = info_of(message, sender, self._shared, self._id, gradient, missing, selection, echo)
        one = WaitingGradient(update, incarnation, gradient)
        is_usable = self._applier.accepts(update) and (echo is not None or not self._rules.apply.echoes)
        verdict = self._admission.admit(update) if is_usable else Verdict.DROP
        match verdict:
            case Verdict.APPLY:
                self._gather(one)
            case Verdict.HOLD:
                self._held[sender] = one
            case Verdict.DROP:
                self._drop(one)

    # Updates

    def _settle(self) -> None:
        while (workers := self._admission.complete()) is not None:
            self._choices.make(self._shared.version, workers)
            if self._link is None:  # before its own update, so that all shards update in parallel
                self._choices.tell(self._mailbox)
            if workers:
                self._shared.count("held", len(workers))
                self._apply([self._held.pop(worker) for worker in workers])
            else:
                self._skip()
            self._report_counts()
            if self._link is not None:
                self._link.commit()
                self._choices.tell(self._mailbox)
            for worker in sorted(self._held):
                self._drop(self._held.pop(worker))
        is_end = not self._present - self._gone
        answers = self._requests.take_due(self._admission.may_read, self._shared.version, is_end=is_end)
        if answers and self._link is not None:
            for worker in self._requests.readers(answers) if self._applier.keeps_reads else ():
                self._link.log("copy-read", about=worker)
            self._link.commit()
        for answer in answers:
            self._answer(*answer)

    def _report_counts(self) -> None:
        for name, before in self._counted.items():
            if (now := getattr(self._admission, name)) != before:
                self._shared.count(name, now - before)
                self._counted[name] = now
                self._log(f"copy-{name}", about=now)

    def _apply(self, ones: list[WaitingGradient]) -> None:
        """One update from the mean of these gradients, weighted by samples."""
        update, gradient = as_one(ones, self._shared.version, self._ports.moved)
        if self._link is not None:  # before its own update, so that both update in parallel
            self._link.log_update(ones, update, gradient)
        version = self._make(update, gradient, len(ones))
        for one in ones:
            self._decide(one, version)

    def _gather(self, one: WaitingGradient) -> None:
        if (due := self._gathering.take(one)) is not None:
            self._apply([due])
        else:
            self._decide(one, COUNTED)
            if not one.update.staleness:
                self._requests.without_x.add(one.update.worker_id)  # it has the newest
        self._ports.moved(self._gathering.moves)
        tell_choice(self._gathering, self._shared)

    def _make(self, update: UpdateInfo, gradient: Tensor, num_gradients: int) -> int:
        """Makes an update; returns the version that it becomes."""
        settings = self._settings[update.worker_id]
        scale = num_gradients if self._rules.scales_rate else 1.0
        if (weight := self._admission.weight(update.worker_id)) != 1.0:
            gradient.mul_(weight)
            self._ports.moved(2.0)
        if self._user is not None:
            self._user.settings, self._user.scale = settings, scale
        with self._shared.writing(update.part_of(self._x)):
            self._applier.update(self._x, gradient, update, settings.learning_rate * scale)
            if self._average is not None:
                self._average.update()
            version = self._shared.advance() + self._applier.postponed
        self._answers.note(update.selection, self._shared.version)
        self._admission.applied(update)
        self._admission.over(self._shared.version)
        return version

    def _skip(self) -> None:
        self._log("copy-skip", about=self._id)
        self._admission.over(self._shared.advance())

    def _drop(self, one: WaitingGradient) -> None:
        self._shared.count("dropped")
        self._log("copy-drop", torch.tensor([one.incarnation, one.update.sequence]), about=one.update.worker_id)
        self._decide(one, DROPPED)

    def _decide(self, one: WaitingGradient, applied_version: int) -> None:
        worker, sequence = one.update.worker_id, one.update.sequence
        self._known[worker] = DecidedUpdate(one.incarnation, sequence, applied_version)
        if worker not in self._gone:
            self._requests.decided[worker] = (sequence, applied_version)

    def _answer(self, worker: int, number: int, applied_version: int) -> None:
        version = self._shared.version
        try:
            if worker in self._requests.without_x:
                self._mailbox.send(worker, Message("ack", number, applied_version, version=version))
                return
            if (clock := self._admission.clock(worker)) > number >= 0:
                self._mailbox.send(worker, Message("clock", clock))
            self._ports.moved(2.0 * self._applier.keeps_reads)
            is_whole = self._answers.send(worker, number, applied_version, version, self._applier.read(worker, version))
            if is_whole and self._admission.times_workers:
                self._given_s[worker] = self._ports.clock.now_s()
        except PeerLostError as error:
            self._left(worker, str(error))

    def _log(self, kind: str, x: Tensor | None = None, *, about: int, weight: float = 0.0) -> None:
        if self._link is not None:
            self._link.log(kind, x, about=about, weight=weight)

    # Workers that come and go

    def _join(self, worker: int, sequence: int) -> None:
        self._log("copy-join", about=worker, weight=sequence)
        self._held.pop(worker, None)
        self._announced.forget(worker)
        self._answers.forget(worker)
        self._applier.forget(worker)
        self._admission.join(worker, sequence)
        self._gathering.join(worker)
        self._present.add(worker)
        self._said_goodbye.discard(worker)
        self._gone.discard(worker)

    def _hear_clock(self, worker: int, sequence: int) -> None:
        if worker not in self._present:
            self._join(worker, sequence)
        self._admission.told(worker, sequence)

    def _leave(self, worker: int) -> None:
        self._requests.leave(worker)
        if worker in self._present:
            self._log("copy-leave", about=worker)
            self._meetings.leave(worker)
            self._present.discard(worker)
            self._applier.forget(worker)
            self._admission.leave(worker)
            if (due := self._gathering.leave(worker)) is not None:
                self._apply([due])

    def _left(self, peer: int, reason: str) -> None:
        if peer >= self._ports.num_workers:
            return
        self._gone.add(peer)
        self._requests.forget(peer)
        if peer in self._said_goodbye or reason == "ended" or self._rules.on_death == "shrink":
            self._leave(peer)
        elif self._rules.on_death == "fail":
            raise WorkerLostError(
                f"Step {self._shared.version}: worker {peer} has left ({reason}), and on_death=fail ends the run."
            )

    def _back(self, peer: int) -> None:
        if peer >= self._ports.num_workers:
            self._choices.tell(self._mailbox, (peer,))
            return
        self._gone.discard(peer)
        self._not_back.discard(peer)
