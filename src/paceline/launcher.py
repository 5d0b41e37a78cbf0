"""`launch`: runs a training function in several workers on this machine."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline import checkpoint
from paceline.algorithms import Algorithm, registry
from paceline.checkpointing import Checkpointer
from paceline.environment import WorkerEnvironment
from paceline.errors import PacelineError, UsageError, WorkerLostError
from paceline.observe.progress import Progress
from paceline.observe.report import write_report
from paceline.observe.run import RunData, write_json
from paceline.observe.trace import write_trace
from paceline.placement import placement_registry
from paceline.recording import Recording, earlier_part, keep_earlier_part
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
        on_progress: called at every look at the workers, about 20 times a second.

    Returns:
        The run: records, and `result` with outcome `stopped` or `diverged`.

    Raises:
        UsageError: something cannot be launched as asked.
        WorkerLostError: a worker died that the algorithm cannot go on without.
        PacelineError: a worker's function raised an exception; its traceback is in the message.
    """
    check_launch(num_workers=workers, backend=backend, placement=placement)
    named = registry.build(algorithm) if isinstance(algorithm, str) else algorithm
    folder = Path(out) if out is not None else Path(resume) if resume is not None else None
    previous, newest = earlier_part(Path(resume)) if resume is not None else (RunData(), None)
    saved = checkpoint.load_parameters(newest) if newest is not None else None
    recording = Recording(previous, workers, lockstep=False)
    checkpointer = None

    def about_checkpoint(number: int) -> dict[str, Any]:
        return {
            "samples": recording.samples,
            "elapsed_s": recording.elapsed_s(supervisor),
            "started_s": (supervisor.started_s or 0.0) - recording.elapsed_before_s,
            "initial_loss": None,
        }

    if resume is None and folder is not None and folder.is_dir() and any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty: choose another `out`, or go on with that run by `resume`.")
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        keep_earlier_part(folder, previous)
        checkpointer = Checkpointer(folder / "checkpoint", checkpoint_every_s, newest)

    def tick(supervisor: Supervisor) -> None:
        _learn_algorithm(recording, supervisor)
        recording.take(supervisor)
        if checkpointer is not None:
            assert supervisor.arena is not None
            epochs_done = float(supervisor.arena.load("epoch"))
            checkpointer.tick(supervisor, recording.elapsed_s(supervisor), epochs_done, about_checkpoint)
        if on_progress is not None:
            on_progress(recording.progress(supervisor, share_done=0.0, epoch=None))

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
            options={"intra_op_threads": intra_op_threads, "pin": placement_registry.build(placement).pin},
        ),
        backend=backend,
        restarts=restarts,
        folder=folder,
        on_tick=tick,
        first_batch=saved.next_batch if saved is not None else 0,
        first_version=saved.version if saved is not None else 0,
    )
    config = {"workers": workers, "backend": backend, "seed": seed, "placement": placement}
    if folder is not None:
        write_json(folder / "config.json", config)
    supervisor.run()
    if supervisor.arena is None and supervisor.all_returned:
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
    result = recording.result(supervisor, records, about=about)
    if supervisor.algorithm is not None and supervisor.algorithm.gossip and supervisor.arena is not None:
        result["consensus_distance"] = supervisor.consensus_distance()
    run = RunData({**config, **about}, result, records, [])
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
