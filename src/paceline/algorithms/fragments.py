"""The engine of local-sgd, da-sgd and diloco: local steps, and averages of fragments, which may arrive some steps late.

A fragment is a subset of the parameters. A flight is its average under way; the operation progresses without a second
thread. The step number alone decides which fragment departs, so that all workers start the same operations in the same
order.

Shapes: x: (P,), n elements of a fragment.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch

from paceline.algorithms.base import Algorithm, Slow
from paceline.algorithms.chosen_delay import ChosenDelay
from paceline.algorithms.cuts import cut, layouts
from paceline.algorithms.gradient_round import GradientRound
from paceline.algorithms.means import Means, MeanUnderWay
from paceline.algorithms.merges import Rule, progress_of, slow_progress
from paceline.algorithms.round import Round
from paceline.algorithms.round_messages import Header, Heard
from paceline.algorithms.table_mean import averaging
from paceline.compression.codec import Codec
from paceline.errors import AlgorithmWarning, NoGradient, RunStopped
from paceline.optim.half_types import sum_type
from paceline.ports.ports import Ports
from paceline.ports.replica import Replica
from paceline.ports.shared import Needs, ReplicatedParameters
from paceline.system.saved_state import check_fits, fits, unfit
from paceline.system.torch_internals import tree_map

_WHAT = "averages under way"


class AveragedModels(Algorithm):
    """Base of `local-sgd`, `da-sgd` and `diloco`: workers average their models every `period` steps (H).

    Subclasses are dataclasses with a `period` and a `codec`, and with those of the other fields that they let users choose.
    """

    tolerates: ClassVar[tuple[str, ...]] = ("kill under launch",)
    lockstep: ClassVar[bool] = True
    #: Whether an outer optimizer steps with the mean of changes, also for a lone worker; else models are averaged.
    of_changes: ClassVar[bool] = False

    period: int
    codec: Codec
    warmup_steps: int = 0  # the first steps, which average every gradient instead
    fragments: int = 1
    delay: int | Literal["auto"] = 0
    local_weight: float = 0.0

    def waiting_less(self, slow: Slow, num_workers: int) -> Algorithm | str | None:
        return replace(self, period=4 * self.period) if slow == "network" else super().waiting_less(slow, num_workers)

    @property
    def survivors_continue(self) -> bool:
        return True

    @property
    def needs(self) -> Needs:
        return Needs("replicated", collectives=True, own_models=True)

    @property
    def most_delay(self) -> int:
        """The longest delay that "auto" may choose."""
        return 0

    def rule(self, common: Callable[[], list[torch.Tensor]]) -> Rule:
        """The method's rule, given a function that returns the fragments that all workers have in common."""
        raise NotImplementedError

    def progress_factor(self, delay: int) -> float:
        """The share of the local steps that a merge keeps."""
        return progress_of(self.period, delay, self.local_weight)

    def rate_factor(self, delay: int) -> float:
        """The factor on the learning rate with this delay."""
        return 1.0

    def unrecorded(self, num_workers: int) -> str:
        return "the speeds that the delay followed" if num_workers > 1 and self.delay == "auto" else ""

    def caution(self, num_workers: int, delay: int | None = None) -> str:
        """A warning if merges drop most of the local steps, and may lengthen the others."""
        chosen = f"delay=auto has chosen {delay} steps. " if self.delay == "auto" else ""
        delay = delay if self.delay == "auto" else self.delay
        said = slow_progress(self.progress_factor(delay), self.rate_factor(delay)) if delay is not None else ""
        return said and chosen + said

    def work(self, replica: Replica, ports: Ports[ReplicatedParameters]) -> None:
        """x: this worker's parameters (P,), k: steps made."""
        shared, averages = ports.shared, Averages(self, replica, ports)
        gradient = averages.gradient
        average = averaging(replica, ports, gradient) if self.warmup_steps else gradient.average
        try:
            for _ in gradient.replacements.steps():
                k = shared.version
                warms_up = k < self.warmup_steps
                replica.gradient(at=shared.x, version=k)
                if warms_up:
                    average()
                # Without a batch, a worker makes no local step.
                if (warms_up and not gradient.is_void) or (replica.samples and not warms_up):
                    with shared.writing():
                        replica.apply(to=shared.x, scale=self.rate_factor(averages.delay))
                if not warms_up:
                    averages.after_step(k + 1)
                if replica.samples:
                    replica.applied(shared.advance(), gradient_version=k)
                else:
                    replica.absent(shared.advance(updates=0))
        except NoGradient:
            averages.drain()
            raise
        averages.drain()


