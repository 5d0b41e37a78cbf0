"""`launch`: runs a training function in several workers on this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline import checkpoint
from paceline.algorithms import Algorithm, registry
from paceline.bounds import check_run
from paceline.checkpointing import Checkpointer
from paceline.chosen_algorithm import given_algorithm
from paceline.environment import WorkerEnvironment
from paceline.errors import PacelineError, UsageError, WorkerLostError
from paceline.goals import Goal
from paceline.judging import Judge
from paceline.observe.progress import Progress
from paceline.observe.report import write_report
from paceline.observe.run import RunData, write_json
from paceline.observe.trace import write_trace
from paceline.paths import make_folder
from paceline.placement import placement_registry
from paceline.recording import Recording, batches_done, earlier_part, keep_earlier_part
from paceline.slow_workers import checked_factors
from paceline.supervised import check_launch
from paceline.supervisor import Supervisor

__all__ = ["launch", "raise_failure"]


def launch(
    train: Callable[[], Any],
    *,
    workers: int,
    algorithm: Algorithm | str | None = None,
    backend: str = "processes",
    seed: int = 0,
    restarts: int = 0,
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
    on_progress: Callable[[Progress], None] | None = None,
) -> RunData:
    """Calls `train()` in every worker; inside, `attach` makes them one run.

    Worker processes come from a fork server that has PyTorch and the kernels loaded; the first launch of a program starts it.
    A worker that dies is noticed at once: the others go on where the algorithm can.

    Args:
        train: a function at the top level of a module (any callable with `backend="threads"`). Seeds are its own business:
            the first worker to attach gives all of them its initial parameters. What it returns is not passed on; let it save
            what is wanted, or read it from the checkpoint in `out`.
        workers: how many.
        algorithm: a spec or an instance; None where `attach` names it.
        backend: "processes" or "threads".
        seed: of the order of samples in `worker.batches`, and of everything random in the algorithm.
        restarts: how many dead workers are replaced by new processes.
        placement: spec of where the shared parameters lie.
        intra_op_threads: threads per worker inside one PyTorch operation.
        out: folder for events, result, trace, report and checkpoints; None: nothing is written.
        resume: folder of a run to go on with from its newest checkpoint; epochs that are done are skipped by
            `worker.batches`.
        checkpoint_every_s: at most one checkpoint in this time, at the beginning of an epoch; 0: at every epoch.
        target_loss: stop once the mean of the last 100 losses of applied gradients that `worker.report` told is at most this.
        target_accuracy: instead: stop once the `evaluate` that `attach` was given finds at least this.
        limit_s: stop after so many seconds of training.
        limit_samples: stop after so many samples of applied gradients.
        evaluate_every_samples: call `evaluate` so often, unless it is still at it; None: every quarter of an epoch with a
            target accuracy, else every epoch (10,000 samples where `worker.batches` cannot know how long one is).
        slow: by worker, how many times as long its gradients take: it sleeps the rest of that time before it goes on.
        on_progress: called at every look at the workers, about 20 times a second.

    A run that is stopped hands out no more batches, so that its loops end by themselves; whoever waits for others then goes on
    after its `with`. Evaluations are made by a process of their own beside worker 0's, and end with that.

    Returns:
        The run: records, evaluations, and `result` with outcome `converged`, `stopped` or `diverged`.

    Raises:
        UsageError: something cannot be launched as asked.
        WorkerLostError: a worker died that the algorithm cannot go on without.
        PacelineError: a worker's function raised an exception; its traceback is in the message.
    """
    named = given_algorithm(algorithm)
    servers = named.memory.server_programs if named is not None else 0
    check_launch(num_workers=workers, backend=backend, placement=placement, num_servers=servers)
    check_run(
        {
            "seed": seed,
            "restarts": restarts,
            "intra_op_threads": intra_op_threads,
            "checkpoint_every_s": checkpoint_every_s,
        }
    )
    factors = checked_factors(slow, workers)
    goal = Goal(
        target_loss=target_loss,
        target_accuracy=target_accuracy,
        limit_s=limit_s,
        limit_samples=limit_samples,
        evaluate_every_samples=evaluate_every_samples,
    )
    folder = Path(out) if out is not None else Path(resume) if resume is not None else None
    previous, newest = earlier_part(Path(resume)) if resume is not None else (RunData(), None)
    saved = checkpoint.load_parameters(newest) if newest is not None else None
    recording = Recording(previous, workers, lockstep=False)
    judge = Judge(goal, recording)
    checkpointer = None

    def about_checkpoint(number: int) -> dict[str, Any]:
        return {
            "samples": recording.samples,
            "elapsed_s": recording.elapsed_s(supervisor),
            "started_s": (supervisor.started_s or 0.0) - recording.elapsed_before_s,
            "initial_loss": None,
            "batches_missed": recording.batches_missed,
        }

    if resume is None and folder is not None and folder.is_dir() and any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty: choose another `out`, or go on with that run by `resume`.")
    is_new = folder is not None and not folder.exists()
    if folder is not None:
        make_folder(folder)
        keep_earlier_part(folder, previous)
        checkpointer = Checkpointer(folder / "checkpoint", checkpoint_every_s, newest)

    def tick(supervisor: Supervisor) -> None:
        _learn_algorithm(recording, supervisor)
        recording.take(supervisor)
        judge.tick(supervisor)
        if checkpointer is not None:
            assert supervisor.arena is not None
            epochs_done = float(supervisor.arena.load("epoch"))
            checkpointer.tick(supervisor, recording.elapsed_s(supervisor), epochs_done, about_checkpoint)
        if on_progress is not None:
            share = judge.share_done(recording.elapsed_s(supervisor))
            on_progress(recording.progress(supervisor, share_done=share, epoch=None))

    def end(supervisor: Supervisor) -> None:
        recording.take(supervisor)
        judge.end(supervisor)
        judge.close()

    supervisor = Supervisor(
        train,
        num_workers=workers,
        algorithm=named,
        environment=WorkerEnvironment(
            worker_id=0,
            num_workers=workers,
            incarnation=0,
            algorithm=None,
            seed=seed,
            connection=None,
            checkpoint=folder / "checkpoint" if folder is not None else None,
            resume=newest,
            placement=placement,
            options={
                "intra_op_threads": intra_op_threads,
                "pin": placement_registry.build(placement).pin,
                "goal": goal if goal.any or folder is not None else None,
                "slow": factors,
                "batches_done": batches_done(previous, saved.next_batch) if saved is not None else (),
            },
        ),
        backend=backend,
        restarts=restarts,
        folder=folder,
        on_tick=tick,
        on_end=end,
        first_batch=saved.next_batch if saved is not None else 0,
        first_version=saved.version if saved is not None else 0,
    )
    config = {"workers": workers, "backend": backend, "seed": seed, "placement": placement} | dataclasses.asdict(goal)
    config |= {"slow": factors or None}
    if folder is not None:
        write_json(folder / "config.json", config)
    try:
        supervisor.run()
    finally:
        judge.close()
    unattached = supervisor.arena is None and supervisor.all_returned
    refused = supervisor.started_s is None and supervisor.outcome.kind == "usage"
    if folder is not None and resume is None and (unattached or refused):
        _take_back(folder, supervisor, is_new=is_new)
    if refused:
        raise_failure(supervisor)
    if unattached:
        raise UsageError(
            f"{getattr(train, '__name__', 'train')} never called paceline.attach, so its workers shared nothing."
        )
    _learn_algorithm(recording, supervisor)
    recorded = recording.records(supervisor)
    records = recording.decided(supervisor, recorded)
    about = {
        "task": getattr(train, "__name__", "train"),
        "algorithm": registry.spec(supervisor.algorithm) if supervisor.algorithm is not None else None,
        "workers": workers,
        "backend": backend,
        "seed": seed,
        "command": " ".join(sys.argv),
    }
    result = recording.result(
        supervisor, records, recorded, about=about, target_loss=goal.target_loss, target_accuracy=goal.target_accuracy
    )
    if supervisor.algorithm is not None and supervisor.algorithm.gossip and supervisor.arena is not None:
        result["consensus_distance"] = supervisor.consensus_distance()
    run = RunData({**config, **about}, result, records, recording.evaluations)
    if folder is not None:
        if checkpointer is not None and supervisor.outcome.name == "stopped" and supervisor.arena is not None:
            # Each worker claimed one batch of the next epoch, and so learnt that this one had ended.
            last_batch = max((int(rows["batch"].max()) for rows in records.values() if len(rows)), default=-1)
            parameters = supervisor.parameters(min(supervisor.arena.load("next_batch"), last_batch + 1))
            checkpointer.end(supervisor, parameters, about_checkpoint)
        dataclasses.replace(run, records=recorded).save(folder)
        write_trace(run, folder / "trace.json")
        write_report(
            [run], folder / "report.html", title=f"{about['task']}: {about['algorithm']}", command=about["command"]
        )
        supervisor.spool.remove()
    raise_failure(supervisor)
    return run


def _take_back(folder: Path, supervisor: Supervisor, *, is_new: bool) -> None:
    """Removes what was written for a run that never began: the same folder can be named again."""
    supervisor.spool.remove()
    (folder / "config.json").unlink()
    if is_new:
        with contextlib.suppress(OSError):  # the user's function has written into it
            folder.rmdir()


def _learn_algorithm(recording: Recording, supervisor: Supervisor) -> None:
    """The algorithm is known once the first worker has attached, which may have named it."""
    if supervisor.algorithm is not None:
        recording.gossip = supervisor.algorithm.gossip
        recording.lockstep = supervisor.algorithm.together


def raise_failure(supervisor: Supervisor) -> None:
    """Raises what ended a run as `crashed`, in the caller."""
    outcome = supervisor.outcome
    if outcome.name != "crashed":
        return
    if outcome.kind == "usage":
        raise UsageError(outcome.reason)
    if outcome.kind == "worker-lost":
        raise WorkerLostError(outcome.reason)
    raise PacelineError(outcome.reason + (f"\n\n{outcome.trace}" if outcome.trace else ""))
