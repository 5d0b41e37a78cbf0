"""Rules for unequal workers, against plain references on the same order of arrivals; and what they refuse."""

import heapq
import statistics

import pytest
import torch

import paceline as pl
from paceline.algorithms.server.admission import WeightByTime
from paceline.algorithms.server.gathering import Pool, WorkerTable
from paceline.algorithms.server.update import UpdateInfo, WaitingGradient
from paceline.simulator import Cluster

WORKERS, RATE, SIZE = 4, 0.3, 5
STEPS = (23, 17, 11, 6)  # of each worker: some leave early
COMPUTE_S, SLOWNESS = 10.0, (1.0, 1.373, 2.237, 4.919)
TARGETS = torch.randn(WORKERS, max(STEPS), SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Point(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.x = torch.nn.Parameter(torch.zeros(SIZE, dtype=torch.float64))

    def forward(self, target):
        return (self.x - target).square().sum() / 2


def simulated(mode):
    """The last parameters of workers whose losses have targets of their own; and the run."""
    seen = {}

    def train():
        model = Point()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        with pl.attach(model, optimizer) as worker:
            for step in range(STEPS[worker.worker_id]):
                optimizer.zero_grad()
                model(TARGETS[worker.worker_id, step]).backward()
                optimizer.step()
        seen[worker.worker_id] = model.x.detach().clone()

    cluster = Cluster(workers=WORKERS, compute_s=COMPUTE_S, slowness=tuple(enumerate(SLOWNESS)))
    run = pl.simulate(train, workers=WORKERS, algorithm=pl.ParameterServer(mode=mode), cluster=cluster)
    assert all(torch.equal(x, seen[0]) for x in seen.values())
    return seen[0], run


def arrivals(rule):
    """The last parameters of the same workers: `rule(state, worker, gradient, version_read)`, called as gradients arrive."""
    state = {"x": torch.zeros(SIZE, dtype=torch.float64), "version": 0, "members": set(range(WORKERS))}
    read = {worker: (state["x"].clone(), 0) for worker in range(WORKERS)}
    events = [(COMPUTE_S * slow, worker, 0) for worker, slow in enumerate(SLOWNESS)]
    heapq.heapify(events)
    while events:
        now_s, worker, step = heapq.heappop(events)
        x, version = read[worker]
        rule(state, worker, x - TARGETS[worker, step], version)
        read[worker] = state["x"].clone(), state["version"]
        if step + 1 < STEPS[worker]:
            heapq.heappush(events, (now_s + COMPUTE_S * SLOWNESS[worker], worker, step + 1))
        else:
            state["members"].discard(worker)
            rule(state, None, None, None)
    return state["x"]


def update(state, gradient, factor=1.0):
    state["x"] = state["x"] - RATE * factor * gradient
    state["version"] += 1


def ringmaster(threshold):
    def rule(state, worker, gradient, version):
        if worker is not None and state["version"] - version < threshold:
            update(state, gradient)

    return rule


def rennala(batch):
    pool = []

    def rule(state, worker, gradient, version):
        if worker is not None and version == state["version"]:
            pool.append(gradient)
        if len(pool) == batch or (pool and not state["members"]):
            update(state, torch.stack(pool).mean(0))
            pool.clear()

    return rule


def ringleader():
    rows, later, stepped, fresh = {}, {}, None, False

    def means(of):
        return torch.stack([torch.stack(of[worker]).mean(0) for worker in sorted(of)]).mean(0)

    def rule(state, worker, gradient, version):
        nonlocal rows, later, stepped, fresh
        members, fresh = state["members"], fresh or worker is not None
        if worker is not None:
            (later if stepped is not None and worker in stepped else rows).setdefault(worker, []).append(gradient)
            if stepped is None and members <= rows.keys():
                stepped = set()
            if stepped is not None and worker not in stepped:
                stepped.add(worker)
                update(state, means(rows))
                fresh = False
        if stepped is not None and members and members <= stepped:
            rows, later, stepped = later, {}, None
        if not members and fresh:
            update(state, means(rows | later))

    return rule


@pytest.mark.parametrize("threshold", [1, 2, 3, 20])
def test_ringmaster_is_its_reference(threshold):
    x, run = simulated(pl.Ringmaster(threshold=threshold))
    torch.testing.assert_close(x, arrivals(ringmaster(threshold)), rtol=0, atol=1e-12)
    assert (run.result["dropped_updates"] > 0) == (threshold < 20)
    assert run.result["staleness"]["max"] < threshold


@pytest.mark.parametrize("batch", [1, 2, 4, 7])
def test_rennala_is_its_reference(batch):
    x, run = simulated(pl.Rennala(gradients=batch))
    torch.testing.assert_close(x, arrivals(rennala(batch)), rtol=0, atol=1e-12)
    assert run.result["staleness"]["max"] == 0


def test_ringleader_is_its_reference():
    x, run = simulated(pl.Ringleader())
    torch.testing.assert_close(x, arrivals(ringleader()), rtol=0, atol=1e-12)
    assert run.result["dropped_updates"] == 0
    assert sum(len(own) for own in run.records.values()) == sum(STEPS)


def test_rescaled_steps_are_in_proportion_to_the_workers_times():
    admission, told = WeightByTime(), [[COMPUTE_S * slow] * 4 for slow in SLOWNESS]
    for worker, times_s in enumerate(told):
        for time_s in times_s:
            assert admission.weight(worker) == 1.0
            admission.timed(worker, time_s)
    mean_speed = statistics.fmean(1 / (COMPUTE_S * slow) for slow in SLOWNESS)
    factors = [admission.weight(worker) for worker in range(WORKERS)]
    assert factors == pytest.approx([COMPUTE_S * slow * mean_speed for slow in SLOWNESS], rel=1e-12)
    # As far in the same time; and per gradient as far as without.
    assert [factor / slow for factor, slow in zip(factors, SLOWNESS, strict=True)] == pytest.approx(
        [factors[0]] * WORKERS
    )
    shares = [1 / slow for slow in SLOWNESS]
    assert sum(f * s for f, s in zip(factors, shares, strict=True)) / sum(shares) == pytest.approx(1.0)


def test_neither_a_slow_start_nor_a_pause_makes_a_long_step():
    admission = WeightByTime()
    for worker in range(2):
        for time_s in (9.0, 0.1, 0.1, 0.1, 5.0):
            admission.timed(worker, time_s)
            assert admission.weight(worker) == pytest.approx(1.0)
    admission.timed(1, 0.1)
    successor = WeightByTime()
    successor.load(admission.state())
    assert successor.weight(1) == admission.weight(1)
    admission.join(1)
    assert admission.weight(1) == 1.0


def held(worker, gradient, samples=1, missing=()):
    about = UpdateInfo(
        worker_id=worker, sequence=1, step=0, version_read=0, version=0, num_samples=samples, missing=missing
    )
    return WaitingGradient(about, 0, torch.tensor(gradient, dtype=torch.float64))


def test_means_are_weighted_by_samples_and_what_all_lack_is_missing():
    pool = Pool(2, range(2))
    assert pool.take(held(0, [1.0, 0.0, 0.0], samples=1, missing=((1, 2), (2, 3)))) is None
    due = pool.take(held(0, [4.0, 3.0, 0.0], samples=2, missing=((2, 3),)))
    assert due.gradient.tolist() == pytest.approx([3.0, 2.0, 0.0])
    assert (due.update.num_samples, due.update.missing) == (3, ((2, 3),))
    table = WorkerTable(range(2))
    assert table.take(held(0, [1.0], samples=1)) is None
    assert table.take(held(0, [4.0], samples=2)) is None
    assert table.take(held(1, [5.0], samples=64)).gradient.tolist() == [4.0], "the mean of 3 and 5: workers count alike"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_one_gradient_keeps_its_bits_and_half_types_are_added_up_in_float32(dtype):
    gradient = torch.randn(9, generator=torch.Generator().manual_seed(1)).to(dtype)
    one = held(0, [0.0], samples=3)._replace(gradient=gradient)
    assert torch.equal(Pool(1, range(2)).take(one).gradient, gradient)
    pool = Pool(512, range(2))
    for _ in range(511):
        assert pool.take(one) is None
    mean = pool.take(one).gradient
    assert mean.dtype == dtype
    torch.testing.assert_close(mean, gradient)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("make", [lambda: Pool(5, range(3)), lambda: WorkerTable(range(3))])
def test_a_successor_goes_on_with_what_was_gathered(make, dtype):
    """A snapshot after any gradient: what follows is the same, bit for bit, also of half types, whose sums are float32."""
    draw = torch.Generator().manual_seed(3)
    ones = [
        held(int(torch.randint(3, (), generator=draw)), torch.randn(4, generator=draw).tolist(), samples=1 + place % 3)
        for place in range(40)
    ]
    ones = [one._replace(gradient=one.gradient.to(dtype)) for one in ones]
    for cut in range(40):
        first, second = make(), make()
        for one in ones[:cut]:
            first.take(one)
        second.load({name: one.clone() for name, one in first.state().items()}, dtype)
        for one in ones[cut:]:
            due, again = first.take(one), second.take(one)
            assert (due is None) == (again is None)
            if due is not None:
                assert again.gradient.dtype == dtype
                assert torch.equal(due.gradient, again.gradient)
        for worker in range(3):
            due, again = first.leave(worker), second.leave(worker)
            assert (due is None) == (again is None)


def test_a_worker_that_leaves_neither_stops_a_round_nor_takes_its_gradients_along():
    table = WorkerTable(range(3))
    assert table.take(held(0, [1.0])) is None
    assert table.take(held(1, [2.0])) is None
    assert table.leave(2) is None
    assert table.take(held(0, [3.0])).gradient.tolist() == [2.0], "all that are there have a row: 2 and 2"
    assert table.leave(0) is None
    assert table.take(held(1, [4.0])).gradient.tolist() == [2.5], (
        "the row of the one that left is there until the round ends"
    )
    assert table.leave(1) is None
    pool = Pool(9, range(2))
    assert pool.take(held(1, [6.0])) is None
    assert pool.leave(1) is None
    assert pool.leave(0).gradient.tolist() == [6.0]


def test_one_that_comes_again_after_the_last_and_brings_nothing_makes_no_update_twice():
    table = WorkerTable(range(2))
    assert table.take(held(1, [9.0])) is None
    assert table.leave(1) is None
    assert table.leave(0).gradient.tolist() == [9.0]
    table.join(0)
    assert table.leave(0) is None


@pytest.mark.parametrize("mode", ["rennala", "ringmaster(threshold=2)", "ringleader"])
@pytest.mark.parametrize(("options", "remedy"), [("shards=2", "use shards=1"), ("durability=replica", "leave out dur")])
def test_what_one_server_must_decide_is_refused_on_several(mode, options, remedy):
    with pytest.raises(pl.UsageError, match=remedy):
        pl.parse(f"parameter-server(mode={mode},{options})")


def test_rates_by_time_are_refused_with_a_second_copy():
    with pytest.raises(pl.UsageError, match="leave out durability=replica"):
        pl.parse("parameter-server(mode=async(rate=rescaled),durability=replica)")


@pytest.mark.parametrize("spec", ["rennala(gradients=0)", "ringmaster(threshold=0)", "ringmaster(threshold=some)"])
def test_a_wrong_number_is_one_sentence(spec):
    with pytest.raises(pl.UsageError):
        pl.parse(f"parameter-server(mode={spec})")
