"""A vector per worker in shared memory."""

import torch

from paceline.memory.replicated import ReplicatedVector
from paceline.memory.segment import Layout, Segment


def test_a_worker_copies_its_own_model_where_all_have_the_same():
    layout = Layout()
    plan = ReplicatedVector.reserve(layout, 4, 3, num_evaluators=1)
    segment = Segment.create(layout.size_bytes)
    behind, ahead, evaluator = (ReplicatedVector(segment, plan, participant) for participant in range(3))
    behind.initialise(torch.zeros(4))
    with ahead.writing():
        ahead.x.fill_(1.0)
        ahead.advance()
    out = torch.empty(4)
    assert [(one.snapshot(out), out[0].item()) for one in (behind, ahead, evaluator)] == [(0, 0.0), (1, 1.0), (0, 0.0)]
