"""Placers and their simulation on random graphs: laws that hold for every one."""

import itertools
import random
import time
from dataclasses import replace

import pytest

from paceline.errors import UsageError
from paceline.model_parallel.graph.coarsen import coarsened
from paceline.model_parallel.graph.orders import OrderSearch, Paths
from paceline.model_parallel.graph.place import PLACERS, best_of, candidates
from paceline.model_parallel.graph.problem import Device, Group, Link, Problem, TensorInfo, bounds
from paceline.model_parallel.graph.schedule import longest_remaining, simulate

FREE = Link(latency_s=0.0, bytes_per_s=1e30, busy_s=0.0)


def random_problem(seed, num=9, devices=2, link=None, *, unequal=True, microbatches=1):
    draw = random.Random(seed)
    groups = tuple(
        Group(f"g{i}", forward_s=draw.uniform(0.5, 2) * 1e-3, backward_s=draw.uniform(1, 4) * 1e-3) for i in range(num)
    )
    tensors = []
    for producer in range(num):
        readers = tuple(r for r in range(producer + 1, num) if draw.random() < 3 / num)
        if readers or producer == num - 1:
            tensors.append(
                TensorInfo(f"g{producer}", producer, readers, draw.randrange(10**6), is_output=producer == num - 1)
            )
    made = tuple(Device(draw.choice((1.0, 1.0, 2.0, 3.0)) if unequal else 1.0) for _ in range(devices))
    return Problem(groups, tuple(tensors), made, link or Link(), microbatches=microbatches)


def chain(num, microbatches=1, devices=None):
    groups = tuple(Group(f"s{i}", forward_s=1e-3, backward_s=2e-3) for i in range(num))
    tensors = tuple(TensorInfo(f"s{i}", i, (i + 1,), 1000) for i in range(num - 1))
    return Problem(groups, tensors, tuple(Device() for _ in range(devices or num)), FREE, microbatches=microbatches)


@pytest.mark.parametrize("seed", range(12))
def test_no_placement_falls_below_the_bounds_and_the_exact_one_is_best(seed):
    problem = random_problem(seed, num=8, devices=2 + seed % 2)
    found, below = candidates(problem)
    assert found == sorted(found, key=lambda one: one.makespan_s)
    assert all(one.makespan_s >= below.least_s * (1 - 1e-9) for one in found)
    exact = next(one for one in found if one.placer == "exact")
    assert exact.makespan_s == found[0].makespan_s
    draw = random.Random(seed)
    for _ in range(40):
        device_of = [draw.randrange(len(problem.devices)) for _ in problem.groups]
        assert best_of(problem, device_of)[0].makespan_s >= exact.makespan_s * (1 - 1e-9)


def all_orders(problem, prefix=()):
    if len(prefix) == len(problem.groups):
        yield prefix
    for group, earlier in enumerate(problem.earlier):
        if group not in prefix and earlier <= set(prefix):
            yield from all_orders(problem, (*prefix, group))


@pytest.mark.parametrize("microbatches", [1, 2])
def test_the_exact_placement_is_the_best_of_all_placements_in_all_orders(microbatches):
    gained = []
    for seed in range(8):
        problem = random_problem(seed, num=6, devices=2, link=Link(latency_s=2e-4), microbatches=microbatches)
        orders, places = list(all_orders(problem)), list(itertools.product(range(2), repeat=6))
        best_s = min(simulate(problem, placed, order).makespan_s for placed in places for order in orders)
        found, below = candidates(problem)
        assert found[0].is_certain
        assert found[0].makespan_s == pytest.approx(best_s, rel=1e-8)
        assert found[0].makespan_s == simulate(problem, found[0].device_of, found[0].order).makespan_s
        for placed in places[::5]:
            least_s = min(simulate(problem, placed, order).makespan_s for order in orders)
            assert below.least_s <= Paths(problem, placed).least_s <= least_s * (1 + 1e-9) or microbatches > 1
            shorter = OrderSearch(problem, 10**6).shortest(placed, float("inf"))
            assert shorter[1] == pytest.approx(least_s, rel=1e-8)
        gained.append(best_s / min(best_of(problem, placed)[0].makespan_s for placed in places))
    assert min(gained) < 0.99, "in some, both of the orders that placers try are longer"


