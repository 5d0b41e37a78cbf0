"""Checks that lockstep workers begin with equal states of their optimizers, and of tensors that are not registered."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from paceline.algorithms import Algorithm
from paceline.errors import UsageError, name_workers
from paceline.optim.model_state import digest
from paceline.worker.gathering import Call
from paceline.worker.memberships.membership import Membership

_CALL = Call("attach", "all workers must call it, so not under `if rank == 0`.")


def check_states(run: Membership, algorithm: Algorithm, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Compares the workers' states; one may come from a checkpoint that only one worker has loaded. All workers call it.

    Worker 0 warns of tensors in a module's attributes that differ: they are neither parameters nor buffers, so they are not
    sent.

    Raises:
        UsageError: on all workers, if the optimizers' states differ.
    """
    if run.num_workers == 1 or not algorithm.lockstep or run.resumed_from:
        return
    loose = dict(_unregistered(model)) if run.part is None else {}  # under a layout, workers have different parts
    own = [_number(optimizer.state_dict()["state"]), *map(_number, loose.values())]
    rows = [one.tolist() for one in run.gatherer.gather(torch.tensor(own), _CALL)]
    differing = [worker for worker, row in enumerate(rows) if row[0] != rows[0][0]]
    if differing:
        raise UsageError(
            f"The optimizer of {name_workers(differing)} begins with a different state than worker 0's, so models "
            "would diverge in lockstep: load a checkpoint of the optimizer on every worker before attach, not under "
            "`if rank == 0`."
        )
    names = [name for name, *found in zip(loose, *(row[1:] for row in rows), strict=False) if len(set(found)) > 1]
    if names and run.worker_id == 0:
        warnings.warn(
            f"The workers' models differ in {', '.join(names[:3])}, which is neither a parameter nor a buffer, so "
            "each worker keeps its own: register it with register_buffer, so that all begin with worker 0's.",
            stacklevel=5,
        )


def _unregistered(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    registered = {id(one) for one in (*model.parameters(), *model.buffers())}
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            held = {f"[{k}]": one for k, one in enumerate(value)} if isinstance(value, list | tuple) else {"": value}
            for place, one in held.items():
                if (
                    type(one) is torch.Tensor
                    and not one.requires_grad
                    and id(one) not in registered
                    and not one.is_meta
                ):
                    yield f"{prefix}.{name}{place}".lstrip("."), one


def _number(state: Any) -> int:
    words = repr(_plain(state))
    return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=6).digest(), "little")


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), digest(value)
    if isinstance(value, dict):
        return sorted((repr(key), _plain(one)) for key, one in value.items())
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return type(value) if type(value).__repr__ is object.__repr__ else value  # object's repr shows an address
