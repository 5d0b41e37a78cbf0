"""The simulated pool of slots: nobody is ever given a slot to write that another one reads, writes or finds as the head."""

from random import Random
from types import SimpleNamespace

import pytest
import torch

from paceline.simulator.memory import SimulatedSlots


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8])
def test_claimed_slots_are_free_and_at_most_two_per_worker_are_used(workers):
    random, caller = Random(workers), SimpleNamespace(worker_id=0, atomic=lambda: None)
    state = SimulatedSlots(torch.zeros(1), lambda: caller)
    reads, claims = [None] * workers, [None] * workers
    for _ in range(5000):
        worker = caller.worker_id = random.randrange(workers)
        if reads[worker] is None and random.random() < 0.6:
            reads[worker] = state.latest()
        elif claims[worker] is None and random.random() < 0.5:
            new = state.claim()
            assert new.slot != state.head.slot
            assert new.slot not in [one.slot for one in reads + claims if one is not None]
            claims[worker] = new
        elif reads[worker] is not None and claims[worker] is None:
            state.leave()
            reads[worker] = None
        elif reads[worker] is not None:
            newest = reads[worker].version == state.version
            assert state.publish(claims[worker], reads[worker]) == newest
            if not newest:
                state.discard(claims[worker])
            claims[worker] = None
            state.leave()
            reads[worker] = None
    assert state.version > 100
    assert state.num_slots <= 2 * workers + 1


def test_a_new_slot_is_zero(monkeypatch):
    """An update writes parameters only, and padding counts where vectors are compared."""
    monkeypatch.setattr(torch, "empty_like", lambda x: torch.full_like(x, torch.nan))
    state = SimulatedSlots(torch.zeros(4), lambda: SimpleNamespace(worker_id=0, atomic=lambda: None))
    assert state.claim().x.tolist() == [0.0] * 4
