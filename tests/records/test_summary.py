import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from observe.synthetic import METHODS, empty, make_run
from paceline.records.step_record import RECORD_DTYPE
from paceline.records.summary import (
    FRACTIONS,
    applied_in_order,
    loss_curve,
    repeated_batches,
    running_average,
    summarize,
    unrecorded,
)

# Losses and times are multiples of 1/8, so that sums are exact and both ways of summing agree to the last bit.
EIGHTHS = st.integers(0, 80).map(lambda value: value / 8)


@st.composite
def records_of_a_run(draw):
    workers = draw(st.integers(1, 4))
    versions = iter(draw(st.permutations(range(1, 61))))
    records = {}
    for worker in range(workers):
        rows = np.zeros(draw(st.integers(0, 12)), RECORD_DTYPE)
        at = 0.0
        for row in rows:
            fate = draw(st.integers(0, 5))  # dropped; there was none; made a version
            row["applied_version"] = fate - 1 if fate < 2 else next(versions)
            row["read_version"] = draw(st.integers(0, 60))
            row["gradient_version"] = draw(st.integers(0, 60))
            row["samples"] = draw(st.integers(0, 9)) if fate != 1 else 0
            row["failed_publishes"] = draw(st.integers(0, 2))
            row["started_s"] = at
            row["wait_s"] = draw(EIGHTHS)
            at += 1 + row["wait_s"]
            row["ended_s"] = at
            row["loss"] = draw(st.one_of(EIGHTHS, st.just(math.nan)))
        if len(rows) or draw(st.booleans()):
            records[worker] = rows
    return workers, records


def reference(workers, records, initial_loss, target_loss):
    """The same figures, one record at a time."""
    applied, dropped = [], 0
    for worker in records:
        for row in records[worker]:
            if row["applied_version"] == -1:
                dropped += 1
            elif row["applied_version"]:
                applied.append(row)
    applied.sort(key=lambda row: row["applied_version"])
    figures = {
        "steps": len(applied),
        "samples": sum(int(row["samples"]) for row in applied),
        "dropped_updates": dropped,
        "train_loss": None,
        "time_to_target_s": None,
        "steps_to_target": None,
        "time_to_fraction_s": dict.fromkeys(FRACTIONS),
    }
    window, latest = [], 0.0
    for steps, row in enumerate(applied, start=1):
        latest = max(latest, row["ended_s"])
        if math.isnan(row["loss"]):
            continue
        window = [*window, row["loss"]][-100:]
        average = sum(window) / len(window)
        figures["train_loss"] = average
        if average <= target_loss and figures["time_to_target_s"] is None:
            figures["time_to_target_s"], figures["steps_to_target"] = latest, steps
        for fraction in FRACTIONS:
            if average <= float(fraction) * initial_loss and figures["time_to_fraction_s"][fraction] is None:
                figures["time_to_fraction_s"][fraction] = latest
    staleness = sorted(int(row["applied_version"] - 1 - row["read_version"]) for row in applied)
    if staleness:
        size = len(staleness)
        figures["staleness"] = {
            "mean": sum(staleness) / size,
            "p50": staleness[math.ceil(0.50 * size) - 1],
            "p95": staleness[math.ceil(0.95 * size) - 1],
            "max": staleness[-1],
            "histogram": {str(value): staleness.count(value) for value in staleness},
            "mean_after_gradient": sum(int(row["applied_version"] - 1 - row["gradient_version"]) for row in applied)
            / size,
        }
    figures["updates_per_worker"] = [
        sum(int(row["applied_version"]) > 0 for row in records.get(worker, ())) for worker in range(workers)
    ]
    rows = [row for worker in records for row in records[worker]]
    total = sum(row["ended_s"] - row["started_s"] for row in rows)
    figures["waiting_share"] = sum(row["wait_s"] for row in rows) / total if rows else None
    figures["failed_publishes"] = sum(int(row["failed_publishes"]) for row in rows)
    figures["computed_gradients"] = sum(bool(row["samples"]) for row in rows)
    return figures


