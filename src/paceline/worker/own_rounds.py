"""An epoch's rounds in lockstep, if each worker has its own data and some have more batches than others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from paceline.errors import UsageError
from paceline.worker.gathering import Call

_NO_BATCH = object()
_EPOCH = Call(
    "worker.batches",
    "in lockstep all workers begin an epoch together, so each must make as many steps in an epoch as the others.",
)


def in_own_rounds(
    batches: Iterator[Any],  # the epoch's
    loader: Any,  # from which they come
    # The worker's, which gets the number of each round, so that workers compare the numbers when they step.
    replica: Any,
    gather: Callable[[Any, Call], list[Any]],  # brings values of all workers together
    stopped: Callable[[], bool],  # whether the run is being stopped
) -> Iterator[Any]:
    """A worker's batches, and the last one again until the worker with the most has had its own; begins for all together.

    Costs: workers exchange their numbers of batches once an epoch, or in each round if a loader has no length.

    Raises:
        UsageError: this worker has no batch, but others have.
        WorkerLostError: a worker did not arrive within the deadline.
    """
    num_batches = -1  # unknown
    with suppress(TypeError, NotImplementedError):
        num_batches = len(loader)
    numbers = gather(num_batches, _EPOCH)
    num_left, is_counted = max(numbers), min(numbers) >= 0

    def next_round(*, has_batch: bool) -> bool:
        """Takes part in the next round; returns whether there is one."""
        nonlocal num_left
        if not is_counted:
            num_left = max(gather(int(has_batch), _EPOCH))
        num_left -= 1
        replica.round += 1
        return num_left >= 0

    batch: Any = _NO_BATCH
    for batch in batches:
        next_round(has_batch=True)
        yield batch
    while not stopped() and next_round(has_batch=False):
        if batch is _NO_BATCH:
            raise UsageError(
                "This worker's loader has no batches, but other workers' have some: in lockstep each needs at "
                "least one. Or use an asynchronous method such as ad-psgd."
            )
        replica.begin(replica.now_s(), -1, 0)
        yield batch
