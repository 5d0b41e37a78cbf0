"""The end of a run whose workers have their own models and no supervisor: they agree on the mean."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from paceline.errors import PeerLostError
from paceline.optim.half_types import sum_type
from paceline.optim.model_state import from_bytes, to_bytes
from paceline.ports.checks import MOST, MalformedMessageError, checked_vector
from paceline.ports.ports import Mailbox, Message, PeerBack, Ports, Received

_LEFT_AT_BREAK = 4  # the most batches that a loop has claimed but not seen when it leaves an epoch early


class LeftWeights(NamedTuple):
    """What worker 0's loop loads into its model after its last step, such as its best weights: the run's result."""

    x: torch.Tensor  # (P,)
    buffers: Sequence[torch.Tensor]  # the model's, in their order


class FinalMean(NamedTuple):
    """What `mean_of_all` returns."""

    x: torch.Tensor  # (P,)
    consensus_distance: float  # sum_i ||x_i - mean||^2 / n
    num_models: int
    num_not_given: int = 0  # batches that no worker received, where that is certain


class BatchesTaken(NamedTuple):
    """Batches that a worker's loop received from a counter that all workers share."""

    taken: int = 0  # how many; -1: another worker took more in its place, or took the same
    reached: int = 0  # the number up to which the loop went: each batch below it belongs to some worker


_NOTHING = BatchesTaken()


def why_not_given(number: int) -> str:
    """The warning about batches that no worker received."""
    return (
        f"{number:,} batches were given to no worker of this run: another program that has the key claimed them where the"
        " workers meet. Start the run again at another port, with a key of its own (`paceline key FILE`)."
    )


def take_final_mean(
    ports: Ports[Any],
    x: torch.Tensor,
    deadline_s: float,
    given: BatchesTaken = _NOTHING,
    buffers: Sequence[torch.Tensor] = (),
    left: LeftWeights | None = None,
) -> FinalMean | None:
    """Replaces a worker's model `x` (P,) by the mean of all; over a mailbox by what worker 0 has `left`, and `buffers` too.

    Warns of batches that no worker received.

    Returns:
        the mean and its statistics; None after a collective.
    """
    if ports.num_workers > 1 and ports.mailbox is None:
        assert ports.collectives is not None
        ports.collectives.all_reduce_mean(x, weight=1.0)
        return None
    if ports.num_workers == 1:
        final = FinalMean(x, 0.0, 1, _not_given([given]))
    else:
        assert ports.mailbox is not None
        final = mean_of_all(ports.mailbox, ports.worker_id, ports.num_workers, x, deadline_s, given, buffers, left)
        x.copy_(final.x)
    if final.num_not_given:
        warnings.warn(why_not_given(final.num_not_given), stacklevel=2)
    return final


def _not_given(given: list[BatchesTaken]) -> int:
    """Batches that no worker received, below the highest number that any reached; 0 if that cannot be known."""
    if any(one.taken < 0 for one in given):
        return 0
    missing = max(one.reached for one in given) - sum(one.taken for one in given)
    return missing if missing > _LEFT_AT_BREAK * len(given) else 0


def mean_of_all(
    mailbox: Mailbox,  # messages of other kinds are left in it
    worker_id: int,  # this worker
    num_workers: int,  # of the run
    x: torch.Tensor,  # its model (P,), not changed
    deadline_s: float,  # how long to wait for one worker
    given: BatchesTaken = _NOTHING,  # the batches that its loop received
    buffers: Sequence[torch.Tensor] = (),  # of its model; changed if worker 0 has left weights
    left: LeftWeights | None = None,  # the weights that worker 0 has left, if this is worker 0; or None
) -> FinalMean:
    """The mean of the models of all remaining workers; every worker calls it and gets the same bits.

    The lowest reachable worker collects the models and sends the mean to all. A worker that has left is not counted; the next
    one replaces a collector that leaves. If no worker answers in time, returns the worker's own model. Worker 0 collects as
    long as it is there; its `left` weights, if any, replace the mean, and its buffers replace every worker's.
    Costs: two messages of the model's size per worker, one after the other at the collecting worker.
    """
    for collector in range(worker_id):
        if collector not in mailbox.peers():  # a late worker may never have met it, and does not wait for it
            continue
        try:
            mailbox.send(collector, Message("final", collector, given.reached, x, given.taken))
        except PeerLostError:
            continue
        answer = receive_vector(mailbox, deadline_s, "mean", collector, x)
        if answer is not None:
            mean, about = answer
            if about.version < 0:  # these are the weights that worker 0 has left
                _receive_buffers(mailbox, deadline_s, collector, buffers)
                return FinalMean(mean, about.weight, about.number, -1 - about.version)
            return FinalMean(mean, about.weight, about.number, about.version)
    return _collect(mailbox, worker_id, num_workers, x, deadline_s, given, left)


def receive_vector(
    mailbox: Mailbox, deadline_s: float, kind: str, sender: int, x: torch.Tensor, number: int | None = None
) -> tuple[torch.Tensor, Message] | None:
    """A vector like `x` from a worker, which may reconnect meanwhile; None: the worker has left, or sent none in time."""
    while True:
        answer = mailbox.receive(deadline_s, kind=kind, sender=sender, number=number)
        if isinstance(answer, PeerBack):
            continue
        if not isinstance(answer, Received):
            return None
        with contextlib.suppress(MalformedMessageError):  # the right one may follow
            return checked_vector(answer, x), answer.message


def _receive_buffers(mailbox: Mailbox, deadline_s: float, sender: int, buffers: Sequence[torch.Tensor]) -> None:
    for number, buffer in enumerate(buffers):
        raw = torch.empty(buffer.nbytes, dtype=torch.uint8, device="meta")
        answer = receive_vector(mailbox, deadline_s, "left", sender, raw, number)
        if answer is not None:
            from_bytes(buffer, answer[0])


def _collect(
    mailbox: Mailbox,
    worker_id: int,
    num_workers: int,
    x: torch.Tensor,
    deadline_s: float,
    given: BatchesTaken,
    left: LeftWeights | None,
) -> FinalMean:
    models, all_given = {worker_id: x}, [given]
    for other in range(worker_id + 1, num_workers):
        if other in mailbox.peers():
            answer = receive_vector(mailbox, deadline_s, "final", other, x, number=worker_id)
            if answer is not None:
                models[other] = answer[0]
                taken, reached = answer[1].version, answer[1].weight
                all_given.append(BatchesTaken(taken, int(reached) if 0 <= reached < MOST else 0))
    mean = torch.stack(list(models.values())).mean(dim=0, dtype=sum_type(x.dtype)).to(x.dtype)
    distances = [float((one.double() - mean).square().sum()) for one in models.values()]
    consensus_distance = sum(distances) / len(distances)
    num_not_given = _not_given(all_given) if len(models) == num_workers else 0
    messages = [Message("mean", len(models), consensus_distance, mean, num_not_given)]
    if left is not None:
        mean = left.x
        messages = [Message("mean", len(models), consensus_distance, mean, -1 - num_not_given)]
        for number, buffer in enumerate(left.buffers):
            messages.append(Message("left", number, x=to_bytes(buffer)))
    for other in models:
        if other != worker_id:
            with contextlib.suppress(PeerLostError):
                for message in messages:
                    mailbox.send(other, message)
    return FinalMean(mean, consensus_distance, len(models), num_not_given)
