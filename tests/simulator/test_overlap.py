"""All-reduce overlaps with backward in a simulation: against the recurrence of its pipeline, and against what real runs do."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from torch.utils.flop_counter import FlopCounterMode

import paceline as pl
from paceline.loop.buckets import GradientBuckets, bucket_bytes_for, bucket_ranges
from paceline.optim.flat import FlatBinding
from paceline.ports.shared import BUCKET_BYTES
from paceline.run.simulate_task import TaskSimulation
from paceline.simulator import Cluster, Faults, Normal
from paceline.simulator.network import HEADER_BYTES
from paceline.simulator.overlap import FORWARD_SHARE, declared_buckets, shares_until_complete

NETWORK = {"latency_s": 50e-6, "bandwidth_bytes_per_s": 1.25e9}
WIRED = NETWORK | {"core_bytes_per_s": 1e18}  # and memory that takes no time


def timed(algorithm, cluster, *, parameters, steps=3, **named):
    config = pl.TrainConfig(algorithm=algorithm, workers=cluster.workers, steps=steps)
    return pl.simulate_task(config, cluster=cluster, timing_only=True, num_parameters=parameters, **named)


def ring(n, num_bytes, *, passes=2, latency_s=50e-6, bandwidth_bytes_per_s=1.25e9):
    """An operation's time alone, and the part of it in which its bytes are on the links."""
    rounds = passes * (n - 1)
    sending_s = rounds * (HEADER_BYTES + num_bytes / n) / bandwidth_bytes_per_s
    return rounds * latency_s + sending_s, sending_s


def done_s(complete_s, costs):
    """When each of some operations is done that are begun at such times: two at an instant, one's bytes at an instant."""
    threads, links_free_s, ends_s = [0.0, 0.0], 0.0, []
    for begun_s, (time_s, sending_s) in zip(complete_s, costs, strict=True):
        thread = int(np.argmin(threads))
        begun_s = max(begun_s, threads[thread])
        links_free_s = max(begun_s, links_free_s) + sending_s
        threads[thread] = max(begun_s + time_s, links_free_s)
        ends_s.append(threads[thread])
    return ends_s


def pipeline(complete_s, costs):
    return max(done_s(complete_s, costs))


def completed_s(compute_s, sizes):
    """A third of the time is the forward pass; after it every element takes as long."""
    return compute_s * (1 / 3 + 2 / 3 * np.cumsum(sizes) / np.sum(sizes))


@pytest.mark.parametrize("workers", [2, 3, 5, 16, 40])
@pytest.mark.parametrize(("megabytes", "compute_s"), [(100, 0.2), (100, 0.02), (3, 0.2), (100, 2.0), (0.5, 0.001)])
def test_a_step_lasts_as_long_as_its_pipeline(workers, megabytes, compute_s):
    vector_bytes = int(4e6 * megabytes) // 4
    run = timed("all-reduce", Cluster(workers=workers, compute_s=compute_s, **WIRED), parameters=vector_bytes // 4)
    sizes = declared_buckets(vector_bytes, bucket_bytes_for(workers))
    expected = pipeline(completed_s(compute_s, sizes), [ring(workers, size) for size in sizes])
    assert run.result["wall_s"] == pytest.approx(3 * max(compute_s, expected), rel=1e-6)
    together_s = compute_s + ring(workers, vector_bytes)[0]
    assert expected < together_s or len(sizes) == 1, "sooner than one operation after all computing"


def test_the_case_of_sixteen_workers_and_100_megabytes():
    """0.2 s of computing hide 0.15 s on the links, which after it would end at 0.352 s; each sum is divided as it comes."""
    run = timed("all-reduce", Cluster(workers=16, compute_s=0.2, **NETWORK), parameters=25_000_000, steps=2)
    sizes, divided_s = declared_buckets(100_000_000, BUCKET_BYTES), 0.2
    for size, one_s in zip(sizes, done_s(completed_s(0.2, sizes), [ring(16, size) for size in sizes]), strict=True):
        divided_s = max(divided_s, one_s) + 2 * size / 10e9
    update_s = 3 * 100e6 / 10e9
    assert run.result["wall_s"] == pytest.approx(2 * (divided_s + update_s))
    assert divided_s == pytest.approx(0.22, rel=0.02)


@pytest.mark.parametrize("workers", [2, 5])
def test_sharded_hides_the_gradients_half_and_not_the_parameters(workers):
    compute_s, vector_bytes = 0.2, 100_000_000
    run = timed(
        "all-reduce(sharded=true)", Cluster(workers=workers, compute_s=compute_s, **WIRED), parameters=25_000_000
    )
    sizes = declared_buckets(vector_bytes, BUCKET_BYTES)
    complete_s = completed_s(compute_s, sizes)
    weight = ring(workers, 16)  # and whose parameters have gradients; known when all is computed
    reduced_s = pipeline([*complete_s, compute_s], [*(ring(workers, size, passes=1) for size in sizes), weight])
    begun_s = max(reduced_s, compute_s)
    gathered_s = pipeline([begun_s] * len(sizes), [ring(workers, size, passes=1) for size in reversed(sizes)])
    assert run.result["wall_s"] == pytest.approx(3 * gathered_s, rel=2e-3)


class _Layers(nn.Module):
    """Seven layers of very different sizes, one of them smaller than a bucket."""

    def __init__(self):
        super().__init__()
        widths = [4, 600, 700, 10, 900, 500, 3]
        self.layers = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))

    def forward(self, x):
        return self.layers(x)