@settings(max_examples=60, deadline=None)
@given(records_of_a_run(), EIGHTHS, EIGHTHS)
def test_every_figure_equals_the_slow_reference(run, initial_loss, target_loss):
    workers, records = run
    figures = summarize(records, num_workers=workers, wall_s=8.0, initial_loss=initial_loss, target_loss=target_loss)
    for name, value in reference(workers, records, initial_loss, target_loss).items():
        assert figures[name] == value, name
    assert figures["samples_per_s"] == figures["samples"] / 8


@settings(max_examples=40, deadline=None)
@given(st.lists(EIGHTHS, max_size=300), st.sampled_from([1, 2, 3, 7, 64, 100]))
def test_the_running_average_is_the_mean_of_each_window(values, window):
    expected = [sum(values[max(0, at - window + 1) : at + 1]) / min(at + 1, window) for at in range(len(values))]
    assert running_average(np.array(values), window).tolist() == expected


def test_one_huge_loss_leaves_the_window_again():
    values = np.full(500, 0.25)
    values[50], values[60] = 1e300, math.inf
    average = running_average(values)
    assert average[200:].tolist() == [0.25] * 300
    assert average[60:160].tolist() == [math.inf] * 100


@pytest.mark.parametrize("records", [{}, {0: empty()}, {0: empty(), 2: empty()}], ids=["none", "one", "two"])
def test_no_records_give_no_figures(records):
    figures = summarize(records, num_workers=3, wall_s=0.0, initial_loss=1.0, target_loss=5.0, target_accuracy=0.0)
    assert figures["steps"] == figures["samples"] == figures["computed_gradients"] == 0
    assert figures["updates_per_worker"] == [0, 0, 0]
    assert figures["waiting_share_per_worker"] == [None] * 3
    assert figures["staleness"]["mean"] is None
    assert figures["staleness"]["histogram"] == {}
    assert figures["train_loss"] is figures["time_to_target_s"] is figures["samples_per_s"] is None


def test_a_loop_that_reports_no_loss_has_the_other_figures():
    records = {worker: rows.copy() for worker, rows in make_run(steps=20).records.items()}
    for rows in records.values():
        rows["loss"] = math.nan
    figures = summarize(records, num_workers=4, wall_s=1.0, initial_loss=2.0, target_loss=9.0)
    assert figures["train_loss"] is None
    assert figures["time_to_target_s"] is None
    assert figures["steps"] > 20
    assert figures["staleness"]["mean"] > 0


def test_a_single_record():
    rows = make_run("hogwild", workers=1, steps=1).records[0][:1]
    figures = summarize({0: rows}, num_workers=1, wall_s=2.0, initial_loss=1e9, target_loss=1e9)
    assert figures["steps"] == figures["steps_to_target"] == 1
    assert figures["time_to_target_s"] == rows["ended_s"][0] == figures["time_to_fraction_s"]["0.025"]
    assert figures["staleness"] == {
        "mean": 0.0, "p50": 0, "p95": 0, "max": 0, "histogram": {"0": 1}, "mean_after_gradient": 0.0
    }  # fmt: skip
    assert figures["samples_per_s"] == 32


def test_infinite_losses_give_no_train_loss_and_no_target():
    rows = make_run("hogwild", workers=1, steps=5).records[0].copy()
    rows["loss"] = math.inf
    figures = summarize({0: rows}, num_workers=1, wall_s=1.0, initial_loss=math.inf, target_loss=1.0)
    assert figures["train_loss"] is None
    assert set(figures["time_to_fraction_s"].values()) == {None}


def test_lockstep_counts_one_update_for_all_workers():
    run = make_run("lockstep", workers=3, steps=50, slow=1)
    figures = summarize(run.records, num_workers=3, wall_s=1.0, target_loss=9.0, lockstep=True)
    assert figures["steps"] == 50
    assert figures["samples"] == 3 * 50 * 64
    assert figures["steps_to_target"] == 1
    assert figures["updates_per_worker"] == [50, 50, 50]
    assert figures["staleness"]["histogram"] == {"0": 150}
    shares = figures["waiting_share_per_worker"]
    assert shares[1] < 0.01 < 0.5 < min(shares[0], shares[2])
    curve = loss_curve(run.records)
    assert curve.steps.tolist() == [step for step in range(1, 51) for _ in range(3)]


