"""Streaming DiLoCo's table: the bandwidth at which a share of the time is spent computing, by method and model.

python benchmarks/fidelity/streaming_bandwidth.py [--write]
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from page import show

from paceline.algorithms.fragments import Schedule

UTILISATIONS = (0.50, 0.80, 0.90, 0.95, 0.99)
GRID = np.logspace(-1, 3, 50)  # Gbit/s, the paper's
PERIOD = 100
LAYERS_PER_FRAGMENT = 3
BITS = 16 * 7 / 8  # bfloat16, among 8 replicas
MOST_APART = 2  # points of the grid


@dataclass(frozen=True)
class Model:
    """One of the paper's."""

    parameters: float
    layers: int
    step_s: float


@dataclass(frozen=True)
class Method:
    """When what leaves: every so many steps, in so many fragments, merged so many steps later."""

    period: int = PERIOD
    is_streaming: bool = False
    delay: int = 0
    bits: float = BITS


MODELS = {"1 B": Model(1e9, 24, 0.1), "10 B": Model(10e9, 48, 0.8), "100 B": Model(100e9, 108, 4.9)}
METHODS = {
    "data parallel": Method(period=1),
    "DiLoCo": Method(),
    "streaming": Method(is_streaming=True),
    "streaming, overlapped": Method(is_streaming=True, delay=1),
    "streaming, overlapped, 4 bits": Method(is_streaming=True, delay=1, bits=BITS / 4),
}
PAPER = {
    ("1 B", "data parallel"): (86.8, 152.6, 184.2, 222.3, 569),
    ("1 B", "DiLoCo"): (1.4, 6.2, 13.3, 23.3, 86.8),
    ("1 B", "streaming"): (1.4, 5.2, 9.1, 16.0, 28.1),
    ("1 B", "streaming, overlapped"): (1.4, 4.3, 6.2, 9.1, 11.0),
    ("1 B", "streaming, overlapped, 4 bits"): (0.4, 0.9, 1.7, 2.0, 3.0),
    ("10 B", "data parallel"): (104.8, 222.3, 222.3, 268.3, 471.5),
    ("10 B", "DiLoCo"): (1.7, 7.5, 16.0, 33.9, 104.8),
    ("10 B", "streaming"): (1.7, 5.2, 9.1, 13.3, 19.3),
    ("10 B", "streaming, overlapped"): (1.7, 3.6, 5.2, 6.2, 7.5),
    ("10 B", "streaming, overlapped, 4 bits"): (0.4, 0.9, 1.4, 1.4, 1.7),
    ("100 B", "data parallel"): (184.2, 323.8, 390.7, 390.7, 471.5),
    ("100 B", "DiLoCo"): (3.0, 11.0, 23.3, 49.4, 184.2),
    ("100 B", "streaming"): (2.4, 6.2, 9.1, 11.0, 19.3),
    ("100 B", "streaming, overlapped"): (1.7, 3.6, 4.3, 5.2, 5.2),
    ("100 B", "streaming, overlapped, 4 bits"): (0.5, 0.9, 1.1, 1.1, 1.4),
}


def utilisation(model: Model, method: Method, gbit_per_s: float) -> float:
    """Share of the time spent computing, over the second of two periods (of ten steps at least).

    A step is forward through all layers, then backward, where each layer has a gradient of its weights and, but for the first,
    of its inputs; each of the three kinds is a third of it. A layer leaves as its weights' gradient is there, over one link,
    and its forward pass `delay` + 1 steps later waits for it.
    """
    layers, third_s = model.layers, model.step_s / 3
    layer_s = model.parameters / layers * method.bits / (gbit_per_s * 1e9)
    num_fragments = layers // LAYERS_PER_FRAGMENT if method.is_streaming else 1
    schedule = Schedule(method.period, method.delay, num_fragments)
    num_steps = max(method.period, 10)
    due: defaultdict[int, dict[int, float]] = defaultdict(dict)
    now_s = link_free_s = middle_s = 0.0
    for step in range(1, 2 * num_steps + 1):
        if step == num_steps + 1:
            middle_s = now_s
        needed, leaving = due.pop(step, {}), set(schedule.leaving(step))
        if not needed and not leaving:
            now_s += model.step_s
            continue
        for layer in range(layers):
            now_s = max(now_s, needed.get(layer, 0.0)) + third_s / layers
        for layer in reversed(range(layers)):
            now_s += third_s / layers
            if layer % num_fragments in leaving:
                link_free_s = max(link_free_s, now_s) + layer_s
                due[step + 1 + method.delay][layer] = link_free_s
            if layer:
                now_s += third_s / (layers - 1)
    return num_steps * model.step_s / (now_s - middle_s)


def first_points(model: Model, method: Method) -> list[int]:
    """For each utilisation, the first point of the grid that reaches it."""
    found = np.array([utilisation(model, method, bandwidth) for bandwidth in GRID])
    return [int(np.argmax(found >= wanted)) if (found >= wanted).any() else len(GRID) for wanted in UTILISATIONS]


def apart(name: str, method_name: str, method: Method) -> tuple[list[int], list[int]]:
    """Points of the grid, and how many they are above the paper's."""
    points = first_points(MODELS[name], method)
    theirs = [int(np.argmin(abs(np.log(GRID / value)))) for value in PAPER[name, method_name]]
    return points, [one - other for one, other in zip(points, theirs, strict=True)]


def main() -> None:
    """Print the page."""
    lines = [
        "# Bandwidth that Streaming DiLoCo needs",
        "",
        "Printed by `python benchmarks/fidelity/streaming_bandwidth.py`.",
        "",
    ]
    lines += [
        "Gbit/s at which a share of the time is spent computing: the first of 50 points from 0.1 to 1000, a factor 1.21 apart."
        " In brackets, how many points it is from Table 4 of arXiv:2501.18512.",
        "",
        "| model | method | " + " | ".join(f"{one:.0%}" for one in UTILISATIONS) + " |",
        "|---" * (2 + len(UTILISATIONS)) + "|",
    ]
    worst = 0
    for name in MODELS:
        for method_name, method in METHODS.items():
            points, distances = apart(name, method_name, method)
            worst = max(worst, *map(abs, distances))
            cells = [f"{GRID[p]:.1f} ({d:+d})" for p, d in zip(points, distances, strict=True)]
            lines.append(f"| {name} | {method_name} | " + " | ".join(cells) + " |")
    lines += ["", f"The largest distance is {worst} points.", "", "## Controls", ""]
    lines += ["Rows that must not fit, within the same two points in every cell:", ""]
    controls = {
        "overlapped, waited for one step too early": ("streaming, overlapped", Method(is_streaming=True)),
        "overlapped, with a delay of 5 steps": ("streaming, overlapped", Method(is_streaming=True, delay=5)),
        "streaming, in one fragment": ("streaming", Method()),
        "DiLoCo, every 50 steps": ("DiLoCo", Method(period=50)),
        "4 bits, sent as 16": ("streaming, overlapped, 4 bits", Method(is_streaming=True, delay=1)),
    }
    for what, (method_name, method) in controls.items():
        distance = max(abs(one) for name in MODELS for one in apart(name, method_name, method)[1])
        assert distance > MOST_APART, (what, "fits, too")
        lines.append(f"- {what}: up to {distance} points apart")
    show(lines, __file__)
    assert worst <= MOST_APART, f"{worst} points apart"


if __name__ == "__main__":
    main()
