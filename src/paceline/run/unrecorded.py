"""The last gradient of a killed worker, which is in an update, but was not recorded: what the other records say of it.

A worker in `sync` mode waits for the others of its step once it has sent its gradient. If it is killed there, its gradient
still counts.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from paceline.records.run_data import RunData
from paceline.records.step_record import RECORD_DTYPE

UNKNOWN = -1  # samples of such a gradient, in place of a record
_WHY = "the gradient of a killed worker is in an update and has no record"


def with_unrecorded(run: RunData) -> tuple[RunData, str]:
    """The run of `sync` mode with a row for each such gradient, of which samples and loss are unknown.

    Also leaves out answers that a killed worker received but did not record.

    Returns:
        the run, and why it cannot be replayed, as a part of a sentence; "" if it can.
    """
    lost = run.result["workers_lost"]
    order = dict(run.order)
    for worker in {*lost} & order.keys() if len(run.result["shards"]) > 1 else ():
        own = order[worker]
        least = 1 + int(own["incarnation"].max(initial=0))
        num_steps = np.bincount(run.records[worker]["incarnation"], minlength=least)
        order[worker] = own[own["moment"] <= num_steps[own["incarnation"]] + 1]
    run = dataclasses.replace(run, order=order)
    held = {one.get("held") for one in run.result["shards"]}
    num_applied = sum(int(np.count_nonzero(rows["applied_version"] > 0)) for rows in run.records.values())
    if held == {num_applied}:
        return run, ""
    if held != {num_applied + 1} or len(lost) != 1 or "resumed" in run.result:
        return run, _WHY
    rows = run.records[lost[0]]
    rows = rows[rows["incarnation"] == 0]
    if not len(rows) or (batch := _missing_batch(run)) is None:
        return run, _WHY
    last = rows[-1]
    read = max(int(last["applied_version"]), int(last["gradient_version"]) if last["applied_version"] < 0 else 0)
    row = np.zeros(1, RECORD_DTYPE)
    row["step"], row["batch"], row["samples"], row["loss"] = last["step"] + 1, batch, UNKNOWN, np.nan
    row["read_version"] = row["gradient_version"] = read
    row["applied_version"], row["ended_s"] = read + 1, last["ended_s"]
    own = run.records[lost[0]]
    records = {**run.records, lost[0]: np.concatenate([rows, row, own[own["incarnation"] > 0]])}
    return dataclasses.replace(run, records=records), ""


def _missing_batch(run: RunData) -> int | None:
    """The only batch that was handed out and has no record; None: there are several.

    Workers claim batches in their order, so a batch without a record is that of a worker that died.
    """
    batches = np.unique(np.concatenate([rows["batch"] for rows in run.records.values()]))
    missing = np.setdiff1d(np.arange(batches[-1] + 1), batches)
    return int(batches[-1]) + 1 if not len(missing) else int(missing[0]) if len(missing) == 1 else None
