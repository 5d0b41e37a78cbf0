"""The rows of one forward pass: their number on each worker, and their position in the global batch."""

from __future__ import annotations

from itertools import accumulate

import torch

from paceline.optim.sharding import AxisShape

__all__ = ["Rows"]


class Rows:
    """One forward pass of all workers together.

    Args:
        counts: each worker's rows; negative: rows of a repeated batch, which get no weight.
        worker_id: this worker.
        parts: workers of a group.
        number: of the pass.

    Attributes:
        own: rows of this worker.
        first: its first row's number in the global batch, worker 0's rows first.
        of_group: rows of each worker of its group.
        total: weight of its group's rows: their number, except repeated ones.
        first_of_group: the number of the group's first row.
    """

    def __init__(self, counts: list[int], worker_id: int, parts: int, number: tuple[int, ...]) -> None:
        begins = [0, *accumulate(map(abs, counts))]
        group = AxisShape(parts).members(worker_id)
        self.number = number
        self.own = abs(counts[worker_id])
        self.first = begins[worker_id]
        self.of_group = [abs(counts[worker]) for worker in group]
        self._weights = [max(0, counts[worker]) for worker in group]
        self.total = sum(self._weights)
        self.first_of_group = begins[group.start]
        self._most = max(self.of_group)
        self._are_equal = min(self.of_group) == self._most

    def padded(self, own: torch.Tensor) -> torch.Tensor:
        """A worker's rows (own, ...) padded to the group's largest batch, so that all parts have the same length."""
        if len(own) == self._most:
            return own
        return torch.cat([own, own.new_zeros(self._most - len(own), *own.shape[1:])])

    def joined(self, stacked: torch.Tensor) -> torch.Tensor:
        """All workers' rows (total, ...), from the padded ones (parts, most, ...)."""
        if self._are_equal:
            return stacked.flatten(0, 1)
        return torch.cat([one[:rows] for one, rows in zip(stacked, self.of_group, strict=True)])

    def stacked(self, rows: torch.Tensor) -> torch.Tensor:
        """The group's rows (total, ...) by worker, padded (parts, most, ...)."""
        if self._are_equal:
            return rows.view(len(self.of_group), self._most, *rows.shape[1:])
        return torch.stack([self.padded(one) for one in rows.split(self.of_group)])

    def weights(self, like: torch.Tensor) -> torch.Tensor | float:
        """The weight of each of the group's rows (total, 1), or one for all, in the mean of its workers' losses.

        Each worker's loss is the mean over its rows, and is weighted by their weights.
        """
        if self._are_equal and self._weights == self.of_group:
            return 1 / len(self.of_group)
        factors = torch.tensor(self._weights, dtype=like.dtype) / max(1, self.total)
        return factors.repeat_interleave(torch.tensor(self.of_group)).unsqueeze(1).to(like.device)
