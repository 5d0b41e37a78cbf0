"""All-reduce by messages against Gloo's, between processes of one machine: the same vectors, in turn, in one run.

    python benchmarks/message_collectives.py [--pairs 15] [--workers 2,4]

Prints a table and writes benchmarks/results/message_collectives.md. Ours are the collectives of workers that join a run
(`paceline launch -- SCRIPT.py`), over Unix sockets: each round ends by votes, keeps its input until then, and goes on without
a dead worker. Gloo does none of that. 40 MB travel in buckets of 1 MiB, all of which are started before the first wait, as
while backward computes, and as one vector. Nothing computes meanwhile.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from paceline.run.launch_script import KEEP_FREED_MEMORY
from paceline.system.machine import machine, versions
from paceline.transport.mailbox import ZmqMailbox
from paceline.transport.message_collectives import MessageCollectives

RESULTS = Path(__file__).parent / "results"
DEADLINE_S = 60.0
BUCKET = 1 << 18  # float32 elements
CASES = {"38 buckets of 1 MiB": ([BUCKET] * 38, 1.0), "one vector of 40 MB": ([10_000_000], 1.25)}
ROUNDS, WARM_UP = 4, 2  # of a burst; warm-ups before the first


def sum_by_messages(collectives: MessageCollectives, vectors: Sequence[torch.Tensor]) -> None:
    """Each vector becomes the sum over all workers."""
    for handle in [collectives.start_all_reduce(one) for one in vectors]:
        handle.wait()


def sum_by_gloo(vectors: Sequence[torch.Tensor]) -> None:
    """The same."""
    for work in [dist.all_reduce(one, async_op=True) for one in vectors]:
        work.wait()


def measure(rank: int, workers: int, port: int, pairs: int, found: Any) -> None:
    """One worker; the first puts each case's pairs of seconds, ours and Gloo's, into `found`."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=dist.PrefixStore("gloo", store), rank=rank, world_size=workers)
    with ZmqMailbox(dist.PrefixStore("ours", store), rank, workers) as mailbox:
        mailbox.connect(DEADLINE_S)
        collectives = MessageCollectives(mailbox, rank, workers, ends=mailbox.ends)
        for case, (sizes, _) in CASES.items():
            vectors = [torch.empty(size) for size in sizes]
            ours, gloo = partial(sum_by_messages, collectives, vectors), partial(sum_by_gloo, vectors)
            for one in (ours, gloo):
                burst_s(one, vectors, rank, workers, WARM_UP)
            times_s = []
            for number in range(pairs):
                order = (ours, gloo) if number % 2 else (gloo, ours)
                took_s = {one: burst_s(one, vectors, rank, workers, ROUNDS) for one in order}
                times_s.append((took_s[ours], took_s[gloo]))
            if not rank:
                found.put((case, times_s))
        collectives.leave()
    dist.destroy_process_group()


def burst_s(add_up: Callable[[], None], vectors: Sequence[torch.Tensor], rank: int, workers: int, rounds: int) -> float:
    """The median seconds of a round; all workers begin each one together."""
    took_s = []
    for _ in range(rounds):
        for one in vectors:
            one.fill_(rank + 1)
        dist.barrier()
        begun_s = time.perf_counter()
        add_up()
        took_s.append(time.perf_counter() - begun_s)
        assert all(one[0] == one[-1] == workers * (workers + 1) / 2 for one in vectors)
    return statistics.median(took_s)


def rows_of(workers: int, pairs: int) -> list[str]:
    """The table's rows for a number of workers."""
    context = get_context("spawn")
    os.environ.update(KEEP_FREED_MEMORY)
    found = context.Queue()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        context.Process(target=measure, args=(rank, workers, store.port, pairs, found)) for rank in range(workers)
    ]
    for one in processes:
        one.start()
    times_s = dict(found.get(timeout=600) for _ in CASES)
    for one in processes:
        one.join()
    rows = []
    for case, (_, target) in CASES.items():
        ours_ms, gloo_ms = (statistics.median(one) * 1e3 for one in zip(*times_s[case], strict=True))
        ratios = [ours / gloo for ours, gloo in times_s[case]]
        low, high = np.percentile(ratios, [25, 75])
        ratio = f"**{statistics.median(ratios):.2f}** ({low:.2f} to {high:.2f})"
        rows.append(f"| {workers} | {case} | {ours_ms:.1f} | {gloo_ms:.1f} | {ratio} | {target:g} |")
    return rows


def main() -> None:
    """Measures and writes the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=15, help="interleaved pairs of bursts per ratio (default 15)")
    parser.add_argument("--workers", default="2,4", help="numbers of workers, separated by commas (default 2,4)")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    rows = [row for workers in arguments.workers.split(",") for row in rows_of(int(workers), arguments.pairs)]
    about, used = machine(), versions()
    page = [
        "# All-reduce by messages against Gloo",
        "",
        f"Machine: {about['processor']}, {about['cores']} cores, load {load:.1f} at the start."
        f" Python {used['python']}, PyTorch {used['torch']}.",
        f"Command: `python benchmarks/message_collectives.py --pairs {arguments.pairs} --workers {arguments.workers}`.",
        "A message is packed, copied by ZeroMQ, added up and copied out, and the input is kept until all have voted. All"
        " processes keep freed memory, as `paceline launch` makes its workers do. Processes of one machine, Unix sockets"
        " beside Gloo's TCP. Milliseconds, medians over interleaved pairs of bursts, in brackets the middle half of the"
        " ratios; less is better.",
        "",
        "| workers | vectors | messages | Gloo | ratio | target |",
        "|---|---|---|---|---|---|",
        *rows,
    ]
    print("\n".join(page))
    (RESULTS / "message_collectives.md").write_text("\n".join(page) + "\n")


if __name__ == "__main__":
    main()
