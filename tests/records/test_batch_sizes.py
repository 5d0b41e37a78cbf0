"""The sizes of batches over a run, from its records."""

import numpy as np
import pytest

from paceline.records.batch_sizes import batch_sizes, ideal_step_s
from paceline.records.step_record import RECORD_DTYPE


def rows(samples, first=1):
    records = np.zeros(len(samples), RECORD_DTYPE)
    records["samples"] = samples
    records["applied_version"] = np.arange(first, first + len(samples))
    records["ended_s"] = 0.5 * records["applied_version"]
    return records


def test_changes_are_told_and_short_rounds_left_out():
    records = {0: rows([8, 8, 3, 5, 5, 5, 8]), 1: rows([8, 8, 2, 11, 11, 11, 8])}
    assert batch_sizes(records) == [
        {"version": 1, "elapsed_s": 0.5, "sizes": [8, 8]},
        {"version": 4, "elapsed_s": 2.0, "sizes": [5, 11]},
        {"version": 7, "elapsed_s": 3.5, "sizes": [8, 8]},
    ]


def test_a_resumed_run_or_one_cut_off_has_what_is_whole():
    assert batch_sizes({0: rows([4, 4], first=11), 1: rows([4], first=11)}) == [
        {"version": 11, "elapsed_s": 5.5, "sizes": [4, 4]}
    ]
    assert batch_sizes({0: rows([]), 1: rows([])}) == []
    assert batch_sizes({}) == []


def test_the_ideal_step_is_the_samples_by_the_sum_of_the_speeds():
    """One worker takes 4 s per sample, but for one disturbed step, the other 1 s; what both wait does not count."""
    records = {0: rows([8, 8, 3, 4, 4]), 1: rows([8, 8, 2, 12, 12])}
    for worker, per_sample_s in ((0, 4.0), (1, 1.0)):
        own = records[worker]
        own["gradient_started_s"] = own["ended_s"]
        own["gradient_ended_s"] = own["gradient_started_s"] + 0.5 * per_sample_s * own["samples"]
        own["input_s"] = own["apply_s"] = 0.25 * per_sample_s * own["samples"]
        own["wait_s"] = 100.0
    records[0]["apply_s"][1] = 1000.0
    assert ideal_step_s(records) == pytest.approx(16 / (1 / 4 + 1 / 1))
    assert ideal_step_s({0: rows([8, 8])}) is None, "no time was measured"
    assert ideal_step_s({}) is None
