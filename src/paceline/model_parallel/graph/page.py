"""A plan as a page and as a trace: the graph coloured by device, and a timeline of each device and link."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.model_parallel.graph.explain import explain, verdict
from paceline.model_parallel.graph.plan import Plan
from paceline.model_parallel.graph.schedule import Event
from paceline.observe.document import write_page
from paceline.observe.drawing import Figure, method_colour, numbers
from paceline.system.files import write_text


def write_plan_page(plan: Plan, path: Path, measured: Sequence[Event]) -> Path:
    """Writes the page."""
    figures = [_graph(plan), _lanes(plan, "simulated", plan.schedule().events)]
    if measured:
        figures.append(_lanes(plan, "measured", measured))
    return write_page(
        path,
        "model_parallel/graph/page.html",
        title=f"{plan.model} on {plan.workers} devices",
        headline=verdict(plan),
        figures=figures,
        plan=explain(plan),
    )


def write_plan_trace(plan: Plan, path: Path, measured: Sequence[Event]) -> None:
    """Writes the step as Chrome's trace events, which ui.perfetto.dev opens; a measured one as a second process."""
    found: list[dict[str, Any]] = []
    for process, (name, events) in enumerate((("simulated", plan.schedule().events), ("measured", measured))):
        lanes = {lane: at for at, lane in enumerate(_lane_names(plan, events))}
        if events:
            found.append({"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}})
        for lane, at in lanes.items() if events else ():
            found.append({"ph": "M", "pid": process, "tid": at, "name": "thread_name", "args": {"name": lane}})
        for e in events:
            found.append(
                {
                    "ph": "X", "pid": process, "tid": lanes[_lane(e)], "name": f"{e.kind} {e.name}", "ts": e.start_s * 1e6,
                    "dur": (e.end_s - e.start_s) * 1e6, "args": {"microbatch": e.microbatch, "bytes": e.num_bytes},
                }
            )  # fmt: skip
    write_text(path, json.dumps({"traceEvents": found, "displayTimeUnit": "ms"}))


def _lane(e: Event) -> str:
    return f"device {e.place}" if e.to < 0 else f"{e.place} to {e.to}"


def _lane_names(plan: Plan, events: Sequence[Event]) -> list[str]:
    links = sorted({(e.place, e.to) for e in events if e.to >= 0})
    return [*(f"device {d}" for d in range(plan.workers)), *(f"{a} to {b}" for a, b in links)]


def _lanes(plan: Plan, what: str, events: Sequence[Event]) -> Figure:
    names = _lane_names(plan, events)
    traces = []
    for kind, opacity in (("forward", 1.0), ("backward", 0.55), ("move", 0.9), ("return", 0.5)):
        own = [e for e in events if e.kind == kind]
        if own:
            traces.append(
                {
                    "type": "bar", "orientation": "h", "name": kind, "y": [_lane(e) for e in own], "opacity": opacity,
                    "base": numbers([e.start_s * 1e3 for e in own]), "x": numbers([(e.end_s - e.start_s) * 1e3 for e in own]),
                    "text": [e.name for e in own], "textposition": "inside",
                    "hovertemplate": "%{text}: %{x:.3f} ms<extra></extra>",
                    "marker": {"color": [method_colour(e.place) for e in own], "line": {"width": 0.5, "color": "@text"}},
                }
            )  # fmt: skip
    rows = [(_lane(e), e.kind, e.name, e.microbatch, e.start_s * 1e3, e.end_s * 1e3, e.num_bytes) for e in events]
    layout = {
        "barmode": "overlay", "xaxis": {"title": {"text": "ms from the step's beginning"}},
        "yaxis": {"categoryorder": "array", "categoryarray": names[::-1], "automargin": True},
    }  # fmt: skip
    return Figure(
        name=f"lanes-{what}", title=f"One step, {what}",
        note="A lane for each device and for each direction of each link in use; forward passes, then backward passes."
        + (" The step of median length of ten; a transfer ends when it is read." if what == "measured" else ""),
        traces=traces, layout=layout,
        table=[("lane", "kind", "name", "microbatch", "start (ms)", "end (ms)", "bytes"), *rows],
        height_px=120 + 44 * len(names),
    )  # fmt: skip


def _graph(plan: Plan) -> Figure:
    """Groups as points, ordered by the number of their predecessors; lines from each group to its readers."""
    problem, device_of = plan.problem, plan.placement.device_of
    depth = [0] * len(problem.groups)
    for group in range(len(problem.groups)):
        depth[group] = 1 + max((depth[problem.tensors[t].producer] for t in problem.reads[group]), default=-1)
    rank: dict[int, int] = {}
    x, y = depth, []
    for group in range(len(problem.groups)):
        y.append(-rank.setdefault(depth[group], 0))
        rank[depth[group]] += 1
    lines_x: list[float | None] = []
    lines_y: list[float | None] = []
    for tensor in problem.tensors:
        for reader in tensor.consumers:
            lines_x += [x[tensor.producer], x[reader], None]
            lines_y += [y[tensor.producer], y[reader], None]
    points = []
    for device in sorted(set(device_of)):
        own = [group for group, d in enumerate(device_of) if d == device]
        points.append(
            {
                "type": "scatter", "mode": "markers+text", "name": f"device {device}", "x": [x[one] for one in own],
                "y": [y[one] for one in own], "text": [problem.groups[one].name for one in own],
                "textposition": "top center", "hovertemplate": "%{text}<extra></extra>",
                "marker": {"size": 16, "color": method_colour(device)},
            }
        )  # fmt: skip
    lines = {"type": "scatter", "mode": "lines", "x": lines_x, "y": lines_y, "hoverinfo": "skip", "showlegend": False,
             "line": {"width": 1, "color": "@text"}}  # fmt: skip
    plain = {"showgrid": False, "zeroline": False, "showticklabels": False}
    rows = [
        (g.name, d, g.forward_s * 1e3, g.backward_s * 1e3, " ".join(g.nodes))
        for g, d in zip(problem.groups, device_of, strict=True)
    ]
    return Figure(
        name="graph", title="The graph, coloured by device", note="Each point is a group of operations; lines are tensors.",
        traces=[lines, *points], layout={"xaxis": plain, "yaxis": plain},
        table=[("group", "device", "forward (ms)", "backward (ms)", "operations"), *rows],
        height_px=140 + 60 * max(rank.values(), default=1),
    )  # fmt: skip
