"""examples/char_gpt.py under methods of each family: does its loss on held-out text come out as with one worker?

    python benchmarks/small_gpt.py [--seeds 3] [--json FILE]

Every seed trains the same model with one worker, and then with 2 and 4 under each method, on as many samples in all: methods
in lockstep make as many updates, of batches as large, the others as many, each of one worker. Shown are medians over the seeds
of the loss, divided by one worker's of the same seed, and the range. Three methods are shown twice: with one worker's
learning rate and momentum, and with those that suit n workers; the page says why.

Nothing is timed: the machine may be busy. Takes some 45 minutes on two cores. With --json it keeps the losses in a file as
they come, and goes on with what is in there. Prints the table and writes benchmarks/results/small_gpt.md; ends with 1 where a
median of those that should be within 3 % is not.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import paceline as pl
from paceline.specs.file_loop import FileLoop
from paceline.system.machine import machine, versions

EXAMPLE = Path(__file__).parents[1] / "examples" / "char_gpt.py"
RESULTS = Path(__file__).with_name("results")
WORKERS = (2, 4)
BAR = 1.03


class Method(NamedTuple):
    """A row: an algorithm, what the loop sets for it, and whether it should come to the same as one worker.

    Args:
        algorithm: its spec.
        shown: by how much the learning rate is larger with n workers, in words.
        factor: the same as a function of n.
        momentum: AdamW's first beta.
    """

    algorithm: str
    shown: str
    factor: Callable[[int], float]
    momentum: float = 0.9
    is_judged: bool = True

    def run(self, workers: int, seed: int) -> str:
        """The name of one run."""
        return f"{self.algorithm}, rate times {self.shown}, momentum {self.momentum}, {workers} workers, seed {seed}"


ALONE = Method("sequential", "1", lambda n: 1.0)
METHODS = (
    Method("all-reduce", "1", lambda n: 1.0),
    Method("hogwild", "1", lambda n: 1.0),
    Method("parameter-server(mode=async)", "n", float, momentum=0.5),
    Method("local-sgd(period=2)", "√n", math.sqrt),
    Method("ad-psgd", "n", float),
    Method("parameter-server(mode=async)", "1", lambda n: 1.0, is_judged=False),
    Method("local-sgd", "1", lambda n: 1.0, is_judged=False),
    Method("ad-psgd", "1", lambda n: 1.0, is_judged=False),
)


def train(seed: int, rate: float, momentum: float, folder: str) -> None:
    """One worker, which writes down the loss of the model that it ends with."""
    module = sys.modules[FileLoop(EXAMPLE, "train").load().__module__]
    model = module.train(seed=seed, rate=rate * module.RATE, momentum=momentum)
    (Path(folder) / f"{os.getpid()}.json").write_text(json.dumps(module.validation_loss(model)))


def loss_of(method: Method, workers: int, seed: int) -> float:
    """On held-out text; of the worker whose model is worst, though all end with the same."""
    with tempfile.TemporaryDirectory() as folder:
        worker = partial(train, seed, method.factor(workers), method.momentum, folder)
        pl.launch(worker, workers=workers, algorithm=method.algorithm)
        return max(json.loads(one.read_text()) for one in Path(folder).iterdir())


def measure(seeds: int, file: Path | None) -> dict[str, float]:
    """The loss of every run, by its name."""
    losses: dict[str, float] = json.loads(file.read_text()) if file is not None and file.exists() else {}
    for seed in range(seeds):
        for method, workers in [(ALONE, 1), *((one, n) for one in METHODS for n in WORKERS)]:
            about = method.run(workers, seed)
            if about not in losses:
                losses[about] = loss_of(method, workers, seed)
                print(f"{about}: {losses[about]:.4f}", flush=True)
                if file is not None:
                    file.write_text(json.dumps(losses, indent=2) + "\n")
    return losses


def ratios(losses: dict[str, float], method: Method, workers: int, seeds: int) -> list[float]:
    """Losses divided by one worker's of the same seed."""
    return [losses[method.run(workers, seed)] / losses[ALONE.run(1, seed)] for seed in range(seeds)]


def table(losses: dict[str, float], seeds: int) -> str:
    """In Markdown."""
    rows = [
        "| method | learning rate, times one worker's | momentum | "
        + " | ".join(f"{n} workers" for n in WORKERS)
        + " |",
        "|---|---|---|" + "---|" * len(WORKERS),
    ]
    for method in METHODS:
        cells = []
        for n in WORKERS:
            found = ratios(losses, method, n, seeds)
            cells.append(f"{statistics.median(found):.3f} ({min(found):.3f} to {max(found):.3f})")
        rows.append(f"| `{method.algorithm}` | {method.shown} | {method.momentum} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def main() -> None:
    """Measures, prints and writes."""
    arguments = argparse.ArgumentParser(description="The small GPT by method.")
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--json", type=Path, help="where losses are kept, and looked for")
    given = arguments.parse_args()
    losses = measure(given.seeds, given.json)
    alone = [losses[ALONE.run(1, seed)] for seed in range(given.seeds)]
    host, used = machine(), versions()
    text = (
        "# The small GPT, by method\n\nLoss on held-out text, divided by that of one worker after as many samples: median of"
        f" {given.seeds} seeds, and the range. One worker comes to {statistics.median(alone):.3f} ({min(alone):.3f} to"
        f" {max(alone):.3f}) nats per character; chance is 4.6.\n\n{table(losses, given.seeds)}\n\n"
        "An average of n models undoes what only one of them has done. So `ad-psgd`, whose workers make 1/n of the steps each,"
        " needs n times the rate; `local-sgd`, whose workers make as many steps, each with 1/n of the batch, needs about √n"
        " times, as Adam divides by what noise there is, and averages that are not far apart. Gradients that n workers send to"
        " a server in turn are n - 1 steps late, which acts like a momentum of 1 - 1/n (Mitliagkas et al., 2016): the"
        " optimizer's own makes room for it, and the rate makes up for the smaller sum. The rows below these are what the loop"
        " comes to with one worker's settings.\n\n"
        f"{host['processor']}, {host['cores']} cores, {host['memory_gib']} GiB; Python {used['python']}, torch"
        f" {used['torch']}.\n\nMade by `python benchmarks/small_gpt.py`.\n"
    )
    print(f"\n{text}")
    if given.seeds >= 3:
        (RESULTS / "small_gpt.md").write_text(text)
    else:
        print("Not written: that takes at least 3 seeds.")
    judged = [one for one in METHODS if one.is_judged]
    if any(statistics.median(ratios(losses, one, n, given.seeds)) > BAR for one in judged for n in WORKERS):
        sys.exit(1)


if __name__ == "__main__":
    main()
