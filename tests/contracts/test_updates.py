"""No update is lost: gradients are planted integers, so the parameters must be the exact sum of what was applied."""

import pytest
import torch

from contracts.programs import BATCH_SIZE, NUM_BATCHES, AddUp, Planted, expected_sum, planted
from contracts.runs import run_function
from contracts.table import rows, runs
from paceline.data.plan import BatchPlan
from paceline.optim.flat import FlatBinding

SIZE = 3_000


def values_of(parameters):
    """Each parameter's elements, without the padding between them."""
    views = FlatBinding(Planted(SIZE).parameters()).views(parameters.x)
    return torch.cat([view.flatten() for view in views])


def exact(row):
    return not row.loses_updates and not row.scales_stale_updates and not row.own_rule


@runs(
    lambda row: exact(row) and not row.together and not row.algorithm.gossip,
    (1, "threads"), (3, "threads"), (5, "processes"),
)  # fmt: skip
def test_parameters_are_the_sum_of_the_applied_updates(row, workers, backend):
    if workers not in row.workers([workers]):
        pytest.skip("one worker at most")
    run, parameters = run_function(
        AddUp(SIZE, epochs=2), workers=workers, algorithm=row.algorithm, backend=backend, seed=workers
    )
    wanted = expected_sum(run.records, seed=workers)
    assert values_of(parameters).unique().tolist() == [wanted]
    assert row.accrues or parameters.version == 2 * NUM_BATCHES - run.result["dropped_updates"]
    assert row.drops_updates or wanted == 2 * sum(planted())


@pytest.mark.filterwarnings("ignore:The one-peer exponential graph")
@runs(
    lambda row: row.algorithm.gossip and not row.drops_updates and not row.loses_progress,
    (1, "threads"), (3, "processes"), (5, "threads"),
)  # fmt: skip
def test_the_mean_of_the_models_is_the_sum_of_all_updates(row, workers, backend):
    """Averaging conserves the mean: with the learning rate times the workers, every batch adds its sum to it, once.

    Sums are integers, but averages are not: 24 bits of a float hold them up to rounding.
    """
    train = AddUp(SIZE, epochs=2, learning_rate=2.0 * workers)
    run, parameters = run_function(train, workers=workers, algorithm=row.algorithm, backend=backend)
    weight = torch.full((1,), float(2 * sum(planted())))
    torch.testing.assert_close(values_of(parameters), weight.expand(SIZE + 3), rtol=1e-5, atol=1e-2)
    assert run.result["steps"] == 2 * NUM_BATCHES
    if workers > 1 and row.algorithm.lockstep:  # others may be done before their first average
        assert run.result["averages_per_step"] > 0


@runs(lambda row: row.together and not row.drops_updates and not row.rounds, (2, "processes"), (4, "threads"))
def test_lockstep_applies_each_rounds_mean_once(row, workers, backend):
    """With the learning rate times the workers, a round adds the sum of its batches (halves and quarters are exact).

    The last round has one batch, whose gradient is the mean: all that are without one move by it, too.
    """
    num_batches = 47 if workers == 2 else 45
    train = AddUp(SIZE, learning_rate=2.0 * workers, num_batches=num_batches)
    _, parameters = run_function(train, workers=workers, algorithm=row.algorithm, backend=backend)
    values = torch.tensor(planted(num_batches))
    last = values[BatchPlan(num_samples=len(values), batch_size=BATCH_SIZE).indices(num_batches - 1)]
    assert values_of(parameters).unique().tolist() == [values.sum() + (workers - 1) * last.sum()]
    assert parameters.version == num_batches // workers + 1


@rows(lambda row: bool(row.loses_updates))
def test_racing_updates_are_all_counted(row):
    """The sum may lack components; the version lacks nothing, and no component has more than all updates' sizes."""
    _, parameters = run_function(AddUp(SIZE, epochs=2), workers=4, algorithm=row.algorithm)
    assert parameters.version == 2 * NUM_BATCHES
    assert values_of(parameters).abs().max() <= 2 * NUM_BATCHES * BATCH_SIZE * 6
