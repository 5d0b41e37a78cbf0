"""The mean of all models at the end of a run without a supervisor: who is in it, whatever else has come meanwhile."""

import pytest
import torch

from paceline.final_mean import mean_of_all
from paceline.transport.base import Message, PeerBack, PeerLeft, Received
from paceline.transport.matching import Arrivals


class Box:
    """A mailbox in which everything has come by now."""

    def __init__(self, *arrivals):
        self.arrivals, self.sent = Arrivals(), []
        for one in arrivals:
            self.arrivals.add(one)

    def peers(self):
        return {0, 1, 2}

    def send(self, to, message):
        self.sent.append((to, message.kind, message.number))

    def receive(self, timeout_s, **wanted):
        return self.arrivals.take(**wanted)


def test_a_worker_that_came_late_or_was_away_is_in_the_mean():
    """Its program for averages had taken such news until it ended; those that come afterwards are still there."""
    models = [Received(one, 1, Message("final", 0, x=torch.full((2,), float(one)))) for one in (1, 2)]
    box = Box(PeerBack(1, 1), PeerBack(2, 0), *models)
    final = mean_of_all(box, 0, 3, torch.zeros(2), 1.0)
    assert (final.x.tolist(), final.num_models) == ([1.0, 1.0], 3)
    assert box.sent == [(1, "mean", 3), (2, "mean", 3)]


@pytest.mark.parametrize("news", [(), (PeerBack(0, 1),)])
def test_the_lowest_worker_that_can_be_reached_collects(news):
    box = Box(*news, Received(0, 1, Message("mean", 2, 0.25, torch.ones(2))))
    final = mean_of_all(box, 1, 3, torch.zeros(2), 1.0)
    assert (final.x.tolist(), final.consensus_distance, final.num_models) == ([1.0, 1.0], 0.25, 2)
    assert box.sent == [(0, "final", 0)]


def test_the_next_collects_where_it_has_left():
    box = Box(PeerLeft(0, 0, "killed"), Received(2, 0, Message("final", 1, x=torch.full((2,), 2.0))))
    final = mean_of_all(box, 1, 3, torch.zeros(2), 1.0)
    assert (final.x.tolist(), final.num_models) == ([1.0, 1.0], 2)
