"""Reads the states of PyTorch's generators without a deadlock between threads.

`Generator.get_state` makes a tensor while it holds the generator's lock. In Python 3.11 that can start a garbage collection,
whose finalizers let other threads run. A thread that then needs the lock waits for it and keeps the GIL: a deadlock.
`clone_state` makes an object that starts no collection. No other module calls `get_rng_state` or `fork_rng`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def torch_state(generator: torch.Generator = torch.default_generator) -> torch.Tensor:
    """The state of a generator; `torch.set_rng_state` restores the default one's."""
    return generator.clone_state().get_state()


def cuda_state(device: torch.device | None = None) -> torch.Tensor:
    """The state of a GPU's generator, of the current GPU by default."""
    with torch.cuda.device(device):
        return torch_state(torch.cuda.default_generators[torch.cuda.current_device()])


@contextmanager
def torch_undisturbed() -> Iterator[None]:
    """Restores the default generator's state afterwards, as `torch.random.fork_rng(devices=[])` does."""
    before = torch_state()
    try:
        yield
    finally:
        torch.set_rng_state(before)
