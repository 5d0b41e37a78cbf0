"""The thesis's four studies in its size, simulated: memory, batch and step, staleness, back-off; next to what is published.

    python benchmarks/fidelity/thesis.py --runs FOLDER

Published, as shape: Bäckström, Walulya, Papatriantafilou, Tsigas, "Consistent Lock-free Parallel Stochastic Gradient Descent
for Fast and Stable Convergence", IPDPS 2021, arXiv:2102.09032; Ek, Chalmers 2021. Takes about ten minutes on one core; with
--runs it goes on where it was stopped. `thesis_model.py` has the machine, `thesis_studies.py` the settings.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import thesis_studies as studies
import torch
from thesis_model import CORE_BYTES_PER_S, CPP, JITTER, SOCKET_BYTES_PER_S, TORCH, Runs

from paceline.simulator import Sockets

VERDICTS = {True: "holds", None: "holds in part", False: "does not hold", studies.BY_CONSTRUCTION: "by construction"}
MUST = (
    studies.MORE_WORKERS,
    studies.LARGER_STEPS,
    studies.GROWS,
    studies.FALLS_AFTER,
    studies.NEAR_LAW,
    studies.BOUND,
)
WHY_LOCKS = (
    "Unbounded, it alone reaches 10 and 5 % with 68 workers at the larger step, though its staleness is no lower on"
    " average; it is spread much wider (retries favour some), and our guess is that training bears that better. It"
    " loses where updates per second count: at this batch 68 workers want more updates than can be published one at a"
    " time, and then the retries of all, which come from memory and not from caches, starve the one that succeeds;"
    " bounds drop gradients instead. That is the cause: with ten times the bandwidth unbounded leashed makes more"
    " updates than the locks do (table below). The model was not changed for it. At batch 512 nobody waits (i), and"
    " without drops all methods are equally fast. One seed: differences below a fifth say nothing."
)
WHY_HOGWILD = (
    "At the larger step with 68 workers Hogwild! does not come to 50 % and leashed does. Else it is sooner, for it makes"
    " the most updates per second: the model has no cost for cache lines that its writers take from each other, and no"
    " additions that are lost; its views are torn, block by block."
)
WHY = {
    f"{studies.TWO_SOCKETS}: locks": (
        "It cannot fail: this load only reads memory, each socket's memory serves its own workers' batches, and two have twice"
        " as much. It is not among the claims that must hold. Where the lock binds and not memory (batch 16), two sockets"
        " are slower, for its holder reaches over."
    ),
    f"{studies.TWO_SOCKETS}: lock-free methods": "The same. 16 workers have a core each on one socket and on two.",
    f"{studies.TWO_SOCKETS_BATCH}: locks": (
        "The papers' own program computes so long per byte that memory does not bind. 36 workers are faster on two sockets at"
        " this batch (table), but for the cores: on one socket, two workers share each."
    ),
    f"{studies.TWO_SOCKETS_BATCH}: lock-free methods": "The same.",
    studies.MORE_WORKERS: (
        "Real gradients, at the staleness that the machine's times make. The network is small (digits-mlp), so the step sizes"
        " are not the papers'."
    ),
    studies.LARGER_STEPS: (
        "The same; at the largest steps a lone worker fails, too. Of the runs that end worse than at the start, the read-write"
        " lock has three at the smallest step: that share does not grow from the first step to the second."
    ),
    f"{studies.SOONER}: than locks": WHY_LOCKS,
    f"{studies.SOONER}: than Hogwild!": WHY_HOGWILD,
    studies.GROWS: "Counted, not assumed. A bound drops what would be stale, and there staleness levels off.",
    studies.FALLS_AFTER: (
        "Shorter gradients leave less time between two updates, so that more of them meet at the lock, the head or the vector."
    ),
    studies.FALLS_MEAN: (
        "It cannot: while one that drops nothing and never waits makes an update, the others make m - 1 on average,"
        " however long a gradient takes. Real runs agree (`results/shared_memory.md`: leashed with eight workers 5.6 and 6.0"
        " at batches 512 and 64, the most 21 and 99). What falls is the part after the gradient, and the tail. Locks go"
        " the other way, because waiting to read is no staleness, and so do bounds, because what is dropped is not counted."
    ),
    studies.NEAR_LAW: (
        "The law takes every attempt for the last, as with T_p = 0, and T_u for that of an idle memory. With retries n is"
        " higher, up to all workers: only one of those that try at a time can publish, and beyond its rate retries take the"
        " memory from each other."
    ),
    studies.BOUND: (
        "Who gives up leaves the loop. What it costs is the share dropped. Where nine of ten gradients are dropped, with T_p ="
        " 1 as with 0, staleness is not lower with 0: the memory, without retries, lets more updates be made meanwhile."
    ),
    studies.BACKOFF_LEASHED: "Workers that sleep leave the memory to those that publish.",
    studies.BACKOFF_LOCKS: (
        "A mutex is mostly taken by its last holder, who need not be woken: back-off only lets it lie free at times. A release"
        " of a read-write lock wakes all that sleep on it, and most find it taken: back-off saves them that."
    ),
}
TITLES = {
    "memory": "(i) Memory: updates per second by placement",
    "batch_and_step": "(ii) Batch size, step size, parallelism: what becomes of training",
    "time_to_epsilon": "(ii) Time to epsilon",
    "bandwidth": "If the memories gave ten times as much, as caches would: updates per second, 68 workers",
    "staleness": "(iii) Staleness and contention",
    "backoff": "(iv) Back-off",
}


def about() -> list[str]:
    """The machine and its assumptions, in words."""
    sockets = Sockets()
    return [
        f"The simulated machine: {sockets.count} sockets of {sockets.cores} cores with {sockets.threads_per_core} threads,"
        f" which together do {sockets.threads_gain:g} times one thread's work; {CORE_BYTES_PER_S / 1e9:g} GB/s a core,"
        f" {SOCKET_BYTES_PER_S / 1e9:g} GB/s a socket's memory; a byte of the other one's takes {sockets.remote_factor:g}"
        " times as long; a contended cache line takes 100 ns in a socket and"
        f" {1e9 * sockets.far_atomic_s:g} ns across. Where each comes from is said at `paceline.simulator.Sockets`. Workers"
        " are spread over sockets, then cores, then threads.",
        "",
        "A gradient's time is that of one thread on a core of a Zen 4, doubled for a core of 2016, with a deviation of"
        f" {100 * JITTER:g} %: {CPP.name}, as they ship it: {1e6 * CPP.sample_s:g} us per sample; {TORCH.name}:"
        f" {1e3 * TORCH.step_s:g} ms and {1e6 * TORCH.sample_s:g} us per sample. Tables are of the first program, whose"
        " gradients take longer; it was taken after the second, which (iii) shows as well. Vectors are those of the MLP with"
        " 134,794 parameters. No number was fitted to what the methods do.",
        "",
        "Assumed, and felt most below: vectors come from memory, not from caches, so that crowds of retries starve each other"
        " sooner than on a real machine, whose caches hold the newest vector; a lock is taken by whoever comes when it is"
        " free, mostly its last holder, so that a few sleep for long (mutex, batch 16, 68 workers: staleness 58 on average and"
        " up to 1,455); nobody else is on the machine.",
        "",
        "Made again since Leashed is charged the 3 vectors that an attempt moves, before 5, and locks are taken so, before"
        " handed over in order. Bounded leashed makes up to 2.4 times the updates; with 68 workers the mean staleness of"
        " locks is 58 and 66, before 34; back-off now helps the read-write lock and not the mutex, before the other way round."
        " Trainings at steps that are too large also differ with the machine that computes them, by rounding.",
    ]


def main() -> None:
    """Print the tables and write them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=Path, help="folder that keeps finished runs, to go on after an interruption")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(arguments.runs or Path(folder))
        found = {name: getattr(studies, name)(runs) for name in TITLES}
    claims = [claim for study in found.values() for claim in study.claims]
    lines = [
        "# The thesis's studies, simulated",
        "",
        "Printed by `python benchmarks/fidelity/thesis.py`.",
        "",
        *about(),
    ]
    lines += ["", "## What is published, and what the model shows", ""]
    lines += [
        "| claim or question | in the model | figures | from which assumption, or where it disagrees |",
        "|---|---|---|---|",
    ]
    for name, holds, says in claims:
        lines.append(f"| {name} | **{VERDICTS[holds]}** | {says} | {WHY[name]} |")
    failed = [f"{name} ({VERDICTS[holds]})" for name, holds, _ in claims if not holds and name in MUST]
    others = [f"{name} ({VERDICTS[holds]})" for name, holds, _ in claims if not holds and name not in MUST]
    held = f"The {len(MUST)} claims that a model of this machine must show hold"
    lines += ["", f"NOT AS EXPECTED: {'; '.join(failed)}." if failed else f"{held}: {'; '.join(MUST)}."]
    lines += ["", f"Not shown, or not throughout: {'; '.join(others)}."]
    for name, title in TITLES.items():
        lines += ["", f"## {title}", *found[name].lines]
    arguments.out.write_text("\n".join([*lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
