"""A run says in its result whether it can be replayed, and `RecordedRun` says the same."""

import pytest

import paceline as pl
from contracts.linear_task import LINEAR
from contracts.runs import run_task
from contracts.table import rows


@rows()
def test_a_result_says_whether_the_run_can_be_replayed(row, tmp_path):
    settings = {"task": LINEAR, "workers": row.most(3), "steps": 5, "batch_size": 7}
    run, _ = run_task(row, out=tmp_path, **settings)
    reason = run.result["replayable_reason"]
    assert run.result["replayable"] is not bool(row.unreplayable)
    assert row.unreplayable in reason
    if row.unreplayable:
        with pytest.raises(pl.UsageError, match="cannot be replayed") as caught:
            pl.RecordedRun(tmp_path)
        assert reason[1:] in str(caught.value)
    else:
        assert not reason
        assert pl.RecordedRun(tmp_path).replay().checkpoint is not None
