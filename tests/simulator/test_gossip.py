"""Gossip on simulated workers: what averaging must conserve, what lockstep must equal, what a slow worker may cost."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import paceline as pl
from algorithms.topology.mixing_analysis import mixing_matrix
from paceline.algorithms.topology import (
    BipartiteExponential,
    Complete,
    Exponential,
    OnePeerExponential,
    Ring,
    Star,
    Torus,
)
from paceline.simulator import Cluster, ExponentialTail, Faults, Normal
from paceline.simulator.program import ProgramError
from simulator.programs import drive

P = 7
VARIED = ExponentialTail(least_s=0.002, tail_s=0.008)
GRAPHS = [
    (Ring(), 2),
    (Ring(), 3),
    (Ring(), 5),
    (Ring(), 8),
    (Complete(), 5),
    (Star(), 4),
    (Torus(), 9),
    (BipartiteExponential(), 8),
]
IDS = [f"{type(topology).__name__}-{workers}" for topology, workers in GRAPHS]


def random_vectors(workers, seed=0):
    return torch.randn(workers, P, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("network", ["fast", "slow"])
@pytest.mark.parametrize("peers", ["random", "rotate"])
@pytest.mark.parametrize(("topology", "workers"), GRAPHS, ids=IDS)
def test_ad_psgd_conserves_the_mean_and_agrees(topology, workers, peers, network):
    x0 = random_vectors(workers)
    rate = 1.25e9 if network == "fast" else 20_000  # 6 ms a message: exchanges overlap gradients and each other
    cluster = Cluster(workers=workers, compute_s=VARIED, bandwidth_bytes_per_s=rate)
    ended = drive(pl.ADPSGD(topology=topology, peers=peers), cluster, num_steps=150, x0=x0)
    assert (ended.x.mean(0) - x0.mean(0)).abs().max() < 1e-12
    assert ended.machine.shared.consensus_distance() < 0.02 * (x0 - x0.mean(0)).square().sum() / workers
    assert min(one.counts.averages for one in ended.ports) > 40


@pytest.mark.parametrize(("topology", "workers"), GRAPHS, ids=IDS)
def test_ad_psgd_loses_no_update_written_meanwhile(topology, workers):
    x0 = random_vectors(workers)
    cluster = Cluster(workers=workers, compute_s=VARIED, bandwidth_bytes_per_s=20_000)

    def gradient(worker, step, at):
        return torch.full((P,), 1.0 + worker + step % 3, dtype=torch.float64)

    ended = drive(pl.ADPSGD(topology=topology), cluster, num_steps=60, x0=x0, gradient=gradient, learning_rate=0.125)
    planted = sum(one.updates for one in ended.replicas)
    expected = -0.125 * sum(1.0 + worker + step % 3 for worker in range(workers) for step in range(1, 61))
    assert planted == pytest.approx(torch.full((P,), expected), rel=1e-9)
    assert (ended.x.sum(0) - x0.sum(0) - planted).abs().max() < 1e-9


def slowly(topology, cluster, *, steps, seed=1, faults=None, peers="random"):
    """A run on a network whose answers come after their deadline, 10 s at first; (drift of the sum, counts of all workers)."""
    x0 = torch.zeros(cluster.workers, 200, dtype=torch.float64)

    def gradient(worker, step, at):
        return torch.full((200,), 1.0 + worker, dtype=torch.float64)

    ended = drive(pl.ADPSGD(topology=topology, peers=peers), cluster, num_steps=steps, x0=x0, gradient=gradient,
                  learning_rate=1.0, seed=seed, faults=faults)  # fmt: skip
    drift = float((ended.x.sum(0) - sum(one.updates for one in ended.replicas)).abs().max())
    counts = [one.counts for one in ended.ports]
    return drift, {
        name: sum(getattr(one, name) for one in counts) for name in ("peer_failures", "unresolved_exchanges")
    }


VECTOR_BYTES = 200 * 8 + 64
SLOW = {"compute_s": ExponentialTail(least_s=1.0, tail_s=4.0)}


@pytest.mark.parametrize(
    ("workers", "message_s", "slow_link"),
    [(2, 15.0, ()), (3, 6.0, ()), (3, 15.0, ()), (4, 1.2, ((0, 1, 20.0),)), (5, 6.0, ()), (5, 15.0, ()), (8, 6.0, ())],
)
def test_the_sum_of_all_models_is_exact_where_answers_come_late(workers, message_s, slow_link):
    rate = VECTOR_BYTES / message_s
    cluster = Cluster(workers=workers, bandwidth_bytes_per_s=rate, link_factors=slow_link, **SLOW)
    drift, counts = slowly(Ring(), cluster, steps=100)
    assert counts["peer_failures"] > 5
    assert drift < 1e-9
    assert counts["unresolved_exchanges"] == 0


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    graph=st.sampled_from([*GRAPHS, (Exponential(), 6), (OnePeerExponential(), 8)]),
    message_s=st.sampled_from([0.001, 1.0, 6.0, 12.0]),
    latency_s=st.sampled_from([1e-4, 0.1, 3.0]),
    slow=st.lists(st.tuples(st.integers(0, 1), st.sampled_from([2.0, 10.0])), max_size=2),
    pauses=st.lists(st.tuples(st.integers(0, 8), st.floats(0.0, 40.0), st.sampled_from([0.05, 2.0, 8.0])), max_size=2),
    seed=st.integers(0, 1000),
)
def test_it_is_exact_on_any_network_with_workers_that_pause(graph, message_s, latency_s, slow, pauses, seed):
    """A worker that is silent for longer than `detection_s` is lost to the others and comes back; no message is."""
    topology, workers = graph
    cluster = Cluster(workers=workers, bandwidth_bytes_per_s=VECTOR_BYTES / message_s, latency_s=latency_s, **SLOW)
    for worker, factor in slow:
        cluster = cluster.slow_link(worker, (worker + 1) % workers, factor)
    faults = Faults()
    for worker, at_s, for_s in pauses:
        faults = faults.pause(worker=worker % workers, at_s=at_s, for_s=for_s)
    drift, counts = slowly(topology, cluster, steps=20, seed=seed, faults=faults, peers=("random", "rotate")[seed % 2])
    assert drift < 1e-9 or (pauses and counts["unresolved_exchanges"])
    assert pauses or counts["unresolved_exchanges"] == 0


@pytest.mark.parametrize(("topology", "workers"), GRAPHS, ids=IDS)
def test_ad_psgd_averages_once_more_after_the_last_gradient(topology, workers):
    steps = 12

    def gradient(worker, step, at):
        return torch.eye(workers, dtype=torch.float64)[worker] * (step == steps)

    x0 = torch.zeros(workers, workers, dtype=torch.float64)
    ended = drive(pl.ADPSGD(topology=topology), Cluster(workers=workers), num_steps=steps, x0=x0, gradient=gradient,
                  learning_rate=-1.0)  # fmt: skip
    own = ended.x.diagonal()  # 1 where nobody has averaged since
    assert (ended.x.sum(0) - 1).abs().max() < 1e-12
    assert own.max() <= 0.5 if topology.bipartite_roles(workers) else (own <= 0.5).sum() >= workers / 2
    assert ended.machine.scheduler.now_s < 0.2  # nobody has waited for a deadline


@pytest.mark.parametrize("slow", [0, 1])  # the worker that only answers, and the one that requests
@pytest.mark.parametrize("workers", [2, 4, 5])
def test_the_last_worker_to_end_waits_for_nobody(workers, slow):
    x0 = random_vectors(workers)
    ended = drive(pl.ADPSGD(), Cluster(workers=workers).slow(worker=slow, factor=7), num_steps=10, x0=x0)
    assert (ended.x.mean(0) - x0.mean(0)).abs().max() < 1e-12
    assert ended.machine.scheduler.now_s < 0.75
    assert (ended.x - ended.x.mean(0)).abs().max() < (x0 - x0.mean(0)).abs().max()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("topology", "workers"), [(Ring(), 5), (Ring(), 8), (Complete(), 5)], ids=str)
def test_a_kill_shifts_the_mean_by_one_message_at_most(topology, workers, seed):
    x0 = random_vectors(workers, seed)
    cluster = Cluster(workers=workers, compute_s=VARIED, bandwidth_bytes_per_s=100_000)
    faults = Faults().kill(worker=seed % workers, at_s=0.0011 + 0.0113 * seed)
    ended = drive(pl.ADPSGD(topology=topology), cluster, num_steps=300, x0=x0, faults=faults, seed=seed)
    widest = (x0[:, None] - x0[None]).abs().amax((0, 1))
    shift = (ended.x.mean(0) - x0.mean(0)).abs()
    assert (shift <= widest / 2 / workers + 1e-12).all()
    assert ended.machine.lives.lost == [seed % workers]
    rest = [one for one in range(workers) if one != seed % workers]
    assert (ended.x[rest] - ended.x[rest].mean(0)).abs().max() < 0.05
    assert all(len(ended.replicas[one].read) == 300 for one in rest)


@pytest.mark.parametrize(
    ("topology", "workers"),
    [*GRAPHS, (Exponential(), 6), (OnePeerExponential(), 8)],
    ids=[*IDS, "Exponential-6", "OnePeer-8"],
)
def test_d_psgd_is_its_matrix_form(topology, workers):
    x0 = random_vectors(workers)
    scale = torch.linspace(0.5, 1.5, P, dtype=torch.float64)

    def gradient(worker, step, at):
        return scale * (at - worker) + step

    cluster = Cluster(workers=workers, compute_s=VARIED, bandwidth_bytes_per_s=20_000)
    ended = drive(pl.DPSGD(topology=topology), cluster, num_steps=20, x0=x0, gradient=gradient, learning_rate=0.05)
    X = x0.clone()
    for k in range(20):
        W = torch.from_numpy(np.array(mixing_matrix(topology, workers, k)))
        G = torch.stack([gradient(worker, k + 1, X[worker]) for worker in range(workers)])
        X = W @ X - 0.05 * G
    assert (ended.x - X).abs().max() < 1e-12


def test_d_psgd_names_the_lost_worker():
    faults = Faults().kill(worker=2, step=5)
    with pytest.raises(ProgramError, match=r"WorkerLostError: D-PSGD round \d: worker 2 did not send .* \(killed at"):
        drive(pl.DPSGD(), Cluster(workers=5), num_steps=20, x0=random_vectors(5), faults=faults)


def timed(algorithm, cluster, **config):
    config = pl.TrainConfig(algorithm=algorithm, **config)
    return pl.simulate_task(config, cluster=cluster, timing_only=True, num_parameters=270_000).result


@pytest.mark.parametrize("factor", [2, 10, 100])
def test_slow_worker_law(factor):
    """For the same total samples AD-PSGD takes P / (P - 1 + 1/f) of the undisturbed time, D-PSGD f times it."""
    cluster = Cluster(workers=16, compute_s=Normal())
    # Of 1,438 samples, 1,685 steps per worker: a step of the slowest must be little of the whole time.
    config = {"epochs": 150 if factor > 10 else 50, "batch_size": 8}
    slowed = cluster.slow(worker=0, factor=factor)
    times_s = [timed("ad-psgd", one, **config)["wall_s"] for one in (cluster, slowed)]
    last_s = 0.011 * factor  # the slow worker's last step may outlast the others'
    ideal = 16 / (15 + 1 / factor)
    assert ideal * 0.95 <= times_s[1] / times_s[0] <= ideal * 1.05 + last_s / times_s[0]
    rounds_s = [timed("d-psgd", one, steps=20)["wall_s"] for one in (cluster, slowed)]
    # Two models copied to be sent, mixing with two, the update: nobody's is slower.
    moves_s = (4 + 8 + 3) * 4 * 270_000 / 10e9
    assert rounds_s[1] / rounds_s[0] == pytest.approx((factor * 0.01 + moves_s) / (0.01 + moves_s), rel=0.12)


@pytest.mark.parametrize("workers", [2, 4, 16])
@pytest.mark.parametrize(("gradients_per_exchange", "averages"), [(0.1, 2.0), (1, 1.0), (2, 0.5), (4, 0.25)])
def test_averages_of_pairs_are_counted_at_both_workers_and_are_fewer_on_a_slow_network(
    workers, gradients_per_exchange, averages
):
    """What the docstring says. An exchange is a request and an answer of a million bytes, in memory that takes no time."""
    rate = 2 * 1_000_064 / (0.01 * gradients_per_exchange)
    network = {"bandwidth_bytes_per_s": rate, "latency_s": 1e-6}
    cluster = Cluster(workers=workers, compute_s=Normal(), core_bytes_per_s=1e18, **network)
    config = pl.TrainConfig(algorithm="ad-psgd", steps=200)
    result = pl.simulate_task(config, cluster=cluster, timing_only=True, num_parameters=250_000).result
    assert result["averages_per_step"] == pytest.approx(averages, rel=0.06)


def test_ad_psgd_gradient_is_of_the_copy():
    """What it is computed at is the model as copied, though averages move the model meanwhile."""
    x0, seen = random_vectors(4), []

    def gradient(worker, step, at):
        seen.append((worker, at))
        return torch.zeros(P)

    ended = drive(pl.ADPSGD(), Cluster(workers=4), num_steps=10, x0=x0, gradient=gradient)
    assert torch.equal(seen[0][1], x0[seen[0][0]])
    for (worker, at), read in zip(seen[:4], [ended.replicas[worker].read[0] for worker, _ in seen[:4]], strict=True):
        assert at.data_ptr() != ended.ports[worker].shared.x.data_ptr()
        assert torch.equal(at, read)  # unchanged to the end, while x has moved
        assert not torch.equal(at, ended.x[worker])


def test_result_tells_how_far_the_models_are_apart():
    config = pl.TrainConfig(algorithm="ad-psgd", epochs=3, seed=1)
    run = pl.simulate_task(config, cluster=Cluster(workers=4))
    result = run.result
    assert result["consensus_distance"] == run.evaluations[-1]["consensus_distance"] > 0
    assert 0.2 < result["worst_worker_accuracy"] <= result["test_accuracy"] + 0.05
    assert result["steps"] == sum(result["updates_per_worker"])
    assert 0 < result["averages_per_step"] <= 2.5
    assert result["bytes_per_step"] > 4 * result["num_parameters"]
    agreed = pl.simulate_task(pl.TrainConfig(algorithm="local-sgd(period=4)", steps=8), cluster=Cluster(workers=4))
    assert agreed.result["consensus_distance"] < 1e-10
    timed_only = timed("ad-psgd", Cluster(workers=4), steps=5)
    assert timed_only["consensus_distance"] is None
    assert timed_only["worst_worker_accuracy"] is None


def test_ad_psgd_goes_on_after_a_kill_and_a_pause():
    faults = Faults().kill(worker=1, at_s=0.2).pause(worker=2, at_s=0.3, for_s=2.5)
    config = pl.TrainConfig(algorithm="ad-psgd", epochs=60)
    run = pl.simulate_task(config, cluster=Cluster(workers=4), timing_only=True, num_parameters=1000, faults=faults)
    assert run.result["outcome"] == "stopped"
    assert run.result["workers_lost"] == [1]
    assert run.records[1]["ended_s"][-1] <= 0.2
    assert len(run.records[0]) > len(run.records[2]) > len(run.records[1])
    during = run.records[2]["ended_s"]
    assert not ((during > 0.3) & (during < 2.8)).any()


def test_d_psgd_crashes_with_the_reason():
    run = pl.simulate_task(
        pl.TrainConfig(algorithm="d-psgd", steps=20),
        cluster=Cluster(workers=4),
        timing_only=True,
        num_parameters=1000,
        faults=Faults().kill(worker=3, step=7),
    )
    assert run.result["outcome"] == "crashed"
    assert "worker 3 did not send its model" in run.result["outcome_reason"]
    assert run.result["workers_lost"] == [3]


def test_an_answer_that_is_lost_with_its_link_is_counted_in_the_result():
    """It takes 0.22 s, and the link is cut meanwhile: worker 1 cannot know whether it has been sent."""
    cluster = Cluster(workers=2, bandwidth_bytes_per_s=1e7)  # 0.1 s a vector
    config = pl.TrainConfig(algorithm="ad-psgd", steps=50)
    for faults, unresolved in ((None, 0), (Faults().drop_link(0, 1, at_s=0.15), 1)):
        run = pl.simulate_task(config, cluster=cluster, timing_only=True, num_parameters=250_000, faults=faults)
        assert run.result["unresolved_exchanges"] == unresolved
