"""A lockstep round of several workers is one big batch."""

import numpy as np
import torch

from contracts.runs import plain_run, run_task
from contracts.table import rows, runs


@runs(lambda row: row.together and not row.drops_updates and not row.rounds, (3, "threads"), (5, "processes"))
def test_equals_one_big_batch(row, workers, backend):
    """180 batches of 8, the last of 5: the last round is uneven in samples."""
    rounds = -(-180 // workers)
    x, _ = plain_run(steps=2 * rounds, batches_per_step=workers)
    run, parameters = run_task(row, workers=workers, backend=backend, epochs=2)
    assert parameters.version == 2 * rounds
    torch.testing.assert_close(parameters.x, x, rtol=1e-4, atol=1e-5)
    assert np.concatenate(list(run.records.values()))["samples"].sum() == 2 * 1437


@rows(lambda row: row.together and row.algorithm.lockstep and not (row.rounds or row.follows_times))
def test_workers_without_a_batch_weigh_zero(row):
    """90 batches of 16 in rounds of 4: two workers have nothing to do in an epoch's last round."""
    x, _ = plain_run(steps=2 * 23, batch_size=16, batches_per_step=4)
    run, parameters = run_task(row, workers=4, batch_size=16, epochs=2)
    torch.testing.assert_close(parameters.x, x, rtol=1e-4, atol=1e-5)
    assert [int((own["samples"] == 0).sum()) for own in run.records.values()] == [0, 0, 2, 2]


@rows(lambda row: row.algorithm.lockstep and row.policy and not row.follows_times)
def test_two_runs_are_equal_bit_for_bit(row):
    """As those of the other rows are, of which `test_resume.py` makes one in two parts."""
    first, second = (run_task(row, workers=3, backend="processes", epochs=1)[1] for _ in range(2))
    assert torch.equal(first.x, second.x)
