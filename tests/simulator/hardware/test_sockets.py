"""A machine with two sockets, against what can be worked out by hand."""

import dataclasses

import pytest

import paceline as pl
from paceline.errors import UsageError
from paceline.simulator import Cluster, ExponentialTail, Sockets
from paceline.simulator.hardware.numa import Line, SocketCore, SocketMachine
from paceline.simulator.hardware.sockets import Placing
from paceline.simulator.scheduler import Scheduler

VECTOR, RATE = 1000, 1000.0  # bytes, bytes per second: a vector a second


def ended_s(what, *, placing=None, is_pool=False, **fields):
    """When each worker of a machine has ended one thing."""
    scheduler, ended = Scheduler(runs_torch=False), {}
    fields = {"core_bytes_per_s": RATE, "bus_bytes_per_s": 100 * RATE, "compute_s": 10.0, "atomic_s": 1.0, **fields}
    cluster = Cluster(**fields)
    machine = SocketMachine(scheduler, cluster, placing or Placing(policy="bind"), is_pool=is_pool)
    for worker in range(cluster.workers):
        core = SocketCore(
            machine=machine,
            scheduler=scheduler,
            cluster=cluster,
            worker_id=worker,
            seed=0,
            vector_bytes=VECTOR,
            batch_size=8,
        )

        def body(worker=worker, core=core):
            what(core)
            ended[worker] = scheduler.now_s

        scheduler.start(worker, body)
    scheduler.run()
    return [ended[worker] for worker in range(cluster.workers)]


def copies(core):
    core.copy()


@pytest.mark.parametrize("readers", [1, 2, 3, 5])
def test_readers_of_one_socket_share_its_memory(readers):
    sockets = Sockets(count=2, used=1)
    assert ended_s(copies, workers=readers, bus_bytes_per_s=RATE, sockets=sockets) == pytest.approx(
        [2.0 * readers] * readers
    )


@pytest.mark.parametrize(("used", "seconds"), [(2, 8.0), (1, 16.0)])
def test_each_socket_has_a_memory_of_its_own(used, seconds):
    def moves_its_own(core):
        core._machine.move(core._place[0], 0.0, 4 * VECTOR)

    ended = ended_s(moves_its_own, workers=4, bus_bytes_per_s=RATE, sockets=Sockets(used=used))
    assert ended == pytest.approx([seconds] * 4)


@pytest.mark.parametrize(
    ("placing", "seconds"),
    [
        (Placing(policy="bind", node=0), 1.0 + 1.0),
        (Placing(policy="bind", node=1), 1.0 + 1.5),  # the worker's own vector is near
        (Placing(policy="interleave"), 1.0 + (1.0 + 1.5) / 2),
        (Placing(), 1.0 + 1.0),  # the only worker touched it first
    ],
)
def test_a_byte_of_the_other_socket_takes_the_stated_factor(placing, seconds):
    assert ended_s(copies, workers=1, placing=placing, sockets=Sockets(remote_factor=1.5)) == pytest.approx([seconds])


def test_an_update_and_a_retry_touch_two_shared_vectors():
    far, sockets = Placing(policy="bind", node=1), Sockets(remote_factor=2.0)
    assert ended_s(lambda core: core.update(), workers=1, placing=far, sockets=sockets) == pytest.approx([2 * 2 + 1])
    assert ended_s(lambda core: core.move(2.0), workers=1, placing=far, sockets=sockets) == pytest.approx([2 * 2])
    assert ended_s(lambda core: core.move(3.0), workers=1, placing=far, sockets=sockets) == pytest.approx([2 * 2 + 1])


def test_where_vectors_are_touched_first():
    sockets = Sockets()
    places = sockets.places(3)
    assert Placing().shares(sockets, places, is_pool=False) == [1.0, 0.0]
    assert Placing().shares(sockets, places, is_pool=True) == pytest.approx([2 / 3, 1 / 3])
    with pytest.raises(UsageError, match="no memory node 2: it has 2 sockets"):
        Placing(policy="bind", node=2).shares(sockets, places, is_pool=False)


def test_a_gradient_alone_takes_its_time_and_reads_far_parameters_in_place():
    near, far = Placing(policy="bind", node=0), Placing(policy="bind", node=1)
    sockets = Sockets(gradient_bytes=3000, remote_factor=1.5)

    def computes(core):
        core.compute(8)

    def computes_at_a_copy(core):
        core.copy()
        core.compute(8)

    assert ended_s(computes, workers=1, placing=near, sockets=sockets) == pytest.approx([10.0])
    assert ended_s(computes, workers=1, placing=far, sockets=sockets) == pytest.approx([10.5])
    assert ended_s(computes_at_a_copy, workers=1, placing=far, sockets=sockets) == pytest.approx([2.5 + 10.0])
    assert ended_s(lambda core: core.compute(4), workers=1, placing=near, sockets=sockets) == pytest.approx([5.0])


