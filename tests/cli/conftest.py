"""A stand-in for training, so that these tests are about the command line only: it records what it was asked for."""

import contextlib
import json
import sys
import types
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest
from typer.testing import CliRunner

from paceline.data.plan import partition_registry
from paceline.memory.placement import placement_registry
from paceline.specs.registry import Registry


class Quiet:
    """What every algorithm says of itself: here nothing."""

    overrides: ClassVar[str] = ""

    def caution(self, num_workers: int) -> str:
        return ""


@dataclass(frozen=True, kw_only=True)
class Hogwild(Quiet):
    """Racing updates.

    More words.
    """

    tolerates: ClassVar[tuple[str, ...]] = ("kill", "straggler")
    copy: bool = False


@dataclass(frozen=True, kw_only=True)
class Sequential(Quiet):
    """One worker."""

    max_workers: ClassVar[int | None] = 1


ALGORITHMS = Registry("algorithm")
ALGORITHMS.register("hogwild", Hogwild)
ALGORITHMS.register("sequential", Sequential)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    task: str = "digits-mlp"
    algorithm: str = "hogwild"
    workers: int = 2
    backend: str = "processes"
    epochs: float | None = None
    steps: int | None = None
    batch_size: int | None = None
    learning_rate: float | None = None
    momentum: float | None = None
    optimizer: str = "sgd"
    optimizer_state: str = "per-worker"
    target_loss: float | None = None
    target_accuracy: float | None = None
    partition: str = "dynamic"
    placement: str = "first-touch"
    layout: str | None = None
    seed: int = 0
    data: Path | None = None
    restarts: int = 0
    min_workers: int = 1
    intra_op_threads: int = 1

    @property
    def built_algorithm(self):
        return ALGORITHMS.build(self.algorithm)

    def resolved(self, task):
        partition_registry.build(self.partition)
        placement_registry.build(self.placement)
        return self


@dataclass
class RunData:
    config: dict = field(default_factory=dict)
    result: dict = field(default_factory=dict)
    records: dict = field(default_factory=dict)
    evaluations: list = field(default_factory=list)


class Live(contextlib.nullcontext):
    def __init__(self, title, *, console):
        console.print(title, soft_wrap=True)
        super().__init__(self)

    def update(self, progress):
        raise AssertionError("the stand-in for training reports no progress")


@dataclass
class Calls:
    """What the command line asked for, and what training answers."""

    trained: list = field(default_factory=list)
    reported: list = field(default_factory=list)
    outcomes: dict = field(default_factory=dict)
    raises: dict = field(default_factory=dict)


@pytest.fixture
def training(monkeypatch, tmp_path):
    calls = Calls()

    def train(config, *, out=None, resume=None, command="", on_progress=None):
        calls.trained.append(types.SimpleNamespace(config=config, out=out, resume=resume, command=command))
        if config.algorithm in calls.raises:
            raise calls.raises[config.algorithm]
        outcome = calls.outcomes.get(config.algorithm, "stopped")
        result = {"algorithm": config.algorithm, "workers": config.workers, "steps": 412, "outcome": outcome}
        result["outcome_reason"] = "loss is not finite at step 412" if outcome == "diverged" else None
        out.mkdir(parents=True, exist_ok=True)
        (out / "result.json").write_text(json.dumps(result, indent=2))
        return RunData(config=asdict(config), result=result)

    def module(name, **members):
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**members))

    module("paceline.run.train", train=train)
    module("paceline.run.config", TrainConfig=TrainConfig)
    module("paceline.algorithms", registry=ALGORITHMS)
    module("paceline.records.run_data", RunData=RunData)
    module("paceline.observe.progress", LiveTable=Live)
    module(
        "paceline.observe.tables",
        result_table=lambda result: f"TABLE of {result['algorithm']}",
        comparison_table=lambda results: f"TABLE of {len(results)} runs",
    )
    module("paceline.observe.report", write_report=lambda runs, path, **more: calls.reported.append((runs, path, more)))
    monkeypatch.chdir(tmp_path)
    return calls


@pytest.fixture
def run():
    from paceline.cli.app import app

    def invoke(*arguments):
        result = CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="paceline")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return invoke
