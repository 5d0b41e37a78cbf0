import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from algorithms.topology.mixing_analysis import check_doubly_stochastic, mixing_matrix, spectral_gap
from paceline.algorithms.topology import Custom, topology_registry
from paceline.errors import UsageError


@st.composite
def connected_edges(draw):
    """A random tree on 2 to 12 workers, and more edges."""
    n = draw(st.integers(2, 12))
    tree = [(draw(st.integers(0, worker - 1)), worker) for worker in range(1, n)]
    worker = st.integers(0, n - 1)
    more = draw(st.lists(st.tuples(worker, worker).filter(lambda pair: pair[0] != pair[1]), max_size=20))
    return draw(st.permutations(tree + more))


@given(connected_edges())
def test_any_connected_graph_mixes(edges):
    shape = Custom.of(edges)
    n = shape.num_nodes
    shape.check(n)
    assert set(shape.edges(n)) == {(min(edge), max(edge)) for edge in edges}
    W = mixing_matrix(shape, n)
    check_doubly_stochastic(W)
    assert np.array_equal(W, W.T)
    assert spectral_gap(W) > 1e-3
    assert topology_registry.build(topology_registry.spec(shape)) == shape == pickle.loads(pickle.dumps(shape))


def test_a_networkx_graph_and_its_edges_are_the_same():
    networkx = pytest.importorskip("networkx")
    karate = networkx.karate_club_graph()
    shape = Custom.of(karate)
    assert shape == Custom.of(list(karate.edges())) == Custom.of(networkx.MultiGraph(karate))
    assert all(shape.neighbours(worker, 34) == tuple(sorted(karate[worker])) for worker in karate)
    assert Custom.of(networkx.hypercube_graph(2).__class__([(0, 1)])).num_nodes == 2


def test_numpy_edges():
    assert Custom.of(np.array([[1, 0], [2, 1]])) == Custom(links="0-1_1-2")


def test_networkx_graphs_that_cannot_be_used():
    networkx = pytest.importorskip("networkx")
    with pytest.raises(UsageError, match=r"to_undirected\(\)"):
        Custom.of(networkx.DiGraph([(0, 1)]))
    with pytest.raises(UsageError, match="convert_node_labels_to_integers"):
        Custom.of(networkx.grid_2d_graph(2, 2))
    with pytest.raises(UsageError, match="3 nodes must be the worker ids 0 to 2: relabel"):
        Custom.of(networkx.path_graph([1, 2, 3]))
    graph = networkx.path_graph(3)
    graph.add_node(3)
    with pytest.raises(UsageError, match="no edge reaches worker 3"):
        Custom.of(graph)


@pytest.mark.parametrize(
    ("edges", "says"),
    [
        ([], "has no edges"),
        ([(0, 1), (2, 2), (1, 2)], "joins worker 2 to itself"),
        ([(0, 1), (2, 3)], "not connected: it has too few edges"),
        ([(0, 1), (1, 2), (0, 2), (3, 4)], "worker 3 cannot be reached from worker 0"),
        ([(0, 1), (1, 10**12)], "no edge reaches worker 2, but the ids go up to 1000000000000"),
        ([(0, -1)], "start at 0"),
        ([(0, 1.5)], "relabel the nodes"),
        ([("a", "b")], "relabel the nodes"),
        ([(0, 1, 2)], "relabel the nodes"),
        ([3], "relabel the nodes"),
    ],
)
def test_edges_that_cannot_be_used(edges, says):
    with pytest.raises(UsageError, match=says):
        Custom.of(edges)


@pytest.mark.parametrize("links", ["", "0", "0-1_", "0-1,1-2", "a-b", "0--1", "0-1__1-2"])
def test_text_that_is_no_graph(links):
    with pytest.raises(UsageError, match="such as 0-1_1-2"):
        Custom(links=links)


def test_it_is_for_exactly_its_nodes():
    with pytest.raises(UsageError, match="has 3 nodes and cannot join 4 workers: use 3 workers"):
        Custom(links="0-1_1-2").check(4)


def test_roles():
    assert Custom(links="0-1_1-2_2-3_0-3").bipartite_roles(4).active == {1, 3}
    assert Custom(links="0-1_1-2_0-2").bipartite_roles(3) is None
