"""Embeddings at servers: sparse gradients next to dense ones, in turn, on the task clicks.

    python benchmarks/sparse_servers.py [--repeats 3] [--workers 4] [--steps 1200]

Downloads nothing. Prints a table and writes benchmarks/results/sparse_servers.md. Both sides run the same loop on the same
batches; only `sparse=` of the embeddings differs. The dense side makes a twentieth of the steps, as its steps take that much
longer. Steps are counted between the moment when the last worker has made a tenth of its own and the moment when the first one
ends. Bytes are what workers send, from the run's record, beside what the rows and their numbers alone would take.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader

import paceline as pl
from paceline.system.machine import machine, versions
from paceline.tasks.clicks import Recommender, clicks

RESULTS = Path(__file__).parent / "results" / "sparse_servers.md"
ALGORITHMS = ("parameter-server(mode=async)", "downpour", "adaptive-revision")
BATCH_SIZE, SEED, ROW_BYTES, NUMBER_BYTES = 128, 0, 16 * 4, 4


def train(folder: Path, *, sparse: bool, steps: int) -> None:
    """One worker's loop; writes when its steps ended, and how many rows they touched."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    model = Recommender()
    model.users.sparse = model.items.sparse = sparse
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    train_set, _ = clicks().load()
    loader = DataLoader(torch.utils.data.Subset(train_set, range(steps * BATCH_SIZE)), BATCH_SIZE, shuffle=True)
    ended_s, rows = [], 0
    with pl.attach(model, optimizer) as worker:
        for pairs, clicked in worker.batches(loader):
            optimizer.zero_grad()
            binary_cross_entropy_with_logits(model(pairs), clicked).backward()
            optimizer.step()
            ended_s.append(time.monotonic())
            rows += sum(len(pairs[:, column].unique()) for column in (0, 1))
    (folder / f"{worker.worker_id}.json").write_text(json.dumps({"ended_s": ended_s, "rows": rows}))


def measured(algorithm: str | None, workers: int, steps: int, *, sparse: bool) -> dict[str, float]:
    """Steps per second of all workers together; bytes that a worker sends in a step; the rows that a step touches.

    Without an algorithm, one plain loop, without a launcher.
    """
    with tempfile.TemporaryDirectory() as folder:
        program = partial(train, Path(folder), sparse=sparse, steps=steps)
        result = {"bytes_per_step": 0.0}
        if algorithm is None:
            program()
        else:
            result = pl.launch(program, workers=workers, algorithm=algorithm).result
        told = [json.loads(path.read_text()) for path in Path(folder).iterdir()]
    begun_s = max(one["ended_s"][len(one["ended_s"]) // 10] for one in told)
    over_s = min(one["ended_s"][-1] for one in told)
    counted = sum(begun_s < at <= over_s for one in told for at in one["ended_s"])
    made = sum(len(one["ended_s"]) for one in told)
    return {
        "steps_per_s": counted / (over_s - begun_s),
        "bytes": float(result["bytes_per_step"] or 0.0),
        "rows": sum(one["rows"] for one in told) / made,
    }


def table(options: argparse.Namespace) -> list[str]:
    """Lines of Markdown; sides in turn, ratios of medians."""
    lines = [
        "| algorithm | steps/s, sparse | steps/s, dense | ratio | bytes per step, sparse | bytes of rows and their numbers |"
        " bytes per step, dense | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for algorithm in ALGORITHMS:
        sides: dict[bool, list[dict[str, float]]] = {True: [], False: []}
        for _ in range(options.repeats):
            for sparse, own in sides.items():
                steps = options.steps if sparse else max(40, options.steps // 20)
                own.append(measured(algorithm, options.workers, steps, sparse=sparse))
                print(f"{algorithm} sparse={sparse}: {own[-1]['steps_per_s']:.1f} steps/s", flush=True)
        ours, dense = (
            {key: statistics.median(one[key] for one in own) for key in own[0]} for own in (sides[True], sides[False])
        )
        pushes = 2 if algorithm == "adaptive-revision" else 1  # with what it read of the sums of gradients
        of_rows = ours["rows"] * (pushes * ROW_BYTES + NUMBER_BYTES)
        lines.append(
            f"| `{algorithm}` | {ours['steps_per_s']:.0f} | {dense['steps_per_s']:.1f} |"
            f" {ours['steps_per_s'] / dense['steps_per_s']:.0f} | {ours['bytes']:,.0f} | {of_rows:,.0f} |"
            f" {dense['bytes']:,.0f} | {dense['bytes'] / ours['bytes']:,.0f} |"
        )
    return lines


def alternatives(options: argparse.Namespace) -> list[str]:
    """Lines of Markdown on what needs no servers: plain PyTorch with one worker, and workers that share one vector."""
    lines = ["| without servers, sparse | steps/s |", "|---|---|"]
    for what, algorithm, workers in (("one plain loop", None, 1), ("`hogwild`", "hogwild", options.workers)):
        own = [measured(algorithm, workers, options.steps, sparse=True)["steps_per_s"] for _ in range(options.repeats)]
        lines.append(f"| {what} | {statistics.median(own):.0f} |")
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    """Measures all algorithms."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, metavar="N")
    parser.add_argument("--workers", type=int, default=4, metavar="N")
    parser.add_argument("--steps", type=int, default=1200, metavar="N", help="of the sparse side, all workers together")
    options = parser.parse_args()
    about, with_ = machine(), versions()
    parameters = sum(one.numel() for one in Recommender().parameters())
    lines = [
        "# Embeddings at servers: sparse gradients next to dense ones",
        "",
        f"Machine: {about['processor']}, {about['cores']} cores. Python {with_['python']}, PyTorch {with_['torch']}.",
        f"Command: `python benchmarks/sparse_servers.py --repeats {options.repeats} --workers {options.workers}"
        f" --steps {options.steps}`.",
        "",
        f"The task clicks: {parameters:,} parameters, nearly all in tables of 700,000 and 300,000 rows of 16; batches of"
        f" {BATCH_SIZE} pairs by Zipf's law. {options.workers} workers and a server on the machine's cores. Medians of"
        f" {options.repeats} runs each, in turn. Bytes are those that a worker sends; answers come on top, with the rows that"
        " any worker has changed meanwhile.",
        "",
        *table(options),
        "",
        *alternatives(options),
    ]
    print("\n".join(lines))
    RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
