"""Cores that workers share, and steps that sleep, against what can be worked out by hand."""

import dataclasses
import math

import pytest

import paceline as pl
from paceline.errors import UsageError
from paceline.simulator import Cluster, Normal, Sockets
from paceline.simulator.hardware.core import OwnMemory
from paceline.simulator.hardware.cores import Cold, Cores, SharedCore
from paceline.simulator.loopback import LoopbackNetwork
from paceline.simulator.scheduler import Scheduler

FREE = {"core_bytes_per_s": 1e15, "bus_bytes_per_s": 1e15, "atomic_s": 1e-12, "wake_s": 0, "latency_s": 0}
FREE |= {"bandwidth_bytes_per_s": 1e15}
METHODS = ["hogwild", "leashed", "locked", "lockstep", "all-reduce", "local-sgd", "d-psgd", "ad-psgd"]
SERVERS = ["parameter-server(mode=async)", "parameter-server(mode=sync(backups=1))"]


def timed(algorithm, cluster, steps=24):
    config = pl.TrainConfig(algorithm=algorithm, workers=cluster.workers, steps=steps, batch_size=8)
    return pl.simulate_task(config, cluster=cluster, timing_only=True, num_parameters=1000)


def ended_s(computations, *, cores, slice_s=1.0, crowding=1.0, cold=None, kills=()):
    """When each program has ended that begins at a time and computes, several times on end; None: it was killed."""
    scheduler, ended = Scheduler(runs_torch=False), {}
    shared = Cores(scheduler, cores, slice_s, crowding, cold)
    for number, (begin_s, *each_s) in enumerate(computations):

        def body(number=number, begin_s=begin_s, each_s=each_s):
            scheduler.sleep(begin_s)
            for one_s in each_s:
                shared.compute(one_s)
            ended[number] = scheduler.now_s

        scheduler.start(number, body)
    for number, at_s in kills:
        scheduler.call_at(at_s, lambda number=number: scheduler.end_worker(number))
    scheduler.run()
    return [ended.get(number) for number in range(len(computations))]


@pytest.mark.parametrize("algorithm", [*METHODS, *SERVERS])
@pytest.mark.parametrize("cores", [1, 2, 3])
def test_four_busy_workers_share_what_cores_there_are(algorithm, cores):
    run = timed(algorithm, Cluster(workers=4, compute_s=0.01, cores=cores, slice_s=0.001, **FREE))
    gradients = sum(len(rows) for rows in run.records.values())
    assert run.result["wall_s"] == pytest.approx(gradients * 0.01 / cores, rel=0.1)


@pytest.mark.parametrize("algorithm", METHODS)
def test_four_workers_that_mostly_sleep_need_one_core(algorithm):
    """30 ms of sleep and 1 ms of computing: even if all wake at once, the last is done 4 ms later."""
    run = timed(algorithm, Cluster(workers=4, compute_s=0.001, idle_s=0.03, cores=1, **FREE))
    assert run.result["wall_s"] / 24 == pytest.approx(0.033, abs=0.0021)


def test_a_worker_that_sleeps_longer_is_in_nobodys_way():
    cluster = Cluster(workers=2, compute_s=0.01, cores=1, **FREE)
    slow, asleep = cluster.slow(worker=0, factor=10), cluster.idle(worker=0, idle_s=0.09)
    assert (asleep.idle_of(0), asleep.idle_of(1), slow.idle_of(0)) == (0.09, 0.0, 0.0)
    others_s = {
        name: timed("hogwild", one).records[1]["ended_s"][-1] for name, one in (("slow", slow), ("asleep", asleep))
    }
    assert others_s["asleep"] == pytest.approx(
        24 * 0.01 * (1 + 1 / 10), rel=0.05
    )  # worker 0 computes a tenth of its time
    assert others_s["slow"] == pytest.approx(24 * 0.01 * 2, rel=0.05)
    alone_s = timed("hogwild", dataclasses.replace(asleep, cores=None)).records[0]["ended_s"][-1]
    assert alone_s == pytest.approx(24 * 0.1)  # sleeping is part of a step without cores, too


def test_slices_in_turn():
    assert ended_s([(0, 2.0), (0, 2.0)], cores=2) == [2.0, 2.0]
    assert ended_s([(0, 2.0), (0, 2.0)], cores=1) == [3.0, 4.0]
    assert ended_s([(0, 2.0), (0.25, 1.0)], cores=1) == [3.0, 2.0]  # its first slice is over at 1
    assert ended_s([(0, 3.0), (1.5, 1.0)], cores=1) == [
        4.0,
        2.5,
    ]  # alone it has no slices; somebody comes, and it has had one
    assert ended_s([(0, 1.0), (0, 1.0), (0, 1.0)], cores=2, slice_s=0.1) == pytest.approx([1.5, 1.5, 1.5], abs=0.1)


def test_a_worker_that_goes_on_computing_keeps_its_core_and_its_slice():
    assert ended_s([(0, 0.25, 0.25, 0.25), (0, 0.5)], cores=1) == [0.75, 1.25]
    assert ended_s([(0, 0.5, 0.5, 0.5), (0, 0.5)], cores=1) == [2.0, 1.5]  # the third is beyond its slice


