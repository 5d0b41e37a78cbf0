"""`benchmarks/results/head_to_head.md`, from the runs that have been made."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from statistics import median

from contest.course import num_samples
from contest.methods import BY_SPEED, LEADING, METHODS
from contest.tables import DISTURBED, SCENES, Record, lead, of, shares_of_run, spread, table, times
from paceline.system.machine import machine, versions

TIMES_AGAIN = 3  # is a run made that was disturbed


def markdown(records: Sequence[Record], target: float, peers: str) -> str:
    """The whole page; `peers` are the versions of the systems that are neither ours nor PyTorch's."""
    runs = [one for one in records if one["scene"] in SCENES]
    if not runs:
        return ""
    first, about, used = runs[0], machine(), versions()
    counts = {len(of(runs, scene=scene, method=name)) for scene in SCENES for name in METHODS} - {0}
    number = f"{min(counts)} to {max(counts)}" if len(counts) > 1 else f"{max(counts)}"
    repetitions = "One run of each" if max(counts) == 1 else f"Medians of {number} runs"
    quiet = sum(bool(one["quiet"]) for one in runs)
    alone = f"{'All' if quiet == len(runs) else quiet} of the {len(runs)} runs were made while nothing else ran"
    beside = "" if quiet == len(runs) else ", the others beside an editor and short tests"
    worst = max(one["stolen_share"] for one in runs)
    rounds = first["epochs"] * (num_samples(first["task"]) // (first["batch_size"] * first["workers"]))
    ideal_s = rounds * first["step_s"] * first["slow_factor"]
    free_s = rounds * first["workers"] * first["step_s"] / (first["workers"] - 1 + 1 / first["slow_factor"])
    how = (
        f"`{first['task']}`, {first['workers']} processes, batches of {first['batch_size']} per worker, {first['epochs']}"
        f" epochs in all, plain SGD at a constant rate. Every gradient takes {1e3 * first['step_s']:g} ms of sleep besides its"
        f" computing, which stands for a larger one; the slow worker's takes {first['slow_factor']:g} times that. The clock"
        " starts when all workers stand ready. Every worker writes its parameters down every"
        f" {first['snapshot_every_s']:g} s; they are evaluated afterwards: the mean of all where workers have models of their"
        f" own, else worker 0's. With the sleep alone, all samples would take {ideal_s:.0f} s with a slow worker in methods"
        f" that wait for it, and {free_s:.0f} s in those that wait for nobody; what is beyond that is computing, on two cores."
    )
    killed = (
        "The last worker kills itself (`kill -9`) after half of its steps, once. PyTorch's are started again by torchrun"
        " (`--max-restarts=1`) and go on from the checkpoint of the last epoch, each start with names of its own in the store."
        " Of three runs of DistributedDataParallel with `env://`, two failed at their restart (one with refused connections,"
        " probably to dead workers' addresses; the other's messages were not kept) and one did not end in ten minutes; those"
        f" runs are not in the file. Paceline's methods have `restarts=1`; only `{BY_SPEED}` goes on by"
        " `pl.launch(resume=...)`. torchft's and hivemind's dead worker is replaced by the program that started it."
    )
    missed = len(SCENES) * len(METHODS) * max(counts) - len(runs)
    tuned = " --tune" if of(records, scene="tune") else ""
    made = (
        f"{about['processor']}, {about['cores']} cores; Python {used['python']}, torch {used['torch']}{peers}."
        f" {repetitions}, one system after the other, in brackets the lowest and the highest; a row without brackets is one"
        f" run. {alone} on the machine{beside}. Its host gave {100 * worst:.1f} % of the cores' time to others at most; a run"
        f" during which it gave more than a twentieth does not count and is made again, {TIMES_AGAIN} times at most"
        f" ({missed or 'no'} runs are missing). hivemind averages after 64 steps of each peer, the others after 8 or fewer."
        f" Made by `python benchmarks/head_to_head.py{tuned} --repetitions {max(counts)} --python torchft=... --python"
        " hivemind=...`; the runs are in [head_to_head.jsonl](head_to_head.jsonl), and what `paceline advise` says of this"
        " loop in [head_to_head_advice.md](head_to_head_advice.md)."
    )
    made += earlier(runs)
    text = ["# Head to head: ours and others' with one slow worker, and with one killed", ""]
    for paragraph in (summary(runs, target), how, killed, made):
        text += [textwrap.fill(paragraph, 125, break_on_hyphens=False, break_long_words=False), ""]
    for scene, title in SCENES.items():
        if of(runs, scene=scene):
            text += [f"## {title.format(factor=first['slow_factor'])}", "", *table(runs, scene, target), ""]
    text += [*against_ideals(runs), "## Not measured yet"]
    text += [
        "",
        *missing(runs),
        "",
        *left_out(records),
        "## Learning rates",
        "",
        *rates(records),
        "",
    ]
    return "\n".join(text)


def earlier(runs: Sequence[Record]) -> str:
    """A sentence on the rows that are not of the newest day, on which the machine may have been faster or slower."""
    days = {
        (scene, name): max(str(one.get("day", "")) for one in found)
        for scene in SCENES
        for name in METHODS
        if (found := of(runs, scene=scene, method=name))
    }
    newest, said = max(days.values()), []
    for scene, title in SCENES.items():
        names = [f"`{name}`" for (its_scene, name), day in days.items() if its_scene == scene and day < newest]
        if names:
            said.append(f"{title.format(factor=runs[0]['slow_factor']).lower()}: {', '.join(names)}")
    return f" Measured on an earlier day, not beside the other rows: {'; '.join(said)}." if said else ""


def summary(records: Sequence[Record], target: float) -> str:
    """What the documentation says: our leading method beside the fastest of the others, where both have run in a scene."""
    peers = [name for name, method in METHODS.items() if method.system != "Paceline"]
    said = []
    for scene, title in SCENES.items():
        found = lead(records, scene)
        if found is None:
            continue
        own_s, peer, peer_s = found
        numbers = [len(of(records, scene=scene, method=name)) for name in (LEADING, peer)]
        runs = "one run of each" if max(numbers) == 1 else f"medians of {numbers[0]} and {numbers[1]} runs"
        there = sum(bool(of(records, scene=scene, method=name)) for name in peers)
        others = f"{there} others" if there == len(peers) else f"{there} others measured so far, of {len(peers)}"
        said.append(
            f"{title.format(factor=records[0]['slow_factor'])}: `{LEADING}` reached {100 * target:g} % {_when(own_s)}; of"
            f" the {others}, {peer} came first, {_when(peer_s)} ({runs})."
        )
    return " ".join(said)


def _when(time_s: float) -> str:
    return "never" if math.isinf(time_s) else f"after {time_s:.1f} s"


def against_ideals(records: Sequence[Record]) -> list[str]:
    """Ours in every scene over their own undisturbed time, beside what perfect sharing of the work would take."""
    first = records[0]
    workers, factor = first["workers"], first["slow_factor"]
    ideals = {"slow": workers / (workers - 1 + 1 / factor), "killed": workers / (workers - 0.5)}
    lines = [
        "## Against perfect sharing",
        "",
        "Median seconds to the target over the same method's undisturbed; the ideal is that of workers that share the work"
        " by speed and lose nothing. Last columns: the fastest of the others over this method, so that above 1 ours was"
        " sooner.",
        "",
        f"| method | slow (ideal {ideals['slow']:.2f}) | killed (ideal {ideals['killed']:.2f}) | others, alike |"
        " others, slow | others, killed |",
        "|---|---|---|---|---|---|",
    ]
    for name in (LEADING, BY_SPEED):
        own = {scene: of(records, scene=scene, method=name) for scene in SCENES}
        if not all(own.values()):
            continue
        took = {scene: median(times(runs)) for scene, runs in own.items()}
        cells = [f"{took[scene] / took['none']:.2f}" for scene in ideals]
        for scene in SCENES:
            found = lead(records, scene)
            cells.append(f"{found[2] / took[scene]:.2f}" if found else "-")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return [*lines, ""] if len(lines) > 6 else []


def missing(records: Sequence[Record]) -> list[str]:
    """A line for each scene, with the methods that have no run there."""
    lines = []
    for scene, title in SCENES.items():
        names = [name for name in METHODS if not of(records, scene=scene, method=name)]
        if names:
            lines.append(f"- {title.format(factor=records[0]['slow_factor'])}: {', '.join(names)}")
    return lines or ["Nothing: every method has run in every scene."]


def left_out(records: Sequence[Record]) -> list[str]:
    """Runs that do not count, since the host gave the machine's time to others during them."""
    lines = []
    for one in records:
        if one["scene"].endswith(DISTURBED):
            at_s = math.inf if one.get("time_to_target_s") is None else one["time_to_target_s"]
            lines.append(
                f"- {one['method']}, {one['scene']}, {100 * one['stolen_share']:.0f} % of the cores' time given away:"
                f" reached {100 * one['target']:g} % {_when(at_s)}."
            )
    return ["## Runs that do not count", "", *lines, ""] if lines else []


def rates(records: Sequence[Record]) -> list[str]:
    """What each rate did undisturbed, and which was taken."""
    tried = sorted({one["learning_rate"] for one in of(records, scene="tune")})
    if not tried:
        return [
            "No rate was searched for: 0.4 for all but one. The asynchronous server, where every worker's gradient is an"
            " update by itself, has a quarter of that, lowered because at 0.4 it did not learn."
        ]
    lines = [
        "Each method has the rate that, undisturbed and with 2 ms of sleep, took the smallest share of the samples to reach"
        " the target, in the median. Rates at which a run missed the target are left out. Shares in %:",
        "",
        f"| method | {' | '.join(f'{rate:g}' for rate in tried)} | taken |",
        f"|---|{'---|' * (len(tried) + 1)}",
    ]
    for name in METHODS:
        own = {rate: found for rate in tried if (found := shares_of_run(records, name, rate))}
        taken = {one["learning_rate"] for one in records if one["method"] == name and one["scene"] != "tune"}
        if own:
            cells = [spread(own.get(rate, []), 0, 100) for rate in tried]
            lines.append(
                f"| {name} | {' | '.join(cells)} | {', '.join(f'{rate:g}' for rate in sorted(taken)) or '-'} |"
            )
    return [*lines, *at_the_edge(records, tried[-1])]


def at_the_edge(records: Sequence[Record], highest: float) -> list[str]:
    """How often runs at the highest rate did not reach the target, and those at lower ones."""
    made = [one for one in records if one["scene"] in SCENES]
    missed = [one for one in made if one["time_to_target_s"] is None]
    (of_highest, all_highest), (of_lower, all_lower) = (
        [sum((one["learning_rate"] >= highest) is is_highest for one in ones) for ones in (missed, made)]
        for is_highest in (True, False)
    )
    if not all_highest or not all_lower:
        return []
    return [
        "",
        f"Of the {all_highest} runs at {highest:g}, {of_highest} did not reach the target, of the {all_lower} at lower rates"
        f" {of_lower}.",
    ]
