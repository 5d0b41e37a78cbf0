"""What the page on DeepDist says of trainings that were ended before they had arrived."""

import importlib
import math
from pathlib import Path

import pytest

FIDELITY = Path(__file__).parents[2] / "benchmarks" / "fidelity"


@pytest.fixture(scope="module")
def report():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FIDELITY))
        yield importlib.import_module("deepdist_report")


@pytest.mark.parametrize(
    ("own", "theirs", "said"),
    [
        ([1.0, 2.0], [3.0, 5.0], "holds, 2.7 times"),
        ([1.0, 4.0], [3.0, 5.0], "not told apart"),
        ([6.0, 7.0], [3.0, 3.5], "does not hold, the other takes 0.50 times as much"),
        ([1.0, math.inf], [3.0, 5.0], "does not hold, it does not get there with every seed"),
        ([1.0, 3.9], [math.inf, math.inf], "holds, the other is not there when it ends"),
        ([1.0, 3.9], [math.inf, 4.0], "holds, the other is not there with every seed when it ends"),
        ([3.3, 5.3], [math.inf, math.inf], "cannot be told, the other was ended before it had taken as much"),
        ([3.3, 5.3], [math.inf, 2.6], "cannot be told, the other was ended before it had taken as much"),
    ],
)
def test_a_training_that_was_ended_needs_more_than_it_had_and_nothing_else_is_known(report, own, theirs, said):
    assert report.verdict(own, theirs, [4.0, 4.0]).startswith(said)
