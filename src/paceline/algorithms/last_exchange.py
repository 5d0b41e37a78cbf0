"""The end of a worker's averaging: its last exchange, then those of the others, without losing an answer.

1. A worker that ends makes one more exchange, so that its model is averaged after its last gradient. If it only answers, it
   invites a neighbour to request one.
2. It tells its neighbours that it is done: it begins no more exchanges, unless invited.
3. It answers until all its neighbours are done, for at most a second, and until every request that was set aside is
   resolved: it must subtract from its own model what a partner has added to another.
4. It tells the neighbours that are not done that it is gone. They ask another one at once, and know that an unanswered request
   will never be answered.

This cannot deadlock either. A last exchange is like any other, and step 3 waits only for programs that handle messages as they
arrive, even in their own step 3. After an exception a worker skips step 1, and does not stay for the others' last exchanges.
"""

from __future__ import annotations

import math
from enum import Enum, auto

from paceline.algorithms.deadline import MeasuredDeadline
from paceline.algorithms.exchange import Exchanges
from paceline.algorithms.partners import Partners
from paceline.ports.ports import Message, Ports
from paceline.ports.shared import SharedParameters

_FEW = 16  # partners for whose last exchanges a worker stays
_MANY = 256  # above, a worker tells only partners that have exchanged with it
_STAY_S = 1.0
_LEAST_RESOLVE_S = 300.0  # only a hanging partner, which holds up the whole run, is silent for so long
_RESOLVE_DEADLINES = 10  # or this many deadlines, if longer
_SILENT_S = 30.0  # for a partner that may have ended unnoticed
_LAST_INVITE, _DONE, _GONE = Message("invite", 1), Message("done"), Message("gone")


class Step(Enum):
    """The stages of a worker's last exchanges."""

    LAST_EXCHANGE = auto()
    STAYING = auto()
    GONE = auto()


class Ending:
    """The ending of one worker's averaging."""

    def __init__(
        self,
        partners: Partners,
        exchanges: Exchanges,
        deadline: MeasuredDeadline,  # how long to wait for an invited request
        ports: Ports[SharedParameters],
        *,
        requests: bool,  # whether it begins exchanges; otherwise it invites others to
        orderly: bool,  # whether it averages once more; not after an exception
    ) -> None:
        assert ports.mailbox is not None
        self._partners = partners
        self._exchanges = exchanges
        self._deadline = deadline
        self._mailbox = ports.mailbox
        self._counts = ports.counts
        self._now_s = ports.clock.now_s
        self._stays = orderly and len(partners.ever) <= _FEW
        self._invited: set[int] = set()  # to a last exchange: they may request it though they are done
        self._awaited: tuple[int, float] | None = None  # the invited partner, and until when to wait for its request
        self._stay_until_s = self._resolve_until_s = self._silent_until_s = -math.inf
        self.step = Step.LAST_EXCHANGE
        if orderly and not requests:
            self._invite()

    def _invite(self) -> None:
        peer = self._partners.choose(0)
        self._awaited = None
        if peer is not None and self._exchanges.send(peer, _LAST_INVITE):
            self._invited.add(peer)
            self._awaited = peer, self._now_s() + self._deadline.value_s

    def answered(self) -> None:
        """A request was answered: it counts as the last exchange, even if another partner was invited."""
        self._awaited = None

    def is_gone(self, peer: int) -> None:
        """A partner has stopped averaging: if its request was awaited, invites another one."""
        self._invited.discard(peer)
        if self._awaited is not None and self._awaited[0] == peer:
            self._invite()

    def go_on(self) -> float | None:
        """Continues the ending between own exchanges; returns the seconds to wait for messages, or None once it is over."""
        now_s = self._now_s()
        if self._awaited is not None:
            if now_s < self._awaited[1]:
                return self._awaited[1] - now_s
            self._counts.peer_failures += 1
            self._awaited = None
        if self.step is Step.LAST_EXCHANGE:
            self._say_done(now_s)
        wait_s = max(self._stay_s(now_s), self._resolve_s(now_s))
        if wait_s > 0:
            return wait_s
        self._leave()
        return None

    def _say_done(self, now_s: float) -> None:
        self.step = Step.STAYING
        self._exchanges.ask_about_all()
        self._silent_until_s = now_s + _SILENT_S
        self._resolve_until_s = now_s + max(_LEAST_RESOLVE_S, _RESOLVE_DEADLINES * self._deadline.value_s)
        if self._stays:
            self._stay_until_s = now_s + _STAY_S
            reachable = self._mailbox.peers()
            for peer in self._partners.ever:
                if peer in reachable:
                    self._exchanges.send(peer, _DONE)

    def _stay_s(self, now_s: float) -> float:
        """Seconds to stay for others' last exchanges."""
        return self._stay_until_s - now_s if self._stays and self._unfinished() else 0.0

    def _resolve_s(self, now_s: float) -> float:
        """Seconds to wait for the outcome of its requests."""
        expected = self._exchanges.expected()
        if not expected:
            return 0.0
        silent = all(self._partners.may_be_over(peer) for peer in expected)
        return (self._silent_until_s if silent else self._resolve_until_s) - now_s

    def _unfinished(self) -> list[int]:
        """Neighbours that may still request something."""
        reachable, done, gone = self._mailbox.peers(), self._partners.done - self._invited, self._partners.gone
        partners = self._partners.ever if len(self._partners.ever) <= _MANY else self._exchanges.requesters()
        return [one for one in partners if one in reachable and one not in done and one not in gone]

    def _leave(self) -> None:
        self.step = Step.GONE
        for peer in self._unfinished():
            self._exchanges.send(peer, _GONE)
        self._exchanges.give_up()
