"""The mean of all models at the end of a run without a supervisor: whose models it has, whatever else has come."""

from types import SimpleNamespace

import pytest
import torch

from paceline.membership.final_mean import BatchesTaken, mean_of_all, take_final_mean
from paceline.ports.matching import PendingEvents
from paceline.ports.ports import Message, PeerBack, PeerLeft, Received


class Box:
    """A mailbox in which everything has come by now."""

    def __init__(self, *arrivals):
        self.arrivals, self.sent, self.versions = PendingEvents(), [], []
        for one in arrivals:
            self.arrivals.add(one)

    def peers(self):
        return {0, 1, 2}

    def send(self, to, message):
        self.sent.append((to, message.kind, message.number))
        self.versions.append(message.version)

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


# Batches that no worker was given


def collected(*taken, own=300, reached=1000, workers=3, further=0.0):
    """What worker 0 makes of what the others say they were given; what it tells them."""
    said = [
        Received(one, 0, Message("final", 0, further if one == 1 else 0.0, torch.zeros(2), n))
        for one, n in enumerate(taken, 1)
    ]
    box = Box(*said)
    final = mean_of_all(box, 0, workers, torch.zeros(2), 1.0, BatchesTaken(own, reached))
    assert set(box.versions) == {final.num_not_given}
    return final.num_not_given


def test_batches_that_nobody_was_given_are_counted():
    assert collected(200, 100) == 400
    assert collected(200, 100, reached=900, further=1000.0) == 400, "up to where the furthest worker came"


@pytest.mark.parametrize(
    ("taken", "others"),
    [
        ((400, 300), {}),
        ((395, 293), {}),  # loops that leave an epoch at a `break` keep what they had claimed
        ((500, 400), {}),  # twice, where the join point died
        ((200, -1), {}),  # a successor does not know what the dead worker was given
        ((200, 100), {"own": -1}),
        ((200,), {}),  # somebody has died or left
        ((200, 100), {"reached": 0}),
        ((200, 100), {"reached": 600, "further": float("nan")}),
        ((200, 100), {"reached": 600, "further": float("inf")}),
    ],
)
def test_where_that_is_not_certain_or_the_loops_left_them_none_are(taken, others):
    assert collected(*taken, **others) == 0


def test_every_worker_learns_of_them_and_warns():
    ports = SimpleNamespace(num_workers=3, worker_id=1)
    ports.mailbox = Box(Received(0, 0, Message("mean", 3, 0.0, torch.ones(2), version=1920)))
    with pytest.warns(UserWarning, match=r"^1,920 batches were given to no worker .* a key of its own .*\.$"):
        final = take_final_mean(ports, torch.zeros(2), 1.0, BatchesTaken(80, 2000))
    assert final.num_not_given == 1920


def test_a_lone_worker_counts_them_too():
    with pytest.warns(UserWarning, match="^920 batches were given to no worker"):
        final = take_final_mean(SimpleNamespace(num_workers=1), torch.zeros(2), 1.0, BatchesTaken(80, 1000))
    assert final.num_not_given == 920