def test_crowded_cores_are_slower_in_proportion():
    assert ended_s([(0, 1.0)], cores=3, crowding=1.5) == [1.0]
    assert ended_s([(0, 1.0)] * 2, cores=3, crowding=1.5) == pytest.approx([1.25] * 2)
    assert ended_s([(0, 1.0)] * 3, cores=3, crowding=1.5) == pytest.approx([1.5] * 3)
    assert ended_s([(0, 1.0), (0.5, 1.0)], cores=2, crowding=2.0) == pytest.approx([1.5, 2.0])  # half of each alone


def test_messages_take_cores_from_busy_workers():
    """One message a step in each direction, of 5 ms: with a core each they are hidden behind 10 ms of computing."""
    link = FREE | {"latency_s": 0.005}
    apart, together = (Cluster(workers=2, compute_s=0.01, cores=cores, slice_s=0.001, **link) for cores in (4, 2))
    assert timed("d-psgd", apart).result["wall_s"] == pytest.approx(24 * 0.01, rel=0.05)
    assert timed("d-psgd", together).result["wall_s"] == pytest.approx(24 * 0.015, rel=0.05)


def test_messages_of_one_sender_keep_their_order():
    noisy = Cluster(workers=4, compute_s=Normal(average_s=0.01, deviation_s=0.005), cores=2)
    for algorithm in ("ad-psgd", "parameter-server(shards=2)"):
        assert timed(algorithm, noisy).result["outcome"] == "stopped"


def test_the_killed_take_no_more_of_a_core():
    assert ended_s([(0, 9.0), (0.5, 1.0)], cores=1, slice_s=10, kills=[(0, 1.0)]) == [None, 2.0]
    waits_in_line = [(0, 2.0), (0.5, 5.0), (0.75, 1.0)]
    assert ended_s(waits_in_line, cores=1, slice_s=10, kills=[(1, 1.0)]) == [2.0, None, 3.0]
    just_then = [(0, 1.0, 5.0), (0.5, 1.0)]  # planned before the end of its first computation, and after it
    assert ended_s(just_then, cores=1, slice_s=10, kills=[(0, 1.0)]) == [None, 2.0]
    alone_from_then_on = ended_s([(0, 9.0), (0.5, 1.0)], cores=2, crowding=2.0, kills=[(0, 1.0)])
    assert alone_from_then_on == [None, 1.75]


def test_messages_that_the_killed_had_not_sent_take_no_core():
    scheduler, ended = Scheduler(runs_torch=False), {}
    cores = Cores(scheduler, 1, 10.0)
    network = LoopbackNetwork(scheduler, Cluster(workers=2, cores=1, **FREE | {"latency_s": 1.0}), 0, cores)

    def sends():
        for item in range(3):
            network.send(0, 1, item, 0)
        scheduler.sleep(9.0)

    def computes():
        scheduler.sleep(1.25)  # after the first, which was under way
        cores.compute(1.0)
        ended[1] = scheduler.now_s

    scheduler.start(0, sends)
    scheduler.start(1, computes)
    scheduler.call_at(0.5, lambda: (network.kill(0), scheduler.end_worker(0)))
    scheduler.run()
    assert ended == {1: 2.25}


@pytest.mark.parametrize("algorithm", ["hogwild", "ad-psgd", "parameter-server(mode=async)"])
def test_a_killed_worker_leaves_its_core(algorithm):
    cluster = Cluster(workers=3, compute_s=0.01, cores=1, slice_s=0.001, **FREE)
    config = pl.TrainConfig(algorithm=algorithm, workers=3, steps=24, batch_size=8)
    run = pl.simulate_task(
        config, cluster=cluster, timing_only=True, num_parameters=1000, faults=pl.Faults().kill(worker=1, step=4)
    )
    steps = sum(len(rows) for rows in run.records.values())
    assert len(run.records[1]) == 3
    assert run.records[0]["ended_s"][-1] == pytest.approx(steps * 0.01, rel=0.1)


@pytest.mark.parametrize("suffix", ["toml", "json"])
def test_files(tmp_path, suffix):
    cluster = Cluster(workers=3, cores=2, slice_s=0.004, crowding=1.1, idle_s=0.005).idle(worker=0, idle_s=0.02)
    assert Cluster.load(cluster.save(tmp_path / f"cluster.{suffix}")) == cluster
    text = Cluster().save(tmp_path / f"plain.{suffix}").read_text()
    assert not any(name in text for name in ("cores", "slice_s", "crowding", "idle"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("cores = 0", "cores of Cluster must be 1 or more, not 0"),
        ("cores = 1.5", "cores of Cluster must be a whole number or None, not 1.5"),
        ("crowdings = 2", "Did you mean 'crowding'?"),
        ("cores = 2\n[sockets]\ncores = 2", "has either cores, which all workers share, or sockets"),
        ("slice_s = 0", "slice_s of Cluster must be a number above 0"),
        ("crowding = 0.5", "crowding of Cluster must be 1 or more, not 0.5"),
        ("cold_factor = 0.5", "cold_factor of Cluster must be 1 or more, not 0.5"),
        ("idle_s = -1", "idle_s of Cluster must be 0 or more, not -1"),
        ("workers = 2\n[idle]\n2 = 1.0", "Worker 2 cannot be idle: the 2 workers are numbered from 0 to 1"),
        ("workers = 2\n[idle]\n0 = 'x'", "The idle time of worker 0 must be a number, not 'x'"),
        ("[idle]\nfirst = 1.0", "'idle' maps workers to seconds"),
    ],
)
def test_refused_files(refusal, text, says):
    assert says in refusal(text)


