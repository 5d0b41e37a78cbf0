"""Batch sizes over time, in runs that set them by worker speed."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.observe.drawing import Figure, Panels, method_colour, numbers
from paceline.records.run_data import RunData

__all__ = ["sizes_of_batches"]

_MOST_WORKERS = 48
_PANEL_PX = 110


def sizes_of_batches(runs: Sequence[RunData], labels: Sequence[str]) -> Figure | None:
    """One line per worker, in one panel per run that has such batches."""
    shown = [(run, label) for run, label in zip(runs, labels, strict=True) if run.result.get("batch_sizes")]
    if not shown:
        return None
    panels = Panels([label for _, label in shown], [_PANEL_PX] * len(shown))
    for index, (run, label) in enumerate(shown):
        changes = run.result["batch_sizes"]
        times_s = [0.0, *(one["elapsed_s"] for one in changes[1:]), max(run.result["wall_s"], changes[-1]["elapsed_s"])]
        for worker in range(min(len(changes[0]["sizes"]), _MOST_WORKERS)):
            sizes = [one["sizes"][worker] for one in changes]
            panels.add(
                index, legend=f"worker {worker}", type="scatter", mode="lines", name=f"worker {worker}", meta=label,
                x=numbers(times_s), y=[*sizes, sizes[-1]], line={"shape": "hv", "color": method_colour(worker)},
                hovertemplate="%{y} samples<extra>%{fullData.name}</extra>",
            )  # fmt: skip
        panels.y(index, title={"text": "samples"}, nticks=4, rangemode="tozero")
    panels.x["title"] = {"text": "time (s)"}
    return Figure(
        "batch-sizes", "How large each worker's batch was",
        "Samples of a round, dealt out by the workers' measured speeds; short rounds at the ends of epochs are left out."
        + (f" The first {_MOST_WORKERS} workers are shown." if len(shown[0][0].records) > _MOST_WORKERS else ""),
        panels.traces, panels.layout,
        ["series", "worker", "time (s)", "samples"], keys=["meta", "name", "x", "y"], height_px=panels.height_px,
    )  # fmt: skip
