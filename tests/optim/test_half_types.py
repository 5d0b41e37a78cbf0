"""Means over workers, in every type and by every way there is: of equal models their own bits, of others one rounding away."""

import dataclasses
import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import paceline as pl
from paceline.algorithms.all_reduce import _OverlappedMean
from paceline.algorithms.downpour import _Accrued
from paceline.algorithms.gradient_round import GradientRound
from paceline.algorithms.part_reduce import PartReduce
from paceline.algorithms.server.average import MovingAverage
from paceline.algorithms.server.update import UpdateInfo, WaitingGradient, weighted_mean
from paceline.algorithms.topology import Complete
from paceline.membership.final_mean import mean_of_all
from paceline.memory.collectives import SharedMemoryCollectives
from paceline.memory.replicated import ReplicatedVector
from paceline.memory.segment import Layout, Segment
from paceline.optim.half_types import is_finite, to_sum_type
from paceline.ports.ports import NUM_NUMBERS, Message, Received
from paceline.simulator import Cluster
from paceline.simulator.collectives import mean_into_all, sum_into_all
from paceline.simulator.memory import ReplicatedState
from paceline.tasks.load import load_task
from paceline.transport.collectives import DistributedCollectives
from simulator.programs import drive

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
P = 96  # elements; strips of 16 leave some workers without any


class Group:
    """In place of torch.distributed: workers in threads, whose sums are made in the vectors' own type, as Gloo makes them."""

    def __init__(self, num_workers):
        self._vectors, self._lock, self._num_workers = [], threading.Lock(), num_workers
        self._all = threading.Barrier(num_workers)

    def all_reduce(self, vector, group, async_op):
        with self._lock:
            self._vectors.append(vector)
        if self._all.wait() == 0:
            total = sum(self._vectors[1:], self._vectors[0].clone())
            for one in self._vectors:
                one.copy_(total)
            self._vectors.clear()
        self._all.wait()
        return SimpleNamespace(wait=lambda *_: None)

    def all_to_all_single(self, pieces, vector, group, async_op):
        with self._lock:
            self._vectors.append((group, pieces, vector))
        if self._all.wait() == 0:
            others = [vector for _, _, vector in sorted(self._vectors, key=lambda one: one[0])]
            for worker, pieces_of, _ in self._vectors:
                pieces_of.copy_(torch.cat([other.chunk(self._num_workers)[worker] for other in others]))
            self._vectors.clear()
        self._all.wait()
        return SimpleNamespace(wait=lambda *_: None)


def by_threads(program, members):
    """What `program(worker, member)` returns, by worker; each in a thread."""
    results = [None] * len(members)

    def work(worker):
        results[worker] = program(worker, members[worker])

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(len(members))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def in_shared_memory(vectors):
    layout = Layout()
    plan = SharedMemoryCollectives.reserve(layout, P, len(vectors), dtype=vectors[0].dtype)
    segment = Segment.create(layout.size_bytes)
    return [SharedMemoryCollectives(segment, plan, worker) for worker in range(len(vectors))]


def by_torch_distributed(vectors):
    return [DistributedCollectives(worker, None, worker, len(vectors)) for worker in range(len(vectors))]


def all_reduced(vectors, weights, members):
    def program(worker, collectives):
        x = vectors[worker].clone()
        collectives.all_reduce_mean(x, weights[worker])
        return x

    return by_threads(program, members)


def moved(num_vectors, of=None):
    """Real workers are not charged for it."""


def replica_of(samples):
    return SimpleNamespace(
        samples=samples,
        missing=(),
        ranges=(),
        round_samples=0,
        step=1,
        round=None,
        changed_outside=False,
        meet=lambda members: None,
    )


def ports_of(vectors, collectives, **more):
    return SimpleNamespace(
        num_workers=len(vectors), collectives=collectives, incarnation=0, newcomers=None, views=None, **more
    )


def overlapped(vectors, weights, members):
    """As `all-reduce` makes it, in two buckets."""

    def program(worker, collectives):
        g = vectors[worker].clone()
        g[:NUM_NUMBERS] = g[-1] = 0  # no parameter's
        replica = replica_of(weights[worker])
        shared = SimpleNamespace(x=torch.empty(P))
        ports = ports_of(vectors, collectives, shared=shared, moved=moved, shards=None)
        mean = _OverlappedMean(replica, collectives, GradientRound(replica, ports), ports)
        for bucket in (g[40:], g[:40]):
            mean.begin(bucket)
        mean.finish()
        return g

    return by_threads(program, members)