def test_what_is_not_proven_is_called_the_best_found():
    problem = random_problem(0, num=11, devices=3)
    found, below = candidates(problem)
    assert not any(one.is_certain for one in found if one.makespan_s > below.least_s * (1 + 1e-9))
    assert not any(one.placer == "exact" for one in found)
    assert candidates(chain(40, devices=2))[0][0].is_certain, "it takes no longer than the lower bound"


@pytest.mark.parametrize("seed", range(12))
def test_without_transfers_list_schedules_are_within_grahams_bound(seed):
    """Forward passes alone on equal devices: a greedy schedule is within 2 - 1/k of the best."""
    problem = random_problem(seed, num=20, devices=3, link=FREE, unequal=False)
    forward = Problem(
        tuple(Group(one.name, forward_s=one.forward_s) for one in problem.groups),
        problem.tensors,
        problem.devices,
        FREE,
    )
    below = bounds(forward)
    device_of = PLACERS["earliest-first"](forward)
    state_s = best_of(forward, device_of)[0].makespan_s
    assert state_s <= (2 - 1 / 3) * (below.work_s + below.path_s)  # the optimum is at least the higher of the two
    assert state_s >= below.least_s * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(10))
def test_everything_is_the_same_twice_and_every_order_respects_the_graph(seed):
    problem = random_problem(seed, num=30, devices=4)
    assert candidates(problem) == candidates(random_problem(seed, num=30, devices=4))
    order = longest_remaining(problem)
    place = {group: at for at, group in enumerate(order)}
    assert sorted(order) == list(range(30))
    assert all(place[one.producer] < place[r] for one in problem.tensors for r in one.consumers)


@pytest.mark.parametrize(("k", "number"), [(2, 1), (2, 8), (3, 5), (4, 8), (5, 3)])
def test_a_chain_of_stages_has_the_bubble_of_a_pipeline(k, number):
    problem = chain(k, microbatches=number)
    run = simulate(problem, tuple(range(k)))
    assert run.bubble == pytest.approx((k - 1) / (number + k - 1), rel=1e-6)


def test_a_chain_stays_on_one_device_and_micro_batches_spread_it():
    found, _ = candidates(chain(6, devices=2))
    assert found[0].placer == "all-on-one"
    assert found[0].makespan_s == pytest.approx(18e-3)
    found, _ = candidates(chain(6, microbatches=8, devices=2))
    assert found[0].makespan_s == pytest.approx(18e-3 / 2 * 9, rel=1e-6)
    assert sorted(found[0].device_of) == [0, 0, 0, 1, 1, 1]


def test_two_towers_go_apart_and_the_slow_device_gets_less():
    def towers(slowness):
        groups = (*(Group(f"a{i}", forward_s=1e-3, backward_s=2e-3) for i in range(6)), Group("head", forward_s=1e-4))
        tensors = (
            *(TensorInfo(f"a{i}", i, (i + 2,), 1000) for i in range(4)),
            TensorInfo("a4", 4, (6,), 1000),
            TensorInfo("a5", 5, (6,), 1000),
        )
        return Problem(groups, tensors, (Device(), Device(slowness)))

    found, below = candidates(towers(1.0))
    assert found[0].makespan_s < 1.1 * below.least_s
    found, _ = candidates(towers(3.0))
    assert sum(found[0].device_of) < 3


def test_a_slow_link_takes_longer_both_ways_and_others_do_not():
    groups = tuple(Group(f"g{i}", forward_s=1e-3, backward_s=1e-3) for i in range(2))
    tensors = (TensorInfo("g0", 0, (1,), 1_000_000),)
    link = Link(latency_s=1e-4, bytes_per_s=1e9, busy_s=5e-5)
    problem = Problem(groups, tensors, (Device(),) * 3, link, link_factors=((0, 2, 10.0),))
    usual_s, slow_s = 4e-3 + 2 * (1.1e-3 + 1e-4), 4e-3 + 2 * (11e-3 + 1e-4)
    for device_of, expected_s in {(0, 1): usual_s, (1, 2): usual_s, (0, 2): slow_s, (2, 0): slow_s}.items():
        run = simulate(problem, device_of)
        assert run.makespan_s == pytest.approx(expected_s)
        assert Paths(problem, device_of).least_s == pytest.approx(expected_s)


