"""The simulated pool of slots: nobody is ever given a slot to write that another one reads, writes or finds as the head."""

from random import Random

import pytest
import torch

from paceline.simulator.memory import SlotState


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8])
def test_claimed_slots_are_free_and_at_most_two_per_worker_are_used(workers):
    random, state = Random(workers), SlotState(torch.zeros(1))
    reads, claims = [None] * workers, [None] * workers
    for _ in range(5000):
        worker = random.randrange(workers)
        if reads[worker] is None and random.random() < 0.6:
            reads[worker] = state.read()
        elif claims[worker] is None and random.random() < 0.5:
            new = state.claim()
            assert new.slot != state.head.slot
            assert new.slot not in [one.slot for one in reads + claims if one is not None]
            claims[worker] = new
        elif reads[worker] is not None and claims[worker] is None:
            state.leave(reads[worker])
            reads[worker] = None
        elif reads[worker] is not None:
            newest = reads[worker].version == state.version
            assert state.compare_and_swap(claims[worker], reads[worker]) == newest
            if not newest:
                state.discard(claims[worker])
            claims[worker] = None
            state.leave(reads[worker])
            reads[worker] = None
    assert state.version > 100
    assert state.num_slots <= 2 * workers + 1