def strips(vectors, weights, members):
    """As `all-reduce(sharded=true)` makes it: every worker's pieces, put together."""

    def program(worker, collectives):
        replica = replica_of(weights[worker])
        shared = SimpleNamespace(x=torch.empty(P))
        ports = ports_of(vectors, collectives, worker_id=worker, shared=shared, moved=moved)
        owned = PartReduce(replica, ports, collectives, GradientRound(replica, ports))
        for bucket in (vectors[worker][40:].clone(), vectors[worker][:40].clone()):
            owned.begin(bucket)
        owned.finish()
        return owned._pieces, owned._g

    mean = torch.full_like(vectors[0], torch.nan)
    for pieces, g in by_threads(program, members):
        assert g.dtype == vectors[0].dtype
        for first, length, at in pieces:
            mean[first : first + length] = g[at : at + length]
    return [mean]


def simulated(finish):
    def mean(vectors, weights, _):
        copies = [vector.clone() for vector in vectors]
        if finish is mean_into_all:
            numbers = [[0.0] * NUM_NUMBERS for _ in vectors]
            finish(list(zip(copies, weights, numbers, strict=True)))
            return copies
        total = float(sum(weights))
        wide = [to_sum_type(vector) * weight for vector, weight in zip(vectors, weights, strict=True)]
        finish(wide)
        return [one.div_(total).to(vectors[0].dtype) for one in wide]

    return mean


def snapshot(vectors, weights, _):
    """The run's model, as an onlooker sees it."""
    layout, n = Layout(), len(vectors)
    plan = ReplicatedVector.reserve(layout, P, n + 1, num_evaluators=1, dtype=vectors[0].dtype)
    segment = Segment.create(layout.size_bytes)
    for worker, vector in enumerate(vectors):
        ReplicatedVector(segment, plan, worker, own_models=True).x.copy_(vector)
    onlooker, out = ReplicatedVector(segment, plan, n, own_models=True), torch.empty_like(vectors[0])
    onlooker.snapshot(out)
    exact = torch.stack(vectors).double()
    distance = (exact - out.double()).square().sum().item() / n
    assert onlooker.consensus_distance(out) == pytest.approx(distance, rel=1e-6)
    return [out]


def simulated_snapshot(vectors, weights, _):
    state, out = ReplicatedState(vectors[0], len(vectors), is_mean=True), torch.empty_like(vectors[0])
    for worker, vector in zip(state.workers, vectors, strict=True):
        worker.x.copy_(vector)
    state.snapshot(out)
    return [out]


def served(vectors, weights, _):
    update = {"sequence": 1, "step": 0, "version_read": 0, "version": 0}
    held = [
        WaitingGradient(UpdateInfo(worker_id=worker, num_samples=weight, **update), 0, vector.clone())
        for worker, (vector, weight) in enumerate(zip(vectors, weights, strict=True))
    ]
    return [weighted_mean(held, moved)[0]]


def final(vectors, weights, _):
    """The end of a run without a supervisor: worker 0 collects."""
    mailbox = SimpleNamespace(
        peers=lambda: set(range(1, len(vectors))),
        receive=lambda _, sender, **__: Received(sender, 0, Message("final", 0, x=vectors[sender])),
        send=lambda *_: None,
    )
    found = mean_of_all(mailbox, 0, len(vectors), vectors[0], 1.0)
    exact = torch.stack(vectors).double()
    distance = (exact - found.x.double()).square().sum().item() / len(vectors)
    assert found.consensus_distance == pytest.approx(distance, rel=1e-6)
    return [found.x]


def mixed(vectors, weights, _):
    """A round of D-PSGD in which all are neighbours: the plain mean, and no step."""
    n = len(vectors)
    return list(drive(pl.DPSGD(topology=Complete()), Cluster(workers=n), num_steps=1, x0=torch.stack(vectors)).x)


