"""Workers that join a run: whoever dies, be it the holder of the join point, the others go on and end with one model."""

import random
import signal
import socket
from multiprocessing.connection import wait

import pytest

import soak_results
from paceline.transport.keys import create_keys
from processes.join_programs import DEADLINE_S, Crew, free_address, placed


@pytest.fixture
def crew():
    with Crew(free_address(), PACELINE_OF="3") as crew:
        yield crew


def ends(crew, hands):
    """All end, with the same model; their results by worker."""
    crew.finish()
    results = {hand.worker_id: hand.hear("result") for hand in hands}
    assert all(one["x"] == next(iter(results.values()))["x"] for one in results.values())
    return results


def replaced_while_joining(crew, dies_at, kills, is_late):
    """A worker dies while it joins, so often at the same place; the next one has it, and all train."""
    crew.hold()  # before the run has begun, it ends with the worker that holds the join point
    hands = crew.start(2 + is_late)
    if is_late:
        placed(hands)
        for one in hands:
            one.trains_on()
        hands.pop().signal(signal.SIGKILL)
    for _ in range(kills):
        (dying,) = crew.start(1, dies_at=dies_at)
        dying.process.join(DEADLINE_S)
        assert dying.process.exitcode == -signal.SIGKILL
    last = crew.start(1)
    placed(last if is_late else hands + last)
    hands += last
    for one in hands:
        one.trains_on()
    assert sorted(one.worker_id for one in hands) == [0, 1, 2]
    ends(crew, hands)


#: Before its mailbox's address is known, and after; of the first workers of a run, and of a late one.
JOINING = [("meet", False), ("_connect_all", False), ("meet", True), ("_connect_late", True)]


@pytest.mark.parametrize(("dies_at", "is_late"), JOINING)
def test_workers_that_die_while_they_join_are_replaced(crew, dies_at, is_late):
    replaced_while_joining(crew, dies_at, 1, is_late)


@pytest.mark.soak
@pytest.mark.parametrize(("dies_at", "is_late"), JOINING)
def test_ten_workers_that_die_while_they_join_are_replaced(crew, dies_at, is_late):
    """Writes what became of them to PACELINE_SOAK_RESULTS."""
    kills = 10
    replaced_while_joining(crew, dies_at, kills, is_late)
    what = (
        f"{'a late' if is_late else 'a first'} worker, killed {'before' if dies_at == 'meet' else 'after'} publishing"
    )
    soak_results.keep("soak_join_point", what, {"kills": kills, "replaced": kills})


@pytest.mark.parametrize("on_device", [False, True])
def test_single_workers_make_one_run_in_which_every_batch_is_seen_once(crew, on_device):
    workers = placed(crew.start(3, batches=400, epochs=1, meet_at=30, on_device=on_device))
    assert sorted(workers) == [0, 1, 2]
    results = ends(crew, workers.values())
    assert all(one["start"] == results[0]["start"] for one in results.values()), "they begin where worker 0 does"
    assert sorted(batch for one in results.values() for batch in one["seen"]) == list(range(400))
    assert all(one["averages_per_step"] > 0 for one in results.values())


@pytest.mark.parametrize(
    ("victim", "on_device"), [(0, False), (1 + random.Random("victim").randrange(2), False), (0, True)]
)
def test_a_killed_worker_is_left_behind_and_a_late_comer_takes_its_place(crew, victim, on_device):
    keeper = crew.hold()
    still = {"lr": 0.0, "on_device": on_device}  # so that a neighbour's model is known: the one that all began with
    workers = placed(crew.start(3, **still))
    workers[victim].trains_on()
    workers.pop(victim).signal(signal.SIGKILL)
    for one in workers.values():
        one.trains_on()
    (late,) = crew.start(1, **still)
    assert late.hear("place") == (victim, 3)
    late.trains_on()
    results = ends(crew, [*workers.values(), late])
    assert results[victim]["start"] == results[(victim + 1) % 3]["start"], "it takes a neighbour's model"
    assert results[victim]["averages_per_step"] > 0
    assert keeper.process.is_alive()


def test_when_the_join_point_is_killed_every_batch_is_seen_and_few_are_seen_twice(crew):
    keeper = crew.hold()
    workers = placed(crew.start(3, batches=2000, epochs=1, meet_at=40))
    workers[1].trains_on(30 - workers[1].steps)  # and none comes further before all have had as many
    keeper.signal(signal.SIGKILL)
    results = {worker_id: hand.hear("result") for worker_id, hand in workers.items()}
    seen = [batch for one in results.values() for batch in one["seen"]]
    assert set(seen) == set(range(2000))
    assert len(seen) - 2000 < 200
    assert all(len(one["seen"]) > 30 for one in results.values())


def test_join_point_and_a_worker_die(crew):
    """As when one machine does: the share of the dead is dealt out to the others."""
    keeper = crew.hold()
    workers = placed(crew.start(3, batches=3000, epochs=1))
    workers[2].trains_on()
    keeper.signal(signal.SIGKILL)
    workers.pop(2).signal(signal.SIGKILL)
    results = {worker_id: hand.hear("result") for worker_id, hand in workers.items()}
    seen = {batch for one in results.values() for batch in one["seen"]}
    assert len(set(range(2000, 3000)) - seen) < 50, "hardly any is nobody's in the end"
    assert results[0]["x"] == results[1]["x"]


