"""When simulated messages arrive, which workers learn that one has left, and what collectives over the network take."""

import pytest
import torch

import paceline as pl
from paceline.errors import PeerLostError, UsageError
from paceline.ports.ports import Message, PeerBack, PeerLeft
from paceline.ports.shared import Needs
from paceline.simulator import Cluster, Faults
from paceline.simulator.concurrency import SimulatedConcurrency
from paceline.simulator.machine import SimulatedMachine
from paceline.simulator.network import HEADER_BYTES
from paceline.simulator.network_collectives import CollectiveCosts
from paceline.simulator.program import ProgramError
from paceline.simulator.scheduler import Scheduler

LATENCY_S, RATE = 0.5, 100.0
WIRED = {"latency_s": LATENCY_S, "bandwidth_bytes_per_s": RATE, "core_bytes_per_s": 1e18}  # nobody waits for a copy
MESSAGE = Message("m", x=torch.zeros(100 - HEADER_BYTES, dtype=torch.uint8))  # 1 s on the wire


def play(programs, *, faults=None, **cluster):
    """Runs one program per worker, called with its ports."""
    machine = SimulatedMachine(
        Cluster(workers=len(programs), **WIRED | cluster), Needs("replicated", mailbox=True, collectives=True),
        x=torch.zeros(1), vector_bytes=4, batch_size=1, seed=0, faults=faults,
    )  # fmt: skip
    all_ports = [machine.ports(machine.core(worker)) for worker in range(len(programs))]
    for worker, (program, ports) in enumerate(zip(programs, all_ports, strict=True)):
        machine.start(worker, lambda program=program, ports=ports: program(ports))
    machine.scheduler.run()
    return all_ports


def sends(*receivers, after_s=0.0):
    def program(ports):
        ports.clock.sleep_s(after_s)
        for number, receiver in enumerate(receivers):
            ports.mailbox.send(receiver, MESSAGE._replace(number=number))
        ports.clock.sleep_s(100.0)

    return program


def receives(count, into, **filters):
    def program(ports):
        for _ in range(count):
            got = ports.mailbox.receive(**filters)
            into.append((ports.clock.now_s(), got.sender, got.message.number))

    return program


def idle(ports):
    ports.clock.sleep_s(100.0)


@pytest.mark.parametrize(
    ("senders", "cluster", "times_s"),
    [
        ([sends(1)], {}, [1.5]),
        ([sends(1, 1)], {}, [1.5, 2.5]),  # one after the other through the sender's NIC
        ([sends(1), idle, sends(1)], {}, [1.5, 2.5]),  # and through the receiver's
        ([sends(1), idle, sends(1, after_s=0.25)], {}, [1.5, 2.5]),
        ([sends(2, 2, 1), idle, idle, sends(1)], {}, [1.5, 3.5]),  # a queue elsewhere keeps nobody waiting here
        ([sends(1), idle, sends(3)], {"switch_bytes_per_s": 50.0}, [2.5]),
        ([sends(3), idle, sends(1)], {"switch_bytes_per_s": 50.0}, [4.5]),
        ([sends(1, 1)], {"link_factors": ((0, 1, 10.0),)}, [15.0, 25.0]),
        ([sends(1, 3)], {"link_factors": ((0, 3, 10.0),)}, [1.5]),
        ([sends(3, 1)], {"link_factors": ((0, 3, 10.0),)}, [2.5]),  # the NIC is free again after 1 s
    ],
)
def test_arrivals(senders, cluster, times_s):
    got = []
    programs = [*senders, idle, idle, idle][:4]
    programs[1] = receives(len(times_s), got)
    play(programs, **cluster)
    assert [at_s for at_s, *_ in got] == pytest.approx(times_s)