EQUAL_WEIGHTS = {snapshot, simulated_snapshot, final, mixed}
KINDS = {
    "all-reduce in shared memory": (all_reduced, in_shared_memory),
    "all-reduce over torch.distributed": (all_reduced, by_torch_distributed),
    "buckets in shared memory": (overlapped, in_shared_memory),
    "buckets over torch.distributed": (overlapped, by_torch_distributed),
    "strips in shared memory": (strips, in_shared_memory),
    "strips over torch.distributed": (strips, by_torch_distributed),
    "simulated mean": (simulated(mean_into_all), None),
    "simulated sum": (simulated(sum_into_all), None),
    "snapshot of own models": (snapshot, None),
    "simulated snapshot": (simulated_snapshot, None),
    "at a server": (served, None),
    "at the end": (final, None),
    "d-psgd": (mixed, None),
}


def means(kind, vectors, weights, monkeypatch):
    make, members = KINDS[kind]
    with monkeypatch.context() as patched:
        patched.setattr("paceline.transport.collectives.dist", Group(len(vectors)))
        return make(vectors, weights, members(vectors) if members is not None else None)


def error_allowed(exact, vectors):
    """One rounding of the mean, after sums in float32 (or in float64)."""
    dtype = vectors[0].dtype
    wide = torch.finfo(torch.float32 if dtype.itemsize < 4 else dtype)
    size = torch.stack(vectors).double().abs().mean(0)
    rounding = torch.maximum(exact.abs() * torch.finfo(dtype).eps / 2, torch.tensor(torch.finfo(dtype).smallest_normal))
    return 1.001 * rounding + 4 * len(vectors) * wide.eps * size


@pytest.fixture(scope="module")
def patches():
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield monkeypatch


VECTORS = {
    "dtype": st.sampled_from(DTYPES),
    "workers": st.sampled_from([2, 3, 5, 8, 16]),
    "seed": st.integers(0, 1000),
    "weights": st.lists(st.sampled_from([1, 3, 8, 24, 64]), min_size=16, max_size=16),
}
# By threads that often wait for each other.
IN_PIECES = [kind for kind in KINDS if kind.startswith(("buckets", "strips"))]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in IN_PIECES])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(**VECTORS)
def test_a_mean_is_one_rounding_away(patches, kind, dtype, workers, seed, weights):
    check_rounding(patches, kind, dtype, workers, seed, weights)


@pytest.mark.parametrize("kind", IN_PIECES)
@settings(max_examples=10, deadline=None, derandomize=True)
@given(**VECTORS)
def test_a_mean_in_pieces_is_one_rounding_away(patches, kind, dtype, workers, seed, weights):
    check_rounding(patches, kind, dtype, workers, seed, weights)


@pytest.mark.soak
@pytest.mark.parametrize("kind", IN_PIECES)
@settings(max_examples=100, deadline=None, derandomize=True)
@given(**VECTORS)
def test_a_hundred_means_in_pieces_are(patches, kind, dtype, workers, seed, weights):
    check_rounding(patches, kind, dtype, workers, seed, weights)


