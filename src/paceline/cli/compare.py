"""`paceline compare`: the same task with several algorithms or numbers of workers, one table and one report."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import options
from paceline.cli.console import complain, err, print_json, results, say
from paceline.cli.train import execute, outcome_line, read_result
from paceline.errors import NotWrittenError, PacelineError, UsageError
from paceline.run.fork_server import fork_server_context
from paceline.specs.bounds import RUNS, SEED
from paceline.specs.text import split_specs
from paceline.system.folder_lock import run_folder
from paceline.system.interrupts import noted

if TYPE_CHECKING:
    from paceline.records.run_data import RunData
    from paceline.run.config import TrainConfig


@options.with_config(
    "layout",
    "inject_staleness",
    "staleness_ramp_epochs",
    algorithm=Annotated[list[str] | None, typer.Option(help="Comma-separated specs; default hogwild,leashed,locked")],
    workers=Annotated[list[str] | None, typer.Option(help="Comma-separated numbers; default 2")],
)
def compare(
    given: dict[str, Any],
    *,
    repeats: Annotated[int, typer.Option(help="Runs per configuration, with seeds S, S+1, ...")] = 1,
    out: options.Out = None,
    as_json: options.Json = False,
) -> None:
    """Train one task with several algorithms and compare them in one report.

    Example: paceline compare --algorithm "hogwild,leashed(persistence=2)" --workers 1,2,4 --target-loss 0.2
    """
    specs = [spec for text in given.pop("algorithm", ["hogwild,leashed,locked"]) for spec in split_specs(text)]
    counts = [_count(word) for text in given.pop("workers", ["2"]) for word in text.split(",")]
    options.check_numbers(given)
    for count in counts:
        options.check_numbers({"workers": count})
    RUNS.check("--repeats", repeats)
    RUNS.check("The number of runs", len(specs) * len(counts) * repeats)
    SEED.check("The last run's seed", given.get("seed", 0) + repeats - 1)
    options.check_out(out)

    fork_server_context()  # its server loads PyTorch while this process does
    configs = _configurations(given, specs, counts, repeats)
    import paceline.run.train  # noqa: F401  (now: a signal during imports ends the process at once and leaves its files)

    runs, not_written = {}, []
    words = options.task_word(configs[0].task), "compare"
    with options.out_folder(out, *words) as folder, run_folder(folder), noted() as interruption:
        for number, config in enumerate(configs, start=1):
            name = f"{number}-{config.algorithm.partition('(')[0]}-{config.workers}-workers"
            if interruption:
                break
            try:
                runs[name], failed = _one(config, folder / name)
                not_written += [failed] if failed is not None else []
            except KeyboardInterrupt:
                if not interruption:
                    raise
                break
        if runs:
            _show(runs, folder, as_json=as_json and not interruption)
    for error in not_written[:1]:
        complain(str(error))
    if not_written or any(run.result["outcome"] == "crashed" for run in runs.values()):
        raise typer.Exit(1)


def _count(word: str) -> int:
    try:
        return int(word)
    except ValueError as error:
        raise UsageError(f"--workers takes whole numbers such as 1,2,4; '{word}' is not one.") from error


def _configurations(given: dict[str, Any], specs: list[str], counts: list[int], repeats: int) -> list[TrainConfig]:
    """Every distinct run, all checked before the first starts; an algorithm for fewer workers runs with as many as it can."""
    from paceline.algorithms import registry
    from paceline.run.config import TrainConfig

    configs = {}
    for spec in specs:
        algorithm = registry.build(spec)
        limit = getattr(algorithm, "max_workers", None)
        if limit is not None and max(counts) > limit:
            say(f"{spec} runs with {limit} worker at most; it is compared with that.")
        for count in counts:
            used = count if limit is None else min(count, limit)
            for repeat in range(repeats):
                seed = given.get("seed", 0) + repeat
                config = TrainConfig(**{**given, "algorithm": registry.spec(algorithm), "workers": used, "seed": seed})
                configs[config.algorithm, used, seed] = config
    options.check_specs(configs.values())
    return list(configs.values())


def _one(config: TrainConfig, folder: Path) -> tuple[RunData, NotWrittenError | None]:
    """One run of the comparison; its error does not end the others."""
    from paceline.records.run_data import RunData

    not_written = None
    try:
        run, not_written = execute(config, folder)
    except (PacelineError, RuntimeError, OSError, MemoryError) as error:
        record = dataclasses.asdict(config) | {"data": None if config.data is None else str(config.data)}
        reason = f"{type(error).__name__}: {error}" if not isinstance(error, PacelineError) else str(error)
        run = RunData(config=record, result={**record, "outcome": "crashed", "outcome_reason": reason})
        not_written = error if isinstance(error, NotWrittenError) else None
    err().print(outcome_line(run.result))
    return run, not_written


def _show(runs: dict[str, RunData], folder: Path, *, as_json: bool) -> None:
    from paceline.observe.report import write_report
    from paceline.observe.tables import comparison_table

    report = folder / "report.html"
    listed = list(runs.values())
    title = f"{listed[0].config['task']}: {len(listed)} runs compared"
    write_report(listed, report, title=title, command=options.write_command())
    console = results(as_json=as_json)
    console.print(comparison_table([run.result for run in listed]))
    console.print(f"Report: {report}")
    if as_json:
        print_json([read_result(run, folder / name) for name, run in runs.items()])