def test_both_directions_at_once_and_counts():
    got = []

    def both(ports):
        sends_s = ports.clock.now_s()
        ports.mailbox.send(1 - ports.worker_id, MESSAGE)
        ports.mailbox.send(ports.worker_id, MESSAGE)
        own = ports.mailbox.receive(sender=ports.worker_id)
        assert own.message.kind == "m"
        assert ports.clock.now_s() == pytest.approx(sends_s)  # to itself: at once
        receives(1, got)(ports)

    ports = play([both, both])
    assert [at_s for at_s, *_ in got] == [1.5, 1.5]
    assert [(one.counts.messages, one.counts.sent_bytes) for one in ports] == [(1, 100), (1, 100)]


def test_a_message_is_a_copy():
    got = []

    def sender(ports):
        x = torch.ones(3)
        ports.mailbox.send(1, Message("m", x=x))
        x.zero_()
        idle(ports)

    play([sender, lambda ports: got.append(ports.mailbox.receive().message.x)])
    assert got[0].tolist() == [1.0, 1.0, 1.0]


def test_selective_receive_and_deadlines():
    def sender(ports):
        for kind, number in (("a", 1), ("b", 1), ("a", 2), ("b", 2)):
            ports.mailbox.send(1, Message(kind, number))
        idle(ports)

    def receiver(ports):
        box, said = ports.mailbox, []
        said += [box.receive(kind="b", number=2), box.receive(kind="a"), box.receive(sender=0), box.receive()]
        assert [(one.message.kind, one.message.number) for one in said] == [("b", 2), ("a", 1), ("b", 1), ("a", 2)]
        begun_s = ports.clock.now_s()
        assert box.receive(0.0) is None
        assert ports.clock.now_s() == begun_s
        for timeout_s in (5.0, 0.25, 1.0):  # a timer that is replaced by an earlier one ends nothing too soon
            begun_s = ports.clock.now_s()
            assert box.receive(timeout_s, kind="c") is None
            assert ports.clock.now_s() - begun_s == pytest.approx(timeout_s)

    play([sender, receiver])


def test_two_programs_of_one_worker_receive_their_own_kinds():
    got = {}

    def receiver(ports):
        def further():
            got["b"] = ports.mailbox.receive(kind="b").message.number

        other = ports.concurrency.start(further, "further")
        got["a"] = ports.mailbox.receive(9.0, kind="a").message.number
        other.join()
        assert ports.mailbox.waited_s == pytest.approx(
            ports.clock.now_s()
        )  # of `work` only; both came in the same order

    def sender(ports):
        ports.mailbox.send(1, Message("b", 7))
        ports.mailbox.send(1, Message("a", 8))
        idle(ports)

    play([sender, receiver])
    assert got == {"a": 8, "b": 7}


def test_programs_that_serve_wait_in_the_midst_of_something_and_keep_what_comes_meanwhile():
    seen, ended = [], []

    def serves(ports):
        lock = ports.concurrency.lock()

        def handle(event):
            with lock:
                seen.append((ports.worker_id, ports.clock.now_s(), event and event.message.number))
            return None if event is not None and event.message.number == 3 else 2.0

        program = ports.concurrency.serve(ports.mailbox, ("m",), handle, "serving")
        ports.clock.sleep_s(0.5)
        with lock:
            ports.clock.sleep_s(2.0)  # what came at 1 s waits for the lock, what came at 1.5 s for its turn
        program.join()
        ended.append(ports.clock.now_s())

    def sends_three(ports):
        for number, nap_s in ((1, 0.5), (2, 3.5), (3, 20.0)):
            for to in (0, 1):
                ports.mailbox.send(to, Message("m", number))
            ports.clock.sleep_s(nap_s)

    play([serves, serves, sends_three], bandwidth_bytes_per_s=1e9, latency_s=1.0, wake_s=0.0)
    for worker in (0, 1):
        own = [(at_s, number) for one, at_s, number in seen if one == worker]
        assert [number for _, number in own] == [None, 1, 2, None, 3]
        assert [at_s for at_s, _ in own] == pytest.approx([0.0, 2.5, 2.5, 4.5, 5.0], abs=1e-3)
    assert ended == pytest.approx([5.0, 5.0], abs=1e-3)