def test_the_first_worker_holds_the_join_point_where_no_agent_does(crew):
    """It is one of the workers, and may die like any other."""
    (first,) = crew.start(1)
    others = crew.start(2)
    workers = placed([first, *others])
    for one in workers.values():
        one.trains_on()
    workers.pop(first.worker_id).signal(signal.SIGKILL)
    for one in workers.values():
        one.trains_on(60)
    ends(crew, workers.values())


def stop_and_continue(crew, until):
    workers = placed(crew.start(3))
    sleeper = workers[1]
    sleeper.trains_on()
    sleeper.signal(signal.SIGSTOP)
    until([workers[0], workers[2]])
    sleeper.signal(signal.SIGCONT)
    sleeper.trains_on()
    results = ends(crew, workers.values())
    assert all(one["consensus_distance"] == results[0]["consensus_distance"] for one in results.values())


def test_a_stopped_worker_holds_nobody_up_and_goes_on(crew):
    stop_and_continue(crew, lambda others: [one.trains_on(200) for one in others])


@pytest.mark.soak
def test_a_worker_that_is_stopped_for_20_s(crew):
    def wait(others):
        signal.sigtimedwait([], 20)
        for one in others:
            one.trains_on(200)

    stop_and_continue(crew, wait)


# What does not fit is refused in one sentence


def refused(hand):
    return hand.hear("UsageError")


@pytest.mark.parametrize(
    ("common", "wish", "named"),
    [
        ({}, {"width": 5}, "55 parameters"),
        ({}, {"algorithm": "ad-psgd(topology=complete)"}, "ad-psgd(topology=complete)"),
        (
            {"algorithm": "all-reduce"},
            {"environment": {"PACELINE_MIN_WORKERS": "2"}},
            "This worker's min_workers is",
        ),
    ],
)
def test_workers_that_disagree(crew, common, wish, named):
    """Whichever of the two comes second is refused."""
    crew.hold()
    hands = {hand.connection: hand for hand in [*crew.start(1, **common), *crew.start(1, **common, **wish)]}
    (told,) = wait(list(hands), DEADLINE_S)
    said = refused(hands[told])
    assert named in said, said
    assert "worker" in said, said


@pytest.mark.parametrize(("algorithm", "least"), [("ad-psgd", "2"), ("d-psgd", "2"), ("all-reduce", "4")])
def test_a_least_number_of_workers_that_nobody_can_wait_for(crew, algorithm, least):
    crew.hold()
    (worker,) = crew.start(1, algorithm=algorithm, environment={"PACELINE_MIN_WORKERS": least})
    said = refused(worker)
    assert ("min_workers=4 is more than the run's 3 workers" if least == "4" else "min_workers is for methods") in said


@pytest.mark.parametrize("algorithm", ["all-reduce(sharded=true)", "hogwild"])
def test_algorithms_that_cannot_go_on_without_a_worker(crew, algorithm):
    (worker,) = crew.start(1, algorithm=algorithm)
    assert "workers cannot come and go: choose all-reduce or ad-psgd" in refused(worker)


def test_a_number_that_differs_and_a_run_that_is_full(crew):
    crew.hold()
    workers = placed(crew.start(3))
    (other,) = crew.start(1, environment={"PACELINE_OF": "4"})
    assert "has 3 workers in all, not 4" in refused(other)
    (fourth,) = crew.start(1)
    assert "All 3 places" in refused(fourth)
    ends(crew, workers.values())


def test_keys(crew, tmp_path):
    mine, other = tmp_path / "run.key", tmp_path / "other.key"
    create_keys(mine)
    create_keys(other)
    crew.environment |= {"PACELINE_KEY": str(mine), "PACELINE_OF": "2"}
    (first,) = crew.start(1)
    (second,) = crew.start(1)
    workers = placed([first, second])
    (wrong,) = crew.start(1, environment={"PACELINE_KEY": str(other)})
    (none,) = crew.start(1, environment={"PACELINE_KEY": ""})
    assert "all workers need the same --key" in refused(wrong)
    assert "all workers need the same --key" in refused(none)
    ends(crew, workers.values())


def test_off_loopback_a_key_is_required():
    with Crew("192.0.2.1:29400") as crew:
        (worker,) = crew.start(1)
        assert "make a key with `paceline key FILE`" in refused(worker)


def test_a_port_in_use_by_something_else():
    with socket.create_server(("127.0.0.1", 0)) as taken, Crew(f"127.0.0.1:{taken.getsockname()[1]}") as crew:
        (worker,) = crew.start(1)
        assert "choose a free port for --join" in refused(worker)


def test_a_run_that_never_fills_up(crew):
    (worker,) = crew.start(1, environment={"PACELINE_DEADLINE_S": "3"})
    assert "The run needs 3 workers" in worker.hear("WorkerLostError")
