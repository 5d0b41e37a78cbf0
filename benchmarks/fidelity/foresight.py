"""How well simulator and models foresee real runs: ten settings and two choices, predicted before they are measured.

    PACELINE_DATA=... python benchmarks/fidelity/foresight.py all     # again until it says that all is measured
    python benchmarks/fidelity/foresight.py compare --write

`all` is calibrate, predict, measure, in this order, each of which can be asked for alone.

`foresight.toml` has the settings and the bars; `foresight.json` keeps what each part has found, so that `measure` can be
interrupted. Predictions are made of the calibration and the sleeps alone, and are not changed once they are there: `predict`
refuses to while measurements are. Nothing else may run on the machine: a measurement during which others used it is repeated.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from experiment_design import candidates, design
from foresight_report import report
from foresight_watch import Watch

import paceline as pl
from paceline.advice.calibration import machine as calibration
from paceline.advice.calibration import probes
from paceline.advice.calibration.measurements import Effort, fit_cold
from paceline.simulator import Cluster, Recorded
from paceline.tasks import load_task
from paceline.tasks.base import keep_data

HERE = Path(__file__).parent
FOUND = HERE / "foresight.json"
SAMPLES = 60_000
ROUNDS = 3  # of calibrating steps, each after all the others', as the machine is not equally fast at all times
STEPS_S, MOST_TIMES = 1.5, 400  # how long in each of them, and how many times are kept
FULL, FEW = Effort(), 8  # what coming back from a pause costs, and with how few samples it is measured as well
OTHERS_SHARE = 0.05  # of the cores' time, that others may use during a measurement
CALM_S = 0.5
CONTROL_S = 0.3


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is predicted and measured."""

    algorithm: str
    workers: int
    batch_size: int
    sleep_ms: float
    epochs: float
    slow_sleep_ms: float | None = None

    @property
    def key(self) -> str:
        """Its name in `foresight.json`."""
        return json.dumps(dataclasses.asdict(self))

    def sleep_s(self, worker: int) -> float:
        """What a worker sleeps in every step."""
        slow = self.slow_sleep_ms is not None and worker == 0
        return (self.slow_sleep_ms if slow else self.sleep_ms) / 1e3  # type: ignore[operator]

    def config(self, task: str) -> pl.TrainConfig:
        """The run of this setting."""
        return pl.TrainConfig(
            task=task,
            algorithm=self.algorithm,
            workers=self.workers,
            batch_size=self.batch_size,
            epochs=self.epochs,
        )


class Plan:
    """`foresight.toml`.

    Attributes:
        settings: the ten.
        grids: by name, the settings among which the fastest is to be chosen.
    """

    def __init__(self) -> None:
        table = tomllib.loads((HERE / "foresight.toml").read_text())
        self.task, self.repetitions, self.bars, self.ernest = (
            table[name] for name in ("task", "repetitions", "bars", "ernest")
        )
        self.settings = [Setting(**one) for one in table["setting"]]
        self.grids: dict[str, list[Setting]] = {}
        for grid in table["grid"]:
            name, algorithms, workers = grid.pop("name"), grid.pop("algorithms"), grid.pop("workers")
            pairs = itertools.product(algorithms, workers)
            self.grids[name] = [Setting(algorithm=a, workers=m, **grid) for a, m in pairs]

    @property
    def all(self) -> list[Setting]:
        """Settings and grids."""
        return self.settings + [one for grid in self.grids.values() for one in grid]

    @property
    def steps(self) -> list[tuple[int, float]]:
        """Batch sizes and milliseconds of sleep that steps are calibrated with."""
        sleeps = {(one.batch_size, one.sleep_ms) for one in self.all}
        return sorted(sleeps | {(size, 0.0) for size, _ in sleeps})

    def short_runs(self, setting: Setting) -> list[Setting]:
        """What Ernest learns this setting from: designed short runs, none with its number of workers."""
        grid = [
            one
            for one in candidates(max(self.ernest["workers"]), self.ernest["sizes"])
            if one.workers != setting.workers and one.workers in self.ernest["workers"]
        ]
        chosen = design(grid, self.ernest["budget"]).trials
        runs = []
        for one in chosen:
            batch_size = round(setting.batch_size * one.size)
            step_s = 0.002 + (setting.sleep_ms / 1e3)
            epochs = self.ernest["seconds"] / step_s * one.workers * batch_size / SAMPLES
            algorithm = setting.algorithm if one.workers > 1 else "sequential"
            runs.append(
                dataclasses.replace(
                    setting, algorithm=algorithm, workers=one.workers, batch_size=batch_size, epochs=round(epochs, 3)
                )
            )
        return runs


