"""DeepDist on real Spark against batch-then-update: loss against time and against bytes.

    python benchmarks/fidelity/deepdist.py [--write]

Published: DeepDist (Neumann, 2014) says of itself that it converges sooner than training in Spark that updates once per job.
Two such ways are here, on the same rows, from the same start: one gradient over all partitions per update, summed by
`treeAggregate`, as MLlib's `GradientDescent` does; and one pass of each partition by itself, then the mean of the models.
Needs the extra `paceline[spark]` and Java 17. Takes some five minutes.
"""

from __future__ import annotations

import copy
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import torch
from deepdist_report import WHAT_HOLDS, Curve, losses_at, median, said, until, verdicts
from page import show
from pyspark.sql import SparkSession
from sklearn.datasets import load_digits
from torch import nn

import paceline as pl
from paceline.system.machine import machine, versions
from paceline.tasks.readers import read_idx

PARTITIONS, SEEDS = 2, 3
ALGORITHM = "downpour(fetch=5,push=5)"
AT_END = "downpour(fetch=100000,push=100000)"  # updates arrive at the end alone
MOST_LOSSES = 250  # of a training
TIMES_S = (0.25, 0.5, 1.0, 2.0, 4.0)
MEGABYTES = (0.1, 0.3, 1.0, 3.0, 10.0)


@dataclass(frozen=True)
class Problem:
    """A linear layer to train.

    Args:
        name: of the data.
        batch: rows of a step.
        epochs: of DeepDist.
        limit_s: of the two others.
        targets: losses whose times are compared.
        rates: by method, which are tried.
    """

    name: str
    features: int
    batch: int
    epochs: int
    limit_s: float
    targets: tuple[float, ...]
    rates: dict[str, tuple[float, ...]]
    classes: int = 10


DEEPDIST, TREE, AVERAGE = "DeepDist", "`treeAggregate` per step", "average per pass"
AT_END_NAME = "DeepDist, updates at the end alone"
PROBLEMS = (
    Problem(
        name="digits",
        features=64,
        batch=16,
        epochs=70,
        limit_s=4.0,
        targets=(0.5, 0.2, 0.1, 0.05),
        rates={
            DEEPDIST: (0.3, 1.0, 3.0, 10.0),
            TREE: (1.0, 3.0, 10.0, 30.0),
            AVERAGE: (0.3, 1.0, 3.0, 10.0),
        },
    ),
    Problem(
        name="MNIST, 10,000 images",
        features=784,
        batch=32,
        epochs=17,
        limit_s=4.0,
        targets=(0.5, 0.35, 0.25, 0.2),
        rates={
            DEEPDIST: (0.1, 0.3, 1.0),
            TREE: (0.3, 1.0, 3.0),
            AVERAGE: (0.1, 0.3, 1.0),
        },
    ),
)


class Data:
    """A problem's rows, split by a seed: files for Spark's DataFrame, and arrays for the other methods' tasks.

    Args:
        problem: whose.
        seed: of the split.
        folder: where files may be made.
    """

    def __init__(self, problem: Problem, seed: int, folder: Path) -> None:
        x, y = rows_of(problem)
        order = np.random.default_rng(seed).permutation(len(x))
        num_train = len(x) * 5 // 6 // PARTITIONS * PARTITIONS
        train, test = order[:num_train], order[num_train:]
        self.x, self.y = torch.tensor(x[train]), torch.tensor(y[train])
        self.test_x, self.test_y = torch.tensor(x[test]), torch.tensor(y[test])
        self.folder = folder / f"{problem.features}-{seed}"
        self.tables = self.folder / "tables"
        self.tables.mkdir(parents=True)
        for part, rows in enumerate(np.split(train, PARTITIONS)):
            np.save(self.folder / f"x{part}.npy", x[rows])
            np.save(self.folder / f"y{part}.npy", y[rows])
            column = pa.FixedSizeListArray.from_arrays(pa.array(x[rows].reshape(-1)), problem.features)
            parquet.write_table(pa.table({"features": column, "label": y[rows]}), self.tables / f"{part}.parquet")


