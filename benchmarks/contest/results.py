"""`benchmarks/results/head_to_head.md`, from the runs that have been made."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from statistics import median

import protocol
from protocol import said

from contest.course import num_samples
from contest.methods import BY_SPEED, CONTROLS, LEADING, METHODS
from contest.tables import DISTURBED, SCENES, Record, lead, of, rates_of, table, times

EARLIER = (  # before records named their machine
    "AMD EPYC, 2 cores; Python 3.11.7, torch 2.13.0+cpu, torchft 0.2.0, hivemind 1.1.12"
)
TIMES_AGAIN = 3  # is a run made that was disturbed


def markdown(records: Sequence[Record]) -> str:
    """The whole page."""
    runs = [one for one in records if one["scene"] in SCENES]
    if not runs:
        return ""
    first = next(one for one in runs if METHODS[one["method"]].workers is None)
    target = first["target"]
    counts = {len(of(runs, scene=scene, method=name)) for scene in SCENES for name in METHODS} - {0}
    number = f"{min(counts)} to {max(counts)}" if len(counts) > 1 else f"{max(counts)}"
    repetitions = (
        "One run of each" if max(counts) == 1 else f"Medians of {number} runs, those that did not arrive included"
    )
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
    ours = [one for one in of(runs, scene="killed") if METHODS[one["method"]].system == "Paceline"]
    again = sorted({f"`{one['method']}`" for one in ours if one.get("after_kill") not in (None, "nothing")})
    resumed = f"; {', '.join(again)} goes on by `pl.launch(resume=...)`" if again else ""
    killed = (
        "The last worker kills itself (`kill -9`) after half of its steps, once. PyTorch's are started again by torchrun"
        " (`--max-restarts=1`) and go on from the checkpoint of the last epoch, each start with names of its own in the store."
        " Of three runs of DistributedDataParallel with `env://`, two failed at their restart (one with refused connections,"
        " probably to dead workers' addresses; the other's messages were not kept) and one did not end in ten minutes; those"
        f" runs are not in the file. Paceline's methods have `restarts=1`{resumed}. torchft's and hivemind's dead worker is"
        " replaced by the program that started it."
    )
    tuned = " --tune" if of(records, scene="tune") else ""
    hours = sum(one["took_s"] for one in records) / 3600
    made = (
        f"{protocol.made_on(runs, EARLIER)}. {repetitions}, one system after the other, in brackets the lowest and the"
        f" highest; a row without brackets is one run. {alone} on the machine{beside}. Its host gave"
        f" {100 * worst:.1f} % of the cores' time to others at most; a run during which it gave more than a twentieth does not"
        f" count and is made again, {TIMES_AGAIN} times at most."
        f" All runs took {hours:.1f} hours. Made by `python benchmarks/head_to_head.py{tuned} --python torchft=... --python"
        " hivemind=...`, which can be interrupted; `python benchmarks/pages.py head_to_head` makes this page from the runs in"
        " [head_to_head.jsonl](head_to_head.jsonl). What `paceline advise` says of this loop is in"
        " [head_to_head_advice.md](head_to_head_advice.md)."
    )
    made += earlier(runs)
    text = ["# Head to head: ours and others' with one slow worker, and with one killed", ""]
    for paragraph in (summary(runs), lacks(records), how, killed, made):
        text += [_wrapped(paragraph), ""]
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
    """A sentence on the rows that were measured before others began, when the machine may have been faster or slower."""
    days = {
        (scene, name): sorted(str(one.get("day", "")) for one in found)
        for scene in SCENES
        for name in METHODS
        if (found := of(runs, scene=scene, method=name))
    }
    newest, said = max(first for first, *_ in days.values()), []
    for scene, title in SCENES.items():
        names = [f"`{name}`" for (its_scene, name), day in days.items() if its_scene == scene and day[-1] < newest]
        if names:
            said.append(f"{title.format(factor=runs[0]['slow_factor']).lower()}: {', '.join(names)}")
    return f" Measured on an earlier day, not beside the other rows: {'; '.join(said)}." if said else ""


def summary(records: Sequence[Record]) -> str:
    """What the documentation says: our leading method beside the fastest of the others and both controls, in each scene."""
    peers = [name for name, method in METHODS.items() if method.system != "Paceline" and name not in CONTROLS]
    lines = []
    for scene, title in SCENES.items():
        found = lead(records, scene)
        if found is None:
            continue
        there = sum(bool(of(records, scene=scene, method=name)) for name in peers)
        others = f"{there} others" if there == len(peers) else f"{there} others measured so far, of {len(peers)}"
        rows = {name: times(of(records, scene=scene, method=name)) for name in (LEADING, found[1], *CONTROLS)}
        text = (
            f"{title.format(factor=records[0]['slow_factor'])}, seconds to {100 * records[0]['target']:g} %: `{LEADING}`"
            f" {said(rows[LEADING])}; {found[1]}, the first of the {others}, {said(rows[found[1]])}"
        )
        for control in CONTROLS:
            text += f"; {control} {said(rows[control])}" if rows[control] else ""
        lines.append(f"{text} ({', '.join(sorted({str(len(one)) for one in rows.values() if one}))} runs).")
    missing = [name for name in CONTROLS if not of(records, method=name)]
    if lines and missing:
        lines.append(
            f"The controls ({', '.join(missing)}) were not run, so these figures do not show that communication is what helps."
        )
    return " ".join(lines)


def part_summary(records: Sequence[Record]) -> str:
    """The summary as a part of the documentation."""
    return _wrapped(summary([one for one in records if one["scene"] in SCENES]))


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 125, break_on_hyphens=False, break_long_words=False)


def lacks(records: Sequence[Record]) -> str:
    """What the runs lack of what the protocol asks for; nothing where it was followed."""
    runs, tune, found = [one for one in records if one["scene"] in SCENES], of(records, scene="tune"), []
    rows = [of(runs, scene=scene, method=name) for scene in SCENES for name in METHODS]
    least = min(len(row) for row in rows if row)
    if least < protocol.RUNS:
        found.append(f"{protocol.RUNS} runs of each row (there are {least})")
    if tune:
        highest = max(one["learning_rate"] for one in tune)
        seeds = len({one["seed"] for one in tune})
        if seeds < protocol.RUNS:
            found.append(f"{protocol.RUNS} runs of each learning rate ({seeds} at most)")
        edge = sorted({f"`{one['method']}`" for one in runs if one["learning_rate"] >= highest})
        if edge:
            tried = [one for one in records if one["learning_rate"] >= highest]
            missed = sum(one.get("time_to_target_s") is None for one in tried)
            found.append(
                f"rates inside the grid ({', '.join(edge)} have runs at the highest, {highest:g}, at which {missed} of all"
                f" {len(tried)} runs did not arrive)"
            )
    partly = [
        f'`{name}` {sum(came)} of {len(came)} in "{title.format(factor=runs[0]["slow_factor"]).lower()}"'
        for scene, title in SCENES.items()
        for name in METHODS
        if (came := [one["time_to_target_s"] is not None for one in of(runs, scene=scene, method=name)])
        and not all(came)
    ]
    if partly:
        found.append(f"runs that all arrive ({', '.join(partly)})")
    found.append(
        "the same averaging period for all (hivemind averages after 64 steps of each peer, the others after 8 or fewer)"
    )
    return f"The [protocol](../../docs/benchmark_protocol.md) asks for more than these runs have: {'; '.join(found)}."


def short_summary(records: Sequence[Record]) -> str:
    """README's figure: the scene with a slow worker."""
    runs = of(records, scene="slow")
    factor, target = runs[0]["slow_factor"], runs[0]["target"]
    _, peer, _ = lead(records, "slow") or (0.0, "", 0.0)
    ours = {name: times(of(runs, method=name)) for name, one in METHODS.items() if one.system == "Paceline"}
    best = min(
        (name for name, costs in ours.items() if costs and name not in CONTROLS),
        key=lambda name: median(ours[name]),
    )
    names = dict.fromkeys((LEADING, best, peer, *CONTROLS))
    rows = {name: costs for name in names if (costs := times(of(runs, method=name)))}
    about = {peer: ", the fastest of PyTorch, torchft and hivemind,"}
    text = "; ".join(f"`{name}`{about.get(name, '')} {said(costs)}" for name, costs in rows.items())
    missing = [name for name in CONTROLS if name not in rows]
    absent = f" Controls that were not run: {', '.join(missing)}." if missing else ""
    words = (
        f"MNIST, four processes on two cores, one of them {factor:g} times as slow: seconds to {100 * target:g} %, median and"
        f" range of {min(map(len, rows.values()))} runs: {text}.{absent}"
    )
    return _wrapped(words)


