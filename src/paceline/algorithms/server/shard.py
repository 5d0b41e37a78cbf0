"""One shard of a parameter server: takes gradients, applies those that are admitted, and answers with parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from paceline.algorithms.server.admission import Admission, Follower, Verdict
from paceline.algorithms.server.apply import ApplyRule
from paceline.algorithms.server.codec import Codec, Encoded
from paceline.algorithms.server.update import UpdateInfo
from paceline.algorithms.server.user import UserApplier
from paceline.errors import PacelineError, PeerLostError, WorkerLostError
from paceline.optimizers import OptimizerSettings
from paceline.transport.base import Message, PeerBack, PeerLeft, Ports, Received

__all__ = ["OnDeath", "Shard", "ShardRules"]

_FIRST_DEADLINE_S = 60.0  # in which workers must come; afterwards they are taken for dead until they do
_RETURN_DEADLINE_S = 10.0  # the same, at the successor of a shard that died
_DROPPED = -1

OnDeath = Literal["shrink", "wait", "fail"]


@dataclass(frozen=True, kw_only=True)
class ShardRules:
    """What the shards of a server are put together from.

    Args:
        admission: makes a shard's admission.
        apply: by which rule gradients become updates.
        codec: what gradients look like on their way.
        on_death: what follows from a worker's death.
        scales_rate: whether the learning rate grows with the number of gradients in an update.
        chooses: whether shard 0 chooses for all whose gradients make a step.
    """

    admission: Callable[[int], Admission]
    apply: ApplyRule
    codec: Codec
    on_death: OnDeath = "shrink"
    scales_rate: bool = False
    chooses: bool = False


class _Held(NamedTuple):
    """A gradient that waits for others, with where it came from."""

    update: UpdateInfo
    incarnation: int
    gradient: Tensor
    echo: Tensor | None


class _Known(NamedTuple):
    """A worker's last update that was decided on."""

    incarnation: int
    sequence: int
    applied_version: int


