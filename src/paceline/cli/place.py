"""`paceline place`: which worker runs which part of a model, and what that gains."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import options
from paceline.cli.console import out, print_json, say
from paceline.errors import UsageError, shown
from paceline.system.paths import check_new_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.model_parallel.graph.plan import Plan
    from paceline.model_parallel.graph.schedule import Event

_WRITTEN = "path/to/file.py:function"
_SHAPE = re.compile(r"[1-9]\d{0,6}(x[1-9]\d{0,6})*", re.ASCII)
_UNITS = {"KB": 1e3, "MB": 1e6, "GB": 1e9}


def place(
    model: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py:FUNCTION",
            help="Function that returns a model (see --shape), or a model and an example batch; or a placed run's folder.",
        ),
    ],
    devices: Annotated[int, typer.Option(help="Number of workers, one device each.")] = 2,
    slow: Annotated[list[str] | None, typer.Option(help="DEVICE:FACTOR of its compute time; repeatable.")] = None,
    shape: Annotated[
        str | None, typer.Option(help="Shape of the example, such as 32x3x64x64, if the function returns none.")
    ] = None,
    throughput: Annotated[
        int | None,
        typer.Option(metavar="MICROBATCHES", help="Optimize throughput with this many in flight, not latency."),
    ] = None,
    memory: Annotated[str | None, typer.Option(help="Memory of each device, such as 500MB.")] = None,
    pin: Annotated[list[str] | None, typer.Option(help="MODULE:DEVICE, a number or a kind; repeatable.")] = None,
    placer: Annotated[str | None, typer.Option(help="Placer; default: the best in simulation.")] = None,
    wire: Annotated[str | None, typer.Option(help="Send float32 as bfloat16 or bfloat16-truncated.")] = None,
    cluster: Annotated[Path | None, typer.Option(help="Cluster file, for the links between workers.")] = None,
    force: Annotated[bool, typer.Option(help="Plan even if the cost model is more than 25 % off.")] = False,
    plan: Annotated[Path | None, typer.Option(help="Write the plan as JSON, for paceline.Plan.load.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write a page with the graph and the timeline.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a trace for ui.perfetto.dev.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON as the last line of stdout.")] = False,
) -> None:
    """Which of several workers runs which part of a model: measured, simulated, explained.

    It helps models with branches (towers, encoders, experts), unequal devices, and models too large for one. A chain of layers
    gains nothing in one step: the plan says so; try --throughput 8. Train with paceline.launch(train, workers=..., plan=plan).

    Given the folder of a run that launch(..., plan=plan, out=FOLDER) has made, the report and the trace show a measured step
    below the simulated one.

    Example: paceline place examples/placement.py:model --devices 2 --slow 1:3
    """
    for path, what in ((plan, "The plan"), (report, "The report"), (trace, "The trace")):
        if path is not None:
            check_new_file(path, what)
    factors = options.pairs("--slow", slow, "DEVICE:FACTOR, such as 1:3")
    pins = options.pairs("--pin", pin, "MODULE:DEVICE, as encoder:0", str, lambda to: int(to) if to.isdecimal() else to)
    memory_bytes = _bytes(memory) if memory is not None else None

    from paceline.model_parallel.graph.placing import place as placed
    from paceline.simulator import Cluster

    if Path(model).is_dir():
        if any(one is not None for one in (slow, shape, throughput, memory, pin, placer, wire, cluster)):
            raise UsageError(f"The run in {model} already has a plan: leave out options that would make another one.")
        from paceline.model_parallel.graph.measured import read_measured

        run, measured = read_measured(Path(model))
        _write(run, plan, report, trace, measured)
        _tell(run, as_json=as_json)
        return
    built, example = _built(model, shape)
    found = placed(
        built,
        example,
        devices=devices,
        objective="latency" if throughput is None else "throughput",
        microbatches=throughput,
        slow=factors,
        memory_bytes=memory_bytes,
        pins=pins,
        placer=placer,
        wire=wire or "",
        cluster=Cluster.load(cluster) if cluster is not None else None,
        force=force,
    )
    _write(found, plan, report, trace)
    _tell(found, as_json=as_json)


def _tell(found: Plan, *, as_json: bool) -> None:
    if as_json:
        from paceline.model_parallel.graph.explain import verdict

        extra = {"verdict": verdict(found), "makespan_s": found.makespan_s, "one_device_s": found.one_device_s}
        print_json(extra | found.as_json())
    else:
        out().print(found.explain(), soft_wrap=True)


def _write(
    found: Plan, plan: Path | None, report: Path | None, trace: Path | None, measured: Sequence[Event] = ()
) -> None:
    if plan is not None:
        found.save(plan)
        say(f"Plan: {plan}")
    if report is not None:
        from paceline.model_parallel.graph.page import write_plan_page

        write_plan_page(found, report, measured)
        say(f"Report: {report}")
    if trace is not None:
        from paceline.model_parallel.graph.page import write_plan_trace

        write_plan_trace(found, trace, measured)
        say(f"Trace: {trace}")


def _built(reference: str, shape: str | None) -> tuple[Any, Any]:
    """The model and the example that a function of a file returns."""
    import torch

    from paceline.specs.user_file import load_function, run_user_code

    path_text, _, name = reference.rpartition(":")
    if not path_text.endswith(".py") or not name:
        raise UsageError(f"{shown(reference)} does not name a function in a file, such as {_WRITTEN}.")
    path = Path(path_text)
    function = load_function(path, name, what="File", written=_WRITTEN)
    made = function if isinstance(function, torch.nn.Module) else run_user_code(path, f"{name} of {path}", function)
    example = None
    if isinstance(made, tuple) and len(made) == 2:
        made, example = made
    if not isinstance(made, torch.nn.Module):
        raise UsageError(
            f"{name} of {path} returns a {type(made).__name__}: return a model, or a model and an example."
        )
    if shape is not None:
        if not _SHAPE.fullmatch(shape):
            raise UsageError(f"--shape must be numbers joined by x, such as 32x3x64x64, not {shown(shape)}.")
        example = torch.randn(*map(int, shape.split("x")))
    if example is None:
        raise UsageError(
            f"{name} of {path} returns no example batch: return (model, example), or give --shape 32x3x64x64."
        )
    return made, example


def _bytes(text: str) -> int:
    unit = text[-2:].upper()
    try:
        number = float(text[:-2]) * _UNITS[unit]
    except (KeyError, ValueError):
        raise UsageError(f"--memory must be a number with KB, MB or GB, such as 500MB, not {shown(text)}.") from None
    if not 0 < number < 1e18:
        raise UsageError(f"--memory must be above 0, not {shown(text)}.")
    return int(number)