@dataclass(frozen=True)
class Schedule:
    """When each fragment departs."""

    period: int  # H, steps between two departures of a fragment
    delay: int | Literal["auto"] = 0  # steps from a departure to the merge; "auto": not known yet
    num_fragments: int = 1  # they depart one after the other, evenly spread over the period

    def leaving(self, k: int) -> list[int]:
        """The fragments that depart after step `k`, counted from 1.

        >>> [Schedule(4, num_fragments=2).leaving(k) for k in (1, 2, 3, 4)]
        [[], [1], [], [0]]
        """
        offsets = [index * self.period // self.num_fragments for index in range(self.num_fragments)]
        return [index for index, offset in enumerate(offsets) if (k - offset) % self.period == 0]


class Flight(NamedTuple):
    """A fragment whose average is under way."""

    fragment: int
    sent: torch.Tensor  # (n,), this worker's contribution
    due: int  # the step after which it is merged
    mean: MeanUnderWay


class Averages:
    """A method's fragments, and their flights."""

    def __init__(self, method: AveragedModels, replica: Replica, ports: Ports[ReplicatedParameters]) -> None:
        self._method, self._replica, self._ports = method, replica, ports
        self._schedule = schedule = Schedule(method.period, method.delay, method.fragments)
        x = ports.shared.x
        self._only_time = not x.numel()
        self._fragments = [] if self._only_time else cut(replica.ranges, x.numel(), schedule.num_fragments)
        self.gradient = GradientRound(replica, ports)  # averages gradients, and lets newcomers in
        replacements = self.gradient.replacements
        replacements.parts.append(self)
        self._rounds = [Round(replica, ports, replacements) for _ in range(schedule.num_fragments)]
        self._flights: list[Flight] = []
        # Rounds of batches whose steps each fragment's last mean contains, and the one sent; 0: those of a checkpoint.
        self._rounds_in, self._rounds_sent = ([0] * schedule.num_fragments for _ in range(2))
        self._of_changes = method.of_changes or method.is_coded
        self._is_on = method.of_changes or ports.num_workers > 1
        restores = self._is_on and not ports.incarnation
        kept = ports.storage.restore() if ports.storage is not None and restores else None
        self._kept = kept if kept is not None and self._is_as_kept(kept) else None
        if self._kept is not None:
            self._schedule = schedule = Schedule(*self._kept["schedule"])
        self._choice = None
        if schedule.delay == "auto":
            self._schedule = replace(schedule, delay=0)
            self._choice = ChosenDelay(ports, method.most_delay) if ports.num_workers > 1 else None
        self._rule = method.rule(self._common)
        self._keeps = self._is_on and bool(schedule.delay or self._rule.state())
        self._means = self._new_means(keeps=self._keeps and (ports.storage is not None or ports.newcomers is not None))
        ports.counts.delay = int(self._schedule.delay)
        if self._kept is not None and self._keeps:
            self._load(self._kept)

    def _new_means(self, *, keeps: bool) -> Means:
        return Means(self._ports, self._method.codec, layouts(self._fragments, self._replica), keeps=keeps)

    @property
    def delay(self) -> int:
        """By how many steps averages are late; 0 for a lone worker, and until it is chosen."""
        return int(self._schedule.delay) if self._is_on else 0

    def _is_as_kept(self, kept: dict[str, Any]) -> bool:
        """Whether a checkpoint is of this method and schedule; `auto` keeps the delay that was chosen."""
        period, delay, num_fragments = astuple(self._schedule)
        schedule = kept.get("schedule")
        if schedule is None and "of_changes" not in kept:  # another method's
            return False
        is_open = isinstance(schedule, list) and "auto" in schedule
        like = {"of_changes": bool, "schedule": [int, str if is_open else int, int], "rule": dict}
        check_fits(kept, like | {"flights": list, "means": list}, _WHAT)
        schedule = kept["schedule"]
        if kept["of_changes"] is not self._of_changes:
            return False
        is_chosen = delay == "auto" and not is_open and schedule[1] >= 0
        return schedule == [period, schedule[1] if is_chosen else delay, num_fragments]

    def _parts(self, x: torch.Tensor) -> list[torch.Tensor]:
        if self._only_time:
            return list(x.chunk(self._schedule.num_fragments))
        return [fragment.of(x) for fragment in self._fragments]

    def _common(self) -> list[torch.Tensor]:
        """The fragments common to all workers: initially their own; if another method began the run, their mean.

        A newcomer's do not matter.
        """
        x, collectives = self._ports.shared.x, self._ports.collectives
        takes_over = self._kept is None and self._ports.shared.version and not self._ports.incarnation
        if takes_over and not self._only_time:
            assert collectives is not None
            x = x.clone()
            collectives.all_reduce_mean(x, 1.0)
        return self._parts(x)

    def after_step(self, k: int) -> None:
        """After the `k`-th step: merges the averages that are due, and sends the fragments whose turn it is."""
        if not self._is_on:
            return
        ports = self._ports
        if self._choice is not None:
            self._choice.count_step()
        while self._flights and self._flights[0].due <= k:
            self._land(self._flights[0])
            del self._flights[0]
        for flight in self._flights:
            if flight.due - k == int(self._schedule.delay) // 2:
                flight.mean.advance()
        for index in self._schedule.leaving(k):
            if self._choice is not None and self._choice.is_ready():
                means = self._new_means(keeps=False)
                delay = self._choice.take(
                    lambda means=means, index=index: means.start(index, self._part(index), Header())
                )
                self._schedule, self._choice = replace(self._schedule, delay=delay), None
                ports.counts.delay = delay
                if not ports.worker_id and (said := self._method.caution(ports.num_workers, delay)):
                    warnings.warn(said, AlgorithmWarning, stacklevel=2)
            if self._schedule.delay:
                self._depart(index, k + int(self._schedule.delay))
            else:
                self._average_now(index)
        if ports.storage is not None and self._keeps:
            ports.storage.keep(self._state, k)

    def _average_now(self, index: int) -> None:
        replica, ports, rule, x = self._replica, self._ports, self._rule, self._part(index)
        assert ports.collectives is not None
        header = self._rounds[index].header()
        is_whole = self._schedule.num_fragments == 1
        vector = replica.copy(x) if is_whole and rule.sends_a_copy else x
        if not (is_whole and rule.sends_a_copy):
            ports.moved(4 + rule.moved_out, of=x)
        vector = vector if self._only_time else rule.outgoing(index, vector)
        if is_whole and rule.sends_a_copy:
            numbers = ports.collectives.all_reduce_mean(vector, 1.0, header.numbers)
            mean, vector, members = vector, x, ports.collectives.members
            heard = Heard.of(numbers, len(members))
        else:
            mean, heard, members = self._means.start(index, vector, header).wait()
            self._means.landed(index)
            ports.moved(2, of=x)
        self._rounds_sent[index] = replica.rounds_begun
        self._contains(index, members)
        self._rounds[index].settle(heard)
        self._rounds[index].end()
        self._write(index, x, vector, mean)

    def _depart(self, index: int, due: int) -> None:
        x, header = self._part(index), self._rounds[index].header()
        self._rounds[index].end()
        self._ports.moved(4 + self._rule.moved_out, of=x)
        sent = x
        if not self._only_time:
            sent = self._rule.outgoing(index, x)
            sent = sent.clone() if self._rule.sends_a_copy else sent
        mean = self._means.start(index, sent, header)
        self._flights.append(Flight(index, sent, due, mean))
        self._rounds_sent[index] = self._replica.rounds_begun

    def _land(self, flight: Flight) -> None:
        mean, heard, members = flight.mean.wait()
        self._means.landed(flight.fragment)
        self._contains(flight.fragment, members)
        self._rounds[flight.fragment].settle(heard, is_late=True)
        x = self._part(flight.fragment)
        self._ports.moved(2, of=x)
        self._write(flight.fragment, x, flight.sent, mean)

    def _contains(self, index: int, members: Sequence[int]) -> None:
        """A fragment's mean contains its members' steps; a batch counts once it is in all fragments' means."""
        self._rounds_in[index] = self._rounds_sent[index]
        self._replica.meet(members, min(self._rounds_in))

    def _write(self, index: int, x: torch.Tensor, sent: torch.Tensor, mean: torch.Tensor) -> None:
        ports, rule = self._ports, self._rule
        merged = mean if self._only_time else rule.merged(index, x, sent, mean)
        self._rounds[index].replicas.note(rule.common(index))
        with ports.shared.writing():
            if not self._only_time:
                self._fragments[index].put(ports.shared.x, merged)
            ports.moved(2 + rule.moved_in, of=x)
        ports.counts.averages += ports.num_workers > 1

    def _part(self, index: int) -> torch.Tensor:
        if self._only_time:
            return self._parts(self._ports.shared.x)[index]
        return self._fragments[index].of(self._ports.shared.x)

    def drain(self) -> None:
        """Waits for averages under way, so that no worker abandons the others in one.

        They are not merged: a resumed run merges them when they are due, as this one would have.
        """
        with suppress(RunStopped):
            for flight in self._flights:
                flight.mean.end()

    def _state(self) -> dict[str, Any]:
        flights = [{"fragment": one.fragment, "due": one.due, "sent": one.sent.clone()} for one in self._flights]
        period, delay, num_fragments = astuple(self._schedule)
        delay = delay if self._choice is None else "auto"
        schedule = [period, delay, num_fragments]
        return {
            "of_changes": self._of_changes,
            "schedule": schedule,
            "rule": self._rule.state(),
            "flights": flights,
            "means": self._means.state(),
        }

    def _load(self, kept: dict[str, Any]) -> None:
        """Restores `kept`, and sends the averages under way again, with the same vectors as before."""
        device = self._ports.shared.x.device  # checkpoints are loaded on the CPU
        kept = tree_map(lambda one: one.to(device) if isinstance(one, torch.Tensor) else one, kept)
        self._rule.load(kept["rule"])
        self._means.load(kept["means"])
        for one in kept["flights"]:
            check_fits(one, {"fragment": int, "due": int, "sent": torch.Tensor}, _WHAT)
            index, due, sent = one["fragment"], one["due"], one["sent"]
            if not 0 <= index < len(self._fragments):
                raise unfit(_WHAT, f"fragment {index} is none")
            x = self._part(index)
            if not fits(sent, x):
                check_fits(sent, x.to(sum_type(x.dtype)), _WHAT)
            self._flights.append(Flight(index, sent, due, self._means.start(index, sent, Header())))

    def for_newcomers(self) -> dict[str, Any]:
        """As of `Part`. Averages under way end, and start again: a newcomer contributes the same as the first worker."""
        for index, _, _, mean in self._flights:
            self._rounds[index].settle(mean.wait()[1], is_late=True)
        self._flights = [one._replace(mean=self._means.start_again(one.fragment, one.sent)) for one in self._flights]
        return self._state() | {
            "means": self._means.for_newcomers(),
            "rounds": [one.for_newcomers(self._rule.common(index)) for index, one in enumerate(self._rounds)],
            "rounds_in": self._rounds_in,
            "rounds_sent": self._rounds_sent,
            "steps_s": self._choice.steps_s if self._choice is not None else [],
        }

    def enter(self, given: dict[str, Any]) -> None:
        self._load(given)
        self._rounds_in, self._rounds_sent = given["rounds_in"], given["rounds_sent"]
        for index, state in enumerate(given["rounds"]):
            self._rounds[index].enter(state, self._rule.common(index))
        period, delay, num_fragments = given["schedule"]
        if self._choice is not None and delay == "auto":
            self._choice.steps_s = given["steps_s"]
        else:
            self._schedule, self._choice = Schedule(period, delay, num_fragments), None
            self._ports.counts.delay = delay
