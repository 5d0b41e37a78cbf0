"""Embeddings at servers: rows that are looked up, whole tables with sparse gradients, and dense gradients, in turn, on clicks.

    python benchmarks/sparse_servers.py [--repeats 3] [--workers 4] [--steps 1200]

Downloads nothing. Prints tables and writes benchmarks/results/sparse_servers.md. All sides run the same loop on the same
batches: with large tables at the servers alone, the default; with whole tables at the workers, as in earlier versions (tables
count as large from a terabyte on); and with `sparse=False`. The dense side makes a twentieth of the steps, as its steps take
that much longer. Steps are counted between the moment when the last worker has made a tenth of its own and the moment when the
first one ends.

Bytes sent are from the run's record; bytes received are those of all answers, counted in the workers. Memory is the growth
of a worker's private resident memory (RssAnon) since before it built its model, as a share of the tables, at most of any
worker: at its last step, and the peak up to its first step.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader

import paceline as pl
from paceline.algorithms.server.client import Client
from paceline.system.machine import machine, versions
from paceline.system.pages import give_back_freed
from paceline.tasks.clicks import Recommender, clicks
from paceline.transport.wire import HEADER_BYTES

RESULTS = Path(__file__).parent / "results" / "sparse_servers.md"
ALGORITHMS = ("parameter-server(mode=async)", "downpour", "adaptive-revision")
BATCH_SIZE, SEED, ROW_BYTES, NUMBER_BYTES = 128, 0, 16 * 4, 4
LOOKED_UP, WHOLE, DENSE = "looked up", "whole", "dense"
TABLES = 1_000_000 * ROW_BYTES


def resident(what: str) -> int:
    """Bytes of this process's memory: RssAnon, private now; VmHWM, the most of all since `begin_peak`."""
    found = re.search(rf"^{what}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return 1024 * int(found[1]) if found is not None else 0


def begin_peak() -> None:
    """Makes VmHWM begin anew."""
    give_back_freed()
    Path("/proc/self/clear_refs").write_text("5")


def count_received(received: list[int]) -> Any:
    """Adds up the bytes of all answers that this process gets."""
    hear = Client._hear

    def counted(self: Client, shard: int, event: Any, request: Any) -> Any:
        received[0] += HEADER_BYTES + (event.message.x.nbytes if event.message.x is not None else 0)
        return hear(self, shard, event, request)

    return mock.patch.object(Client, "_hear", counted)


def train(folder: Path, *, side: str, steps: int) -> None:
    """One worker's loop; writes when its steps ended, how many rows they touched, and what they took."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    train_set, _ = clicks().load()
    order = torch.randperm(steps * BATCH_SIZE).tolist()  # here, as its megabytes are not the method's
    loader = DataLoader(torch.utils.data.Subset(train_set, order), BATCH_SIZE)
    begin_peak()
    before, before_all, peak, last, received = resident("RssAnon"), resident("VmHWM"), 0, 0, [0]
    model = Recommender()
    model.users.sparse = model.items.sparse = side != DENSE
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    ended_s, rows = [], 0
    with ExitStack() as changes:
        changes.enter_context(count_received(received))
        if side == WHOLE:
            changes.enter_context(mock.patch("paceline.loop.looked_up_tables.LEAST_BYTES", 1 << 40))
        worker = changes.enter_context(pl.attach(model, optimizer))
        for pairs, clicked in worker.batches(loader):
            if not peak:
                peak, received[0] = resident("VmHWM") - before_all, 0
            optimizer.zero_grad()
            binary_cross_entropy_with_logits(model(pairs), clicked).backward()
            optimizer.step()
            ended_s.append(time.monotonic())
            rows += sum(len(pairs[:, column].unique()) for column in (0, 1))
        last, of_steps = resident("RssAnon") - before, received[0]
    told = {"ended_s": ended_s, "rows": rows, "received": of_steps, "memory": last, "peak": peak}
    (folder / f"{worker.worker_id}.json").write_text(json.dumps(told))


def measured(algorithm: str | None, workers: int, steps: int, side: str) -> dict[str, float]:
    """Steps per second of all workers together; bytes sent and received in a step; the rows that a step touches; memory.

    Without an algorithm, one plain loop, without a launcher.
    """
    with tempfile.TemporaryDirectory() as folder:
        program = partial(train, Path(folder), side=side, steps=steps)
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
        "sent": float(result["bytes_per_step"] or 0.0),
        "received": sum(one["received"] for one in told) / made,
        "rows": sum(one["rows"] for one in told) / made,
        "memory": max(one["memory"] for one in told) / TABLES,
        "peak": max(one["peak"] for one in told) / TABLES,
    }


def tables(options: argparse.Namespace) -> list[str]:
    """Lines of Markdown; sides in turn, medians, and ratios of medians."""
    speeds = [
        "| algorithm | steps/s, rows looked up | whole tables | dense gradients | looked up : whole | looked up : dense |",
        "|---|---|---|---|---|---|",
    ]
    costs = [
        "| algorithm | tables at a worker | bytes sent per step | of these, rows and their numbers | bytes received per step |"
        " memory at the last step | peak up to the first step |",
        "|---|---|---|---|---|---|---|",
    ]
    for algorithm in ALGORITHMS:
        sides: dict[str, list[dict[str, float]]] = {LOOKED_UP: [], WHOLE: [], DENSE: []}
        for _ in range(options.repeats):
            for side, own in sides.items():
                steps = options.steps if side != DENSE else max(40, options.steps // 20)
                own.append(measured(algorithm, options.workers, steps, side))
                print(f"{algorithm}, {side}: {own[-1]}", flush=True)
        of = {side: {key: statistics.median(one[key] for one in own) for key in own[0]} for side, own in sides.items()}
        looked_up, whole, dense = (of[side]["steps_per_s"] for side in (LOOKED_UP, WHOLE, DENSE))
        speeds.append(
            f"| `{algorithm}` | {looked_up:.0f} | {whole:.0f} | {dense:.1f} | {looked_up / whole:.2f} |"
            f" {looked_up / dense:.0f} |"
        )
        for side, own in of.items():
            pushes = 2 if algorithm == "adaptive-revision" else 1  # with what it read of the sums of gradients
            numbers = 2 if side == LOOKED_UP else 1  # of a request, and of a push
            of_rows = own["rows"] * (pushes * ROW_BYTES + numbers * NUMBER_BYTES)
            costs.append(
                f"| `{algorithm}` | {side} | {own['sent']:,.0f} | {f'{of_rows:,.0f}' if side != DENSE else ''} |"
                f" {own['received']:,.0f} | {own['memory']:.1%} | {own['peak']:.0%} |"
            )
    return [*speeds, "", *costs]


def alternatives(options: argparse.Namespace) -> list[str]:
    """Lines of Markdown on what needs no servers: plain PyTorch with one worker, and workers that share one vector."""
    lines = ["| without servers, sparse | steps/s |", "|---|---|"]
    for what, algorithm, workers in (("one plain loop", None, 1), ("`hogwild`", "hogwild", options.workers)):
        own = [measured(algorithm, workers, options.steps, LOOKED_UP)["steps_per_s"] for _ in range(options.repeats)]
        lines.append(f"| {what} | {statistics.median(own):.0f} |")
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    """Measures all algorithms."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, metavar="N")
    parser.add_argument("--workers", type=int, default=4, metavar="N")
    parser.add_argument(
        "--steps", type=int, default=1200, metavar="N", help="of the sparse sides, all workers together"
    )
    options = parser.parse_args()
    about, with_ = machine(), versions()
    parameters = sum(one.numel() for one in Recommender().parameters())
    lines = [
        "# Embeddings at servers: rows that are looked up, whole tables, and dense gradients",
        "",
        f"Machine: {about['processor']}, {about['cores']} cores. Python {with_['python']}, PyTorch {with_['torch']}.",
        f"Command: `python benchmarks/sparse_servers.py --repeats {options.repeats} --workers {options.workers}"
        f" --steps {options.steps}`.",
        "",
        f"The task clicks: {parameters:,} parameters, nearly all in tables of 700,000 and 300,000 rows of 16; batches of"
        f" {BATCH_SIZE} pairs by Zipf's law. {options.workers} workers and a server on the machine's cores. Medians of"
        f" {options.repeats} runs each, in turn. *Looked up*: workers have only the rows that their model looks up. *Whole*:"
        " sparse gradients, and whole tables at the workers. *Dense*: `sparse=False`. Memory is what a worker's private"
        " resident memory has grown by since before it built its model, relative to the tables (64 MB), at the worker where it"
        " has grown most; the peak includes the model that the loop builds, and, at worker 0, the run's vector in shared"
        " memory. Bytes received are those of all answers after the first.",
        "",
        *tables(options),
        "",
        *alternatives(options),
    ]
    print("\n".join(lines))
    RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