def rows_of(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """All rows (n, features), float32, and their classes (n,)."""
    if problem.name == "digits":
        x, y = load_digits(return_X_y=True)
        return (x / 16).astype(np.float32), y.astype(np.int64)
    folder = Path(os.environ["PACELINE_DATA"]) / "mnist"
    images = read_idx(folder / "train-images-idx3-ubyte.gz")[:12_000].reshape(12_000, -1)
    labels = read_idx(folder / "train-labels-idx1-ubyte.gz")[:12_000]
    return (np.array(images) / 255).astype(np.float32), np.array(labels).astype(np.int64)


def start(problem: Problem, seed: int) -> nn.Linear:
    """The model, as all methods begin with it."""
    torch.manual_seed(seed)
    return nn.Linear(problem.features, problem.classes)


def mean_loss(weight: torch.Tensor, bias: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Cross-entropy."""
    return nn.functional.cross_entropy(nn.functional.linear(x, weight, bias), y)


def curve(data: Data, kept: list[tuple[float, float, list[torch.Tensor]]], **info: float) -> Curve:
    """Losses of what was kept on the way: (seconds, bytes, weight and bias); of the first, the last, and some between."""
    kept = [kept[index] for index in np.unique(np.linspace(0, len(kept) - 1, MOST_LOSSES).astype(int))]
    weight, bias = kept[-1][2]
    found = nn.functional.linear(data.test_x, weight, bias).argmax(1)
    return Curve(
        np.array([one[0] for one in kept]),
        np.array([one[1] for one in kept]),
        np.nan_to_num([float(mean_loss(*one[2], data.x, data.y)) for one in kept], nan=np.inf),
        100 * float((found == data.test_y).float().mean()),
        info,
    )


def deepdist(spark: Any, problem: Problem, data: Data, rate: float, seed: int, algorithm: str = ALGORITHM) -> Curve:
    """`gradient` in the tasks, `descent` at the driver."""

    def gradient(model: Any, batch: dict[str, Any]) -> list[Any]:
        nn.functional.cross_entropy(model(batch["features"]), batch["label"]).backward()
        return [parameter.grad for parameter in model.parameters()]

    def descent(own: Any, update: dict[str, torch.Tensor]) -> None:
        for name, parameter in own.named_parameters():
            parameter -= rate * update[name]

    model = start(problem, seed)
    kept: list[tuple[float, list[torch.Tensor]]] = [(0.0, [one.detach().clone() for one in model.parameters()])]
    frame = spark.read.parquet(str(data.tables))
    begun_s = time.perf_counter()

    def at_driver(own: Any, update: dict[str, torch.Tensor]) -> None:
        descent(own, update)
        kept.append((time.perf_counter() - begun_s, [one.detach().clone() for one in own.parameters()]))

    told = pl.spark.DeepDist(model, algorithm, workers=PARTITIONS).train(
        frame,
        gradient,
        Sent(descent, at_driver),
        epochs=problem.epochs,
        batch_size=problem.batch,
        seed=seed,
    )
    assert told.partitions == PARTITIONS, "the rows lie in other partitions than the other methods'"
    each = told.sent_bytes / told.updates
    spread = [(at_s, number * each, values) for number, (at_s, values) in enumerate(kept)]
    return curve(data, spread, per_s=told.updates / told.duration_s)


class Sent:
    """A function here, and another one wherever this is sent.

    Args:
        sent: what its copies are.
        here: what it is itself.
    """

    def __init__(self, sent: Callable[..., Any], here: Callable[..., Any]) -> None:
        self._sent, self._here = sent, here

    def __call__(self, *arguments: Any) -> Any:
        """Calls the one that is here."""
        return self._here(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return copy.copy, (self._sent,)  # a function's copy is itself


def rows_at(folder: str, part: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A partition's rows, mapped into a task's memory."""
    torch.set_num_threads(1)
    x, y = (np.load(f"{folder}/{name}{part}.npy", mmap_mode="c") for name in "xy")
    return torch.from_numpy(x), torch.from_numpy(y)


def tree_aggregate(spark: Any, problem: Problem, data: Data, rate: float, seed: int) -> Curve:
    """One job per update: the gradient over all rows."""
    model = start(problem, seed)
    parts = spark.sparkContext.parallelize(range(PARTITIONS), PARTITIONS)
    folder, rows = str(data.folder), len(data.x)

    def step(values: list[np.ndarray]) -> list[np.ndarray]:
        def added(total: Any, part: int) -> Any:
            x, y = rows_at(folder, part)
            weight, bias = (torch.tensor(one, requires_grad=True) for one in values)
            (mean_loss(weight, bias, x, y) * len(y)).backward()
            assert weight.grad is not None
            assert bias.grad is not None
            own = [weight.grad.numpy(), bias.grad.numpy()]
            return own if total is None else summed(total, own)

        def summed(a: Any, b: Any) -> Any:
            return a if b is None else b if a is None else [one + other for one, other in zip(a, b, strict=True)]

        sums = parts.treeAggregate(None, added, summed)
        return [value - rate * one / rows for value, one in zip(values, sums, strict=True)]

    return in_jobs(problem, data, model, step)


def average_per_pass(spark: Any, problem: Problem, data: Data, rate: float, seed: int) -> Curve:
    """One job per pass: each partition trains by itself; the next pass begins with the models' mean."""
    model = start(problem, seed)
    parts = spark.sparkContext.parallelize(range(PARTITIONS), PARTITIONS)
    folder, batch = str(data.folder), problem.batch
    passes = iter(range(10**9))

    def step(values: list[np.ndarray]) -> list[np.ndarray]:
        number = next(passes)

        def trained(part: int) -> list[np.ndarray]:
            x, y = rows_at(folder, part)
            weight, bias = own = [torch.tensor(one, requires_grad=True) for one in values]
            order = torch.from_numpy(np.random.default_rng([seed, part, number]).permutation(len(y)))
            for rows in order.split(batch):
                mean_loss(weight, bias, x[rows], y[rows]).backward()
                with torch.no_grad():
                    for one in own:
                        assert one.grad is not None
                        one -= rate * one.grad
                        one.grad = None
            return [one.detach().numpy() for one in own]

        models = parts.map(trained).collect()
        return [np.mean(one, axis=0, dtype=np.float32) for one in zip(*models, strict=True)]

    return in_jobs(problem, data, model, step)


def in_jobs(problem: Problem, data: Data, model: nn.Linear, step: Callable[..., list[np.ndarray]]) -> Curve:
    """Steps until the time is up; each sends the model to all partitions, and as much back."""
    values = [one.detach().numpy().copy() for one in (model.weight, model.bias)]
    each = 2 * PARTITIONS * sum(one.nbytes for one in values)
    kept = [(0.0, 0.0, [torch.from_numpy(one) for one in values])]
    begun_s = time.perf_counter()
    while kept[-1][0] < problem.limit_s:
        values = step(values)
        at_s = time.perf_counter() - begun_s
        kept.append((at_s, float(each * len(kept)), [torch.from_numpy(one) for one in values]))
    return curve(data, kept, per_s=(len(kept) - 1) / kept[-1][0])


METHODS: dict[str, Callable[..., Curve]] = {DEEPDIST: deepdist, TREE: tree_aggregate, AVERAGE: average_per_pass}


def warm(spark: Any, data: Data) -> None:
    """Lets Spark's Python workers import what all methods need, before anything is timed."""
    folder = str(data.folder)
    spark.sparkContext.parallelize(range(8), 8).map(lambda part: len(rows_at(folder, part % PARTITIONS)[1])).collect()


def compared(spark: Any, problem: Problem, folder: Path) -> list[str]:
    """A problem's part of the page."""
    sets = [Data(problem, seed, folder) for seed in range(SEEDS)]
    warm(spark, sets[0])
    deepdist(spark, replace(problem, epochs=1), sets[0], 0.0, 0)
    tried = {
        name: [run(spark, problem, sets[0], rate, 0).on_the_way(TIMES_S) for rate in problem.rates[name]]
        for name, run in METHODS.items()
    }
    best = {name: problem.rates[name][int(np.argmin(losses))] for name, losses in tried.items()}
    curves: dict[str, list[Curve]] = {name: [] for name in METHODS}
    for seed in range(SEEDS):  # one after the other, so that whatever else the machine does meets all
        for name, run in METHODS.items():
            curves[name].append(run(spark, problem, sets[seed], best[name], seed))
    at_end = [deepdist(spark, problem, sets[seed], best[DEEPDIST], seed, AT_END) for seed in range(SEEDS)]
    control = [deepdist(spark, problem, sets[seed], -best[DEEPDIST], seed) for seed in range(SEEDS)]
    controlled = {**curves, AT_END_NAME: at_end, "DeepDist, up instead of down (control)": control}
    lines = [
        f"## {problem.name}",
        "",
        f"{len(sets[0].x):,} rows to train on in {PARTITIONS} partitions, batches of {problem.batch} (`treeAggregate` takes"
        f" all rows), {problem.epochs} epochs of DeepDist, {problem.limit_s:g} s of the others. The geometric mean"
        " of the loss at the times below, with seed 0, by rate; all that follows uses the best rate:",
        "",
        "| method | rates | losses |",
        "|---|---|---|",
    ]
    for name, losses in tried.items():
        rates = ", ".join(f"{rate:g}" for rate in problem.rates[name])
        lines.append(f"| {name} | {rates} | {', '.join(said(loss) for loss in losses)} |")
    lines += ["", *until(problem.targets, controlled), "", *verdicts(problem.targets, DEEPDIST, curves)]
    lines += verdicts(problem.targets[:1], AT_END_NAME, {AT_END_NAME: at_end, TREE: curves[TREE]})[:1]
    fails = all(np.isinf(one.first(problem.targets[0], one.times_s)) for one in control)
    lines.append(f"- The control {'fails: it comes to none of these losses.' if fails else 'DOES NOT FAIL.'}")
    lines += ["", "Loss against time, and against bytes; in brackets after a training's end:", ""]
    lines += [*losses_at(controlled, "time", TIMES_S), "", *losses_at(controlled, "bytes", MEGABYTES), ""]
    lines += ["| method | updates per s | time | sent | loss at the end | accuracy on other rows |", "|---" * 6 + "|"]
    for name, runs in controlled.items():
        figures = [median(one.info["per_s"] for one in runs), median(one.times_s[-1] for one in runs)]
        figures += [median(one.num_bytes[-1] for one in runs) / 1e6, median(one.losses[-1] for one in runs)]
        per_s, end_s, sent, loss = figures
        accuracy = median(one.accuracy for one in runs)
        lines.append(f"| {name} | {per_s:.1f} | {end_s:.1f} s | {sent:.2f} MB | {said(loss)} | {accuracy:.1f} % |")
    return lines


def session() -> Any:
    """Spark with two slots on this machine."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["OMP_NUM_THREADS"] = "1"
    builder: Any = SparkSession.builder
    return (
        builder.master(f"local[{PARTITIONS}]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.log.level", "OFF")
        .config("spark.executorEnv.PYTHONPATH", os.pathsep.join(sys.path))
        .getOrCreate()
    )


def main() -> None:
    """Print the page."""
    import pyspark

    torch.set_num_threads(1)
    about, with_ = machine(), versions()
    where = ", ".join(f"{key} {value}" for key, value in {**about, **with_, "Spark": pyspark.__version__}.items())
    lines = [
        "# DeepDist and batch-then-update on Spark",
        "",
        WHAT_HOLDS,
        "",
        "Printed by `python benchmarks/fidelity/deepdist.py --write`, in some five minutes.",
        "",
        f"DeepDist (`{ALGORITHM}`) is published as converging sooner than training in Spark that updates once per job. Here"
        " all train one linear layer (`cross_entropy`) in real Spark, `local[2]`, from the same start on the same rows;"
        f" losses are of all rows that are trained on. {SEEDS} seeds, which change split, start and order. A claim holds"
        " where DeepDist's slowest seed is sooner than the other's fastest.",
        "",
        "Time begins when Spark's Python workers have imported PyTorch. DeepDist's has its one job's start in it, in which"
        " tasks read their rows; the others' tasks find theirs in files that they map into memory. Bytes are those of"
        " parameters and gradients; what else Spark sends with each job, such as functions, is not counted, in favour of"
        " the two that start many. DeepDist's bytes are its total, spread evenly over its updates."
        f" `{AT_END}` is DeepDist without its point, updates that come as they are made: each partition sends one, at the end."
        " The control, which must fail, goes up instead of down: its rate is the best one below zero. The others take 4 s.",
    ]
    load_before = os.getloadavg()[0]
    spark = session()
    try:
        with tempfile.TemporaryDirectory() as folder:
            for problem in PROBLEMS:
                if problem.name != "digits" and not os.environ.get("PACELINE_DATA"):
                    continue
                lines += ["", *compared(spark, problem, Path(folder))]
    finally:
        spark.stop()
    load = f"load {load_before:.1f} in the minute before, {os.getloadavg()[0]:.1f} in the last one, its own included"
    show([*lines, "", f"Machine: {where}; {load}."], __file__)


if __name__ == "__main__":
    main()
