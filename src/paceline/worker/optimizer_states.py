"""In lockstep, all workers' optimizers must begin with the same state."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from paceline.algorithms import Algorithm
from paceline.errors import UsageError, name_workers
from paceline.vectors.model_state import digest
from paceline.worker.gathering import Call
from paceline.worker.memberships.membership import Membership

__all__ = ["check_states"]

_CALL = Call("attach", "all workers must call it, so not under `if rank == 0`.")


def check_states(run: Membership, algorithm: Algorithm, optimizer: torch.optim.Optimizer) -> None:
    """Compares the states, of which one may be a checkpoint's that only one worker has loaded. All workers call it.

    Raises:
        UsageError: on all workers, if states differ.
    """
    if run.num_workers == 1 or not algorithm.lockstep or run.resumed_from:
        return
    words = repr(_plain(optimizer.state_dict()["state"]))
    own = int.from_bytes(hashlib.blake2b(words.encode(), digest_size=6).digest(), "little")
    digests = run.gatherer.gather(own, _CALL)
    differing = [worker for worker, one in enumerate(digests) if one != digests[0]]
    if differing:
        raise UsageError(
            f"The optimizer of {name_workers(differing)} begins with another state than worker 0's, so models would"
            " diverge in lockstep: load a checkpoint of the optimizer on every worker before attach, not under `if rank == 0`."
        )


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), digest(value)
    if isinstance(value, dict):
        return sorted((repr(key), _plain(one)) for key, one in value.items())
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return type(value) if type(value).__repr__ is object.__repr__ else value  # which shows an address
