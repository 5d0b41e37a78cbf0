"""Whether all workers go through the same rounds: a step that one of them leaves out shifts its steps against the others'."""

from __future__ import annotations

import torch

from paceline.errors import UsageError, name_workers
from paceline.ports.ports import Ports
from paceline.ports.replica import Replica
from paceline.ports.shared import SharedParameters

__all__ = ["SameRounds", "left_out"]


class SameRounds:
    """Sees, where all workers meet, that they have been through as many rounds of batches, and made as many steps.

    A loop that goes on to its next batch without a step, as by `continue` after `backward`, cannot be told from one that
    accumulates gradients, as long as one looks at its worker alone. Where all do the same, it is right either way: their steps
    stay together. Where some do and others do not, the steps that meet are from then on of different rounds: under
    `all-reduce`, whose means are made as `backward` returns, one worker even leaves out an update that all others make. So
    that is refused where they meet next, on all of them. A loop that fetches its batches by itself has no rounds: only its
    steps count.

    Every worker expects that the others do what followed last time after as many meetings within one step, so that
    accumulation is no surprise. A number that travels anyway says how many are surprised; only then all tell where they are.

    Costs: nothing as long as nobody is surprised; else one all-reduce of two numbers for each worker.
    """

    def __init__(self, replica: Replica, ports: Ports[SharedParameters]) -> None:
        self._replica = replica
        self._ports = ports
        self._round = self._step = 0  # when they met last
        self._earlier = 0  # step of the meeting before
        self._since = (0, 0)  # rounds and steps from there to the present meeting
        self._followed: dict[int, tuple[int, int]] = {}  # by meetings since the last step
        self._meetings = 0

    def surprised(self) -> bool:
        """Whether this worker comes to the present meeting otherwise than all have agreed to expect."""
        if self._replica.round is None:
            return False
        self._look()
        expected = self._followed.get(self._meetings)
        if expected is not None:
            return self._since != expected
        rounds, steps = self._since
        return not steps or rounds not in (0, steps)

    def told(self, *, steps: bool = False) -> torch.Tensor:
        """Where this worker is, to be added up over all (2 * num_workers,); `steps`: past its gradient, about to step."""
        place = torch.zeros(2, self._ports.num_workers, dtype=torch.float64)
        place[:, self._ports.worker_id] = torch.tensor([self._replica.round or 0, self._replica.step + 0.5 * steps])
        return place.view(-1)

    def check(self, places: torch.Tensor, since: int | None = None) -> None:
        """Looks at what all have told; `since`: the last step of which all are known to have made it.

        Raises:
            UsageError: they are not at the same place; the message says who has left out which step.
        """
        rounds, steps = (row.tolist() for row in places.view(2, -1))
        behind = [round_ - step for round_, step in zip(rounds, steps, strict=True)]
        if min(behind) != max(behind) or min(rounds) != max(rounds):
            who = [worker for worker, by in enumerate(behind) if by == max(behind)]
            last = int(steps[who[0]])
            raise left_out(who, last, first=min(max(1, (self._step if since is None else since) + 1), last))

    def met(self) -> None:
        """The meeting is over, and all were where they were expected, or at the same place."""
        if self._replica.round is not None:
            self._followed[self._meetings] = self._since
            self._meetings = 0 if self._since[1] else self._meetings + 1
            self._earlier = self._step
            self._round, self._step = self._replica.round, self._replica.step

    def meet(self, *, steps: bool = False) -> None:
        """All tell where they are, and whether they step, where those that are elsewhere would call other operations next.

        Raises:
            UsageError: as of `check`.
        """
        if self._replica.round is not None:
            self._look()
            self._tell(steps=steps)
            self.met()

    def meet_after(self, num_surprised: float) -> None:
        """Where nothing else has to be told: all tell where they are if anybody was surprised.

        Raises:
            UsageError: as of `check`.
        """
        self.tell_if(num_surprised)
        self.met()

    def tell_if(self, num_surprised: float) -> None:
        """Where what tells of surprises arrives later, and `met` was called as it left: all tell where they are by now.

        Raises:
            UsageError: as of `check`.
        """
        if num_surprised:
            self._tell(since=self._earlier)

    def _look(self) -> None:
        self._since = ((self._replica.round or 0) - self._round, self._replica.step - self._step)

    def _tell(self, *, steps: bool = False, since: int | None = None) -> None:
        assert self._ports.collectives is not None
        places = self.told(steps=steps)
        self._ports.collectives.start_all_reduce(places).wait()
        self.check(places, since)


def left_out(workers: list[int], step: int, first: int | None = None) -> UsageError:
    """What to raise on all workers where some have gone on without a step that the others make, or one since the `first`."""
    who = name_workers(workers)
    which = f"step {step}" if first in (None, step) else f"one of steps {first} to {step}"
    return UsageError(
        f"{who[0].upper()}{who[1:]} left out {which} and went on to another batch, and the rest did not, as where a loop meets"
        " `continue` or `break` on some workers only: their steps would no longer be of the same rounds. Let all decide alike,"
        " as by worker.sum, or make the step with a loss times 0; ad-psgd and hogwild have no rounds."
    )
