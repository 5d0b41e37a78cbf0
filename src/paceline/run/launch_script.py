"""`paceline launch`: starts workers on this machine that join a run, and watches each to its end.

The workers are the run; the agent only watches. It never ends a worker because another died, and can itself be killed: its
workers continue, even if it held the join point. Each worker writes its records into the run's folder, and the agent makes
the result from them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.algorithms import Algorithm, registry
from paceline.errors import NotWrittenError, UsageError, name_workers
from paceline.membership.elastic import check_joinable, num_places, trains_in_rounds
from paceline.membership.join_point import JoinPoint
from paceline.model_parallel.graph.program import algorithm_named
from paceline.observe.report import write_run
from paceline.records.run_data import RunData, read_events
from paceline.run.joined_result import joined_result
from paceline.system import files
from paceline.system.exit_codes import how_ended
from paceline.system.folder_lock import run_folder
from paceline.system.interrupts import Interruption, noted
from paceline.system.limits import temporary_folder
from paceline.system.uncaught import SAID
from paceline.transport.device import gpu_of

#: Makes glibc keep freed memory for the next step's activations and messages, as workers of `pl.launch` do.
KEEP_FREED_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(1 << 30)}
_LOOK_EVERY_S = 0.05
_WORKER_FILES = ("worker-*.json", "events-*.jsonl", "model.pt")
_GRACE_S = 20.0  # in which ending workers write their files; Slurm and Kubernetes give half a minute


def name_of(command: Sequence[str]) -> str:
    """The script's or module's name."""
    return command[1] if command[0] == "-m" and len(command) > 1 else Path(command[0]).stem


def free_address() -> str:
    """A free address on loopback, for a run on this machine alone."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@dataclass
class _Child:
    process: subprocess.Popen[bytes]
    place: int  # among the workers of this machine
    reported: bool = False  # its end has been reported


