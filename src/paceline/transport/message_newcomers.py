"""How the replacement of a dead worker enters a run whose others train on in rounds of messages."""

from __future__ import annotations

import contextlib
import io
import pickle
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from paceline.errors import NotReplacedError, PeerLostError, RunStopped, WorkerLostError
from paceline.ports.newcomers import Refusal
from paceline.ports.ports import Mailbox, Message, PeerBack, PeerLeft, Received
from paceline.transport.message_collectives import ASK, MessageCollectives

__all__ = ["MessageNewcomers"]

_LATER, _REFUSED, _LET_IN, _STATE = _ANSWERS = ("newcomer later", "newcomer no", "newcomer yes", "newcomer state")
_LOOK_EVERY_S = 0.1
_GIVER_LOST = "the worker that was to give it the others' state has died, or cannot be reached"


class MessageNewcomers:
    """Implements `Newcomers` by messages.

    A newcomer asks all workers that it can reach. The first member of a round accepts it once it can reach all members, and
    says so in the round's exchange. As their next step begins, all members let it in, and the first one sends it what they
    have. The others wait for it in that step's round.

    Args:
        mailbox: through which all workers can be reached.
        collectives: of the members.
        incarnation: of this worker.
        model: what newcomers get of this worker's model.
        deadline_s: how long a newcomer waits for the members' next step.
        stopped: whether this worker has been told to end.

    Costs: nothing while nobody asks; then the state in one message, for which the others wait.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        collectives: MessageCollectives,
        incarnation: int,
        *,
        model: Callable[[], dict[str, Any]],
        deadline_s: float,
        stopped: Callable[[], bool],
    ) -> None:
        self._mailbox, self._collectives, self._incarnation = mailbox, collectives, incarnation
        self._model, self._deadline_s, self._stopped = model, deadline_s, stopped

    # The others

    def accepted(self, epoch: int) -> dict[int, int]:
        """As in `Newcomers`."""
        found, asks = dict[int, int](), self._collectives.asks
        for worker, ask in sorted(asks.items()):
            if self._collectives.has_let_in(worker, ask.incarnation):
                del asks[worker]
            elif ask.epoch < epoch:
                del asks[worker]
                self._answer(worker, Message(_LATER, epoch))
            elif ask.epoch == epoch and {*self._collectives.members, *found} <= ask.peers:
                found[worker] = ask.incarnation
        return found

    def refuse(self, newcomers: Mapping[int, int], why: Refusal) -> None:
        """As in `Newcomers`."""
        for worker in newcomers:
            self._collectives.asks.pop(worker, None)
            self._answer(worker, Message(_REFUSED, why))

    def let_in(self, newcomers: Mapping[int, int], giver: int) -> None:
        """As in `Newcomers`."""
        for worker, incarnation in newcomers.items():
            self._answer(worker, Message(_LET_IN, incarnation, version=giver))

    def give(self, newcomers: Mapping[int, int], state: dict[str, Any]) -> None:
        """As in `Newcomers`."""
        content = io.BytesIO()
        torch.save(state | self._model(), content)
        x = torch.frombuffer(content.getbuffer(), dtype=torch.uint8)
        for worker, incarnation in newcomers.items():
            self._answer(worker, Message(_STATE, incarnation, x=x))

    def _answer(self, worker: int, message: Message) -> None:
        with contextlib.suppress(PeerLostError):  # the members find out, too
            self._mailbox.send(worker, message)

    # The newcomer

    def enter(self, epoch: int) -> dict[str, Any] | None:
        """Waits until the others let this worker in.

        Args:
            epoch: that its loop has reached.

        Returns:
            what the others have; None: they are in a later epoch.

        Raises:
            NotReplacedError: they cannot let it in, or the worker that was to give it the state has died.
            RunStopped: they have ended, or this worker has been told to end.
            WorkerLostError: they do not come to their next step within the deadline.
        """
        giver, asked, lost = -1, frozenset[int](), dict[int, int]()
        until_s = time.monotonic() + self._deadline_s
        while giver not in lost:
            peers = frozenset(self._mailbox.peers())
            if self._stopped() or peers <= self._collectives.asks.keys():
                raise RunStopped("the others have ended, or are newcomers, too")
            if peers != asked:
                asked = peers
                for one in peers:
                    self._answer(one, Message(ASK, epoch, x=torch.tensor(sorted(peers))))
            match self._mailbox.receive(_LOOK_EVERY_S, kind=(*_ANSWERS, ASK)):
                case Received(sender=sender, incarnation=incarnation, message=message):
                    kind, number, _, x, version = message
                    if kind == ASK:
                        self._collectives.take(sender, incarnation, message)
                    elif kind == _STATE and number == self._incarnation and x is not None:
                        return _read(x)
                    elif kind == _LET_IN and number == self._incarnation:
                        giver = version
                    elif kind == _REFUSED:
                        raise NotReplacedError(Refusal(number).why)
                    elif kind == _LATER and number > epoch:
                        return None
                case PeerLeft(peer=peer, incarnation=incarnation):
                    lost[peer] = incarnation
                    self._collectives.asks.pop(peer, None)
                case PeerBack(peer=peer, incarnation=incarnation) if lost.get(peer) == incarnation:
                    break  # what it sent meanwhile is lost, perhaps also that this worker is let in
                case _:
                    pass
            if time.monotonic() > until_s:
                raise WorkerLostError(
                    f"The others made no step for {self._deadline_s:g} s, so that this worker was not let in."
                )
        raise NotReplacedError(_GIVER_LOST, can_try_again=True)


def _read(x: torch.Tensor) -> dict[str, Any]:
    """What a member gave, without running code that a message may contain."""
    try:
        return torch.load(io.BytesIO(x.numpy().tobytes()), weights_only=True)
    except pickle.UnpicklingError as error:
        why = "the state of the optimizer or of a scheduler contains objects that are neither numbers nor tensors"
        raise NotReplacedError(why) from error
