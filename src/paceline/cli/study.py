"""`paceline study`: designed sets of runs, which can be interrupted and resumed at any time, and their table."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import options
from paceline.cli.console import out, print_json, results, say, verbs
from paceline.errors import UsageError
from paceline.observe.words import seconds_text
from paceline.specs.text import split_specs

if TYPE_CHECKING:
    from paceline.study import Study
    from paceline.study.findings import Comparison
    from paceline.study.runner import StudyEnd, StudyProgress
    from paceline.study.trial import Trial
    from paceline.study.trials import Trials

study_app = verbs("Design, run and read studies: many runs, one table, one report.", no_args_is_help=True)

_in_factors, _in_run = options.panel("Factors, comma-separated"), options.panel("The study")
_SHOWN_TRIALS = 40
_Folder = Annotated[Path, typer.Argument(help="Folder of a study, finished or not", show_default=False)]
_Baseline = Annotated[str | None, typer.Option(help="Baseline level; default: the study's, else the first")]


@study_app.command()
def run(
    file: Annotated[Path | None, typer.Argument(help="Study file, TOML or Python; options override it")] = None,
    task: options.Task = None,
    algorithm: Annotated[str | None, _in_factors(help="Specs, such as hogwild,leashed(persistence=1)")] = None,
    workers: Annotated[str | None, _in_factors(help="Numbers, such as 1,2,4")] = None,
    batch_size: Annotated[str | None, _in_factors(help="Samples per gradient")] = None,
    learning_rate: Annotated[str | None, _in_factors(help="Learning rates")] = None,
    backoff: Annotated[str | None, _in_factors(help="none, constant, linear(cap=8), exponential")] = None,
    factor: Annotated[
        list[str] | None, _in_factors(help="Any other, such as algorithm.persistence=0,1; repeatable")
    ] = None,
    seeds: Annotated[int | None, _in_factors(help="Repetitions of each combination; default 3")] = None,
    epochs: options.Epochs = None,
    steps: options.Steps = None,
    seconds: Annotated[float | None, options.in_training(help="Maximum training time of a trial.")] = None,
    targets: Annotated[
        str | None, options.in_training(help="Percent of the initial loss; a trial ends at the smallest.")
    ] = None,
    backend: Annotated[str | None, _in_run(help="processes, threads or simulator")] = None,
    cluster: Annotated[Path | None, _in_run(help="Cluster file for the simulator.")] = None,
    timing_only: Annotated[bool, _in_run("--timing-only", help="Simulate times only, no gradients.")] = False,
    parameters: Annotated[int | None, _in_run(help="Number of parameters for --timing-only.")] = None,
    data: options.Data = None,
    folder: Annotated[Path | None, _in_run("--out", help="Folder; default runs/<name>")] = None,
    dry_run: Annotated[bool, _in_run("--dry-run", help="Print the trials and their estimated time only.")] = False,
    as_json: options.Json = False,
) -> None:
    """Run a study: every combination of its factors with every seed, each once, in random order.

    You can interrupt it at any time, even with kill -9: the same command continues and runs no trial twice.

    Example: paceline study run --algorithm "locked,hogwild,leashed" --workers 1,2 --seeds 5 --epochs 10 --out runs/first
    """
    given = dict(locals())  # before any other local name exists

    from paceline.study.study_file import study_from_table

    study = study_from_table(_table(given), folder=Path())
    study_folder = folder or _default_folder(study, file)
    if dry_run:
        _show_plan(study, study_folder, as_json=as_json)
        return

    from paceline.study.runner import run_study

    try:
        end = run_study(study, study_folder, on_progress=_tell)
    except KeyboardInterrupt:
        say(f"Finished trials are kept in {study_folder}; the same command continues from there.")
        raise
    from paceline.study.report import write_report

    _show_end(end, write_report(study_folder), as_json=as_json)


@study_app.command()
def table(
    folder: _Folder,
    as_json: Annotated[bool, typer.Option("--json", help="Print all rows as JSON on the last line of stdout.")] = False,
) -> None:
    """Write a study's table again, table.parquet and table.csv, and show the medians of each combination.

    Example: paceline study table runs/first
    """
    from paceline.study.report import medians_table
    from paceline.study.study_file import read_study
    from paceline.study.table import write_tables

    if not (folder / "study.toml").is_file():
        raise UsageError(f"{folder} holds no study: run one with `paceline study run FILE --out {folder}`.")
    study, frame = read_study(folder / "study.toml"), write_tables(folder)
    console = results(as_json=as_json)
    if len(frame):
        console.print(medians_table(frame, target=study.smallest_target, title=study.name))
    else:
        console.print("No trial has been run yet.")
    console.print(f"Table: {folder / 'table.parquet'} and {folder / 'table.csv'}")
    if as_json:
        print(frame.to_json(orient="records", double_precision=15), flush=True)


@study_app.command()
def report(folder: _Folder, baseline: _Baseline = None) -> None:
    """Write a study's report.html again.

    Example: paceline study report runs/memory --baseline "locked(kind=mutex)"
    """
    from paceline.study.report import write_report

    out().print(f"Report: {write_report(folder, baseline=baseline)}")


@study_app.command()
def compare(
    folder: _Folder,
    baseline: _Baseline = None,
    by: Annotated[str | None, typer.Option(help="Factor whose levels are compared; default algorithm")] = None,
    where: Annotated[list[str] | None, typer.Option(help="Only trials with FACTOR=LEVEL; repeatable")] = None,
    target: Annotated[
        str | None, typer.Option(help="Percent of the initial loss; default: reached by half of all")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Compare a study's methods with one of them, by pairs of trials.

    Example: paceline study compare runs/memory --baseline hogwild --where workers=4
    """
    from paceline.observe.terminal import terminal_table
    from paceline.study.findings import compare_levels
    from paceline.study.report import comparisons_table, read_study_file, trials_of
    from paceline.study.table import load_table

    trials = trials_of(load_table(folder), read_study_file(folder), by=by, baseline=baseline)
    if by is not None and by not in trials.all_factors:
        raise UsageError(f"The study has no factor '{by}'; it has {', '.join(trials.all_factors)}.")
    if not trials.methods:
        raise UsageError(f"The study in {folder} has no trials yet: run it with `paceline study run`.")
    if len(trials.methods) < 2:
        raise UsageError(f"All trials have the same {trials.by}; name another factor with --by, or look at the report.")
    measure = trials.primary if target is None else trials.measure("time", _percent(target, trials))
    found = compare_levels(trials, measure, _where(where or [], trials))
    if as_json:
        print_json([_record(one) for one in found])
        return
    title = f"Ratios of {measure.title}, {trials.baseline} as baseline; findings are bold"
    out().print(terminal_table(comparisons_table(found), title))
    if not any(one.found for one in found):
        out().print("No difference is significant among all these comparisons, or there are too few pairs.")


