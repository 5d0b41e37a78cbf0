"""A malformed message from a worker of the run is that worker's error: it is counted, and changes nothing and ends nothing."""

import random
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import paceline as pl
from algorithms.server.test_promises import EVERY, made_once
from algorithms.server.test_promises import worlds as server_worlds
from algorithms.test_exchange import worlds as gossip_worlds
from malformed import malformed
from paceline.algorithms import registry
from paceline.algorithms.server.client import Client
from paceline.errors import WorkerLostError
from paceline.membership.final_mean import mean_of_all
from paceline.ports.matching import PendingEvents
from paceline.ports.ports import Counts, Message, Received
from paceline.run.simulate_task import TaskSimulation
from paceline.simulator import Cluster
from paceline.simulator.network import Network

WITH_MAILBOX = [name for name in registry.names() if registry.build(name).needs.mailbox]
VARIED = [
    "d-psgd(topology=complete)",
    "ad-psgd(topology=complete, peers=rotate)",
    "parameter-server(mode=async, shards=2)",
    "parameter-server(mode=sync(backups=1), shards=2)",
    "parameter-server(mode=bounded(clock_bound=1), shards=2)",
    "parameter-server(mode=async, codec=bf16)",
    "parameter-server(mode=async, codec=top-k)",
    "parameter-server(mode=async, apply=adaptive-revision(revision_state=echo))",
    "parameter-server(mode=async, apply=delayed(delay=constant(updates_late=2)))",
    "downpour(fetch=3, push=2, shards=2)",
]


class Meddler:
    """Sends, beside some of the messages, one that differs from it in one thing.

    Args:
        seed: of what is drawn.
        share: of the messages that get such a companion.
    """

    def __init__(self, seed, share):
        self.draw, self.share, self.num_sent = random.Random(seed), share, 0

    def companion(self, received):
        """One to be delivered beside it; None."""
        if not isinstance(received, Received) or self.draw.random() >= self.share:
            return None
        self.num_sent += 1
        return received._replace(message=malformed(self.draw, received.message))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(gossip_worlds(), st.integers(0, 2**32), st.sampled_from([0.05, 0.5, 1.0]))
def test_averages_in_pairs_stay_whole(world, seed, share):
    meddler, deliver = Meddler(seed, share), world.deliver

    def meddled(sender, to, event):
        if (one := meddler.companion(event)) is not None:
            deliver(sender, to, one)
        deliver(sender, to, event)

    world.deliver = meddled
    world.run()
    assert world.drift() < 1e-11
    assert not world.unpaired()
    assert world.count("unresolved_exchanges") == 0
    assert world.count("peer_failures") > 0 or share < 1 or not meddler.num_sent


@settings(max_examples=120, deadline=None, derandomize=True)
@given(server_worlds(EVERY), st.integers(0, 2**32), st.sampled_from([0.02, 0.2, 0.6]))
def test_servers_and_their_copies_go_on(world, seed, share):
    meddler, post = Meddler(seed, share), world.post
    of_copies = (world.num_workers + world.shards, world.num_workers + 2 * world.shards)
    to_copies = [0]

    def meddled(sender, to, item):
        one = meddler.companion(item)
        if one is not None and (of_copies[0] <= to < of_copies[1]):
            to_copies[0] += 1
            if to_copies[0] > 5:  # a copy gives up whose server sends nothing but nonsense
                one = None
        if one is not None and meddler.draw.random() < 0.5:
            post(sender, to, one)
            one = None
        post(sender, to, item)
        if one is not None:
            post(sender, to, one)

    world.post = meddled
    world.run()
    made_once(world)


def outcome(algorithm, meddler=None):
    """Result and final parameters of a short simulated training, disturbed or not."""
    send = Network.send

    def meddled(network, sender, to, received, num_bytes):
        if meddler is not None and (one := meddler.companion(received)) is not None:
            send(network, sender, to, one, num_bytes)
        send(network, sender, to, received, num_bytes)

    with mock.patch.object(Network, "send", meddled):
        config = pl.TrainConfig(algorithm=algorithm, workers=4, epochs=0.3)
        simulation = TaskSimulation(config, Cluster(workers=4))
        run = simulation.run()
    x = torch.empty(simulation.binding.num_elements)
    simulation.machine.shared.snapshot(x)
    return run.result, x


@pytest.mark.parametrize("algorithm", [*WITH_MAILBOX, *VARIED])
def test_a_whole_training_ends_as_it_would(algorithm):
    result, x = outcome(algorithm)
    for seed, share in ((1, 0.3), (2, 1.0)):
        meddler = Meddler(seed, share)
        disturbed, x_disturbed = outcome(algorithm, meddler)
        assert meddler.num_sent > 10
        assert disturbed["outcome"] == "stopped", disturbed["outcome_reason"]
        assert disturbed["steps"] + disturbed.get("dropped", 0) >= 0.9 * result["steps"]
        assert disturbed["peer_failures"] + sum(one["malformed"] for one in disturbed.get("shards", ())) > 0
        if pl.parse(algorithm).lockstep and "backups" not in algorithm:
            assert torch.equal(x, x_disturbed)
        else:
            torch.testing.assert_close(x, x_disturbed, rtol=0.0, atol=0.2)


# One by one


def receiving(*arrivals):
    """A mailbox in which everything has come by now."""
    waiting = PendingEvents()
    for one in arrivals:
        waiting.add(one)
    return SimpleNamespace(
        receive=lambda timeout_s=None, **wanted: waiting.take(**wanted),
        send=lambda to, message: None,
        peers=lambda: {0, 1, 2},
    )


WRONG = [None, torch.zeros(3), torch.zeros(2, dtype=torch.float64), torch.empty(0)]


@pytest.mark.parametrize("wrong", WRONG)
def test_the_final_mean_waits_for_the_right_vector(wrong):
    right = [Received(one, 0, Message("final", 0, x=torch.full((2,), float(one)))) for one in (1, 2)]
    final = mean_of_all(receiving(Received(1, 0, Message("final", 0, x=wrong)), *right), 0, 3, torch.zeros(2), 1.0)
    assert (final.x.tolist(), final.num_models) == ([1.0, 1.0], 3)
    mean = Received(0, 0, Message("mean", 2, 0.25, torch.ones(2)))
    final = mean_of_all(receiving(Received(0, 0, Message("mean", 2, 0.0, wrong)), mean), 1, 3, torch.zeros(2), 1.0)
    assert (final.x.tolist(), final.consensus_distance) == ([1.0, 1.0], 0.25)


def test_a_server_that_answers_nothing_but_nonsense_is_an_error():
    sent = []
    mailbox = SimpleNamespace(
        receive=lambda timeout_s=None, sender=None: Received(2, 0, Message("x", 1, 1.0, torch.zeros(5), 1)),
        send=lambda to, message: sent.append(message.kind),
    )
    ports = SimpleNamespace(
        mailbox=mailbox, shared=SimpleNamespace(x=torch.zeros(4), ranges=((0, 4),)), num_workers=2, num_servers=1,
        clock=SimpleNamespace(now_s=lambda: 0.0), counts=(counts := Counts()), moved=lambda _: None, codec_moves={},
        incarnation=0, storage=None, decided=lambda *_, **__: None,
    )  # fmt: skip
    with pytest.raises(
        WorkerLostError, match=r"Shard 0 of the parameter server cannot be used: Worker 2 sent a message 'x' with a"
    ):
        Client(ports).push(torch.ones(4), 1)
    assert sent == ["push"] * len(sent)
    assert counts.peer_failures == len(sent) > 5, "each time it is asked again"
