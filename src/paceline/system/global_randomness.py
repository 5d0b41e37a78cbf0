"""The states of Python's, NumPy's and PyTorch's global generators: one of each per worker, or kept while others draw."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from paceline.system.torch_random import torch_state

States = tuple[Any, Any, torch.Tensor]


class GlobalRandomness:
    """The generators' states of each worker that shares this process, swapped when another one continues.

    Each worker begins with the present states, as separate processes would; `leave` restores those for the caller.
    """

    def __init__(self) -> None:
        self._before = states_now()
        self._states: dict[int, States] = {}
        self._current: int | None = None

    def enter(self, worker_id: int) -> None:
        if worker_id == self._current:
            return
        now = states_now()
        if self._current is not None:
            self._states[self._current] = now
        self._current = worker_id
        _restore(self._states.get(worker_id, self._before), now)

    def begin_again(self, worker_id: int) -> None:
        """The worker begins anew, with the states of the beginning."""
        self._states.pop(worker_id, None)
        if self._current == worker_id:
            self._current = None

    def leave(self) -> None:
        _restore(self._before)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Restores the generators' states afterwards, so that draws inside have no effect outside."""
    before = states_now()
    try:
        yield
    finally:
        _restore(before)


def states_now() -> States:
    """The states of Python's, NumPy's and PyTorch's generators."""
    return random.getstate(), np.random.get_state(), torch_state()


def seed_all(seed: int) -> None:
    """Seeds Python's, NumPy's and PyTorch's generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


def _restore(states: States, now: States | None = None) -> None:
    """`now`: the present states, if known. NumPy takes 60 us to set one, and few loops draw from it."""
    random.setstate(states[0])
    if now is None or not _equal(states[1], now[1]):
        np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def _equal(one: Any, other: Any) -> bool:
    return one[0] == other[0] and one[2:] == other[2:] and np.array_equal(one[1], other[1])


class SeparateRandomness:
    """A separate stream of the global generators that continues from one `with` to the next.

    Threads share the generators, so only one at a time is inside.

    Args:
        states: the generators begin with these instead.
    """

    _one_at_a_time = threading.RLock()

    def __init__(self, seed: int, states: States | None = None) -> None:
        self.generator = torch.Generator().manual_seed(seed)  # a torch generator for this stream's own use
        self._seed = seed
        self._inside = states
        self._outside: States | None = None

    def __enter__(self) -> None:
        self._one_at_a_time.acquire()
        self._outside = states_now()
        if self._inside is not None:
            _restore(self._inside)
        else:
            seed_all(self._seed)

    def __exit__(self, *exception: object) -> None:
        self._inside = states_now()
        assert self._outside is not None
        _restore(self._outside)
        self._one_at_a_time.release()