class Shard:
    """A shard's program.

    Every update carries its worker's incarnation and a sequence number; one that is not newer than the last is a duplicate: it
    is answered and not applied. State that is kept for a successor holds the last numbers of all workers together with the
    parameters, so a successor knows which updates are in them.

    Costs: the parameters, the rule's state, and one message per worker; a mean is summed up in the first of them.

    Args:
        shard_id: from 0; with several, the first may choose for all.
        rules: what to do.
        ports: of this server.
    """

    def __init__(self, shard_id: int, rules: ShardRules, ports: Ports) -> None:
        assert ports.mailbox is not None
        self._id = shard_id
        self._rules = rules
        self._ports = ports
        self._mailbox = ports.mailbox
        self._shared = ports.shared
        self._x: Tensor = ports.shared.x
        self._admission = rules.admission(shard_id)
        self._applier = rules.apply.start(len(self._x), self._x.dtype)
        if isinstance(self._applier, UserApplier):
            self._applier.begin = ports.shared.ranges[shard_id][0]
        self._followers = [ports.num_workers + shard for shard in range(1, ports.num_servers)] if not shard_id else []
        self._settings: dict[int, OptimizerSettings] = {}
        self._known: dict[int, _Known] = {}
        self._held: dict[int, _Held] = {}
        self._echoes: dict[int, Tensor] = {}
        self._unanswered: dict[int, tuple[int, int]] = {}  # worker -> sequence and applied version, until it may read
        self._fetches: dict[
            int, tuple[int, int]
        ] = {}  # worker -> number of its request, and the version that it waits for
        self._awaiting_end: set[int] = set()
        self._present = set(range(ports.num_workers))
        self._said_goodbye: set[int] = set()
        self._gone: set[int] = set()
        self._not_back = set(self._present)  # workers who have not been heard of
        self._patience_s = _FIRST_DEADLINE_S
        self._last_choice: Message | None = None

    def run(self) -> None:
        """Serves until all workers have said goodbye and left."""
        self._begin()
        try:
            self._serve()
        finally:
            if self._ports.storage is not None:
                self._ports.storage.checkpoint(self.state(), None)

    def _serve(self) -> None:
        while len(self._said_goodbye & self._gone) < self._ports.num_workers:
            self._keep()
            match self._mailbox.receive(self._patience_s if self._not_back else None):
                case Received() as received:
                    self._not_back.discard(received.sender)
                    self._hear(received)
                case PeerLeft(peer=peer, reason=reason):
                    self._left(peer, reason)
                case PeerBack(peer=peer):
                    self._back(peer)
                case None:
                    for worker in sorted(self._not_back):
                        self._left(worker, "it did not come")
                    self._not_back.clear()
            self._settle()

    # What outlives the server

    def state(self) -> dict[str, Any]:
        """All that a successor needs, or a later run with another number of shards."""
        return {
            "range": self._shared.ranges[self._id],
            "x": self._x.clone(),
            "version": self._shared.version,
            "known": {worker: tuple(one) for worker, one in self._known.items()},
            "goodbye": sorted(self._said_goodbye),
            "clocks": dict(getattr(self._admission, "clocks", {})),
            "rule": {name: tensor.clone() for name, tensor in self._applier.state().items()},
        }

    def _begin(self) -> None:
        kept = self._ports.storage.restore() if self._ports.storage is not None else None
        if kept is not None:
            self._applier.load(kept["rule"])
            if "known" in kept:
                self._known = {worker: _Known(*one) for worker, one in kept["known"].items()}
                self._said_goodbye = set(kept["goodbye"])
                self._present -= self._said_goodbye
                self._not_back, self._patience_s = set(self._present), _RETURN_DEADLINE_S
                for worker in self._said_goodbye:
                    self._admission.leave(worker)
                if "clocks" in kept and hasattr(self._admission, "clocks"):
                    self._admission.clocks.update(kept["clocks"])  # type: ignore[attr-defined]
        if isinstance(self._admission, Follower):
            self._admission.step = self._shared.version

    def _keep(self) -> None:
        if self._ports.storage is not None:
            self._ports.storage.keep(self.state, self._shared.version)

    # Messages

    def _hear(self, received: Received) -> None:
        sender, incarnation, message = received
        match message.kind:
            case "push":
                self._push(sender, incarnation, message)
            case "settings" if message.x is not None:
                self._settings[sender] = OptimizerSettings.from_tensor(message.x)
            case "echo" if message.x is not None:
                self._echoes[sender] = message.x
            case "join":
                self._join(sender, 0)
                self._unanswered[sender] = (message.number, 0)
            case "bye":
                self._said_goodbye.add(sender)
                self._leave(sender)
            case "fetch":
                self._fetches[sender] = (message.number, message.version)
            case "final":
                self._awaiting_end.add(sender)
            case "choice" if isinstance(self._admission, Follower) and message.x is not None:
                self._admission.choose(message.number, tuple(message.x.tolist()))
            case "save" if self._ports.storage is not None:
                self._ports.storage.checkpoint(self.state(), message.number)
            case _:
                pass  # nothing that a worker of this version sends

    def _push(self, sender: int, incarnation: int, message: Message) -> None:
        assert message.x is not None
        known, held = self._known.get(sender), self._held.get(sender)
        if held is not None and (held.incarnation, held.update.sequence) == (incarnation, message.number):
            self._shared.count("duplicate")  # its answer comes when the step is complete
            return
        if known is not None and (incarnation, message.number) <= known[:2]:
            self._shared.count("duplicate")
            self._unanswered[sender] = (message.number, known.applied_version)
            return
        if sender not in self._present:  # it was taken for dead
            self._join(sender, message.number - 1)
        version = self._shared.version
        update = UpdateInfo(
            worker_id=sender,
            sequence=message.number,
            step=message.version,
            version_read=message.version,
            version=version,
            num_samples=int(message.weight),
        )
        gradient = message.x  # empty where only time is simulated
        if gradient.numel():
            gradient = self._rules.codec.decode(Encoded(gradient), len(self._x), self._x.dtype)
        one = _Held(update, incarnation, gradient, self._echoes.pop(sender, None))
        verdict = self._admission.admit(update) if self._applier.accepts(update) else Verdict.DROP
        match verdict:
            case Verdict.APPLY:
                self._apply([one])
            case Verdict.HOLD:
                self._held[sender] = one
            case Verdict.DROP:
                self._drop(one)

    # Updates

    def _settle(self) -> None:
        """Makes the updates that are due, and answers whoever may read."""
        while workers := self._admission.complete():
            if self._rules.chooses and self._followers:
                self._choose(workers)
            self._apply([self._held.pop(worker) for worker in workers])
            for worker in sorted(self._held):
                self._drop(self._held.pop(worker))
        for worker in [one for one in self._unanswered if self._admission.may_read(one)]:
            self._answer(worker, *self._unanswered.pop(worker))
        for worker in [one for one, (_, version) in self._fetches.items() if self._shared.version >= version]:
            self._answer(worker, self._fetches.pop(worker)[0], 0)
        if self._awaiting_end and not self._present - self._gone:
            for worker in sorted(self._awaiting_end):
                self._answer(worker, -1, 0)
            self._awaiting_end.clear()

    def _choose(self, workers: tuple[int, ...]) -> None:
        """Tells the other shards whose gradients make this step; before its own update, so that none is ever behind by two."""
        self._last_choice = Message("choice", self._shared.version, x=torch.tensor(workers))
        for follower in self._followers:
            with contextlib.suppress(PeerLostError):  # told again when it is back
                self._mailbox.send(follower, self._last_choice)

    def _apply(self, ones: list[_Held]) -> None:
        """One update from the mean of these gradients, weighted by samples."""
        first = ones[0]
        gradient = _mean(ones)
        version = self._shared.version
        update = replace(first.update, version=version, num_samples=sum(one.update.num_samples for one in ones))
        settings = self._settings.get(first.update.worker_id)
        if settings is None:
            raise PacelineError(f"Worker {first.update.worker_id} sent a gradient and no settings of its optimizer.")
        scale = float(len(ones)) if self._rules.scales_rate else 1.0
        if isinstance(self._applier, UserApplier):
            self._applier.settings, self._applier.scale = settings, scale
        with self._shared.writing():
            self._applier.apply(self._x, gradient, update, settings.learning_rate * scale, first.echo)
            version = self._shared.advance()
        self._admission.applied(update)
        for one in ones:
            self._decide(one, version)

    def _drop(self, one: _Held) -> None:
        self._shared.count("dropped")
        self._decide(one, _DROPPED)

    def _decide(self, one: _Held, applied_version: int) -> None:
        worker, sequence = one.update.worker_id, one.update.sequence
        self._known[worker] = _Known(one.incarnation, sequence, applied_version)
        if worker not in self._gone:
            self._unanswered[worker] = (sequence, applied_version)

    def _answer(self, worker: int, number: int, applied_version: int) -> None:
        version = self._shared.version
        try:
            echo = self._applier.read(worker, version)
            if echo is not None:
                self._mailbox.send(worker, Message("echo", number, x=echo))
            self._mailbox.send(worker, Message("x", number, applied_version, self._x, version))
        except PeerLostError as error:
            self._left(worker, str(error))

    # Who takes part

    def _join(self, worker: int, sequence: int) -> None:
        self._held.pop(worker, None)
        self._echoes.pop(worker, None)
        self._applier.forget(worker)
        self._admission.join(worker, sequence)
        self._present.add(worker)
        self._said_goodbye.discard(worker)
        self._gone.discard(worker)

    def _leave(self, worker: int) -> None:
        self._unanswered.pop(worker, None)
        if worker in self._present:
            self._present.discard(worker)
            self._applier.forget(worker)
            self._admission.leave(worker)

    def _left(self, peer: int, reason: str) -> None:
        if peer >= self._ports.num_workers:
            return
        self._gone.add(peer)
        self._unanswered.pop(peer, None)
        self._fetches.pop(peer, None)
        self._awaiting_end.discard(peer)
        if peer in self._said_goodbye or reason == "ended" or self._rules.on_death == "shrink":
            self._leave(peer)
        elif self._rules.on_death == "fail":
            raise WorkerLostError(
                f"Step {self._shared.version}: worker {peer} has left ({reason}), and on_death=fail ends the run then."
            )

    def _back(self, peer: int) -> None:
        if peer >= self._ports.num_workers:
            if self._last_choice is not None:
                with contextlib.suppress(PeerLostError):
                    self._mailbox.send(peer, self._last_choice)
            return
        self._gone.discard(peer)
        self._not_back.discard(peer)


def _mean(ones: list[_Held]) -> Tensor:
    """sum_i n_i g_i / sum_i n_i (P_s,), n_i: samples, in the first gradient's memory; of one, its own bits."""
    weights = [one.update.num_samples for one in ones]
    total = ones[0].gradient
    if len(ones) == 1:
        return total
    equal = len(set(weights)) == 1
    if not equal:
        total.mul_(weights[0])
    for one, weight in zip(ones[1:], weights[1:], strict=True):
        total.add_(one.gradient, alpha=1 if equal else weight)
    return total.div_(len(ones) if equal else max(1, sum(weights)))
