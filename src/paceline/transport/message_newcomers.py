"""How the replacement of a dead worker enters a run whose others train on in rounds of messages."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from paceline.errors import NotReplacedError, PeerLostError, RunStopped, WorkerLostError, first_line
from paceline.ports.newcomers import Refusal
from paceline.ports.ports import Mailbox, Message, PeerBack, PeerLeft, Received
from paceline.transport.message_collectives import ASK, MessageCollectives

_LATER, _REFUSED, _LET_IN, _STATE = _ANSWERS = ("newcomer later", "newcomer no", "newcomer yes", "newcomer state")
_LOOK_EVERY_S = 0.1
_GIVER_LOST = "the worker that was sending it the others' state has died, or cannot be reached"


@dataclass(eq=False)
class MessageNewcomers:
    """Implements `Newcomers` by messages.

    A newcomer asks all workers that it can reach. The first member of a round accepts it once it can reach all members, and
    says so in the round's exchange. As their next step begins, all members let it in, and the first one sends it their state.
    The others wait for it in that step's round.

    A newcomer sends "round ask". The answers are "newcomer later", with the epoch that the members are in; "newcomer no", with
    a `Refusal`; "newcomer yes" from every member, with the worker that sends the state; and "newcomer state".

    Costs: nothing while no worker asks; then the state in one message, for which the others wait.
    """

    mailbox: Mailbox
    collectives: MessageCollectives
    incarnation: int  # of this worker
    model: Callable[[], dict[str, Any]]  # returns the model's part of the state
    deadline_s: float  # how long a newcomer waits for the members' next step, and members for newcomers
    stopped: Callable[[], bool]  # whether this worker has been told to end
    min_workers: int = 1

    # The others

    def expected(self, waited_s: float) -> int:
        """As in `Newcomers`; any process may come, until the deadline."""
        return self.min_workers if waited_s < self.deadline_s else 0

    def accepted(self, epoch: int) -> dict[int, int]:
        found, requests = dict[int, int](), self.collectives.requests
        for worker, request in sorted(requests.items()):
            if self.collectives.incarnation(worker) >= request.incarnation:
                del requests[worker]
            elif request.epoch < epoch:
                del requests[worker]
                self._answer(worker, Message(_LATER, epoch))
            elif request.epoch == epoch and {*self.collectives.members, *found} <= request.peers:
                found[worker] = request.incarnation
        return found

    def refuse(self, newcomers: Mapping[int, int], why: Refusal) -> None:
        for worker in newcomers:
            self.collectives.requests.pop(worker, None)
            self._answer(worker, Message(_REFUSED, why))

    def let_in(self, newcomers: Mapping[int, int], giver: int) -> None:
        for worker, incarnation in newcomers.items():
            told = torch.tensor([giver, self.collectives.incarnation(giver)])
            self._answer(worker, Message(_LET_IN, incarnation, x=told))

    def give(self, newcomers: Mapping[int, int], state: dict[str, Any]) -> None:
        content = io.BytesIO()
        torch.save(_plain(state | self.model()), content)
        x = torch.frombuffer(content.getbuffer(), dtype=torch.uint8)
        for worker, incarnation in newcomers.items():
            self._answer(worker, Message(_STATE, incarnation, x=x))

    def _answer(self, worker: int, message: Message) -> None:
        with contextlib.suppress(PeerLostError):  # the members find out, too
            self.mailbox.send(worker, message)

    # The newcomer

    def enter(self, epoch: int) -> dict[str, Any] | None:
        """Waits until the others let this worker in; returns what they have, or None if they are past this `epoch`.

        Raises:
            NotReplacedError: they cannot let it in, or the worker that was to give it the state has died.
            RunStopped: they have ended, or this worker has been told to end.
            WorkerLostError: they do not come to their next step within the deadline.
        """
        giver, asked, lost = (-1, 0), frozenset[int](), set[tuple[int, int]]()
        until_s = time.monotonic() + self.deadline_s
        while giver not in lost:
            peers = frozenset(self.mailbox.peers())
            if self.stopped() or self.collectives.others_have_ended():
                raise RunStopped("the others have ended, or are newcomers, too")
            if peers != asked:
                asked = peers
                for one in peers:
                    self._answer(one, Message(ASK, epoch, x=torch.tensor(sorted(peers))))
            match self.mailbox.receive(_LOOK_EVERY_S, kind=(*_ANSWERS, ASK)):
                case Received(sender=sender, incarnation=incarnation, message=message):
                    kind, number, _, x, _ = message
                    if kind == ASK:
                        self.collectives.take(sender, incarnation, message)
                    elif kind == _STATE and number == self.incarnation and x is not None:
                        return _read(x)
                    elif kind == _LET_IN and number == self.incarnation and x is not None:
                        giver = tuple(x.tolist())
                    elif kind == _REFUSED:
                        raise NotReplacedError(Refusal(number).why)
                    elif kind == _LATER and number > epoch:
                        return None
                case PeerLeft(peer=peer, incarnation=incarnation):
                    lost.add((peer, incarnation))
                    self.collectives.requests.pop(peer, None)
                case PeerBack(peer=peer, incarnation=incarnation) if (peer, incarnation) in lost:
                    # What the peer sent meanwhile is lost, perhaps also that this worker is let in.
                    raise NotReplacedError("a connection broke while it waited for the others", can_try_again=True)
                case _:
                    pass
            if time.monotonic() > until_s:
                raise WorkerLostError(f"This worker could not join: the others made no step for {self.deadline_s:g} s.")
        raise NotReplacedError(_GIVER_LOST, can_try_again=True)


def _plain(value: Any) -> Any:
    """The value with Python's numbers instead of NumPy's, which reading would refuse."""
    match value:
        case dict():
            plain = copy.copy(value)  # a Counter, an OrderedDict
            plain.clear()
            plain.update({_plain(key): _plain(one) for key, one in value.items()})
            return plain
        case list() | tuple():
            return type(value)(map(_plain, value))
        case np.generic():
            return value.item()
    return value


def _read(x: torch.Tensor) -> dict[str, Any]:
    """What a member gave, without running code that a message may contain."""
    try:
        return torch.load(io.BytesIO(x.numpy().tobytes()), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        why = f"the others' state contains more than numbers and tensors ({first_line(error)})"
        raise NotReplacedError(why) from error
