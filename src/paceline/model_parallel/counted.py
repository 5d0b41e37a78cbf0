"""Collectives along one axis of a layout that count their traffic."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from paceline.ports.ports import Collectives, Counts, Handle
from paceline.ports.rooted import passes_on

__all__ = ["Counted", "Traffic"]


@dataclass
class Traffic:
    """One worker's traffic, by kind of operation and by axis, such as `group`, `replicas`, `all`.

    Attributes:
        operations: their number, by (axis, kind).
        sent_bytes: by axis, for ring algorithms; a broadcast and a reduce travel along the ring as a chain.
    """

    operations: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    sent_bytes: dict[str, float] = field(default_factory=dict[str, float])

    def add(self, axis: str, kind: str, sent_bytes: float, operations: int = 1) -> None:
        self.operations[axis, kind] = self.operations.get((axis, kind), 0) + operations
        self.sent_bytes[axis] = self.sent_bytes.get(axis, 0.0) + sent_bytes


class Counted:
    """Collectives of one axis that count their traffic; implements `RootedCollectives`.

    Args:
        inner: executes the operations; those with a root if it is `RootedCollectives`.
        axis: its name.
        size: number of its workers.
        place: this worker's position among them.
        traffic: receives the counts.
        counts: of the worker's records, for a carrier that counts nothing itself, such as shared memory; None otherwise.
    """

    def __init__(
        self, inner: Collectives, axis: str, size: int, place: int, traffic: Traffic, counts: Counts | None
    ) -> None:
        self._inner: Any = inner
        self._axis, self._size, self._place = axis, size, place
        self._traffic, self._counts = traffic, counts

    def all_reduce_mean(self, vector: torch.Tensor, weight: float, number: float = 0.0) -> float:
        self._add("all-reduce", 2, vector)
        return self._inner.all_reduce_mean(vector, weight, number)

    def start_all_reduce(self, vector: torch.Tensor) -> Handle:
        self._add("all-reduce", 2, vector)
        return self._inner.start_all_reduce(vector)

    def start_reduce_scatter(self, vector: torch.Tensor, part: torch.Tensor) -> Handle:
        self._add("reduce-scatter", 1, vector)
        return self._inner.start_reduce_scatter(vector, part)

    def start_all_gather(self, part: torch.Tensor, vector: torch.Tensor) -> Handle:
        self._add("all-gather", 1, vector)
        return self._inner.start_all_gather(part, vector)

    def start_all_to_all(self, given: torch.Tensor, taken: torch.Tensor) -> Handle:
        self._add("all-to-all", 1, given)
        return self._inner.start_all_to_all(given, taken)

    def start_broadcast(self, vector: torch.Tensor, root: int) -> Handle:
        self._add_rooted("broadcast", vector, root)
        return self._inner.start_broadcast(vector, root)

    def start_reduce(self, vector: torch.Tensor, root: int) -> Handle:
        self._add_rooted("reduce", vector, root)
        return self._inner.start_reduce(vector, root)

    def _add(self, kind: str, times: int, vector: torch.Tensor) -> None:
        messages = times * (self._size - 1)
        self._count(kind, messages, messages / self._size * vector.nbytes)

    def _add_rooted(self, kind: Literal["broadcast", "reduce"], vector: torch.Tensor, root: int) -> None:
        messages = int(passes_on(kind, self._place, root, self._size))
        self._count(kind, messages, messages * vector.nbytes)

    def _count(self, kind: str, messages: int, sent_bytes: float) -> None:
        self._traffic.add(self._axis, kind, sent_bytes)
        if self._counts is not None:
            self._counts.messages += messages
            self._counts.sent_bytes += round(sent_bytes)
