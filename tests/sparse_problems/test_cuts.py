"""Graph cuts: the paper's update, the projection, and a cut that is known."""

import numpy as np
import pytest

from paceline.errors import UsageError
from paceline.sparse.cuts import GraphCut, project
from paceline.sparse.team import Team, shuffle


def nearest_in_simplex(row):
    ordered = np.sort(row)[::-1]
    excess = (np.cumsum(ordered) - 1) / np.arange(1, len(row) + 1)
    return np.maximum(row - excess[np.flatnonzero(ordered > excess)[-1]], 0)


@pytest.mark.parametrize("labels", [2, 3, 5, 8])
def test_projection(labels):
    for row in np.random.default_rng(0).normal(0.3, 1.5, (100, labels)):
        x = row[None, :].copy()
        project(x, 0)
        np.testing.assert_allclose(x[0], nearest_in_simplex(row), atol=1e-12)


@pytest.mark.parametrize(
    "row",
    [[0.10000000785016755, 0.1, 1.0999999921498325], [0.06, 0.06, 0.06000000117311458, 1.0599999988268853, -0.06]],
)
def test_projection_ends_where_rounding_makes_labels_come_and_go(row):
    x = np.array([row])
    project(x, 0)
    np.testing.assert_allclose(x[0], nearest_in_simplex(np.array(row)), atol=1e-12)


def grid(side, rng):
    nodes = np.arange(side * side).reshape(side, side)
    edges = np.vstack(
        [
            np.column_stack([nodes[:, :-1].ravel(), nodes[:, 1:].ravel()]),
            np.column_stack([nodes[:-1].ravel(), nodes[1:].ravel()]),
        ]
    )
    columns = edges % side
    crossing = (columns.min(axis=1) == side // 2 - 1) & (columns.max(axis=1) == side // 2)
    return edges, np.where(crossing, 0.1, 1 + rng.random(len(edges))), nodes


def test_one_thread_equals_numpy():
    rng = np.random.default_rng(0)
    edges, weights, _ = grid(4, rng)
    given = {0: 0, 3: 1, 15: 2}
    with Team(1) as team:
        ours = GraphCut(edges, weights, 3, given, team, seed=5)
        x = ours.x.copy()
        ours.make_pass(0.3)
        ours.make_pass(0.1)
    again = GraphCut(edges, weights, 3, given, team, seed=5)
    for eta in (0.3, 0.1):
        for edge in order_of(again):
            u, v = edges[edge]
            move = eta * weights[edge] * np.sign(x[u] - x[v])
            if u not in given:
                x[u] = nearest_in_simplex(x[u] - move)
            if v not in given:
                x[v] = nearest_in_simplex(x[v] + move)
        again.passes.append(None)
    np.testing.assert_allclose(ours.x, x, atol=1e-9)


def order_of(problem):
    shuffle(problem._order, problem._seed * 1_000_003 + len(problem.passes))
    return problem._order


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_light_edges_are_cut(threads):
    edges, weights, nodes = grid(20, np.random.default_rng(1))
    given = dict.fromkeys(nodes[:, 0].tolist(), 0) | dict.fromkeys(nodes[:, -1].tolist(), 1)
    with Team(threads) as team:
        problem = GraphCut(edges, weights, 2, given, team)
        for number in range(60):
            problem.make_pass(0.3 * 0.93**number)
    assert (problem.x.argmax(axis=1).reshape(20, 20) == (np.arange(20) >= 10)).all()
    assert problem.x.sum(axis=1) == pytest.approx(1)
    problem.x = np.eye(2)[problem.x.argmax(axis=1)]
    assert problem.objective() == pytest.approx(2 * 0.1 * 20)  # both labels of the 20 light edges


def test_a_row_that_two_threads_wrote_at_once_is_in_the_simplex_after_the_pass():
    with Team(1) as team:
        problem = GraphCut(np.array([[0, 1]]), np.array([1.0]), 2, {}, team, nodes=3)
        problem.x[2] = 0.998, 0.0  # no edge of this pass repairs it
        problem.make_pass(0.1)
    assert problem.x[2] == pytest.approx([0.999, 0.001])


def test_bad_graphs_are_refused():
    with Team(1) as team:
        for edges, weights, labels, given, words in (
            ([[0, 1, 2]], [1.0], 2, {}, "pairs"),
            ([[0, 5]], [1.0], 2, {9: 0}, "given must map"),
            ([[0, 1]], [0.0], 2, {}, "above 0"),
            ([[-1, 1]], [1.0], 2, {}, "join nodes"),
        ):
            with pytest.raises(UsageError, match=words):
                GraphCut(np.array(edges), np.array(weights), labels, given, team)