@dataclass
class Agent:
    """The workers of one run on this machine."""

    command: Sequence[str]  # what each worker runs: a script and its arguments, as for `python`
    address: str  # HOST:PORT of the join point
    workers: int
    # How many workers the run has in all; None: as the first agent decides, by default the number that it starts.
    of: int | None
    key: Path | None  # key file of the run; needed off loopback
    algorithm: str | None  # spec for all workers; None: the script names it
    restarts: int
    deadline_s: int  # how long workers wait for each other
    folder: Path  # where workers write their records, and the result goes
    say: Callable[[str], None]
    trains: bool = True  # whether the workers train; otherwise they have no records, and nothing is written
    # If fewer than this many workers of the run are left, they wait; None: as the environment says.
    min_workers: int | None = None
    notes: list[str] = field(default_factory=list)
    _children: list[_Child] = field(default_factory=list)
    _num_restarted: int = 0
    _lock: int = -1  # of the folder; workers hold it, too, so that they can continue if the agent is killed
    _said: str = ""

    def run(self) -> RunData | None:
        """Starts the workers of this machine, and returns when all have ended.

        Returns:
            the run; None if they do not train, or refused before the first step.

        Raises:
            UsageError: a usage error that every worker would raise.
        """
        algorithm = registry.build(self.algorithm) if self.algorithm is not None else None
        if algorithm is not None:
            check_joinable(algorithm)
        with (
            run_folder(self.folder if self.trains else None) as self._lock,
            contextlib.closing(JoinPoint(self.address, self.key, self.deadline_s)) as join_point,
        ):
            of = num_places(join_point, self.of, own=self.workers)
            if self.workers > of:
                raise UsageError(
                    f"The run at {self.address} has {of} workers in all, fewer than the {self.workers} to start here: lower"
                    " --workers, or give --of on the first machine."
                )
            if algorithm is not None:
                check_joinable(algorithm, of)
                algorithm.check_min_workers(self.min_workers or 1, of)
            where = "Holding" if join_point.holds else "Joining at"
            into = f", into {self.folder}" if self.trains else ""
            self.say(f"{where} {self.address}: {self.workers} of {of} workers start here{into}")
            temporary = tempfile.TemporaryDirectory(prefix="paceline-", dir=temporary_folder())
            with noted() as interruption, temporary as self._said:
                try:
                    for _ in range(self.workers):
                        self._start(of)
                    while not interruption and not all(child.reported for child in self._children):
                        self._look(of)
                        time.sleep(_LOOK_EVERY_S)
                finally:
                    self._end_all()
                return self._result(of, interruption) if self.trains else None

    def _start(self, of: int) -> None:
        taken = {child.place for child in self._children if child.process.poll() is None}
        place = min(set(range(self.workers)) - taken, default=0)
        environment = {
            "OMP_NUM_THREADS": "1",
            **KEEP_FREED_MEMORY,
            **os.environ,
            **gpu_of(place),
            "PACELINE_JOIN": self.address,
            "PACELINE_OF": str(of),
            "PACELINE_DEADLINE_S": str(self.deadline_s),
            SAID: self._said,
        }
        if self.min_workers is not None:
            environment["PACELINE_MIN_WORKERS"] = str(self.min_workers)
        if self.trains:
            environment["PACELINE_OUT"] = str(self.folder.resolve())
        if self.key is not None:
            environment["PACELINE_KEY"] = str(self.key.resolve())
        if self.algorithm is not None:
            environment["PACELINE_ALGORITHM"] = self.algorithm
        # In its own session: Ctrl-C reaches only this process, which ends the workers.
        kept = [self._lock] if self.trains else []
        process = subprocess.Popen(
            [sys.executable, *self.command], env=environment, start_new_session=True, pass_fds=kept
        )
        self._children.append(_Child(process, place))

    def _look(self, of: int) -> None:
        """Reports dead workers, and replaces them if `restarts` allows it."""
        for child in list(self._children):
            code = child.process.poll()
            if child.reported or code is None:
                continue
            child.reported = True
            if code == 0:
                continue
            written = _written(self.folder).get(child.process.pid, {})
            worker_id, algorithm = written.get("worker"), written.get("algorithm")
            who = f"Worker {worker_id}" if worker_id is not None else f"A worker (process {child.process.pid})"
            note = f"{who} {how_ended(code)}."
            if written.get("state") in ("not let in", "not replaced"):
                note = f"{who} could not take a dead one's place: {written['reason']}."
            elif written.get("state") == "excluded":
                note = f"{who} was cut off from the others in {written['reason']}"
            elif code == 2:
                note = f"{who} {how_ended(code)}: see its output."
            is_replaced = algorithm is None or _is_replaced(algorithm_named(algorithm), code, written["state"])
            if self._num_restarted < self.restarts and is_replaced and code not in (2, -signal.SIGINT):
                self._num_restarted += 1
                note += " Another one starts in its place."
                self._start(of)
            self.notes.append(note)
            if code != 2:  # the worker has printed the reason itself
                self.say(note)

    def _end_all(self) -> None:
        running = [child.process for child in self._children if child.process.poll() is None]
        for process in running:
            process.terminate()
        until_s = time.monotonic() + _GRACE_S
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until_s - time.monotonic()))
        for process in running:
            if process.poll() is None:
                process.kill()
                process.wait()

    # The end

    @property
    def failed(self) -> bool:
        """Whether a worker of this machine ended with an error."""
        return any(child.process.returncode != 0 for child in self._children)

    def refused(self, run: RunData | None) -> bool:
        """Whether a usage error, which the user can correct, ended the run."""
        return self._ended_by_refusal and (run is None or run.result["outcome"] == "crashed")

    @property
    def _ended_by_refusal(self) -> bool:
        """Whether some workers ended with a usage error, and all others well."""
        return {2} <= {child.process.returncode for child in self._children} <= {0, 2}

    def _result(self, of: int, interruption: Interruption) -> RunData | None:
        """The run of this machine's workers, from their files.

        None if they refused before the first step: their files are removed.
        """
        written = _written(self.folder)
        own = [written[child.process.pid] for child in self._children if child.process.pid in written]
        events = {one["worker"]: self.folder / f"events-{one['worker']}.jsonl" for one in own}
        records = {worker: read_events(path) for worker, path in events.items() if path.exists()}
        about = {
            "task": name_of(self.command),
            "algorithm": own[0]["algorithm"] if own else self.algorithm,
            "workers": of,
            "backend": "join",
            "seed": 0,
            "command": " ".join(sys.argv),
        }
        why = " ".join(self.notes) or "No worker called paceline.attach."
        result = joined_result(
            about,
            own,
            records,
            gossip=not own or algorithm_named(own[0]["algorithm"]).gossip,
            notes=self.notes,
            restarts=self._num_restarted,
            reason=f"Interrupted by {interruption.name}." if interruption else why,
            failed=self.failed,
            interrupted=bool(interruption),
        )
        if self._ended_by_refusal and not (result["steps"] or (self.folder / "checkpoint").exists()):
            for path in [one for name in _WORKER_FILES for one in self.folder.glob(name)]:
                path.unlink()
            return None
        run = RunData({**about, "join": self.address, "workers_started_here": self.workers}, result, records, [])
        write_run(run, self.folder, title=f"{about['task']}: {about['algorithm']}", command=about["command"])
        missing = [one for one in own if one["state"] == "started" or one["worker"] not in records]
        ended_well = {child.process.pid for child in self._children if child.process.returncode == 0}
        if silent := [one["worker"] for one in missing if one["pid"] in ended_well]:
            error = NotWrittenError(
                f"The measurements of {name_workers(silent)} are missing in {self.folder}, because they could not be "
                "written."
            )
            error.run = run
            raise error
        return run


def _is_replaced(algorithm: Algorithm, code: int, state: str) -> bool:
    """Whether another process may take a worker's place: in rounds, not after an error, which ends the others, too.

    Parts of a placed model end together.
    """
    if trains_in_rounds(algorithm):
        return code < 0 or state in ("not let in", "excluded")
    return not algorithm.same_batches


def _written(folder: Path) -> dict[int, dict[str, Any]]:
    """The workers' state files, by process id."""
    found = [files.read_json(path, {}) for path in folder.glob("worker-*.json")]
    return {one["pid"]: one for one in found}
