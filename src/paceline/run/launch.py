"""`launch`: runs a training function in several workers on this machine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.algorithms import Algorithm
from paceline.errors import UsageError, shown
from paceline.model_parallel.graph.plan import Plan
from paceline.model_parallel.graph.program import PlacedProgram
from paceline.model_parallel.graph.replica_part import check_replicas
from paceline.observe.progress import Progress
from paceline.records.run_data import RunData
from paceline.run.config import TrainConfig
from paceline.run.driver import Driver
from paceline.run.earlier_part import EarlierPart
from paceline.run.inputs import source_digest
from paceline.run.loops import Loop
from paceline.specs.bounds import check_run
from paceline.specs.file_loop import FileLoop
from paceline.specs.goal import Goal
from paceline.system.folder_lock import run_folder
from paceline.system.uncaught import say_alone
from paceline.worker.chosen_algorithm import given_algorithm
from paceline.worker.supervised import check_launch


def launch(
    train: Callable[[], Any],
    *,
    workers: int,
    algorithm: Algorithm | str | None = None,
    backend: str = "processes",
    seed: int | None = None,
    restarts: int = 0,
    min_workers: int = 1,
    placement: str = "first-touch",
    intra_op_threads: int = 1,
    out: Path | str | None = None,
    resume: Path | str | None = None,
    checkpoint_every_s: float = 10.0,
    target_loss: float | None = None,
    target_accuracy: float | None = None,
    limit_s: float | None = None,
    limit_samples: int | None = None,
    evaluate_every_samples: int | None = None,
    slow: Mapping[int, float] | None = None,
    plan: Plan | None = None,
    step_deadline_s: float = 60.0,
    on_progress: Callable[[Progress], None] | None = None,
) -> RunData:
    """Calls `train()` in every worker; inside, `attach` makes them one run.

    Worker processes come from a fork server that has PyTorch and the kernels loaded; the first launch of a program starts it.
    The launcher notices a dead worker at once, and the others continue if the algorithm can.

    Args:
        train: a function at the top level of a module (any callable with `backend="threads"`). It sets its own seeds: all
            workers begin with worker 0's model. Its return value is not passed on; save results in the function, or read them
            from the checkpoint in `out`.
        workers: how many.
        algorithm: a spec or an instance; None if `attach` names it, or a resumed run keeps its own.
        backend: "processes" or "threads".
        seed: of the order of samples in `worker.batches`, and of everything random in the algorithm; None: that of the resumed
            run, or 0.
        restarts: how many dead workers are replaced by new processes.
        min_workers: if fewer than this many workers are left, they wait for replacements; if none comes, the run ends with
            `WorkerLostError`, and under `lockstep` and `all-reduce` with a checkpoint. For methods with means of all workers.
        placement: spec of where the shared parameters lie.
        intra_op_threads: threads per worker inside one PyTorch operation.
        out: folder for events, result, trace, report and checkpoints; None: nothing is written.
        resume: folder of a run to resume from its newest checkpoint; `worker.batches` skips the finished epochs.
        checkpoint_every_s: at most one checkpoint in this time, at the beginning of an epoch (with a plan, of a step); 0: at
            every epoch.
        target_loss: stop once the mean of the last 100 losses of applied gradients, from `worker.report`, is at most this.
        target_accuracy: instead: stop once the `evaluate` passed to `attach` finds at least this.
        limit_s: stop after this many seconds of training.
        limit_samples: stop after this many samples of applied gradients.
        evaluate_every_samples: call `evaluate` this often, unless it is still running; None: every quarter of an epoch with a
            target accuracy, else every epoch (10,000 samples if `worker.batches` cannot know how long one is).
        slow: by worker, how many times as long its gradients take: it sleeps for the rest of that time.
        plan: from `place`, of a model whose parts the workers have; their loop attaches `plan.part(model)`. Without an
            algorithm, there is one worker for each of the plan's devices, and all get the same batches in the same order. With
            `downpour`, each of its replicas has as many workers, and each part has its own servers.
        step_deadline_s: with a plan: how long a worker waits for another in a step. A death is noticed sooner.
        on_progress: called whenever the launcher checks the workers, about 20 times a second.

    A run that is stopped hands out no more batches, so that its loops end by themselves; a worker that waits for others
    continues after its `with`. A separate process beside worker 0's makes the evaluations, and ends with it.

    Ctrl-C, and SIGTERM unless the program handles it, stop the run likewise: parameters, records and result are written, and
    then the signal takes its course. A Paceline error that the program does not catch is printed in one line, and the exit
    code is 2 if the user can correct it.

    Returns:
        The run: records, evaluations, and `result` with outcome `converged`, `stopped` or `diverged`.

    Raises:
        UsageError: the arguments cannot be launched, or another process writes the folder.
        NotWrittenError: a file could not be written; the error's `run` has the measurements, if the run has ended.
        WorkerLostError: a worker died without which the algorithm cannot continue.
        PacelineError: a worker's function raised an exception, whose traceback is in the message; all workers have died; or
            none has made an update.
    """
    say_alone()
    named = given_algorithm(algorithm)
    if plan is not None:
        named = _placed(plan, named, workers, backend)
    servers = named.needs.server_programs * (plan.workers if plan is not None else 1) if named is not None else 0
    check_launch(num_workers=workers, backend=backend, placement=placement, num_servers=servers)
    given = {
        "seed": 0 if seed is None else seed,
        "restarts": restarts,
        "min_workers": min_workers,
        "intra_op_threads": intra_op_threads,
        "checkpoint_every_s": checkpoint_every_s,
    }
    check_run(given)  # by the names that they have here
    if named is not None:
        named.check_min_workers(min_workers, workers)
    config = TrainConfig(
        task=str(getattr(train, "__name__", "train")),
        workers=workers,
        backend=backend,
        placement=placement,
        slow=slow,
        **given,
    )
    goal = Goal(
        target_loss=target_loss,
        target_accuracy=target_accuracy,
        limit_s=limit_s,
        limit_samples=limit_samples,
        evaluate_every_samples=evaluate_every_samples,
    )
    earlier_folder = Path(resume) if resume is not None else None
    folder = Path(out) if out is not None else earlier_folder
    with run_folder(folder, earlier_folder):
        earlier = EarlierPart.of(earlier_folder).change_to(named, workers)
        named = named or earlier.algorithm
        loop = Loop(
            function=train,
            config=config if seed is not None else replace(config, seed=earlier.run.config.get("seed", 0)),
            algorithm=named,
            goal=goal,
            command=" ".join(sys.argv),
            plan=plan,
            step_deadline_s=step_deadline_s,
            script=source_digest(train),
            file=str(train.path) if isinstance(train, FileLoop) else None,
        )
        return Driver(loop, folder, earlier, on_progress=on_progress).run()


def _placed(plan: Plan, named: Algorithm | None, workers: int, backend: str) -> Algorithm:
    """The program of a placed model's workers; refuses a plan that does not fit the launch."""
    if not isinstance(plan, Plan):
        raise UsageError(f"plan must be a plan from paceline.place, not {shown(plan)}.")
    if backend != "processes":
        raise UsageError("The parts of a placed model wait for each other: launch them as processes.")
    if named is not None:
        check_replicas(named)
        if workers % plan.workers:
            raise UsageError(
                f"A replica has one worker for each of the plan's {plan.workers} devices, but there are {workers} workers:"
                f" start a multiple of {plan.workers}."
            )
        return named
    if workers != plan.workers:
        raise UsageError(
            f"The plan is for {plan.workers} workers, not {workers}: place the model on {workers} devices, or train replicas"
            ' of it with algorithm="downpour".'
        )
    return PlacedProgram()