def check_rounding(patches, kind, dtype, workers, seed, weights):
    generator = torch.Generator().manual_seed(seed)
    scale = 300.0 if dtype == torch.float16 else 1e4  # sums of 16 of these are beyond float16
    vectors = [(torch.randn(P, generator=generator, dtype=torch.float64) * scale).to(dtype) for _ in range(workers)]
    weights = [8] * workers if KINDS[kind][0] in EQUAL_WEIGHTS else weights[:workers]
    weighted = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    exact = (torch.stack(vectors).double() * weighted.unsqueeze(1)).sum(0)
    found = means(kind, vectors, weights, patches)
    for one in found:
        assert one.dtype == dtype
        error = (one.double() - exact).abs()[NUM_NUMBERS:-1]
        assert (error <= error_allowed(exact, vectors)[NUM_NUMBERS:-1]).all(), (
            error / error_allowed(exact, vectors)[NUM_NUMBERS:-1]
        ).max()
    if kind != "d-psgd":  # whose workers begin their sums with themselves
        assert all(torch.equal(found[0][NUM_NUMBERS:-1], one[NUM_NUMBERS:-1]) for one in found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("workers", [2, 3, 5, 7, 16])
def test_the_mean_of_equal_models_is_that_model(patches, kind, dtype, workers):
    x = (torch.randn(P, generator=torch.Generator().manual_seed(workers)) * 1e4).to(dtype)
    x[1] = torch.finfo(torch.float16).max
    for one in means(kind, [x.clone() for _ in range(workers)], [8] * workers, patches):
        assert torch.equal(one[NUM_NUMBERS:-1], x[NUM_NUMBERS:-1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_moving_average_moves_however_slowly(dtype):
    """A thousandth of the distance is less than half types can add."""
    average = MovingAverage(torch.ones(4, dtype=dtype), 0.999, warm_up=False)
    for _ in range(500):
        average.update(torch.full((4,), 2.0, dtype=dtype))
    torch.testing.assert_close(average.x, torch.full((4,), 2 - 0.999**500))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_accrued_gradients_are_added_up_before_they_are_rounded(dtype):
    """256 + 1 is 256 in bfloat16, 2048 + 1 is 2048 in float16, as often as one adds."""
    start, accrued = 2 / torch.finfo(dtype).eps, _Accrued(torch.zeros(3, dtype=dtype), alone=False)
    for value in (start, *[1.0] * 8):
        accrued.add(torch.full((3,), value, dtype=dtype), None, 1, ())
    total, num_samples, _ = accrued.take()
    assert (total.tolist(), total.dtype, num_samples) == ([start + 8] * 3, dtype, 9)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_finite(dtype):
    large = torch.full((1001,), torch.finfo(dtype).max, dtype=dtype)
    assert is_finite(large)
    assert is_finite(-large)
    for bad in (torch.nan, torch.inf, -torch.inf):
        for place in (0, 500, 1000):
            x = large.clone()
            x[place] = bad
            assert not is_finite(x)
    assert not is_finite(torch.tensor([torch.inf, -torch.inf], dtype=dtype))


def test_a_large_layer_in_float16_has_not_diverged():
    """70,000 ones add up to more than float16 can say; the check is made every 64 steps."""
    model = nn.LayerNorm(70_000).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with pl.attach(model, optimizer) as worker:
        for x in worker.batches([torch.zeros(1, 70_000, dtype=torch.float16)] * 65):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    assert torch.equal(model.weight, torch.ones(70_000, dtype=torch.float16))


def test_strips_of_more_workers_than_a_small_model_can_fill():
    """Each of 24 workers has a strip of 16 elements: padded, they are more than the model has."""
    vectors = [torch.full((P,), float(worker)) for worker in range(24)]
    (mean,) = strips(vectors, [8] * 24, in_shared_memory(vectors))
    assert mean.unique().tolist() == [11.5]


class Ones(nn.Module):
    """A model whose every gradient is 1, in some type."""

    def __init__(self, dtype):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3200, dtype=dtype))

    def forward(self, inputs):
        return self.w.sum() + 0.0 * inputs.sum().to(self.w.dtype)


@pytest.mark.parametrize(
    "algorithm",
    ["all-reduce", "all-reduce(sharded=true)", "local-sgd(period=2)", "d-psgd", "da-sgd(period=2)", "diloco(period=2)"],
)
def test_simulated_sums_of_half_types_travel_as_float32(algorithm, monkeypatch):
    """Also where nothing but time is simulated; models and new parameters travel as they are."""
    task, sent = load_task("digits-mlp"), {}
    for dtype in (torch.bfloat16, torch.float32):
        planted = dataclasses.replace(
            task, model=lambda dtype=dtype: Ones(dtype), loss=lambda output, _: output, accuracy=None, learning_rate=1.0
        )
        monkeypatch.setattr("paceline.run.simulate_task.load_task", lambda _, planted=planted: planted)
        config = pl.TrainConfig(algorithm=algorithm, workers=4, steps=6)
        full, timed = (pl.simulate_task(config, timing_only=timing) for timing in (False, True))
        if "sharded" not in algorithm:  # whose strips are padded, and whose weights travel by themselves
            assert full.result["bytes_per_step"] == timed.result["bytes_per_step"]
            assert full.result["wall_s"] == timed.result["wall_s"]
        sent[dtype] = full.result["bytes_per_step"]
    ratio = {"all-reduce(sharded=true)": 0.75, "d-psgd": 0.5}.get(algorithm, 1.0)
    assert sent[torch.bfloat16] / sent[torch.float32] == pytest.approx(ratio, rel=0.12)  # headers
