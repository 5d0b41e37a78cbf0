"""How the replacement of a dead worker enters a run whose others train on in rounds."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from paceline.errors import NotReplacedError, RunStopped
from paceline.memory.atomics import compare_and_swap, fetch_add, load, store
from paceline.memory.failpoints import fail_point
from paceline.memory.segment import Layout
from paceline.memory.segment_part import PartPlan, SegmentPart
from paceline.memory.waiting import wait_briefly, wake
from paceline.ports.newcomers import STOPPED, Refusal

# The words of each worker: what it asks for, and in which epoch; the incarnation that is let in, and the worker that gives it
# the state; the process and the file that have the state, and the incarnation for which that is; where the first of the others
# was as it accepted the worker, plus 1.
_ASKS, _EPOCH, _LET_IN, _GIVER, _PROCESS, _FILE, _GIVEN, _ACCEPTED_AT = range(0, 64, 8)
_PATIENCE_S = 600.0
_GIVER_DIED = "the worker that was to give it the others' state has died"


class SharedNewcomers(SegmentPart[PartPlan]):
    """Implements `Newcomers` in shared memory.

    A newcomer asks for its place. The first of the others accepts it in a round's exchange, so that all of them know, and as
    their next step begins all let it in. The first one puts what they all have into a file without a name, from which the
    newcomer reads while the others wait for it in that step's mean.

    The word "asks": 2 i, where incarnation i waits; 2 i + 1, where it is accepted and can no longer step back; negative: it is
    refused.
    """

    def __init__(self, *place: Any, **named: Any) -> None:
        super().__init__(*place, **named)
        self._worker_id, self.min_workers = self._participant, 1
        self._count = self._word("count")
        self._seen = 0
        self._files: dict[int, int] = {}  # what this worker gave, by newcomer
        self.place: Callable[[], int] = lambda: 0  # how far this worker is in its rounds; set by the owner

    @staticmethod
    def areas(layout: Layout, plan: PartPlan) -> dict[str, int]:
        return {
            "workers": layout.words("newcomers.workers", plan.num_participants),
            "count": layout.words("newcomers.count", 1),
            "expected": layout.words("newcomers.expected", 1),
        }

    def _at(self, worker: int, word: int) -> int:
        return self._word("workers", worker) + word

    # The supervisor

    def expect(self, number: int) -> None:
        """Publishes how many replacements are on their way, or `STOPPED`.

        Call it before `mark_lost`, so that no worker reads the old number after a death.
        """
        store(self._word("expected"), number)

    def take_acceptance(self, worker: int) -> int | None:
        """Where the first of the others was as it accepted this newcomer; None: none has, since this was last asked."""
        word = self._at(worker, _ACCEPTED_AT)
        at = load(word)
        store(word, 0)
        return at - 1 if at else None

    # The others

    def expected(self, waited_s: float) -> int:
        """As in `Newcomers`. A replacement that has not come after ten minutes hangs."""
        number = load(self._word("expected"))
        return number if number == STOPPED or waited_s < _PATIENCE_S else 0

    def accepted(self, epoch: int) -> dict[int, int]:
        if (count := load(self._count)) == self._seen:
            return {}
        found, waits = dict[int, int](), False
        for worker in range(self._plan.num_participants):
            if worker in self._files and load(self._at(worker, _FILE)) < 0:  # it has read
                os.close(self._files.pop(worker))
            asks = load(self._at(worker, _ASKS))
            incarnation, is_accepted = divmod(asks, 2)
            if asks <= 0 or load(self._at(worker, _LET_IN)) >= incarnation:
                continue
            if not is_accepted and load(self._at(worker, _EPOCH)) not in (-1, epoch):
                waits = True
            elif is_accepted:
                found[worker] = incarnation
            elif compare_and_swap(self._at(worker, _ASKS), asks, asks + 1):
                store(self._at(worker, _ACCEPTED_AT), self.place() + 1)
                found[worker] = incarnation
        if not (found or waits or self._files):
            self._seen = count
        return found

    def refuse(self, newcomers: Mapping[int, int], why: Refusal) -> None:
        for worker, incarnation in newcomers.items():
            self._answer(worker, incarnation, -why)

    def _answer(self, worker: int, incarnation: int, answer: int) -> None:
        """Answers an accepted newcomer, unless it has died and the next one asks by now."""
        compare_and_swap(self._at(worker, _ASKS), 2 * incarnation + 1, answer)
        wake(self._at(worker, _ASKS))

    def give(self, newcomers: Mapping[int, int], state: dict[str, Any]) -> None:
        fail_point("newcomers.let_in")
        content = io.BytesIO()
        torch.save(state, content)
        for worker in newcomers:
            if worker in self._files:
                os.close(self._files.pop(worker))
            file = self._files[worker] = os.memfd_create("paceline-newcomer")
            Path(f"/proc/self/fd/{file}").write_bytes(content.getbuffer())
            for word, value in ((_PROCESS, os.getpid()), (_FILE, file), (_GIVEN, newcomers[worker])):
                store(self._at(worker, word), value)
            self._answer(worker, newcomers[worker], 0)

    def let_in(self, newcomers: Mapping[int, int], giver: int) -> None:
        for worker, incarnation in newcomers.items():
            store(self._at(worker, _GIVER), giver)
            store(self._at(worker, _LET_IN), incarnation)

    def has_entered(self, worker: int, incarnation: int) -> bool:
        """Whether a worker takes part: it is its first incarnation, or the others have given it what they have."""
        return not incarnation or load(self._at(worker, _GIVEN)) >= incarnation

    # The newcomer

    def enter(
        self,
        epoch: int,
        *,
        newest: Callable[[], int],
        is_over: Callable[[], bool],
        is_dead: Callable[[int, int], bool],
    ) -> dict[str, Any] | None:
        """Waits until the others let this worker in; returns what they have, or None if they are in a later epoch.

        `epoch` is the one that its loop has reached; negative: any epoch is right. The functions return the `newest` epoch of
        the others, whether they have ended, and whether an incarnation of a worker has died.

        Raises:
            NotReplacedError: they cannot let it in, or the worker that was to give it the state has died.
            RunStopped: they have ended.
        """
        asks, asked = self._at(self._worker_id, _ASKS), 2 * self._incarnation
        store(self._at(self._worker_id, _EPOCH), epoch)
        store(asks, asked)
        fetch_add(self._count, 1)
        while (answer := load(asks)) > 0:
            if is_over():
                raise RunStopped("the others have ended")
            if 0 <= epoch < newest() and compare_and_swap(asks, asked, 0):
                return None
            giver = load(self._at(self._worker_id, _GIVER))
            is_let_in = load(self._at(self._worker_id, _LET_IN)) == self._incarnation
            if is_let_in and is_dead(giver, load(self._at(giver, _LET_IN))) and load(asks) > 0:
                raise NotReplacedError(_GIVER_DIED, can_try_again=True)
            wait_briefly(asks, answer)
        if answer < 0:
            raise NotReplacedError(Refusal(-answer).why)
        process, file = (load(self._at(self._worker_id, word)) for word in (_PROCESS, _FILE))
        try:
            content = Path(f"/proc/{process}/fd/{file}").read_bytes()
        except OSError as error:
            raise NotReplacedError(_GIVER_DIED, can_try_again=True) from error
        store(self._at(self._worker_id, _FILE), -1)
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=False)
