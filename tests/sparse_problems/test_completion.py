"""Matrix completion: the paper's update, and what it finds."""

import numpy as np
import pytest
from scipy import sparse

from paceline.sklearn import HogwildMatrixFactorization
from paceline.sparse.completion import Completion
from paceline.sparse.rows import rows_of
from paceline.sparse.team import Team


def low_rank(users=300, items=120, rank=3, known=0.5, seed=0, noise=0.0):
    rng = np.random.default_rng(seed)
    full = 3 + rng.standard_normal((users, rank)) @ rng.standard_normal((rank, items))
    full += noise * rng.standard_normal(full.shape)
    mask = rng.random(full.shape) < known
    return full, sparse.csr_matrix(np.where(mask, full, 0)), mask


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("dense", [True, False])
def test_one_thread_equals_numpy(biased, dense):
    full, matrix, _ = low_rank(12, 7, known=0.6)
    with Team(1) as team:
        rows = rows_of(full if dense else matrix)
        ours = Completion(rows, 7, 2, alpha=0.3, biased=biased, team=team, seed=1, spread=0.2)
        left, right = ours.factors.rows.copy(), ours.factors.columns.copy()
        of_row, of_column = np.zeros(12), np.zeros(7)
        made = ours.make_pass(0.05)
    z = full if dense else matrix.toarray()
    known = np.ones_like(full, bool) if dense else z != 0
    values = z[known]
    centre = values.mean() if biased else 0.0
    unit = values.std() if biased else np.sqrt((values**2).mean())
    squares = 0.0
    for u in ours._order:
        for v in np.flatnonzero(known[u]):
            error = (z[u, v] - centre) / unit - of_row[u] - of_column[v] - left[u] @ right[v]
            squares += error**2
            keep_row, keep_column = 1 - 0.05 * 0.3 / known[u].sum(), 1 - 0.05 * 0.3 / known[:, v].sum()
            left[u], right[v] = (
                keep_row * left[u] + 0.05 * error * right[v],
                keep_column * right[v] + 0.05 * error * left[u],
            )
            if biased:
                of_row[u] = keep_row * of_row[u] + 0.05 * error
                of_column[v] = keep_column * of_column[v] + 0.05 * error
    np.testing.assert_allclose(ours.factors.rows, left, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(ours.factors.columns, right, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(ours.factors.column_biases, of_column, rtol=1e-9, atol=1e-12)
    assert made.loss == pytest.approx(unit * np.sqrt(squares / known.sum()))


def test_entries_that_were_not_seen_are_found_by_one_thread_and_by_two():
    full, matrix, mask = low_rank(600, 200)
    rows, columns = np.nonzero(~mask)
    errors = []
    for threads in (1, 2):
        fit = HogwildMatrixFactorization(4, eta0=0.1, max_iter=60, tol=None, n_jobs=threads, random_state=0).fit(matrix)
        assert fit.n_threads_ == threads
        errors.append(np.sqrt(((fit.predict_entries(rows, columns) - full[rows, columns]) ** 2).mean()))
    assert max(errors) < 0.1 * full.std()


def test_new_rows_are_solved_for():
    full, _, _ = low_rank(known=1.0)
    fit = HogwildMatrixFactorization(4, eta0=0.1, max_iter=60, tol=None, alpha=0.1, random_state=0).fit(full[:250])
    found = fit.transform(sparse.csr_matrix(full[250:]))
    assert found.shape == (50, 4)
    rebuilt = found @ fit.components_ + fit.mean_ + fit.column_biases_
    centred = (full[250:] - rebuilt) - (full[250:] - rebuilt).mean(axis=1, keepdims=True)  # less the new rows' biases
    assert centred.std() < 0.1 * full.std()


def test_deterministic_fits_have_the_same_bits_for_any_number_of_threads():
    _, matrix, _ = low_rank(600, 200)
    fits = [
        HogwildMatrixFactorization(4, max_iter=3, n_jobs=n, random_state=2, deterministic=True).fit(matrix)
        for n in (1, 2, 3)
    ]
    assert len({fit.components_.tobytes() for fit in fits}) == 1
