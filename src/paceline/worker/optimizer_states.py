"""Whether all workers' optimizers begin with the same state."""

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
    """In lockstep, refuses state that differs, such as a checkpoint's that one worker has loaded. All workers call it.

    Raises:
        UsageError: on all workers.
    """
    if run.num_workers == 1 or not algorithm.lockstep or run.resumed_from:
        return
    words = repr(_plain(optimizer.state_dict()["state"]))
    own = int.from_bytes(hashlib.blake2b(words.encode(), digest_size=6).digest(), "little")
    digests = run.gatherer.gather(own, _CALL)
    differing = [worker for worker, one in enumerate(digests) if one != digests[0]]
    if differing:
        raise UsageError(
            f"The optimizer of {name_workers(differing)} begins with other state than worker 0's, and workers in lockstep"
            " would part: load a checkpoint of the optimizer on every worker before attach, not under `if rank == 0`."
        )


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), digest(value)
    if isinstance(value, dict):
        return sorted((repr(key), _plain(one)) for key, one in value.items())
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return type(value) if type(value).__repr__ is object.__repr__ else value  # that one shows an address