def test_a_program_that_serves_ends_with_its_worker_wherever_it_is():
    seen, scheduler = [], Scheduler()

    def program(worker):
        def serve():
            try:
                scheduler.sleep(1.0)
            finally:
                seen.append((worker, scheduler.now_s))

        scheduler.start_serving(worker, serve)
        scheduler.sleep(0.25 + worker)

    for worker in range(2):
        scheduler.start(worker, lambda worker=worker: program(worker))
    scheduler.call_at(0.25, lambda: scheduler.end_worker(0))
    scheduler.run()
    assert seen == [(0, 0.25), (1, 1.0)]


def test_an_end_is_told_after_the_last_message():
    said = []

    def leaves(ports):
        ports.mailbox.send(1, MESSAGE)

    def stays(ports):
        said.extend(ports.mailbox.receive() for _ in range(2))
        assert 0 not in ports.mailbox.peers()
        with pytest.raises(PeerLostError, match=r"Worker 0 cannot be reached: ended\."):
            ports.mailbox.send(0, MESSAGE)
        assert ports.mailbox.receive(sender=0) == PeerLeft(0, 0, "ended")  # asked again, told again
        assert ports.mailbox.receive(sender=2).reason == "ended"  # though they never met

    play([leaves, stays, lambda ports: None])
    assert said[0].message.kind == "m"
    assert said[1] == PeerLeft(0, 0, "ended")


def test_an_end_is_told_after_the_last_message_also_to_one_that_writes_meanwhile():
    """Its last message takes 15 s over a slow link, and what comes in vain is there after 11.4 s."""
    said = []

    def writes(ports):
        ports.mailbox.send(0, Message("short"))
        said.extend(ports.mailbox.receive() for _ in range(2))

    play([lambda ports: ports.mailbox.send(1, MESSAGE), writes], link_factors=((0, 1, 10.0),))
    assert said[0].message.kind == "m"
    assert said[1] == PeerLeft(0, 0, "ended")


def test_a_kill_is_told_after_detection_and_loses_what_has_not_left():
    got = []

    def watches(ports):
        for _ in range(2):
            got.append((ports.clock.now_s(), ports.mailbox.receive()))
        got.append((ports.clock.now_s(), None))
        assert set(ports.mailbox.peers()) == {2}

    # Killed at 0.5 s: the first of its messages has begun to leave, the second has not.
    play([sends(1, 1), watches, idle], faults=Faults().kill(worker=0, at_s=0.5), detection_s=3.0)
    assert got[0][1] is not None
    assert got[1][0] == pytest.approx(1.5)
    assert got[1][1].reason == "killed at 0.5 s"
    assert got[2][0] == pytest.approx(3.5)


def test_a_sender_to_a_dead_worker_is_told():
    said = []

    def writes(ports):
        ports.clock.sleep_s(10.0)
        ports.mailbox.send(0, MESSAGE)
        said.append((ports.mailbox.receive(), ports.clock.now_s()))

    play([idle, writes], faults=Faults().kill(worker=0, at_s=1.0))
    assert said[0][0] == PeerLeft(0, 0, "killed at 1 s")
    assert 11.5 <= said[0][1] <= 12.5


def test_a_pause_is_a_silence_and_then_a_return():
    said, got = [], []

    def writes(ports):
        ports.mailbox.send(0, MESSAGE)
        for _ in range(2):
            said.append((ports.mailbox.receive(), ports.clock.now_s()))
        ports.mailbox.send(0, MESSAGE)
        idle(ports)

    play([receives(2, got), writes], faults=Faults().pause(worker=0, at_s=1.0, for_s=9.0), detection_s=3.0)
    assert [type(event) for event, _ in said] == [PeerLeft, PeerBack]
    assert [at_s for _, at_s in said] == pytest.approx([4.0, 10.0])
    assert [at_s for at_s, *_ in got] == pytest.approx([10.0, 11.5])


def test_a_short_pause_within_a_long_one_ends_with_that():
    got = []
    faults = Faults().pause(worker=0, at_s=1.0, for_s=9.0).pause(worker=0, at_s=2.0, for_s=1.0)
    play([receives(2, got), sends(0, 0)], faults=faults, detection_s=60.0)
    assert [at_s for at_s, *_ in got] == pytest.approx([10.0, 10.0])


