"""One fit of a library that has an environment of its own; run by `sparse_peers.py` with that environment's Python.

    python peer_fits.py snapml-log|snapml-svm|libmf FILE.npz

Prints a line of JSON: seconds of the fit, and version; writes test scores to FILE.npy. LIBMF prints its test errors.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version

import numpy as np
from scipy import sparse

THREADS = 2


def main() -> None:
    """Fit, predict the test part, report."""
    name, path = sys.argv[1:]
    with np.load(path) as held:
        data = {key: held[key] for key in held.files}
    if name == "libmf":
        from libmf import mf

        # Its `fit` and `predict` do not belong together (version 0.9.2: the error on its own data grows with passes), so
        # its test error is what its training loop prints.
        known, held_out = (
            np.column_stack([data[prefix + field] for field in ("users", "items", "ratings")]).astype(np.float32)
            for prefix in ("", "test_")
        )
        made = mf.MF(
            k=int(data["rank"]), nr_threads=THREADS, nr_iters=int(data["passes"]), quiet=False, eta=float(data["eta"]),
            lambda_p2=float(data["penalty"]), lambda_q2=float(data["penalty"]), lambda_p1=0.0, lambda_q1=0.0,
        )  # fmt: skip
        began_s = time.perf_counter()
        made.mf_train_test(known, held_out)
        seconds, scores = time.perf_counter() - began_s, np.zeros(0)
    else:
        import snapml

        X, X_test = (
            sparse.csr_matrix((data[p + "data"], data[p + "indices"], data[p + "indptr"]), shape=data[p + "shape"])
            for p in ("", "test_")
        )
        kind = snapml.LogisticRegression if name == "snapml-log" else snapml.SupportVectorMachine
        made = kind(n_jobs=THREADS, regularizer=1.0, fit_intercept=True)
        began_s = time.perf_counter()
        made.fit(X, data["y"])
        seconds = time.perf_counter() - began_s
        scores = X_test @ np.ravel(made.coef_) + float(np.ravel(made.intercept_)[0])
    np.save(path + ".npy", scores)
    print("\n" + json.dumps({"seconds": seconds, "version": version(name.partition("-")[0])}))


if __name__ == "__main__":
    main()
