"""The user's own loop as a simulated worker: gradients are the loop's, only their time is virtual."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from paceline.loop.replica import AttachedReplica
from paceline.ports.replica import OnBucket, OnEnd
from paceline.simulator.backward import AfterBackward
from paceline.simulator.hardware.core import Core
from paceline.simulator.overlap import shares_until_complete
from paceline.simulator.replica import Timed


class SimulatedAttachedReplica(Timed, AttachedReplica):
    """An `AttachedReplica` whose forward, backward, copies and updates take the cluster's time.

    If the gradient is handed out after `backward`, time passes there, after the pass itself: so the loop then works on (clips,
    for example) the averaged gradient, as in a real run. Otherwise time passes when the optimizer steps.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, core: Core, after_backward: AfterBackward, **base: Any
    ) -> None:
        super().__init__(optimizer, **base)
        self._core = core  # has the times: `Cluster.compute_s` is for the first batch; others take time in proportion
        self._after_backward = after_backward
        self._held_back: list[torch.Tensor] = []  # complete buckets, until their time comes
        self._uncomputed: list[int] = []  # samples of the batches whose time has not passed
        self._goes_on = False  # whether the step has computed before
        self._in_backward = False  # whether the last of these batches is in a backward pass that hands out

    def begin(self, started_s: float, batch_number: int, samples: int) -> None:
        """Begins a step, or another batch of the step under way."""
        if self.idle:
            self._goes_on = False
            self._uncomputed.clear()
        self._will_compute(samples)
        super().begin(started_s, batch_number, samples)

    def _begin_without_batch(self, samples: int = 0) -> None:
        self._goes_on = False
        self._uncomputed[:] = [samples] if samples else []
        super()._begin_without_batch(samples)

    def _weigh(self) -> int:
        self._will_compute(samples := super()._weigh())
        return samples

    def _will_compute(self, samples: int) -> None:
        if samples > 0:
            self._uncomputed.append(samples)
            self._core.know_batch_size(samples)

    def evaluate(self, closure: Callable[[], Any], average: Callable[[], None]) -> Any:
        """Computes another gradient of the step, which takes the time of the step's batch again."""
        if self.samples and not self._uncomputed:
            self._uncomputed.append(self.samples)

        def computed() -> None:
            self._compute()
            average()

        return super().evaluate(closure, computed)

    def gradient(self, at: torch.Tensor, version: int, ready: OnBucket = None, finish: OnEnd = None) -> None:
        """Lets the loop compute at `at` (P,); hands out the gradient once its time has passed."""
        if finish is None:
            super().gradient(at, version)
        elif ready is None:
            super().gradient(at, version, finish=partial(self._hand_out, lambda bucket: None, finish))
        else:
            super().gradient(at, version, self._held_back.append, partial(self._hand_out, ready, finish))
        self._compute()

    def call_after_backward(self, end: Callable[[], None]) -> None:
        def returned() -> None:
            self._in_backward = True
            end()
            self._in_backward = False

        self._after_backward.call(returned)

    def _hand_out(self, ready: Callable[[torch.Tensor], None], finish: Callable[[], None]) -> None:
        """Hands out the buckets that were held back, one by one as the backward pass continues."""
        buckets, self._held_back[:] = self._held_back[:], []
        overlaps = buckets and self._in_backward and self._core.overlaps
        last = self._uncomputed.pop() if self._uncomputed and overlaps else None
        self._compute()
        if last is not None:
            parts = shares_until_complete([bucket.numel() for bucket in buckets])
            for number in self._core.compute_in_parts(last, parts, goes_on=self._goes_on):
                self._gradient_ended_s = self._now_s()
                ready(buckets[number])
            self._goes_on = True
        else:
            for bucket in buckets:
                ready(bucket)
        finish()

    def _compute(self) -> None:
        """Waits as long as the batches would take, without computing them."""
        if self._uncomputed:
            self._core.compute(sum(self._uncomputed), goes_on=self._goes_on)
            self._goes_on = True
            self._uncomputed.clear()
            self._gradient_ended_s = self._now_s()

    def apply(self, to: torch.Tensor, scale: float = 1.0, of: torch.Tensor | None = None, weight: float = 1.0) -> None:
        """Lets the optimizer take its one step on `to` (P,), at the end of the update's time."""
        begun_s = self._now_s()
        if of is not None:
            self._core.copy()
        self._core.update()
        self._apply_s += self._now_s() - begun_s
        super().apply(to, scale, of, weight)