def test_a_goodbye_does_not_pass_a_cut_link():
    """What was said before it did not either: the worker has not just ended, as far as the other can know."""
    said = []

    def leaves(ports):
        ports.clock.sleep_s(2.0)
        ports.mailbox.send(1, MESSAGE)

    faults = Faults().drop_link(0, 1, at_s=1.0)
    play([leaves, lambda ports: said.append(ports.mailbox.receive(sender=0))], faults=faults, detection_s=60.0)
    assert said == [PeerLeft(0, 0, "the link was cut before it ended")]


def test_a_cut_link_separates_two_and_nobody_else():
    said, got = [], []

    def cut_off(ports):
        ports.clock.sleep_s(2.0)
        ports.mailbox.send(1, MESSAGE)
        ports.mailbox.send(2, MESSAGE)
        said.append(ports.mailbox.receive())
        idle(ports)

    play([cut_off, lambda ports: said.append(ports.mailbox.receive()), receives(1, got)],
         faults=Faults().drop_link(0, 1, at_s=1.0))  # fmt: skip
    assert sorted(one.peer for one in said) == [0, 1]
    assert all(isinstance(one, PeerLeft) and "cut at 1 s" in one.reason for one in said)
    assert [sender for _, sender, _ in got] == [0]


def test_lock_is_fair_and_waiting_is_counted():
    scheduler, order = Scheduler(), []
    concurrency = SimulatedConcurrency(scheduler, 0, wake_s=0.25)
    lock = concurrency.lock()

    def program(number, main):
        scheduler.sleep(0.1 * number)
        with lock:
            order.append((number, scheduler.now_s))
            scheduler.sleep(1.0)

    for number in range(3):
        scheduler.start(0, lambda number=number: program(number, number == 1), is_main=number == 1)
    scheduler.run()
    assert [number for number, _ in order] == [0, 1]  # the last main program's end is the end
    assert order[1][1] == pytest.approx(1.25)
    assert concurrency.waited_s == pytest.approx(1.15)


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8])
def test_collectives_compute_and_take_their_time(workers):
    n, ends = workers, []

    def program(ports):
        me = ports.worker_id
        x = torch.full((120,), 1.0 + me)
        assert ports.collectives.all_reduce_mean(x, 1.0 + me, (me + 0.5, me, 0, 1)) == [
            n * n / 2,
            n * (n - 1) / 2,
            0,
            n,
        ]
        assert x[0].item() == pytest.approx(sum((1 + w) ** 2 for w in range(n)) / sum(1 + w for w in range(n)))
        begun_s = ports.clock.now_s()
        y, z = torch.arange(120.0) + me, torch.ones(120)
        handles = [ports.collectives.start_all_reduce(y), ports.collectives.start_all_reduce(z)]
        ports.clock.sleep_s(1.0)  # overlaps
        for handle in handles:
            handle.wait()
        ends.append(ports.clock.now_s() - begun_s)
        assert y.tolist() == (n * torch.arange(120.0) + n * (n - 1) / 2).tolist()
        assert z.tolist() == [n] * 120
        part, whole = torch.zeros(120 // n), torch.zeros(120 // n * n)
        ports.collectives.start_reduce_scatter(torch.arange(float(120 // n * n)), part).wait()
        assert part.tolist() == [n * float(120 // n * me + at) for at in range(120 // n)]
        ports.collectives.start_all_gather(part, whole).wait()
        assert whole.tolist() == (n * torch.arange(float(120 // n * n))).tolist()

    all_ports = play([program] * n)
    sending_s = 2 * (n - 1) * (HEADER_BYTES + 480 / n) / RATE
    once_s = 2 * (n - 1) * LATENCY_S + sending_s
    assert ends == pytest.approx([max(1.0, once_s, 2 * sending_s)] * n)  # the one's bytes in the other's latencies
    assert {one.counts.messages for one in all_ports} == {3 * 2 * (n - 1) + 2 * (n - 1)}


def test_cost_models():
    fast = {"workers": 8, "latency_s": 0.0, "bandwidth_bytes_per_s": 1e9}
    big = 8e9  # headers are nothing beside it
    ring, tree = (CollectiveCosts(Cluster(**fast), kind) for kind in ("ring", "tree"))
    assert ring.all_reduce(big).time_s == pytest.approx(2 * 7 / 8 * 8, rel=1e-6)
    assert ring.half(big).time_s == pytest.approx(7 / 8 * 8, rel=1e-6)
    assert tree.all_reduce(big).time_s == pytest.approx(2 * 3 * 8, rel=1e-6)
    assert tree.half(big).time_s == pytest.approx(7 / 8 * 8, rel=1e-6)
    shared = CollectiveCosts(Cluster(**fast, switch_bytes_per_s=2e9), "ring")
    assert shared.all_reduce(big).time_s == pytest.approx(4 * 2 * 7 / 8 * 8, rel=1e-6)
    for pair, kind, slower in [((3, 4), "ring", 10), ((3, 5), "ring", 1), ((4, 5), "tree", 10), ((3, 4), "tree", 1)]:
        cost = CollectiveCosts(Cluster(**fast).slow_link(*pair, 10), kind).all_reduce(big).time_s
        assert cost == pytest.approx(slower * (ring if kind == "ring" else tree).all_reduce(big).time_s), (pair, kind)


def test_a_collective_without_a_lost_worker_fails_with_its_name():
    def program(ports):
        ports.clock.sleep_s(float(ports.worker_id))
        ports.collectives.all_reduce_mean(torch.zeros(3), 1.0)

    with pytest.raises(
        ProgramError, match=r"WorkerLostError: .*worker 2 \(killed at 1\.5 s\).*arrived: workers 0 and 1"
    ):
        play([program] * 3, faults=Faults().kill(worker=2, at_s=1.5))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Faults().kill(worker=1), "give either step or at_s"),
        (lambda: Faults().kill(worker=1, step=3, at_s=1.0), "give either step or at_s"),
        (lambda: Faults().kill(worker=1, step=0), "step of kill must be 1 or more"),
        (lambda: Faults().slow(worker=1, factor=0, step=1), "factor of slow must be a number above 0"),
        (lambda: Faults().pause(worker=1, at_s=-1.0, for_s=1.0), "at_s of pause must be 0 or more"),
        (lambda: Faults().drop_link(1, 1, at_s=1.0), "to itself"),
        (lambda: Faults().kill(worker=4, step=1).check(4), "4 workers are numbered from 0 to 3"),
    ],
)
def test_refused_faults(make, says):
    with pytest.raises(UsageError, match=says):
        make()


@pytest.mark.parametrize("algorithm", ["all-reduce", "all-reduce(shares=auto)", "d-psgd"])
def test_a_crashed_run_lasts_until_the_others_know_of_the_death(algorithm):
    config = pl.TrainConfig(task="digits-mlp", algorithm=algorithm, workers=3, steps=20)
    cluster = Cluster(workers=3, detection_s=1.5)
    faults = Faults().kill(worker=1, at_s=0.055)
    run = pl.simulate_task(config, cluster=cluster, timing_only=True, num_parameters=1000, faults=faults)
    assert run.result["outcome"] == "crashed"
    assert run.result["wall_s"] == pytest.approx(0.055 + 1.5)


def test_a_cut_link_that_no_message_of_a_collective_passes_changes_nothing():
    config = pl.TrainConfig(task="digits-mlp", algorithm="all-reduce", workers=4, steps=5)
    for link, outcome in [((0, 2), "stopped"), ((0, 3), "crashed")]:  # the ring is 0-1-2-3-0
        faults = Faults().drop_link(*link, at_s=0.025)
        run = pl.simulate_task(config, timing_only=True, num_parameters=1000, faults=faults)
        assert run.result["outcome"] == outcome
