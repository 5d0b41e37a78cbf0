"""An apply rule that delays gradients: injects staleness into any server, with any rule."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from paceline.algorithms.server.adaptive_revision import AdaptiveRevision
from paceline.algorithms.server.apply import SGD, WHAT, Applier, ApplyRule
from paceline.algorithms.server.delay import Delay, DelayQueue
from paceline.algorithms.server.update import UpdateInfo
from paceline.optim.ranges import numbered, ranges_of
from paceline.system.saved_state import check_fits


@dataclass(frozen=True, kw_only=True)
class Delayed(ApplyRule):
    """Wraps another rule and delays its gradients by some updates.

    Every gradient counts as an update on arrival, even while the queue fills up and nothing is applied yet: so a gradient that
    waits d updates is d versions stale, including the first one.

    Costs: one vector for every gradient that waits (two if the rule echoes). Gradients that wait when a run ends are never
    applied.
    Use when: studying staleness; real servers have enough of it.

    Args:
        delay: how long each gradient waits.
        rule: the rule that applies it then, at the version of that time, so that `staleness` includes the wait.
    """

    delay: Delay
    rule: ApplyRule = field(default_factory=SGD)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.rule, AdaptiveRevision) and not self.rule.echoes:
            raise ValueError(
                "the server would drop its snapshot before it applies the delayed gradient: use revision_state=echo"
            )

    @property
    def default_learning_rate(self) -> float | None:
        return self.rule.default_learning_rate

    @property
    def overrides_optimizer(self) -> bool:
        return self.rule.overrides_optimizer

    @property
    def takes_rows(self) -> bool:
        """No: gradients wait as whole vectors."""
        return False

    @property
    def echoes(self) -> bool:
        return self.rule.echoes

    @property
    def update_vectors(self) -> float | None:
        """The rule's, and a copy of each gradient, which waits."""
        vectors = self.rule.update_vectors
        return None if vectors is None else vectors + 2 * (1 + self.rule.echoes)

    def start(self, num_elements: int, dtype: torch.dtype) -> Applier:
        """State: the rule's, and every waiting gradient."""
        return self.around(self.rule.start(num_elements, dtype), num_elements, dtype)

    def around(self, within: Applier, num_elements: int, dtype: torch.dtype) -> Applier:
        """An applier that passes each gradient to `within` when it is due."""
        return _DelayedApplier(within, DelayQueue(self.delay), num_elements, dtype)


_NUMBERS = [item.name for item in dataclasses.fields(UpdateInfo) if item.name not in ("missing", "selection", "echo")]


class _Waiting(NamedTuple):
    gradient: Tensor
    info: UpdateInfo


class _DelayedApplier(Applier):
    leaves_out: ClassVar[bool] = True  # of what is due

    def __init__(self, within: Applier, queue: DelayQueue[_Waiting], num_elements: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._within, self._queue = within, queue
        self._num_elements, self._dtype = num_elements, dtype

    @property
    def innermost(self) -> Applier:
        return self._within.innermost

    def apply(self, x: Tensor, gradient: Tensor, info: UpdateInfo, learning_rate: float) -> None:
        own = info if info.echo is None else dataclasses.replace(info, echo=info.echo.clone())
        arrived = self._queue.put(_Waiting(gradient.clone(), own))
        self.postponed = self._queue.last_wait
        for due in arrived:
            then = dataclasses.replace(due.info, version=info.version)
            self._within.update(x, due.gradient, then, learning_rate)

    def read(self, worker_id: int, version: int) -> Tensor | None:
        return self._within.read(worker_id, version)

    def accepts(self, info: UpdateInfo) -> bool:
        return self._within.accepts(info)

    def forget(self, worker_id: int) -> None:
        self._within.forget(worker_id)

    def state(self) -> dict[str, Tensor]:
        """The rule's, and `waiting.<place>.gradient`, `.echo`, `.missing`, `.info` (1, 8) of every gradient on hold."""
        state = self._within.state() | {"num_put": torch.tensor(self._queue.num_put)}
        for place, (due, n, one) in enumerate(self._queue.waiting):
            state[f"waiting.{place}.gradient"] = one.gradient
            state[f"waiting.{place}.info"] = torch.tensor([[due, n, *(getattr(one.info, name) for name in _NUMBERS)]])
            if one.info.missing:
                state[f"waiting.{place}.missing"] = numbered(one.info.missing, self._num_elements)
            if one.info.echo is not None:
                state[f"waiting.{place}.echo"] = one.info.echo
        return state

    def load(self, state: dict[str, Tensor]) -> None:
        own = {name: tensor for name, tensor in state.items() if name.startswith("waiting.") or name == "num_put"}
        vector, info = (
            torch.empty(self._num_elements, dtype=self._dtype),
            torch.zeros(1, 2 + len(_NUMBERS), dtype=torch.int64),
        )
        kinds = {"gradient": vector, "info": info, "echo": vector, "missing": numbered((), self._num_elements)}
        num_waiting = sum(name.endswith(".info") for name in own)
        like: dict[str, Tensor] = {"num_put": torch.tensor(0)}
        for place in range(num_waiting):
            has = ("gradient", "info", *(one for one in ("echo", "missing") if f"waiting.{place}.{one}" in own))
            like |= {f"waiting.{place}.{one}": kinds[one] for one in has}
        check_fits(own, like, WHAT)
        waiting = []
        for place in (f"waiting.{number}" for number in range(num_waiting)):
            due, n, *values = map(int, own[f"{place}.info"].flatten().tolist())
            echo = own.get(f"{place}.echo")
            one = _Waiting(
                own[f"{place}.gradient"].clone(),
                UpdateInfo(
                    **dict(zip(_NUMBERS, values, strict=True)),  # pyright: ignore[reportArgumentType] -- they are numbers
                    missing=ranges_of(own.get(f"{place}.missing")),
                    echo=None if echo is None else echo.clone(),
                ),
            )
            waiting.append((due, n, one))
        self._within.load({name: tensor for name, tensor in state.items() if name not in own})
        self._queue.num_put, self._queue.waiting = int(own["num_put"]), waiting
