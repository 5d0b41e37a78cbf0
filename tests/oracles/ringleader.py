"""Ringleader ASGD, Maranjyan and Richtárik 2025: every update is the mean of the workers' means of this round."""

import numpy as np

from oracles.servers import Pushes


def run(trace, start, optimizer, *, clip=None, codec=None):
    """The vector after all updates.

    Rounds: first every gradient goes into its worker's row, until all have one; then each worker's next gradient goes into
    its row and makes an update, once. What it brings after that belongs to the next round. A worker that has ended is not
    waited for; when none is left, what no update has had makes the last.
    """
    versions, pushes = [start], Pushes(trace, codec)
    rows, next_rows, updated, unused = {}, {}, None, False
    members = set(trace.left_s)
    updating = {
        (one.worker, one.applied): one.number for one in trace.steps
    }  # a worker's last of those with one version
    arrivals = [
        (round(one.ready_s, 6), updating[one.worker, one.applied] == one.number, one.applied, one.worker, one)
        for one in trace.steps
    ]
    ends = [(left_s, True, np.inf, worker, None) for worker, left_s in trace.left_s.items()]

    def update(table):
        means = [sum(n * g for g, _, n in row) / sum(n for _, _, n in row) for row in table.values()]
        has = np.logical_or.reduce([has for row in table.values() for _, has, _ in row])
        versions.append(optimizer.step(versions[-1], np.mean(means, axis=0), has))

    for *_, worker, step in sorted(arrivals + ends, key=lambda one: one[:3]):
        if step is None:
            members.discard(worker)
            if not members and unused:
                update({**rows, **next_rows})
        else:
            g, has = step.gradient(versions[step.read], clip)
            one = pushes.gradient(step, g, has), has, step.samples
            is_over = updated is not None and worker in updated
            (next_rows if is_over else rows).setdefault(worker, []).append(one)
            unused = is_over or (updated is None and not members <= rows.keys())
            if not unused:
                updated = {*(updated or ()), worker}
                update(rows)
        if updated is not None and members and members <= updated:
            rows, next_rows, updated = next_rows, {}, None
    return versions[-1]
