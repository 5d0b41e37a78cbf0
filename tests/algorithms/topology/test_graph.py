import doctest
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.algorithms import topology
from paceline.algorithms.d_psgd import DPSGD
from paceline.algorithms.topology import custom, graph, mixing, topology_registry
from paceline.algorithms.topology.graph import (
    BipartiteExponential,
    BipartiteRing,
    Complete,
    Exponential,
    OnePeerExponential,
    Ring,
    Star,
    Topology,
    Torus,
)
from paceline.errors import UsageError
from paceline.specs.registry import Registry

SIZES = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16)
ODD = {3, 5, 9}
REFUSED = {  # every size of SIZES that is not listed must work
    Ring(): set(),
    BipartiteRing(): ODD,
    Complete(): set(),
    Star(): set(),
    Torus(): {2, 3, 5},
    Torus(rows=3): {2, 3, 4, 5, 8, 16},
    Exponential(): set(),
    OnePeerExponential(): set(),
    BipartiteExponential(): ODD,
}
POSSIBLE = [(one, n) for one, refused in REFUSED.items() for n in SIZES if n not in refused]
possible = pytest.mark.parametrize(("shape", "n"), POSSIBLE, ids=lambda one: str(one))
any_size = st.one_of(st.sampled_from([Ring(), Complete(), Star(), Exponential(), OnePeerExponential()]))


def reached_from(start: int, shape: Topology, n: int) -> set[int]:
    """The workers that learn of `start`'s model within a period, by following the messages."""
    reached, waiting = {start}, [start]
    while waiting:
        here = waiting.pop()
        new = {there for step in range(shape.period(n)) for there in shape.sends_to(here, n, step)} - reached
        reached |= new
        waiting += new
    return reached


@pytest.mark.parametrize("module", [topology, graph, custom, mixing])
def test_the_doctests_hold(module):
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("shape", REFUSED, ids=str)
def test_impossible_sizes_and_only_those_are_refused(shape):
    refused = set()
    for n in SIZES:
        try:
            shape.check(n)
        except UsageError:
            refused.add(n)
    assert refused == REFUSED[shape]