def _table(given: dict[str, Any]) -> dict[str, Any]:
    """A study file's content: the file's, if there is one, overridden by the options."""
    from paceline.study.study_file import read_study

    file = given["file"]
    table = read_study(file).as_table() if file is not None else {}
    factors, settings = dict(table.get("factors", {})), dict(table.get("settings", {}))
    for name, value in _factors(given).items():
        settings.pop(name, None)
        factors[name] = value
    changed: dict[str, Any] = {"factors": factors, "settings": settings}
    limits = {name: given[name] for name in ("epochs", "steps", "seconds") if given[name] is not None}
    if limits:
        length = {"epochs", "steps"} & set(limits)
        old = {
            name: one for name, one in table.get("limits", {}).items() if not (length and name in ("epochs", "steps"))
        }
        changed["limits"] = {**old, **limits}
    if given["targets"] is not None:
        changed["targets"] = [_level(word) for word in given["targets"].split(",")]
        table.pop("target", None)
    for name in ("task", "seeds", "backend", "parameters", "timing_only", "cluster", "data"):
        if given[name] is not None and given[name] is not False:
            changed[name] = str(given[name]) if isinstance(given[name], Path) else given[name]
    return {"name": file.stem if file is not None else "study", **table, **changed}


def _factors(given: dict[str, Any]) -> dict[str, list[Any]]:
    """Factors in the comma form; commas inside parentheses do not split."""
    from paceline.study.study_file import long_name

    texts = {name: given[name] for name in ("algorithm", "workers", "batch_size", "learning_rate")}
    texts["algorithm.backoff"] = given["backoff"]
    for text in given["factor"] or []:
        name, equals, levels = text.partition("=")
        if not equals or not levels:
            raise UsageError(
                f"--factor {text} has no levels; write NAME=LEVEL,LEVEL, such as algorithm.persistence=0,1,none."
            )
        name = long_name(name.strip())
        if texts.get(name) is not None:
            raise UsageError(f"The levels of {name} are given twice; write all of them once, separated by commas.")
        texts[name] = levels
    return {name: [_level(one) for one in split_specs(text)] for name, text in texts.items() if text is not None}


def _level(word: str) -> Any:
    word = word.strip()
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(word, word)