@pytest.mark.parametrize("seed", range(6))
def test_with_slow_links_the_exact_placement_is_the_best_of_all_and_uses_the_fast_ones(seed):
    plain = random_problem(seed, num=5, devices=3, unequal=False)
    plain = replace(plain, tensors=tuple(replace(one, is_output=False) for one in plain.tensors))
    problem = replace(
        plain, link_factors=((0, 1, 50.0), (0, 2, 50.0))
    )  # worker 0 on one machine, the others on another
    found, _ = candidates(problem)
    best_s = min(best_of(problem, placed)[0].makespan_s for placed in itertools.product(range(3), repeat=5))
    assert found[0].is_certain
    assert found[0].makespan_s <= best_s * (1 + 1e-9)
    assert found[0].makespan_s <= candidates(replace(plain, devices=plain.devices[:2]))[0][0].makespan_s * (1 + 1e-9), (
        "as fast as on the two of one machine"
    )


def test_groups_that_are_worth_a_transfer_over_the_fastest_link_are_not_merged():
    problem = replace(chain(2), link=Link(latency_s=1e-2, bytes_per_s=1e9))
    assert coarsened(problem, [None] * 2) == [[0, 1]]
    assert coarsened(replace(problem, link_factors=((0, 1, 0.01),)), [None] * 2) == [[0], [1]]


def test_a_short_head_is_not_merged_with_a_tower_which_would_then_wait_for_the_other_one():
    groups = (*(Group(name, forward_s=1e-2, backward_s=2e-2) for name in "ab"), Group("head", forward_s=1e-4))
    tensors = tuple(TensorInfo(name, at, (2,), 10_000) for at, name in enumerate("ab"))
    problem = Problem(groups, tensors, (Device(),) * 2, Link(latency_s=1e-3, bytes_per_s=1e7))
    assert coarsened(problem, [None] * 3) == [[0], [1], [2]]
    assert candidates(problem)[0][0].makespan_s < 0.035, "while both towers take 0.06 s"
    assert len(coarsened(problem, [None] * 3, least_s=1e-3)) == 2, "to be measured, it shares a block"
    short = replace(problem, groups=(groups[0], replace(groups[1], forward_s=1e-4, backward_s=2e-4), groups[2]))
    assert coarsened(short, [None] * 3) == [[0, 1, 2]], "a short tower waits for a long one at no cost"


def test_memory_and_what_must_be_together_are_kept():
    problem = random_problem(3, num=12, devices=3)
    groups = tuple(Group(g.name, (), g.forward_s, g.backward_s, (g.name,), 10) for g in problem.groups)
    devices = tuple(Device(one.slowness, memory_bytes=50) for one in problem.devices)
    tight = Problem(groups, problem.tensors, devices, problem.link, together=((0, 11), (3, 5)))
    found, _ = candidates(tight)
    for one in found:
        assert max(tight.memory_of(one.device_of)) <= 50
        assert one.device_of[0] == one.device_of[11]
        assert one.device_of[3] == one.device_of[5]
    with pytest.raises(UsageError, match=r"needs 0\.0 MB, and the 3 devices"):
        candidates(Problem(groups, problem.tensors, tuple(Device(memory_bytes=39) for _ in range(3))))


def test_two_pins_that_conflict_are_both_named():
    problem = random_problem(1, num=4)
    pinned = Problem(problem.groups, problem.tensors, problem.devices, allowed=((0,), (), (), (1,)), together=((0, 3),))
    with pytest.raises(UsageError, match=r"g0 .* device 0 and g3 on device 1"):
        candidates(pinned)


def test_500_groups_on_8_devices_are_planned_in_a_second():
    problem = random_problem(0, num=500, devices=8)
    begun_s = time.process_time()
    candidates(problem)
    assert time.process_time() - begun_s < 1.0


def test_the_exact_placer_gives_up_in_time_and_says_nothing_of_certainty():
    problem = random_problem(2, num=14, devices=4, link=Link(latency_s=1e-2))
    begun_s = time.process_time()
    found, _ = candidates(problem)
    assert time.process_time() - begun_s < 20
    assert not any(one.is_certain or one.placer == "exact" for one in found)
