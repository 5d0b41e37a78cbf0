"""`benchmarks/results/head_to_head.md`, from the runs that have been made."""

from __future__ import annotations

import math
from collections.abc import Sequence

from contest.methods import METHODS
from contest.tables import SCENES, Record, lead, of, table
from paceline.system import machine, versions


def markdown(records: Sequence[Record], target: float) -> str:
    """The whole page."""
    runs = [one for one in records if one["scene"] != "tune"]
    if not runs:
        return ""
    first, about, used = runs[0], machine(), versions()
    repetitions = max(len(of(runs, scene=scene, method=name)) for scene in SCENES for name in METHODS)
    quiet = sum(bool(one["quiet"]) for one in runs)
    text = [
        "# Head to head: ours and others' with one slow worker, and with one killed",
        "",
        f"`{first['task']}`, {first['workers']} processes, batches of {first['batch_size']} per worker, {first['epochs']}"
        f" epochs in all, plain SGD at a constant rate. Every gradient takes {1e3 * first['step_s']:g} ms of sleep besides its"
        f" computing, which stands for a larger one; the slow worker's takes {first['slow_factor']:g} times that. The clock"
        " starts when all workers stand ready. Every worker writes its parameters down every"
        f" {first['snapshot_every_s']:g} s; they are evaluated afterwards: the mean of all where workers have models of their"
        " own, else worker 0's. Methods that wait for the slow worker ran side by side in that scene, since they sleep nine"
        " tenths of the time.",
        "",
        f"{about['processor']}, {about['cores']} cores; Python {used['python']}, torch {used['torch']}. Medians of"
        f" {repetitions} repetitions, everybody in turn, in brackets the lowest and the highest; {quiet} of {len(runs)} runs"
        " were made with the machine to themselves, in the others other programs had a part of the cores. Made by"
        " `python benchmarks/head_to_head.py --tune`, in pieces; all runs are in"
        " [head_to_head.jsonl](head_to_head.jsonl).",
        "",
    ]
    for scene, title in SCENES.items():
        if of(runs, scene=scene):
            text += [f"## {title.format(factor=first['slow_factor'])}", "", *table(runs, scene, target), ""]
            text += [said_of_lead(runs, scene, target), ""]
    text += ["## Learning rates", "", *rates(records), ""]
    return "\n".join(text)


def said_of_lead(records: Sequence[Record], scene: str, target: float) -> str:
    """One sentence: who of ours and who of the others was first."""
    found = lead(records, scene)
    if found is None:
        return "There are not both ours and others' yet."
    own, own_s, peer, peer_s = found
    if math.isinf(own_s) and math.isinf(peer_s):
        return f"Nobody reached {target:g}."
    if math.isinf(peer_s):
        return f"`{own}` reached {target:g} after {own_s:.1f} s; no peer did."
    if math.isinf(own_s):
        return f"{peer} reached {target:g} after {peer_s:.1f} s; none of ours did."
    ahead = "ahead of" if own_s < peer_s else "behind"
    return (
        f"Our fastest, `{own}`, reached {target:g} after {own_s:.1f} s: {ahead} the fastest peer, {peer}, at {peer_s:.1f} s"
        f" ({peer_s / own_s:.2f} times)."
    )


def rates(records: Sequence[Record]) -> list[str]:
    """What each rate did undisturbed, and which was taken."""
    tried = sorted({one["learning_rate"] for one in of(records, scene="tune")})
    if not tried:
        return ["One rate for all: 0.4, not tuned."]
    lines = [
        "Each method has the rate that, undisturbed and with 2 ms of sleep, took the smallest share of the samples to reach"
        " the target, of the same few for all, one run each. Shares in %:",
        "",
        f"| method | {' | '.join(f'{rate:g}' for rate in tried)} | taken |",
        f"|---|{'---|' * (len(tried) + 1)}",
    ]
    for name in METHODS:
        own = {one["learning_rate"]: one for one in of(records, scene="tune", method=name)}
        taken = {one["learning_rate"] for one in records if one["method"] == name and one["scene"] != "tune"}
        if own:
            cells = [_share(own.get(rate)) for rate in tried]
            lines.append(
                f"| {name} | {' | '.join(cells)} | {', '.join(f'{rate:g}' for rate in sorted(taken)) or '-'} |"
            )
    return lines


def _share(record: Record | None) -> str:
    if record is None:
        return "-"
    share = record.get("share_of_run")
    return f"{100 * share:.0f}" if share is not None else "never"