def test_two_threads_of_a_core_share_it():
    one_core = Sockets(count=1, cores=1, threads_gain=1.25)
    ended = ended_s(lambda core: core.compute(8), workers=2, sockets=one_core)
    assert ended == pytest.approx([1.0 + 9.0 / 0.625] * 2)  # one second reads the parameters; memory is not the core's


def test_a_line_is_handed_on_one_by_one_and_far_costs_more():
    scheduler, ended = Scheduler(runs_torch=False), []
    line = Line(scheduler, 1.0, 10.0)
    for worker, socket in enumerate([0, 0, 1, 0]):

        def take(socket=socket):
            line.take(socket)
            ended.append(scheduler.now_s)

        scheduler.start(worker, take)
    scheduler.run()
    assert ended == [1.0, 2.0, 12.0, 22.0]


def test_places():
    small = Sockets(cores=2)
    assert small.places(4) == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert small.places(6)[4:] == [(0, 0), (1, 0)]  # second threads
    assert small.places(4, pin=True) == [(0, 0), (1, 0), (0, 1), (1, 1)]  # two processors each
    assert small.places(8, pin=True)[:5] == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 0)]
    assert set(Sockets(cores=2, used=1).places(9)) == {(0, 0), (0, 1)}
    places = Sockets().places(68)
    assert [sum(place[0] == socket for place in places) for socket in (0, 1)] == [34, 34]
    assert len(set(places[:36])) == 36


def timed(algorithm, cluster, steps=100, placement="first-touch", num_parameters=100_000):
    config = pl.TrainConfig(algorithm=algorithm, workers=cluster.workers, steps=steps, placement=placement)
    return pl.simulate_task(config, cluster=cluster, timing_only=True, num_parameters=num_parameters)


BOUND = Cluster(
    workers=12,
    compute_s=ExponentialTail(least_s=0.018, tail_s=0.002),
    bus_bytes_per_s=40e9,
    sockets=Sockets(gradient_bytes=2e8),
)  # each reads 10 GB/s as long as it computes


@pytest.mark.parametrize("algorithm", ["locked", "locked(kind=rwlock)", "hogwild", "leashed"])
def test_two_sockets_are_faster_where_memory_binds(algorithm):
    one = dataclasses.replace(BOUND, sockets=dataclasses.replace(BOUND.sockets, used=1))
    ratio = timed(algorithm, one, 20).result["wall_s"] / timed(algorithm, BOUND, 20, "interleave").result["wall_s"]
    assert ratio == pytest.approx(2.0, rel=0.15)  # twice the memories


def contention(run):
    """How many workers are publishing at an instant, on average: each one's share of its own time, since they end apart."""
    rows = run.records.values()
    return sum(float((one["ended_s"] - one["gradient_ended_s"]).sum() / one["ended_s"][-1]) for one in rows)


def test_contention_has_its_fixed_point():
    compute_s, rate, size = 0.002, 10e9, 400_000
    update_s = 3 * size / rate + 3 * 100e-9  # a new vector from the newest and the gradient; load, claim and swap
    cluster = Cluster(
        workers=16,
        compute_s=ExponentialTail(least_s=compute_s / 2, tail_s=compute_s / 2),
        bus_bytes_per_s=1e13,
        sockets=Sockets(remote_factor=1.0, cores=36, far_atomic_s=100e-9),
    )
    expected = 16 / (compute_s / update_s + 1)
    once, again = (contention(timed(f"leashed(persistence={bound})", cluster, 200)) for bound in (0, "none"))
    assert once == pytest.approx(expected, rel=0.03)
    assert again > 1.1 * once


def test_placement_is_recorded_and_matters_only_with_sockets():
    config, records = [], []
    for placement in ("first-touch", "interleave"):
        for sockets in (None, Sockets()):
            run = timed("hogwild", Cluster(workers=3, sockets=sockets), 3, placement)
            config.append(run.config.get("placement"))
            records.append(b"".join(one.tobytes() for one in run.records.values()))
    assert config == [None, "first-touch", None, "interleave"]
    assert records[0] == records[2]
    assert records[1] != records[3]
    assert "sockets" not in run.config["cluster"] or run.config["cluster"]["sockets"]["cores"] == 18


def test_workers_with_a_machine_each_have_no_sockets():
    with pytest.raises(UsageError, match="leave out the cluster's sockets"):
        timed("d-psgd", Cluster(workers=4, sockets=Sockets()))