def against_ideals(records: Sequence[Record]) -> list[str]:
    """Ours in every scene over their own undisturbed time, beside what perfect sharing of the work would take."""
    first = next(one for one in records if METHODS[one["method"]].workers is None)
    workers, factor = first["workers"], first["slow_factor"]
    ideals = {
        scene: protocol.perfect_sharing([*[1.0] * (workers - 1), speed])
        for scene, speed in {"slow": 1 / factor, "killed": 0.5}.items()
    }
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
        names = [
            name for name, one in METHODS.items() if scene in one.scenes and not of(records, scene=scene, method=name)
        ]
        if names:
            lines.append(f"- {title.format(factor=records[0]['slow_factor'])}: {', '.join(names)}")
    return lines or ["Nothing: every method has run in every scene."]


def left_out(records: Sequence[Record]) -> list[str]:
    """Runs that do not count, since the host gave the machine's time to others during them."""
    lines = []
    for one in records:
        if one["scene"].endswith(DISTURBED):
            lines.append(
                f"- {one['method']}, {one['scene']}, {100 * one['stolen_share']:.0f} % of the cores' time given away:"
                f" {said(times([one]))} s to {100 * one['target']:g} %."
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
    chosen = (
        "the rate that took the smallest share of the samples to reach the target, in the median"
        if protocol.other_protocol(records)
        else "the largest rate whose runs all reach the target"
    )
    lines = [
        f"Each method has {chosen}, undisturbed and with 2 ms of sleep. Shares of the samples in %, their median and range:",
        "",
        f"| method | {' | '.join(f'{rate:g}' for rate in tried)} | taken |",
        f"|---|{'---|' * (len(tried) + 1)}",
    ]
    for name in METHODS:
        own = rates_of(records, name).tried
        taken = {one["learning_rate"] for one in records if one["method"] == name and one["scene"] != "tune"}
        if own:
            cells = [said(list(own.get(rate, {}).values()), 0, 100) for rate in tried]
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
