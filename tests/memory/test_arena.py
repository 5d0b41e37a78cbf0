"""The plan of a run's memory."""

import pytest
import torch

import paceline as pl
from loops import families
from paceline.memory.arena import plan_arena
from paceline.memory.segment import LINE_BYTES


@pytest.mark.parametrize("num_workers", [1, 2, 3, 63, 64, 65])
@pytest.mark.parametrize("algorithm", families.ALL)
def test_all_areas_lie_within_the_segment(algorithm, num_workers):
    plan = plan_arena(
        pl.parse(algorithm).needs, num_workers=num_workers, num_elements=100, dtype=torch.float32, extra={}
    )
    words = [plan.control, plan.epoch_claims, plan.ended + (num_workers - 1) * LINE_BYTES]
    assert max(words) + LINE_BYTES <= plan.size_bytes
