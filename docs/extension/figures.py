"""The figure on a card: a simulated run of the algorithm, who computes and waits when, and its loss against time."""

from functools import cache

import numpy as np

import paceline as pl
from paceline.records.run_data import RunData

WORKERS, FACTOR, EPOCHS = 4, 3, 3
WIDTH, HEIGHT, TOP, ROW = 720, 196, 34, 30
LANES = (86, 380)  # x of the left panel's axis, from and to
LOSS = (462, 700)
STEPS = 9  # of a fast worker in the left panel


@cache
def run(name: str) -> RunData:
    """Digits on four simulated workers, the first three times as slow; on one worker, which is not, for `sequential`."""
    alone = name == "sequential"
    cluster = pl.Cluster(workers=1) if alone else pl.Cluster(workers=WORKERS).slow(worker=0, factor=FACTOR)
    config = pl.TrainConfig(task="digits-mlp", algorithm=name, workers=cluster.workers, epochs=EPOCHS)
    return pl.simulate_task(config, cluster=cluster)


def said_of(name: str) -> str:
    """One line below the figure."""
    result = run(name).result
    workers = "one worker" if name == "sequential" else f"{WORKERS} workers, worker 0 {FACTOR} times as slow"
    waiting = f"{100 * result['waiting_share']:.0f} % of the workers' time spent waiting"
    return (
        f"`digits-mlp`, {EPOCHS} epochs, {workers}, simulated: {result['wall_s']:.2f} s of virtual time, mean staleness"
        f" {result['staleness']['mean']:.2f}, {waiting}. The grey curve is one worker's. All methods use the task's learning"
        " rate, so the figure shows who waits for whom, and not which method is best."
    )


def of_run(name: str) -> str:
    """The figure as SVG that takes its colours from the page."""
    one, alone = run(name), run("sequential")
    title = f"A simulated run of {name}: timeline of each worker, and training loss against virtual time"
    parts = [_text(LANES[0], 16, "timeline", "title"), _text(LOSS[0], 16, "training loss", "title")]
    parts += _lanes(one) + _curves(one, alone)
    body = "\n".join(parts)
    return f'<svg class="figure" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">\n{body}\n</svg>\n'


def _lanes(one: RunData) -> list[str]:
    fast = one.records[max(one.records)]
    begin = float(fast["started_s"][min(2, len(fast) - 1)])
    end = float(fast["ended_s"][min(2 + STEPS, len(fast) - 1)])
    scale = (LANES[1] - LANES[0]) / (end - begin)
    parts = []
    for row, (worker, steps) in enumerate(sorted(one.records.items())):
        y = TOP + row * ROW
        parts.append(_text(LANES[0] - 8, y + 14, f"worker {worker}", "label end"))
        parts.append(_bar(LANES[0], y, LANES[1] - LANES[0], "wait"))
        for step in steps:
            low, high = max(step["gradient_started_s"], begin), min(step["gradient_ended_s"], end)
            if high > low:
                parts.append(
                    _bar(LANES[0] + (low - begin) * scale, y, max(0.4, (high - low) * scale - 0.8), "gradient")
                )
    y = TOP + len(one.records) * ROW + 8
    parts += [
        _text(LANES[0], y + 8, "0", "label"),
        _text(LANES[1], y + 8, f"{1e3 * (end - begin):.0f} ms", "label end"),
    ]
    for x, kind, words in (
        (LANES[0], "gradient", "computes a gradient"),
        (LANES[0] + 150, "wait", "waits, or averages"),
    ):
        parts += [_bar(x, y + 18, 12, kind, height=10), _text(x + 17, y + 27, words, "label")]
    return parts


def _curves(one: RunData, alone: RunData) -> list[str]:
    end, bottom = float(alone.result["wall_s"]), TOP + WORKERS * ROW - 6
    highest = float(alone.result["initial_loss"]) * 1.08
    parts = [
        f'<path class="axis" d="M{LOSS[0]} {TOP - 6}V{bottom}H{LOSS[1]}"/>',
        _text(LOSS[0], bottom + 16, "0 s", "label"), _text(LOSS[1], bottom + 16, f"{end:.1f} s", "label end"),
        _text(LOSS[0] - 6, bottom, "0", "label end"), _text(LOSS[0] - 6, TOP + 4, f"{highest:.1f}", "label end"),
        _text((LOSS[0] + LOSS[1]) / 2, bottom + 34, "virtual time", "label middle"),
    ]  # fmt: skip
    for kind, data in (("curve alone", alone), ("curve", one)):
        steps = np.sort(np.concatenate(list(data.records.values())), order="ended_s")
        steps = steps[steps["applied_version"] >= 0]
        group = max(1, len(steps) // 30)
        points = [(0.0, float(data.result["initial_loss"]))] + [
            (float(part["ended_s"].mean()), float(part["loss"].mean()))
            for part in (steps[at : at + group] for at in range(0, len(steps), group))
            if float(part["ended_s"].mean()) <= end
        ]
        path = "L".join(
            f"{LOSS[0] + t / end * (LOSS[1] - LOSS[0]):.1f} {bottom - loss / highest * (bottom - TOP + 6):.1f}"
            for t, loss in points
        )
        parts.append(f'<path class="{kind}" d="M{path}"/>')
    return parts


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{text}</text>'


def _bar(x: float, y: float, width: float, kind: str, *, height: float = 20) -> str:
    return f'<rect class="{kind}" x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="{height:g}"/>'
