"""Detect loops with their own batches whose workers all start with the same ones, and so repeat each other's work."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable
from typing import Any

import torch

from paceline.membership.tables import WATCHED_STEPS, Board

_MOST_CALLS = 16  # of a step that are looked at
_MASK = (1 << 63) - 1


class SameInputs:
    """Compares the workers' model inputs in their first steps; worker 0 warns.

    Compares the first tensor of each call, and all integer tensors; for sparse tensors, the indices.

    Costs one pass over the inputs of the first three steps, and a comparison after 4, 8, 16 and so on.
    """

    def __init__(self, board: Board, worker_id: int, num_workers: int) -> None:
        self._board = board  # where the workers exchange digests
        self._worker_id = worker_id
        self._num_workers = num_workers
        self._told: list[int] = []
        self._digest = hashlib.blake2b(digest_size=8)
        self._num_calls = self._num_steps = 0
        self._looks = True

    def call(self, args: Iterable[Any]) -> None:
        if len(self._told) >= WATCHED_STEPS or self._num_calls >= _MOST_CALLS:
            return
        for number, tensor in enumerate(_tensors_in(args)):
            if number and tensor.is_floating_point():
                continue  # a state that is carried on, which dropout makes another on every worker
            self._num_calls += 1
            try:
                self._digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
            except RuntimeError:  # it has no values, as inside torch.func
                self._num_calls = 0
                return

    def end_step(self) -> None:
        self._num_steps += 1
        if len(self._told) < WATCHED_STEPS:
            if not self._num_calls:  # nothing is known of it
                self._digest.update(repr(self._worker_id).encode())
            self._told.append(int.from_bytes(self._digest.digest(), "little") & _MASK or 1)
            self._digest, self._num_calls = hashlib.blake2b(digest_size=8), 0
            if len(self._told) == WATCHED_STEPS:
                self._board.put(self._told)
        if self._num_steps & (self._num_steps - 1) == 0:
            self.look()

    def look(self) -> None:
        """Warns if all workers have reported, and the same."""
        if not self._looks or self._worker_id or len(self._told) < WATCHED_STEPS:
            return
        rows = self._board.rows()
        if rows is None:
            return
        self._looks = False
        if all(row == rows[0] for row in rows):
            warnings.warn(
                f"All {self._num_workers} workers had the same inputs in their first {WATCHED_STEPS} steps, so that each does"
                " what all do: seed what draws the batches by worker.worker_id, or iterate worker.batches(loader) and not the"
                " loader. Where it is meant, attach(..., same_random=True) says so.",
                stacklevel=2,
            )


def _tensors_in(values: Iterable[Any]) -> Iterable[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.layout is torch.sparse_coo:
                value = value.detach().coalesce().indices()
            elif value.layout in (torch.sparse_csr, torch.sparse_bsr):
                value = value.col_indices()
            if value.layout is torch.strided and value.numel():
                yield value
        elif isinstance(value, dict):
            yield from _tensors_in(value.values())
        elif isinstance(value, list | tuple):
            yield from _tensors_in(value)