def test_buckets_are_those_of_the_real_ones():
    binding = FlatBinding(_Layers().parameters())
    handed_out = GradientBuckets(binding, binding.zeros(), binding.release).vectors
    ranges = bucket_ranges(binding)
    assert [one.numel() for one in handed_out] == [end - begin for begin, end in ranges]
    assert [(end - begin) * 4 >= BUCKET_BYTES for begin, end in ranges] == [True] * (len(ranges) - 1) + [False]
    assert len(ranges) == 3
    assert ranges[0][1] == binding.num_elements
    assert ranges[-1][0] == 0


LOOP_BATCHES = [torch.ones(2, 4)] * 12


def loop_of(seen):
    def train():
        torch.manual_seed(0)
        model = _Layers()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with pl.attach(model, optimizer) as worker:
            for x in worker.batches(LOOP_BATCHES):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                seen.append(worker.worker_id)
                optimizer.step()

    return train


def later_and_more(algorithm, collective):
    """Of four steps of a loop, against those of a task: times, and messages and bytes.

    Sharded, workers whose loops may have left out a step tell each other every step where they are: six numbers of each. In
    memory they meet at once, and wake at other instants than else: None.
    """
    if "sharded" not in algorithm:
        return {}, {}
    if collective == "memory":
        return None, None
    part_bytes = HEADER_BYTES + {"ring": 48, "tree": 144}[collective]
    meeting_s = 4 * (50e-6 + part_bytes / 1.25e9)
    steps = np.arange(4)
    later_s = {"gradient_ended_s": steps * meeting_s, "ended_s": (steps + 1) * meeting_s, "wait_s": meeting_s}
    return later_s, {"messages": 4, "sent_bytes": 4 * part_bytes}


@pytest.mark.parametrize("algorithm", ["all-reduce", "all-reduce(sharded=true)", "lockstep", "local-sgd(period=2)"])
def test_a_loop_takes_the_same_times_as_a_task(algorithm, monkeypatch):
    """With real gradients as without, in a loop of the user's as in a task; on a network, and through memory."""
    data = TensorDataset(torch.ones(24, 4), torch.zeros(24, 3))
    planted = pl.Task(
        name="layers", model=_Layers, datasets=lambda _: (data, data), loss=lambda out, _: out.square().mean(), accuracy=None,
        learning_rate=1e-3,
    )  # fmt: skip
    monkeypatch.setattr("paceline.run.simulate_task.load_task", lambda _: planted)
    for collective in ("ring", "tree", "memory"):
        cluster = Cluster(
            workers=3, compute_s=Normal(average_s=0.01, deviation_s=0.002), collective=collective, **NETWORK
        )
        config = pl.TrainConfig(algorithm=algorithm, workers=3, steps=4, batch_size=2)
        full = pl.simulate_task(config, cluster=cluster)
        times_only = pl.simulate_task(config, cluster=cluster, timing_only=True)
        loop = pl.simulate(loop_of([]), cluster=cluster, algorithm=algorithm)
        later_s, more = later_and_more(algorithm, collective)
        for worker, rows in full.records.items():
            for name in ("gradient_ended_s", "wait_s", "apply_s", "ended_s", "messages", "sent_bytes"):
                exact = "sharded" not in algorithm  # strips are padded, which vectors that stand for them are not
                close = pytest.approx(rows[name], rel=1e-12 if exact else 1e-3, abs=1e-12)
                assert times_only.records[worker][name] == close, (collective, name)
                if later_s is None:
                    continue
                own = loop.records[worker][name] - later_s.get(name, 0) - more.get(name, 0)
                assert own == pytest.approx(rows[name], rel=1e-9, abs=2e-5 if later_s == {} else 1e-12), (
                    collective,
                    name,
                )