def test_sockets_have_their_own_cores():
    with pytest.raises(UsageError, match="give one of them"):
        Cluster(cores=2, sockets=Sockets())


@pytest.mark.parametrize(("what", "each_s"), [("copy", 2.0), ("update", 3.0), ("move", 4.0), ("atomic", 0.5)])
def test_moving_vectors_needs_a_core_as_well(what, each_s):
    scheduler, ended = Scheduler(runs_torch=False), []
    cluster = Cluster(workers=2, core_bytes_per_s=1000, bus_bytes_per_s=1e9, atomic_s=0.5)
    cores = Cores(scheduler, 1, 10.0)
    for worker in range(2):
        memory = OwnMemory(scheduler, 1000)
        core = SharedCore(
            cores=cores, scheduler=scheduler, memory=memory, cluster=cluster, worker_id=worker, seed=0, vector_bytes=1000,
            batch_size=8,
        )  # fmt: skip

        def body(core=core):
            getattr(core, what)(*([4.0] if what == "move" else []))
            ended.append((scheduler.now_s, core.moved_s))

        scheduler.start(worker, body)
    scheduler.run()
    assert [at_s for at_s, _ in ended] == pytest.approx([each_s, 2 * each_s])
    assert ended[1][1] == pytest.approx(8.0 if what == "move" else 0.0)


@pytest.mark.parametrize(("cores", "waits_s"), [(2, 0.0), (1, 2.0)])
def test_a_worker_that_waits_for_less_than_it_spins_goes_on_at_once(cores, waits_s):
    """Worker 1 computes 0.25 s longer: the other waits for it; each round has two barriers."""
    free = FREE | {"wake_s": 1.0}
    cluster = Cluster(workers=2, compute_s=0.25, cores=cores, spin_s=0.5, slice_s=10.0, **free).slow(worker=1, factor=2)
    longer_s = 0.5 if cores == 2 else 0.75
    rounds_s = timed("lockstep", cluster, steps=4).records[1]["ended_s"]
    assert rounds_s[0] == pytest.approx(longer_s + waits_s)


def after_pauses_s(cold, *steps):
    """What each computation took of a program that pauses before it: (pause, computation) each; the first one is warm."""
    scheduler, took_s = Scheduler(runs_torch=False), []
    shared = Cores(scheduler, 1, 1.0, 1.0, cold)

    def body():
        for pause_s, alone_s in steps:
            if pause_s:
                scheduler.sleep(pause_s)
            begun_s = scheduler.now_s
            shared.compute(alone_s)
            took_s.append(scheduler.now_s - begun_s)

    scheduler.start(0, body)
    scheduler.run()
    return took_s


def test_after_a_pause_a_worker_computes_more_slowly_until_it_has_made_up_for_it():
    cold = Cold(cold_s=0.5, cold_factor=2.0, cooling_s=1.0)
    most = 1 - math.exp(-1)
    assert after_pauses_s(cold, (0, 3.0), (0, 3.0)) == pytest.approx([3, 3])
    assert after_pauses_s(cold, (0, 3.0), (1.0, 3.0), (0, 3.0)) == pytest.approx([3, 3 + 0.5 * most, 3])
    assert after_pauses_s(cold, (0, 3.0), (100.0, 3.0)) == pytest.approx([3, 3.5])
    assert after_pauses_s(cold, (0, 3.0), (100.0, 0.2), (0, 0.2), (0, 0.2), (0, 0.2)) == pytest.approx(
        [3, 0.4, 0.4, 0.3, 0.2]
    ), "at half the speed for half a second in all, however it is cut"


def test_a_worker_in_line_for_a_core_stays_warm():
    cold = Cold(cold_s=5.0, cold_factor=2.0, cooling_s=0.001)
    assert ended_s([(0, 4.0), (0, 4.0)], cores=1, slice_s=1.0, cold=cold) == pytest.approx([7, 8])
    assert ended_s([(0, 1.0), (0, 1.0)], cores=1, slice_s=2.0, cold=Cold(cold_s=0.0)) == pytest.approx([1, 2])


def test_workers_that_sleep_take_longer_where_cores_turn_cold():
    cluster = Cluster(workers=2, compute_s=0.010, idle_s=0.030, cores=2, **FREE)
    cold = dataclasses.replace(cluster, cold_s=0.004, cooling_s=0.003)
    assert timed("hogwild", cluster).result["wall_s"] == pytest.approx(24 * 0.040)
    assert timed("hogwild", cold).result["wall_s"] == pytest.approx(24 * 0.044 - 0.004, rel=1e-3)