def test_a_worker_beyond_the_given_number_is_counted_too():
    run = make_run(workers=3, steps=5)
    assert len(summarize(run.records, num_workers=2, wall_s=1.0)["updates_per_worker"]) == 3


def test_the_target_accuracy_is_the_first_evaluation_at_or_above_it():
    evaluations = [
        {"elapsed_s": 1.0, "version": 10, "samples": 1, "train_loss": None, "test_loss": None, "test_accuracy": None},
        {"elapsed_s": 2.0, "version": 20, "samples": 2, "train_loss": None, "test_loss": 0.7, "test_accuracy": 0.9},
        {"elapsed_s": 3.0, "version": 30, "samples": 3, "train_loss": None, "test_loss": None, "test_accuracy": 0.8},
    ]
    figures = summarize({}, num_workers=1, wall_s=3.0, target_accuracy=0.9, evaluations=evaluations)
    assert (figures["time_to_target_s"], figures["steps_to_target"]) == (2.0, 20)
    assert (figures["test_accuracy"], figures["test_loss"]) == (0.8, 0.7)
    figures = summarize({}, num_workers=1, wall_s=3.0, target_accuracy=0.95, evaluations=evaluations)
    assert figures["time_to_target_s"] is None


@pytest.mark.parametrize("method", METHODS)
def test_the_curve_ends_at_the_totals(method):
    run = make_run(method, slow=0)
    figures, curve = run.result, loss_curve(run.records)
    assert curve.steps[-1] == figures["steps"]
    assert curve.samples[-1] == figures["samples"]
    assert curve.average[-1] == figures["train_loss"]
    assert (np.diff(curve.time_s) >= 0).all()
    assert (np.diff(applied_in_order(run.records)["applied_version"]) >= 0).all()
    assert figures["dropped_updates"] + len(curve.steps) == figures["computed_gradients"]


def rows_of(*columns, names=("applied_version", "gradient_version")):
    rows = np.zeros(len(columns), RECORD_DTYPE)
    for row, values in zip(rows, columns, strict=True):
        for name, value in zip(names, values, strict=True):
            row[name] = value
    return rows


@given(records_of_a_run(), st.integers(0, 70))
def test_updates_without_a_record_are_the_versions_that_no_record_names(run, version):
    _, records = run
    named = {int(row["applied_version"]) for rows in records.values() for row in rows}
    assert unrecorded(records, version) == sum(one not in named for one in range(1, version + 1))


def test_an_update_that_several_workers_made_has_a_record_where_one_of_them_has():
    records = {0: rows_of((1, 0), (2, 1)), 1: rows_of((1, 0))}
    assert [unrecorded(records, version) for version in (2, 3)] == [0, 1]


def test_what_a_dead_server_took_along_is_not_missing():
    """Versions 3 and 4 were undone: workers have sent the gradients again, and their records name what those became."""
    records = {0: rows_of((1, 0), (2, 1), (5, 2), (7, 6))}
    assert unrecorded(records, 7, undone=[(3, 4)]) == 1


def test_a_gradient_that_waits_counts_as_it_comes():
    """Two late: the update that the third one came with is the first one's, and the last two wait at the end."""
    late = rows_of((3, 0), (4, 1), (5, 2), (6, 3))
    assert unrecorded({0: late}, 4, waits=True) == 0
    assert unrecorded({0: late[:2], 1: late[3:]}, 4, waits=True) == 1


def test_batches_that_were_trained_on_twice():
    names = ("applied_version", "batch")
    records = {0: rows_of((1, 0), (2, 7), (-1, 8), names=names), 1: rows_of((3, 8), (4, 7), (5, 7), names=names)}
    assert repeated_batches(records) == 2, "a gradient that was dropped trained nothing"
    assert repeated_batches({0: rows_of((1, -1), (2, -1), names=names)}) == 0, "a loop that does not number them"