@possible
def test_everybody_hears_of_everybody(shape, n):
    assert all(reached_from(start, shape, n) == set(range(n)) for start in {0, n // 2, n - 1})


@possible
def test_neighbours_are_others_ascending_and_know_of_it(shape, n):
    for step in range(shape.period(n) + 1):
        for worker in range(n):
            neighbours = shape.neighbours(worker, n, step)
            assert list(neighbours) == sorted(set(neighbours) - {worker})
            assert set(neighbours) <= set(range(n))
            assert all(worker in shape.sends_to(other, n, step) for other in neighbours)
            assert all(worker in shape.partners(other, n, step) for other in shape.partners(worker, n, step))
        assert len(shape.edges(n, step)) == sum(len(shape.neighbours(w, n, step)) for w in range(n)) / (
            1 if shape.directed else 2
        )
        assert shape.edges(n, step) == shape.edges(n, step + shape.period(n))


@possible
def test_roles_are_a_bipartition_or_there_is_an_odd_cycle(shape, n):
    networkx = pytest.importorskip("networkx")
    roles = shape.bipartite_roles(n)
    both_ways = networkx.Graph()
    both_ways.add_nodes_from(range(n))
    for step in range(shape.period(n)):
        both_ways.add_edges_from(shape.edges(n, step))
    if roles is None:
        assert not networkx.is_bipartite(both_ways)
        return
    assert 0 in roles.passive
    assert roles.active | roles.passive == set(range(n))
    assert not roles.active & roles.passive
    assert all((one in roles.active) != (other in roles.active) for one, other in both_ways.edges)


@pytest.mark.parametrize("n", [2, 4, 6, 8, 12, 16])
@pytest.mark.parametrize("shape", [Ring(), BipartiteRing(), BipartiteExponential()], ids=str)
def test_odd_workers_are_active_on_even_circles(shape, n):
    assert shape.bipartite_roles(n).active == set(range(1, n, 2))


@given(st.integers(1, 300).map(lambda half: 2 * half))
def test_bipartite_exponential_never_has_an_even_hop(n):
    # A public implementation takes 2^0 + 1 = 2 as a hop, which lets two active workers wait for each other.
    neighbours = BipartiteExponential().neighbours(0, n)
    assert all(hop % 2 for hop in neighbours)
    reach = [1, *(2**i + 1 for i in range(1, 20) if 2**i <= n - 1)]
    assert set(neighbours) == {hop % n for hop in reach} | {-hop % n for hop in reach}


@pytest.mark.parametrize(("n", "degree"), [(2, 1), (4, 2), (8, 4), (16, 8), (32, 10), (64, 12), (128, 14)])
def test_degree_of_bipartite_exponential(n, degree):
    assert len(BipartiteExponential().neighbours(n - 1, n)) == degree


def test_bipartite_exponential_of_16_is_complete_bipartite():
    assert BipartiteExponential().neighbours(0, 16) == tuple(range(1, 16, 2))


@given(any_size, st.integers(1, 200), st.integers(0, 10**9), st.data())
def test_any_number_of_workers_and_any_step(shape, n, step, data):
    shape.check(n)
    worker = data.draw(st.integers(0, n - 1))
    neighbours = shape.neighbours(worker, n, step)
    assert worker not in neighbours
    assert bool(neighbours) == (n > 1)
    assert all(worker in shape.sends_to(other, n, step) for other in neighbours)


@given(st.integers(2, 12), st.integers(2, 12))
def test_torus_of_any_rows(rows, columns):
    n = rows * columns
    expected = (2 - (rows == 2)) + (2 - (columns == 2))
    assert Torus(rows=rows).shape(n) == (rows, columns)
    assert {len(Torus(rows=rows).neighbours(worker, n)) for worker in range(n)} == {expected}


def test_torus_is_as_square_as_possible():
    assert [Torus().shape(n) for n in (1, 4, 6, 12, 16, 9_999)] == [(1, 1), (2, 2), (2, 3), (3, 4), (4, 4), (99, 101)]


@pytest.mark.parametrize(
    ("shape", "n", "says"),
    [
        (BipartiteExponential(), 5, "bipartite-exponential needs an even number of workers, not 5: an odd cycle cannot be"),
        (BipartiteExponential(), 5, "Use 4 or 6 workers, or topology=exponential."),
        (BipartiteRing(), 3, "Use 2 or 4 workers, or topology=ring."),
        (Torus(), 5, "cannot arrange 5 workers, a prime number, .*: use 4 or 6 workers, or topology=ring."),
        (Torus(), 2, "use 4 workers"),
        (Torus(rows=3), 8, "cannot arrange 8 workers in 3 rows of equal length, .*: use 6 or 9 workers, or another number"),
        (Torus(rows=3), 3, "use 6 workers"),
        (Ring(), 0, "needs at least 1 worker, not 0"),
        (Torus(), -4, "needs at least 1 worker, not -4"),
    ],
)  # fmt: skip
def test_refusals_say_why_and_what_to_do(shape, n, says):
    with pytest.raises(UsageError, match=says):
        shape.check(n)


@given(
    st.integers(1, 300),
    st.sampled_from([Torus(), Torus(rows=2), Torus(rows=7), BipartiteRing(), BipartiteExponential()]),
)
def test_the_sizes_that_a_refusal_offers_are_possible(n, shape):
    try:
        shape.check(n)
    except UsageError as error:
        offered = [int(word) for word in str(error).replace(",", " ").rsplit("se ", 1)[1].split() if word.isdigit()]
        assert offered
        for size in offered:
            shape.check(size)


def test_a_torus_of_one_row_is_refused_at_once():
    with pytest.raises(UsageError, match="at least 2 rows, not 1; for 1 row use topology=ring"):
        Torus(rows=1)


def test_one_peer_exponential_says_where_it_is_not_exact():
    assert OnePeerExponential().caution(16) == OnePeerExponential().caution(1) == ""
    assert "Use 8 or 16 workers for exact averaging" in DPSGD(topology=OnePeerExponential()).caution(12)
    assert Ring().caution(12) == ""


def test_one_peer_exponential_sends_one_message_per_step():
    assert OnePeerExponential().period(12) == 4
    assert [OnePeerExponential().neighbours(10, 12, step) for step in range(5)] == [(11,), (0,), (2,), (6,), (11,)]


@pytest.mark.parametrize("shape", [*REFUSED, custom.Custom(links="0-1_1-2")], ids=str)
def test_specs_come_back(shape):
    assert topology_registry.build(topology_registry.spec(shape)) == shape


def test_an_algorithm_names_its_topology():
    @dataclass(frozen=True, kw_only=True)
    class Gossip:
        topology: Topology = field(default_factory=Ring)

    registry = Registry("algorithm", nested={Topology: topology_registry})
    registry.register("gossip", Gossip)
    assert registry.build("gossip(topology=bipartite-exponential)") == Gossip(topology=BipartiteExponential())
    assert registry.spec(Gossip(topology=Torus(rows=3))) == "gossip(topology=torus(rows=3))"
    with pytest.raises(UsageError, match="Did you mean 'ring'"):
        registry.build("gossip(topology=rings())")


@pytest.mark.parametrize("shape", [Ring(), BipartiteExponential(), Exponential(), Torus()], ids=str)
def test_ten_thousand_workers_cost_their_degrees(shape):
    shape.check(10_000)
    assert sum(len(shape.neighbours(worker, 10_000)) for worker in range(10_000)) < 10_000 * 32
