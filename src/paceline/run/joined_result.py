"""The result of a run whose workers had no supervisor, from their files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paceline.membership.final_mean import why_not_given
from paceline.model_parallel.graph.program import algorithm_named
from paceline.records.step_record import begin_at_zero, last_s
from paceline.records.summary import summarize
from paceline.system.machine import machine, versions


def joined_result(
    about: Mapping[str, Any],
    own: Sequence[dict[str, Any]],
    records: Mapping[int, np.ndarray],
    *,
    gossip: bool,
    notes: Sequence[str],
    restarts: int,
    reason: str = "",
    failed: bool = False,
    interrupted: bool = False,
) -> dict[str, Any]:
    """The content of `result.json`, which begins with `about`, from each worker's last state file.

    Changes the times in `records` to seconds since the run's start. `reason` says why the run
    failed or was interrupted.
    """
    ended = [one for one in own if one["state"] == "ended"]
    distances = [one["consensus_distance"] for one in ended if one["consensus_distance"] is not None]
    begin_at_zero(records)
    figures = summarize(records, num_workers=about["workers"], wall_s=last_s(records), gossip=gossip)
    came_to_nothing = not interrupted and (not ended or (failed and not figures["steps"]))
    not_given = 0 if interrupted else max((one["batches_not_given"] for one in ended), default=0)
    outcome, why = "stopped", reason if interrupted else ""
    if diverged := [one for one in own if one["state"] == "diverged"]:
        outcome, why = "diverged", f"Worker {diverged[0]['worker']}: {diverged[0]['reason']}"
    elif not_given or came_to_nothing:
        by_state = [one for state in ("failed", "without others") for one in own if one["state"] == state]
        told = f"Worker {by_state[0]['worker']}: {by_state[0]['reason']}" if by_state else reason
        outcome, why = "crashed", why_not_given(not_given) if not_given else told
    return {
        **about,
        "outcome": outcome,
        "outcome_reason": why,
        **figures,
        "gossip": gossip,
        "waits_for": algorithm_named(about["algorithm"]).waits_for if own else None,
        "workers_here": sorted(records),
        "workers_lost": sorted({one["worker"] for one in own if one["state"] == "started"}),
        "restarts": restarts,
        "models_in_mean": max((one["models_in_mean"] for one in ended), default=0),
        "consensus_distance": next(iter(distances), None),
        "worst_worker_accuracy": None,
        "unresolved_exchanges": sum(one["unresolved_exchanges"] for one in ended),
        "notes": [*notes, *dict.fromkeys(note for one in ended for note in one["notes"])],
        "machine": machine(),
        "versions": versions(),
    }
