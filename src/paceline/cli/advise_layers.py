"""`paceline advise layers`: which layers to train with data, model or hybrid parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import options
from paceline.cli.console import out, print_json
from paceline.observe.words import seconds_text
from paceline.specs.bounds import FLOPS_PER_S, PLANNED_WORKERS, SHARE

if TYPE_CHECKING:
    from paceline.planner.balance import Balance
    from paceline.planner.layout_choice import LayoutChoice


_MOST_LAYOUTS = 5  # in the table


def layers(
    task: options.Task = None,
    workers: Annotated[
        int | None, typer.Option(help="Number of nodes (workers); default: the cluster's, or 16")
    ] = None,
    batch_size: options.BatchSize = None,
    cluster: Annotated[
        Path | None, typer.Option(help="Cluster file (TOML or JSON) with bandwidth and the time of a step.")
    ] = None,
    flops_per_s: Annotated[
        float | None, typer.Option("--flops-per-s", help="Speed of a worker; default: the cluster's, or measured here")
    ] = None,
    overlap: Annotated[float, typer.Option(help="Share of communication that overlaps in both directions.")] = 1.0,
    data: options.Data = None,
    as_json: options.Json = False,
) -> None:
    """Which layers to train with data, model or hybrid parallelism: Das et al.'s balance equations.

    Hybrid means G groups: each group divides the layer over its workers and has its own batches. The last lines name the
    fastest layout for `--layout`, with latency and the computing time of a part, and the next best ones.

    Example: paceline advise layers --task cifar10-cnn --workers 16
    """
    options.check_numbers({"batch_size": batch_size, "data": data})
    if workers is not None:
        PLANNED_WORKERS.check("--workers", workers)
    if flops_per_s is not None:
        FLOPS_PER_S.check("--flops-per-s", flops_per_s)
    SHARE.check("--overlap", overlap)

    import torch

    from paceline.model_parallel.hybrid.choose import candidates_of, measured_s
    from paceline.model_parallel.layers import model_layers
    from paceline.planner.balance import balance
    from paceline.planner.layout_choice import choose_layouts
    from paceline.simulator import Cluster
    from paceline.system.torch_random import torch_undisturbed
    from paceline.tasks import load_task
    from paceline.tasks.base import fetch

    described = Cluster.load(cluster) if cluster is not None else Cluster(workers=workers or 16)
    loaded = load_task(task or "digits-mlp")
    train_set, _ = loaded.load(data)
    points = batch_size or loaded.batch_size
    sample, _ = fetch(train_set, torch.arange(1))
    with torch_undisturbed():
        model = loaded.model()
        found, candidates = model_layers(model, sample), candidates_of(model, sample)
    measured = flops_per_s is None and cluster is None
    operations = sum(layer.operations(points) for layer in found)
    if flops_per_s is not None:
        source = "as given"
    elif cluster is not None:
        flops_per_s, source = operations / described.compute.mean_s, f"from {cluster}, whose step is taken for this one"
    else:
        flops_per_s, source = operations / _step_s(loaded, train_set, points), "measured here, on one core"
    nodes = workers or described.workers
    PLANNED_WORKERS.check("The number of workers", nodes)
    link = described.bandwidth_bytes_per_s
    result = balance(
        found, nodes=nodes, batch=nodes * points, operations_per_s=flops_per_s, bytes_per_s=link, overlap=overlap
    )
    about = {"task": loaded.name, "workers": nodes, "batch_size": points, "overlap": overlap}
    about |= {"flops_per_s": flops_per_s, "bandwidth_bytes_per_s": link}
    choices = choose_layouts(
        candidates,
        nodes=nodes,
        batch=nodes * points,
        latency_s=described.latency_s,
        bytes_per_s=link,
        compute_s=measured_s(flops_per_s) if measured else lambda layer, n: layer.operations(n) / flops_per_s,
    )
    if as_json:
        print_json(about | _as_json(result) | {"layouts": [_layout_json(one) for one in choices]})
    else:
        _show(result, about, source)
        _show_layouts(choices)


def _step_s(task: Any, train_set: Any, batch_size: int) -> float:
    """Median seconds of a step without its update, from a third of a second."""
    import numpy as np

    from paceline.advice.calibration import probes

    rows = probes.steps(task, train_set, batch_size, at_least=10, for_s=0.3)
    return float(np.median(rows["ended_s"] - rows["started_s"] - rows["apply_s"]))


def _as_json(result: Balance) -> dict[str, Any]:
    rows = [
        {
            "layer": one.layer.name,
            "weights": one.layer.weights,
            "kind": one.kind,
            "groups": one.groups,
            "sent_bytes": one.sent_bytes,
            "data_parallel_bytes": one.data_bytes,
            "exposed_s": one.exposed_s,
        }
        for one in result.splits
    ]
    return {
        "min_points_per_worker": result.min_points,
        "max_workers": result.max_nodes,
        "machine_flops_per_byte": result.machine_operations_per_byte,
        "layers": rows,
    }


def _show(result: Balance, about: dict[str, Any], source: str) -> None:
    from paceline.observe.document import Cell, Table
    from paceline.observe.terminal import terminal_table

    heads = [
        Cell("Layer", kind="name"),
        "Weights",
        Cell("Best", kind="name"),
        "Groups",
        "Sends",
        "Data parallel",
        "Visible",
    ]
    rows = [
        [one.layer.name, f"{one.layer.weights:,}", one.kind, str(one.groups), f"{one.sent_bytes / 1e6:,.3f} MB",
         f"{one.data_bytes / 1e6:,.3f} MB", seconds_text(one.exposed_s) if one.exposed_s else "0"]
        for one in result.splits
    ]  # fmt: skip
    console = out()
    workers, points = about["workers"], about["batch_size"]
    speeds = f"{about['flops_per_s'] / 1e9:,.1f} GFLOP/s ({source}), {about['bandwidth_bytes_per_s'] / 1e6:,.0f} MB/s"
    console.print(f"{workers} workers with {points} samples each, {speeds}; bytes of one worker in a step.")
    console.print(terminal_table(Table(rows, heads)))
    console.print(
        f"Computation hides data parallelism with {result.min_points} samples per worker or more: up to"
        f" {result.max_nodes} workers at this batch of {workers * points}. Visible: the communication of data parallelism"
        " that computation does not hide."
    )


def _spec(choice: LayoutChoice) -> str:
    from paceline.model_parallel.hybrid.choose import layout_for
    from paceline.model_parallel.layouts import layout_registry

    return layout_registry.spec(layout_for(choice)) if choice.cut else "none"


def _layout_json(choice: LayoutChoice) -> dict[str, Any]:
    layers = [
        {"layer": one.name, "how": one.how, "sent_bytes": one.sent_bytes, "exposed_s": one.exposed_s}
        for one in choice.layers
    ]
    figures = {"sent_bytes": choice.sent_bytes, "exposed_s": choice.exposed_s, "step_s": choice.time_s}
    return {"layout": _spec(choice), "groups": choice.groups, **figures, "layers": layers}


def _show_layouts(choices: list[LayoutChoice]) -> None:
    from paceline.observe.document import Cell, Table
    from paceline.observe.terminal import terminal_table

    heads = [Cell("Layout", kind="name"), "Step", "Sends", "Waits", Cell("Layers that are cut", kind="name")]
    rows = []
    for one in choices[:_MOST_LAYOUTS]:
        cuts = ", ".join(f"{layer.name} {layer.how}" for layer in one.layers if layer.how != "whole")
        sends = f"{one.sent_bytes / 1e6:,.3f} MB"
        rows.append(
            [_spec(one), seconds_text(one.time_s), sends, seconds_text(one.exposed_s), cuts if one.cut else "none"]
        )
    best = choices[0]
    named = f'--layout "{_spec(best)}"' if best.cut else "no layout: all layers data-parallel"
    out().print(f"Fastest: {named}")
    out().print(terminal_table(Table(rows, heads)))
