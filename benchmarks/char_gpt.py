"""examples/char_gpt.py under methods of each family: does its loss on held-out text come out as with one worker?

    python benchmarks/char_gpt.py [--seeds 3]

Every seed trains the same model with one worker, and then with 2 and 4 under each method, on as many samples in all: methods
in lockstep make as many updates, of batches as large, the others as many, each of one worker. Shown are medians over the seeds
of the loss, divided by one worker's of the same seed, and the range. Nothing is timed: the machine may be busy. Takes half an
hour on two cores. Prints the table and writes benchmarks/results/char_gpt.md; ends with 1 where a median is above 1.03.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path

import paceline as pl
from paceline.loops import FileLoop
from paceline.system import machine, versions

EXAMPLE = Path(__file__).parents[1] / "examples" / "char_gpt.py"
RESULTS = Path(__file__).with_name("results")
METHODS = ("all-reduce", "local-sgd", "hogwild", "parameter-server(mode=async)", "ad-psgd")
BAR = 1.03


def train(seed: int, iterations: int | None, folder: str) -> None:
    """One worker, which writes down the loss of the model that it ends with."""
    module = sys.modules[FileLoop(EXAMPLE, "train").load().__module__]
    model = module.train(iterations or module.ITERATIONS, seed)
    loss = module.validation_loss(model)
    (Path(folder) / f"{os.getpid()}.json").write_text(json.dumps(loss))


def loss_of(algorithm: str, workers: int, seed: int, iterations: int | None) -> float:
    """On held-out text; of the worker whose model is worst, though all end with the same."""
    with tempfile.TemporaryDirectory() as folder:
        pl.launch(partial(train, seed, iterations, folder), workers=workers, algorithm=algorithm)
        return max(json.loads(one.read_text()) for one in Path(folder).iterdir())


def measure(seeds: int, workers: list[int], iterations: int | None) -> dict[str, list[float]]:
    """Losses of one worker, and of so many under each method, by seed."""
    losses: dict[str, list[float]] = {}
    for seed in range(seeds):
        runs = [
            ("one worker", "sequential", 1),
            *((f"{method}, {n}", method, n) for method in METHODS for n in workers),
        ]
        for name, algorithm, n in runs:
            losses.setdefault(name, []).append(loss_of(algorithm, n, seed, iterations))
            print(f"seed {seed}: {name}: {losses[name][-1]:.4f}", flush=True)
    return losses


def ratios(losses: dict[str, list[float]], name: str) -> list[float]:
    """Losses divided by one worker's of the same seed."""
    return [own / alone for own, alone in zip(losses[name], losses["one worker"], strict=True)]


def table(losses: dict[str, list[float]], workers: list[int]) -> str:
    """In Markdown."""
    rows = [
        "| method | " + " | ".join(f"{n} workers" for n in workers) + " |",
        "|---|" + "---|" * len(workers),
    ]
    for method in METHODS:
        cells = []
        for n in workers:
            found = ratios(losses, f"{method}, {n}")
            cells.append(f"{statistics.median(found):.3f} ({min(found):.3f} to {max(found):.3f})")
        rows.append(f"| `{method}` | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def main() -> None:
    """Measures, prints and writes."""
    arguments = argparse.ArgumentParser(description="The small GPT by method.")
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    arguments.add_argument("--iterations", type=int, help="in place of the example's own")
    arguments.add_argument("--json", type=Path, help="a file for the losses, in place of the page")
    given = arguments.parse_args()
    losses = measure(given.seeds, given.workers, given.iterations)
    shown = table(losses, given.workers)
    alone, host, used = losses["one worker"], machine(), versions()
    text = (
        "# The small GPT, by method\n\nLoss on held-out text, divided by that of one worker after as many samples: median of"
        f" {given.seeds} seeds, and the range. One worker comes to {statistics.median(alone):.3f} ({min(alone):.3f} to"
        f" {max(alone):.3f}) nats per character; chance is 4.6.\n\n{shown}\n\n"
        f"{host['processor']}, {host['cores']} cores, {host['memory_gib']} GiB; Python {used['python']}, torch"
        f" {used['torch']}.\n\nMade by `python benchmarks/char_gpt.py`.\n"
    )
    print(f"\n{text}")
    if given.json is not None:
        given.json.write_text(json.dumps(losses, indent=2) + "\n")
    elif given.seeds >= 3 and given.iterations is None and given.workers == [2, 4]:
        (RESULTS / "char_gpt.md").write_text(text)
    else:
        print("Not written: that takes at least 3 seeds, the example's own iterations, and 2 and 4 workers.")
    if any(statistics.median(ratios(losses, name)) > BAR for name in losses):
        sys.exit(1)


if __name__ == "__main__":
    main()