def _default_folder(study: Study, file: Path | None) -> Path:
    """`runs/<file's name>`, or one per study described by options alone, so that the same command finds it again."""
    import hashlib

    if file is not None:
        return Path("runs") / file.stem
    digest = hashlib.sha256(study.as_text().encode()).hexdigest()[:8]
    return Path("runs") / f"study-{options.task_word(study.task)}-{digest}"


def _tell(progress: StudyProgress) -> None:
    """Prints a line about the last finished trial."""
    left = f"  {seconds_text(progress.remaining_s)} left" if progress.remaining_s else ""
    count = f"{progress.done:>{len(str(progress.total))}}/{progress.total}"
    say(f"{count}  {_levels_text(progress.trial)}: {progress.outcome} in {seconds_text(progress.took_s)}{left}")


def _show_plan(study: Study, folder: Path, *, as_json: bool) -> None:
    from paceline.study.estimate import estimate

    found = estimate(study, folder)
    console = results(as_json=as_json)
    for note in found.notes:
        say(note)
    for number, trial in enumerate(found.trials[:_SHOWN_TRIALS], start=1):
        done = "  (has been run)" if trial.hash in found.done else ""
        console.print(f"{number:>4}  {trial.hash}  {_levels_text(trial)}{done}")
    if len(found.trials) > _SHOWN_TRIALS:
        console.print(f"      and {len(found.trials) - _SHOWN_TRIALS:,} more")
    waiting = found.total - len(found.done)
    console.print(
        f"{found.total:,} trials, {len(found.done):,} of them run before; {waiting:,} to run: about"
        f" {seconds_text(found.remaining_s)} on this machine ({found.reason})."
    )
    if as_json:
        trials = [
            {"hash": one.hash, "factors": dict(one.factors), "done": one.hash in found.done} for one in found.trials
        ]
        print_json({"trials": trials, "total": found.total, "remaining_s": found.remaining_s})


def _levels_text(trial: Trial) -> str:
    levels = {name.removeprefix("algorithm."): level for name, level in trial.factors.items() if level is not None}
    texts = {name: str(level).lower() if isinstance(level, bool) else str(level) for name, level in levels.items()}
    return ", ".join(text if name == "algorithm" else f"{name} {text}" for name, text in texts.items())


def _show_end(end: StudyEnd, page: Path, *, as_json: bool) -> None:
    console = results(as_json=as_json)
    for note in end.notes:
        say(note)
    if end.left_out:
        what = "1 earlier trial belongs" if len(end.left_out) == 1 else f"{len(end.left_out):,} earlier trials belong"
        say(f"{what} to the study no longer: kept in {end.folder / 'trials'}, and left out of the table.")
    total = end.ran + end.found
    outcomes = ", ".join(f"{number:,} {name}" for name, number in sorted(end.outcomes.items()))
    console.print(f"{total:,} trials, {end.ran:,} of them run now: {outcomes}.")
    console.print(f"Table:  {end.folder / 'table.parquet'} and table.csv")
    console.print(f"Report: {page}")
    if as_json:
        about = {"out": str(end.folder), "trials": total, "ran": end.ran, "found": end.found, "left_out": end.left_out}
        print_json({**about, "outcomes": dict(end.outcomes), "report": str(page)})


def _percent(target: str, trials: Trials) -> str:
    wanted = target.strip().removesuffix("%").strip()
    if wanted not in trials.fractions:
        raise UsageError(f"--target {target} was not measured; choose one of {', '.join(trials.fractions)}.")
    return wanted


def _where(given: list[str], trials: Trials) -> dict[str, Any]:
    held: dict[str, Any] = {}
    for text in given:
        factor, equals, level = text.partition("=")
        known = trials.levels(factor) if factor in trials.column_of else []
        match = next((one for one in known if str(one) == level or one == _level(level)), None)
        if not equals or match is None:
            levels = f" levels {', '.join(map(str, known))}" if known else f" factors {', '.join(trials.column_of)}"
            raise UsageError(f"--where takes FACTOR=LEVEL, not '{text}'; the study has the{levels}.")
        held[factor] = match
    return held


def _record(one: Comparison) -> dict[str, Any]:
    ratio = one.ratio
    values = {
        "ratio_at_least": ratio.at_least, "ratio_at_most": ratio.at_most, "low": ratio.low, "high": ratio.high,
        "adjusted_p": one.adjusted_p,
    }  # fmt: skip
    return {
        "base": one.base, "other": one.other, "where": dict(one.where), "measure": one.measure.column, "pairs": ratio.pairs,
        "complete": ratio.complete, "interval": ratio.method, "finding": one.found,
        **{name: value if math.isfinite(value) else None for name, value in values.items()},
    }  # fmt: skip
