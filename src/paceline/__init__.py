"""Paceline: parallel, asynchronous and distributed SGD for PyTorch.

Everything public is named here and imported when first used, so that the command line's help does not wait for PyTorch.

>>> import paceline as pl
>>> pl.parse("leashed(persistence=1)")
Leashed(persistence=1, backoff=NoBackoff(), step_size=FullStep())
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline import spark as spark
    from paceline.algorithms import (
        ADPSGD,
        DPSGD,
        AdaptiveRevision,
        Algorithm,
        AllReduce,
        Async,
        Backoff,
        Bounded,
        ConstantBackoff,
        DaSGD,
        DiLoCo,
        Downpour,
        ExponentialBackoff,
        ExponentialStep,
        FullStep,
        Hogwild,
        InverseStep,
        Leashed,
        LinearBackoff,
        LocalSGD,
        Locked,
        Lockstep,
        Mode,
        Nesterov,
        NoBackoff,
        OuterSGD,
        ParameterServer,
        Rennala,
        Ringleader,
        Ringmaster,
        Sequential,
        StepSize,
        Sync,
        TailStep,
        parse,
        spec,
    )
    from paceline.algorithms.topology import (
        BipartiteExponential,
        BipartiteRing,
        Complete,
        Custom,
        Exponential,
        OnePeerExponential,
        Ring,
        Star,
        Topology,
        Torus,
    )
    from paceline.errors import PacelineError, UsageError, WorkerLostError
    from paceline.model_parallel.graph.placing import place
    from paceline.model_parallel.graph.plan import Plan
    from paceline.model_parallel.graph.problem import Device
    from paceline.model_parallel.hybrid.layout import HybridParallel
    from paceline.model_parallel.tensor.layout import TensorParallel
    from paceline.records.run_data import RunData
    from paceline.run.config import TrainConfig
    from paceline.run.launch import launch
    from paceline.run.recorded_order import ReplayMismatchError
    from paceline.run.replay import RecordedRun, replay
    from paceline.run.simulate import simulate
    from paceline.run.simulate_task import simulate_task
    from paceline.run.train import train
    from paceline.simulator.cluster import Cluster
    from paceline.simulator.faults import Faults
    from paceline.tasks.base import Task
    from paceline.worker.attach import attach
    from paceline.worker.worker import Worker

__version__ = "0.1.0"

__all__ = [
    "ADPSGD",
    "DPSGD",
    "AdaptiveRevision",
    "Algorithm",
    "AllReduce",
    "Async",
    "Backoff",
    "BipartiteExponential",
    "BipartiteRing",
    "Bounded",
    "Cluster",
    "Complete",
    "ConstantBackoff",
    "Custom",
    "DaSGD",
    "Device",
    "DiLoCo",
    "Downpour",
    "Exponential",
    "ExponentialBackoff",
    "ExponentialStep",
    "Faults",
    "FullStep",
    "Hogwild",
    "HybridParallel",
    "InverseStep",
    "Leashed",
    "LinearBackoff",
    "LocalSGD",
    "Locked",
    "Lockstep",
    "Mode",
    "Nesterov",
    "NoBackoff",
    "OnePeerExponential",
    "OuterSGD",
    "PacelineError",
    "ParameterServer",
    "Plan",
    "RecordedRun",
    "Rennala",
    "ReplayMismatchError",
    "Ring",
    "Ringleader",
    "Ringmaster",
    "RunData",
    "Sequential",
    "Star",
    "StepSize",
    "Sync",
    "TailStep",
    "Task",
    "TensorParallel",
    "Topology",
    "Torus",
    "TrainConfig",
    "UsageError",
    "Worker",
    "WorkerLostError",
    "attach",
    "launch",
    "parse",
    "place",
    "replay",
    "simulate",
    "simulate_task",
    "spec",
    "train",
]

_ELSEWHERE = {
    "Cluster": "simulator.cluster",
    "Device": "model_parallel.graph.problem",
    "Faults": "simulator.faults",
    "HybridParallel": "model_parallel.hybrid.layout",
    "PacelineError": "errors",
    "Plan": "model_parallel.graph.plan",
    "RecordedRun": "run.replay",
    "ReplayMismatchError": "run.recorded_order",
    "RunData": "records.run_data",
    "Task": "tasks.base",
    "TensorParallel": "model_parallel.tensor.layout",
    "TrainConfig": "run.config",
    "UsageError": "errors",
    "Worker": "worker.worker",
    "WorkerLostError": "errors",
    "attach": "worker.attach",
    "launch": "run.launch",
    "place": "model_parallel.graph.placing",
    "replay": "run.replay",
    "simulate": "run.simulate",
    "simulate_task": "run.simulate_task",
    "train": "run.train",
    **dict.fromkeys(
        (
            "BipartiteExponential", "BipartiteRing", "Complete", "Custom", "Exponential", "OnePeerExponential", "Ring",
            "Star", "Topology", "Torus",
        ),
        "algorithms.topology",
    ),
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "spark":  # a module, whose names are its own
        return importlib.import_module("paceline.spark")
    if name not in __all__:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"paceline.{_ELSEWHERE.get(name, 'algorithms')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
