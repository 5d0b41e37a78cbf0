"""The page on shared memory, as a function of its measurements."""

from __future__ import annotations

from statistics import median
from typing import Any

import measurements
import protocol
from measurements import OURS, PEER, Row

SPEED, TWO_WORKERS, TIME_TO_LOSS, COSTS, EIGHT = "speed", "two workers", "time to loss", "costs", "eight workers"


def step_us(row: Row) -> float:
    """Time of a step of one of two plain loops."""
    batch_size = int(row.what.partition("batch ")[2].partition(",")[0])
    return 2 * batch_size / median(row.values(PEER)) * 1e6


def bound(row: Row) -> float:
    """The ratio if a step takes as long as a plain one and hands the vector over once."""
    return step_us(row) / (step_us(row) + median(row.values("handover_us")))


def summary(rows: list[Row]) -> str:
    """The first paragraph: each method with two workers against its control, and what misses its target."""
    lines = []
    for algorithm in ("hogwild", "leashed"):
        own = [row for row in rows if row.section == TWO_WORKERS and row.what.startswith(f"`{algorithm}`")]
        ratios = ", ".join(f"{row.ratio:.2f}" for row in own)
        lines.append(
            f"`{algorithm}` with two workers has {ratios} times the samples per second of two plain loops at once"
        )
    missed = [f"{row.what} ({row.ratio:.2f} of {row.target})" for row in rows if row.target and row.values(PEER)
              and row.ratio < float(row.target)]  # fmt: skip
    handovers = [value for row in rows for value in row.values("handover_us")]
    return measurements.wrapped(
        f"{'; '.join(lines)}, at batches of 512, 64 and 16. The plain loops share nothing and are the control. Two cores of"
        f" this machine take {protocol.said(handovers)} us to hand the vector to each other. That time differs between"
        f" machines, and with it what two workers reach. Below the target: {'; '.join(missed) or 'none'}."
    )


def markdown(records: list[dict[str, Any]]) -> str:
    """The page."""
    rows = measurements.rows(records)
    by_section = {
        name: [row for row in rows if row.section == name] for name in (SPEED, TWO_WORKERS, TIME_TO_LOSS, COSTS, EIGHT)
    }
    lines = [
        "# Shared-memory training against plain PyTorch (mnist-mlp, 134,794 parameters, float32)",
        "",
        summary(rows),
        "",
        measurements.made(records, "python benchmarks/shared_memory.py", "shared_memory"),
        "The plain loop is `benchmarks/plain_loop.py`. Rates are samples per second.",
        "",
        "## Two workers",
        "",
        "The bound is the ratio that a step reaches if it takes as long as the plain one and hands the vector over once.",
        "",
        "| what | ours | two plain loops | ratio | target | handing the vector over, us | a plain step, us | bound |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in by_section[TWO_WORKERS]:
        lines.append(
            f"| {row.what.partition(', against')[0]} | {row.said(OURS)} | {row.said(PEER)} |"
            f" **{row.ratio:.2f}** {protocol.said(row.ratios, 2).partition(' ')[2]} | {row.target} |"
            f" {row.said('handover_us', 1)} | {step_us(row):,.0f} | {bound(row):.2f} |"
        )
    lines += ["", "## One worker, and back-off", "", *measurements.table(by_section[SPEED], "ours", "peer")]
    lines += [
        "",
        "## Time to 5 % of the initial loss",
        "",
        "Two workers, batch 64, learning rate 0.2; one seed per run.",
        "",
        "| method | seconds | runs |",
        "|---|---|---|",
        *(f"| {row.what} | {row.said(OURS, 2)} | {len(row.values(OURS))} |" for row in by_section[TIME_TO_LOSS]),
        "",
        "## What it costs",
        "",
        "| what | measured | target |",
        "|---|---|---|",
        *(f"| {row.what} | {row.said(OURS, 2)} {row.unit} | {row.target} |" for row in by_section[COSTS]),
        "",
        "## Eight workers",
        "",
        "| what | samples per second | waiting, % of time | staleness, mean | staleness, most |",
        "|---|---|---|---|---|",
        *(
            f"| {row.what} | {row.said(OURS)} | {100 * median(row.values('waiting_share')):.0f} |"
            f" {row.said('staleness', 1)} | {max(row.values('most_staleness')):.0f} |"
            for row in by_section[EIGHT]
        ),
    ]
    return "\n".join(lines) + "\n"
