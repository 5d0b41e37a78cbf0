"""How fast random pair-averages agree: measured by running them, next to the closed forms, per n updates.

python benchmarks/fidelity/contraction.py
"""

from __future__ import annotations

import math

from mixing import expected_contraction, measure_contraction
from page import show

from paceline.algorithms.topology import BipartiteExponential, Complete, Ring, Topology

SIZES = (4, 8, 16, 32, 64, 128)
GRAPHS: tuple[tuple[str, Topology], ...] = (
    ("ring", Ring()),
    ("bipartite exponential", BipartiteExponential()),
    ("complete", Complete()),
)


def closed_form(name: str, n: int) -> float | None:
    """Contraction n (1 - rho) of a ring, 1 - cos(2 pi / n), and of a complete graph, n / (n - 1)."""
    return {"ring": 1 - math.cos(2 * math.pi / n), "complete": n / (n - 1)}.get(name)


def measured(topology: Topology, n: int) -> tuple[float, float]:
    """Contraction n (1 - rho), and its standard error, from what is left after so many updates that about half is."""
    updates = max(1, round(0.7 / expected_contraction(topology, n)))
    left = measure_contraction(topology, n, num_updates=updates, num_runs=4_000, seed=1)
    rho = left.remaining ** (1 / updates)
    return n * (1 - rho), n * rho * left.standard_error / left.remaining / updates


def main() -> None:
    """Print the table as markdown."""
    lines = ["# Contraction of pairwise averaging", "", "Printed by `python benchmarks/fidelity/contraction.py`.", ""]
    lines += [
        "n (1 - rho), the contraction per n updates; +- one standard error. Without a closed form the eigenvalue stands.",
        "",
    ]
    lines += ["| n | " + " | ".join(f"{name}: measured | expected" for name, _ in GRAPHS) + " |"]
    lines += ["|---" * (1 + 2 * len(GRAPHS)) + "|"]
    for n in SIZES:
        cells = []
        for name, topology in GRAPHS:
            value, error = measured(topology, n)
            form = closed_form(name, n)
            expected = form if form is not None else n * expected_contraction(topology, n)
            cells += [f"{value:.4f} +- {error:.4f}", f"{expected:.4f}"]
        lines.append(f"| {n} | " + " | ".join(cells) + " |")
    show(lines, __file__)


if __name__ == "__main__":
    main()