class Found:
    """`foresight.json`, written again after everything that is added."""

    def __init__(self) -> None:
        self.parts: dict[str, Any] = json.loads(FOUND.read_text()) if FOUND.exists() else {}

    def __getitem__(self, part: str) -> Any:
        return self.parts.setdefault(part, {})

    def save(self) -> None:
        """Writes it, whole or not at all."""
        draft = FOUND.with_suffix(".draft")
        draft.write_text(json.dumps(self.parts, indent=1) + "\n")
        draft.replace(FOUND)


# Calibration


def calibrate(plan: Plan, found: Found, until_s: float) -> bool:
    """Everything that predictions are made of, piece by piece; whether all is there."""
    task = load_task(plan.task)
    train_set, _ = task.load(None)

    def machine() -> dict[str, Any]:
        measured = calibration.measure(plan.task, batch_size=64)
        cluster = measured.as_json(measured.as_cluster(), FOUND)["cluster"]
        spreads_s = {name: dataclasses.asdict(one) for name, one in measured.spreads().items()}
        return {"cluster": cluster, "spreads_s": spreads_s, "num_parameters": measured.vector_bytes // 4}

    def steps(size: int, sleep_ms: float) -> dict[str, Any]:
        sleep_s = sleep_ms / 1e3
        rows = probes.steps(task, train_set, size, at_least=50, for_s=STEPS_S, pauses_s=(sleep_s,))
        whole = np.diff(rows["started_s"]) - sleep_s  # and so with what it oversleeps
        times_s = whole[np.diff(rows["batch"]) == 1]  # between two full batches
        kept = times_s[:: -(-len(times_s) // MOST_TIMES)]
        return {"times_s": [round(one, 7) for one in kept.tolist()], "update_s": float(np.mean(rows["apply_s"]))}

    def cold(size: int) -> dict[str, float]:
        measure = partial(probes.cold_steps_s, pauses_s=FULL.pauses_s, at_least=FULL.pauses, for_s=FULL.steps_s)
        return dataclasses.asdict(fit_cold(measure(task, train_set, size), measure(task, train_set, FEW)))

    pieces: dict[str, Any] = {}
    for number in range(ROUNDS):
        for size, sleep_ms in plan.steps:
            pieces[f"steps {size} {sleep_ms:g} {number}"] = partial(steps, size, sleep_ms)
    pieces |= {f"cold {size}": partial(cold, size) for size, sleep_ms in plan.steps if not sleep_ms}
    for name, piece in {**pieces, "machine": machine}.items():
        if name in found["calibration"]:
            continue
        taken = undisturbed(name, piece, until_s)
        if taken is None:
            return False
        found["calibration"][name] = taken[0]
        found["calibration"].setdefault("about", {})[name] = taken[1]
        found.save()
    print("All is calibrated.")
    return True


def undisturbed(name: str, piece: Callable[[], Any], until_s: float) -> tuple[Any, dict[str, Any]] | None:
    """What a measurement finds while others leave the machine alone, and how far they did; None: no time is left."""
    while time.monotonic() < until_s:
        watch = Watch()
        time.sleep(CALM_S)
        if watch.others_share() > OTHERS_SHARE:
            continue
        watch = Watch()
        before_s = pace_s()
        taken = piece()
        about = {"others_share": round(watch.others_share(), 4), "pace_s": [before_s, pace_s()], "at": now()}
        print(f"{name}: {about}", flush=True)
        if about["others_share"] <= OTHERS_SHARE:
            return taken, about
        if isinstance(taken, dict) and "wall_s" in taken:
            print(f"  (disturbed) {taken['wall_s']:.3f} s")
    print("To be continued.")
    return None


_control: list[Any] = []


def pace_s() -> float:
    """What a step of the control takes just now, in this process alone: virtual machines are not equally fast at all times."""
    if not _control:
        task = load_task("mnist-mlp")
        _control[:] = [task, task.load(None)[0]]
    task, train_set = _control
    rows = probes.steps(task, train_set, 64, at_least=50, for_s=CONTROL_S)
    return round(float(np.median(rows["ended_s"] - rows["started_s"])), 7)


def cluster_of(setting: Setting, calibrated: dict[str, Any], batch_size: int | None = None) -> Cluster:
    """The simulated machine on which a setting is predicted, or one like it with batches that were not calibrated."""
    machine, size = calibrated["machine"], setting.batch_size
    measured = Cluster.from_table(machine["cluster"], "The calibration")
    times_s = np.concatenate(
        [calibrated[f"steps {size} {setting.sleep_ms:g} {number}"]["times_s"] for number in range(ROUNDS)]
    )
    update_s = statistics.fmean(calibrated[f"steps {size} 0 {number}"]["update_s"] for number in range(ROUNDS))
    cold = calibrated[f"cold {size}"]
    # The simulator makes a step after a sleep longer by what coming back costs; the steps here have slept, and have that.
    owed_s = cold["cold_s"] * (1 - math.exp(-setting.sleep_ms / 1e3 / cold["cooling_s"]))
    longer_s = min(owed_s, float(np.mean(times_s)) * (1 - 1 / cold["cold_factor"]))
    compute_s = np.maximum(times_s - update_s - longer_s, times_s / 10)
    if batch_size is not None:
        compute_s *= step_s(batch_size, calibrated) / step_s(size, calibrated)
    changes = {
        "workers": setting.workers,
        "compute_s": Recorded(times_s=tuple(compute_s.tolist())),
        "update_vectors": update_s * measured.core_bytes_per_s / (4 * machine["num_parameters"]),
        **cold,
    }
    cluster = dataclasses.replace(measured, **changes)
    for worker in range(setting.workers):
        if setting.sleep_s(worker):
            cluster = cluster.idle(worker=worker, idle_s=setting.sleep_s(worker))
    return cluster


def step_s(batch_size: int, calibrated: dict[str, Any]) -> float:
    """Mean time of a step without sleep, from the line through the calibrated batch sizes."""
    pieces = {name: one for name, one in calibrated.items() if name.startswith("steps ") and name.split()[2] == "0"}
    sizes = [int(name.split()[1]) for name in pieces]
    slope, constant = np.polyfit(sizes, [statistics.fmean(one["times_s"]) for one in pieces.values()], 1)
    return float(constant + slope * batch_size)


def predict(plan: Plan, found: Found, *, again: bool) -> None:
    """Simulates every setting; what was predicted before it was measured is kept where the model has been changed since."""
    if found["measured"] and not again:
        sys.exit("There are measurements: predictions come before them. Remove foresight.json to begin again.")
    if found["measured"]:
        found.parts.setdefault("predicted_before", found["predicted"])
    found.parts["predicted"] = {}
    calibrated = found["calibration"]
    simulate = partial(pl.simulate_task, timing_only=True, num_parameters=calibrated["machine"]["num_parameters"])
    for one in plan.all:
        run = simulate(one.config(plan.task), cluster=cluster_of(one, calibrated))
        found["predicted"][one.key] = figures(run) | {"at": now()}
        print(one.key, f"{run.result['wall_s']:.3f} s", flush=True)
    for one in plan.settings:
        like = {run.key: dataclasses.replace(one, workers=run.workers) for run in plan.short_runs(one)}
        found["predicted"][one.key]["short_runs_s"] = {
            run.key: simulate(
                run.config(plan.task), cluster=cluster_of(like[run.key], calibrated, run.batch_size)
            ).result["wall_s"]
            for run in plan.short_runs(one)
            if run.workers > 1
        }
    found.save()


# Measurements


def figures(run: Any) -> dict[str, Any]:
    """What is compared of a run, and what explains a difference: means in seconds per step."""
    rows = np.concatenate(list(run.records.values()))
    spans = {
        "gradient": rows["gradient_ended_s"] - rows["gradient_started_s"],
        "input": rows["gradient_started_s"] - rows["started_s"],
        "after": rows["ended_s"] - rows["gradient_ended_s"],
        "wait": rows["wait_s"],
        "apply": rows["apply_s"],
    }
    applied = rows[rows["applied_version"] > 0]
    staleness = np.bincount(np.maximum(applied["applied_version"] - 1 - applied["read_version"], 0))
    return {
        "wall_s": run.result["wall_s"],
        "samples_per_s": run.result["samples_per_s"],
        "steps": len(rows),
        "staleness": staleness.tolist(),
        "mean_s": {name: round(float(np.mean(one)), 7) for name, one in spans.items()},
    }


def measure(plan: Plan, found: Found, until_s: float) -> None:
    """Measures what is missing, as long as there is time; one repetition of everything before the next."""
    if not found["predicted"]:
        sys.exit("Nothing is predicted yet: that comes first.")
    short = [run for one in plan.settings for run in plan.short_runs(one)]
    todo = [(one, 0) for one in plan.all + short]
    todo += [(one, number) for number in range(1, plan.repetitions) for one in plan.all]
    for one, number in todo:
        runs = found["measured"].setdefault(one.key, [])
        if len(runs) > number:
            continue
        taken = undisturbed(one.key, partial(real_run, plan, one), until_s)
        if taken is None:
            return
        print(f"{taken[0]['wall_s']:.3f} s")
        runs.append(taken[0] | taken[1])
        found.save()
    print("All is measured.")


def real_run(plan: Plan, setting: Setting) -> dict[str, Any]:
    """One training."""
    Path(os.environ["FORESIGHT_SLEEPS"]).write_text(f"{setting.sleep_s(0)} {setting.sleep_s(1)}")
    return figures(pl.train(setting.config(f"{HERE / 'foresight_task.py'}:task")))


def now() -> str:
    """Date and time."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def main() -> None:
    """One part."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=("calibrate", "predict", "measure", "all", "compare"))
    parser.add_argument("--for-s", type=float, default=180.0, help="begin no measurement after so many seconds")
    parser.add_argument("--again", action="store_true", help="predict again, with measurements there")
    parser.add_argument("--write", action="store_true", help="write foresight.md")
    arguments = parser.parse_args()
    plan, found = Plan(), Found()
    if arguments.part in ("calibrate", "measure", "all") and os.getsid(0) != os.getpid():
        os.setsid()  # so that `Watch` knows what is ours
    until_s = time.monotonic() + arguments.for_s
    with tempfile.NamedTemporaryFile() as file, keep_data():
        os.environ["FORESIGHT_SLEEPS"] = file.name
        if arguments.part in ("calibrate", "all") and not calibrate(plan, found, until_s):
            return
        if arguments.part == "predict" or (arguments.part == "all" and not found["predicted"]):
            predict(plan, found, again=arguments.again)
        if arguments.part in ("measure", "all"):
            measure(plan, found, until_s)
    if arguments.part == "compare" and not found["measured"]:
        sys.exit("Nothing is measured yet: run `all`.")
    if arguments.part == "compare":
        text = report(plan, found.parts)
        print(text)
        if arguments.write:
            (HERE / "foresight.md").write_text(text)


if __name__ == "__main__":
    main()
