"""The result of a run without a supervisor, from what its workers wrote."""

import numpy as np
import pytest

from paceline.records.step_record import PackedRecords
from paceline.run.joined_result import joined_result

ABOUT = {"task": "loop.py", "algorithm": "ad-psgd", "workers": 2, "backend": "join", "seed": 0}
ENDED = {"state": "ended", "batches_not_given": 0, "models_in_mean": 1, "consensus_distance": 0.0, "notes": []}
DIVERGED = {"state": "diverged", "reason": "The loss became nan at step 3."}


def result_of(*own, **also):
    own = [{"worker": worker, "unresolved_exchanges": 0, **one} for worker, one in enumerate(own)]
    records = {one["worker"]: np.array(PackedRecords().array()) for one in own if one["state"] != "started"}
    return joined_result(ABOUT, own, records, gossip=True, notes=[], restarts=0, reason="Nothing came of it.", **also)


@pytest.mark.parametrize(
    ("own", "failed"),
    [
        ((ENDED, DIVERGED), True),
        ((DIVERGED | {"reason": "?"}, DIVERGED), True),
        (({"state": "started"}, DIVERGED), True),
    ],
)
def test_one_workers_divergence_is_the_runs(own, failed):
    """Even if no worker ended in order; the diverged worker's records count."""
    result = result_of(*own, failed=failed)
    assert result["outcome"] == "diverged"
    assert result["outcome_reason"].startswith("Worker ")
    assert result["workers_lost"] == [number for number, one in enumerate(own) if one["state"] == "started"]
    assert 1 in result["workers_here"]


@pytest.mark.parametrize(("own", "outcome"), [((ENDED, ENDED), "stopped"), (({"state": "started"},) * 2, "crashed")])
def test_a_run_without_divergence_has_ended_or_crashed(own, outcome):
    assert result_of(*own)["outcome"] == outcome
