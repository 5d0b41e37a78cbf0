"""What a run ends with: its parameters once all workers have ended, or what worker 0's loop has left in its model then."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from paceline.algorithms import ADPSGD, DPSGD, Algorithm, AllReduce, registry
from paceline.algorithms.server.client import Client
from paceline.loop.loaded_weights import Loads, Places
from paceline.loop.outside_changes import Fate, OutsideChanges
from paceline.membership.elastic import JoinedRun
from paceline.membership.final_mean import FinalMean, Given, LeftWeights, take_final_mean
from paceline.membership.launched import Membership
from paceline.memory.arena import Arena
from paceline.ports.shared import AVERAGE
from paceline.vectors.flat import FlatBinding

__all__ = ["agree_on_final", "left_weights", "watch_outside"]

_STOPPED_DEADLINE_S = 20.0  # for the others, once the run is being stopped
_LOOK_EVERY_S = 1e-3


def agree_on_final(session: Any, out: torch.Tensor, given: Given, left: LeftWeights | None) -> FinalMean | None:
    """Copies what the run ends with into `out` (P,), for a worker whose program has ended: the same for all workers.

    That is what worker 0's loop has `left` in its model, if it has. Else it is the run's newest parameters after everybody's
    last update. Where workers without a supervisor have models of their own, it is the mean of all, which they send each
    other, with how many batches each was `given`. Buffers are then worker 0's, but without a supervisor only if it has left
    something.

    Returns:
        what is known of that mean; None where there is none.

    Raises:
        WorkerLostError: without a supervisor, worker 0 does not leave its `with` within the deadline.
    """
    shared, membership = session.arena.shared, session.membership
    if session.environment is not None and session.environment.supervised:
        if not session.ports.num_servers:
            session.close_peers()  # servers write their last checkpoint when all have left, with what is the run's by then
        _wait_for_launched(session.arena, session.worker_id, session.buffers_by_name, left)
        if session.algorithm.memory.kind == "replicated" and not session.algorithm.gossip:
            shared.model(0, out)  # worker 0's: in a run that was stopped, another may have made an update more
        else:
            shared.snapshot(out)
        return None
    shared.snapshot(out)
    if membership is None:
        if left is not None:
            shared.replace(left.x)
            out.copy_(left.x)
        return None
    mean = _final_mean(session, out, given, left)
    sends_left = session.algorithm.gossip and session.algorithm.memory.mailbox  # with the mean
    if isinstance(membership, Membership) and not sends_left and membership.hears_of_left(left is not None):
        if left is not None:
            out.copy_(left.x)
        membership.start_from_worker_0([out, *(one.detach() for one in session.buffers_by_name.values())])
    return mean


def _final_mean(session: Any, out: torch.Tensor, given: Given, left: LeftWeights | None) -> FinalMean | None:
    ports, membership, peers = session.ports, session.membership, session.peers
    if ports.num_servers:
        Client(ports).final()
        out.copy_(ports.shared.x)
    if not session.algorithm.gossip:
        return None
    if isinstance(membership, JoinedRun):
        if membership.leaves:
            return FinalMean(out, float("nan"), 1)  # the others need not end because of this one
        membership.end()
        given = given if membership.counts_all else Given(-1)
    buffers = [one.detach() for one in session.buffers_by_name.values()]
    if out.is_cpu or peers is None:
        return take_final_mean(ports, out, membership.deadline_s, given, buffers, left)
    host = out.cpu()  # who collects has all models at once, for which a GPU may be too small
    if left is not None:
        left = LeftWeights(left.x.cpu(), [one.cpu() for one in left.buffers])
    mean = take_final_mean(replace(ports, mailbox=peers.mailbox), host, membership.deadline_s, given, buffers, left)
    out.copy_(host)
    return mean


def _wait_for_launched(
    arena: Arena, worker_id: int, buffers: dict[str, torch.Tensor], left: LeftWeights | None
) -> None:
    """Waits until all workers have ended and the arena holds what they end with; and until `buffers`, by name, are the run's.

    Nobody waits for workers that have died and are not replaced, and once the run is being stopped for none longer than 20 s.
    """
    until_s = float("inf")

    def wait_for(is_over: Callable[[], Any]) -> None:
        nonlocal until_s
        while not is_over():
            if arena.load("abort"):
                until_s = min(until_s, time.monotonic() + _STOPPED_DEADLINE_S)
            if time.monotonic() > until_s:
                return
            time.sleep(_LOOK_EVERY_S)

    if arena.collectives is not None:
        arena.collectives.mark_lost(worker_id)  # who waits in a round for this worker need not go on waiting
    arena.mark_ended(worker_id)
    wait_for(arena.all_ended)
    if left is not None:
        arena.shared.replace(left.x)
        for name, value in zip(buffers, left.buffers, strict=True):
            for place in (name, AVERAGE + name):
                if place in arena.plan.extra:
                    arena.extra(place).copy_(value)
    if worker_id == 0:
        arena.store("final", 1)
    wait_for(lambda: arena.load("final"))
    with torch.no_grad():
        for name, buffer in buffers.items():
            buffer.copy_(arena.extra(name))


def watch_outside(session: Any, algorithm: Algorithm, loads: Loads, num_workers: int) -> OutsideChanges:
    """For a worker's parameters, with what becomes of changes of each vector that they may be views of."""
    shared, kind, is_alone = session.ports.shared, algorithm.memory.kind, num_workers == 1
    trained = shared.x if kind != "slots" and (kind != "served" or is_alone) else None
    is_common = kind == "replicated" and not algorithm.gossip
    is_sharded = isinstance(algorithm, AllReduce) and algorithm.sharded
    is_raced = kind in ("racing", "locked") or isinstance(algorithm, ADPSGD)

    def fate(x: torch.Tensor, idle: bool) -> Fate:
        is_trained = trained is not None and x.data_ptr() == trained.data_ptr()
        if is_alone:
            return "lasts" if is_trained else "moves"
        if is_common:
            return "lasts if alike" if idle or not is_sharded else "lost"
        return "lasts" if is_trained and (idle or not isinstance(algorithm, DPSGD)) else "lost"

    def put(x: torch.Tensor) -> None:
        if trained is None:
            shared.replace(x)
        elif x.data_ptr() != trained.data_ptr():
            trained.copy_(x)

    return OutsideChanges(
        session.binding,
        loads,
        spec=registry.spec(algorithm),
        fate=fate,
        put=put,
        newest=(lambda: shared.version) if kind == "slots" else None,
        written_by_others=trained if is_raced and not is_alone else None,
        is_common=is_common,
        is_alone=is_alone,
    )


def left_weights(
    model: nn.Module, binding: FlatBinding, places: Places, loads: Loads, *, has_changed: bool
) -> LeftWeights | None:
    """What a loop has put into its model after its last step; None: nothing.

    Args:
        model: the loop's.
        binding: of its trained parameters.
        places: where they were.
        loads: what was loaded.
        has_changed: whether parameters are known to have changed otherwise.
    """
    others = places.others()
    if not (has_changed or others or loads.any):
        return None
    x = binding.zeros()
    for parameter, view in zip(binding.parameters, binding.views(x), strict=True):
        now: torch.Tensor = others.get(parameter, parameter)  # pyright: ignore[reportAssignmentType]
        view.copy_(loads.value_of(now))
    return LeftWeights(x, [loads.value_of(buffer).clone() for buffer in model.buffers()])
