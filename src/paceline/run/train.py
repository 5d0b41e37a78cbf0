"""`paceline train` as a function: one task, one algorithm, real workers, and a folder with everything that was measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.algorithms import Algorithm
from paceline.data.shared import share_dataset
from paceline.errors import UsageError
from paceline.model_parallel.hybrid.choose import checked_layout
from paceline.model_parallel.hybrid.layout import HybridParallel
from paceline.model_parallel.hybrid.worker_part import check_optimizer_of
from paceline.model_parallel.layouts import check_layout, layout_of, layout_registry
from paceline.observe.progress import Progress
from paceline.records.run_data import RunData
from paceline.run.config import TrainConfig
from paceline.run.driver import Driver
from paceline.run.earlier_part import EarlierPart
from paceline.run.inputs import inputs_of
from paceline.run.loops import Loop, TaskParts
from paceline.run.task_worker import TaskWorker
from paceline.specs.bounds import check_vectors
from paceline.specs.registry import check_optimizer
from paceline.system.folder_lock import run_folder
from paceline.tasks.base import fetch
from paceline.tasks.load import load_task
from paceline.worker.evaluator import initial_loss, task_evaluator
from paceline.worker.supervised import check_launch

_PROGRESS_EVERY_S = 0.2


def train(
    config: TrainConfig,
    *,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    command: str = "",
    on_progress: Callable[[Progress], None] | None = None,
) -> RunData:
    """Trains a task with real workers on this machine.

    Args:
        config: the run's configuration.
        out: the run's folder, for events, result, trace, report and checkpoints; None: nothing is written.
        resume: folder of a run to resume from its newest checkpoint; with `out` None the run continues in that folder.
        command: the command line, for the report.
        on_progress: called a few times a second.

    Returns:
        The run; `result["outcome"]` is converged, stopped, diverged or crashed.

    Ctrl-C, and SIGTERM unless the program handles it, end it as a target would: parameters, records and result are written,
    and then the signal takes its course.

    Raises:
        UsageError: the configuration cannot be run, or another process writes the folder; nothing was written.
        NotWrittenError: a file could not be written; the error's `run` has the measurements, if the run has ended.
    """
    out, resume = (Path(one) if one is not None else None for one in (out, resume))
    with run_folder(out if out is not None else resume, resume):
        driver = prepared(config, out, resume, command=command, on_progress=on_progress)
        driver.warn()
        return driver.run()


def prepared(
    config: TrainConfig,
    out: Path | None = None,
    resume: Path | None = None,
    *,
    command: str = "",
    on_progress: Callable[[Progress], None] | None = None,
    progress_every_s: float = _PROGRESS_EVERY_S,
) -> Driver:
    """The run for `train`, checked before anything is written; the caller locks its folder."""
    task = load_task(config.task)
    resolved = config.resolved(task)
    algorithm = resolved.built_algorithm
    check_launch(
        num_workers=config.workers,
        backend=config.backend,
        placement=config.placement,
        num_servers=algorithm.needs.server_programs,
    )
    algorithm.check(config.workers)
    algorithm.check_min_workers(config.min_workers, config.workers)
    served = algorithm.needs.kind == "served"
    if (algorithm.lockstep or algorithm.gossip or served) and config.optimizer_state == "shared":
        where = "at its servers" if served else "on every worker"
        raise UsageError(
            f"{config.algorithm} keeps a separate optimizer {where}; leave out the shared optimizer state."
        )
    train_set, test_set = task.load(config.data)
    plan = resolved.plan(train_set)
    algorithm = resolved.delayed_algorithm(plan)
    evaluator = task_evaluator(task, test_set, config.seed)
    num_vectors = algorithm.needs.num_vectors(config.workers)
    check_vectors(num_vectors, evaluator.num_parameters, evaluator.vector_bytes)
    assert resolved.learning_rate is not None
    parameters = evaluator.model.parameters()
    built = check_optimizer(config.optimizer, resolved.learning_rate, config.momentum, parameters=parameters)
    algorithm.check_optimizers(built, config.workers)
    if resolved.layout is not None:
        sample, _ = fetch(train_set, torch.arange(1))
        resolved = dataclasses.replace(resolved, layout=_checked_layout(resolved, algorithm, evaluator.model, sample))
    handle, segment = share_dataset(train_set)
    earlier = EarlierPart.of(resume).change_to(resolved.built_algorithm, config.workers)
    _check_same(earlier.run.config, resolved)
    before = earlier.run.result
    loss = before["initial_loss"] if "initial_loss" in before else initial_loss(task, evaluator, train_set)
    loop = Loop(
        function=TaskWorker(resolved, algorithm, plan, handle),
        config=resolved,
        algorithm=algorithm,
        goal=resolved.goal(loss),
        command=command,
        task=TaskParts(
            plan=plan,
            evaluator=evaluator,
            initial_loss=loss,
            inputs=inputs_of(config.task, train_set),
            dataset=segment,
        ),
    )
    folder = out if out is not None else resume
    return Driver(loop, folder, earlier, on_progress=on_progress, progress_every_s=progress_every_s)


def _checked_layout(config: TrainConfig, algorithm: Algorithm, model: nn.Module, inputs: Tensor) -> str:
    """The layout's spec, checked against the algorithm, the optimizer and the model."""
    assert config.layout is not None
    layout = layout_of(config.layout)
    check_layout(layout, algorithm)
    if not isinstance(layout, HybridParallel):
        raise UsageError(
            "A tensor layout needs your own loop, with a model built from the layers of paceline.model_parallel: give "
            "the layout to paceline.attach, and start the loop with paceline.launch or torchrun."
        )
    check_optimizer_of(config.make_optimizer(list(model.parameters())))
    layout = checked_layout(layout, model, inputs, workers=config.workers, batch_size=config.batch_size)
    return layout_registry.spec(layout)


def _check_same(before: dict[str, Any], config: TrainConfig) -> None:
    """Refuses to resume from a run with an incompatible configuration."""
    if not before:
        return
    for name in ("inject_staleness", "staleness_ramp_epochs"):  # the checkpoint contains waiting gradients
        if before.get(name) != getattr(config, name):
            raise UsageError(
                f"The run was started with {name} {before.get(name)}, and can only be resumed with that, not"
                f" {getattr(config, name)}."
            )
    if before.get("layout") != config.layout:
        raise UsageError(
            f"The run was started with layout {before.get('layout') or 'none'}, whose workers' optimizers have the state of"
            f" their own shards: it cannot be resumed with {config.layout or 'none'}."
        )
    workers = before.get("workers", config.workers)
    if config.partition != "dynamic" and workers != config.workers:
        raise UsageError(
            f"With --partition {config.partition} every worker has its own part of the data, so the run can only be"
            f" resumed with {workers} workers, not {config.workers}."
        )
