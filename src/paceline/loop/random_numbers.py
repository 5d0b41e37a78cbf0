"""Reseed random generators that start in the same state on every worker."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from paceline.data.plan import derived_seed
from paceline.system.global_randomness import SeparateRandomness, states_now, undisturbed
from paceline.system.torch_random import cuda_state, torch_state

_NONE = 0
_MASK = (1 << 63) - 1


def digests_of_states(device: torch.device) -> tuple[int, ...]:
    """The states of the global generators, 63 bits each; 0 where there is none.

    A NumPy bit generator that replaces the global one is left out.
    """
    on_gpu = device.type == "cuda"
    return (
        _digest(repr(random.getstate()).encode()),
        _of_numpy(np.random.get_state(legacy=False)),
        _digest(torch_state().numpy().tobytes()),
        _digest(cuda_state(device).numpy().tobytes()) if on_gpu else _NONE,
    )


def alike(rows: Sequence[Sequence[int]] | None, own: Sequence[int]) -> tuple[bool, ...]:
    """For each generator, whether its state is equal on all workers; `rows`: their digests; None: some are missing."""
    if rows is None:
        return ()
    return tuple(bool(mine) and all(row[kind] == mine for row in rows) for kind, mine in enumerate(own))


def go_apart(device: torch.device, states: Sequence[int], equal: Sequence[bool], *who: object) -> None:
    """Reseeds the generators with `equal` states, from `states` and `who` alone."""
    for kind, (state, is_equal) in enumerate(zip(states, equal, strict=False)):
        if not is_equal:
            continue
        seed = _digest(repr(state).encode(), *who)
        if kind == 0:
            random.seed(seed)
        elif kind == 1:
            np.random.seed([seed >> 32, seed & 0xFFFFFFFF])
        elif kind == 2:
            torch.default_generator.manual_seed(seed)
        else:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)


def common_randomness(
    device: torch.device, rows: Sequence[Sequence[int]] | None, own: Sequence[int]
) -> Callable[[int], SeparateRandomness]:
    """For data that all workers read: gives the CPU generators equal states on all workers in each epoch.

    The first epoch begins with the current states; a state that differs between workers is derived from worker 0's. Later
    epochs begin with states derived from worker 0's and the epoch's number, independent of where the previous epoch ended.
    `rows` are the workers' digests of their states; None: all have the same.
    """
    own = own or digests_of_states(device)
    of_worker_0 = (rows[0] if rows is not None else own)[:3]
    differ = [bool(mine) and not equal for mine, equal in zip(own, alike(rows, own), strict=False)]
    with undisturbed():
        go_apart(device, of_worker_0, differ)
        first = states_now()
    seed = _digest(repr(of_worker_0).encode())
    return lambda epoch: SeparateRandomness(derived_seed(seed, epoch), None if epoch else first)


def _of_numpy(state: Any) -> int:
    if state["bit_generator"] != "MT19937":
        return _NONE
    return _digest(state["state"]["key"].tobytes(), state["state"]["pos"], state["has_gauss"], state["gauss"])


def _digest(state: bytes, *more: object) -> int:
    words = hashlib.blake2b(state + repr(more).encode(), digest_size=8).digest()
    return (int.from_bytes(words, "little") & _MASK) or 1