@pytest.mark.parametrize("algorithm", ["local-sgd(period=4)", "d-psgd", "ad-psgd", "lockstep", "all-reduce"])
def test_a_program_that_waits_for_nothing_makes_no_more_events(algorithm, monkeypatch):
    """Only a gradient that travels in several buckets is computed in several parts."""
    config = pl.TrainConfig(algorithm=algorithm, workers=4, steps=4)
    cluster, events = Cluster(workers=4, compute_s=Normal(average_s=0.2, deviation_s=0.01)), {}
    for buckets in (1, 40):
        monkeypatch.setattr("paceline.run.simulate_task.bucket_bytes_for", lambda *_, size=4_000_000 // buckets: size)
        simulation = TaskSimulation(config, cluster, True, 1_000_000)
        simulation.run()
        events[buckets] = simulation.machine.scheduler.num_events
    if algorithm == "all-reduce":
        assert events[1] < events[40] <= 4 * 4 * 2 * 40
    else:
        assert events[1] == events[40]


def test_a_straggler_is_waited_for_bucket_by_bucket():
    """The others' buckets wait for its own; with a factor of 10 all of the messages but the last are hidden behind it."""
    cluster = Cluster(workers=4, compute_s=0.02, **WIRED).slow(worker=2, factor=10)
    sizes = declared_buckets(100_000_000, BUCKET_BYTES)
    run = timed("all-reduce", cluster, parameters=25_000_000, steps=1)
    expected = pipeline(completed_s(0.2, sizes), [ring(4, size) for size in sizes])
    assert run.result["wall_s"] == pytest.approx(expected)
    assert run.records[0]["wait_s"][0] == pytest.approx(expected - 0.02)
    assert run.records[2]["wait_s"][0] == pytest.approx(expected - 0.2)


@pytest.mark.parametrize(("at_s", "for_s"), [(0.05, 0.4), (0.15, 0.4), (0.19, 0.4)])
def test_a_pause_in_mid_step_holds_up_what_is_not_computed_yet(at_s, for_s):
    sizes = declared_buckets(100_000_000, BUCKET_BYTES)
    cluster = Cluster(workers=4, compute_s=0.2, **WIRED)
    run = timed(
        "all-reduce", cluster, parameters=25_000_000, steps=1, faults=Faults().pause(worker=1, at_s=at_s, for_s=for_s)
    )
    complete_s = completed_s(0.2, sizes)
    complete_s[complete_s > at_s] += for_s
    expected = pipeline(complete_s, [ring(4, size) for size in sizes])
    assert run.result["wall_s"] == pytest.approx(expected)


@pytest.mark.parametrize("at_s", [0.03, 0.1, 0.17, 0.199])
@pytest.mark.parametrize("algorithm", ["all-reduce", "all-reduce(sharded=true)"])
def test_a_kill_in_mid_step_ends_the_run_when_the_others_know_of_it(algorithm, at_s):
    cluster = Cluster(workers=4, compute_s=0.2, detection_s=1.5, **WIRED)
    run = timed(algorithm, cluster, parameters=25_000_000, faults=Faults().kill(worker=1, at_s=at_s))
    assert run.result["outcome"] == "crashed"
    assert "worker 1 (killed at" in run.result["outcome_reason"]
    assert run.result["wall_s"] == pytest.approx(at_s + 1.5)
    assert run.records[1].size == 0


def test_a_kill_at_a_step_counts_steps_and_not_buckets():
    cluster = Cluster(workers=4, compute_s=0.2, **WIRED)
    run = timed("all-reduce", cluster, parameters=25_000_000, steps=5, faults=Faults().kill(worker=1, step=3))
    assert [len(run.records[worker]) for worker in range(4)] == [2, 2, 2, 2]


@pytest.mark.parametrize(("cores", "crowd"), [(4, 1), (2, 2), (1, 4)])
def test_shared_cores_compute_every_part(cores, crowd):
    """A ring among workers that share cores: the parts of a step take as long as the step."""
    free = {"core_bytes_per_s": 1e15, "bus_bytes_per_s": 1e15, "latency_s": 0.0, "bandwidth_bytes_per_s": 1e15}
    cluster = Cluster(workers=4, compute_s=0.01, cores=cores, slice_s=0.001, collective="ring", **free)
    run = timed("all-reduce", cluster, parameters=2_000_000, steps=6)
    assert run.result["wall_s"] == pytest.approx(6 * 0.01 * crowd, rel=0.1)


def test_shares_of_one_bucket_and_of_many():
    assert shares_until_complete([7]) == pytest.approx([1.0])
    shares = shares_until_complete([2, 1, 1])
    assert sum(shares) == pytest.approx(1.0)
    assert shares == pytest.approx([FORWARD_SHARE + 1 / 3, 1 / 6, 1 / 6])


def test_real_buckets_leave_as_simulated_ones_do():
    """How much has been computed when a bucket leaves, counted in floating-point operations, as shares of the whole."""
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))  # a bucket each
    binding, counted = FlatBinding(model.parameters()), []

    class Watch:
        def on_gradient(self, index):
            self.buckets.complete(index)

    watch = Watch()
    watch.buckets = GradientBuckets(binding, binding.zeros(), watch.on_gradient)
    with FlopCounterMode(display=False) as flops:
        watch.buckets.begin(lambda _: counted.append(flops.get_total_flops()))
        model(torch.randn(4, 512)).square().mean().backward()
    found = np.array(counted) / flops.get_total_flops()
    expected = np.cumsum(shares_until_complete([end - begin for begin, end in bucket_ranges(binding)]))
    assert len(found) == len(expected) == 8
    assert (
        abs(found - expected).max() < 1 / 23
    )  # one of 24 products is not made: nobody needs the gradient of the inputs
